package foreign

import (
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Config configures a Conn. A nil Config and a zero field mean the defaults.
type Config struct {
	// Mark and Table have the meaning and the defaults of the fields of nft.Config.
	Mark  uint32
	Table string
	// AdminChain is the name of an operator's chain that iptables must call first for forwarded packets, or "" for
	// none. If the chain FORWARD exists, Ensure creates a missing AdminChain.
	AdminChain string
}

// Conn examines the firewalls of other programs, and maintains our rules in iptables. Several goroutines and
// processes may use it at the same time. Errors from the kernel are, or wrap, a *tombolo.OpError.
type Conn struct {
	nl       *nl.Conn
	verified *nftnl.Verified
	mark     uint32
	table    string
	admin    string
	err      error // the error about an invalid Config
}

// On returns a Conn that uses an open connection. The connection's owner still has to close it. If s is the Socket of
// an nft.Conn, it may have a record of the generation of nf_tables, which makes Ready faster.
func On(s tombolo.Socket, cfg *Config) *Conn {
	if cfg == nil {
		cfg = &Config{}
	}
	socket := nftnl.Of(s)
	return &Conn{
		nl: socket.Conn, verified: socket.Verified,
		mark: cmp.Or(cfg.Mark, nftnl.DefaultMark), table: cmp.Or(cfg.Table, nftnl.DefaultTable),
		admin: cfg.AdminChain, err: nftnl.CheckTable(cfg.Table, cfg.Mark),
	}
}

// chain identifies a chain in another program's table.
type chain struct {
	family      uint8 // unix.NFPROTO_*
	table, name string
}

// String returns the chain's name for errors and differences.
func (ch chain) String() string {
	return "chain " + ch.name + " of table " + nftnl.FamilyName(ch.family) + " " + ch.table
}

// named returns the attributes with the names of the table and the chain. The parameter attribute is the type of the
// chain's attribute, which depends on the message. The table's attribute is 1 in all messages.
func (ch chain) named(attribute uint16) []netlink.Attribute {
	return []netlink.Attribute{nftnl.String(unix.NFTA_CHAIN_TABLE, ch.table), nftnl.String(attribute, ch.name)}
}

// getChain appends a request for a chain to b. reply is called with the chain, if it exists.
func getChain(b *nl.Batch, ch chain, reply func(nftnl.Chain)) {
	nftnl.Get(b, ch, ch.family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		reply(nftnl.DecodeChain(data))
		return nil
	}, ch.named(unix.NFTA_CHAIN_NAME)...)
}

// rulesOf returns the rules of a chain as decodeRule evaluates them for the packet p: the fields conditional and unmet
// of a rule depend on p. It evaluates a rule of ours for packets of the rule's own bridge instead. If the chain does
// not exist, the result is empty.
func (c *Conn) rulesOf(ctx context.Context, ch chain, p *packet) ([]rule, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}

	var rules []rule
	err := nftnl.List(c.nl, "list rules of "+ch.String(), ch.family, unix.NFT_MSG_GETRULE, func(data []byte) error {
		r := decodeRule(data, p)
		if own, ok := strings.CutPrefix(r.comment, c.comment()); ok {
			// If the rule is ours, evaluate it for the packets of its own bridge.
			assumed := packet{mark: p.mark, known: p.known}
			_, assumed.link, _ = strings.Cut(own, fromBridge)
			_, assumed.to, _ = strings.Cut(own, toBridge)
			r = decodeRule(data, &assumed)
			r.ours = true
		}

		rules = append(rules, r)
		return nil
	}, ch.named(unix.NFTA_RULE_CHAIN)...)

	return rules, err
}

// read sets b.rules to the rules of the base chain at. It sets b.chain to a function that returns the rules of the
// named chain in the same table, and that reads each chain only once. rulesOf evaluates all these rules for the packet
// p. If reading fails, b.err is the error.
func (c *Conn) read(ctx context.Context, b *base, at chain, p *packet) {
	read := map[string][]rule{}
	b.chain = func(name string) []rule {
		if _, ok := read[name]; !ok && b.err == nil {
			read[name], b.err = c.rulesOf(ctx, chain{at.family, at.table, name}, p)
		}
		return read[name]
	}
	b.rules = b.chain(at.name)
}

// isForwardHook reports whether ch is a filter chain for forwarded packets.
func isForwardHook(ch nftnl.Chain) bool {
	return ch.Kind == "filter" && ch.Hook == unix.NF_INET_FORWARD
}

const policyAccept = uint32(expr.VerdictAccept)

// policyOf returns the policy of a base chain as a verdict.
func policyOf(ch nftnl.Chain) verdict {
	if ch.Policy == policyAccept {
		return accepts
	}
	return drops
}

// The names of iptables' table and chain for forwarded packets, as nf_tables lists them.
const (
	iptablesTable   = "filter"
	iptablesForward = "FORWARD"
)

// rulesVersion is part of Conn.sum. It must be increased with every change of Ensure's rules or of their place.
const rulesVersion = 2

// admission is one of our rules in FORWARD. It accepts marked packets from or to one bridge, or one shared NIC.
type admission struct{ direction, bridge string }

// fromBridge and toBridge are the values of admission.direction. They are part of the rule's comment.
const fromBridge, toBridge = " from ", " to "

// comment returns the comment of the rule. The comment identifies the rule, and does not depend on the mark.
func (a admission) comment(c *Conn) string { return c.comment() + a.direction + a.bridge }

// comment returns the beginning of the comments of all rules that Ensure adds to accept packets.
func (c *Conn) comment() string { return "tombolo: admit what table inet " + c.table + " marks" }

// Ensure makes iptables accept the packets that package nft marks, if iptables uses nf_tables. It reports whether it
// changed anything. For IPv4 and IPv6, it adds two rules for each bridge of our networks and for each shared NIC to
// the chain FORWARD. One rule is for packets from the link, and one for packets to the link.
//
// Later rules do not see a packet that our rule accepts. So our rules stand as late as possible: right before the
// first rule that drops or rejects every packet. If rules right before that drop only log packets, our rules stand
// before them too. A jump to a chain that drops everything counts as a drop. Without such a rule, our rules are at
// the end of the chain. Ensure adds no rules if a rule or the policy accepts all other packets. It also adds none if
// FORWARD calls a chain that drops all packets after rules that do more than accept or log: see Obstacles.
//
// Ensure never moves our rules towards the beginning. So if somebody inserts a drop of everything before them, the
// drop stays effective: see Obstacles. Only if all of our rules are missing, Ensure chooses their place anew.
//
// With an AdminChain, Ensure also inserts a call of this chain as the first rule of FORWARD. It does not if FORWARD, or
// a chain that FORWARD calls, already calls the AdminChain. Ensure never creates a table. It creates a chain FORWARD
// only to call an existing AdminChain. All changes are made in one transaction, so several processes may call Ensure at
// the same time.
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

// Ready reports whether Ensure would change nothing. The socket may have a record that this was so for the same
// settings (nftnl.Verified). While nf_tables has the record's generation, Ready reads nothing else. Otherwise it reads
// our bridges, the chains FORWARD, and the chains that FORWARD calls.
func (c *Conn) Ready(ctx context.Context) (bool, error) {
	if c.err != nil {
		return false, c.err
	}

	right := false
	err := nftnl.Retry(ctx, func() error {
		generation, err := nftnl.Generation(c.nl)
		if right = err == nil && c.verified.Covers(generation, c.sum()); right {
			return nil
		}

		// If c.verified has this generation, its changes are visible already. Otherwise wait until they are visible.
		if known := c.verified.Generation(); err == nil && (known == nil || *known != generation) {
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

		if c.verified.IsOn() {
			c.verified.Add(generation, c.sum())
		}

		return nil
	})

	return right, err
}

// sum returns a checksum of the settings that Ensure's rules depend on, for use with nftnl.Verified.
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

// Remove deletes our rules from iptables' chains FORWARD, also rules with another mark, and the call of AdminChain.
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

// planned makes a plan and passes it to do. If another program changes nf_tables in the meantime, planned makes a new
// plan and calls do again. link is the incoming link of pods' packets, or "" if it is unknown.
func (c *Conn) planned(ctx context.Context, link string, do func(*plan) error) error {
	if c.err != nil {
		return c.err
	}
	return nftnl.Retry(ctx, func() error {
		generation, err := nftnl.VisibleGeneration(c.nl)
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

// plan holds the present and the intended state of our rules, for both families.
type plan struct {
	*Conn
	generation uint32
	bridges    []string // bridges of our networks, and shared NICs
	families   []*familyPlan
}

// familyPlan holds the present and the intended state of our rules in one family.
type familyPlan struct {
	at     chain
	hooked bool // the chain exists and sees forwarded packets
	base
	place
	adminThere bool // the operator's chain exists
	callAdmin  bool // FORWARD does not call the operator's chain, and Ensure adds the call
}

// plan reads the present state and decides about the rules. If nf_tables changes while plan reads, the result may be
// inconsistent. A transaction with the same generation is then refused.
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

	if err := nftnl.ExecuteGets(c.nl, &b); err != nil {
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

		// If FORWARD is missing, create it only to call the operator's chain, and only if that chain exists.
		f.callAdmin = c.admin != "" && (f.hooked || f.adminThere) && !f.leadsTo(c.admin)
		if f.err != nil {
			return nil, f.err
		}
	}

	return p, nil
}

// transaction returns a transaction with all changes that the plan needs. It is empty if nothing differs.
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

// compare returns two lists: our rules that are missing in the chain, and existing rules with our comment that must
// be deleted.
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

// insert appends a change that adds one of our rules before the rule with index f.index, or at the end of the chain if
// f.index is the number of rules. The rule has a counter, like every rule of iptables.
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

// insertCall appends changes that insert a call of the operator's chain as the first rule of FORWARD, as the reference
// plugin firewall does. It creates FORWARD and the operator's chain if they do not exist.
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

// differences lists our rules in FORWARD that are missing, surplus or at the wrong place.
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
