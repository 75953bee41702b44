package keeper

import (
	"net/netip"
	"reflect"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/route"
)

// routePlan is what becomes of the host's routes.
type routePlan struct {
	// all are the routes that the host is to have, in an order in which the kernel takes
	// them; set are those of them to be added or replaced; remove are those of before that
	// nothing replaces.
	all, set, remove []lease.HostRoute
}

// planRoutes says what becomes of the routes that came with a lease when another takes its
// place: each goes over to the new address, network and router, and is otherwise the same,
// metric, table and all. present says that the host has the old address, and so, of those
// routes, all that it is meant to have; else all of them are set.
//
// A router that the new lease does not name stays, and so does one that is not the
// lease's: an operator made it.
func planRoutes(had []lease.HostRoute, before, after *dhcpc.Lease, present bool) routePlan {
	var p routePlan
	if len(had) == 0 && !present {
		// The keeper never saw the host with its address.
		p.all = fromLease(after)
		p.set = p.all
		return p
	}
	for _, old := range had {
		now := old
		if now.Source == before.Address.Addr() {
			now.Source = after.Address.Addr()
		}
		if !now.Via.IsValid() && now.Dst == before.Address.Masked() {
			now.Dst = after.Address.Masked()
		}
		from, to := routerOf(before, had), routerOf(after, nil)
		// A router that only the host knew, by an operator's word, is no concern of a server
		// that grants the same network.
		known := routerOf(before, nil).IsValid() || before.Address.Masked() != after.Address.Masked()
		if from.IsValid() && to.IsValid() && known {
			if now.Via == from {
				now.Via = to
			}
			if !now.Via.IsValid() && now.Dst == netip.PrefixFrom(from, from.BitLen()) {
				now.Dst = netip.PrefixFrom(to, to.BitLen())
			}
		}
		p.all = append(p.all, now)
		if !present || !sameRoute(old, now) {
			p.set = append(p.set, now)
		}
		if !sameKey(old, now) {
			p.remove = append(p.remove, old)
		}
	}
	byScope(p.all)
	byScope(p.set)
	p.remove = slices.DeleteFunc(p.remove, func(r lease.HostRoute) bool {
		return slices.ContainsFunc(p.all, func(o lease.HostRoute) bool { return sameKey(r, o) })
	})
	return p
}

// routerOf is the lease's default router or, where the lease tells none, that of the
// default route among some.
func routerOf(l *dhcpc.Lease, routes []lease.HostRoute) netip.Addr {
	for _, r := range l.Routes {
		if r.Dst.Bits() == 0 {
			return r.Via
		}
	}
	for _, r := range routes {
		if r.Dst.Bits() == 0 {
			return r.Via
		}
	}
	return netip.Addr{}
}

// fromLease makes routes as a DHCP client would.
func fromLease(l *dhcpc.Lease) []lease.HostRoute {
	var list []lease.HostRoute
	for _, r := range l.Routes {
		one := lease.HostRoute{Dst: r.Dst, Via: r.Via, Source: l.Address.Addr(), Protocol: uint8(route.ProtocolDHCP), Table: route.TableMain}
		if !r.Via.IsValid() {
			one.Scope = unix.RT_SCOPE_LINK
		}
		list = append(list, one)
	}
	return list
}

// byScope puts what is on the link in front: the kernel takes a route by a router only
// when it knows the way to that.
func byScope(list []lease.HostRoute) {
	slices.SortStableFunc(list, func(a, b lease.HostRoute) int {
		switch {
		case a.Via.IsValid() == b.Via.IsValid():
			return 0
		case b.Via.IsValid():
			return -1
		}
		return 1
	})
}

func sameRoute(a, b lease.HostRoute) bool { return reflect.DeepEqual(a, b) }

// sameKey says whether one route would replace the other.
func sameKey(a, b lease.HostRoute) bool {
	return a.Dst == b.Dst && a.Table == b.Table && a.Metric == b.Metric && a.TOS == b.TOS
}

// goesWith says whether a route of the bridge came with a lease: it is sent from the
// leased address, or a DHCP client made it, or it is the route to the address's network,
// or one that the server told of.
func goesWith(r route.Route, l *dhcpc.Lease) bool {
	if r.Type != route.Unicast || r.Table == route.TableLocal || len(r.Nexthops) > 0 || r.NexthopID != 0 {
		return false
	}
	if r.Source == l.Address.Addr() || r.Protocol == route.ProtocolDHCP {
		return true
	}
	dst := lease.HostRouteOf(r).Dst
	if !r.Gateway.IsValid() && dst == l.Address.Masked() && !r.Source.IsValid() {
		return true
	}
	return slices.ContainsFunc(l.Routes, func(o dhcpc.Route) bool { return o.Dst == dst && o.Via == r.Gateway })
}
