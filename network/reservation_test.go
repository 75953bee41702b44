package network

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
)

func TestRangesComeBackFromARecord(t *testing.T) {
	t.Parallel()
	given := []ipam.RangeSet{
		{Ranges: []ipam.Range{
			{Subnet: nstest.Prefix("10.1.0.0/24"), RangeStart: nstest.Addr("10.1.0.9"), RangeEnd: nstest.Addr("10.1.0.20")},
			{Subnet: nstest.Prefix("10.2.0.0/24"), Gateway: nstest.Addr("10.9.9.9")},
		}},
		{Ranges: []ipam.Range{{Subnet: nstest.Prefix("fd01::/64")}}},
	}
	h, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Ranges: given})
	must.Succeed(t, err)
	want := &state.Network{Name: "pods", Pools: h.RangeSets()}
	dir, err := state.Open(t.TempDir())
	must.Succeed(t, err)
	must.Succeed(t, dir.SaveNetwork(want))
	got, err := dir.LoadNetwork("pods")
	must.Succeed(t, err)
	expect.NoDiff(t, cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})))
	expect.Equal(t, samePools(want, got), true, "they are the same")
	want.Pools[0].Ranges[1].Gateway = netip.Addr{}
	expect.Equal(t, samePools(want, got), false, "without a gateway they are the same")
}
