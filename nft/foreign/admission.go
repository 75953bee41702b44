package foreign

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// The chain FORWARD of iptables over nf_tables.
const (
	iptablesTable   = "filter"
	iptablesForward = "FORWARD"
)

// rulesVersion must be raised with every change of Ensure's rules or their place.
const rulesVersion = 2

// admission is one of our rules in FORWARD. It accepts marked packets from or to one bridge, or one shared NIC.
type admission struct{ direction, bridge string }

// The directions of admissions, as in their comments.
const fromBridge, toBridge = " from ", " to "

// comment returns the comment of the rule, which identifies it for any mark.
func (a admission) comment(c *Conn) string { return c.comment() + a.direction + a.bridge }

// comment returns the beginning of the comments of all our rules that accept packets.
func (c *Conn) comment() string { return "tombolo: admit what table inet " + c.table + " marks" }

// Ensure makes iptables accept the packets that our forward chain marks, if iptables works over nf_tables. For IPv4
// and IPv6 it adds two rules for each bridge of our networks and each shared NIC to the chain FORWARD of table
// filter: one for packets from it and one for packets to it.
//
// A rule that accepts a packet hides it from all later rules. So our rules stand as late as possible: right before
// the first rule that drops or rejects every packet, and before rules that only log packets for that drop. A jump to
// a chain that drops everything counts as such a rule. Without one, our rules stand at the end, or are left out if
// the policy accepts.
//
// Our rules never move ahead, so a drop of everything before them stays in force: see Obstacles. Only if our rules
// are missing does Ensure choose their place anew.
//
// With an AdminChain, FORWARD calls that chain first. Ensure creates no table, and a chain FORWARD only to call an
// AdminChain. However many processes call Ensure at once, one transaction makes all changes.
func (c *Conn) Ensure(ctx context.Context) (changed bool, _ error) {
	err := c.planned(ctx, "", func(p *plan) error {
		t := p.transaction()
		if t.Empty() {
			return nftnl.Unchanged(c.nl, p.generation)
		}
		err := t.Commit(c.nl)
		changed = err == nil
		return err
	})

	return changed, err
}

// Ready reports whether Ensure would change nothing. If that was seen over the same Socket before, it costs one look
// at the generation. Otherwise it reads the chain FORWARD, and the chains that FORWARD calls for every packet.
func (c *Conn) Ready(ctx context.Context) (bool, error) {
	if c.err != nil {
		return false, c.err
	}

	right := false
	err := nftnl.Retry(ctx, func() error {
		generation, err := nftnl.Generation(c.nl)
		if right = err == nil && c.seen.Covers(generation, c.sum()); right {
			return nil
		}

		// For a generation that Seen knows, the kernel already shows its changes. For another one, make sure of that.
		if known := c.seen.Generation(); err == nil && (known == nil || *known != generation) {
			err = nftnl.Unchanged(c.nl, generation)
		}

		if err != nil {
			return err
		}

		p, err := c.plan(ctx, generation, "")
		if err != nil {
			return err
		}

		if right = p.transaction().Empty(); !right {
			return nftnl.Unchanged(c.nl, generation) // a change during the plan may have mixed two states
		}

		if c.seen.IsOn() {
			c.seen.Add(generation, c.sum())
		}

		return nil
	})

	return right, err
}

// sum returns the checksum of Ensure's rules, for a Seen.
func (c *Conn) sum() uint64 {
	sum := fnv.New64a()
	fmt.Fprintf(sum, "admission %d %x %s %s", rulesVersion, c.mark, c.admin, c.table)
	return sum.Sum64()
}

// Check returns the differences that Ensure would repair.
func (c *Conn) Check(ctx context.Context) (diffs []tombolo.Difference, _ error) {
	err := c.planned(ctx, "", func(p *plan) error {
		if diffs = p.differences(); len(diffs) == 0 {
			return nil
		}
		return nftnl.Unchanged(c.nl, p.generation)
	})
	return diffs, err
}

// Remove deletes our rules from iptables' chains FORWARD, with any mark.
func (c *Conn) Remove(ctx context.Context) error {
	return c.planned(ctx, "", func(p *plan) error {
		for _, f := range p.families {
			f.place, f.callAdmin = place{index: -1}, false
			for i := range f.rules {
				r := &f.rules[i]
				r.ours = r.ours || r.comment == adminComment
			}
		}
		p.bridges = nil
		return p.transaction().Commit(c.nl)
	})
}

// planned calls do with a plan. As long as another change of the firewall overtakes it, it tries again with a new
// plan. link is the incoming link of pods' packets, or "" if it is unknown.
func (c *Conn) planned(ctx context.Context, link string, do func(*plan) error) error {
	if c.err != nil {
		return c.err
	}
	return nftnl.Retry(ctx, func() error {
		generation, err := nftnl.SeenGeneration(c.nl)
		if err != nil {
			return err
		}
		p, err := c.plan(ctx, generation, link)
		if err == nil {
			err = do(p)
		}
		return err
	})
}

// plan is the state of our rules in both families.
type plan struct {
	*Conn
	generation uint32
	bridges    []string // bridges of our networks, and shared NICs
	families   []*familyPlan
}

// familyPlan is the state of our rules in one family.
type familyPlan struct {
	at     chain
	hooked bool // the chain exists and sees forwarded packets
	base
	place
	adminThere bool // the operator's chain exists
	callAdmin  bool // FORWARD lacks the rule that calls the operator's chain
}

// plan reads the present state and decides on the rules. If the firewall changes while plan reads, the plan may be
// inconsistent. The transaction with its generation is then refused.
func (c *Conn) plan(ctx context.Context, generation uint32, link string) (*plan, error) {
	p := &plan{Conn: c, generation: generation}
	var b nl.Batch
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		f := &familyPlan{at: chain{family, iptablesTable, iptablesForward}, place: place{index: -1}}
		p.families = append(p.families, f)
		getChain(&b, f.at, func(ch nftnl.Chain) { f.hooked, f.policy = isForwardHook(ch), policyOf(ch) })
		if c.admin != "" {
			getChain(&b, chain{family, iptablesTable, c.admin}, func(nftnl.Chain) { f.adminThere = true })
		}
	}

	if err := nftnl.Look(c.nl, &b); err != nil {
		return nil, err
	}

	own := ruleset.Tables{Conn: c.nl, Name: ruleset.TableName(c.table)}
	bridges, err := own.ElementsOf([]ruleset.Place{ruleset.InInet(ruleset.OursSet), ruleset.InInet(ruleset.SharesSet)})
	if err != nil {
		return nil, err
	}

	for _, el := range bridges {
		p.bridges = append(p.bridges, el.KeyText())
	}

	for _, f := range p.families {
		if f.hooked {
			c.read(ctx, &f.base, f.at, &packet{mark: c.mark, known: c.mark, link: link})
			f.place = f.decide(c.admin)
		}

		// A missing FORWARD is created only to call an existing chain of the operator.
		f.callAdmin = c.admin != "" && (f.hooked || f.adminThere) && !f.leadsTo(c.admin)
		if f.err != nil {
			return nil, f.err
		}
	}

	return p, nil
}

// transaction returns the changes that lead to the planned state.
func (p *plan) transaction() *nftnl.Transaction {
	t := nftnl.Begin(&p.generation)
	for _, f := range p.families {
		if f.callAdmin {
			p.insertCall(t, f)
		}

		missing, surplus := p.compare(f)
		for _, a := range missing {
			p.insert(t, f, a)
		}
		for _, r := range surplus {
			object := nl.Name(fmt.Sprintf("rule %d of %s", r.handle, f.at))
			t.Add("delete", object, f.at.family, unix.NFT_MSG_DELRULE, 0,
				append(f.at.named(unix.NFTA_RULE_CHAIN), nftnl.Uint64(unix.NFTA_RULE_HANDLE, r.handle))...)
		}
	}

	return t
}

// compare returns our rules that the chain lacks, and those to delete.
func (p *plan) compare(f *familyPlan) (missing []admission, surplus []rule) {
	if f.index >= 0 {
		for _, bridge := range p.bridges {
			missing = append(missing, admission{fromBridge, bridge}, admission{toBridge, bridge})
		}
	}

	for i, r := range f.rules {
		at := slices.IndexFunc(missing, func(a admission) bool { return a.comment(p.Conn) == r.comment })
		switch {
		case at >= 0 && slices.Contains(f.kept, i):
			missing = slices.Delete(missing, at, at+1)
		case r.ours:
			surplus = append(surplus, r)
		}
	}

	return missing, surplus
}

// insert adds one of our rules in the form of iptables, which gives every rule a counter. So iptables prints it
// correctly.
func (p *plan) insert(t *nftnl.Transaction, f *familyPlan, a admission) {
	attrs, flags := f.at.named(unix.NFTA_RULE_CHAIN), netlink.Append
	if f.index < len(f.rules) {
		flags = 0
		attrs = append(attrs, nftnl.Uint64(unix.NFTA_RULE_POSITION, f.rules[f.index].handle))
	}

	comment, link := a.comment(p.Conn), expr.MetaKeyIIFNAME
	if a.direction == toBridge {
		link = expr.MetaKeyOIFNAME
	}

	t.AddRule(fmt.Sprintf("insert rule %q into", comment), f.at, f.at.family, flags, comment,
		nftnl.Collect(func(x *nftnl.Expressions) {
			x.Meta(link, nftnl.First)
			x.Compare(expr.CmpOpEq, nftnl.LinkKey(a.bridge, nil, 0))
			bits := binary.NativeEndian.AppendUint32(nil, p.mark)
			x.Meta(expr.MetaKeyMARK, nftnl.First)
			x.Mask(bits, nil)
			x.Compare(expr.CmpOpEq, bits)
			x.Add(&expr.Counter{})
			x.Add(&expr.Verdict{Kind: expr.VerdictAccept})
		}), attrs...)
}

// adminComment is the comment of the rule that calls the operator's chain.
const adminComment = "tombolo: the operator's rules first"

// insertCall makes FORWARD call the operator's chain first, like the reference plugin firewall.
func (p *plan) insertCall(t *nftnl.Transaction, f *familyPlan) {
	if !f.hooked {
		hook := nftnl.Nest(unix.NFTA_CHAIN_HOOK, nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, unix.NF_INET_FORWARD),
			nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, 0))
		attrs := append(f.at.named(unix.NFTA_CHAIN_NAME), hook, nftnl.Uint32(unix.NFTA_CHAIN_POLICY, policyAccept),
			nftnl.String(unix.NFTA_CHAIN_TYPE, "filter"))
		t.Add("make", f.at, f.at.family, unix.NFT_MSG_NEWCHAIN, netlink.Create, attrs...)
	}

	if !f.adminThere {
		own := chain{f.at.family, iptablesTable, p.admin}
		t.Add("make", own, own.family, unix.NFT_MSG_NEWCHAIN, netlink.Create, own.named(unix.NFTA_CHAIN_NAME)...)
	}

	t.AddRule("insert a jump to "+p.admin+" into", f.at, f.at.family, 0, adminComment,
		nftnl.Collect(func(x *nftnl.Expressions) {
			x.Add(&expr.Counter{})
			x.Add(&expr.Verdict{Kind: expr.VerdictJump, Chain: p.admin})
		}), f.at.named(unix.NFTA_RULE_CHAIN)...)
}

// differences returns the differences between the present and the planned state.
func (p *plan) differences() []tombolo.Difference {
	var list diff.List
	for _, f := range p.families {
		at := f.at.String()
		if f.callAdmin {
			list.Add(at, "rule", fmt.Sprintf("%q, which calls %s,", adminComment, p.admin), "")
		}

		missing, surplus := p.compare(f)
		for _, a := range missing {
			rule := fmt.Sprintf("%q for mark 0x%x", a.comment(p.Conn), p.mark)
			if len(surplus) > 0 {
				list.Add(at, "place of rule "+rule, "right before what every packet is dropped by",
					"where it spares packets other rules")
			} else {
				list.Add(at, "rule", rule, "")
			}
		}

		if len(missing) == 0 && len(surplus) > 0 {
			list.Add(at, "rule", "", fmt.Sprintf("%q with handle %d", surplus[0].comment, surplus[0].handle))
		}
	}

	return list
}
