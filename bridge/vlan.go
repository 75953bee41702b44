package bridge

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// raise does for a fresh port what has to be done while it is down, and then sets it up.
func (c *Conn) raise(ctx context.Context, p *Port) error {
	if p.BeforeUp == nil {
		return c.joinVLANs(ctx, p)
	}
	index, err := indexOf(c.nl, p.Name)
	if err != nil {
		return err
	}
	if err := p.BeforeUp(ctx, index); err != nil {
		return err
	}
	if !p.VLAN.IsZero() {
		return c.joinVLANs(ctx, p)
	}
	return c.setPortUp(ctx, p, index)
}

// joinVLANs puts a port that is to be in VLANs into these, and then sets it up: until then
// it is in the bridge's default one, and a pod may send as soon as it has its interface.
func (c *Conn) joinVLANs(ctx context.Context, p *Port) error {
	if p.VLAN.IsZero() {
		return nil
	}
	index, err := indexOf(c.nl, p.Name)
	if err != nil {
		return err
	}
	if _, err := c.VLANs().Ensure(ctx, index, p.VLAN); err != nil {
		return err
	}
	return c.setPortUp(ctx, p, index)
}

func (c *Conn) setPortUp(ctx context.Context, p *Port, index int) error {
	var b nl.Batch
	link.Request{Index: index, Flags: unix.IFF_UP, Change: unix.IFF_UP}.Set(&b, "set port up", p.Name)
	return c.execute(ctx, &b)
}

// downUnlessPort sets a port down, for joinVLANs, that is to be in VLANs and is not on its
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
