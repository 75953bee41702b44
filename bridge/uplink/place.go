package uplink

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// place is what tells the places of a table apart: of IPv4 routes that have the same, the
// first one counts.
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

// goesBy says that a route sends to a link, by one next hop at least. Those by a
// nexthop object are told by what the kernel lists with it.
func goesBy(r *route.Route, link int) bool {
	return r.Link == link || slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return h.Link == link })
}

// goesLike says that two routes are in one place and go the same way.
func goesLike(a, b *route.Route) bool {
	return placeOf(a) == placeOf(b) && a.Link == b.Link && a.Gateway == b.Gateway &&
		slices.EqualFunc(a.Nexthops, b.Nexthops, func(x, y route.Nexthop) bool { return x.Link == y.Link && x.Gateway == y.Gateway })
}

// comesByItself says that a route comes and goes with an address, or with IPv6 itself, and is on
// each link: to the host's own addresses, to broadcast, multicast and link-local ones.
func comesByItself(r *route.Route) bool {
	everywhere := r.Table == route.TableLocal || r.Type == route.Multicast || r.Dst.Addr().Is6() && r.Dst.Addr().IsLinkLocalUnicast()
	return everywhere && r.Protocol == route.ProtocolKernel
}

// comesWith says that a route is the one that the kernel adds with an address.
func comesWith(r *route.Route, a *addr.Address) bool {
	peer := a.Prefix.Addr()
	if a.Peer.IsValid() {
		peer = a.Peer
	}
	metric, source := a.Metric, a.Prefix.Addr() // fib_add_ifaddr() of the kernel
	if a.Prefix.Addr().Is6() {
		source = netip.Addr{}
		if metric == 0 {
			metric = 256 // IP6_RT_PRIO_ADDRCONF
		}
	}
	return a.Flags&addr.NoPrefixRoute == 0 && r.Link == a.Link && r.Protocol == route.ProtocolKernel && !r.Gateway.IsValid() && len(r.Nexthops) == 0 &&
		r.Table == route.TableMain && r.Dst == netip.PrefixFrom(peer, a.Prefix.Bits()).Masked() && r.Priority == metric && r.Source == source
}
