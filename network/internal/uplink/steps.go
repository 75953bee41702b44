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

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// step is one step of a takeover, or of the way back: requests to the kernel, and then other work. Both may be nil.
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

// restoreSteps returns the steps that give a NIC back. Everything that is now on the bridge moves to the NIC, whether
// or not it came from there.
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

// Plan describes a takeover.
type Plan struct {
	// Steps has a line for each action and each warning.
	Steps string
	// Moves are the addresses to move, without link-local ones.
	Moves []netip.Addr
	// Warnings are about things that behave differently after a takeover.
	Warnings []string
}

// Plan returns the plan of a takeover of a NIC. It changes nothing. The bridge need not exist. If the NIC cannot be
// taken over, the error matches ErrRefused and gives every reason. If there is no such NIC, it matches fs.ErrNotExist.
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

// actions lists the actions of all steps.
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

// moveToBridge returns the move of a takeover.
func moveToBridge(s *snapshot, rec *Record) *move {
	to := link.Info{Index: noLink, Name: rec.Bridge}
	if s.Bridge != nil {
		to = *s.Bridge
	}
	return &move{s, s.NIC, to}
}

// moveBack returns the move from the bridge to the NIC. If another program deleted the bridge, it takes from the record
// those addresses and routes that the NIC lacks.
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

// setMaster makes a link a port of master, or of none if master is 0. It changes nothing else about the link, which
// stays up. The text has a verb for the link's name.
func setMaster(l link.Info, master int, text string) []request {
	if l.Master == master {
		return nil
	}
	return []request{{text: fmt.Sprintf(text, l.Name), add: func(b *nl.Batch) {
		link.Request{Index: l.Index, Master: &master}.Set(b, "set master of", l.Name)
	}}}
}

const replace = netlink.Create | netlink.Replace

// isGone reports whether an error means that a rule (ENOENT), a route (ESRCH) or an address (EADDRNOTAVAIL) does not
// exist.
func isGone(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// atOnce is the number of requests in one sendmsg. Their acknowledgements must fit into the socket's buffer.
const atOnce = 256

// apply makes requests. It continues after errors, and returns the first.
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
