package foreign

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Obstacle is a firewall that drops what pods send, or may drop it, and that Ensure does nothing
// about: because it cannot, or because that is not its to decide.
type Obstacle struct {
	Kind ObstacleKind
	// Chain is what stops it, as errors name chains: "chain forward of table inet
	// filter".
	Chain string
	// Maybe says that a rule before the drop could accept it, so that only a packet can tell.
	Maybe bool
	// Effect is what it does: "drops, by its policy,".
	Effect string
	// Remedy is the command that helps, in one line for a shell. Its effect may have
	// to be made to last, by whatever means the rules there were made by.
	Remedy string
}

// ObstacleKind says whose rules they are.
type ObstacleKind string

const (
	// LegacyIPTables is the table filter of legacy iptables or ip6tables, which
	// nf_tables cannot change.
	LegacyIPTables ObstacleKind = "legacy-iptables"
	// Firewalld is firewalld's table, which it makes anew whenever it is reloaded, and
	// from version 2 on lets nobody else change: the zone that the bridge is in. So is what drops
	// all while it does that.
	Firewalld ObstacleKind = "firewalld"
	// IPTables is the table filter of iptables over nf_tables, where Ensure puts its rule: a
	// drop ahead of that is left to its owner.
	IPTables ObstacleKind = "iptables"
	// OtherChain is any other chain of nf_tables: a script's, or a distribution's.
	OtherChain ObstacleKind = "chain"
)

// String gives one line: what is in the way, what it does, and the command that
// helps.
func (o Obstacle) String() string {
	switch {
	case !o.Maybe:
		return fmt.Sprintf("%s %s what pods send; this helps: %s", o.Chain, o.Effect, o.Remedy)
	case o.Kind == LegacyIPTables:
		return fmt.Sprintf("what pods send may be dropped by %s; if it is, this helps: %s", o.Chain, o.Remedy)
	}
	return fmt.Sprintf("what pods send may be dropped by %s; this finds out: tombolo doctor POD --to ADDR:PORT", o.Chain)
}

// Path is how pods' packets go: what Obstacles goes by.
type Path struct {
	// Bridge is the link that they come in by.
	Bridge string
	// Prefixes are the pods' own: of families that they do not have, nothing is an obstacle. Empty is both.
	Prefixes []netip.Prefix
}

// Obstacles looks at all base chains that see what is forwarded, through whichever table. It reads, and changes
// nothing. The table filter of iptables over nf_tables is looked at as it is once Ensure has put its rule there.
//
// An obstacle is a policy of drop, or a rule without a condition that drops or rejects. Where a rule before it could
// accept what pods send, it is one only maybe: of conditions no more is understood than our mark, the bridge's
// name, and that what pods send begins a connection. A rule with other conditions that drops is none; what a
// packet meets, tombolo doctor finds out.
//
// A chain of nf_tables that is called before our forward chain can do nothing with the mark; its remedy goes by
// the bridge's name.
//
// It needs CAP_NET_ADMIN. It lists whole tables: it is not for every pod.
func Obstacles(ctx context.Context, cfg *Config, path Path) ([]Obstacle, error) {
	if cfg == nil {
		cfg = &Config{}
	}
	if ctx == nil {
		return nil, nl.NoContext()
	}
	c, err := Dial(cfg)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.link = path.Bridge
	legacy, err := c.legacyObstacles(ctx, cfg.NetNS, path)
	if err != nil {
		return nil, err
	}
	if _, err := nftnl.Generation(c.nl); err != nil {
		if nftnl.IsMissing(err) {
			return legacy, nil
		}
		return nil, err
	}
	var others []Obstacle
	err = nftnl.Retry(ctx, func() error {
		if others, err = c.iptablesObstacles(ctx, path); err != nil {
			return err
		}
		more, err := c.chainObstacles(ctx, path)
		others = append(others, more...)
		return err
	})
	if err != nil {
		return nil, err
	}
	return append(legacy, others...), nil
}

// has says whether pods have addresses of a family, as far as is known.
func (p *Path) has(family uint8) bool {
	return family == unix.NFPROTO_INET || len(p.Prefixes) == 0 || slices.ContainsFunc(p.Prefixes, func(prefix netip.Prefix) bool {
		return prefix.Addr().Is4() == (family == unix.NFPROTO_IPV4)
	})
}

// iptablesObstacles looks at the tables filter of iptables over nf_tables, as they are once
// Ensure has put its rule there.
func (c *Conn) iptablesObstacles(ctx context.Context, path Path) ([]Obstacle, error) {
	p, err := c.plan(ctx)
	if err != nil {
		return nil, err
	}
	var list []Obstacle
	for _, f := range p.families {
		if !f.hooked || !path.has(f.at.family) {
			continue
		}
		asleep, err := c.isAsleep(f.at)
		if err != nil {
			return nil, err
		}
		if o := f.obstacle(c.mark); o != nil && !asleep {
			list = append(list, *o)
		}
	}
	return list, nil
}

// obstacle is what stops pods' packets although our rule is where it should be.
func (f *familyPlan) obstacle(mark uint32) *Obstacle {
	at, stopped, unsure := f.stopsPods()
	if !stopped || f.needed && (f.keep >= 0 && f.keep < at || f.keep < 0 && f.place.at <= at) {
		return nil
	}
	program := iptablesProgram(f.at.family)
	accept := fmt.Sprintf("-m mark --mark 0x%x/0x%x -j ACCEPT", mark, mark)
	o := &Obstacle{Kind: IPTables, Chain: f.at.String(), Maybe: unsure, Effect: f.effect(at)}
	if at == len(f.rules) || f.rules[at].verdict == returns { // they return before our rule
		o.Remedy = fmt.Sprintf("%s -I %s %s", program, iptablesForward, accept)
		return o
	}
	o.Effect = fmt.Sprintf("drops or rejects, by its rule number %d, which is left to its owner,", at+1)
	o.Remedy = fmt.Sprintf("%s -D %s %d", program, iptablesForward, at+1)
	if called := f.rules[at].target; called != "" { // which other rules may call
		o.Effect = fmt.Sprintf("drops or rejects, by its rule number %d, which calls %s and is left to its owner,", at+1, called)
		o.Remedy = fmt.Sprintf("%s -I %s %d %s", program, iptablesForward, at+1, accept)
	}
	return o
}

func iptablesProgram(family uint8) string {
	if family == unix.NFPROTO_IPV6 {
		return "ip6tables"
	}
	return "iptables"
}

// hookedChain is a base chain that sees what is forwarded.
type hookedChain struct {
	chain
	priority int32
	policy   ending
}

// beforeOurs says that our forward chain has not marked anything by then. Of chains
// with the same priority, the kernel calls the one first that it was told of last.
func (ch *hookedChain) beforeOurs() bool { return ch.priority <= nftnl.PriorityForward }

// chainObstacles looks at all base chains of nf_tables but ours and those of Ensure.
func (c *Conn) chainObstacles(ctx context.Context, path Path) ([]Obstacle, error) {
	chains, err := c.hookedChains(ctx)
	if err != nil {
		return nil, err
	}
	var list []Obstacle
	for _, ch := range chains {
		if asleep, err := c.isAsleep(ch.chain); err != nil {
			return nil, err
		} else if asleep || !path.has(ch.family) {
			continue
		}
		pods := &packet{mark: c.mark, known: c.mark, link: path.Bridge, firewalld: ch.table == firewalldTable}
		if ch.beforeOurs() {
			pods.mark = 0
		}
		rules, err := c.rulesIn(ctx, chain{family: ch.family, table: ch.table}, pods)
		if err != nil {
			return nil, err
		}
		b := base{rules: rules[ch.name], policy: ch.policy, chain: func(name string) []rule { return rules[name] }}
		if at, stopped, unsure := b.stopsPods(); stopped {
			list = append(list, ch.obstacle(&b, at, unsure, c.mark, path.Bridge))
		}
	}
	return list, nil
}

// effect says what the rule with an index does, or the policy.
func (b *base) effect(at int) string {
	if at == len(b.rules) || b.rules[at].verdict == returns {
		return "drops, by its policy,"
	}
	return "drops or rejects, by a rule for all that it does not know,"
}

func (c *Conn) hookedChains(ctx context.Context) ([]hookedChain, error) {
	var list []hookedChain
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		err := nftnl.List(c.nl, "list chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
			ch, err := nftnl.DecodeChain(data)
			at := chain{family, ch.Table, ch.Name}
			ours := family == unix.NFPROTO_INET && ch.Table == c.table
			admissible := family != unix.NFPROTO_INET && ch.Table == iptablesTable && ch.Name == iptablesForward
			if isForwardHook(ch) && !ours && !admissible {
				list = append(list, hookedChain{at, ch.Priority, endingOf(ch.Policy)})
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// isAsleep says that the table of a chain is dormant, or gone: nothing calls the chain.
func (c *Conn) isAsleep(ch chain) (bool, error) {
	asleep := true
	var b nl.Batch
	nftnl.Get(&b, nl.Name("table "+nftnl.FamilyName(ch.family)+" "+ch.table), ch.family, unix.NFT_MSG_GETTABLE, func(data []byte) error {
		t, err := nftnl.DecodeTable(data)
		asleep = t.IsDormant()
		return err
	}, nftnl.String(unix.NFTA_TABLE_NAME, ch.table))
	return asleep, nftnl.Look(c.nl, &b)
}

// obstacle names the chain, and an accept that helps: right before the rule that stops pods,
// or at the chain's end, so that it overrides nothing else.
func (ch *hookedChain) obstacle(b *base, at int, unsure bool, mark uint32, link string) Obstacle {
	o := Obstacle{Kind: OtherChain, Chain: ch.chain.String(), Effect: b.effect(at), Maybe: unsure}
	var before uint64
	if at < len(b.rules) {
		before = b.rules[at].handle
	}
	switch {
	case ch.table == firewalldTable:
		o.Kind, o.Remedy, o.Maybe = Firewalld, JoinTrusted(link), unsure || b.isTrusted()
	case ch.table == firewalldReload:
		o.Kind, o.Maybe, o.Effect, o.Remedy = Firewalld, false, "drops, while firewalld loads its rules,", reloadFirewalld
	case ch.beforeOurs() && ch.family != unix.NFPROTO_INET && ch.name == iptablesForward:
		// iptables' own, which could not print what nft would put there.
		insert := fmt.Sprintf("%s -t %s -I %s %d", iptablesProgram(ch.family), shellWord(ch.table), iptablesForward, at+1)
		o.Remedy = fmt.Sprintf("%s -i %s -j ACCEPT && %s -o %s -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT", insert, shellWord(link), insert, shellWord(link))
	case ch.beforeOurs():
		o.Remedy = AcceptLink(ch.family, ch.table, ch.name, before, link)
	default:
		o.Remedy = AcceptMark(ch.family, ch.table, ch.name, before, mark)
	}
	return o
}

// What firewalld makes.
const (
	firewalldTable   = "firewalld"
	firewalldPolicy  = "filter_FWD_policy_" // begins the names of policies' chains
	firewalldTrusted = "filter_FWD_trusted"
	firewalldReload  = "firewalld_policy_drop" // drops while it loads its rules

	// It waits for a reload that goes on, and ends what one that was broken off has left.
	reloadFirewalld = "firewall-cmd --reload"
)

// isTrusted says that the link is in firewalld's zone trusted already.
func (b *base) isTrusted() bool {
	const zones = "filter_FORWARD_ZONES"
	return slices.ContainsFunc(b.chain(zones), func(r rule) bool { return r.isForAll() && r.target == firewalldTrusted })
}

// JoinTrusted is the command by which a link joins firewalld's zone trusted, from whichever zone it is in.
func JoinTrusted(link string) string {
	return "firewall-cmd --permanent --zone=trusted --change-interface=" + shellWord(link) + " && " + reloadFirewalld
}

// AcceptMark is the command that has a chain of nf_tables accept what pods send: before the rule with a handle, or, if
// that is 0, at its end.
func AcceptMark(family uint8, table, chain string, before uint64, mark uint32) string {
	return fmt.Sprintf("%s 'meta mark & 0x%x == 0x%x counter accept'", insertInto(family, table, chain, before), mark, mark)
}

// AcceptLink is the same for a chain that is called before ours, where nothing has the mark.
func AcceptLink(family uint8, table, chain string, before uint64, link string) string {
	insert, link := insertInto(family, table, chain, before), shellWord(link)
	// A published port's first packet is no reply.
	return fmt.Sprintf("%s iifname %s accept && %s oifname %s ct state established,related accept && %s oifname %s ct status dnat accept",
		insert, link, insert, link, insert, link)
}

func insertInto(family uint8, table, chain string, before uint64) string {
	at := fmt.Sprintf("%s %s %s", nftnl.FamilyName(family), shellWord(table), shellWord(chain))
	if before == 0 {
		return "nft add rule " + at
	}
	return fmt.Sprintf("nft insert rule %s handle %d", at, before)
}

// shellWord quotes a name that a shell would not take as it is: the kernel lets
// chains be called anything.
func shellWord(name string) string {
	plain := func(r rune) bool {
		return r < 0x80 && (isAlphanumeric(byte(r)) || strings.ContainsRune("_./-", r))
	}
	if name != "" && !strings.ContainsFunc(name, func(r rune) bool { return !plain(r) }) {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}
