package recorded

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/state"
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
	if err != nil {
		t.Fatal(err)
	}
	want := h.RangeSets()
	got, err := ParsePools(PoolsText(want))
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" || err != nil {
		t.Errorf("%v, sets (-want +got):\n%s", err, diff)
	}
	if text := PoolsText(nil); text != "" {
		t.Errorf("no sets: %q", text)
	}
	for _, text := range []string{"x", "10.1.0.0/24 10.1.0.1 10.1.0.254,;", "10.1.0.0/24 10.1.0.1 10.1.0.254 x,;", "10.1.0.0 10.1.0.1 10.1.0.254 10.1.0.1,;"} {
		if list, err := ParsePools(text); err == nil {
			t.Errorf("%q: %v", text, list)
		}
		if _, err := Pools(t.Context(), t.TempDir(), &state.Network{Name: "pods", Pools: text}); err == nil {
			t.Errorf("pools of %q", text)
		}
	}
}

func FuzzParsePools(f *testing.F) {
	f.Add("10.1.0.0/24 10.1.0.1 10.1.0.254 10.1.0.1,;")
	f.Fuzz(func(t *testing.T, text string) {
		sets, err := ParsePools(text)
		if err != nil {
			return
		}
		again, err := ParsePools(PoolsText(sets))
		if diff := cmp.Diff(sets, again, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" || err != nil {
			t.Errorf("%q: %v, sets (-want +got):\n%s", text, err, diff)
		}
		_, _ = ipam.NewHostLocal(&ipam.Config{Network: "pods", Ranges: sets})
	})
}
