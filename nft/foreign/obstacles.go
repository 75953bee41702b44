package foreign

import (
	"cmp"
	"context"
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
	Chain  string // "chain forward of table inet filter"
	Effect string // "drops, by its policy,"
	// Remedy is the command that helps, in one line for a shell. To outlive a boot, it may have to go where the
	// rules there come from.
	Remedy    string
	Maybe     bool // a rule before the drop could accept it, so that only a packet can tell
	Firewalld bool // the zone of the bridge is what helps, or the end of a reload
	Legacy    bool // it is legacy iptables, whose packets nothing traces
}

// String gives one line: what is in the way, what it does, and the command that helps.
func (o Obstacle) String() string {
	switch {
	case !o.Maybe:
		return fmt.Sprintf("%s %s what pods send; this helps: %s", o.Chain, o.Effect, o.Remedy)
	case o.Legacy:
		return fmt.Sprintf("%s may drop what pods send; if it does, this helps: %s", o.Chain, o.Remedy)
	}
	return fmt.Sprintf("%s may drop what pods send; this finds out: tombolo doctor POD --to ADDR:PORT", o.Chain)
}

// Path is how pods' packets go.
type Path struct {
	Bridge   string         // the link that they come in by
	Prefixes []netip.Prefix // the pods' own: of families that they do not have, nothing is an obstacle. Empty is both.
}

// Obstacles looks at all base chains that see what is forwarded, through whichever table, and at FORWARD of legacy
// iptables in the calling thread's namespace. It reads, and changes nothing. The table filter of iptables over nf_tables
// is looked at as it is once Ensure has put its rule there.
//
// An obstacle is a policy of drop, or a rule without a condition that drops or rejects. Where a rule before it could
// accept what pods send, it is one only maybe: of conditions no more is understood than our mark, the bridge's
// name, and that what pods send begins a connection. A rule with other conditions that drops is none: tombolo doctor
// finds it. A table that is dormant counts as one that is not.
func (c *Conn) Obstacles(ctx context.Context, path Path) ([]Obstacle, error) {
	var list []Obstacle
	err := c.planned(ctx, path.Bridge, func(p *plan) (err error) {
		list, err = c.legacy(path)
		for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
			if err == nil && path.has(family) {
				list, err = p.appendObstacles(ctx, list, family, path.Bridge)
			}
		}
		return err
	})
	return list, err
}

// HasFirewalld reports whether firewalld's rules are there, also while it loads them.
func (c *Conn) HasFirewalld(ctx context.Context) (is bool, _ error) {
	err := nftnl.List(c.nl, "list chains", unix.NFPROTO_UNSPEC, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		ch := nftnl.DecodeChain(data)
		is = is || strings.HasPrefix(ch.Table, "firewalld") || ch.Name == "FWD_trusted" // a chain in iptables' table
		return nil
	})
	return is, err
}

// Markers names the rules of other programs, in all tables of nf_tables, that set a bit of our mark in packets or
// connections. What they mean by it and what we mean gets mixed up in packets from and to our bridges.
func (c *Conn) Markers(ctx context.Context) (names []string, _ error) {
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		err := nftnl.List(c.nl, "list rules", family, unix.NFT_MSG_GETRULE, func(data []byte) error {
			r := decodeRule(data, &packet{})
			at := chain{family, nftnl.Text(nftnl.Find(data, unix.NFTA_RULE_TABLE)), nftnl.Text(nftnl.Find(data, unix.NFTA_RULE_CHAIN))}
			if bits := r.sets & c.mark; bits != 0 && (family != unix.NFPROTO_INET || at.table != c.table) {
				names = append(names, fmt.Sprintf("%s sets bit 0x%x of the mark, by its rule with handle %d, which table inet %s uses: "+
					"give the networks another forwardMark, or that rule another bit", at, bits, r.handle, c.table))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return names, nil
}

// Exemptions names the rules of other programs that accept packets to an address in nat chains of the hook prerouting.
// They keep such packets from iptables' rules behind them, as those of the reference's portmap are. Host ports are in a
// chain of their own, which the packets come to all the same. It also names the setting by which firewalld rejects what
// goes to host ports of other programs.
func (c *Conn) Exemptions(ctx context.Context) (names []string, _ error) {
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		var chains []chain
		err := nftnl.List(c.nl, "list chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
			ch := nftnl.DecodeChain(data)
			isOurs := family == unix.NFPROTO_INET && ch.Table == c.table
			if ch.Kind == "nat" && ch.Hook == unix.NF_INET_PRE_ROUTING && !isOurs {
				chains = append(chains, chain{family, ch.Table, ch.Name})
			}
			if ch.Table == "firewalld" && ch.Name == "filter_FORWARD_dnat" {
				names = append(names, "StrictForwardPorts of firewalld closes host ports; this helps: sed -i "+
					"'s/^StrictForwardPorts=.*/StrictForwardPorts=no/' /etc/firewalld/firewalld.conf && firewall-cmd --reload")
			}
			return nil
		})
		if err != nil {
			return nil, err
		}

		for _, at := range chains {
			rules, err := c.rulesOf(ctx, at, &packet{})
			if err != nil {
				return nil, err
			}
			for _, r := range rules {
				address, ok := netip.AddrFromSlice(r.destination)
				if ok && r.verdict == accepts {
					names = append(names, fmt.Sprintf("%s accepts what goes to %s, by its rule with handle %d; host ports without a hostIP take it "+
						"all the same: give them a hostIP, or delete that rule", at, address, r.handle))
				}
			}
		}
	}
	return names, nil
}

// ReversePaths names the rules of other programs that drop packets of a family (unix.NFPROTO_IPV4 or NFPROTO_IPV6) that
// come in by a link which is not the way back, as the bridged frames of pods do at a NIC that is shared. Of rules with
// other conditions, and of legacy iptables, nothing is known.
func (c *Conn) ReversePaths(ctx context.Context, bridge string, families ...uint8) (names []string, _ error) {
	spared := map[chain]bool{} // chains that let pass what comes in by the bridge
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		err := nftnl.List(c.nl, "list rules", family, unix.NFT_MSG_GETRULE, func(data []byte) error {
			r := decodeRule(data, &packet{link: bridge})
			text := func(attribute uint16) string { return nftnl.Text(nftnl.Find(data, attribute)) }
			at := chain{family, text(unix.NFTA_RULE_TABLE), text(unix.NFTA_RULE_CHAIN)}
			of := cmp.Or(r.family, family)
			concerns := of == unix.NFPROTO_INET || slices.Contains(families, of)
			spared[at] = spared[at] || r.isForAll() && r.does(accepts, returns)
			if !r.reversePath || r.unmet || spared[at] || !concerns || family == unix.NFPROTO_INET && at.table == c.table {
				return nil
			}
			var remedy string
			switch {
			case at.table == "firewalld":
				remedy = "sed -i 's/^IPv6_rpfilter=.*/IPv6_rpfilter=no/' /etc/firewalld/firewalld.conf && firewall-cmd --reload"
			case family != unix.NFPROTO_INET:
				remedy = fmt.Sprintf("%s -t %s -I %s -i %s -j RETURN", iptablesProgram(family), at.table, at.name, bridge)
			default:
				remedy = fmt.Sprintf("nft insert rule %s %s %s handle %d iifname %s accept",
					nftnl.FamilyName(family), at.table, at.name, r.handle, bridge)
			}
			names = append(names, fmt.Sprintf("%s drops, by its rule with handle %d, what comes in by %s, since the way back "+
				"is by another link; this helps: %s", at, r.handle, bridge, remedy))
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return names, nil
}

// has says whether pods may have addresses of a family.
func (p *Path) has(family uint8) bool {
	return family == unix.NFPROTO_INET || len(p.Prefixes) == 0 || slices.ContainsFunc(p.Prefixes, func(prefix netip.Prefix) bool {
		return prefix.Addr().Is4() == (family == unix.NFPROTO_IPV4)
	})
}

// appendObstacles appends those of base chains of nf_tables of a family, but for ours.
func (p *plan) appendObstacles(ctx context.Context, list []Obstacle, family uint8, link string) ([]Obstacle, error) {
	var chains []nftnl.Chain
	err := nftnl.List(p.nl, "list chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		if ch := nftnl.DecodeChain(data); isForwardHook(ch) && (family != unix.NFPROTO_INET || ch.Table != p.table) {
			chains = append(chains, ch)
		}
		return nil
	})
	for _, ch := range chains {
		o, unread := p.obstacle(ctx, chain{family, ch.Table, ch.Name}, ch, link)
		err = cmp.Or(err, unread)
		if o != nil {
			list = append(list, *o)
		}
	}
	return list, err
}

// obstacle is what stops pods in a chain; nil if nothing does, or Ensure puts that right.
func (p *plan) obstacle(ctx context.Context, at chain, ch nftnl.Chain, link string) (*Obstacle, error) {
	for _, f := range p.families {
		if f.at == at {
			return f.obstacle(p.mark), f.err
		}
	}
	const firewalld = "firewalld" // and firewalld_policy_drop, while it loads its rules
	isFirewalld := strings.HasPrefix(at.table, firewalld)
	pods := &packet{known: p.mark, link: link, firewalld: isFirewalld}
	// Of chains with the same priority, the kernel calls the one first that it was told of last.
	if ch.Priority > nftnl.PriorityForward {
		pods.mark = p.mark
	}
	b := base{policy: policyOf(ch)}
	p.read(ctx, &b, at, pods)
	o, number := b.obstacle(at.String())
	switch {
	case o == nil || at.table == firewalld && b.isTrusted():
		return nil, b.err
	case isFirewalld:
		// It waits for a reload that goes on, and ends what one that was broken off has left.
		o.Firewalld, o.Remedy = true, "firewall-cmd --reload"
		if at.table == firewalld {
			o.Remedy = "firewall-cmd --permanent --zone=trusted --change-interface=" + link + " && " + o.Remedy
		}
	case pods.mark != 0:
		o.Remedy = fmt.Sprintf("%s 'meta mark & 0x%x == 0x%x counter accept'", b.insert(at, number), p.mark, p.mark)
	case at.family != unix.NFPROTO_INET && at.name == iptablesForward:
		// Where there are nft's words for states, iptables no longer reads its table.
		insert := insertInto(iptablesProgram(at.family)+" -t "+at.table, number)
		o.Remedy = fmt.Sprintf("%s -i %s -j ACCEPT && %s -o %s -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT", insert, link, insert, link)
	default:
		insert := b.insert(at, number)
		// A published port's first packet is no reply.
		o.Remedy = fmt.Sprintf("%s iifname %s accept && %s oifname %s ct state established,related accept && %s oifname %s ct status dnat accept",
			insert, link, insert, link, insert, link)
	}
	return o, b.err
}

// isTrusted says that the link is in firewalld's zone trusted. A probe tells which packets its policies and other
// zones drop.
func (b *base) isTrusted() bool {
	return slices.ContainsFunc(b.chain("filter_FORWARD_ZONES"), func(r rule) bool { return r.isForAll() && r.target == "filter_FWD_trusted" })
}

// obstacle is what stops pods, without a remedy, and the number of the rule that does: 0 is the policy.
func (b *base) obstacle(chain string) (o *Obstacle, number int) {
	at, how := b.end(0)
	if how == accepts {
		return nil, 0
	}
	unsure := b.couldAccept(b.rules[:min(at+1, len(b.rules))], map[string]bool{})
	o = &Obstacle{Chain: chain, Maybe: unsure, Effect: "drops, by its policy,"}
	if at == len(b.rules) {
		return o, 0
	}
	calls := ""
	if called := b.rules[at].target; called != "" {
		calls = "calls " + called + " and "
	}
	o.Effect = fmt.Sprintf("drops or rejects, by its rule number %d, which %sis left to its owner,", at+1, calls)
	return o, at + 1
}

// obstacle is a rule that our accept stays behind; nil if there is none.
func (f *familyPlan) obstacle(mark uint32) *Obstacle {
	o, number := f.base.obstacle(f.at.String())
	if o == nil || number == 0 || f.index >= 0 && f.index < number {
		return nil
	}
	program := iptablesProgram(f.at.family)
	o.Remedy = fmt.Sprintf("%s -D %s %d", program, iptablesForward, number)
	if f.rules[number-1].target != "" {
		o.Remedy = acceptMark(program, number, mark)
	}
	return o
}

func iptablesProgram(family uint8) string {
	if family == unix.NFPROTO_IPV6 {
		return "ip6tables"
	}
	return "iptables"
}

// insert has nft put a rule before the one with a number, or, if that is 0, at the chain's end: so it overrides nothing
// else.
func (b *base) insert(at chain, before int) string {
	where := fmt.Sprintf("%s %s %s", nftnl.FamilyName(at.family), at.table, at.name)
	if before == 0 {
		return "nft add rule " + where
	}
	return fmt.Sprintf("nft insert rule %s handle %d", where, b.rules[before-1].handle)
}

// insertInto has iptables do the same with FORWARD.
func insertInto(program string, before int) string {
	if before == 0 {
		return program + " -A " + iptablesForward
	}
	return fmt.Sprintf("%s -I %s %d", program, iptablesForward, before)
}

func acceptMark(program string, before int, mark uint32) string {
	return fmt.Sprintf("%s -m mark --mark 0x%x/0x%x -j ACCEPT", insertInto(program, before), mark, mark)
}
