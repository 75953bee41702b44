package bridge

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// setUp does what is left to do with a port that was left down, and then sets it up: before, if
// there is one, which gets its index, and the VLANs that it is to be in. Until it is in these it is
// in the bridge's default one, and a pod may send as soon as it has its interface. A port with
// neither is up already.
func (c *Conn) setUp(ctx context.Context, p *Port, before func(context.Context, int) error) error {
	if before == nil && p.VLAN.IsZero() {
		return nil
	}
	index, err := link.IndexOf(c.nl, p.Name)
	if err != nil {
		return err
	}
	if before != nil {
		if err := before(ctx, index); err != nil {
			return err
		}
	}
	if !p.VLAN.IsZero() {
		if _, err := c.VLANs().Ensure(ctx, index, p.VLAN); err != nil {
			return err
		}
	}
	var b nl.Batch
	link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set port up", p.Name)
	return c.execute(ctx, &b)
}

// downUnlessPort sets a port down, for setUp, that is to be in VLANs and is not on its
// bridge.
func (c *Conn) downUnlessPort(ctx context.Context, b *nl.Batch, p *Port) error {
	if p.VLAN.IsZero() {
		return nil
	}
	l, err := c.Link(ctx, p.Name)
	if err == nil && l.Master != p.BridgeIndex {
		link.Request{Name: p.Name, Change: unix.IFF_UP}.Set(b, "set port down", p.Name)
	}
	return err
}
