package bridge_test

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestSetAliasChangesItsOwnersLinkAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.Alias = "tombolo:1:owner:before"
	attach(t, n, p)
	alias := func() string {
		t.Helper()
		l := must.Of(n.conn.Link(t.Context(), p.Name)).Get(t)
		return l.Alias
	}
	before := must.Of(n.conn.Link(t.Context(), p.Name)).Get(t)
	conn, sent := recorded(t, n)
	for i, requests := range []int{2, 1} { // to look and to change, then to look
		if err := conn.SetAlias(t.Context(), p.Name, "tombolo:1:owner:", "tombolo:1:owner:after"); err != nil || alias() != "tombolo:1:owner:after" {
			t.Errorf("SetAlias: %v; the alias is %q", err, alias())
		}
		got := len(sent.Sent())
		expect.That(t, got == requests, "call %d: %d datagrams, want %d", i+1, got, requests)
	}
	if err := conn.SetAlias(t.Context(), p.Name, "tombolo:1:other:", "tombolo:1:other:x"); !errors.Is(err, bridge.ErrForeign) || alias() != "tombolo:1:owner:after" {
		t.Errorf("of another's link: %v; the alias is %q", err, alias())
	}
	expect.Success(t, conn.SetAlias(t.Context(), "none", "", "x"), "of a link that is gone")
	after, err := n.conn.Link(t.Context(), p.Name)
	expect.That(t, err == nil && after.Master == before.Master && after.Up == before.Up && *after.Port == *before.Port,
		"the link was %+v and is %+v, %v", before, after, err)
}

func TestALinkThatGoesMeanwhileNeedsNoAlias(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	nstest.Run(t, n.ns, "ip", "link", "add", "veth9", "type", "veth", "peer", "name", "veth8")
	for errno, want := range map[unix.Errno]error{unix.ENODEV: nil, unix.EPERM: unix.EPERM} {
		fault := &nltest.Fault{Type: unix.RTM_NEWLINK, Errno: errno}
		conn := faultyConn(t, n, []*nltest.Fault{fault}, nil)
		err := conn.SetAlias(t.Context(), "veth9", "", "x")
		expect.That(t, errors.Is(err, want) && fault.Fired() != 0, "%v, after %d faults: %v", errno, fault.Fired(), err)
	}
}
