package network

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/route"
)

// routesFor gives the routes of a pod as its kernel gets them. One that names no gateway goes by that
// of an address, unless its scope says that it has none. Those that lead to a gateway come last,
// since others may lead to that.
func routesFor(addresses []ipam.Address, asked []route.Route) []route.Route {
	var direct, led []route.Route
	for _, r := range asked {
		r.Dst, r.Protocol = r.Dst.Masked(), route.ProtocolTombolo
		if !r.Gateway.IsValid() && r.Scope == nil {
			r.Gateway = gatewayFor(r.Dst.Addr(), addresses)
		}
		if !r.Gateway.IsValid() {
			direct = append(direct, r)
			continue
		}
		r.OnLink = !reachable(r.Gateway, addresses)
		led = append(led, r)
	}
	return append(direct, led...)
}

// withDefaults adds, if that is wanted, a default route for each family that has a gateway and for
// which there is none. The list stays the caller's.
func withDefaults(wanted bool, addresses []ipam.Address, routes []route.Route) []route.Route {
	if !wanted {
		return routes
	}
	list := append([]route.Route(nil), routes...)
	for _, a := range addresses {
		if a.Gateway.IsValid() && !hasDefault(list, a.Gateway) {
			list = append(list, defaultBy(a.Gateway))
		}
	}
	return list
}

// hasDefault says whether a default route is among them, of an address's family.
func hasDefault(routes []route.Route, of netip.Addr) bool {
	return slices.ContainsFunc(routes, func(r route.Route) bool { return isDefault(&r) && r.Dst.Addr().Is4() == of.Is4() })
}

// defaultBy is the default route by a gateway.
func defaultBy(gateway netip.Addr) route.Route {
	everything, _ := gateway.Prefix(0)
	return route.Route{Dst: everything, Gateway: gateway}
}

// gatewayFor gives the first gateway of an address's family.
func gatewayFor(dst netip.Addr, addresses []ipam.Address) netip.Addr {
	for _, a := range addresses {
		if a.Gateway.IsValid() && a.Gateway.Is4() == dst.Is4() {
			return a.Gateway
		}
	}
	return netip.Addr{}
}

// reachable says whether a gateway is on link by one of the addresses' prefixes. Of link-local
// gateways only IPv6's always are, since its interfaces have a prefix for them.
func reachable(gateway netip.Addr, addresses []ipam.Address) bool {
	return gateway.Is6() && gateway.IsLinkLocalUnicast() ||
		slices.ContainsFunc(addresses, func(a ipam.Address) bool { return a.Prefix.Contains(gateway) })
}
