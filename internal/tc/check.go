package tc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/tombolo-cni/tombolo"
)

// Get gives what the kernel shapes at a target: rates and bursts as Effective makes
// them, a burst to within what the kernel's clock tells apart. A direction whose
// shaper is not ours, or does not get the traffic, is zero. The error matches
// fs.ErrNotExist where there is no such port.
func (c *Conn) Get(ctx context.Context, t Target) (Shape, error) {
	t.MTU = max(t.MTU, 1) // of no use here
	if err := c.findPort(ctx, &t); err != nil {
		return Shape{}, err
	}
	have, err := c.look(ctx, &t)
	if err != nil {
		return Shape{}, err
	}
	s := Shape{Ingress: have.ingress.shapes()}
	if have.ifb != nil && have.ifb.up && have.redirects() {
		s.Egress = have.egress.shapes()
	}
	return s, nil
}

func (q qdisc) shapes() Limit {
	if !q.ours() {
		return Limit{}
	}
	return Limit{Rate: q.rate * 8, Burst: q.burst() * 8}
}

// Check compares what the kernel has at a target with what Ensure would make of it,
// and lists the differences; none is what should be. A qdisc of somebody else's in a
// direction without a rate is no difference.
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
	cmp := &comparison{object: "port " + t.Port}
	cmp.shaper("ingress shaper", want.Ingress, t.MTU, have.ingress)
	cmp.redirect(want.Egress.Rate != 0, &t, have)
	cmp.object = "link " + t.IFB
	cmp.ifb(want.Egress, &t, have)
	return cmp.list, nil
}

// comparison collects differences of one object.
type comparison struct {
	object string
	list   []tombolo.Difference
}

func (c *comparison) differs(what, want, have string) {
	c.list = append(c.list, tombolo.Difference{Object: c.object, What: what, Want: want, Have: have})
}

func (c *comparison) shaper(what string, want Limit, mtu int, have qdisc) {
	switch {
	case want.Rate == 0 && have.ours():
		c.differs(what, "", have.String())
	case want.Rate != 0 && !have.is(want.bucket(mtu)):
		c.differs(what, want.bucket(mtu).String(), have.String())
	}
}

func (c *comparison) redirect(wanted bool, t *Target, have *installed) {
	switch {
	case wanted && len(have.own) == 0:
		c.differs("filter", "to "+t.IFB, "")
	case wanted && have.ifb != nil && !have.redirects():
		c.differs("filter", "to "+t.IFB, "another")
	case !wanted && len(have.own) > 0:
		c.differs("filter", "", "to "+t.IFB)
	}
}

func (c *comparison) ifb(want Limit, t *Target, have *installed) {
	switch {
	case want.Rate == 0 && have.ifb == nil:
	case want.Rate == 0:
		if t.checkOwner(have.ifb) == nil {
			c.differs("link", "", t.IFB)
		}
	case have.ifb == nil:
		c.differs("link", t.IFB, "")
	case have.ifb.kind != "ifb":
		c.differs("kind", "ifb", strconv.Quote(have.ifb.kind))
	default:
		if !have.ifb.up {
			c.differs("link", "up", "down")
		}
		if t.Alias != "" && have.ifb.alias != t.Alias {
			c.differs("alias", strconv.Quote(t.Alias), strconv.Quote(have.ifb.alias))
		}
		c.shaper("egress shaper", want, t.MTU, have.egress)
	}
}

// String is worded after what tc prints, with the rate in bits.
func (w bucket) String() string {
	return fmt.Sprintf("tbf rate %s burst %db limit %db", formatRate(w.rate*8), w.burst, w.limit)
}

func (q qdisc) String() string {
	switch {
	case q.kind == "" || q.handle == 0:
		return "" // the default, which the kernel may not even tell of
	case !q.ours():
		return fmt.Sprintf("%s %x:", q.kind, q.handle>>16)
	case q.peaked:
		return "tbf with a peak rate"
	default:
		return bucket{rate: q.rate, burst: uint32(min(q.burst(), mostBytes)), limit: q.limit}.String()
	}
}
