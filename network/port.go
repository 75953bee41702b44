package network

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// portPart is the part of a pod with the host's end of its veth pair, which is a port of the bridge.
type portPart struct{}

// look compares the port with the record. If the port is gone, look sets p.gone, and reports nothing else about the
// pod.
func (portPart) look(ctx context.Context, p *podSite) error {
	diffs, err := p.s.Links.Check(ctx, p.want)
	if err != nil {
		return err
	}

	p.gone = len(diffs) > 0 && diffs[0].What == "link" && diffs[0].Have == "" && diffs[0].Want == p.want.Name
	switch {
	case p.gone && p.lost != nil:
		p.found.list = nil
		p.found.advise(tombolo.RemedyCollect, "it is dead: port %s is missing, and its namespace is gone: %v",
			p.want.Name, p.lost)
		return nil
	case p.gone:
		p.found.list = nil
		p.found.addAll(diffs[:1], tombolo.RemedyRecreate)
		return nil
	case p.lost != nil:
		p.found.advise(tombolo.RemedyRecreate, "its namespace is gone: %v", p.lost)
	}

	p.found.addAll(diffs, tombolo.RemedyRepair)
	return nil
}

// mend puts the port back on its bridge. That bridge may be gone, or differ from the network's present bridge.
func (portPart) mend(ctx context.Context, p *podSite) error {
	br, err := p.s.link(ctx, p.Bridge)
	if err != nil {
		return err
	}

	port := portOn(p.Attachment, br)

	// The link's attributes do not show the port's static FDB entry and its VLANs, so set these in any case.
	if br.Kind != "bridge" || len(port.Differences(*p.link, *br)) == 0 && !port.StaticFDB && port.VLAN.IsZero() {
		return nil
	}

	port.BridgeIndex = br.Index
	return p.s.Links.Enslave(ctx, port)
}

// portDifferences returns the differences between link, which is a port of the bridge br, and the port that the record
// requires.
func portDifferences(ctx context.Context, s *session, a *state.Attachment, link, br *bridge.Link) ([]tombolo.Difference,
	error) {
	p := portOn(a, br)
	diffs := p.Differences(*link, *br)
	if len(diffs) > 0 || p.VLAN.IsZero() {
		return diffs, nil
	}
	diffs, err := s.Links.VLANs().Check(ctx, link.Index, a.HostIf, p.VLAN)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	return diffs, err
}

// recheckPort repeats portDifferences under the record's lock, and reads the port and the record again. Since the ports
// were listed, an ADD may have ended. A DEL may have set the port down, which it does before it deletes the port.
func recheckPort(ctx context.Context, s *session, a *state.Attachment, br *bridge.Link) (diffs []tombolo.Difference,
	_ error) {
	err := s.withLockedRecord(a.Network, a.Hash(), func(now *state.Attachment) error {
		link, err := s.link(ctx, now.HostIf)
		if err == nil && link.Index != 0 && now.State == state.Ready {
			diffs, err = portDifferences(ctx, s, now, link, br)
		}
		return err
	})
	if errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return diffs, err
}

// keepTable protects the bridge's FDB on a kernel without a limit of learned MACs (before Linux 6.7). If no guard
// restricts the pod to its MAC, the bridge learns nothing from its port, and gets a permanent entry for its MAC.
// Frames for other MACs behind the port then go to all ports.
func keepTable(p *bridge.Port, guarded bool, br *bridge.Link) {
	if br.Bridge != nil && br.Bridge.MaxLearned == nil && !guarded {
		p.NoLearning, p.StaticFDB = true, true
	}
}

// portOf returns the properties of an attachment's port and interface, from its record.
func portOf(a *state.Attachment) bridge.Port {
	p := bridge.Port{
		Bridge: a.Bridge, Name: a.HostIf, Peer: a.IfName, MTU: a.MTU, MAC: net.HardwareAddr(
			a.HostMAC), PeerMAC: net.HardwareAddr(a.MAC),
		Alias:   endpoint.AliasOf(a),
		Hairpin: a.Hairpin && !sharesNIC(a), Isolated: a.Isolated, ForwardGroups: true,
		Down: !a.Up, VLAN: a.VLAN,
	}
	if a.SLAAC {
		p.Autoconf = &bridge.Autoconf{DefaultRoute: a.DefaultRoute != exitHost}
	}
	return p
}

// sharesNIC reports whether the bridge of an attachment shares a NIC. Such a pod gets no hairpin port, which would
// send the pod a copy of each of its own multicast frames. It needs none, since the host routes its packets to
// services.
func sharesNIC(a *state.Attachment) bool { return a.NIC != "" }

// portOn returns the result of portOf, completed with the properties that depend on the existing bridge.
func portOn(a *state.Attachment, br *bridge.Link) bridge.Port {
	p := portOf(a)
	if p.VLAN.IsZero() {
		p.VLAN = defaultVLAN(br)
	}
	if p.PeerMAC != nil {
		keepTable(&p, a.Guard != "", br)
	}
	return p
}

// isRenamed reports whether an attachment's port exists with another name: its alias stays.
func (s *session) isRenamed(ctx context.Context, hash string) (bool, error) {
	links, err := s.Links.Veths(ctx)
	return slices.ContainsFunc(links, func(l bridge.Link) bool {
		return l.Name != ident.Port(hash) && strings.HasPrefix(l.Alias, endpoint.AliasOwner(hash))
	}), err
}

// liveAddresses lists the addresses of a network's pods according to the aliases of their ports.
func (s *session) liveAddresses(ctx context.Context, network string) ([]ipam.Live, error) {
	links, err := s.Links.Veths(ctx)
	var list []ipam.Live
	for i := range links {
		a, ok := endpoint.ParseAlias(links[i].Alias)
		if !ok || a.Network != endpoint.NetworkToken(network) {
			continue
		}
		for _, ip := range a.Addresses {
			list = append(list, ipam.Live{Hash: a.Hash, Addr: ip})
		}
	}

	return list, err
}

func (r *remains) port() string { return ident.Port(r.hash) }

// autoconfigured reports whether a pod has formed an address from a router advertisement. The advertised prefix may
// change, so the pod may lose the address.
func autoconfigured(a *state.Attachment, p netip.Prefix) bool {
	if !a.SLAAC || a.MAC == nil || !p.Addr().Is6() {
		return false
	}
	return ident.EndsAlike(p.Addr(), addr.LinkLocal(net.HardwareAddr(a.MAC)))
}

// lastingPrefixes returns the addresses that an attachment keeps as long as it exists. These are all except those from
// router advertisements.
func lastingPrefixes(rec *state.Attachment) []netip.Prefix {
	var list []netip.Prefix
	for _, a := range rec.Addresses {
		if !autoconfigured(rec, a.Prefix) {
			list = append(list, a.Prefix)
		}
	}
	return list
}

// attach creates the pod's link. If a link with the port's name exists and belongs to this attachment, attach deletes
// that link and tries again. A killed Add or Del has left it, since this Add holds the attachment's record.
func (a *addCall) attach(ctx context.Context) error {
	port := a.portOnBridge()
	beforeUp := func(ctx context.Context, index int) error {
		// Check this before the pod is up, since from then on the pod itself answers for its addresses.
		if err := a.refuseAnswered(nil); err != nil {
			return err
		}

		return a.limit(ctx, index, port.MTU)
	}
	if a.namesAddresses() || !a.pod.Limits.IsZero() {
		port.BeforeUp = beforeUp
	} else if err := beforeUp(ctx, 0); err != nil {
		return err
	}

	if err := refuseDeleted(a.pending); err != nil {
		return err
	}

	if err := a.guardBefore(ctx, a.rec, a.required); err != nil {
		return err
	}

	owner := endpoint.AliasOwner(a.hash)
	link, err := a.s.Links.Attach(ctx, a.pod.NetNS, port)
	if errors.Is(err, fs.ErrExist) && !errors.Is(err, bridge.ErrPeerExists) {
		if err := refuseDeleted(a.pending); err != nil {
			return err
		}
		if err := a.s.Links.Detach(ctx, port.Name, owner); err != nil {
			return err
		}
		link, err = a.s.Links.Attach(ctx, a.pod.NetNS, port)
	}

	if isRoute(err) && errors.Is(err, fs.ErrExist) {
		if err = a.chooseFreeMetrics(ctx, &port, err); err == nil {
			link, err = a.s.Links.Attach(ctx, a.pod.NetNS, port)
		}
	}

	if err != nil {
		return explainRoute(err)
	}

	a.attached = true
	a.undo.push(func(ctx context.Context) error {
		err := a.s.Links.Detach(ctx, port.Name, owner)
		a.attached = err != nil
		return err
	})
	a.link = link
	a.rec.MTU, a.rec.MAC, a.rec.HostMAC = link.MTU, state.MAC(link.PeerMAC), state.MAC(link.MAC)
	a.rec.NetNSCookie = link.NetNSCookie
	return nil
}
