package lease

import (
	"math"
	"net/netip"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/route"
)

// RouteOf is a route of a lease as the pod gets it, by the plugin and by the keeper: on
// a link, with a metric. Its router need not be in any prefix of the link's.
func RouteOf(r dhcpc.Route, link, priority int) route.Route {
	one := route.Route{Dst: r.Dst, Gateway: r.Via, Link: link, Priority: uint32(priority), Protocol: route.ProtocolTombolo}
	if r.Via.IsValid() {
		one.OnLink = true
		return one
	}
	scope := route.ScopeLink
	one.Scope = &scope
	return one
}

// Delegated is the route to a delegated prefix: none, but for what the pod makes of it. Else what is for an
// unused part of it would go to the LAN's router and come back, to and fro (RFC 7084, section 4.3, WPD-5). The
// kernel takes no end of time for such a route (Linux 6.18), and keeps it without the pod's interface.
func Delegated(p netip.Prefix) route.Route {
	const least = math.MaxUint32 // others to the same prefix come before
	return route.Route{Dst: p, Type: route.Unreachable, Priority: least, Protocol: route.ProtocolTombolo}
}
