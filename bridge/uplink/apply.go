package uplink

import (
	"context"
	"fmt"
	"net"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// atOnce is how many requests go to the kernel in one message: their acknowledgements
// must fit into the socket's buffer.
const atOnce = 256

// apply does operations in their order: requests that follow each other in one
// sendmsg, so that next to no time passes between them. It goes on past errors of
// single requests, and gives the first.
func (c *Conn) apply(ctx context.Context, ops []operation) error {
	var first error
	keep := func(err error) {
		if first == nil {
			first = err
		}
	}
	for len(ops) > 0 {
		n := 0
		settings := ops[0].setting != nil
		for n < len(ops) && (ops[n].setting != nil) == settings && (settings || n < atOnce) {
			n++
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if settings {
			keep(c.ns.Do(func() error { return write(ops[:n]) }))
		} else {
			keep(c.send(ctx, ops[:n]))
		}
		ops = ops[n:]
	}
	return first
}

// write sets parameters that a kernel of this version has; others are passed over.
func write(ops []operation) error {
	var first error
	for _, op := range ops {
		if err := op.setting.write(); err != nil && !isGone(err) && first == nil {
			first = err
		}
	}
	return first
}

func (c *Conn) send(ctx context.Context, ops []operation) error {
	var b nl.Batch
	for _, op := range ops {
		op.request(&b)
	}
	if c.execute(ctx, &b) == nil {
		return nil
	}
	for i, op := range ops {
		if err := b.Err(i); err != nil && (op.done == nil || !op.done(err)) {
			return fmt.Errorf("%s: %w", op.text, err)
		}
	}
	return nil
}

// makeBridge makes the bridge, or goes on with the one that is there. One that is as
// it should be is left alone: to write the MAC that it has would flush its neighbours.
func (c *Conn) makeBridge(ctx context.Context, rec *Record) error {
	if l, err := c.bridge.Link(ctx, rec.Bridge); err == nil && l.Kind == "bridge" && l.Up && l.MAC.String() == rec.Before.NIC.MAC {
		return nil
	}
	want := bridge.Bridge{Name: rec.Bridge, Alias: rec.Alias, NoIPv6: true}
	var err error
	if want.MAC, err = net.ParseMAC(rec.Before.NIC.MAC); err != nil {
		return fmt.Errorf("make bridge %s: %w: the NIC's MAC is %q", rec.Bridge, ErrInvalid, rec.Before.NIC.MAC)
	}
	if rec.MadeBridge {
		want.MTU = rec.Before.NIC.MTU
	}
	l, _, err := c.bridge.Ensure(ctx, want)
	if err == nil && rec.MadeBridge && c.made != nil {
		c.made(ctx, l)
	}
	return err
}
