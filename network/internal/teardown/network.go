package teardown

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Network takes down what Collect leaves of a network: see network.Node.Remove.
func Network(ctx context.Context, s *session.Session, name string) error {
	leases, err := leases(s, name)
	if err != nil {
		return err
	}
	if err := s.EnterAlone(ctx); err != nil {
		return err
	}
	left, err := attachments(ctx, s, name, leases)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fail.Errorf(fail.ErrAttached, "network %q has %s: remove the pods first", name, fail.Count(len(left), "attachment", "attachments"))
	}
	rec, err := s.Dir.LoadNetwork(name)
	if errors.Is(err, fs.ErrNotExist) {
		// Without a record there may be rules, where the state was lost, and a directory that a failed Add made.
		return fail.Join(
			func() error { return s.Firewall.RemoveNetwork(ctx, name) },
			func() error { return withdraw(ctx, s, name) },
			func() error { return s.Dir.RemoveNetwork(name) },
		)
	}
	if err != nil {
		return fail.State(err)
	}
	err = fail.Join(
		func() error { return s.Firewall.RemoveNetwork(ctx, name) },
		func() error { return withdraw(ctx, s, name) },
		func() error { return CloseLoopback(ctx, s, false, rec.Bridge, rec.GatewayLink()) },
		func() error { return releaseUplink(ctx, s, rec) },
		func() error { return Bridge(ctx, s, rec) },
		func() error { return removeEmptyReservations(s.Dir.Path() + "/ipam/" + name) },
	)
	if err != nil {
		return err
	}
	return s.Dir.RemoveNetwork(name)
}

// Deserted deletes what is left of a network that has no pod, no bridge and no uplink. The caller has the exclusive
// lock. It is about to build another network, which needs our rules in other programs' chains, so those stay.
func Deserted(ctx context.Context, s *session.Session, name string) error {
	if err := s.Firewall.RemoveNetwork(ctx, name); err != nil {
		return err
	}
	if err := removeEmptyReservations(s.Dir.Path() + "/ipam/" + name); err != nil {
		return err
	}
	return s.Dir.RemoveNetwork(name)
}

// withdraw takes our rules out of the chains of others, with the last network.
func withdraw(ctx context.Context, s *session.Session, name string) error {
	networks, _, err := s.Dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	if slices.ContainsFunc(networks, func(n *state.Network) bool { return n.Name != name }) {
		return nil
	}
	return s.Foreign("").Remove(ctx)
}

// Bridge deletes the network's bridge if we made it, or, where another
// network or somebody's port is on it, or somebody else made it, only the gateways
// that are this network's alone. Another program's pods on it keep theirs.
func Bridge(ctx context.Context, s *session.Session, rec *state.Network) error {
	l, err := s.Links.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if l.Kind != "bridge" {
		return fail.Errorf(bridge.ErrNotBridge, "%s is no longer a bridge but of kind %q: it is left alone", rec.Bridge, l.Kind)
	}
	shared, err := sharers(s, rec)
	if err != nil {
		return err
	}
	ports, err := s.Links.Ports(ctx, l.Index)
	if err != nil {
		return err
	}
	if len(shared) == 0 && len(ports) == 0 && l.Alias == endpoint.BridgeAlias {
		return s.Links.Remove(ctx, rec.Bridge)
	}
	if rec.VLAN != (state.VLAN{}) {
		return leaveVLANs(ctx, s, rec, l, shared)
	}
	if hasPods(ctx, s, ports) {
		return nil
	}
	for _, gw := range rec.Gateways {
		if slices.ContainsFunc(shared, func(o *state.Network) bool { return slices.Contains(o.Gateways, gw) }) {
			continue
		}
		if err := s.Links.Addresses().Remove(addr.Address{Prefix: gw, Link: l.Index}); err != nil {
			return err
		}
	}
	return nil
}

// hasPods says whether any port that is not ours leads into another namespace.
func hasPods(ctx context.Context, s *session.Session, ports []bridge.Link) bool {
	return slices.ContainsFunc(ports, func(p bridge.Link) bool {
		if _, own := endpoint.ParseAlias(p.Alias); own || p.Kind != "veth" {
			return false
		}
		peer, err := s.Links.LinkByIndex(ctx, p.Peer)
		return err != nil || peer.Peer != p.Index || peer.Kind != p.Kind
	})
}

// leaveVLANs takes the host's link in a network's VLAN away, and its uplink out of the VLANs
// that no other network on the bridge has.
func leaveVLANs(ctx context.Context, s *session.Session, rec *state.Network, l *bridge.Link, shared []*state.Network) error {
	if host, ok := recorded.HostVLAN(rec, l); ok && !slices.ContainsFunc(shared, func(o *state.Network) bool { return o.VLAN.ID == rec.VLAN.ID }) {
		if err := s.Links.VLANs().RemoveLink(ctx, host); err != nil {
			return err
		}
	}
	if rec.Uplink == "" {
		return nil
	}
	nic, err := s.Links.Link(ctx, rec.Uplink)
	if err != nil || nic.Master != l.Index {
		return nil // it is no port any more
	}
	err = s.Links.VLANs().Leave(ctx, nic.Index, recorded.Carried(rec)...)
	for _, o := range shared {
		if err == nil && o.Uplink == rec.Uplink {
			_, err = s.Links.VLANs().Join(ctx, nic.Index, recorded.Carried(o)...)
		}
	}
	return err
}

// sharers are the other networks on the same bridge.
func sharers(s *session.Session, rec *state.Network) ([]*state.Network, error) {
	all, _, err := s.Dir.ListNetworks()
	if err != nil {
		return nil, fail.State(err)
	}
	return slices.DeleteFunc(all, func(o *state.Network) bool {
		return o.Name == rec.Name || o.Bridge != rec.Bridge
	}), nil
}

// removeEmptyReservations deletes the network's own directory of reservations.
// What no attachment has is only bookkeeping. A directory that the configuration
// named stays: it is the operator's.
func removeEmptyReservations(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fail.Errorf(fail.ErrState, "delete the reservations of the network: %w", err)
	}
	return nil
}

// releaseUplink gives a NIC back with the last network that is on its bridge.
func releaseUplink(ctx context.Context, s *session.Session, rec *state.Network) error {
	if rec.Uplink == "" {
		return nil
	}
	shared, err := sharers(s, rec)
	if err != nil || len(shared) > 0 {
		return err
	}
	return s.Uplinks().GiveBack(ctx, rec.Uplink)
}

// RefusePodsBehind keeps pods from losing their LAN.
func RefusePodsBehind(s *session.Session, nic string) error {
	networks, _, err := s.Dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	for _, n := range networks {
		if n.Uplink != nic {
			continue
		}
		attachments, _, err := s.Dir.List(n.Name)
		if err != nil {
			return fail.State(err)
		}
		if len(attachments) > 0 {
			return fail.Errorf(fail.ErrAttached, "uplink %s: network %q has %s on it: remove the pods first", nic, n.Name, fail.Count(len(attachments), "attachment", "attachments"))
		}
	}
	return nil
}
