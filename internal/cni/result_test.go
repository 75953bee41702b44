package cni

import (
	"encoding/json"
	"net"
	"net/netip"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/route"
)

// comparable values of netip are compared as such.
func netipValues() cmp.Option { return cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}) }

// addresses are pods' addresses without gateways.
func addresses(prefixes ...string) []ipam.Address {
	var list []ipam.Address
	for _, p := range prefixes {
		list = append(list, ipam.Address{Prefix: netip.MustParsePrefix(p)})
	}
	return list
}

// dualStack is what host-local gives: an address of each family, with gateways.
func dualStack() []ipam.Address {
	list := addresses("10.61.0.2/24", "fd61::2/64")
	list[0].Gateway, list[1].Gateway = netip.MustParseAddr("10.61.0.1"), netip.MustParseAddr("fd61::1")
	return list
}

// cidr keeps the host bits, as results do.
func cidr(s string) net.IPNet { return ipNet(netip.MustParsePrefix(s)) }

func ip(s string) net.IP { return netip.MustParseAddr(s).AsSlice() }

func TestPrefixOf(t *testing.T) {
	t.Parallel()
	mapped := net.ParseIP("10.0.0.1") // 16 bytes long
	for _, tt := range []struct {
		name string
		in   net.IPNet
		want string // empty: refused
	}{
		{"IPv4", net.IPNet{IP: mapped.To4(), Mask: net.CIDRMask(24, 32)}, "10.0.0.1/24"},
		{"IPv4 in 16 bytes", net.IPNet{IP: mapped, Mask: net.CIDRMask(24, 32)}, "10.0.0.1/24"},
		{"IPv4 in 16 bytes, the mask as well", net.IPNet{IP: mapped, Mask: net.CIDRMask(120, 128)}, "10.0.0.1/24"},
		{"IPv6", net.IPNet{IP: net.ParseIP("fd00::1"), Mask: net.CIDRMask(64, 128)}, "fd00::1/64"},
		{"default", net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, "0.0.0.0/0"},

		{"nothing", net.IPNet{}, ""},
		{"no mask", net.IPNet{IP: mapped}, ""},
		{"no address", net.IPNet{Mask: net.CIDRMask(24, 32)}, ""},
		{"an address of 5 bytes", net.IPNet{IP: make(net.IP, 5), Mask: net.CIDRMask(24, 32)}, ""},
		{"a mask with holes", net.IPNet{IP: mapped.To4(), Mask: net.IPv4Mask(255, 0, 255, 0)}, ""},
		{"IPv4 with a mask wider than IPv4", net.IPNet{IP: mapped, Mask: net.CIDRMask(64, 128)}, ""},
		{"IPv6 with a mask of IPv4", net.IPNet{IP: net.ParseIP("fd00::1"), Mask: net.CIDRMask(24, 32)}, ""},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			got, ok := prefixOf(tt.in)
			if ok != (tt.want != "") || ok && got.String() != tt.want {
				t.Errorf("prefixOf(%v) = %v, %t; want %q", tt.in, got, ok, tt.want)
			}
			back, _ := prefixOf(ipNet(got))
			expect.That(t, !ok || back == got, "ipNet gives %v back", back)
		})
	}
}

func TestPodRoutesRefuseWhatTheKernelWouldTakeForAnother(t *testing.T) {
	t.Parallel()
	dst := cidr("192.0.2.0/24")
	for _, tt := range []struct {
		name  string
		route types.Route
		want  string
	}{
		{"no destination", types.Route{}, "code 6: the ipam gave a route without a valid destination: <nil>"},
		{"negative mtu", types.Route{Dst: dst, MTU: -1}, "code 7: the route to 192.0.2.0/24: mtu -1 is not within 0 and 4294967295"},
		{"negative advmss", types.Route{Dst: dst, AdvMSS: -1}, "code 7: the route to 192.0.2.0/24: advmss -1 is not within 0 and 4294967295"},
		{"negative priority", types.Route{Dst: dst, Priority: -1}, "code 7: the route to 192.0.2.0/24: priority -1 is not within 0 and 4294967295"},
		{"negative table", types.Route{Dst: dst, Table: current.Int(-1)}, "code 7: the route to 192.0.2.0/24: table -1 is not within 0 and 4294967295"},
		{"table of 33 bits", types.Route{Dst: dst, Table: current.Int(1 << 32)}, "code 7: the route to 192.0.2.0/24: table 4294967296 is not within 0 and 4294967295"},
		{"scope of 9 bits", types.Route{Dst: dst, Scope: current.Int(256)}, "code 7: the route to 192.0.2.0/24: scope 256 is not within 0 and 255"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			_, err := routesOf([]*types.Route{&tt.route})
			expect.NoDiff(t, cmp.Diff(tt.want, describe(err)), "error")
		})
	}
}

// An ADD in the middle of a chain passes on what came before it.
func TestResultFollowsThatOfThePluginsBefore(t *testing.T) {
	t.Parallel()
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	prev := &current.Result{
		Interfaces: []*current.Interface{{Name: "tap0"}},
		IPs:        []*current.IPConfig{{Address: cidr("192.0.2.2/24"), Interface: current.Int(0)}},
		Routes:     []*types.Route{{Dst: cidr("198.51.100.0/24")}},
		DNS:        types.DNS{Domain: "before"},
	}
	for _, tt := range []struct {
		name      string
		own       types.DNS // the configuration's
		leased    types.DNS // the ipam's
		wantAfter types.DNS
	}{
		{"the configuration's DNS first", types.DNS{Domain: "own"}, types.DNS{Domain: "leased"}, types.DNS{Domain: "own"}},
		{"then that of the ipam", types.DNS{}, types.DNS{Domain: "leased"}, types.DNS{Domain: "leased"}},
		{"else that of before", types.DNS{}, types.DNS{}, types.DNS{Domain: "before"}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			given := *prev
			c := &call{netns: "/run/netns/p", ifName: "eth0"}
			got := c.result(&addRequest{prev: &given, dns: tt.own}, &allocator{ipamSection: &ipamSection{dns: tt.leased}}, &network.Attachment{
				Key: network.Key{IfName: "eth0"}, Bridge: "cbr0", BridgeMAC: mac, BridgeMTU: 1500,
				Port: "veth1", PortMAC: mac, MTU: 1400, MAC: mac, PodMTU: 1400, Addresses: dualStack(),
				Routes: []route.Route{
					{Dst: netip.MustParsePrefix("0.0.0.0/0")}, {Dst: netip.MustParsePrefix("::/0"), Gateway: netip.MustParseAddr("fd61::1")},
				},
			})
			want := &current.Result{
				CNIVersion: "1.1.0",
				Interfaces: []*current.Interface{
					{Name: "tap0"},
					{Name: "cbr0", Mac: mac.String(), Mtu: 1500},
					{Name: "veth1", Mac: mac.String(), Mtu: 1400},
					{Name: "eth0", Mac: mac.String(), Mtu: 1400, Sandbox: "/run/netns/p"},
				},
				IPs: []*current.IPConfig{
					{Address: cidr("192.0.2.2/24"), Interface: current.Int(0)},
					{Address: cidr("10.61.0.2/24"), Gateway: ip("10.61.0.1"), Interface: current.Int(3)},
					{Address: cidr("fd61::2/64"), Gateway: ip("fd61::1"), Interface: current.Int(3)},
				},
				Routes: []*types.Route{
					{Dst: cidr("198.51.100.0/24")}, {Dst: cidr("0.0.0.0/0")}, {Dst: cidr("::/0"), GW: ip("fd61::1")},
				},
				DNS: tt.wantAfter,
			}
			expect.NoDiff(t, cmp.Diff(want, got), "result")
		})
	}
}

func TestResultsAreWrittenAsTheLibraryWritesThem(t *testing.T) {
	t.Parallel()
	one, two := 1, 254
	_, dst4, _ := net.ParseCIDR("10.0.0.0/8")
	_, dst6, _ := net.ParseCIDR("::/0")
	cases := map[string]*current.Result{
		"empty": {CNIVersion: "1.1.0"},
		"full": {
			CNIVersion: "1.1.0",
			Interfaces: []*current.Interface{
				{Name: "cbr0", Mac: "02:00:00:00:00:01", Mtu: 1450},
				{Name: "eth0", Mac: "02:00:00:00:00:02", Mtu: 1450, Sandbox: "/run/netns/a\"b\\c\x01é"},
				{Name: "vhost0", SocketPath: "/run/x.sock", PciID: "0000:00:1f.6"},
			},
			IPs: []*current.IPConfig{
				{Interface: &one, Address: net.IPNet{IP: net.IP{10, 0, 0, 5}, Mask: net.CIDRMask(16, 32)}, Gateway: net.IP{10, 0, 0, 1}},
				{Address: net.IPNet{IP: net.ParseIP("fd00::5"), Mask: net.CIDRMask(64, 128)}},
			},
			Routes: []*types.Route{
				{Dst: *dst4, GW: net.IP{10, 0, 0, 1}, MTU: 1300, AdvMSS: 1200, Priority: 5, Table: &two, Scope: &one},
				{Dst: *dst6},
			},
			DNS: types.DNS{Nameservers: []string{"10.0.0.2", "fd00::2"}, Domain: "example", Search: []string{"a", "b"}, Options: []string{"ndots:5"}},
		},
		"part of DNS": {CNIVersion: "1.0.0", DNS: types.DNS{Search: []string{"a"}}},
	}
	for name, r := range cases {
		nstest.RunParallel(t, name, func(t *testing.T) {
			want, err := json.Marshal(r)
			must.Succeed(t, err)
			got := encodeResult(r)
			expect.Equal(t, cmp.Diff(decodeAny(t, want), decodeAny(t, got)), "", "(-library +ours)")
		})
	}
}

func decodeAny(t *testing.T, data []byte) (v any) {
	t.Helper()
	must.Succeed(t, json.Unmarshal(data, &v), "%s", data)
	return v
}
