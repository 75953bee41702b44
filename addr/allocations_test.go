package addr_test

import (
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// TestAllocationsOfAMessage keeps what an address costs in a batch of others.
func TestAllocationsOfAMessage(t *testing.T) {
	var b nl.Batch
	a := addr.Address{Prefix: nstest.Prefix("10.1.0.1/24"), Link: 7}
	c := nl.New(nltest.NewFake(nltest.AckAll))
	add := func() {
		m, err := a.Message(unix.RTM_NEWADDR, netlink.Create|netlink.Excl)
		b.Add("add address", &a, m, err)
	}
	add()
	must.Succeed(t, c.Execute(&b))
	got := testing.AllocsPerRun(100, func() {
		b.Reset()
		add()
	})
	expect.That(t, got <= 20, "%v allocations, want 20 at most: the library makes one or two for each attribute", got)
}
