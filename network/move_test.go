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
		return &lease.Record{State: lease.Bound, Lease: &dhcpc.Lease{Address: netip.MustParsePrefix(address), Routes: []dhcpc.Route{{Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.9.0.5")}}}}
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
			if got := isNewer(a, tt.lease); got != tt.ahead {
				t.Errorf("ahead: %t", got)
			}
			if got := fmt.Sprint(prefixesOf(leasedAddresses(a, tt.lease))); got != tt.want {
				t.Errorf("it has %s by its lease, want %s", got, tt.want)
			}
		})
	}
	r := bound("10.9.1.1/16")
	if got := leasedAddresses(&state.Attachment{}, r)[0].Gateway; got != netip.MustParseAddr("10.9.0.5") {
		t.Errorf("gateway by the lease: %v", got)
	}
	r.Policy.Gateway = netip.MustParseAddr("10.9.0.7")
	if got := leasedAddresses(&state.Attachment{}, r)[0].Gateway; got != r.Policy.Gateway {
		t.Errorf("gateway by the configuration: %v", got)
	}
}
