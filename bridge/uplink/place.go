package uplink

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// place is what tells the places of a table apart: routes that have the same are
// in a row, of which the first one counts, or for IPv6 several.
type place struct {
	family   uint8
	table    uint32
	dst      netip.Prefix
	from     netip.Prefix
	tos      uint8
	priority uint32
}

func placeOf(r *route.Route) place {
	return place{r.Family, r.Table, r.Dst.Masked(), r.From, r.TOS, r.Priority}
}

// onEachLink says that every link has a route to this destination of its own, so
// that another link's are no rivals.
func onEachLink(r *route.Route) bool { return r.Dst.Addr().IsLinkLocalUnicast() && r.Dst.Addr().Is6() }

// goesBy says that a route sends to a link, by one next hop at least. Those by a
// nexthop object are told by what the kernel lists with it.
func goesBy(r *route.Route, link int) bool {
	return r.Link == link || slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return h.Link == link })
}

// isLocal says that a route comes and goes with an address, or with IPv6 itself: to
// the host's own addresses, to broadcast and to multicast ones.
func isLocal(r *route.Route) bool {
	return r.Table == route.TableLocal && r.Protocol == route.ProtocolKernel
}

// prefixRoute is the route that the kernel adds with an address; false where it adds
// none. Expires is not set.
func prefixRoute(a *addr.Address) (route.Route, bool) {
	peer := a.Prefix.Addr()
	if a.Peer.IsValid() {
		peer = a.Peer
	}
	r := route.Route{Dst: netip.PrefixFrom(peer, a.Prefix.Bits()).Masked(), Link: a.Link, Table: route.TableMain,
		Type: route.Unicast, Protocol: route.ProtocolKernel, Priority: a.Metric, Family: unix.AF_INET}
	if a.Flags&addr.NoPrefixRoute != 0 {
		return r, false
	}
	if a.Prefix.Addr().Is6() {
		r.Family = unix.AF_INET6
		if r.Priority == 0 {
			r.Priority = 256 // IP6_RT_PRIO_ADDRCONF
		}
		return r, true
	}
	// fib_add_ifaddr() of the kernel.
	r.Source = a.Prefix.Addr()
	alone := a.Prefix.IsSingleIP() && !a.Peer.IsValid()
	return r, !alone && a.Flags&addr.Secondary == 0
}

// comesWith says that a route is the one that the kernel adds with an address.
func comesWith(r *route.Route, a *addr.Address) bool {
	own, ok := prefixRoute(a)
	return ok && r.Link == a.Link && r.Protocol == route.ProtocolKernel && !r.Gateway.IsValid() && len(r.Nexthops) == 0 &&
		placeOf(r) == placeOf(&own) && r.Source == own.Source
}

func hasPrefixRoute(a addr.Address) bool {
	_, ok := prefixRoute(&a)
	return ok
}
