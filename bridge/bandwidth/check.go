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

// Check compares the state of a target in the kernel with the state that Ensure would set, and returns the
// differences. In a direction without a rate, a qdisc of another program is no difference.
func (c *Conn) Check(ctx context.Context, t Target, s Shape) ([]tombolo.Difference, error) {
	want, err := c.prepare(ctx, &t, s)
	var have *installed
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

// compareShaper compares a root qdisc with a limit.
func compareShaper(list *diff.List, object, what string, want Limit, mtu int, have tc.Qdisc) {
	switch {
	case want.Rate == 0 && have.Ours():
		list.Add(object, what, "", describe(have))
	case want.Rate != 0 && !have.Is(want.bucket(mtu)):
		list.Add(object, what, describeBucket(want.bucket(mtu)), describe(have))
	}
}

// compareRedirect compares the filter at the port with the expected one.
func compareRedirect(list *diff.List, object string, expected bool, t *Target, have *installed) {
	switch {
	case expected && len(have.own) == 0:
		list.Add(object, "filter", "to "+t.IFB, "")
	case expected && have.ifb != nil && !have.redirects():
		list.Add(object, "filter", "to "+t.IFB, "another")
	case !expected && len(have.own) > 0:
		list.Add(object, "filter", "", "to "+t.IFB)
	}
}

// compareIFB compares the ifb with the expected one.
func compareIFB(list *diff.List, object string, want Limit, t *Target, have *installed) {
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

// describeBucket returns a bucket as tc prints it, with the rate in bits.
func describeBucket(w tc.Bucket) string {
	return fmt.Sprintf("tbf rate %s burst %db limit %db", formatRate(w.Rate*8), w.Burst, w.Limit)
}

// describe returns a short description of a root qdisc.
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

// installed is the state of a target in the kernel. A missing part has its zero value.
type installed struct {
	ifb    *link.Link // nil if no link has this name
	egress tc.Qdisc   // root qdisc of the ifb

	ingress tc.Qdisc // root qdisc of the port
	// place is the port's qdisc with the handle ffff: clsact, or another program's ingress qdisc. Only one of them can
	// exist, and filters attach to either.
	place tc.Qdisc
	// own are the filters with our priority at the port's ingress, and the other entries that u32 lists with them.
	own []tc.Filter
	// others is the number of filters that must not be deleted with clsact.
	others int
}

// port returns the port, for requests.
func (t *Target) port() tc.Device { return tc.Device{Name: t.Port, Index: t.PortIndex} }

// findPort fills in the port's index and MTU if the caller left them out. If the port does not exist, the error
// matches fs.ErrNotExist.
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

// look returns the target's state. If nothing was ever shaped, it needs one sendmsg. If the port, whose index is
// known, does not exist, the error matches fs.ErrNotExist.
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
		// The ifb may belong to another owner. The caller checks that.
		have.ifb = &ifb
		b.Reset()
		tc.Device{Name: t.IFB, Index: ifb.Index}.GetQdisc(&b, tc.Root, &have.egress)
		if err := tc.Look(ctx, c.nl, &b); err != nil {
			return nil, err
		}
	}

	if have.place.Kind == "" {
		// A new port ends here, without the two listings of filters.
		return &have, nil
	}

	var err error
	have.own, have.others, err = t.port().Filters(ctx, c.nl, tc.Ingress, tc.Egress)
	return &have, err
}

// isEmpty reports whether the target has no qdisc, filter or ifb of ours.
func (have *installed) isEmpty() bool {
	return have.ifb == nil && !have.ingress.Ours() && len(have.own) == 0
}

// redirects reports whether exactly one filter sends all packets from the port to the ifb.
func (have *installed) redirects() bool {
	var n int
	for _, f := range have.own {
		// Before its filter, u32 lists itself and its table.
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
