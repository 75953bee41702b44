package cni

import (
	"net"
	"net/netip"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/route"
)

// comparable values of netip are compared as such.
func netipValues() cmp.Option { return cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}) }

// addresses are pods' addresses without gateways.
func addresses(prefixes ...string) []state.Address {
	var list []state.Address
	for _, p := range prefixes {
		list = append(list, state.Address{Prefix: netip.MustParsePrefix(p)})
	}
	return list
}

// dualStack is what host-local gives: an address of each family, with gateways.
func dualStack() []state.Address {
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
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, ok := prefixOf(tt.in)
			if ok != (tt.want != "") || ok && got.String() != tt.want {
				t.Errorf("prefixOf(%v) = %v, %t; want %q", tt.in, got, ok, tt.want)
			}
			if back, _ := prefixOf(ipNet(got)); ok && back != got {
				t.Errorf("ipNet gives %v back", back)
			}
		})
	}
}

func TestAddressesComeIPv4First(t *testing.T) {
	t.Parallel()
	res := &current.Result{IPs: []*current.IPConfig{
		{Address: cidr("fd61::2/64"), Gateway: ip("fd61::1")},
		{Address: cidr("10.61.0.2/24"), Gateway: net.ParseIP("10.61.0.1")},
		{Address: cidr("fd62::2/64")},
		{Address: cidr("10.62.0.2/24")},
	}}
	want := addresses("10.61.0.2/24", "10.62.0.2/24", "fd61::2/64", "fd62::2/64")
	want[0].Gateway, want[2].Gateway = netip.MustParseAddr("10.61.0.1"), netip.MustParseAddr("fd61::1")
	got, err := readAddresses(res)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, netipValues()); diff != "" {
		t.Errorf("addresses (-want +got):\n%s", diff)
	}
	leased := []netip.Addr{}
	for _, a := range []string{"fd61::2", "10.61.0.2", "fd62::2", "10.62.0.2"} {
		leased = append(leased, netip.MustParseAddr(a))
	}
	if diff := cmp.Diff(leased, leasedAddresses(res), netipValues()); diff != "" {
		t.Errorf("leased addresses (-want +got):\n%s", diff)
	}
}

func TestAddressesThatAreNone(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		ip   current.IPConfig
		want string
	}{
		{"no mask", current.IPConfig{Address: net.IPNet{IP: ip("10.0.0.1")}},
			"code 6: the ipam's ips[1] is no address with a prefix length: <nil>"},
		{"a gateway of the other family", current.IPConfig{Address: cidr("10.0.0.2/24"), Gateway: ip("fd00::1")},
			"code 7: the ipam's ips[1]: the gateway fd00::1 is not of the family of 10.0.0.2/24"},
		{"the same the other way round", current.IPConfig{Address: cidr("fd00::2/64"), Gateway: ip("10.0.0.1")},
			"code 7: the ipam's ips[1]: the gateway 10.0.0.1 is not of the family of fd00::2/64"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := readAddresses(&current.Result{IPs: []*current.IPConfig{{Address: cidr("10.9.0.2/24")}, &tt.ip}})
			if diff := cmp.Diff(tt.want, describe(err)); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDefaultRoutes(t *testing.T) {
	t.Parallel()
	on, off := settings{IsDefaultGateway: true}, settings{}
	four := &types.Route{Dst: cidr("0.0.0.0/0"), GW: ip("10.61.0.1")}
	six := &types.Route{Dst: cidr("::/0"), GW: ip("fd61::1")}
	given := &types.Route{Dst: cidr("0.0.0.0/0"), GW: ip("10.61.0.9")}
	elsewhere := &types.Route{Dst: cidr("0.0.0.0/0"), GW: ip("10.61.0.9"), Table: current.Int(100)}
	main := &types.Route{Dst: cidr("0.0.0.0/0"), GW: ip("10.61.0.9"), Table: current.Int(254)}
	half := &types.Route{Dst: cidr("0.0.0.0/1")}
	for _, tt := range []struct {
		name      string
		s         settings
		addresses []state.Address
		given     []*types.Route
		want      []*types.Route
	}{
		{"each family that has a gateway", on, dualStack(), nil, []*types.Route{four, six}},
		{"IPv4 alone", on, dualStack()[:1], nil, []*types.Route{four}},
		{"a family without a gateway", on, addresses("10.61.0.2/24"), nil, nil},
		{"the first gateway of a family", on, append(addresses("10.60.0.2/24"), dualStack()...), nil, []*types.Route{four, six}},
		{"not where the ipam gave one", on, dualStack(), []*types.Route{given}, []*types.Route{given, six}},
		{"nor where it named the main table for it", on, dualStack(), []*types.Route{main}, []*types.Route{main, six}},
		{"one of another table is none", on, dualStack()[:1], []*types.Route{elsewhere}, []*types.Route{elsewhere, four}},
		{"half of everything is none", on, dualStack()[:1], []*types.Route{half}, []*types.Route{half, four}},
		{"no default gateway", off, dualStack(), []*types.Route{half}, []*types.Route{half}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			before := append([]*types.Route(nil), tt.given...)
			got := withDefaultRoutes(tt.s, tt.addresses, tt.given)
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("routes (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, tt.given); diff != "" {
				t.Errorf("the ipam's own list was changed: %s", diff)
			}
		})
	}
}

func TestPodRoutes(t *testing.T) {
	t.Parallel()
	scope := func(s route.Scope) *route.Scope { return &s }
	// What every route has, in short.
	to := func(dst, gw string, change func(*route.Route)) route.Route {
		r := route.Route{Dst: netip.MustParsePrefix(dst), Protocol: route.ProtocolTombolo}
		if gw != "" {
			r.Gateway = netip.MustParseAddr(gw)
		}
		if change != nil {
			change(&r)
		}
		return r
	}
	onLink := func(r *route.Route) { r.OnLink = true }
	for _, tt := range []struct {
		name      string
		s         settings
		addresses []state.Address
		given     []*types.Route
		want      []route.Route
	}{
		{"none", settings{}, dualStack(), nil, nil},
		{"default routes", settings{IsDefaultGateway: true}, dualStack(), nil,
			[]route.Route{to("0.0.0.0/0", "10.61.0.1", nil), to("::/0", "fd61::1", nil)}},
		{"without a gateway of its own, by the address's", settings{}, dualStack(),
			[]*types.Route{{Dst: cidr("192.0.2.0/24")}, {Dst: cidr("2001:db8::/32")}},
			[]route.Route{to("192.0.2.0/24", "10.61.0.1", nil), to("2001:db8::/32", "fd61::1", nil)}},
		{"without any gateway", settings{}, addresses("10.61.0.2/24"),
			[]*types.Route{{Dst: cidr("192.0.2.0/24")}}, []route.Route{to("192.0.2.0/24", "", nil)}},
		{"a scope says that there is none", settings{}, dualStack(),
			[]*types.Route{{Dst: cidr("192.0.2.0/24"), Scope: current.Int(253)}},
			[]route.Route{to("192.0.2.0/24", "", func(r *route.Route) { r.Scope = scope(route.ScopeLink) })}},
		{"host bits are dropped", settings{}, dualStack(),
			[]*types.Route{{Dst: cidr("192.0.2.7/24"), GW: net.ParseIP("10.61.0.3")}}, []route.Route{to("192.0.2.0/24", "10.61.0.3", nil)}},
		{"every attribute", settings{}, dualStack(),
			[]*types.Route{{Dst: cidr("192.0.2.0/24"), GW: ip("10.61.0.3"), MTU: 1300, AdvMSS: 1200, Priority: 50, Table: current.Int(100), Scope: current.Int(0)}},
			[]route.Route{to("192.0.2.0/24", "10.61.0.3", func(r *route.Route) {
				r.MTU, r.AdvMSS, r.Priority, r.Table, r.Scope = 1300, 1200, 50, 100, scope(route.ScopeGlobal)
			})}},
		{"a gateway off link", settings{IsDefaultGateway: true},
			[]state.Address{{Prefix: netip.MustParsePrefix("10.61.0.2/32"), Gateway: netip.MustParseAddr("10.99.0.1")}}, nil,
			[]route.Route{to("0.0.0.0/0", "10.99.0.1", onLink)}},
		{"a link-local gateway is on link", settings{},
			dualStack(), []*types.Route{{Dst: cidr("2001:db8::/32"), GW: ip("fe80::1")}}, []route.Route{to("2001:db8::/32", "fe80::1", nil)}},
		{"on link by another route's help", settings{}, dualStack(),
			// The second can be made only after the first.
			[]*types.Route{{Dst: cidr("0.0.0.0/0"), GW: ip("192.0.2.1")}, {Dst: cidr("192.0.2.1/32"), Scope: current.Int(253)}},
			[]route.Route{to("192.0.2.1/32", "", func(r *route.Route) { r.Scope = scope(route.ScopeLink) }), to("0.0.0.0/0", "192.0.2.1", onLink)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := podRoutes(tt.s, tt.addresses, tt.given)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, netipValues(), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("routes (-want +got):\n%s", diff)
			}
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
		{"no destination", types.Route{}, "code 6: the ipam gave a route whose destination is none: <nil>"},
		{"negative mtu", types.Route{Dst: dst, MTU: -1}, "code 7: the route to 192.0.2.0/24: mtu -1 is not within 0 and 4294967295"},
		{"negative advmss", types.Route{Dst: dst, AdvMSS: -1}, "code 7: the route to 192.0.2.0/24: advmss -1 is not within 0 and 4294967295"},
		{"negative priority", types.Route{Dst: dst, Priority: -1}, "code 7: the route to 192.0.2.0/24: priority -1 is not within 0 and 4294967295"},
		{"negative table", types.Route{Dst: dst, Table: current.Int(-1)}, "code 7: the route to 192.0.2.0/24: table -1 is not within 0 and 4294967295"},
		{"table of 33 bits", types.Route{Dst: dst, Table: current.Int(1 << 32)}, "code 7: the route to 192.0.2.0/24: table 4294967296 is not within 0 and 4294967295"},
		{"scope of 9 bits", types.Route{Dst: dst, Scope: current.Int(256)}, "code 7: the route to 192.0.2.0/24: scope 256 is not within 0 and 255"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := podRoutes(settings{}, dualStack(), []*types.Route{&tt.route})
			if diff := cmp.Diff(tt.want, describe(err)); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
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
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			given := *prev
			a := &adding{
				host: &host{call: &call{netns: "/run/netns/p", ifName: "eth0"}, settings: settings{IsDefaultGateway: true}},
				prev: &given, dns: tt.own, rec: &state.Attachment{Addresses: dualStack()},
			}
			got := a.result(&current.Result{Routes: []*types.Route{{Dst: cidr("0.0.0.0/0")}}, DNS: tt.leased},
				&built{bridge: &bridge.Link{Name: "cbr0", MAC: mac}, mtu: 1500},
				&bridge.Attachment{Name: "veth1", MAC: mac, Peer: "eth0", PeerMAC: mac, MTU: 1400})
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
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}
