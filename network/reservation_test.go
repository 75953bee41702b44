package network

import (
	"encoding/json"
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
	want := h.RangeSets()
	var got []ipam.RangeSet
	err = json.Unmarshal([]byte(poolsText(want)), &got)
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" || err != nil {
		t.Errorf("%v, sets (-want +got):\n%s", err, diff)
	}
	expect.Equal(t, poolsText(nil), "", "no sets")
	for _, text := range []string{"x", "{}", `[{"Ranges":[{"Subnet":"10.1.0.0"}]}]`} {
		expect.Failure(t, expect.Err(pools(t.Context(), t.TempDir(), &state.Network{Name: "pods", Pools: text})), "pools of %q", text)
	}
}
