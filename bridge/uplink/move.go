package uplink

import (
	"cmp"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"sort"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/route"
)

// move is all of layer 3 that goes from one link to another: from the NIC to the
// bridge, or back. What is there already, because a process before this one was
// killed, is not done again, or once more without harm.
type move struct {
	s        *Snapshot
	from, to Link
	// stays has what the link had of its own before, and keeps.
	stays *Snapshot
	// raPriority is that of default routes which the kernel learns on from, 0 if it
	// does not listen to routers.
	raPriority uint32
	names      names
	// places has the routes of the snapshot by their place, in the kernel's order.
	places map[place][]*route.Route
}

func newMove(s *Snapshot, from, to Link) *move {
	m := &move{s: s, from: from, to: to, stays: &Snapshot{}, names: names{from.Index: from.Name, to.Index: to.Name}, places: map[place][]*route.Route{}}
	for i := range s.Routes {
		p := placeOf(&s.Routes[i])
		m.places[p] = append(m.places[p], &s.Routes[i])
	}
	for _, l := range s.Links {
		m.names[l.Index] = l.Name
	}
	if s.acceptsRA(from.Name) {
		m.raPriority = s.raPriority(from.Name)
	}
	return m
}

// addresses are those that go. One that another host has (DADFAILED), or whose time
// is over, is of no use anywhere.
func (m *move) addresses() []addr.Address {
	var list []addr.Address
	for _, a := range m.s.Addresses {
		over := a.Valid != nil && *a.Valid <= 0
		if a.Link == m.from.Index && a.Flags&addr.DADFailed == 0 && !over && !m.stays.hasAddress(a) {
			list = append(list, a)
		}
	}
	return list
}

func (s *Snapshot) hasAddress(a addr.Address) bool {
	return s.address(a.Link, a) != nil
}

// address gives what a link has of an address.
func (s *Snapshot) address(link int, a addr.Address) *addr.Address {
	for i := range s.Addresses {
		have := &s.Addresses[i]
		if have.Link == link && have.Prefix == a.Prefix && have.Peer == a.Peer {
			return have
		}
	}
	return nil
}

// inOrder gives addresses in the order in which they have to be added to be listed
// in the same one: the kernel puts a new IPv6 address before the others.
func inOrder(list []addr.Address) []addr.Address {
	var v4, v6 []addr.Address
	for _, a := range list {
		if a.Prefix.Addr().Is4() {
			v4 = append(v4, a)
		} else {
			v6 = append(v6, a)
		}
	}
	slices.Reverse(v6)
	return append(v4, v6...)
}

// moved is the address on the other link.
func (m *move) moved(a addr.Address) addr.Address {
	n := a
	n.Link = m.to.Index
	n.Label = m.label(a.Label)
	if a.Prefix.Addr().Is6() {
		n.Flags |= addr.NoDAD // nobody else can have it, and it is wanted at once
	}
	if have := m.s.address(m.to.Index, a); have != nil {
		// Its route is there, or is not to be: without the flag the kernel would see to it.
		n.Flags = n.Flags&^addr.NoPrefixRoute | have.Flags&addr.NoPrefixRoute
	}
	return n
}

// bringsRoute says that the kernel's route to the address's network is as the kernel
// made it, and alone in its place: then the other link's own, which comes with the
// address and goes behind this one, is just what is wanted.
func (m *move) bringsRoute(a addr.Address) bool {
	i := slices.IndexFunc(m.s.Routes, func(r route.Route) bool { return comesWith(&r, &a) })
	return i >= 0 && (onEachLink(&m.s.Routes[i]) || len(m.rivals(&m.s.Routes[i])) == 0)
}

// rivals are the routes by third links in the same place.
func (m *move) rivals(r *route.Route) []*route.Route {
	var list []*route.Route
	for _, have := range m.places[placeOf(r)] {
		if !goesBy(have, m.from.Index) && !goesBy(have, m.to.Index) {
			list = append(list, have)
		}
	}
	return list
}

// isThere says that there is such a route already.
func (m *move) isThere(r *route.Route) bool {
	return slices.ContainsFunc(m.places[placeOf(r)], func(have *route.Route) bool { return r.Matches(*have) })
}

// label is eth0:1's br0:1. The kernel's own choice is the link's name, which is not
// sent.
func (m *move) label(label string) string {
	rest, ok := strings.CutPrefix(label, m.from.Name)
	switch {
	case !ok:
		return label
	case rest == "" || len(m.to.Name)+len(rest) > 15:
		return ""
	}
	return m.to.Name + rest
}

func (m *move) addAddresses() []operation {
	var ops []operation
	for _, a := range inOrder(m.addresses()) {
		n := m.moved(a)
		ops = append(ops, operation{text: "add " + m.words(n), request: put("replace address", &n, n.ReplaceMessage)})
		r, comes := prefixRoute(&n)
		if comes && m.s.address(m.to.Index, a) == nil && hasPrefixRoute(a) && !m.bringsRoute(a) {
			// Another program deleted this link's, or another link has one too, which it must not
			// fall behind.
			ops = append(ops, operation{text: "delete the route that comes with it, " + m.names.on(r.String()), request: put("delete route", &r, r.DelMessage), done: gone})
		}
	}
	return ops
}

// restoreAddressFlags gives IPv6 addresses the flags that they had: without some, they
// would not have been usable at once.
func (m *move) restoreAddressFlags() []operation {
	var ops []operation
	for _, a := range inOrder(m.addresses()) {
		n := m.moved(a)
		n.Flags = a.Flags
		have := m.s.address(m.to.Index, a)
		if have == nil {
			will := m.moved(a)
			have = &will
		}
		if a.Prefix.Addr().Is4() || (have.Flags^a.Flags)&(addr.NoDAD|addr.NoPrefixRoute) == 0 {
			continue
		}
		ops = append(ops, operation{text: "make " + m.words(n) + " an ordinary address", request: put("replace address", &n, n.ReplaceMessage)})
	}
	return ops
}

// delAddresses deletes from the end: a primary address that goes first may take
// its secondaries along.
func (m *move) delAddresses() []operation {
	var ops []operation
	for _, a := range slices.Backward(m.addresses()) {
		ops = append(ops, operation{text: "delete " + m.words(a), request: put("delete address", &a, a.DelMessage), done: gone})
	}
	return ops
}

func (m *move) words(a addr.Address) string {
	text := m.names.on(a.String())
	if a.Label != "" && a.Label != m.names[a.Link] {
		text += " label " + a.Label
	}
	if a.Flags&addr.NoPrefixRoute != 0 {
		text += " noprefixroute"
	}
	if a.Valid != nil {
		text += " for " + a.Valid.String()
	}
	return text
}

func (m *move) addRules() []operation {
	var ops []operation
	for _, r := range m.rules() {
		n := r
		n.IIF, n.OIF = m.rename(r.IIF), m.rename(r.OIF)
		ops = append(ops, operation{text: "add rule " + n.String(), request: put("add rule", &n, n.CopyMessage), done: exists})
	}
	return ops
}

func (m *move) delRules() []operation {
	var ops []operation
	for _, r := range m.rules() {
		ops = append(ops, operation{text: "delete rule " + r.String(), request: put("delete rule", &r, r.DelMessage), done: gone})
	}
	return ops
}

func (m *move) rules() []route.Rule {
	var list []route.Rule
	for _, r := range m.s.Rules {
		if (r.IIF == m.from.Name || r.OIF == m.from.Name) && !slices.ContainsFunc(m.stays.Rules, func(o route.Rule) bool { return reflect.DeepEqual(o, r) }) {
			list = append(list, r)
		}
	}
	return list
}

func (m *move) rename(link string) string {
	if link == m.from.Name {
		return m.to.Name
	}
	return link
}

// copyNeighbours gives the other link what is known of the neighbours, so that no
// packet has to wait for it. If the other link has another MAC, that one stays.
func (m *move) copyNeighbours() []operation {
	var ops []operation
	for _, n := range m.s.Neighbours {
		if n.Link != m.from.Index || m.s.knows(m.to.Index, n) {
			continue
		}
		to, ok := copied(n)
		if !ok {
			continue
		}
		to.Link = m.to.Index
		text := "add neighbour " + m.names.on(to.String()) + " at " + to.MAC.String()
		if to.Flags&route.Proxy != 0 {
			text = "answer for " + m.names.on(to.String())
		}
		op := operation{text: text, request: put("replace neighbour", &to, to.ReplaceMessage)}
		if to.State != route.Permanent {
			op.done = isFull
		}
		ops = append(ops, op)
	}
	return ops
}

// isFull says that the kernel's table of neighbours, which all links share, has no room: what
// is only cached is learnt again.
func isFull(err error) bool { return errors.Is(err, unix.ENOBUFS) }

// copied is a neighbour in a state that can be written.
func copied(n route.Neighbour) (route.Neighbour, bool) {
	switch {
	case n.Flags&route.Proxy != 0:
		return n, true
	case len(n.MAC) != 6 || n.MAC[0]&1 != 0: // unknown, or broadcast
		return n, false
	}
	switch n.State {
	case route.Permanent, route.NoARP, route.Reachable:
		return n, true
	case route.Stale, route.Delay, route.Probe:
		n.State = route.Stale
		return n, true
	}
	return n, false
}

// knows says that a link has an entry for a neighbour that is no worse.
func (s *Snapshot) knows(link int, n route.Neighbour) bool {
	return slices.ContainsFunc(s.Neighbours, func(have route.Neighbour) bool {
		return have.Link == link && have.Addr == n.Addr && have.Flags&route.Proxy == n.Flags&route.Proxy &&
			(have.State == route.Reachable && n.State != route.Permanent || have.State == n.State && have.MAC.String() == n.MAC.String())
	})
}

// delNeighbours deletes those that were set by hand; the others go by themselves.
func (m *move) delNeighbours() []operation {
	var ops []operation
	for _, n := range m.s.Neighbours {
		if n.Link == m.from.Index && (n.State == route.Permanent || n.Flags&(route.Proxy|route.ExternalLearned|route.Managed) != 0) {
			ops = append(ops, operation{text: "delete neighbour " + m.names.on(n.String()), request: put("delete neighbour", &n, n.DelMessage), done: gone})
		}
	}
	return ops
}

// moveRoutes moves routes in the order in which the kernel takes them: a gateway has to be
// on a network that the link has a route to.
func (m *move) moveRoutes() []operation {
	list := m.routes()
	sort.SliceStable(list, func(i, j int) bool {
		a, b := &list[i], &list[j]
		return cmp.Or(rank(a)-rank(b), scope(b)-scope(a), b.Dst.Bits()-a.Dst.Bits()) < 0
	})
	var ops []operation
	for i := range list {
		ops = append(ops, m.moveRoute(&list[i])...)
	}
	return ops
}

// routes are those that go. Those by a nexthop object stay, as the object does.
func (m *move) routes() []route.Route {
	var list []route.Route
	for _, r := range m.s.Routes {
		if goesBy(&r, m.from.Index) && !isLocal(&r) && r.NexthopID == 0 && !isKernelMulticast(&r) && !slices.ContainsFunc(m.stays.Routes, r.Matches) {
			list = append(list, r)
		}
	}
	return list
}

// isKernelMulticast is the route to ff00::/8 of each link with IPv6.
func isKernelMulticast(r *route.Route) bool {
	return r.Type == route.Multicast && r.Protocol == route.ProtocolKernel
}

const (
	rankConnected = iota
	rankOnLink
	rankGateway
	rankMultipath
)

func rank(r *route.Route) int {
	switch {
	case len(r.Nexthops) > 0:
		return rankMultipath
	case !r.Gateway.IsValid():
		return rankConnected
	case r.OnLink:
		return rankOnLink
	}
	return rankGateway
}

// scope is IPv4's, by which a gateway has to be nearer than what it leads to.
func scope(r *route.Route) int {
	if r.Scope == nil {
		return 0
	}
	return int(*r.Scope)
}

// moveRoute puts the other link's route in the place of this link's, at once where
// the kernel can: packets find one or the other at any moment.
func (m *move) moveRoute(r *route.Route) []operation {
	n := m.movedRoute(r)
	add := operation{text: "add route " + m.names.on(n.String()), request: put("append route", &n, func() (netlink.Message, error) { return n.CopyMessage(true) }), done: exists}
	del := operation{text: "delete route " + m.names.on(r.String()), request: put("delete route", r, r.DelMessage), done: gone}
	switch {
	case m.arrives(r) || m.isThere(&n):
		return []operation{del}
	case n.Priority != r.Priority, len(r.Nexthops) == 0 && (onEachLink(r) || !m.isFirst(r)):
		return []operation{add, del}
	}
	return []operation{{text: "replace route " + m.names.on(n.String()), request: put("replace route", &n, func() (netlink.Message, error) { return n.CopyMessage(false) }), done: exists}}
}

// movedRoute is the route by the other link.
//
// One that the kernel learnt from a router by itself gets a priority of its own. The
// kernel takes a route of the same one that another program added for an error: it
// then ignores the router and the prefixes in its advertisement, and addresses
// run out. So the next advertisement adds the kernel's own again, and this one ends
// when its time is over.
func (m *move) movedRoute(r *route.Route) route.Route {
	n := *r
	n.Flags = 0
	if n.Link == m.from.Index {
		n.Link = m.to.Index
	}
	n.Nexthops = slices.Clone(r.Nexthops)
	for i := range n.Nexthops {
		n.Nexthops[i].Flags = 0
		if n.Nexthops[i].Link == m.from.Index {
			n.Nexthops[i].Link = m.to.Index
		}
	}
	if m.raPriority != 0 && r.Protocol == route.ProtocolRA && r.Dst.Addr().Is6() && r.Gateway.IsValid() && r.Priority == m.raPriority {
		n.Priority++
	}
	return n
}

// arrives says that the other link's route comes with the address.
func (m *move) arrives(r *route.Route) bool {
	return slices.ContainsFunc(m.addresses(), func(a addr.Address) bool {
		return comesWith(r, &a) && m.bringsRoute(a) && m.s.address(m.to.Index, a) == nil
	})
}

// isFirst says that to replace what is in the route's place is to replace the route.
func (m *move) isFirst(r *route.Route) bool {
	list := m.places[placeOf(r)]
	return len(list) == 0 || goesBy(list[0], m.from.Index) && r.Matches(*list[0])
}

// gateways are the next hops of what goes.
func (m *move) gateways() []netip.Addr {
	var list []netip.Addr
	add := func(link int, a netip.Addr) {
		if link == m.from.Index && a.IsValid() && !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	for _, r := range m.s.Routes {
		add(r.Link, r.Gateway)
		for _, h := range r.Nexthops {
			add(h.Link, h.Gateway)
		}
	}
	return list
}
