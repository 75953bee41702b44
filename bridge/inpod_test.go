package bridge_test

import (
	"context"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestAttachmentIsSettledLater(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.NoWait = true
	pod, _ := attach(t, n, p)
	for range 2 { // the second has nothing to wait for
		must.Succeed(t, n.conn.Wait(t.Context(), p.Name))
	}
	c := must.Of(addr.Dial(pod)).Get(t)
	defer c.Close()
	list := must.Of(c.List(t.Context(), addr.Filter{})).Get(t)
	found := 0
	for _, a := range list {
		expect.Equal(t, a.Flags&unix.IFA_F_TENTATIVE, 0, "%v is tentative", a)
		if a.Prefix.Addr() == p.Addresses[1].Addr() {
			found++
		}
	}
	expect.Equal(t, found, 1, "the pod has %v, want %v among them", list, p.Addresses[1])
}

func TestWaitForAnAttachmentEndsWithItsContext(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.NoWait, p.DAD = true, true // which takes a second at least
	attach(t, n, p)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect.Is(t, n.conn.Wait(ctx, p.Name), context.Canceled, "Wait")
}

func TestDuplicateIsFoundWhenTheAttachmentIsSettled(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	first, second := port(0), port(1)
	attach(t, n, first)
	second.Addresses[1] = first.Addresses[1]
	second.NoWait, second.DAD = true, true
	attach(t, n, second)
	expect.Is(t, n.conn.Wait(t.Context(), second.Name), addr.ErrDuplicate, "Wait")
}

func TestNobodyWaitsForAPortThatWasDetached(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.NoWait, p.DAD = true, true
	attach(t, n, p)
	must.Succeed(t, n.conn.Detach(t.Context(), p.Name, p.Alias))
	expect.Success(t, n.conn.Wait(t.Context(), p.Name), "Wait")
	// One that is waited for when its connection is closed stays.
	conn := must.Of(bridge.Dial(n.ns)).Get(t)
	must.Succeed(t, expect.Err(conn.Attach(t.Context(), nstest.New(t), p)))
	expect.Success(t, conn.Close())
	expect.That(t, n.has(t, p.Name), "the port is gone")
}
