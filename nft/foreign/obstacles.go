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

// Obstacle describes a part of a firewall that drops packets of pods, or may drop them, and that Ensure does not
// change. Either Ensure cannot change it, or the firewall's owner must decide about it.
type Obstacle struct {
	Chain  string // such as "chain forward of table inet filter"
	Effect string // such as "drops, by its policy,"
	// Remedy is a shell command in one line that makes the packets pass. If Path.Switched is set, there is no remedy
	// that helps: Remedy is "" for an obstacle in nf_tables, and accepts only marked packets in legacy iptables. To
	// keep the change after a reboot, it may also be necessary to change the configuration of the program that
	// created the rules.
	Remedy    string
	Maybe     bool // a rule before the drop could accept the packets, so only a test packet can tell
	Firewalld bool // firewalld drops the packets; the remedy changes the bridge's zone or reloads firewalld
	Legacy    bool // it is in legacy iptables, where `tombolo doctor` cannot trace packets
}

// String returns one line for the operator. It names the chain, which drops or may drop pods' packets. The line ends
// with the remedy, or with the command that finds out whether the chain drops them.
func (o Obstacle) String() string {
	switch {
	case !o.Maybe:
		return fmt.Sprintf("%s %s what pods send; this helps: %s", o.Chain, o.Effect, o.Remedy)
	case o.Legacy:
		return fmt.Sprintf("%s may drop what pods send; if it does, this helps: %s", o.Chain, o.Remedy)
	}
	return fmt.Sprintf("%s may drop what pods send; this finds out: tombolo doctor POD --to ADDR:PORT", o.Chain)
}

// Path describes the path that packets of pods take.
type Path struct {
	Bridge   string         // the incoming link of the packets
	Prefixes []netip.Prefix // the pods' subnets. Obstacles ignores other families. If empty, pods have both families
	// Switched states that the packets leave by the bridge they came in by, and that this bridge belongs to another
	// program. Such packets have no mark, and obstacles for them in nf_tables have no remedy.
	Switched bool
}

// Obstacles returns the obstacles for packets on path. It examines all base chains of nf_tables for forwarded
// packets, and the chain FORWARD of legacy iptables in the calling thread's network namespace. It evaluates iptables'
// table filter as it will be after Ensure. Obstacles changes nothing.
//
// An obstacle is a policy that drops, or a rule that drops or rejects without a condition. It is marked Maybe if an
// earlier rule could accept the packets. Obstacles evaluates only conditions about our mark and the bridge's name,
// and assumes that pods' packets open connections. It does not find rules that drop packets under other conditions:
// `tombolo doctor` does. Dormant tables are examined like others.
func (c *Conn) Obstacles(ctx context.Context, path Path) ([]Obstacle, error) {
	var list []Obstacle
	err := c.planned(ctx, path.Bridge, func(p *plan) (err error) {
		if list, err = c.legacy(path); err != nil {
			return err
		}

		affected := slices.DeleteFunc(families(), func(family uint8) bool { return !path.has(family) })
		return p.eachForward(affected, func(at chain, ch nftnl.Chain) error {
			o, err := p.obstacle(ctx, at, ch, path)
			if o != nil {
				list = append(list, *o)
			}
			return err
		})
	})

	return list, err
}

// HasFirewalld reports whether firewalld's rules exist, or whether firewalld is loading them. strict reports whether
// they reject packets to ports that another program forwards (firewalld's option StrictForwardPorts).
func (c *Conn) HasFirewalld(ctx context.Context) (is, strict bool, _ error) {
	err := nftnl.List(c.nl, "list chains", unix.NFPROTO_UNSPEC, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		ch := nftnl.DecodeChain(data)
		// FWD_trusted is firewalld's chain if it uses iptables.
		is = is || strings.HasPrefix(ch.Table, firewalld) || ch.Name == "FWD_trusted"
		strict = strict || ch.Table == firewalld && ch.Name == strictForward
		return nil
	})
	return is, strict, err
}

// families returns the families of tables whose chains see forwarded IP packets.
func families() []uint8 { return []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} }

// isOurs reports whether a table is the inet table of package nft.
func (c *Conn) isOurs(family uint8, table string) bool {
	return family == unix.NFPROTO_INET && table == c.table
}

// chains lists the chains of a family in the tables of other programs, and passes every chain to each.
func (c *Conn) chains(family uint8, each func(nftnl.Chain)) error {
	return nftnl.List(c.nl, "list chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		if ch := nftnl.DecodeChain(data); !c.isOurs(family, ch.Table) {
			each(ch)
		}
		return nil
	})
}

// rules lists the rules in the tables of other programs, and passes every rule to each, as decodeRule evaluates it for
// the packet p.
func (c *Conn) rules(p packet, each func(at chain, r rule)) error {
	for _, family := range families() {
		err := nftnl.List(c.nl, "list rules", family, unix.NFT_MSG_GETRULE, func(data []byte) error {
			text := func(attribute uint16) string { return nftnl.Text(nftnl.Find(data, attribute)) }
			at := chain{family, text(unix.NFTA_RULE_TABLE), text(unix.NFTA_RULE_CHAIN)}
			if !c.isOurs(family, at.table) {
				each(at, decodeRule(data, &p))
			}
			return nil
		})
		if err != nil {
			return err
		}
	}

	return nil
}

// Remarks describes rules of other programs, in the nf_tables families inet, ip and ip6, that conflict with ours. Each
// text names the rule and a remedy.
//
// Remarks finds rules that set a bit of our mark in packets or connections, since both programs then use this bit. With
// hostPorts, it also finds rules in nat chains of the hook prerouting that accept packets to one address. Such a rule
// exempts these packets from later rules of iptables, such as those of the reference plugin portmap. It does not exempt
// them from our host ports, which are in another chain.
func (c *Conn) Remarks(ctx context.Context, hostPorts bool) (names []string, _ error) {
	translates := map[chain]bool{}
	for _, family := range families() {
		err := c.chains(family, func(ch nftnl.Chain) {
			at := chain{family, ch.Table, ch.Name}
			translates[at] = hostPorts && ch.Kind == "nat" && ch.Hook == unix.NF_INET_PRE_ROUTING
		})
		if err != nil {
			return nil, err
		}
	}

	err := c.rules(packet{}, func(at chain, r rule) {
		if bits := r.sets & c.mark; bits != 0 {
			names = append(names, fmt.Sprintf(
				"%s sets bit 0x%x of the mark, by its rule with handle %d, which table inet %s uses: "+
					"give the networks another forwardMark, or that rule another bit", at, bits, r.handle, c.table))
		}

		address, ok := netip.AddrFromSlice(r.destination)
		if ok && r.verdict == accepts && translates[at] {
			names = append(names, fmt.Sprintf(
				"%s accepts what goes to %s, by its rule with handle %d; host ports without a hostIP take it "+
					"all the same: give them a hostIP, or delete that rule", at, address, r.handle))
		}
	})
	return names, err
}

// ReversePaths describes rules of other programs that drop a packet from the given bridge if the route back to its
// source uses another link. Each text names the rule and a remedy. If the bridge shares a NIC, such rules may drop
// bridged frames of pods. affected selects unix.NFPROTO_IPV4, unix.NFPROTO_IPV6 or both. ReversePaths assumes that each
// rule with such a check drops, unless the rule has no verdict. It does not examine rules with other conditions, or
// legacy iptables.
func (c *Conn) ReversePaths(ctx context.Context, bridge string, affected ...uint8) (names []string, _ error) {
	accepting := map[chain]bool{} // chains in which an earlier rule accepts or returns all packets from the bridge
	err := c.rules(packet{link: bridge}, func(at chain, r rule) {
		family := cmp.Or(r.family, at.family)
		concerns := family == unix.NFPROTO_INET || slices.Contains(affected, family)
		accepting[at] = accepting[at] || r.isForAll() && r.does(accepts, returns)
		counts := !r.opaque && r.verdict == goesOn // without a verdict
		if !r.reversePath || r.unmet || accepting[at] || !concerns || counts {
			return
		}

		var remedy string
		switch {
		case at.table == firewalld:
			remedy = "sed -i 's/^IPv6_rpfilter=.*/IPv6_rpfilter=no/' /etc/firewalld/firewalld.conf && " +
				"firewall-cmd --reload"
		case at.family != unix.NFPROTO_INET:
			remedy = fmt.Sprintf("%s -t %s -I %s -i %s -j RETURN",
				iptablesProgram(at.family), at.table, at.name, bridge)
		default:
			remedy = fmt.Sprintf("nft insert rule %s %s %s handle %d iifname %s accept",
				nftnl.FamilyName(at.family), at.table, at.name, r.handle, bridge)
		}

		names = append(names, fmt.Sprintf(
			"%s drops, by its rule with handle %d, what comes in by %s, since the way back "+
				"is by another link; this helps: %s", at, r.handle, bridge, remedy))
	})
	return names, err
}

// has reports whether pods may have addresses of the family. It returns true for the family inet.
func (p *Path) has(family uint8) bool {
	return family == unix.NFPROTO_INET || len(p.Prefixes) == 0 ||
		slices.ContainsFunc(p.Prefixes, func(prefix netip.Prefix) bool {
			return prefix.Addr().Is4() == (family == unix.NFPROTO_IPV4)
		})
}

// eachForward calls the function do for each base chain of the families that sees forwarded packets, except our own.
func (p *plan) eachForward(families []uint8, do func(at chain, ch nftnl.Chain) error) error {
	for _, family := range families {
		var list []nftnl.Chain
		err := p.chains(family, func(ch nftnl.Chain) { list = append(list, ch) })
		for _, ch := range list {
			if isForwardHook(ch) {
				err = cmp.Or(err, do(chain{family, ch.Table, ch.Name}, ch))
			}
		}

		if err != nil {
			return err
		}
	}

	return nil
}

// obstacle returns the first obstacle in a chain, or nil if there is none. Unless path.Switched is set, it also
// returns nil if Ensure puts accepting rules before the obstacle, or if firewalld has the link in its zone trusted.
func (p *plan) obstacle(ctx context.Context, at chain, ch nftnl.Chain, path Path) (*Obstacle, error) {
	link, pods := path.Bridge, packet{link: path.Bridge}
	if path.Switched {
		pods.to = link
		b, o, _ := p.examine(ctx, at, ch, pods)
		return o, b.err
	}
	for _, f := range p.families {
		if f.at == at {
			return f.obstacle(p.mark), f.err
		}
	}

	// The kernel calls chains with the same priority in reverse order of their creation. So packets have our mark for
	// certain only in chains with a later priority.
	if ch.Priority > nftnl.PriorityForward {
		pods.mark = p.mark
	}

	b, o, number := p.examine(ctx, at, ch, pods)
	switch {
	case o == nil || at.table == firewalld && b.isTrusted():
		return nil, b.err
	case at.isFirewalld():
		// Suggest a reload. It also waits for a reload in progress, and removes the rules that an interrupted reload
		// has left.
		o.Firewalld, o.Remedy = true, "firewall-cmd --reload"
		if at.table == firewalld {
			o.Remedy = "firewall-cmd --permanent --zone=trusted --change-interface=" + link + " && " + o.Remedy
		}
	case pods.mark != 0:
		o.Remedy = fmt.Sprintf("%s 'meta mark & 0x%x == 0x%x counter accept'", b.insert(at, number), p.mark, p.mark)
	case at.family != unix.NFPROTO_INET && at.name == iptablesForward:
		// Use iptables here. If nft added its own expressions for states, iptables could no longer read the table.
		insert := insertInto(iptablesProgram(at.family)+" -t "+at.table, number)
		o.Remedy = fmt.Sprintf("%s -i %s -j ACCEPT && %s -o %s -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j "+
			"ACCEPT", insert, link, insert, link)
	default:
		insert := b.insert(at, number)

		// The first packet to a published port is not a reply, so it needs a rule of its own.
		o.Remedy = fmt.Sprintf("%s iifname %s accept && %s oifname %s ct state established,related accept && %s "+
			"oifname %s ct status dnat accept",
			insert, link, insert, link, insert, link)
	}

	return o, b.err
}

const firewalld = "firewalld" // the name of firewalld's table

// isFirewalld reports whether a chain is firewalld's. While firewalld loads its rules, it has another table,
// firewalld_policy_drop.
func (ch chain) isFirewalld() bool { return strings.HasPrefix(ch.table, firewalld) }

// examine reads a base chain and the chains that it calls, and evaluates their rules for the packets pods. It returns
// the chain, and the results of base.obstacle. If reading fails, the chain's err is the error.
func (p *plan) examine(ctx context.Context, at chain, ch nftnl.Chain, pods packet) (*base, *Obstacle, int) {
	pods.known, pods.firewalld = p.mark, at.isFirewalld()
	b := &base{policy: policyOf(ch)}
	p.read(ctx, b, at, &pods)
	o, number := b.obstacle(at.String())
	return b, o, number
}

// isTrusted reports whether the link is in firewalld's zone trusted. Other zones and policies of firewalld may still
// drop packets, which only a test packet can show.
func (b *base) isTrusted() bool {
	return slices.ContainsFunc(b.chain("filter_FORWARD_ZONES"),
		func(r rule) bool { return r.isForAll() && r.target == "filter_FWD_trusted" })
}

// obstacle returns the obstacle in a base chain, without its remedy. number is the number of the rule that causes it,
// counted from 1, or 0 for the policy. If there is no obstacle, o is nil.
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

// obstacle returns the obstacle in FORWARD, with its remedy. It returns nil if there is none, if it is the chain's
// policy, or if our rules stand before the rule that drops.
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

// iptablesProgram returns the name of the iptables program for the family.
func iptablesProgram(family uint8) string {
	if family == unix.NFPROTO_IPV6 {
		return "ip6tables"
	}
	return "iptables"
}

// insert returns the beginning of an nft command that adds a rule to a chain. The parameter before is the number of
// the rule before which the new rule goes; 0 means the end.
func (b *base) insert(at chain, before int) string {
	where := fmt.Sprintf("%s %s %s", nftnl.FamilyName(at.family), at.table, at.name)
	if before == 0 {
		return "nft add rule " + where
	}
	return fmt.Sprintf("nft insert rule %s handle %d", where, b.rules[before-1].handle)
}

// insertInto returns the beginning of an iptables command that adds a rule to FORWARD. before has the same meaning as
// for insert.
func insertInto(program string, before int) string {
	if before == 0 {
		return program + " -A " + iptablesForward
	}
	return fmt.Sprintf("%s -I %s %d", program, iptablesForward, before)
}

// acceptMark returns an iptables command that adds a rule to FORWARD that accepts packets with our mark. before has the
// same meaning as for insert.
func acceptMark(program string, before int, mark uint32) string {
	return fmt.Sprintf("%s -m mark --mark 0x%x/0x%x -j ACCEPT", insertInto(program, before), mark, mark)
}

// strictForward is the chain in which firewalld rejects packets to ports that another program forwards, if
// StrictForwardPorts is set.
const strictForward = "filter_FORWARD_dnat"

// Openings finds the firewalls of the host that may refuse packets to host ports if the packets lack our mark. For each
// of them it returns a function that returns the shell command to open ports in this firewall. The ports lead to the
// address pod behind link. The function takes a protocol, a port of the host and a port of the pod. A port is written
// as 80, and a range of ports as 80-90. The firewall may accept the packets already, by a rule with conditions.
//
// If admitted is set, our rules let the packets pass, and Openings looks only for firewalld's StrictForwardPorts, which
// refuses them nevertheless.
//
// The rules that firewalld needs also change the destination of packets. They do this for callers that an endpoint's
// PublishFrom excludes, too. So if limited is set, commands for firewalld contain the word CALLER in place of an
// address or prefix. firewalld refuses this word, so the operator has to replace it.
func (c *Conn) Openings(ctx context.Context, link string, pod netip.Addr, admitted, limited bool) (
	open []func(protocol, host, podPort string) string, _ error) {
	family := uint8(unix.NFPROTO_IPV4)
	if pod.Is6() {
		family = unix.NFPROTO_IPV6
	}

	err := c.planned(ctx, "", func(p *plan) error {
		legacy, err := c.legacy(Path{Prefixes: []netip.Prefix{netip.PrefixFrom(pod, pod.BitLen())}})
		if open = nil; len(legacy) > 0 && !admitted {
			open = append(open, openByIptables(iptablesProgram(family)+"-legacy", 1, pod))
		}

		return cmp.Or(err, p.eachForward([]uint8{unix.NFPROTO_INET, family}, func(at chain, ch nftnl.Chain) error {
			command, err := p.opening(ctx, at, ch, link, pod, admitted, limited)
			if command != nil {
				open = append(open, command)
			}
			return err
		}))
	})

	return open, err
}

// opening returns the function of Openings for one base chain. It returns nil if the chain accepts the packets, or if
// admitted is set and the chain is not firewalld's with StrictForwardPorts.
func (p *plan) opening(ctx context.Context, at chain, ch nftnl.Chain, link string, pod netip.Addr, admitted,
	limited bool) (func(protocol, host, podPort string) string, error) {
	ip, version, source := "ip", "4", ""
	if pod.Is6() {
		ip, version = "ip6", "6"
	}
	if limited {
		source = `source address="CALLER" `
	}

	b, o, number := p.examine(ctx, at, ch, packet{to: link, redirected: true})
	isIptables := at.family != unix.NFPROTO_INET && at.name == iptablesForward
	switch {
	case o == nil, admitted && !(at.isFirewalld() && b.leadsTo(strictForward)):
		return nil, b.err
	case at.isFirewalld(): // firewalld applies its policies only after it has rejected redirected packets
		return func(protocol, host, podPort string) string {
			return fmt.Sprintf(`firewall-cmd --permanent --add-rich-rule='rule family="ipv%s" %sforward-port `+
				`port="%s" protocol="%s" to-port="%s" to-addr="%s"' && firewall-cmd --reload`,
				version, source, host, protocol, podPort, pod)
		}, b.err
	case isIptables && b.leadsTo("ufw"+strings.TrimPrefix(ip, "ip")+"-before-forward"):
		return func(protocol, _, podPort string) string {
			return fmt.Sprintf("ufw route allow proto %s from any to %s port %s", protocol, pod, colon(podPort))
		}, b.err
	case isIptables:
		return openByIptables(iptablesProgram(at.family), number, pod), b.err
	}

	return func(protocol, _, podPort string) string {
		return fmt.Sprintf("%s %s daddr %s %s dport %s accept", b.insert(at, number), ip, pod, protocol, podPort)
	}, b.err
}

// openByIptables returns a function for Openings. Its command adds a rule to FORWARD of an iptables program, before
// the rule with the given number or, for 0, at the end.
func openByIptables(program string, number int, pod netip.Addr) func(protocol, host, podPort string) string {
	return func(protocol, _, podPort string) string {
		return fmt.Sprintf("%s -d %s -p %s --dport %s -j ACCEPT", insertInto(program, number), pod, protocol,
			colon(podPort))
	}
}

// colon returns a range of ports in the form of iptables and ufw.
func colon(ports string) string { return strings.ReplaceAll(ports, "-", ":") }
