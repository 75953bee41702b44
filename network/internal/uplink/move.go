package uplink

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/route"
)

// move plans how to move all layer 3 settings from one link to another: from the NIC to the bridge, or back. A killed
// process may have made some requests already. move leaves these out, or repeats them without harm.
type move struct {
	s        *snapshot
	from, to link.Info
}

// words returns the description of an object for the operator. It names the two links instead of giving their
// numbers.
func (m *move) words(obj fmt.Stringer) string {
	text := obj.String() + " "
	for _, l := range []link.Info{m.from, m.to} {
		text = strings.ReplaceAll(text, fmt.Sprintf(" on link %d ", l.Index), " dev "+l.Name+" ")
	}
	return strings.TrimSuffix(text, " ")
}

// addresses returns the addresses to move. It leaves out an address that another host has too (DADFAILED), since such
// an address is useless on either link.
func (m *move) addresses() []addr.Address {
	var list []addr.Address
	for _, a := range m.s.Addresses {
		if a.Link == m.from.Index && a.Flags&unix.IFA_F_DADFAILED == 0 {
			list = append(list, a)
		}
	}
	return list
}

// inOrder returns the addresses in the order in which they must be added, IPv4 first. The kernel lists a new IPv6
// address before the others, so adding them in reverse order preserves the order of the listing.
func inOrder(list []addr.Address) []addr.Address {
	if first6 := slices.IndexFunc(list, func(a addr.Address) bool { return a.Prefix.Addr().Is6() }); first6 >= 0 {
		slices.Reverse(list[first6:])
	}
	return list
}

// movedAddress returns the address for the other link. A label such as eth0:1 becomes br0:1. A label equal to the
// link's name is left out, since it is the kernel's default.
func (m *move) movedAddress(a addr.Address) addr.Address {
	a.Link = m.to.Index
	if rest, ok := strings.CutPrefix(a.Label, m.from.Name); ok {
		a.Label = m.to.Name + rest
		if rest == "" || len(a.Label) > 15 {
			a.Label = ""
		}
	}
	return a
}

func (m *move) addAddresses() []request {
	var list []request
	for _, a := range inOrder(m.addresses()) {
		n := m.movedAddress(a)
		if a.Prefix.Addr().Is6() {
			n.Flags |= unix.IFA_F_NODAD // skip duplicate address detection: the address was ours on the other link
		}
		if have := m.s.address(m.to.Index, a); have != nil {
			// The link already has the address. Keep its flag, which shows whether the address has a subnet route.
			// Without the flag, the kernel would add the route.
			n.Flags = n.Flags&^unix.IFA_F_NOPREFIXROUTE | have.Flags&unix.IFA_F_NOPREFIXROUTE
		}
		list = append(list, newRequest("add "+m.words(n), "replace address", n, unix.RTM_NEWADDR, replace, nil))
	}

	return list
}

// restoreAddressFlags sets the original flags of moved IPv6 addresses. addAddresses changed some flags so that the
// addresses were usable at once.
func (m *move) restoreAddressFlags() []request {
	var list []request
	for _, a := range m.addresses() {
		have := m.s.address(m.to.Index, a)
		if a.Prefix.Addr().Is6() && have != nil &&
			(have.Flags^a.Flags)&(unix.IFA_F_NODAD|unix.IFA_F_NOPREFIXROUTE) != 0 {
			n := m.movedAddress(a)
			list = append(list, newRequest("make "+m.words(n)+" an ordinary address", "replace address", n,
				unix.RTM_NEWADDR, replace, nil))
		}
	}

	return list
}

// delAddresses deletes the addresses in reverse order. If a primary address were deleted first, the kernel might
// delete its secondary addresses too.
func (m *move) delAddresses() []request {
	var list []request
	for _, a := range slices.Backward(m.addresses()) {
		list = append(list, newRequest("delete "+m.words(a), "delete address", a, unix.RTM_DELADDR, 0, isGone))
	}
	return list
}

// removeBridge deletes the bridge, unless it has other ports.
func (m *move) removeBridge() []request {
	hasPorts := slices.ContainsFunc(m.s.Links,
		func(l link.Info) bool { return l.Master == m.from.Index && l.Index != m.to.Index })
	if m.from.Index == noLink || hasPorts {
		return nil
	}
	return []request{{
		text: "delete bridge " + m.from.Name,
		done: isGone,
		add:  func(b *nl.Batch) { link.Request{Index: m.from.Index}.Delete(b, m.from.Name) },
	}}
}

// copyNeighbours copies the known neighbours to the other link, because a NIC that is a port receives no answers. If
// the kernel has no room for a cached entry, the request's error is ignored.
func (m *move) copyNeighbours() []request {
	const known = routing.Permanent | routing.NoARP | routing.Reachable | routing.Stale | routing.Delay | routing.Probe
	var list []request
	for _, n := range m.s.Neighbours {
		if n.Link != m.from.Index || n.State&known == 0 || len(n.MAC) != 6 || n.MAC[0]&1 != 0 {
			continue
		}

		n.Link = m.to.Index
		if n.State&(routing.Delay|routing.Probe) != 0 {
			n.State = routing.Stale
		}

		r := request{text: "add neighbour " + m.words(n) + " at " + n.MAC.String(), add: func(b *nl.Batch) {
			m, err := n.ReplaceMessage()
			b.Add("replace neighbour", n, m, err)
		}}
		if n.State != routing.Permanent {
			r.done = func(err error) bool { return errors.Is(err, unix.ENOBUFS) }
		}
		list = append(list, r)
	}

	return list
}

// routes returns the routes to move. Routes through a nexthop object stay on the link, as does the object.
func (m *move) routes() []route.Route {
	return slices.DeleteFunc(slices.Clone(m.s.Routes),
		func(r route.Route) bool { return !usesLink(&r, m.from.Index) || r.NexthopID != 0 })
}

// moveRoutes first adds the routes through the other link next to the present routes. When the new routes exist, it
// deletes the old ones. So packets always find a route. The kernel combines IPv6 routes with gateways in the same
// place into one route. Such a route is replaced in one request.
func (m *move) moveRoutes() []request {
	var list []request
	for _, r := range m.routes() {
		n := m.movedRoute(r)
		if slices.ContainsFunc(m.s.Routes, func(have route.Route) bool { return sameWay(&have, &n) }) {
			list = append(list, newRequest("delete route "+m.words(r), "delete route", r, unix.RTM_DELROUTE, 0,
				isGone))
			continue
		}

		how := replace
		if r.Family == unix.AF_INET || n.Priority != r.Priority || !r.Gateway.IsValid() && len(r.Nexthops) == 0 {
			how = netlink.Create | netlink.Append
		}
		list = append(list, newRequest("replace route "+m.words(n), "add route", n, unix.RTM_NEWROUTE, how,
			func(err error) bool { return errors.Is(err, fs.ErrExist) }))
	}

	return list
}

// movedRoute returns the route through the other link.
func (m *move) movedRoute(r route.Route) route.Route {
	r.Flags = 0
	if r.Link == m.from.Index {
		r.Link = m.to.Index
	}

	r.Nexthops = slices.Clone(r.Nexthops)
	for i := range r.Nexthops {
		r.Nexthops[i].Flags = 0
		if r.Nexthops[i].Link == m.from.Index {
			r.Nexthops[i].Link = m.to.Index
		}
	}
	return r
}

// place holds the fields that the kernel uses to look up a route. Of several IPv4 routes in the same place, the
// kernel uses the first.
type place struct {
	family   uint8
	table    uint32
	dst      netip.Prefix
	from     netip.Prefix
	tos      uint8
	priority uint32
}

func placeKey(r *route.Route) place {
	return place{r.Family, r.Table, r.Dst.Masked(), r.From, r.TOS, r.Priority}
}

// usesLink reports whether at least one next hop of a route uses a link. For a route through a nexthop object, it looks
// at the next hops that the kernel lists with the route.
func usesLink(r *route.Route, index int) bool {
	return r.Link == index || slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return h.Link == index })
}

// sameWay reports whether two routes are in the same place and have the same next hops.
func sameWay(a, b *route.Route) bool {
	return placeKey(a) == placeKey(b) && a.Link == b.Link && a.Gateway == b.Gateway &&
		slices.EqualFunc(a.Nexthops, b.Nexthops,
			func(x, y route.Nexthop) bool { return x.Link == y.Link && x.Gateway == y.Gateway })
}

// isKernelsOwn reports whether the kernel itself adds and removes a route, together with an address or with IPv6 on
// a link. These are routes to the host's own addresses, and to broadcast, multicast and link-local addresses.
func isKernelsOwn(r *route.Route) bool {
	everywhere := r.Table == unix.RT_TABLE_LOCAL || r.Type == unix.RTN_MULTICAST || r.Dst.Addr().Is6() &&
		r.Dst.Addr().IsLinkLocalUnicast()
	return everywhere && r.Protocol == unix.RTPROT_KERNEL
}
