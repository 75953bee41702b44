package network

import (
	"bytes"
	"cmp"
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

// Check compares an attachment with the result of its Add: its port, its limits, its reservations, its network, and
// its elements in the firewall. Inside the pod it compares only the parts that the CNI specification names. These are
// the interface and its MAC, and the addresses and routes of pod.Reported. Without pod.Reported, Check uses the
// record. A default route may lead anywhere, since other plugins move it.
//
// If there is no record of the attachment, or its Add is not complete, the error matches ErrNotAttached. Check
// changes nothing, with one exception. If the host has become a router since the Add, it deletes the rules that stop
// forwarding for others.
func (n *Node) Check(ctx context.Context, nw *Network, pod *Pod) ([]tombolo.Difference, error) {
	if err := cmp.Or(nw.check(), pod.check(nw, n.cfg.NetNS)); err != nil {
		return nil, err
	}

	s, err := n.openEntered(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := reopen(ctx, s, nw.Name); err != nil {
		return nil, err
	}

	rec, err := n.loadAttachment(pod.key(nw))
	if err != nil {
		return nil, err
	}

	k := &checkCall{s, nw, pod, rec}
	found := &findings{}
	if err := k.attachment(ctx, found); err != nil {
		return nil, err
	}

	err = k.reservations(ctx, found)
	return found.list, err
}

// checkCall is the state of one Check in progress.
type checkCall struct {
	s   *session
	nw  *Network
	pod *Pod
	rec *state.Attachment
}

// attachment compares the network with its record, and the attachment with its own record.
func (k *checkCall) attachment(ctx context.Context, found *findings) error {
	rec, err := k.s.Dir.LoadNetwork(k.nw.Name)
	if err != nil {
		found.add("the record of network %q: %v", k.nw.Name, err)
		return nil
	}

	shared, err := checkNetwork(ctx, k.s, rec, []*state.Attachment{k.rec})
	if err != nil {
		return err
	}

	found.addAll(shared.list, "")
	p, err := k.s.find(ctx, rec, k.rec)
	if err != nil {
		return err
	}

	p.pod.Close()
	p.pod, p.lost, p.keeperOptional = k.pod.NetNS, nil, k.pod.Lease != nil && k.pod.Lease.KeeperOptional
	k.expect(&p.want, found)
	if err := p.look(ctx); err != nil {
		return err
	}

	found.addAll(p.found.list, "")
	p.want.MTU, p.want.Down = 0, len(p.want.Addresses) == 0 // without addresses, the reference plugin checks no route
	p.anyDefault = true
	inside, err := p.inside(ctx)
	found.addAll(inside, "")
	return err
}

// expect sets the expected properties of the pod's port and interface. It takes them from the configuration and from
// the reports of other plugins.
func (k *checkCall) expect(port *bridge.Port, found *findings) {
	port.Bridge = k.nw.Bridge
	if !k.nw.VLAN.IsZero() {
		port.VLAN = k.nw.VLAN
	}

	port.Hairpin, port.Isolated = k.nw.Hairpin && !sharesNIC(k.rec), k.nw.Isolated
	report := k.pod.Reported
	if report == nil {
		return
	}

	// Do not check the static FDB entry if another plugin has changed the pod's MAC, since the entry still has the
	// MAC from Add.
	port.StaticFDB = port.StaticFDB && bytes.Equal(report.MAC, port.PeerMAC)
	port.PeerMAC = report.MAC
	if text := report.HostMACs[k.rec.HostIf]; text != "" {
		if mac, err := net.ParseMAC(text); err == nil && len(mac) == 6 {
			port.MAC = mac
		} else {
			found.add("prevResult gives the interface %s the MAC %.40q, which is invalid", k.rec.HostIf, text)
		}
	}

	port.Addresses = k.expectedAddresses(report)
	port.Routes = append(subnetRoutes(port.Addresses), routesFor(nil, report.Routes)...)
}

// expectedAddresses returns the reported addresses that the pod's interface should have. With a lease or SLAAC,
// addresses come and go, and the report may be outdated. Then only those reported addresses count that are still on
// record.
func (k *checkCall) expectedAddresses(report *Reported) []netip.Prefix {
	onRecord := func(p netip.Prefix) bool {
		return slices.ContainsFunc(k.rec.Addresses, func(a ipam.Address) bool { return a.Prefix == p })
	}
	reported := slices.Clone(report.Addresses)
	for _, p := range report.Unplaced {
		if onRecord(p) {
			reported = append(reported, p)
		}
	}

	if k.rec.IPAMType != endpoint.Leased && !k.rec.SLAAC {
		return reported
	}
	return slices.DeleteFunc(reported, func(p netip.Prefix) bool { return autoconfigured(k.rec, p) || !onRecord(p) })
}

// reservations checks that the allocator still reserves the pod's addresses. It asks about the addresses that are on
// record and, if there is a report, in the report. Addresses from other plugins need no reservation.
func (k *checkCall) reservations(ctx context.Context, found *findings) error {
	if k.rec.IPAMType == endpoint.Leased || k.nw.Allocator == nil {
		return nil
	}

	allocator := k.s.bindAllocator(k.nw.Allocator, k.nw.Name, k.pod.key(k.nw).owner(), k.rec.Short)
	var own []ipam.Address
	for _, a := range k.rec.Addresses {
		if report := k.pod.Reported; report == nil || report.names(a.Prefix.Addr()) {
			own = append(own, a)
		}
	}

	err := allocator.Check(ctx, k.pod.key(k.nw).owner(), own)
	if err != nil && !allocator.Slow() {
		found.add("%v", err)
		return nil
	}

	return err
}

// names reports whether an address is among the reported ones.
func (r *Reported) names(ip netip.Addr) bool {
	is := func(p netip.Prefix) bool { return p.Addr() == ip }
	return slices.ContainsFunc(r.Addresses, is) || slices.ContainsFunc(r.Unplaced, is) ||
		slices.ContainsFunc(r.Others, is)
}

// checkNetwork compares a network's own parts with its record. A network without attachments needs none of its parts,
// unless the host itself uses the bridge. If such a network's bridge is missing, a runtime may have deleted the
// network.
func checkNetwork(ctx context.Context, s *session, rec *state.Network, attachments []*state.Attachment) (*findings,
	error) {
	n := &site{s: s, rec: rec, attachments: attachments}
	if len(attachments) == 0 {
		if l, err := s.link(ctx, rec.Bridge); err == nil && l.Index == 0 {
			n.found.advise(tombolo.RemedyConfigure,
				"bridge %s is gone, and the network has no pods; unless one is to come, this helps: tombolo remove %s",
				rec.Bridge, rec.Name)
		}
		n.lookAtOthers()
		return &n.found, nil
	}

	err := n.look(ctx, parts())
	return &n.found, err
}
