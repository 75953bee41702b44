package lease

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/route"
)

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
		must.Succeed(t, ReplaceOwn(t.Context(), routes, RouteOf(to("0.0.0.0/0", by), link, priority)))
	}
	leads(first, 0, "192.0.2.1")
	leads(second, 0, "192.0.2.2") // the first has it
	leads(second, 7, "192.0.2.2")
	leads(first, 0, "192.0.2.3")
	have := nstest.Run(t, pod, "ip", "-4", "route", "list", "default")
	want := "default via 192.0.2.3 dev first proto 116 onlink \ndefault via 192.0.2.2 dev second proto 116 metric 7 onlink \n"
	expect.Equal(t, have, want)
}
