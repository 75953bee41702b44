package network

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// Check compares an attachment with what Add made of it: its link, addresses and routes, its limits and
// reservations, its network, and its part in the firewall. It compares the link with nw, and the pod's interface
// with pod.Reported, where other plugins have reported their changes, else with the record. One that is not on
// record, or whose Add did not come to its end, is ErrNotAttached. It changes nothing.
func (n *Node) Check(ctx context.Context, nw *Network, pod *Pod) ([]tombolo.Difference, error) {
	if err := n.usable(); err != nil {
		return nil, err
	}
	if err := nw.check(); err != nil {
		return nil, err
	}
	if err := pod.check(nw, n.cfg.NetNS); err != nil {
		return nil, err
	}
	s, err := n.openEntered(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	rec, err := n.attached(ctx, pod.key(nw))
	if err != nil {
		return nil, err
	}
	k := &checking{s, nw, pod, rec}
	found := &findings{}
	if err := k.attachment(ctx, found); err != nil {
		return nil, err
	}
	err = k.reservations(ctx, found)
	return found.List, err
}

// checking is one Check under way.
type checking struct {
	s   *session
	nw  *Network
	pod *Pod
	rec *state.Attachment
}

// attachment compares the attachment's network, and what it has there.
func (k *checking) attachment(ctx context.Context, found *findings) error {
	rec, err := k.s.Dir.LoadNetwork(k.nw.Name)
	if err != nil {
		found.Add("the record of network %q: %v", k.nw.Name, err)
		return nil
	}
	shared, err := checkNetwork(ctx, k.s, rec, []*state.Attachment{k.rec})
	if err != nil {
		return err
	}
	found.AddAll(shared.List, "")
	p, err := k.s.find(ctx, rec, k.rec)
	if err != nil {
		return err
	}
	p.pod.Close()
	p.pod, p.lost, p.keeperOptional = k.pod.NetNS, nil, k.pod.Lease != nil && k.pod.Lease.KeeperOptional
	if err := k.expect(ctx, &p.want, found); err != nil {
		return err
	}
	err = p.look(ctx)
	found.AddAll(p.found.List, "")
	return err
}

// expect says what the pod's port and interface should be by the configuration, and by what others have told.
func (k *checking) expect(ctx context.Context, port *bridge.Port, found *findings) error {
	port.Bridge = k.nw.Bridge
	if !k.nw.VLAN.IsZero() {
		port.VLAN = k.nw.VLAN
	}
	port.Hairpin, port.Isolated = k.nw.Hairpin, k.nw.Isolated
	told := k.pod.Reported
	if told == nil {
		return nil
	}
	// The entry has the MAC that Add gave, also if other plugins gave the pod another.
	port.StaticFDB = port.StaticFDB && bytes.Equal(told.MAC, port.PeerMAC)
	port.PeerMAC = told.MAC
	if text := told.HostMACs[k.rec.HostIf]; text != "" {
		if mac, err := net.ParseMAC(text); err == nil && len(mac) == 6 {
			port.MAC = mac
		} else {
			found.Add("prevResult gives the interface %s the MAC %.40q, which is invalid", k.rec.HostIf, text)
		}
	}
	has, err := podAddresses(ctx, k.pod.NetNS)
	port.Addresses = k.expectedAddresses(told, has, found)
	port.Routes = append(subnets(port.Addresses), routesFor(nil, led(k.rec, told.Routes))...)
	return err
}

// expectedAddresses are those that the pod's interface should have: what the report
// names, with what others have added. They may have taken some of Add's
// away too, but not if the pod has them still. A lease and an advertised prefix
// come and go, and are compared elsewhere.
func (k *checking) expectedAddresses(told *Reported, has []netip.Prefix, found *findings) []netip.Prefix {
	onRecord := func(p netip.Prefix) bool {
		return slices.ContainsFunc(k.rec.Addresses, func(a ipam.Address) bool { return a.Prefix == p })
	}
	named := slices.Clone(told.Addresses)
	for _, p := range told.Unplaced {
		if onRecord(p) {
			named = append(named, p)
		}
	}
	if k.rec.IPAMType == endpoint.Leased || k.rec.SLAAC {
		return slices.DeleteFunc(named, func(p netip.Prefix) bool { return autoconfigured(k.rec, p) || !onRecord(p) })
	}
	for _, a := range k.rec.Addresses {
		if !slices.Contains(named, a.Prefix) && slices.Contains(has, a.Prefix) {
			found.Add("prevResult lacks the address %s of the interface %s", a.Prefix, k.pod.IfName)
		}
	}
	return named
}

// reservations asks the allocator, about the addresses that the pod is reported to have. Addresses that others have
// added need no reservation.
func (k *checking) reservations(ctx context.Context, found *findings) error {
	if k.rec.IPAMType == endpoint.Leased || k.nw.Allocator == nil {
		return nil
	}
	allocator := k.s.bind(k.nw.Allocator, k.nw.Name, k.pod.key(k.nw).owner(), k.rec.Short)
	var held []ipam.Address
	for _, a := range k.rec.Addresses {
		if told := k.pod.Reported; told == nil || told.names(a.Prefix.Addr()) {
			held = append(held, a)
		}
	}
	err := allocator.Check(ctx, k.pod.key(k.nw).owner(), held)
	if err != nil && !allocator.Slow() {
		found.Add("%v", err)
		return nil
	}
	return err
}

// names says whether an address is among those that are reported.
func (r *Reported) names(ip netip.Addr) bool {
	is := func(p netip.Prefix) bool { return p.Addr() == ip }
	return slices.ContainsFunc(r.Addresses, is) || slices.ContainsFunc(r.Unplaced, is) || slices.ContainsFunc(r.Others, is)
}

// checkNetwork finds what of a network's own parts is not as its record has it. A network without
// attachments needs none of it, unless the host itself goes by its bridge; without a bridge, too,
// it may be one that a runtime has deleted.
func checkNetwork(ctx context.Context, s *session, rec *state.Network, attachments []*state.Attachment) (*findings, error) {
	n := &site{s: s, rec: rec, attachments: attachments}
	if unused, err := s.Unused(rec, attachments); unused || err != nil {
		if deserted, _ := s.IsDeserted(ctx, rec); deserted {
			n.found.Advise(tombolo.RemedyConfigure, "bridge %s is gone, and the network has no pods; unless one is to come, this helps: tombolo remove %s", rec.Bridge, rec.Name)
		}
		return &n.found, err
	}
	err := n.look(ctx, parts())
	return &n.found, err
}
