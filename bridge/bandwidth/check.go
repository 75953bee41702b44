package bandwidth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

// Check compares the state of a target in the kernel with the limits s, and returns the differences. Ensure repairs
// them. In a direction without a limit, a qdisc of another program is no difference.
func (c *Conn) Check(ctx context.Context, t Target, s Shape) ([]tombolo.Difference, error) {
	want, err := c.prepare(&t, s)
	var have *installation
	if err == nil {
		have, err = c.look(ctx, &t)
	}

	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "port " + t.Port, What: "link", Want: t.Port}}, nil
	}

	if err != nil {
		return nil, err
	}

	found, port := diff.List{}, "port "+t.Port
	compareShaper(&found, port, "ingress shaper", want.Ingress, t.MTU, have.ingress)
	compareRedirect(&found, port, want.Egress.Rate != 0, &t, have)
	before := len(found)
	compareIFB(&found, "link "+t.IFB, want.Egress, &t, have)
	if have.ifb != nil && t.checkOwner(have.ifb) != nil {
		for i := range found[before:] {
			found[before+i].Remedy = tombolo.RemedyConfigure // Ensure would refuse this link
		}
	}

	return found, nil
}

// compareShaper compares a root qdisc with a limit, and adds a difference to list.
func compareShaper(list *diff.List, object, what string, want Limit, mtu int, have tc.Qdisc) {
	switch {
	case want.Rate == 0 && have.Ours():
		list.Add(object, what, "", describe(have))
	case want.Rate != 0 && !have.Is(want.bucket(mtu)):
		list.Add(object, what, describeBucket(want.bucket(mtu)), describe(have))
	}
}

// compareRedirect compares the filter at the port with the expected one, and adds a difference to list.
func compareRedirect(list *diff.List, object string, expected bool, t *Target, have *installation) {
	switch {
	case expected && len(have.own) == 0:
		list.Add(object, "filter", "to "+t.IFB, "")
	case expected && have.ifb != nil && !have.redirects():
		list.Add(object, "filter", "to "+t.IFB, "another")
	case !expected && len(have.own) > 0:
		list.Add(object, "filter", "", "to "+t.IFB)
	}
}

// compareIFB compares the ifb with the expected one, and adds the differences to list.
func compareIFB(list *diff.List, object string, want Limit, t *Target, have *installation) {
	switch {
	case have.ifb == nil && want.Rate != 0:
		list.Add(object, "link", t.IFB, "")
	case have.ifb == nil:
	case want.Rate == 0:
		if t.checkOwner(have.ifb) == nil {
			list.Add(object, "link", "", t.IFB)
		}
	case have.ifb.Kind != "ifb":
		list.Add(object, "kind", "ifb", strconv.Quote(have.ifb.Kind))
	default:
		list.Up(object, have.ifb.Up())
		list.Add(object, "alias", strconv.Quote(cmp.Or(t.Alias, have.ifb.Alias)), strconv.Quote(have.ifb.Alias))
		compareShaper(list, object, "egress shaper", want, t.MTU, have.egress)
	}
}

// describeBucket returns the parameters of a tbf in the format of tc.
func describeBucket(w tc.Bucket) string {
	return fmt.Sprintf("tbf rate %s burst %db limit %db", formatRate(w.Rate*8), w.Burst, w.Limit)
}

// describe returns a short description of a root qdisc, or "" for the kernel's default qdisc.
func describe(q tc.Qdisc) string {
	switch {
	case q.Kind == "" || q.Handle == 0:
		return "" // the default, which the kernel may not even list
	case !q.Ours():
		return fmt.Sprintf("%s %x:", q.Kind, q.Handle>>16)
	case q.Peaked:
		return "tbf with a peak rate"
	default:
		return describeBucket(tc.Bucket{Rate: q.Rate, Burst: uint32(min(q.Burst(), mostBytes)), Limit: q.Limit})
	}
}

// installation holds the state of a target in the kernel. Missing parts have zero values.
type installation struct {
	ifb    *link.Info // nil if no link has this name
	egress tc.Qdisc   // root qdisc of the ifb

	ingress tc.Qdisc // root qdisc of the port
	// place is the port's qdisc with the handle ffff:, to which filters attach. It is a clsact, or an ingress qdisc
	// of another program. Only one of them can exist.
	place tc.Qdisc
	// own lists the filters with our priority at the port's ingress, including other entries that u32 lists with
	// them.
	own []tc.Filter
	// others is the number of filters of other programs at the port. They would be lost if clsact were deleted.
	others int
}

// port returns the port in the form that package tc needs.
func (t *Target) port() tc.Device { return tc.Device{Name: t.Port, Index: t.PortIndex} }

// findPort sets t.PortIndex and t.MTU if the caller left them zero. If the port does not exist, the error matches
// fs.ErrNotExist.
func (c *Conn) findPort(t *Target) error {
	if t.PortIndex != 0 && t.MTU != 0 {
		return nil
	}
	l, err := link.Find(c.nl, t.Port, unix.IFLA_MTU)
	if err != nil {
		return err
	}
	t.PortIndex = l.Index
	t.MTU = cmp.Or(t.MTU, l.MTU)
	return nil
}

// look reads the target's state. If the port has never had limits, this takes one round trip. If the port does not
// exist, the error matches fs.ErrNotExist.
func (c *Conn) look(ctx context.Context, t *Target) (*installation, error) {
	var have installation
	var ifb link.Info
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
		// The name does not show the owner: the ifb may belong to another program. The caller must check that.
		have.ifb = &ifb
		b.Reset()
		tc.Device{Name: t.IFB, Index: ifb.Index}.GetQdisc(&b, tc.Root, &have.egress)
		if err := tc.Look(ctx, c.nl, &b); err != nil {
			return nil, err
		}
	}

	if have.place.Kind == "" {
		// The port has no clsact, as is usual for a new port. So it has no filters to list.
		return &have, nil
	}

	var err error
	have.own, have.others, err = t.port().Filters(ctx, c.nl, tc.Ingress, tc.Egress)
	return &have, err
}

// isEmpty reports whether the target has no ifb, and none of our qdiscs and filters.
func (have *installation) isEmpty() bool {
	return have.ifb == nil && !have.ingress.Ours() && len(have.own) == 0
}

// redirects reports whether exactly one filter sends all packets from the port to the ifb.
func (have *installation) redirects() bool {
	var n int
	for _, f := range have.own {
		// Skip the entries that u32 lists before the filter, for itself and for its hash table.
		if f.Handle&0xfff == 0 {
			continue
		}
		n++
		if f.Kind != "u32" || f.Protocol != unix.ETH_P_ALL || !f.MatchAll || have.ifb == nil ||
			f.Redirect != have.ifb.Index {
			return false
		}
	}

	return n == 1
}
