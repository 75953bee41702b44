package route_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/mdlayher/netlink"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

func BenchmarkAddRemove(b *testing.B) {
	h := newHost(b)
	for _, r := range []route.Route{
		{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.1.0.1")},
		{Dst: nstest.Prefix("2001:db8::/32"), Gateway: nstest.Addr("fd01::1")},
	} {
		b.Run(r.Dst.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				must.Succeed(b, h.c.Add(b.Context(), r))
				must.Succeed(b, h.c.Remove(b.Context(), r))
			}
		})
	}
}

func BenchmarkGet(b *testing.B) {
	h := newHost(b)
	for _, dst := range []string{"10.1.0.2", "fd01::2"} {
		b.Run(dst, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r, err := h.c.Get(b.Context(), nstest.Addr(dst))
				must.That(b, err == nil && r.Type == unix.RTN_LOCAL, "%v %v", r, err)
			}
		})
	}
}

func BenchmarkEnsureUnchanged(b *testing.B) {
	h := newHost(b)
	r := route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.1.0.1"), Link: h.eth0}
	must.Succeed(b, h.c.Add(b.Context(), r))
	b.ReportAllocs()
	for b.Loop() {
		changed, err := h.c.Ensure(b.Context(), r)
		must.That(b, !changed && err == nil, "%v %v", changed, err)
	}
}

// TestAllocationsOfAMessage keeps what a route costs in a batch of others.
func TestAllocationsOfAMessage(t *testing.T) {
	var b nl.Batch
	r := route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.1.0.1")}
	c := nl.New(nltest.NewFake(nltest.AckAll))
	add(&b, "add route")(r.Message(unix.RTM_NEWROUTE, netlink.Create|netlink.Excl))
	must.Succeed(t, c.Execute(&b))
	got := testing.AllocsPerRun(100, func() {
		b.Reset()
		add(&b, "add route")(r.Message(unix.RTM_NEWROUTE, netlink.Create|netlink.Excl))
	})
	expect.That(t, got <= 24, "%v allocations, want 24 at most: the library makes one or two for each attribute", got)
}
