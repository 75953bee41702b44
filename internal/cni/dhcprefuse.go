package cni

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// refuse gives what is asked about each lease that a server offers or grants to a pod; had
// is the lease that it had, nil if none.
func (a *adding) refuse(ctx context.Context, b *built, had *dhcpc.Lease) func(l, _ *dhcpc.Lease) error {
	var before netip.Addr
	if had != nil {
		before = had.Address.Addr()
	}
	return func(l, _ *dhcpc.Lease) error {
		own := l.Address.Addr()
		if err := lease.Impossible(l); err != nil {
			return err
		}
		if err := lease.Taken(a.br.Routes(), b.bridge.Index, own, before); err != nil {
			return err
		}
		return a.anothersAddress(ctx, own)
	}
}

// anothersAddress says which pod has an address, of those that are there.
func (a *adding) anothersAddress(ctx context.Context, own netip.Addr) error {
	held, err := a.fw.Holder(ctx, a.rec.Bridge, own)
	switch {
	case err == nil && held == nil:
		return nil
	case err != nil:
		return err
	}
	if stale, err := a.isStale(ctx, held); stale || err != nil {
		return err
	}
	return fmt.Errorf("another pod of this node has it: %w", held)
}
