package bridge_test

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// shaped has a port and a link that was made for it.
func shaped(t *testing.T) (*node, bridge.Port) {
	t.Helper()
	n := newNode(t)
	p := port(0)
	attach(t, n, p)
	nstest.Run(t, n.ns, "ip", "link", "add", "ifb-a", "type", "ifb")
	nstest.Run(t, n.ns, "ip", "link", "set", "ifb-a", "alias", p.Alias)
	return n, p
}

// A caller that takes it for gone would forget it.
func TestDetachOfWhatCannotBeLookedAtIsAnError(t *testing.T) {
	t.Parallel()
	n, p := shaped(t)
	fault := &nltest.Fault{Type: unix.RTM_GETLINK, Nth: 1, Errno: unix.ENOBUFS}
	nltest.MustHaveFired(t, fault)
	expect.Is(t, faultyConn(t, n, []*nltest.Fault{fault}, nil).Detach(t.Context(), p.Name, p.Alias, "ifb-a"), unix.ENOBUFS, "Detach")
	expect.That(t, n.has(t, p.Name) && !n.has(t, "ifb-a"),
		"the one that could not be looked at is gone, or the other is left")
}

func (n *node) has(t *testing.T, link string) bool {
	t.Helper()
	_, err := n.conn.Link(t.Context(), link)
	must.That(t, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
	return err == nil
}

func TestDetachDeletesOtherLinksOfThePort(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		before  func(t *testing.T, n *node, p *bridge.Port)
		want    error
		port    bool // is there afterwards
		ifb     bool
		refused *nltest.Fault
	}{
		{name: "both"},
		{name: "the port is gone", before: func(t *testing.T, n *node, p *bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "del", p.Name)
		}},
		{name: "the other is gone", before: func(t *testing.T, n *node, p *bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "del", "ifb-a")
		}},
		{name: "both are gone", before: func(t *testing.T, n *node, p *bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "del", p.Name)
			nstest.Run(t, n.ns, "ip", "link", "del", "ifb-a")
		}},
		{name: "the other is somebody else's", ifb: true, want: bridge.ErrForeign, before: func(t *testing.T, n *node, p *bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "set", "ifb-a", "alias", "theirs")
		}},
		{name: "the port is somebody else's", port: true, want: bridge.ErrForeign, before: func(t *testing.T, n *node, p *bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "alias", "theirs")
		}},
		{name: "they are in groups", before: func(t *testing.T, n *node, p *bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "group", "7")
			nstest.Run(t, n.ns, "ip", "link", "set", "ifb-a", "group", "8")
		}},
		{name: "one goes meanwhile", refused: &nltest.Fault{Type: unix.RTM_NEWLINK, Errno: unix.ENODEV, Times: 1}, port: true},
		{name: "both go meanwhile", refused: &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.ENODEV}, port: true, ifb: true},
		{name: "the kernel refuses", refused: &nltest.Fault{Type: unix.RTM_DELLINK, Errno: unix.EBUSY}, port: true, ifb: true, want: unix.EBUSY},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n, p := shaped(t)
			for i, group := range []string{"0", "7", "8"} {
				name := fmt.Sprint("bystander", i)
				nstest.Run(t, n.ns, "ip", "link", "add", name, "type", "ifb")
				nstest.Run(t, n.ns, "ip", "link", "set", name, "alias", p.Alias, "group", group)
			}
			if tt.before != nil {
				tt.before(t, n, &p)
			}
			conn := n.conn
			if tt.refused != nil {
				conn = faultyConn(t, n, []*nltest.Fault{tt.refused}, nil)
			}
			err := conn.Detach(t.Context(), p.Name, p.Alias, "ifb-a")
			if tt.refused != nil {
				nltest.MustHaveFired(t, tt.refused)
			}
			expect.Is(t, err, tt.want, "Detach")
			if port, ifb := n.has(t, p.Name), n.has(t, "ifb-a"); port != tt.port || ifb != tt.ifb {
				t.Errorf("the port is there: %t, the other link: %t; want %t and %t", port, ifb, tt.port, tt.ifb)
			}
			for i := range 3 {
				expect.That(t, n.has(t, fmt.Sprint("bystander", i)), "bystander%d is gone", i)
			}
		})
	}
}

func TestPortsDetachedAtOnceTakeNobodyElseAlong(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	const ports = 8
	for i := range byte(ports) {
		p := port(i)
		attach(t, n, p)
		nstest.Run(t, n.ns, "ip", "link", "add", fmt.Sprint("ifb-", i), "type", "ifb")
	}
	var group sync.WaitGroup
	for i := range byte(ports - 1) {
		conn := must.Of(bridge.Dial(n.ns)).Get(t)
		defer conn.Close()
		group.Go(func() { expect.Success(t, conn.Detach(t.Context(), port(i).Name, "", fmt.Sprint("ifb-", i))) })
	}
	group.Wait()
	out := nstest.Run(t, n.ns, "ip", "-o", "link", "show", "type", "ifb")
	if n := strings.Count(out, "ifb-"); n != 1 {
		t.Errorf("%d links are left, want one:\n%s", n, out)
	}
	expect.That(t, n.has(t, port(ports-1).Name) && n.has(t, fmt.Sprint("ifb-", ports-1)),
		"the port that was not detached is gone, or its other link:\n%s", out)
}

// A pod cannot send by a port that was set down, whatever it does.
func TestShutSetsOnlyItsOwnPortDown(t *testing.T) {
	t.Parallel()
	n, p := shaped(t)
	up := func() bool { return strings.Contains(nstest.Run(t, n.ns, "ip", "link", "show", "up"), p.Name) }
	if err := n.conn.Shut(t.Context(), p.Name, "theirs"); !errors.Is(err, bridge.ErrForeign) || !up() {
		t.Errorf("another's: %v, and it is up: %t", err, up())
	}
	for range 2 {
		if err := n.conn.Shut(t.Context(), p.Name, p.Alias); err != nil || up() {
			t.Errorf("%v, and it is up: %t", err, up())
		}
	}
	expect.Success(t, n.conn.Shut(t.Context(), "gone", p.Alias), "one that is gone")
}

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
	must.Succeed(t, err)
	before.Alias, before.Port.Alias = after.Alias, after.Alias
	expect.NoDiff(t, cmp.Diff(before, after, cmpopts.IgnoreUnexported(bridge.Link{}, bridge.Port{})), "the link")
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
