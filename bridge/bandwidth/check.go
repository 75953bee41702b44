package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/tc"
)

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
	before := len(cmp.list)
	cmp.ifb(want.Egress, &t, have)
	if have.ifb != nil && t.checkOwner(have.ifb) != nil {
		for i := range cmp.list[before:] {
			cmp.list[before+i].Remedy = tombolo.RemedyConfigure // Ensure refuses it
		}
	}
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

func (c *comparison) shaper(what string, want Limit, mtu int, have tc.Qdisc) {
	switch {
	case want.Rate == 0 && have.Ours():
		c.differs(what, "", describe(have))
	case want.Rate != 0 && !have.Is(want.bucket(mtu)):
		c.differs(what, describeBucket(want.bucket(mtu)), describe(have))
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
	case have.ifb.Kind != "ifb":
		c.differs("kind", "ifb", strconv.Quote(have.ifb.Kind))
	default:
		if !have.ifb.Up() {
			c.differs("link", "up", "down")
		}
		if t.Alias != "" && have.ifb.Alias != t.Alias {
			c.differs("alias", strconv.Quote(t.Alias), strconv.Quote(have.ifb.Alias))
		}
		c.shaper("egress shaper", want, t.MTU, have.egress)
	}
}

// describeBucket is worded after what tc prints, with the rate in bits.
func describeBucket(w tc.Bucket) string {
	return fmt.Sprintf("tbf rate %s burst %db limit %db", formatRate(w.Rate*8), w.Burst, w.Limit)
}

func describe(q tc.Qdisc) string {
	switch {
	case q.Kind == "" || q.Handle == 0:
		return "" // the default, which the kernel may not even tell of
	case !q.Ours():
		return fmt.Sprintf("%s %x:", q.Kind, q.Handle>>16)
	case q.Peaked:
		return "tbf with a peak rate"
	default:
		return describeBucket(tc.Bucket{Rate: q.Rate, Burst: uint32(min(q.Burst(), mostBytes)), Limit: q.Limit})
	}
}
