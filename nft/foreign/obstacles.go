package foreign

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Obstacle is a firewall that drops what pods send, or may drop it, and that Ensure does nothing
// about: because it cannot, or because that is not its to decide.
type Obstacle struct {
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
	// Firewalld says that the zone of the bridge is what helps, or the end of a reload.
	Firewalld bool
	// Legacy says that it is legacy iptables, whose packets nothing traces.
	Legacy bool
}

// String gives one line: what is in the way, what it does, and the command that
// helps.
func (o Obstacle) String() string {
	switch {
	case !o.Maybe:
		return fmt.Sprintf("%s %s what pods send; this helps: %s", o.Chain, o.Effect, o.Remedy)
	case o.Legacy:
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

// Obstacles looks at all base chains that see what is forwarded, through whichever table, and at Legacy. It reads, and
// changes nothing. The table filter of iptables over nf_tables is looked at as it is once Ensure has put its rule there.
//
// An obstacle is a policy of drop, or a rule without a condition that drops or rejects. Where a rule before it could
// accept what pods send, it is one only maybe: of conditions no more is understood than our mark, the bridge's
// name, and that what pods send begins a connection. A rule with other conditions that drops is none; what a
// packet meets, tombolo doctor finds out. A table that is dormant counts as one that is not.
//
// A chain of nf_tables that is called before our forward chain can do nothing with the mark; its remedy goes by
// the bridge's name.
//
// It needs CAP_NET_ADMIN. It lists chains and rules: it is not for every pod.
func (c *Conn) Obstacles(ctx context.Context, path Path) ([]Obstacle, error) {
	if err := c.usable(ctx); err != nil {
		return nil, err
	}
	legacy, err := Legacy(c.mark, path)
	if err != nil {
		return nil, err
	}
	var list []Obstacle
	err = nftnl.Retry(ctx, func() error {
		list = legacy
		p, err := c.plan(ctx, path.Bridge)
		if err != nil {
			return err
		}
		for _, f := range p.families {
			if o := f.obstacle(c.mark); o != nil && path.has(f.at.family) {
				list = append(list, *o)
			}
			err = errors.Join(err, f.base.err)
		}
		for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
			if err == nil && path.has(family) {
				list, err = c.chainObstacles(ctx, list, family, path.Bridge)
			}
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// has says whether pods have addresses of a family, as far as is known.
func (p *Path) has(family uint8) bool {
	return family == unix.NFPROTO_INET || len(p.Prefixes) == 0 || slices.ContainsFunc(p.Prefixes, func(prefix netip.Prefix) bool {
		return prefix.Addr().Is4() == (family == unix.NFPROTO_IPV4)
	})
}

// obstacle is what stops pods' packets although our rule is where it should be.
func (f *familyPlan) obstacle(mark uint32) *Obstacle {
	at, stopped, unsure := f.stopsPods()
	if !f.hooked || !stopped || at == len(f.rules) || f.needed && (f.keep >= 0 && f.keep < at || f.keep < 0 && f.place.at <= at) {
		return nil
	}
	program, number := iptablesProgram(f.at.family), at+1
	o := &Obstacle{Chain: f.at.String(), Maybe: unsure,
		Effect: fmt.Sprintf("drops or rejects, by its rule number %d, which is left to its owner,", number),
		Remedy: fmt.Sprintf("%s -D %s %d", program, iptablesForward, number)}
	if called := f.rules[at].target; called != "" { // which other rules may call
		o.Effect = fmt.Sprintf("drops or rejects, by its rule number %d, which calls %s and is left to its owner,", number, called)
		o.Remedy = fmt.Sprintf("%s -I %s %d -m mark --mark 0x%x/0x%x -j ACCEPT", program, iptablesForward, number, mark, mark)
	}
	return o
}

func iptablesProgram(family uint8) string {
	if family == unix.NFPROTO_IPV6 {
		return "ip6tables"
	}
	return "iptables"
}

// chainObstacles appends those of base chains of nf_tables of a family, but for ours and those of Ensure.
func (c *Conn) chainObstacles(ctx context.Context, list []Obstacle, family uint8, link string) ([]Obstacle, error) {
	var chains []nftnl.Chain
	err := nftnl.List(c.nl, "list chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		ch, err := nftnl.DecodeChain(data)
		ours := family == unix.NFPROTO_INET && ch.Table == c.table
		admissible := family != unix.NFPROTO_INET && ch.Table == iptablesTable && ch.Name == iptablesForward
		if isForwardHook(ch) && !ours && !admissible {
			chains = append(chains, ch)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, ch := range chains {
		at := chain{family, ch.Table, ch.Name}
		// Of chains with the same priority, the kernel calls the one first that it was told of last.
		marked := ch.Priority > nftnl.PriorityForward
		pods := &packet{mark: c.mark, marked: marked, link: link, firewalld: strings.HasPrefix(ch.Table, firewalldTable)}
		b, err := c.read(ctx, at, endingOf(ch.Policy), pods)
		if err != nil {
			return nil, err
		}
		if o := b.obstacle(at.String()); o != nil && (ch.Table != firewalldTable || !b.isTrusted()) {
			o.Firewalld = pods.firewalld
			o.Remedy = c.remedy(b, at, marked, link)
			list = append(list, *o)
		}
		if b.err != nil {
			return nil, b.err
		}
	}
	return list, nil
}

// obstacle is what stops pods, without a remedy; nil if nothing does.
func (b *base) obstacle(chain string) *Obstacle {
	at, stopped, unsure := b.stopsPods()
	switch {
	case !stopped:
		return nil
	case at == len(b.rules) || b.rules[at].verdict == returns:
		return &Obstacle{Chain: chain, Effect: "drops, by its policy,", Maybe: unsure}
	}
	return &Obstacle{Chain: chain, Effect: "drops or rejects, by a rule for all that it does not know,", Maybe: unsure}
}

// remedy is an accept that helps: right before the rule that stops pods, or at the chain's end, so that it overrides
// nothing else.
func (c *Conn) remedy(b *base, ch chain, marked bool, link string) string {
	var before uint64
	if at, _ := b.end(0); at < len(b.rules) {
		before = b.rules[at].handle
	}
	switch {
	case ch.table == firewalldTable:
		return JoinTrusted(link)
	case ch.table == firewalldReload:
		return reloadFirewalld
	case !marked:
		return AcceptLink(ch.family, ch.table, ch.name, before, link)
	}
	return AcceptMark(ch.family, ch.table, ch.name, before, c.mark)
}

// What firewalld makes.
const (
	firewalldTable  = "firewalld"
	firewalldReload = "firewalld_policy_drop" // drops while it loads its rules

	// It waits for a reload that goes on, and ends what one that was broken off has left.
	reloadFirewalld = "firewall-cmd --reload"
)

// isTrusted says that the link is in firewalld's zone trusted. What its policies and other zones drop, a probe tells.
func (b *base) isTrusted() bool {
	return slices.ContainsFunc(b.chain("filter_FORWARD_ZONES"), func(r rule) bool { return r.isForAll() && r.target == "filter_FWD_trusted" })
}

// JoinTrusted is the command by which a link joins firewalld's zone trusted, from whichever zone it is in.
func JoinTrusted(link string) string {
	return "firewall-cmd --permanent --zone=trusted --change-interface=" + link + " && " + reloadFirewalld
}

// AcceptMark is the command that has a chain of nf_tables accept what pods send: before the rule with a handle, or, if
// that is 0, at its end.
func AcceptMark(family uint8, table, chain string, before uint64, mark uint32) string {
	return fmt.Sprintf("%s 'meta mark & 0x%x == 0x%x counter accept'", insertInto(family, table, chain, before), mark, mark)
}

// AcceptLink is the same for a chain that is called before ours, where nothing has the mark.
func AcceptLink(family uint8, table, chain string, before uint64, link string) string {
	insert := insertInto(family, table, chain, before)
	// A published port's first packet is no reply.
	return fmt.Sprintf("%s iifname %s accept && %s oifname %s ct state established,related accept && %s oifname %s ct status dnat accept",
		insert, link, insert, link, insert, link)
}

func insertInto(family uint8, table, chain string, before uint64) string {
	at := fmt.Sprintf("%s %s %s", nftnl.FamilyName(family), table, chain)
	if before == 0 {
		return "nft add rule " + at
	}
	return fmt.Sprintf("nft insert rule %s handle %d", at, before)
}
