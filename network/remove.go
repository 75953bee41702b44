package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
)

// Remove takes down what Collect leaves of a network: its rules, its gateways,
// its record, and its bridge where nothing else is on it. It refuses while the
// network has attachments (ErrAttached).
func (n *Node) Remove(ctx context.Context, name string) error {
	if err := n.usable(ctx); err != nil {
		return err
	}
	if err := checkName(name); err != nil {
		return err
	}
	s, err := n.openKnown()
	if err != nil {
		return err
	}
	defer s.Close()
	// The locks that come first: of the lease that the host has by the network's uplink.
	uplink := s.uplinkOf(name)
	if s.hostLease, err = takeover.LockHostLease(ctx, s.leaseDir, uplink); err != nil {
		return err
	}
	leases, err := s.leases(name)
	if err != nil {
		return err
	}
	if err := s.enterAlone(ctx); err != nil {
		return err
	}
	if now := s.uplinkOf(name); now != uplink {
		return fail.Errorf(ErrTryAgain, "network %q was given another uplink meanwhile: try again", name)
	}
	left, err := s.attachments(ctx, name, leases)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fail.Errorf(ErrAttached, "network %q has %s: remove the pods first, or let the runtime collect what is stale (GC)", name, fail.Count(len(left), "attachment", "attachments"))
	}
	rec, err := s.dir.LoadNetwork(name)
	if errors.Is(err, fs.ErrNotExist) {
		// Rules may be left all the same, where the state was lost.
		return joinSteps(
			func() error { return s.fw.RemoveNetwork(ctx, name) },
			func() error { return s.withdraw(ctx, name) },
		)
	}
	if err != nil {
		return fail.State(err)
	}
	err = joinSteps(
		func() error { return s.fw.RemoveNetwork(ctx, name) },
		func() error { return s.withdraw(ctx, name) },
		func() error { return s.closeLoopback(ctx, rec.Bridge, false) },
		func() error { return s.releaseUplink(ctx, rec) },
		func() error { return s.removeBridge(ctx, rec) },
		func() error { return removeEmptyReservations(s.dir.Path() + "/ipam/" + name) },
	)
	if err != nil {
		return err
	}
	return s.dir.RemoveNetwork(name)
}

// uplinkOf is the NIC of a network on record; empty where it has none.
func (s *session) uplinkOf(name string) string {
	rec, err := s.dir.LoadNetwork(name)
	if err != nil {
		return "" // for who needs the record to say
	}
	return rec.Uplink
}

// withdraw takes our rules out of the chains of others, with the last network.
func (s *session) withdraw(ctx context.Context, name string) error {
	networks, _, err := s.dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	if slices.ContainsFunc(networks, func(n *state.Network) bool { return n.Name != name }) {
		return nil
	}
	return s.fw.Withdraw(ctx)
}

// removeBridge deletes the network's bridge if we made it, or, where another
// network or somebody's port is on it, or somebody else made it, only the gateways
// that are this network's alone.
func (s *session) removeBridge(ctx context.Context, rec *state.Network) error {
	l, err := s.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if l.Kind != "bridge" {
		return &bridgeTaken{name: rec.Bridge, kind: l.Kind}
	}
	shared, err := s.sharers(rec)
	if err != nil {
		return err
	}
	ports, err := s.br.Ports(ctx, l.Index)
	if err != nil {
		return err
	}
	if len(shared) == 0 && len(ports) == 0 && l.Alias == endpoint.BridgeAlias {
		return s.br.Remove(ctx, rec.Bridge)
	}
	for _, gw := range rec.Gateways {
		if slices.ContainsFunc(shared, func(o *state.Network) bool { return slices.Contains(o.Gateways, gw) }) {
			continue
		}
		if err := s.br.Addresses().Remove(addr.Address{Prefix: gw, Link: l.Index}); err != nil {
			return err
		}
	}
	return nil
}

// sharers are the other networks on the same bridge.
func (s *session) sharers(rec *state.Network) ([]*state.Network, error) {
	all, _, err := s.dir.ListNetworks()
	if err != nil {
		return nil, fail.State(err)
	}
	return slices.DeleteFunc(all, func(o *state.Network) bool {
		return o.Name == rec.Name || o.Bridge != rec.Bridge
	}), nil
}

type bridgeTaken struct{ name, kind string }

func (e *bridgeTaken) Error() string {
	return fmt.Sprintf("%s is no longer a bridge but of kind %q: it is left alone", e.name, e.kind)
}

func (e *bridgeTaken) Unwrap() error { return bridge.ErrNotBridge }

// removeEmptyReservations deletes the network's own directory of reservations.
// What no attachment has is only bookkeeping. A directory that the configuration
// named stays: it is the operator's.
func removeEmptyReservations(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fail.Errorf(ErrState, "delete the reservations of the network: %v", err)
	}
	return nil
}
