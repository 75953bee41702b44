package network

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

func TestWhatAnAttachmentHasByItsLease(t *testing.T) {
	t.Parallel()
	const v6 = "fd00::5/64"
	bound := func(address string) *lease.Record {
		return &lease.Record{State: lease.Bound, Lease: &dhcpc.Lease{Address: netip.MustParsePrefix(address), Routers: []netip.Addr{netip.MustParseAddr("10.9.0.5")}}}
	}
	for _, tt := range []struct {
		name   string
		has    []string
		moving bool
		lease  *lease.Record
		ahead  bool
		want   string
	}{
		{"as it was", []string{"10.9.1.1/16"}, false, bound("10.9.1.1/16"), false, "[10.9.1.1/16]"},
		{"another address", []string{"10.9.1.1/16"}, false, bound("10.9.2.1/16"), true, "[10.9.2.1/16]"},
		{"another prefix", []string{"10.9.1.1/16"}, false, bound("10.9.1.1/24"), true, "[10.9.1.1/24]"},
		{"addresses of IPv6 stay", []string{"10.9.1.1/16", v6}, false, bound("10.9.2.1/16"), true, "[10.9.2.1/16 " + v6 + "]"},
		{"with IPv6, as it was", []string{"10.9.1.1/16", v6}, false, bound("10.9.1.1/16"), false, "[10.9.1.1/16 " + v6 + "]"},
		{"cut short", []string{"10.9.2.1/16", v6, "10.9.1.1/16"}, true, bound("10.9.2.1/16"), true, "[10.9.2.1/16 " + v6 + "]"},
		{"cut short, and back", []string{"10.9.2.1/16", "10.9.1.1/16"}, true, bound("10.9.1.1/16"), true, "[10.9.1.1/16]"},
		{"cut short with nothing to go", []string{"10.9.1.1/16"}, true, bound("10.9.1.1/16"), true, "[10.9.1.1/16]"},
		{"lost", []string{"10.9.1.1/16", v6}, false, &lease.Record{State: lease.Expired}, true, "[" + v6 + "]"},
		{"lost before", nil, false, &lease.Record{State: lease.Expired}, false, "[]"},
		{"got again", nil, false, bound("10.9.1.1/16"), true, "[10.9.1.1/16]"},
		{"being added", []string{"10.9.1.1/16"}, false, &lease.Record{State: lease.Adding}, false, "[]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a := &state.Attachment{Moving: tt.moving}
			for _, p := range tt.has {
				a.Addresses = append(a.Addresses, ipam.Address{Prefix: netip.MustParsePrefix(p)})
			}
			if got := isAhead(a, tt.lease); got != tt.ahead {
				t.Errorf("ahead: %t", got)
			}
			if got := fmt.Sprint(prefixesOf(leased(a, tt.lease))); got != tt.want {
				t.Errorf("it has %s by its lease, want %s", got, tt.want)
			}
		})
	}
	r := bound("10.9.1.1/16")
	if got := leased(&state.Attachment{}, r)[0].Gateway; got != netip.MustParseAddr("10.9.0.5") {
		t.Errorf("gateway by the lease: %v", got)
	}
	r.Policy.Gateway = netip.MustParseAddr("10.9.0.7")
	if got := leased(&state.Attachment{}, r)[0].Gateway; got != r.Policy.Gateway {
		t.Errorf("gateway by the configuration: %v", got)
	}
}
func TestAMovedAddressKeepsItsWayOut(t *testing.T) {
	t.Parallel()
	host := netip.MustParseAddr("10.0.0.6")
	old := netip.MustParsePrefix("10.0.0.9/24")
	a := &state.Attachment{
		Addresses:    []ipam.Address{{Prefix: old}, {Prefix: netip.MustParsePrefix("fd00::9/64")}},
		HostGateways: map[netip.Prefix]netip.Addr{old: host},
	}
	r := &lease.Record{State: lease.Bound, Lease: &dhcpc.Lease{Address: netip.MustParsePrefix("10.0.0.10/24")}}
	next := moved(a, r)
	got := next.Addresses
	if len(got) != 2 || got[0].Prefix != r.Lease.Address || next.HostGateways[r.Lease.Address] != host || a.HostGateways[old] != host {
		t.Errorf("the addresses are %+v by %+v, want %s", got, next.HostGateways, host)
	}
}
