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

// Delegated is the route by which a delegated prefix is unreachable, except where the pod has routes of its own
// to parts of it. Without it, packets to an unused part would go back and forth between the pod and the LAN's
// router (RFC 7084, section 4.3, WPD-5). The kernel accepts no lifetime for such a route (Linux 6.18), and keeps
// it when the pod's interface goes.
func Delegated(p netip.Prefix) route.Route {
	const least = math.MaxUint32 // any other route to the prefix is preferred
	return route.Route{Dst: p, Type: route.Unreachable, Priority: least, Protocol: route.ProtocolTombolo}
}
