package network

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// removeNetwork removes the objects of a network that Collect leaves: see Node.Remove.
func removeNetwork(ctx context.Context, s *session, name string) error {
	leases, err := leasesOf(s, name)
	if err != nil {
		return err
	}

	if err := s.enterAlone(ctx); err != nil {
		return err
	}

	rest, err := s.inventory(ctx, name, leases)
	if err != nil {
		return err
	}

	if len(rest.all) > 0 {
		return failf(ErrAttached, "network %q has %s: remove the pods first", name,
			printable.Count(len(rest.all), "attachment", "attachments"))
	}

	rec, err := s.Dir.LoadNetwork(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, state.ErrDamaged) {
		// Continue without a record. There may still be rules, if the state was lost, or a directory that a failed
		// Add made.
		rec, err = &state.Network{}, nil
	}

	if err != nil {
		return stateError(err)
	}

	others, err := s.otherNetworks(name)
	if err != nil {
		return err
	}

	sharers, err := sharers(s, rec)
	if err == nil && rec.Uplink != "" &&
		!slices.ContainsFunc(sharers, func(o *state.Network) bool { return o.Uplink != "" }) {
		n := &site{s: s, rec: rec}
		if err = n.find(ctx); err == nil && n.share != nil {
			err = s.refuseCutOff(ctx, n.bridge, rec.Uplink, n.share.Port)
		}
	}

	if err != nil {
		return err
	}

	err = joinSteps(
		func() error {
			if len(others) > 0 {
				return nil
			}

			// With the last network, delete our rules in other programs' chains too.
			return errors.Join(stopForwarding(rec), s.foreignFirewall("").Remove(ctx))
		},
		func() error { return s.Firewall.RemoveNetwork(ctx, name) },
		func() error { return closeUnusedLoopback(ctx, s, false, rec.Bridge, rec.GatewayLink()) },
		func() error { return removeShare(ctx, s, rec) },
		func() error { return removeBridge(ctx, s, rec) },
		func() error { return s.removeReservations(name) },
	)
	if err != nil {
		return err
	}

	return s.Dir.RemoveNetwork(name)
}

// Known returns an error if a network is not on record and has no objects in the kernel, as when its name is
// mistyped. The error matches ErrInvalid, and lists the names of the recorded networks.
func (u Upkeep) Known(ctx context.Context, name string) error {
	return u.node.withSession(func(s *session) error { return s.refuseUnknown(ctx, name) }, name)
}

func (s *session) refuseUnknown(ctx context.Context, name string) error {
	names, err := s.Dir.Networks()
	if err != nil || slices.Contains(names, name) {
		return stateError(err)
	}

	leases, err := leasesOf(s, name)
	if err != nil {
		return err
	}

	if has, err := s.Firewall.HasNetwork(ctx, name); has || err != nil {
		return err
	}

	if rest, err := s.inventory(ctx, name, leases); err != nil || len(rest.all) > 0 {
		return err
	}

	return failf(ErrInvalid, "%w", state.UnknownNetwork(names, name))
}

// removeDeserted deletes the remains of a deserted network (isDeserted). The caller holds the exclusive lock, and
// is about to build another network. That network needs our rules in other programs' chains, so removeDeserted
// keeps them.
func removeDeserted(ctx context.Context, s *session, name string) error {
	rec, err := s.Dir.LoadNetwork(name)
	if err != nil {
		return stateError(err)
	}

	if err := errors.Join(s.Firewall.RemoveNetwork(ctx, name), removeBridge(ctx, s, rec)); err != nil {
		return err
	}

	if err := s.removeReservations(name); err != nil {
		return err
	}
	return s.Dir.RemoveNetwork(name)
}

// removeBridge deletes the network's bridge if we made it, and no other network and no port uses it. If the bridge
// stays, removeBridge calls removeVLANLink in a VLAN. Without a VLAN, it deletes those gateways' addresses that no
// other network needs, unless pods of another program are on the bridge.
func removeBridge(ctx context.Context, s *session, rec *state.Network) error {
	l, err := s.link(ctx, rec.Bridge)
	if err != nil || l.Index == 0 {
		return err
	}

	if l.Kind != "bridge" {
		return failf(bridge.ErrNotBridge, "%s is no longer a bridge but of kind %q: it is left alone", rec.Bridge,
			l.Kind)
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
		// If there is no file for systemd-networkd, networkdFile returns "", and file.Remove does nothing.
		return errors.Join(s.Links.Remove(ctx, rec.Bridge), file.Remove(networkdFile(rec.Bridge)))
	}

	if !rec.VLAN.IsZero() {
		return removeVLANLink(ctx, s, rec, l, shared)
	}

	if hasPods(ctx, s, ports) {
		return nil
	}

	for _, gw := range rec.Gateways {
		if slices.ContainsFunc(shared, func(o *state.Network) bool { return slices.Contains(o.Gateways, gw) }) {
			continue
		}
		if err := s.Links.Addresses().Remove(ctx, addr.Address{Prefix: gw, Link: l.Index}); err != nil {
			return err
		}
	}

	return nil
}

// refuseCutOff returns an error if a bridge that is about to lose its uplink has ports of other programs, such as
// virtual machines. own is the name of the port that connects the bridge to its uplink.
func (s *session) refuseCutOff(ctx context.Context, nicLink *bridge.Link, uplink, own string) error {
	ports, err := s.Links.Ports(ctx, nicLink.Index)
	var foreign []string
	for _, p := range ports {
		if p.Name != own && !strings.HasPrefix(p.Alias, endpoint.AliasPrefix) {
			foreign = append(foreign, p.Name)
		}
	}

	if err != nil || len(foreign) == 0 {
		return err
	}

	return failf(ErrAttached,
		"bridge %s has ports of other programs, which would no longer reach the LAN of %s: %s: take them off first "+
			"(ip link set %[4]s nomaster)",
		nicLink.Name, uplink, strings.Join(foreign, ", "), foreign[0])
}

// hasPods reports whether one of the ports is not ours and leads into another namespace.
func hasPods(ctx context.Context, s *session, ports []bridge.Link) bool {
	return slices.ContainsFunc(ports, func(p bridge.Link) bool {
		if _, own := endpoint.ParseAlias(p.Alias); own || p.Kind != "veth" {
			return false
		}
		peer, err := s.Links.LinkByIndex(ctx, p.Peer)
		return err != nil || peer.Peer != p.Index || peer.Kind != p.Kind
	})
}

// sharers returns the other networks on the same bridge.
func sharers(s *session, rec *state.Network) ([]*state.Network, error) {
	others, err := s.otherNetworks(rec.Name)
	return slices.DeleteFunc(others, func(o *state.Network) bool { return o.Bridge != rec.Bridge }), err
}

// refusePodsBehind returns an error if networks with the uplink nic have attachments, since these would lose their
// LAN.
func refusePodsBehind(s *session, nic string) error {
	networks, _, err := s.Dir.ListNetworks()
	if err != nil {
		return stateError(err)
	}

	for _, n := range networks {
		if n.Uplink != nic {
			continue
		}

		attachments, _, err := s.Dir.List(n.Name)
		if err != nil {
			return stateError(err)
		}
		if len(attachments) > 0 {
			return failf(ErrAttached, "uplink %s: network %q has %s on it: remove the pods first", nic, n.Name,
				printable.Count(len(attachments), "attachment", "attachments"))
		}
	}

	return nil
}
