package addr_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func BenchmarkAddRemove(b *testing.B) {
	h := newHost(b)
	for _, prefix := range []string{"10.1.0.1/24", "fd01::1/64"} {
		b.Run(prefix, func(b *testing.B) {
			a := addr.Address{Prefix: nstest.Prefix(prefix), Link: h.eth0, Flags: addr.NoDAD}
			b.ReportAllocs()
			for b.Loop() {
				must.Succeed(b, h.c.Add(a))
				must.Succeed(b, h.c.Remove(a))
			}
		})
	}
}

func BenchmarkEnsureUnchanged(b *testing.B) {
	h := newHost(b)
	for _, prefix := range []string{"10.1.0.1/24", "fd01::1/64"} {
		b.Run(prefix, func(b *testing.B) {
			a := addr.Address{Prefix: nstest.Prefix(prefix), Link: h.eth0, Flags: addr.NoDAD}
			b.ReportAllocs()
			must.Succeed(b, h.c.Add(a))
			for b.Loop() {
				if changed, err := h.c.Ensure(a); changed || err != nil {
					b.Fatal(changed, err)
				}
			}
		})
	}
}

// TestAllocationsOfAMessage keeps what an address costs in a batch of others.
func TestAllocationsOfAMessage(t *testing.T) {
	var b nl.Batch
	a := addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: 7}
	c := nl.New(nltest.NewFake(nltest.AckAll))
	add := func() {
		m, err := a.AddMessage()
		b.Add("add address", &a, m, err)
	}
	add()
	must.Succeed(t, c.Execute(&b))
	got := testing.AllocsPerRun(100, func() {
		b.Reset()
		add()
	})
	if got > 20 {
		t.Errorf("%v allocations, want 20 at most: the library makes one or two for each attribute", got)
	}
}
