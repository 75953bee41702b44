package network

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// refuse gives what is asked about each lease that a server offers or grants to a pod; had
// is the lease that it had, nil if none.
func (a *adding) refuse(ctx context.Context, l *bridge.Link, had *dhcpc.Lease) func(l, _ *dhcpc.Lease) error {
	var before netip.Addr
	if had != nil {
		before = had.Address.Addr()
	}
	return func(offer, _ *dhcpc.Lease) error {
		own := offer.Address.Addr()
		if err := lease.Impossible(offer); err != nil {
			return err
		}
		if err := lease.Taken(a.s.Links.Routes(), l.Index, own, before); err != nil {
			return err
		}
		return a.anothersAddress(ctx, own)
	}
}

// anothersAddress says which pod has an address, of those that are there.
func (a *adding) anothersAddress(ctx context.Context, own netip.Addr) error {
	held, err := a.s.Firewall.AddressOwner(ctx, a.nw.GatewayLink(), own)
	switch {
	case err == nil && held == nil:
		return nil
	case err != nil:
		return err
	}
	if stale, err := a.entry.IsStale(ctx, held); stale || err != nil {
		return err
	}
	return fmt.Errorf("another pod of this node has it: %w", held)
}
