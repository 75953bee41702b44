package network

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
)

func TestWhatTheHostSideOfARecordIs(t *testing.T) {
	t.Parallel()
	on := true
	rec := &state.Attachment{
		Network: "pods", ContainerID: "c1", IfName: "eth0", HostIf: "veth1", Bridge: "cbr0", MTU: 1400, Up: true, Masquerade: true,
		MAC: "02:00:00:00:00:01", HostMAC: "02:00:00:00:00:02",
		Addresses: []ipam.Address{{Prefix: nstest.Prefix("10.61.0.2/24")}, {Prefix: nstest.Prefix("fd61::2/64")}}, Port: state.Port{Hairpin: &on},
	}
	p := portOf(rec)
	if p.Alias != endpoint.AliasOf(rec) || p.MAC.String() != rec.HostMAC || p.PeerMAC.String() != rec.MAC ||
		!p.Hairpin || p.Isolated || p.Down || p.MTU != 1400 || p.Name != "veth1" || p.Peer != "eth0" || p.Bridge != "cbr0" {
		t.Errorf("port is %+v", p)
	}
	ep := endpoint.Of(rec)
	if string(ep.Owner) != rec.Hash() || ep.Network != "pods" || ep.Bridge != "cbr0" || ep.MAC.String() != rec.MAC || !ep.Masquerade {
		t.Errorf("endpoint is %+v", ep)
	}
	if diff := cmp.Diff([]netip.Addr{nstest.Addr("10.61.0.2"), nstest.Addr("fd61::2")}, ep.Addrs, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})); diff != "" {
		t.Errorf("endpoint's addresses (-want +got):\n%s", diff)
	}
	// A record without MACs, as one that never came to its end: nothing is made up.
	if p := portOf(&state.Attachment{}); p.MAC != nil || p.PeerMAC != nil || !p.Down {
		t.Errorf("port of an empty record is %+v", p)
	}
}
