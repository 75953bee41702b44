package lease

import (
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
