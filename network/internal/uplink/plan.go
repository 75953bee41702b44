package uplink

import (
	"context"
	"fmt"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// Plan returns the steps of a takeover of a NIC. It changes nothing. The bridge need not exist. Plan needs
// CAP_NET_ADMIN to see flows. If the NIC cannot be taken over, the error matches ErrRefused and gives every reason.
// If there is no such NIC, it matches fs.ErrNotExist.
func (c *Conn) Plan(ctx context.Context, u Uplink) (*Steps, error) {
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
func plan(s *snapshot, u Uplink) (*Steps, error) {
	if err := s.refuse(&u); err != nil {
		return nil, fmt.Errorf("take over %s: %w", u.NIC, err)
	}
	steps := planTake(s, &u)
	steps.Warnings = s.warn()
	return steps, nil
}

func (u *Uplink) validate() error {
	switch {
	case !ident.IsLinkName(u.NIC):
		return fmt.Errorf("take over a NIC: %w: its name is %q", tombolo.ErrInvalid, u.NIC)
	case !ident.IsLinkName(u.Bridge) || u.Bridge == u.NIC:
		return fmt.Errorf("take over %s: %w: the bridge's name is %q", u.NIC, tombolo.ErrInvalid, u.Bridge)
	}
	return nil
}

// planTake returns the steps without looking for obstacles, also for a takeover that is half done.
func planTake(s *snapshot, u *Uplink) *Steps {
	bridge := link.Link{Index: noLink, Name: u.Bridge}
	how := fmt.Sprintf("make bridge %s with MAC %s and MTU %d, and set it up", u.Bridge, s.NIC.MAC, s.NIC.MTU)
	if s.Bridge != nil {
		bridge = *s.Bridge
	}

	m := newMove(s, s.NIC, bridge)
	steps := Steps{move: m}
	for _, a := range inOrder(m.addresses()) {
		if ip := a.Prefix.Addr(); !ip.IsLinkLocalUnicast() {
			steps.Moves = append(steps.Moves, ip)
		}
	}

	steps.add(stepBridge, []string{how, fmt.Sprintf(
		"give %s the kernel parameters of %s, but loose ones of rp_filter and arp_filter", u.Bridge, u.NIC)})
	steps.add(stepAddresses, nil, m.addAddresses())
	steps.add(stepPort, nil, m.copyNeighbours(),
		setMaster(m.from, m.to.Index, fmt.Sprintf("make %s a port of %s", u.NIC, u.Bridge)))
	steps.add(stepRoutes, nil, m.moveRoutes(), m.restoreAddressFlags())
	steps.add(stepRelease, nil, m.delAddresses())
	steps.add(stepSettle, []string{fmt.Sprintf("give %s rp_filter and arp_filter of %s", u.Bridge, u.NIC)})
	return &steps
}

// planRestore returns the steps that give a NIC back. Everything that is now on the bridge moves to the NIC, whether
// or not it came from there.
func planRestore(s *snapshot, rec *Record) *Steps {
	m := backMove(s, rec)
	steps := Steps{move: m}
	steps.add(stepBridge, nil)
	steps.add(stepAddresses, nil, m.addAddresses(), m.copyNeighbours())
	steps.add(stepRoutes, nil, m.moveRoutes())
	steps.add(stepPort, nil, m.moveRoutes(), m.release())
	steps.add(stepRelease, nil, m.moveRoutes(), m.restoreAddressFlags(), m.delAddresses())
	steps.add(stepSettle, nil, m.removeBridge())
	return &steps
}

// backMove returns the move from the bridge to the NIC. If the bridge no longer exists, it takes the settings from
// the record.
func backMove(s *snapshot, rec *Record) *move {
	n := *s
	if s.Bridge == nil {
		n = *s.withLost(rec)
		n.Bridge = &link.Link{Index: noLink, Name: rec.Bridge}
	}
	return newMove(&n, *n.Bridge, n.NIC)
}

// withLost returns a copy of the snapshot in which a bridge has those addresses and routes of the record that the NIC
// lacks. It is for a bridge that another program deleted.
func (s *snapshot) withLost(rec *Record) *snapshot {
	n := *s
	n.Addresses, n.Routes = slices.Clone(s.Addresses), slices.Clone(s.Routes)
	m := newMove(&rec.Before, rec.Before.NIC, link.Link{Index: noLink, Name: rec.Bridge})
	for _, a := range m.addresses() {
		if s.address(s.NIC.Index, a) == nil {
			n.Addresses = append(n.Addresses, m.movedAddress(a))
		}
	}

	for _, r := range m.routes() {
		if !slices.ContainsFunc(s.Routes, func(have route.Route) bool { return placeOf(&have) == placeOf(&r) }) {
			n.Routes = append(n.Routes, m.movedRoute(r))
		}
	}

	return &n
}

// release makes the NIC leave the bridge, if it is a port of it.
func (m *move) release() []request {
	if m.to.Master != m.from.Index {
		return nil
	}
	return setMaster(m.to, 0, fmt.Sprintf("make %s no port of %s any more", m.to.Name, m.from.Name))
}

// removeBridge deletes the bridge, unless it has other ports.
func (m *move) removeBridge() []request {
	hasPorts := slices.ContainsFunc(m.s.Links,
		func(l link.Link) bool { return l.Master == m.from.Index && l.Index != m.to.Index })
	if m.from.Index == noLink || hasPorts {
		return nil
	}
	return []request{{
		text: "delete bridge " + m.from.Name,
		done: isGone,
		add:  func(b *nl.Batch) { link.Request{Index: m.from.Index}.Delete(b, m.from.Name) },
	}}
}

// setMaster makes a link a port of master, or of none if master is 0. It changes nothing else about the link, which
// stays up.
func setMaster(l link.Link, master int, text string) []request {
	if l.Master == master {
		return nil
	}
	return []request{{text: text, add: func(b *nl.Batch) {
		link.Request{Index: l.Index, Master: &master}.Set(b, "set master of", l.Name)
	}}}
}

// noLink stands for the index of a bridge that does not exist yet.
const noLink = -1

// links lists all links of the namespace, with the properties that a takeover needs.
func (c *Conn) links() ([]link.Link, error) {
	var list []link.Link
	err := link.List(c.nl, "list links", "", 0, func(l *link.Link) {
		one := link.Link{
			Index: l.Index, Name: l.Name, Kind: l.Kind, Type: l.Type, MAC: l.MAC, MTU: l.MTU, Flags: l.Flags,
			Master: l.Master, PortOf: l.PortOf, Lower: l.Lower,
		}
		if l.Elsewhere || l.Kind == "veth" {
			one.Lower = 0 // an index of another namespace, or the other end
		}
		list = append(list, one)
	})

	return list, err
}
