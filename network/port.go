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
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// portPart is the host's end of a pod's veth, as a port of the bridge.
type portPart struct{}

// look compares the host's end of the veth.
func (portPart) look(ctx context.Context, p *attached) error {
	diffs, err := p.s.Links.Check(ctx, p.want)
	if err != nil {
		return err
	}
	p.gone = len(diffs) > 0 && diffs[0].What == "link" && diffs[0].Have == "" && diffs[0].Want == p.want.Name
	switch {
	case p.gone && p.lost != nil:
		p.found.List = nil
		p.found.Advise(tombolo.RemedyCollect, "it is dead: port %s is missing, and its namespace is gone: %v", p.want.Name, p.lost)
		return nil
	case p.gone:
		p.found.List = nil
		p.found.AddAll(diffs[:1], tombolo.RemedyRecreate)
		return nil
	case p.lost != nil:
		p.found.Advise(tombolo.RemedyRecreate, "its namespace is gone: %v", p.lost)
	}
	p.found.AddAll(diffs, tombolo.RemedyRepair)
	return nil
}

// mend puts the port back on its bridge, which may be another than that of
// its network by now, and gone.
func (portPart) mend(ctx context.Context, p *attached) error {
	br, err := p.s.link(ctx, p.Bridge)
	if err != nil {
		return err
	}
	port := portOn(p.Attachment, br)
	// Of an entry, and of VLANs, there is no knowing here.
	if br.Kind != "bridge" || len(port.Differences(*p.link, *br)) == 0 && !port.StaticFDB && port.VLAN.IsZero() {
		return nil
	}
	port.BridgeIndex = br.Index
	return p.s.Links.Enslave(ctx, port)
}

// onBridge says how a link differs from the port that an attachment should have.
func onBridge(ctx context.Context, s *session, a *state.Attachment, link, br *bridge.Link) ([]tombolo.Difference, error) {
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

// onBridgeNow is onBridge by another look, at a port and a record that no call is changing: its ADD may have ended since
// the ports were listed, and its DEL shuts a port before it deletes it.
func onBridgeNow(ctx context.Context, s *session, a *state.Attachment, br *bridge.Link) (diffs []tombolo.Difference, _ error) {
	err := s.locked(a.Network, a.Hash(), func(now *state.Attachment) error {
		link, err := s.link(ctx, now.HostIf)
		if err == nil && link.Index != 0 && now.State == state.Ready {
			diffs, err = onBridge(ctx, s, now, link, br)
		}
		return err
	})
	if errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return diffs, err
}

// keepTable is what a kernel without such a limit (before Linux 6.7) needs in its place: the
// bridge learns nothing from a pod that nothing holds to its own MAC, and has an entry of
// that MAC for good. Frames for other MACs behind the port then go to all ports.
func keepTable(p *bridge.Port, guarded bool, br *bridge.Link) {
	if br.Bridge != nil && br.Bridge.MaxLearned == nil && !guarded {
		p.NoLearning, p.StaticFDB = true, true
	}
}

// portOf is the host's side of an attachment, from its record.
func portOf(a *state.Attachment) bridge.Port {
	p := bridge.Port{
		Bridge: a.Bridge, Name: a.HostIf, Peer: a.IfName, MTU: a.MTU, MAC: net.HardwareAddr(a.HostMAC), PeerMAC: net.HardwareAddr(a.MAC),
		Alias:   endpoint.AliasOf(a),
		Hairpin: a.Hairpin && !sharesNIC(a), Isolated: a.Isolated, ForwardGroups: true,
		Down: !a.Up, VLAN: a.VLAN,
	}
	if a.SLAAC {
		p.Autoconf = &bridge.Autoconf{DefaultRoute: a.DefaultRoute != exitHost}
	}
	return p
}

// sharesNIC reports whether the bridge of an attachment shares a NIC. The host routes what such a pod sends to a service,
// and a hairpin port would send the pod a copy of each of its own multicast frames.
func sharesNIC(a *state.Attachment) bool { return a.NIC != "" }

// portOn is portOf, with what depends on the bridge that is there.
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

// Renamed says whether an attachment's port is there by another name: its alias stays.
func (s *session) Renamed(ctx context.Context, hash string) (bool, error) {
	links, err := s.Links.Veths(ctx)
	return slices.ContainsFunc(links, func(l bridge.Link) bool {
		return l.Name != "veth"+hash && strings.HasPrefix(l.Alias, endpoint.AliasOwner(hash))
	}), err
}

// live lists the addresses that pods of a network have in the kernel, by the aliases of their ports.
func (s *session) live(ctx context.Context, network string) ([]ipam.Live, error) {
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

func (r *remains) port() string { return "veth" + r.hash }

// autoconfigured says whether an address is one that a pod has formed by a router advertisement. The advertised
// prefix may change, so the pod may lose the address.
func autoconfigured(a *state.Attachment, p netip.Prefix) bool {
	if !a.SLAAC || a.MAC == nil || !p.Addr().Is6() {
		return false
	}
	return ident.EndsAlike(p.Addr(), ident.LinkLocal(net.HardwareAddr(a.MAC)))
}

// lasting are the addresses of an attachment that it is to have for as long as it is there.
func lasting(rec *state.Attachment) []netip.Prefix {
	var list []netip.Prefix
	for _, a := range rec.Addresses {
		if !autoconfigured(rec, a.Prefix) {
			list = append(list, a.Prefix)
		}
	}
	return list
}

// attach makes the link. One of the same name that an Add or a Del of this very attachment left when it was killed
// is deleted first: the record, which was made anew, says that no other call is at work on it.
func (a *adding) attach(ctx context.Context) error {
	p, port := a.plan, a.plan.onto(a.built)
	beforeUp := func(ctx context.Context, index int) error {
		// Once the pod is up, it answers for its addresses, too.
		if err := a.refuseAnswered(nil); err != nil {
			return err
		}

		return a.shape(ctx, index, port.MTU)
	}
	if a.namesAddresses() || !a.pod.Limits.IsZero() {
		port.BeforeUp = beforeUp
	} else if err := beforeUp(ctx, 0); err != nil {
		return err
	}

	if err := wanted(a.pending); err != nil {
		return err
	}
	if err := a.holdBefore(ctx, &p.rec, p.want); err != nil {
		return err
	}
	owner := endpoint.AliasOwner(a.hash)
	link, err := a.s.Links.Attach(ctx, a.pod.NetNS, port)
	if errors.Is(err, fs.ErrExist) && !errors.Is(err, bridge.ErrPeerExists) {
		if err := wanted(a.pending); err != nil {
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
	a.back.push(func(ctx context.Context) error {
		err := a.s.Links.Detach(ctx, port.Name, owner)
		a.attached = err != nil
		return err
	})
	a.link = link
	p.link(link)
	return nil
}
