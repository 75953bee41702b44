package lease

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

func TestPolicySaysWhatAPodGetsOfALease(t *testing.T) {
	t.Parallel()
	address := nstest.Prefixes("192.0.2.9/24")
	fromLease := []dhcpc.Route{to("10.0.0.0/8", "192.0.2.3"), to("0.0.0.0/0", "192.0.2.1")}
	host := netip.MustParseAddr("192.0.2.2")
	for _, tt := range []struct {
		name   string
		policy Policy
		want   Applied
	}{
		{"all of it", Policy{}, Applied{address, fromLease, 1400}},
		{"no default route", Policy{NoDefault: true}, Applied{address, fromLease[:1], 1400}},
		{"out through the host", Policy{Gateway: host},
			Applied{address, []dhcpc.Route{to("0.0.0.0/0", "192.0.2.2")}, 1400}},
		{"out through the host, but where the configuration says otherwise", Policy{Gateway: host, Routes: []dhcpc.Route{to("10.0.0.0/8", "192.0.2.4")}},
			Applied{address, []dhcpc.Route{to("0.0.0.0/0", "192.0.2.2"), to("10.0.0.0/8", "192.0.2.4")}, 1400}},
		{"out through a host that is not on the link", Policy{Gateway: netip.MustParseAddr("169.254.1.1")},
			Applied{address, []dhcpc.Route{to("0.0.0.0/0", "169.254.1.1")}, 1400}},
		{"a gateway, but no default route", Policy{Gateway: host, NoDefault: true}, Applied{address, fromLease[:1], 1400}},
		{"routes of the configuration", Policy{Routes: []dhcpc.Route{to("172.16.0.0/12", ""), to("10.0.0.0/8", "192.0.2.4")}},
			Applied{address, append(fromLease[:2:2], to("172.16.0.0/12", "")), 1400}},
		{"a pod with IPv6", Policy{IPv6: true}, Applied{address, fromLease, 1400}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := sampleLease()
			l.Routes = fromLease
			same(t, tt.want, tt.policy.Apply(l))
			same(t, []dhcpc.Route{to("10.0.0.0/8", "192.0.2.3"), to("0.0.0.0/0", "192.0.2.1")}, l.Routes)
		})
	}
}

func TestTooSmallAnMTUForIPv6IsRaised(t *testing.T) {
	l := sampleLease()
	l.MTU = 1279
	expect.Equal(t, (&Policy{IPv6: true}).Apply(l).MTU, 1280)
	expect.Equal(t, (&Policy{}).Apply(l).MTU, 1279, "without IPv6")
}

func TestOfRoutesThatAreThereAPodGetsNoSecond(t *testing.T) {
	t.Parallel()
	l := sampleLease()
	l.Routes = []dhcpc.Route{
		to("192.0.2.0/24", ""), to("192.0.2.0/24", "192.0.2.66"), to("10.0.0.0/8", "192.0.2.3"), to("10.0.0.0/8", "192.0.2.4"),
		to("192.0.2.0/25", "192.0.2.5"), to("0.0.0.0/0", "192.0.2.1"),
	}
	want := []dhcpc.Route{l.Routes[2], l.Routes[4], l.Routes[5]}
	got := (&Policy{}).Apply(l).Routes
	expect.That(t, slices.Equal(got, want), "routes %v, want %v", got, want)
}

// A server that wants what pods send for itself.
func TestRoutesOfALeaseDoNotMakeUpADefaultRoute(t *testing.T) {
	t.Parallel()
	host := netip.MustParseAddr("192.0.2.2")
	viaHost := to("0.0.0.0/0", "192.0.2.2")
	for name, routes := range map[string][]dhcpc.Route{
		"halves":   {to("0.0.0.0/1", "192.0.2.66"), to("128.0.0.0/1", "192.0.2.66")},
		"quarters": {to("0.0.0.0/2", ""), to("64.0.0.0/2", ""), to("128.0.0.0/2", ""), to("192.0.0.0/2", "")},
		"sevenths": {to("2.0.0.0/7", "192.0.2.66"), to("126.0.0.0/7", "192.0.2.66")},
	} {
		t.Run(name, func(t *testing.T) {
			l := sampleLease()
			l.Routes = routes
			for _, tt := range []struct {
				policy Policy
				want   []dhcpc.Route
			}{
				{Policy{}, routes}, // without a word about the default route, the server has it
				{Policy{NoDefault: true}, nil},
				{Policy{Gateway: host}, []dhcpc.Route{viaHost}},
			} {
				got := tt.policy.Apply(l).Routes
				expect.That(t, slices.Equal(got, tt.want), "with %+v: %v, want %v", tt.policy, got, tt.want)
			}
		})
	}
	// Nor does one take the way to the host, or to what the host serves.
	l := sampleLease()
	l.Routes = []dhcpc.Route{to("192.0.2.2/32", "192.0.2.66"), to("10.96.0.0/12", "192.0.2.66")}
	got := (&Policy{Gateway: host}).Apply(l).Routes
	expect.That(t, slices.Equal(got, []dhcpc.Route{viaHost}), "routes %v", got)
}

func TestWithoutIsWhatHasToGo(t *testing.T) {
	t.Parallel()
	old := Applied{nstest.Prefixes("192.0.2.9/24"), []dhcpc.Route{to("0.0.0.0/0", "192.0.2.1"), to("10.0.0.0/8", "")}, 1400}
	next := Applied{nstest.Prefixes("192.0.2.10/24"), []dhcpc.Route{to("0.0.0.0/0", "192.0.2.2"), to("10.0.0.0/8", "")}, 1500}
	same(t, Applied{Addresses: old.Addresses, Routes: []dhcpc.Route{to("0.0.0.0/0", "192.0.2.1")}}, old.Without(next))
	rest := old.Without(old)
	expect.That(t, rest.Empty(), "of the same: %+v", rest)
}

func TestRoutesOfALeaseNeedNoOtherRoute(t *testing.T) {
	t.Parallel()
	link := uint8(unix.RT_SCOPE_LINK)
	for _, tt := range []struct {
		name string
		got  route.Route
		want route.Route
	}{
		{"by a router", RouteOf(to("0.0.0.0/0", "192.0.2.1"), 7, 50), route.Route{
			Dst: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("192.0.2.1"), Link: 7, OnLink: true, Priority: 50, Protocol: route.ProtocolTombolo}},
		{"on the link", RouteOf(to("192.0.2.1/32", ""), 7, 0), route.Route{
			Dst: netip.MustParsePrefix("192.0.2.1/32"), Link: 7, Scope: &link, Protocol: route.ProtocolTombolo}},
	} {
		t.Run(tt.name, func(t *testing.T) { same(t, tt.want, tt.got) })
	}
}

func TestARouteOfAnotherLinkIsLeftAlone(t *testing.T) {
	t.Parallel()
	pod, other := nstest.Pair(t)
	first, _ := nstest.Veth(t, pod, "first", other, "first")
	second, _ := nstest.Veth(t, pod, "second", other, "second")
	for _, name := range []string{"first", "second"} {
		nstest.Run(t, pod, "ip", "link", "set", name, "up")
	}
	routes := must.Of(route.Dial(pod)).Get(t)
	defer routes.Close()
	leads := func(link, priority int, by string) {
		t.Helper()
		set := ReplaceOwn([]dhcpc.Route{to("0.0.0.0/0", "192.0.2.1")})
		must.Succeed(t, set(t.Context(), routes, RouteOf(to("0.0.0.0/0", by), link, priority)))
	}
	leads(first, 0, "192.0.2.1")
	leads(second, 0, "192.0.2.2") // the first has it
	leads(second, 7, "192.0.2.2")
	leads(first, 0, "192.0.2.3")
	leads(first, 0, "192.0.2.4") // the pod's owner may have made it lead by 192.0.2.3
	have := nstest.Run(t, pod, "ip", "-4", "route", "list", "default")
	want := "default via 192.0.2.3 dev first proto 116 onlink \ndefault via 192.0.2.2 dev second proto 116 metric 7 onlink \n"
	expect.Equal(t, have, want)
}
