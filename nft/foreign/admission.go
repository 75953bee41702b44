package foreign

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"strconv"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Where iptables over nf_tables has its rules about forwarding.
const (
	iptablesTable   = "filter"
	iptablesForward = "FORWARD"
)

// rulesVersion is raised with every change of where and how Ensure makes its rule.
const rulesVersion = 6

// comment is by what our rule is known, whatever mark it accepts. Saving and restoring make
// a match of iptables' own of it, which counts as well.
func (c *Conn) comment() string { return "tombolo: admit what table inet " + c.table + " marks" }

// Ensure sees to it that iptables, where it works over nf_tables, lets pass what our
// forward chain marks: by one rule in the chain FORWARD of its table filter, for IPv4 and for IPv6.
//
// What a rule accepts, no rule behind it sees. So ours stands right before the first rule without a condition
// that drops or rejects, and before those that only log what that drops; a jump to a chain that does nothing else
// is one too. Without such a rule ours is the last, and where the policy accepts, too, there is none.
// If others put rules that could stop a packet between ours and that point, ours moves behind them. It never moves
// ahead: what drops all packets before it is left to do so, see Obstacles. To have ours put ahead of that, delete
// ours: only where there is none, the place is chosen anew. If the point is in a chain that drops some packets
// before, there is no place that overrides nothing, and no rule.
//
// With an AdminChain, FORWARD calls that first. Ensure makes no table, and a chain FORWARD only to call one.
//
// It does all of that in one transaction, however many do the same at once.
func (c *Conn) Ensure(ctx context.Context) (changed bool, _ error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}
	err := nftnl.Retry(ctx, func() error {
		p, err := c.plan(ctx)
		if err != nil {
			return err
		}
		t := p.transaction()
		if t.Empty() {
			return nftnl.Unchanged(c.nl, p.generation)
		}
		if err := t.Commit(c.nl); err != nil {
			return err
		}
		changed = true
		return nil
	})
	return changed, err
}

// Ready says whether Ensure would do nothing. Where that was seen over the same Socket before,
// it costs one look at the generation; otherwise it reads the chain FORWARD, and those that every
// packet gets to from there.
func (c *Conn) Ready(ctx context.Context) (bool, error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}
	right := false
	err := nftnl.Retry(ctx, func() error {
		generation, err := nftnl.Generation(c.nl)
		if err != nil {
			return err
		}
		known := c.seen.IsOn() && c.seen.IsAt(generation)
		if known && c.seen.Covers(generation, c.sum()) {
			right = true
			return nil
		}
		if !known {
			// What is seen from here on is of this generation, or of a later one.
			switch err := nftnl.Unchanged(c.nl, generation); {
			case nftnl.IsOvertaken(err):
				generation = 0 // the kernel has none of that number
			case err != nil:
				return err
			}
		}
		p, err := c.planAt(ctx, generation)
		if err != nil {
			return err
		}
		if right = p.transaction().Empty(); right && generation != 0 && c.seen.IsOn() {
			c.seen.Add(generation, c.sum())
		}
		return nil
	})
	return right, err
}

// sum stands for the rules that Ensure makes, in what was seen of a generation.
func (c *Conn) sum() uint64 {
	sum := fnv.New64a()
	fmt.Fprintf(sum, "admission %d %x %s", rulesVersion, c.mark, c.admin)
	if c.table != nftnl.DefaultTable {
		fmt.Fprint(sum, " ", c.table)
	}
	return sum.Sum64()
}

// Check lists what Ensure would mend.
func (c *Conn) Check(ctx context.Context) ([]tombolo.Difference, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}
	var diffs []tombolo.Difference
	err := nftnl.Retry(ctx, func() error {
		p, err := c.plan(ctx)
		if err != nil {
			return err
		}
		if diffs = p.differences(); len(diffs) == 0 {
			return nil
		}
		return nftnl.Unchanged(c.nl, p.generation)
	})
	if err != nil {
		return nil, err
	}
	return diffs, nil
}

// Remove takes our rules out of iptables' chains FORWARD, for whatever mark they are.
func (c *Conn) Remove(ctx context.Context) error {
	if err := c.usable(ctx); err != nil {
		return err
	}
	return nftnl.Retry(ctx, func() error {
		p, err := c.plan(ctx)
		if err != nil {
			return err
		}
		for _, f := range p.families {
			f.place, f.admin.call = place{keep: -1}, false
		}
		return p.transaction().Commit(c.nl)
	})
}

func forwardOf(family uint8) chain { return chain{family, iptablesTable, iptablesForward} }

// plan is what there is of our rules in both families, and what to do.
type plan struct {
	generation uint32
	mark       uint32
	comment    string
	families   []*familyPlan
}

// familyPlan is that of one family.
type familyPlan struct {
	at     chain
	there  bool // a chain FORWARD
	hooked bool // it sees what is forwarded
	base
	place
	admin adminPlan
}

// plan reads what there is and decides what should be. It may be torn by a
// change meanwhile; a transaction with its generation is then refused.
func (c *Conn) plan(ctx context.Context) (*plan, error) {
	generation, err := nftnl.SeenGeneration(c.nl)
	if err != nil {
		return nil, err
	}
	return c.planAt(ctx, generation)
}

func (c *Conn) planAt(ctx context.Context, generation uint32) (*plan, error) {
	p := &plan{generation: generation, mark: c.mark, comment: c.comment()}
	var b nl.Batch
	for _, family := range families() {
		f := &familyPlan{at: forwardOf(family)}
		p.families = append(p.families, f)
		getChain(&b, f.at, func(data []byte) error {
			ch, err := nftnl.DecodeChain(data)
			f.there, f.hooked = true, isForwardHook(ch)
			f.policy = endingOf(ch.Policy)
			return err
		})
		c.getAdmin(&b, f)
	}
	if err := nftnl.Look(c.nl, &b); err != nil {
		return nil, err
	}
	for _, f := range p.families {
		if err := c.read(ctx, f); err != nil {
			return nil, err
		}
		if err := c.planAdmin(ctx, f); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// endingOf is that of a policy.
func endingOf(policy uint32) ending {
	if policy == policyAccept {
		return passes
	}
	return stops
}

// read reads FORWARD, and what it calls as far as that matters, and decides.
func (c *Conn) read(ctx context.Context, f *familyPlan) (err error) {
	if f.place.keep = -1; !f.hooked {
		return nil
	}
	pods := &packet{mark: c.mark, known: c.mark, link: c.link}
	if f.rules, err = c.rulesOf(ctx, f.at, pods); err != nil {
		return err
	}
	read := map[string][]rule{}
	f.chain = func(name string) []rule {
		rules, ok := read[name]
		if !ok && err == nil {
			rules, err = c.rulesOf(ctx, chain{f.at.family, iptablesTable, name}, pods)
			read[name] = rules
		}
		return rules
	}
	f.base.admin = c.admin
	f.place = f.decide()
	return err
}

// transaction makes of what there is what should be.
func (p *plan) transaction() *nftnl.Transaction {
	t := nftnl.Begin(&p.generation)
	for _, f := range p.families {
		f.admin.make(t, f.at)
		if f.isMissing() {
			p.insert(t, f)
		}
		for _, r := range f.surplus() {
			delRule(t, handle{f.at, r.handle})
		}
	}
	return t
}

// isMissing says that a rule is to be made.
func (f *familyPlan) isMissing() bool { return f.needed && f.keep < 0 }

// surplus are rules of ours that are to go.
func (f *familyPlan) surplus() []rule {
	var list []rule
	for i := range f.rules {
		if f.rules[i].ours && i != f.keep {
			list = append(list, f.rules[i])
		}
	}
	return list
}

// insert makes our rule in the words that iptables uses for it and therefore prints right: every rule of its has
// a counter.
func (p *plan) insert(t *nftnl.Transaction, f *familyPlan) {
	attrs, flags := f.at.named(unix.NFTA_RULE_CHAIN), netlink.Append
	if f.place.at < len(f.rules) {
		flags = 0
		attrs = append(attrs, nftnl.Uint64(unix.NFTA_RULE_POSITION, f.rules[f.place.at].handle))
	}
	t.AddRule(fmt.Sprintf("insert rule %q into", p.comment), f.at, f.at.family, flags, p.comment, func(x *nftnl.Expressions) {
		bits := binary.NativeEndian.AppendUint32(nil, p.mark)
		x.Meta(expr.MetaKeyMARK, nftnl.First)
		x.Mask(bits, nil)
		x.Compare(expr.CmpOpEq, bits)
		x.Add(&expr.Counter{})
		x.Add(&expr.Verdict{Kind: expr.VerdictAccept})
	}, attrs...)
}

func (p *plan) differences() []tombolo.Difference {
	var list []tombolo.Difference
	for _, f := range p.families {
		list = append(list, f.admin.differences(f.at)...)
		rule := fmt.Sprintf("%q for mark 0x%x", p.comment, p.mark)
		missing := f.isMissing()
		for _, r := range f.surplus() {
			d := tombolo.Difference{Object: f.at.String(), What: "rule", Have: strconv.Quote(r.comment) + " with handle " + strconv.FormatUint(r.handle, 10)}
			if missing && r.isAdmission() {
				missing = false
				d = tombolo.Difference{
					Object: f.at.String(), What: "place of rule " + rule,
					Want: "right before what every packet is dropped by",
					Have: "where it spares packets other rules",
				}
			}
			list = append(list, d)
		}
		if missing {
			list = append(list, tombolo.Difference{Object: f.at.String(), What: "rule", Want: rule})
		}
	}
	return list
}
