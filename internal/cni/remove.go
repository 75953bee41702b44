package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// RemoveNetwork takes down what GC leaves of a network: its rules, its gateways,
// its record, and its bridge where nothing else is on it. It refuses while the
// network has attachments.
func (p *Plugin) RemoveNetwork(ctx context.Context, stateDir, name string) error {
	if !isIdentifier(name) {
		return newError(codeInvalidConfig, "%q is not the name of a network", name)
	}
	c := &call{Plugin: p, verb: "remove", network: name}
	h, err := c.openHost(settings{Network: name, StateDir: stateDir})
	if err != nil {
		return err
	}
	defer h.Close()
	// The locks that come first: of the lease that the host has by the network's uplink.
	uplink := h.uplinkOf(name)
	if err := h.lockHostLease(ctx, uplink); err != nil {
		return err
	}
	leases, err := h.leases()
	if err != nil {
		return err
	}
	if err := h.enterAlone(ctx); err != nil {
		return err
	}
	if now := h.uplinkOf(name); now != uplink {
		return newError(codeTryAgainLater, "network %q was given another uplink meanwhile: try again", name)
	}
	left, err := h.attachments(ctx, leases)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return newError(codeAttached, "network %q has %s: remove the pods first, or let the runtime collect what is stale (GC)", name, plural(len(left), "attachment", "attachments"))
	}
	rec, err := h.dir.LoadNetwork(name)
	if errors.Is(err, fs.ErrNotExist) {
		// Rules may be left all the same, where the state was lost.
		return joinSteps(
			func() error { return h.fw.RemoveNetwork(ctx, name) },
			func() error { return h.withdraw(ctx, name) },
		)
	}
	if err != nil {
		return newError(codeIO, "%v", err)
	}
	err = joinSteps(
		func() error { return h.fw.RemoveNetwork(ctx, name) },
		func() error { return h.withdraw(ctx, name) },
		func() error { return h.closeLoopback(ctx, rec.Bridge, false) },
		func() error { return h.releaseUplink(ctx, rec) },
		func() error { return h.removeBridge(ctx, rec) },
		func() error { return removeEmptyReservations(h.dir.Path() + "/ipam/" + name) },
	)
	if err != nil {
		return err
	}
	return h.dir.RemoveNetwork(name)
}

// uplinkOf is the NIC of a network on record; empty where it has none.
func (h *host) uplinkOf(name string) string {
	rec, err := h.dir.LoadNetwork(name)
	if err != nil {
		return "" // for who needs the record to say
	}
	return rec.Uplink
}

// withdraw takes our rules out of the chains of others, with the last network.
func (h *host) withdraw(ctx context.Context, name string) error {
	networks, _, err := h.dir.ListNetworks()
	if err != nil {
		return newError(codeIO, "%v", err)
	}
	if slices.ContainsFunc(networks, func(n *state.Network) bool { return n.Name != name }) {
		return nil
	}
	return h.fw.Withdraw(ctx)
}

// removeBridge deletes the network's bridge if we made it, or, where another
// network or somebody's port is on it, or somebody else made it, only the gateways
// that are this network's alone.
func (h *host) removeBridge(ctx context.Context, rec *state.Network) error {
	l, err := h.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if l.Kind != "bridge" {
		return &bridgeTaken{name: rec.Bridge, kind: l.Kind}
	}
	shared, err := h.sharers(rec)
	if err != nil {
		return err
	}
	ports, err := h.br.Ports(ctx, l.Index)
	if err != nil {
		return err
	}
	if len(shared) == 0 && len(ports) == 0 && l.Alias == bridgeAlias {
		return h.br.Remove(ctx, rec.Bridge)
	}
	for _, gw := range rec.Gateways {
		if slices.ContainsFunc(shared, func(o *state.Network) bool { return slices.Contains(o.Gateways, gw) }) {
			continue
		}
		if err := h.br.Addresses().Remove(addr.Address{Prefix: gw, Link: l.Index}); err != nil {
			return err
		}
	}
	return nil
}

// sharers are the other networks on the same bridge.
func (h *host) sharers(rec *state.Network) ([]*state.Network, error) {
	all, _, err := h.dir.ListNetworks()
	if err != nil {
		return nil, newError(codeIO, "%v", err)
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
		return newError(codeIO, "delete the reservations of the network: %v", err)
	}
	return nil
}

// IsAttached says whether RemoveNetwork refused since the network has
// attachments.
func IsAttached(err error) bool {
	var e *types.Error
	return errors.As(err, &e) && e.Code == codeAttached
}
