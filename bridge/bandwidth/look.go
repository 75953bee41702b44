package bandwidth

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// installed is what the kernel has at a target. Of a part that is missing it has the
// zero value.
type installed struct {
	ifb    *link.Link // nil if no link has the name
	egress tc.Qdisc   // the ifb's root

	ingress tc.Qdisc // the port's root
	// place is what is in the place of clsact: that, or somebody else's ingress, which
	// holds filters as well.
	place tc.Qdisc
	// own are the filters of our priority at the port's ingress, and what u32 lists
	// beside them.
	own []tc.Filter
	// others counts the filters that keep us from deleting clsact.
	others int
}

// port is the port, for requests.
func (t *Target) port() tc.Link { return tc.Link{Name: t.Port, Index: t.PortIndex} }

// findPort fills in what the caller left open about the port. The error matches
// fs.ErrNotExist if it is not there.
func (c *Conn) findPort(ctx context.Context, t *Target) error {
	if t.PortIndex != 0 && t.MTU != 0 {
		return nil
	}
	var l link.Link
	var b nl.Batch
	link.Get(&b, t.Port, 0, &l, unix.IFLA_MTU)
	if err := tc.Execute(ctx, c.nl, &b); err != nil {
		return err
	}
	t.PortIndex = l.Index
	if t.MTU == 0 {
		t.MTU = l.MTU
	}
	return nil
}

// look reads the target's state, in one sendmsg where nothing was ever shaped. The
// error matches fs.ErrNotExist if the port, whose index is known, is not there.
func (c *Conn) look(ctx context.Context, t *Target) (*installed, error) {
	var have installed
	var ifb link.Link
	var b nl.Batch
	link.Get(&b, t.IFB, 0, &ifb)
	t.port().GetQdisc(&b, tc.Root, &have.ingress)
	t.port().GetQdisc(&b, tc.Clsact, &have.place)
	if err := tc.Look(ctx, c.nl, &b); err != nil {
		return nil, err
	}
	if err := b.Err(1); errors.Is(err, unix.ENODEV) {
		return nil, err
	}
	if b.Err(0) == nil {
		// Somebody else's is looked at too: it is for the caller to refuse it.
		have.ifb = &ifb
		b.Reset()
		tc.Link{Name: t.IFB, Index: ifb.Index}.GetQdisc(&b, tc.Root, &have.egress)
		if err := tc.Look(ctx, c.nl, &b); err != nil {
			return nil, err
		}
	}
	if have.place.Kind == "" {
		// A fresh port comes by here, and is spared the two lists.
		return &have, nil
	}
	var err error
	have.own, have.others, err = t.port().Filters(ctx, c.nl, tc.Ingress, tc.Egress)
	return &have, err
}

// nothing says that there is nothing of ours.
func (have *installed) nothing() bool {
	return have.ifb == nil && !have.ingress.Ours() && len(have.own) == 0
}

// redirects says whether all that comes in by the port goes to the ifb, once.
func (have *installed) redirects() bool {
	var n int
	for _, f := range have.own {
		// Before its filter, u32 lists itself and its table.
		if f.Handle&0xfff == 0 {
			continue
		}
		n++
		if f.Kind != "u32" || f.Protocol != unix.ETH_P_ALL || !f.MatchAll || have.ifb == nil || f.Redirect != have.ifb.Index {
			return false
		}
	}
	return n == 1
}
