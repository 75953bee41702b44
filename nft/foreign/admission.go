package foreign

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strconv"

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
const rulesVersion = 5

// comment is by what our rule is known, whatever mark it accepts. Saving and restoring make
// a match of iptables' own of it, which counts as well.
func (c *Conn) comment() string { return "tombolo: admit what table inet " + c.table + " marks" }

// Ensure sees to it that iptables, where it works over nf_tables, lets pass what our
// forward chain marks: by one rule in its table filter, for IPv4 and for IPv6. It makes
// neither table nor chain.
//
// What a rule accepts, no rule behind it sees. So ours stands before the first point where
// every packet is dropped for certain, be it a rule of the chain FORWARD, or of one that it
// calls, or FORWARD's policy; and where there is no such point, there is no rule. It stays
// where it is for as long as nothing between it and that point could stop a packet or change
// one; what is not known could. Otherwise it goes to right before that point, and before
// the rules that only log what is dropped there. Whatever drops packets ahead of it
// is left to do so, even if it drops all: see Obstacles. To have ours put ahead of that, delete
// ours: only where there is none, the place is chosen anew.
//
// If that point is in a chain that other rules call too, and which drops some packets before
// it, nothing can be accepted there for FORWARD alone: Ensure does nothing then, and Obstacles
// names the chain. Rules of ours beyond the one, and those for another mark, are taken out.
//
// It does all of that in one transaction, however many do the same at once.
func (c *Conn) Ensure(ctx context.Context) (changed bool, _ error) {
	if err := c.usable(ctx); err != nil {
		return false, err
	}

	err := nftnl.Retry(ctx, func() error {
		p, err := c.planAdmissions(ctx)
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
// it costs one look at the generation; otherwise it reads the chain FORWARD, those chains that every
// packet gets to, and what is behind our rule, but no others. So it does not see
// rules of ours in the rest: see Check.
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
		if known && c.seen.Covers(generation, c.admissionSum()) {
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
		p, err := c.admissionsAt(ctx, generation, c.readChains)
		if err != nil {
			return err
		}
		if right = p.transaction().Empty(); right && generation != 0 && c.seen.IsOn() {
			c.seen.Add(generation, c.admissionSum())
		}
		return nil
	})
	return right, err
}

// admissionSum stands for the rules that Ensure makes, in what was seen of a generation.
func (c *Conn) admissionSum() uint64 {
	sum := fnv.New64a()
	fmt.Fprintf(sum, "admission %d %x", rulesVersion, c.mark)
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
		p, err := c.planAdmissions(ctx)
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

// Remove takes our rules out of iptables' tables filter, for whatever mark they
// are and in whichever chain.
func (c *Conn) Remove(ctx context.Context) error {
	if err := c.usable(ctx); err != nil {
		return err
	}

	return nftnl.Retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.nl)
		if err != nil {
			return err
		}
		t := nftnl.Begin(&generation)
		for _, f := range families() {
			chains, err := c.rulesIn(ctx, f.proto, iptablesTable)
			if err != nil {
				return err
			}
			for _, r := range oursIn(chains) {
				delRule(t, r.at(f.proto))
			}
		}
		return t.Commit(c.nl)
	})
}

// isAdmission says that it is ours and does what it should.
func (r *rule) isAdmission(mark uint32) bool {
	return r.ours && r.verdict == accepts &&
		len(r.conditions) == 1 && r.conditions[0] == condition{on: onMark, mark: mark, mask: mark}
}

// at names a rule of the table filter.
func (r *rule) at(family uint8) handle {
	return handle{chain{family, iptablesTable, r.chain}, r.handle}
}

// oursIn gives our rules, those in FORWARD first.
func oursIn(chains map[string][]rule) []*rule {
	var first, others []*rule
	for _, name := range slices.Sorted(maps.Keys(chains)) {
		rules := chains[name]
		for i := range rules {
			switch {
			case !rules[i].ours:
			case name == iptablesForward:
				first = append(first, &rules[i])
			default:
				others = append(others, &rules[i])
			}
		}
	}
	return append(first, others...)
}

// admissionPlan is what there is of our rules in both families, and what to do.
type admissionPlan struct {
	generation uint32
	own        own
	families   []familyAdmission
}

// familyAdmission is that of one family.
type familyAdmission struct {
	family  uint8
	own     own
	keep    *rule
	insert  *insertion // nil: nothing is to be put anywhere
	surplus []*rule
	placer  *placer // nil: there is no chain FORWARD
	to      destination
	policy  uint32
}

// own is what our rule accepts, and what it says of itself.
type own struct {
	mark    uint32
	comment string
}

// insertion is a rule to be made.
type insertion struct {
	into   chain
	before uint64 // the handle of a rule; 0 is the chain's end
}

// planAdmissions reads what there is and decides what should be. It may be torn by a
// change meanwhile; a transaction with its generation is then refused.
func (c *Conn) planAdmissions(ctx context.Context) (*admissionPlan, error) {
	generation, err := nftnl.SeenGeneration(c.nl)
	if err != nil {
		return nil, err
	}
	return c.admissionsAt(ctx, generation, c.readTables)
}

// admissionsAt decides by what a reader has the placers know of chains.
func (c *Conn) admissionsAt(ctx context.Context, generation uint32, read func(context.Context, *placer) error) (*admissionPlan, error) {
	var b nl.Batch
	policies := map[uint8]uint32{}
	for _, f := range families() {
		getChain(&b, chain{f.proto, iptablesTable, iptablesForward}, func(data []byte) error {
			ch, err := nftnl.DecodeChain(data)
			if isForwardHook(ch) {
				policies[f.proto] = ch.Policy
			}
			return err
		})
	}
	if err := nftnl.Look(c.nl, &b); err != nil {
		return nil, err
	}
	p := &admissionPlan{generation: generation, own: own{c.mark, c.comment()}}
	for _, f := range families() {
		plan := familyAdmission{family: f.proto, own: p.own}
		if policy, ok := policies[f.proto]; ok {
			plan.placer, plan.policy = newPlacer(f.proto, c.mark), policy
			if err := read(ctx, plan.placer); err != nil {
				return nil, err
			}
			if plan.decide(); plan.placer.err != nil {
				return nil, plan.placer.err
			}
		}
		p.families = append(p.families, plan)
	}
	return p, nil
}

// readTables reads a whole table: whichever chain has rules of ours, they are found.
func (c *Conn) readTables(ctx context.Context, p *placer) error {
	if err := c.readChains(ctx, p); err != nil {
		return err
	}
	chains, err := c.rulesIn(ctx, p.packet.family, iptablesTable)
	p.chains = chains
	p.load = func(string) ([]rule, error) { return nil, nil } // it has none
	return err
}

// readChains reads those that the placer asks for.
func (c *Conn) readChains(ctx context.Context, p *placer) error {
	at := func(name string) chain { return chain{p.packet.family, iptablesTable, name} }
	p.load = func(name string) ([]rule, error) { return c.rulesOf(ctx, at(name)) }
	p.references = func(name string) (int, error) {
		var b nl.Batch
		uses := 0
		getChain(&b, at(name), func(data []byte) error {
			ch, err := nftnl.DecodeChain(data)
			uses = int(ch.Uses)
			return err
		})
		err := nftnl.Look(c.nl, &b)
		return uses - len(p.rules(name)), err
	}
	return nil
}

// decide chooses the rule to keep, or where one is to be put.
func (p *familyAdmission) decide() {
	p.to = p.placer.find(p.policy)
	p.surplus = nil
	needed := p.to.path != nil && p.to.blocked == ""
	for _, r := range oursIn(p.placer.chains) {
		if needed && p.keep == nil && r.isAdmission(p.own.mark) && p.placer.suits(&p.to, r.chain, indexOf(p.placer.chains[r.chain], r)) {
			p.keep = r
			continue
		}
		p.surplus = append(p.surplus, r)
	}
	if !needed || p.keep != nil {
		return
	}
	p.insert = &insertion{into: chain{p.family, iptablesTable, p.to.at.chain}}
	if rules := p.placer.rules(p.to.at.chain); p.to.at.index < len(rules) {
		p.insert.before = rules[p.to.at.index].handle
	}
}

// transaction makes of what there is what should be.
func (p *admissionPlan) transaction() *nftnl.Transaction {
	t := nftnl.Begin(&p.generation)
	for i := range p.families {
		f := &p.families[i]
		if f.insert != nil {
			insertAdmission(t, f.insert, p.own)
		}
		for _, r := range f.surplus {
			delRule(t, r.at(f.family))
		}
	}
	return t
}

func (p *admissionPlan) differences() []tombolo.Difference {
	var list []tombolo.Difference
	for i := range p.families {
		f := &p.families[i]
		rule := fmt.Sprintf("%q for mark 0x%x", p.own.comment, p.own.mark)
		missing := f.insert != nil
		for _, r := range f.surplus {
			object := r.at(f.family).chain.String()
			if missing && r.isAdmission(p.own.mark) {
				missing = false
				list = append(list, tombolo.Difference{
					Object: object, What: "place of rule " + rule,
					Want: "right before what every packet is dropped by, in " + f.insert.into.String(),
					Have: "where it spares packets other rules, or where they do not get to it",
				})
				continue
			}
			list = append(list, tombolo.Difference{
				Object: object, What: "rule", Have: strconv.Quote(r.comment) + " with handle " + strconv.FormatUint(r.handle, 10),
			})
		}
		if missing {
			list = append(list, tombolo.Difference{Object: f.insert.into.String(), What: "rule", Want: rule})
		}
	}
	return list
}
