package flows

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Only the flows of UDP are flushed, each to the pod's first address of its family.
func TestFlowsToFlushAreThoseOfThePodsUDPPorts(t *testing.T) {
	t.Parallel()
	address := func(s string) state.Address { return state.Address{Prefix: nstest.Prefix(s)} }
	rec := &state.Attachment{
		Addresses: []state.Address{address("10.1.0.5/24"), address("10.2.0.5/24"), address("fd01::5/64")},
		Published: []state.Published{
			{Protocol: "tcp", HostPort: 80, PodPort: 80},
			{Protocol: "udp", HostPort: 53, PodPort: 5353},
			{Protocol: "udp", HostIP: nstest.Addr("192.0.2.1"), HostPort: 123, PodPort: 123},
		},
	}
	port := netip.MustParseAddrPort
	want := []conntrack.Publication{
		{Proto: 17, Host: netip.AddrPortFrom(netip.Addr{}, 53), Pod: port("10.1.0.5:5353")},
		{Proto: 17, Host: netip.AddrPortFrom(netip.Addr{}, 53), Pod: port("[fd01::5]:5353")},
		{Proto: 17, Host: port("192.0.2.1:123"), Pod: port("10.1.0.5:123")},
	}
	if diff := cmp.Diff(want, publications(rec), cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
		t.Errorf("publications (-want +got):\n%s", diff)
	}
}
