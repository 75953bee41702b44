package endpoint

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/nft"
)

func attachment() *state.Attachment {
	return &state.Attachment{
		Network: "lan", ContainerID: "c1", IfName: "eth0", HostIf: "veth0", Bridge: "br0", MAC: state.MAC{2, 0, 0, 0, 0, 1},
		Addresses: []ipam.Address{{Prefix: netip.MustParsePrefix("192.0.2.5/24")}, {Prefix: netip.MustParsePrefix("fd00::5/64")}},
		Published: []state.Published{
			{Port: nft.Port{Protocol: nft.TCP, HostPort: 8080, PodPort: 80}},
			{Port: nft.Port{Protocol: nft.UDP, HostAddr: netip.MustParseAddr("192.0.2.1"), HostPort: 53, PodPort: 5353}},
			{Port: nft.Port{Protocol: nft.SCTP, HostPort: 9, PodPort: 9}},
		},
		Masquerade: true, Guard: nft.GuardAddresses,
	}
}

func same(t *testing.T, want, got nft.Endpoint) {
	t.Helper()
	expect.NoDiff(t, cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })))
}

func TestTheFirewallSeesWhatIsOnRecord(t *testing.T) {
	t.Parallel()
	a := attachment()
	want := nft.Endpoint{
		Owner: nft.Owner(a.Hash()), Network: "lan", Bridge: "br0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
		Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.5"), netip.MustParseAddr("fd00::5")},
		Guard: nft.GuardAddresses, GuardedPort: "veth0", Masquerade: true,
		Ports: []nft.Port{
			{Protocol: nft.TCP, HostPort: 8080, PodPort: 80},
			{Protocol: nft.UDP, HostAddr: netip.MustParseAddr("192.0.2.1"), HostPort: 53, PodPort: 5353},
			{Protocol: nft.SCTP, HostPort: 9, PodPort: 9},
		},
	}
	same(t, want, Of(a))
	same(t, want, In(a, &state.Network{Masquerade: true, Guard: true}))
	want.Guard, want.GuardedPort, want.Masquerade = "", "", false
	same(t, want, In(a, &state.Network{}))
	a.Guard, a.Masquerade = "", false
	same(t, want, In(a, &state.Network{Masquerade: true, Guard: true}))
	a.Addresses = nil
	want.Addrs, want.Ports = []netip.Addr{}, nil
	same(t, want, Of(a))
	a.IPAMType, a.Guard = Leased, nft.GuardAddresses
	want.GuardedPort, want.Guard = "veth0", nft.GuardUntrusted
	same(t, want, Of(a))
	a.Addresses = []ipam.Address{{Prefix: netip.MustParsePrefix("fd00::5/64")}}
	want.Addrs, want.Ports = Addresses(a), Ports(a)
	same(t, want, Of(a))
}

func TestAnAliasTellsWhoseAPortIs(t *testing.T) {
	t.Parallel()
	a := attachment()
	if got, want := AliasOf(a), "tombolo:1:"+a.Hash()+":lan:192.0.2.5,fd00::5"; got != want {
		t.Errorf("alias %q, want %q", got, want)
	}
	for range 20 {
		a.Addresses = append(a.Addresses, ipam.Address{Prefix: netip.MustParsePrefix("fd00::1234:5678:9abc:def0/64")})
	}
	a.Network = strings.Repeat("n", 65)
	got := AliasOf(a)
	expect.That(t, strings.HasPrefix(got, AliasOwner(a.Hash())+"#") && strings.HasSuffix(got, ":") && len(got) <= aliasMax,
		"alias of what does not fit: %q", got)
	if a.Network = a.Network[:64]; !strings.HasPrefix(AliasOf(a), AliasOwner(a.Hash())+a.Network+":") {
		t.Errorf("alias of the longest name that fits: %q", AliasOf(a))
	}
}
