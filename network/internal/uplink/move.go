package uplink

import (
	"context"
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

// move plans how to move the layer 3 settings from one link to another: from the NIC to the bridge, or back. A killed
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
	return slices.DeleteFunc(slices.Clone(m.s.Addresses),
		func(a addr.Address) bool { return a.Link != m.from.Index || a.Flags&unix.IFA_F_DADFAILED != 0 })
}

// inOrder returns the addresses in the order in which they must be added, IPv4 first. The kernel lists a new IPv6
// address before the others of its scope, so adding them in reverse order preserves the order of the listing.
func inOrder(list []addr.Address) []addr.Address {
	if first6 := slices.IndexFunc(list, func(a addr.Address) bool { return a.Prefix.Addr().Is6() }); first6 >= 0 {
		slices.Reverse(list[first6:])
	}
	return list
}

// movedAddress returns the address for the other link. A label such as eth0:1 becomes br0:1. If the new label would be
// too long, or equal to the link's name, which is the kernel's default, the address gets no label.
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
			// The link already has the address. Leave its flag IFA_F_NOPREFIXROUTE unchanged: if the request cleared
			// the flag, the kernel would add the route to the prefix.
			n.Flags = n.Flags&^unix.IFA_F_NOPREFIXROUTE | have.Flags&unix.IFA_F_NOPREFIXROUTE
		}
		list = append(list, newRequest("add "+m.words(n), "replace address", n, unix.RTM_NEWADDR, replace, nil))
	}

	return list
}

// restoreAddressFlags returns the requests that set the original flags of moved IPv6 addresses. addAddresses changed
// some flags so that the addresses were usable at once.
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

// delAddresses returns the requests that delete the addresses, in reverse order. If a primary address were deleted
// first, the kernel might delete its secondary addresses too.
func (m *move) delAddresses() []request {
	var list []request
	for _, a := range slices.Backward(m.addresses()) {
		list = append(list, newRequest("delete "+m.words(a), "delete address", a, unix.RTM_DELADDR, 0, isGone))
	}
	return list
}

// removeBridge returns the request that deletes the bridge. If the bridge has ports besides the NIC, or does not exist,
// it returns none.
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

// copyNeighbours returns the requests that copy the known neighbours to the other link. This is needed because a NIC
// that is a port receives no answers. If the kernel has no room for a cached entry, the request's error is ignored.
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

// moveRoutes returns the requests of one round (step.rounds). For each present route, moveRoutes first adds a route
// through the other link. If that route exists already, as in the next round, moveRoutes deletes the present route. So
// packets always find a route. The kernel combines IPv6 routes that have gateways and the same place (see place) into
// one route. moveRoutes replaces such a route in one request.
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

// movedRoute returns a copy of the route that leads through the other link.
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

// sameWay reports whether two routes have the same place and the same next hops. The place consists of the fields that
// placeKey returns. Next hops are compared by link and gateway only.
func sameWay(a, b *route.Route) bool {
	return placeKey(a) == placeKey(b) && a.Link == b.Link && a.Gateway == b.Gateway &&
		slices.EqualFunc(a.Nexthops, b.Nexthops,
			func(x, y route.Nexthop) bool { return x.Link == y.Link && x.Gateway == y.Gateway })
}

// isKernelsOwn reports whether the kernel itself maintains a route on each link, so that it need not move. These are
// routes to the host's own addresses, and to broadcast, multicast and IPv6 link-local addresses. The kernel's routes to
// the subnets of other addresses do not count.
func isKernelsOwn(r *route.Route) bool {
	everywhere := r.Table == unix.RT_TABLE_LOCAL || r.Type == unix.RTN_MULTICAST || r.Dst.Addr().Is6() &&
		r.Dst.Addr().IsLinkLocalUnicast()
	return everywhere && r.Protocol == unix.RTPROT_KERNEL
}

// step is one step of a takeover, or of the way back: requests to the kernel, and then other work. Either may be nil.
type step struct {
	name     string
	words    []string // descriptions of the work
	requests func(*move) []request
	work     func(context.Context, *Conn, *Record, *move) error
	// rounds limits how often the requests are planned and made, until there are none left. One round may not suffice
	// for routes: a gateway must be on a network that the link has a route to, old routes are deleted last, and daemons
	// add routes meanwhile.
	rounds int
}

// takeSteps returns the steps of a takeover: see the package comment.
func takeSteps(u *Uplink, nic *link.Info) []step {
	made := fmt.Sprintf("make bridge %s with MAC %s and MTU %d, and set it up", u.Bridge, nic.MAC, nic.MTU)
	loose := fmt.Sprintf("give %s the kernel parameters of %s, but loose ones of rp_filter and arp_filter", u.Bridge,
		u.NIC)
	return []step{
		{name: "bridge", words: []string{made, loose}, work: makeBridge},
		{name: "addresses", requests: (*move).addAddresses, work: waitUntilLocal},
		{name: "port", requests: func(m *move) []request {
			return append(m.copyNeighbours(), setMaster(m.from, m.to.Index, "make %s a port of "+m.to.Name)...)
		}, work: func(_ context.Context, c *Conn, rec *Record, _ *move) error {
			// The kernel may not have noticed yet that a bridge with its first port has a carrier.
			c.nl.RefreshCarrier(rec.Bridge)
			return nil
		}},
		{name: "routes", rounds: 8, requests: func(m *move) []request {
			return append(m.moveRoutes(), m.restoreAddressFlags()...)
		}},
		{name: "release", requests: (*move).delAddresses},
		{
			name: "settle", words: []string{fmt.Sprintf("give %s rp_filter and arp_filter of %s", u.Bridge, u.NIC)},
			work: func(_ context.Context, _ *Conn, rec *Record, _ *move) error {
				return setSourceChecks(rec.Bridge, rec.NIC)
			},
		},
	}
}

// restoreSteps returns the steps that give a NIC back. The addresses and routes that are now on the bridge move to the
// NIC, whether or not they came from there.
func restoreSteps() []step {
	return []step{
		{name: "bridge", work: func(_ context.Context, _ *Conn, rec *Record, _ *move) error {
			return setSourceChecks(rec.Bridge, "")
		}},
		{name: "addresses", requests: func(m *move) []request {
			return append(m.addAddresses(), m.copyNeighbours()...)
		}, work: waitUntilLocal},
		{name: "routes", rounds: 8, requests: (*move).moveRoutes},
		{name: "port", requests: func(m *move) []request {
			if m.to.Master != m.from.Index {
				return m.moveRoutes()
			}
			return append(m.moveRoutes(), setMaster(m.to, 0, "make %s no port of "+m.from.Name+" any more")...)
		}},
		{name: "release", requests: func(m *move) []request {
			return slices.Concat(m.moveRoutes(), m.restoreAddressFlags(), m.delAddresses())
		}},
		{name: "settle", requests: (*move).removeBridge},
	}
}

// Plan describes the work of a takeover for the operator.
type Plan struct {
	// Steps has a line for each step, each action and each warning.
	Steps string
	// Moves are the addresses to move, without link-local ones.
	Moves []netip.Addr
	// Warnings are about things that behave differently after a takeover.
	Warnings []string
}

// Plan returns the plan of a takeover of a NIC. It changes nothing. If the NIC cannot be taken over, or a link has the
// bridge's name already, the error matches ErrRefused and gives every reason. If there is no such NIC, it matches
// fs.ErrNotExist.
func (c *Conn) Plan(ctx context.Context, u Uplink) (*Plan, error) {
	if err := u.validate(); err != nil {
		return nil, err
	}
	s, err := c.snapshot(ctx, u.NIC, u.Bridge)
	if err != nil {
		return nil, err
	}
	return plan(s, u)
}

// plan does the work of Plan on a snapshot.
func plan(s *snapshot, u Uplink) (*Plan, error) {
	if err := s.refuse(&u); err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}

	m := moveToBridge(s, &Record{Uplink: u})
	p := &Plan{Steps: actions(takeSteps(&u, &s.NIC), m)}
	for _, a := range inOrder(m.addresses()) {
		if ip := a.Prefix.Addr(); !ip.IsLinkLocalUnicast() {
			p.Moves = append(p.Moves, ip)
		}
	}

	for _, l := range s.Links {
		if l.Lower == s.NIC.Index && l.Kind == "vlan" {
			text := fmt.Sprintf("VLAN %s stays on %s and goes on working; pods cannot reach it through the bridge",
				l.Name, s.NIC.Name)
			p.Steps, p.Warnings = p.Steps+"warning: "+text+"\n", append(p.Warnings, text)
		}
	}
	return p, nil
}

// actions lists all steps with their actions, one a line.
func actions(steps []step, m *move) string {
	var b strings.Builder
	for i, st := range steps {
		fmt.Fprintf(&b, "%d. %s\n", i+1, st.name)
		for _, text := range st.words {
			fmt.Fprintf(&b, "   %s\n", text)
		}
		if st.requests == nil {
			continue
		}
		for _, r := range st.requests(m) {
			fmt.Fprintf(&b, "   %s\n", r.text)
		}
	}

	return b.String()
}

// noLink stands for the index of a bridge that does not exist.
const noLink = -1

// moveToBridge returns the move of a takeover, from the NIC to the bridge.
func moveToBridge(s *snapshot, rec *Record) *move {
	to := link.Info{Index: noLink, Name: rec.Bridge}
	if s.Bridge != nil {
		to = *s.Bridge
	}
	return &move{s, s.NIC, to}
}

// moveBack returns the move from the bridge to the NIC. If the bridge does not exist, it takes from the record those
// addresses and routes that the NIC lacks.
func moveBack(s *snapshot, rec *Record) *move {
	if s.Bridge != nil {
		return &move{s, *s.Bridge, s.NIC}
	}

	lost := *s
	lost.Addresses, lost.Routes = slices.Clone(s.Addresses), slices.Clone(s.Routes)
	gone := link.Info{Index: noLink, Name: rec.Bridge}
	before := &move{&rec.Before, rec.Before.NIC, gone}
	for _, a := range before.addresses() {
		if s.address(s.NIC.Index, a) == nil {
			lost.Addresses = append(lost.Addresses, before.movedAddress(a))
		}
	}

	for _, r := range before.routes() {
		if !slices.ContainsFunc(s.Routes, func(have route.Route) bool { return placeKey(&have) == placeKey(&r) }) {
			lost.Routes = append(lost.Routes, before.movedRoute(r))
		}
	}

	return &move{&lost, gone, s.NIC}
}

// request is one request to the kernel, which is a part of a step.
type request struct {
	text string
	add  func(*nl.Batch)
	// done reports whether an error does not matter, for example because the request was made before. If done is nil,
	// every error matters.
	done func(error) bool
}

// object is an address or a route.
type object interface {
	fmt.Stringer
	Message(netlink.HeaderType, netlink.HeaderFlags) (netlink.Message, error)
}

// newRequest returns a request with one message.
func newRequest(
	text, op string, o object, typ netlink.HeaderType, flags netlink.HeaderFlags, done func(error) bool,
) request {
	return request{text: text, done: done, add: func(b *nl.Batch) {
		m, err := o.Message(typ, flags)
		b.Add(op, o, m, err)
	}}
}

// setMaster returns the request that makes a link a port of the bridge with the index master, or of no bridge if master
// is 0. If the link already has this master, setMaster returns none. The link stays up. text is a format for the
// request's description, with a %s for the link's name.
func setMaster(l link.Info, master int, text string) []request {
	if l.Master == master {
		return nil
	}
	return []request{{text: fmt.Sprintf(text, l.Name), add: func(b *nl.Batch) {
		link.Request{Index: l.Index, Master: &master}.Set(b, "set master of", l.Name)
	}}}
}

const replace = netlink.Create | netlink.Replace

// isGone reports whether an error means that the object of a request does not exist.
func isGone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// atOnce is the largest number of requests in one sendmsg. Their acknowledgements must fit into the socket's buffer.
const atOnce = 256

// apply sends requests. It continues after errors, and returns the first error that matters (see request.done). If ctx
// ends, apply stops and returns ctx's error.
func (c *Conn) apply(ctx context.Context, requests []request) (first error) {
	for some := range slices.Chunk(requests, atOnce) {
		if err := ctx.Err(); err != nil {
			return err
		}

		var b nl.Batch
		for _, r := range some {
			r.add(&b)
		}

		if c.nl.Execute(&b) == nil {
			continue
		}

		for i, r := range some {
			if err := b.Err(i); first == nil && err != nil && (r.done == nil || !r.done(err)) {
				first = fmt.Errorf("%s: %w", r.text, err)
			}
		}
	}

	return first
}
