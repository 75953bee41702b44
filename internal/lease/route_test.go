package lease

import (
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/route"
)

func TestRoutesOfALeaseNeedNoOtherRoute(t *testing.T) {
	t.Parallel()
	link := route.ScopeLink
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
