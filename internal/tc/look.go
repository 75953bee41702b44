package tc

import (
	"context"
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// installed is what the kernel has at a target. Of a part that is missing it has the
// zero value.
type installed struct {
	ifb    *link // nil if no link has the name
	egress qdisc // the ifb's root

	ingress qdisc // the port's root
	// place is what is in the place of clsact: that, or somebody else's ingress, which
	// holds filters as well.
	place qdisc
	// own are the filters of our priority at the port's ingress, and what u32 lists
	// beside them.
	own []filter
	// others counts the filters that keep us from deleting clsact.
	others int
}

// findPort fills in what the caller left open about the port. The error matches
// fs.ErrNotExist if it is not there.
func (c *Conn) findPort(ctx context.Context, t *Target) error {
	if t.PortIndex != 0 && t.MTU != 0 {
		return nil
	}
	var l link
	var b nl.Batch
	getLink(&b, t.Port, &l)
	if err := c.execute(ctx, &b); err != nil {
		return err
	}
	t.PortIndex = l.index
	if t.MTU == 0 {
		t.MTU = l.mtu
	}
	return nil
}

// look reads the target's state, in one sendmsg where nothing was ever shaped. The
// error matches fs.ErrNotExist if the port, whose index is known, is not there.
func (c *Conn) look(ctx context.Context, t *Target) (*installed, error) {
	var have installed
	var ifb link
	var b nl.Batch
	getLink(&b, t.IFB, &ifb)
	getQdisc(&b, t.Port, t.PortIndex, parentRoot, &have.ingress)
	getQdisc(&b, t.Port, t.PortIndex, parentClsact, &have.place)
	if err := c.read(ctx, &b); err != nil {
		return nil, err
	}
	if err := b.Err(1); errors.Is(err, unix.ENODEV) {
		return nil, err
	}
	if b.Err(0) == nil {
		// Somebody else's is looked at too: it is for the caller to refuse it.
		have.ifb = &ifb
		b.Reset()
		getQdisc(&b, t.IFB, ifb.index, parentRoot, &have.egress)
		if err := c.read(ctx, &b); err != nil {
			return nil, err
		}
	}
	if have.place.kind == "" {
		// A fresh port comes by here, and is spared the two lists.
		return &have, nil
	}
	return &have, c.filters(ctx, t.PortIndex, &have, parentIngress, parentEgress)
}

// read executes a batch of gets, of what need not be there.
func (c *Conn) read(ctx context.Context, b *nl.Batch) error {
	if err := c.execute(ctx, b); err == nil || ctx.Err() != nil {
		return err
	}
	var errs []error
	for i := range b.Len() {
		// Of a link that was never up, whose qdisc is but a stand-in, the kernel says
		// nothing, or EINVAL.
		if err := b.Err(i); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, nl.ErrNoAnswer) && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// filters lists the filters of one port, of ingress, of egress or of both. The kernel
// lists those of one place at a time, so that this does not grow with the node.
func (c *Conn) filters(ctx context.Context, index int, have *installed, parents ...uint32) error {
	for _, parent := range parents {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := c.nl.Dump("list filters", unix.RTM_GETTFILTER, func(e *nl.Encoder) { tcMsg(e, index, 0, parent, 0) }, func(m nl.Message) error {
			var f filter
			if err := f.decode(m.Data); err != nil {
				return err
			}
			if parent == parentIngress && f.priority == ownPriority {
				have.own = append(have.own, f)
			} else {
				have.others++
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// nothing says that there is nothing of ours.
func (have *installed) nothing() bool {
	return have.ifb == nil && !have.ingress.ours() && len(have.own) == 0
}

// redirects says whether all that comes in by the port goes to the ifb, once.
func (have *installed) redirects() bool {
	var n int
	for _, f := range have.own {
		// Before its filter, u32 lists itself and its table.
		if f.handle&0xfff == 0 {
			continue
		}
		n++
		if f.kind != "u32" || f.protocol != unix.ETH_P_ALL || !f.matchAll || have.ifb == nil || f.redirect != have.ifb.index {
			return false
		}
	}
	return n == 1
}
