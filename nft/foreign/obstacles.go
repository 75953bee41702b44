package foreign

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Obstacle is a firewall that stops what pods send, and that Ensure does nothing
// about: because it cannot, or because that is not its to decide.
type Obstacle struct {
	Kind ObstacleKind
	// Chain is what stops it, as errors name chains: "chain forward of table inet
	// filter".
	Chain string
	// Effect is what it does: "drops all that it does not know, by its policy".
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
	// FirewalldZone is a zone of firewalld's that pods are in whatever zone the bridge joins.
	FirewalldZone ObstacleKind = "firewalld-zone"
	// FirewalldPolicy is a policy of firewalld's, which applies to the zone trusted too.
	FirewalldPolicy ObstacleKind = "firewalld-policy"
	// IPTables is the table filter of iptables over nf_tables, where Ensure puts its rule: a
	// rule ahead of that, which is left to its owner, or a chain that no rule can go into.
	IPTables ObstacleKind = "iptables"
	// OtherChain is any other chain of nf_tables: a script's, or a distribution's.
	OtherChain ObstacleKind = "chain"
)

// String gives one line: what is in the way, what it does, and the command that
// helps.
func (o Obstacle) String() string {
	return fmt.Sprintf("%s %s what pods send; this helps: %s", o.Chain, o.Effect, o.Remedy)
}

// Path is how pods' packets go: what Obstacles goes by.
type Path struct {
	// Bridge is the link that they come in by.
	Bridge string
	// Prefixes are the pods' own. A rule that lets them pass is known better with them;
	// they may be empty.
	Prefixes []netip.Prefix
	// Others are links of other networks of pods. That firewalld lets packets leave by those, where
	// they are in one zone with the bridge, leads to no elsewhere.
	Others []string
	// Out is the link that the packets in question leave by; if it is empty, they leave by any, and
	// a rule for one that could let them pass counts as one that does.
	Out string
}

// Obstacles looks for what else would stop the packets that pods send to elsewhere,
// through whichever table. It reads, and changes nothing. The table filter of iptables over
// nf_tables is looked at as it is once Ensure has put its rule there: what stops pods then is a
// rule before that, or, for bridges that they all come by, one of the owner's will.
//
// What it finds stops such packets for certain, as far as rules can be understood:
// a rule that may let them pass counts as one that does if it names the bridge, the
// pods' addresses or a link that they may leave by, and of rules that drop only those without other
// conditions count. A chain of nf_tables that is called before our forward chain can
// do nothing with the mark; its remedy goes by the bridge's name.
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
	p := podPacket{mark: c.mark, bridge: path.Bridge, prefixes: path.Prefixes, out: path.Out}
	if index, known, err := c.nl.LinkIndex(path.Bridge); known && err == nil {
		p.index = uint32(index)
	}
	legacy, err := legacyObstacles(ctx, cfg, &p)
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
		if others, err = c.iptablesObstacles(ctx, &p); err != nil {
			return err
		}
		more, err := c.chainObstacles(ctx, p, path.Others)
		others = append(others, more...)
		return err
	})
	if err != nil {
		return nil, err
	}
	return append(legacy, others...), nil
}

// has says whether pods have addresses of a family, as far as is known.
func (p *podPacket) has(family uint8) bool {
	return len(p.prefixes) == 0 || slices.ContainsFunc(p.prefixes, func(prefix netip.Prefix) bool {
		return prefix.Addr().Is4() == (family == unix.NFPROTO_IPV4)
	})
}

// hookedChain is a base chain that sees what is forwarded.
type hookedChain struct {
	chain
	priority int32
	policy   uint32
}

// chainObstacles looks at all base chains of nf_tables but ours and those of Ensure.
func (c *Conn) chainObstacles(ctx context.Context, pods podPacket, bridges []string) ([]Obstacle, error) {
	chains, err := c.hookedChains(ctx)
	if err != nil {
		return nil, err
	}
	var list []Obstacle
	for _, ch := range chains {
		if asleep, err := c.isAsleep(ch.chain); err != nil {
			return nil, err
		} else if asleep {
			continue
		}
		p := &podPacket{}
		*p = pods
		if ch.table == firewalldTable {
			p.others = bridges // in other tables an operator may let pods reach those alone
		}
		t, err := c.readTable(ctx, ch.chain, p)
		if err != nil {
			return nil, err
		}
		effect, by := ch.stops(t, p)
		if effect != "" {
			list = append(list, ch.obstacle(effect, by, t, p))
		}
	}
	return list, nil
}

func (c *Conn) hookedChains(ctx context.Context) ([]hookedChain, error) {
	var list []hookedChain
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		err := c.dump("list chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
			ch, err := nftnl.DecodeChain(data)
			at := chain{family, ch.Table, ch.Name}
			ours := family == unix.NFPROTO_INET && ch.Table == c.table
			admissible := family != unix.NFPROTO_INET && ch.Table == iptablesTable && ch.Name == iptablesForward
			if isForwardHook(ch) && !ours && !admissible {
				list = append(list, hookedChain{at, ch.Priority, ch.Policy})
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

// content is what a table has that a packet may meet.
type content struct {
	chains map[string][]rule
	sets   map[lookup]likelihood
}

// readTable reads the rules of a chain's table, and the sets that they look into.
func (c *Conn) readTable(ctx context.Context, ch chain, p *podPacket) (*content, error) {
	chains, err := c.rulesIn(ctx, ch.family, ch.table)
	if err != nil {
		return nil, err
	}
	t := &content{chains, map[lookup]likelihood{}}
	return t, c.readSets(t, ch, p)
}

// readSets looks into the sets that rules look into.
func (c *Conn) readSets(t *content, ch chain, p *podPacket) error {
	for _, rules := range t.chains {
		for i := range rules {
			for _, cond := range rules[i].conditions {
				l := cond.lookup()
				if _, known := t.sets[l]; cond.on != onSet || known {
					continue
				}
				var err error
				switch l.key {
				case onSource:
					t.sets[l], err = c.setHolds(ch, l.set, p.prefixes)
				case onOut:
					t.sets[l], err = c.setLeads(ch, l.set, p)
				default:
					t.sets[l], err = c.setMentions(ch, l, p.bridge)
				}
				if err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// keyNames says that a link's name is somewhere in a key. An interval of names, for
// which nft writes "br*", starts with a key of just that.
func keyNames(key []byte, link string) bool {
	padded := make([]byte, ifnameLen)
	copy(padded, link)
	start := bytes.TrimRight(key, "\x00")
	return bytes.Contains(key, padded) || len(key) == ifnameLen && len(start) > 0 && strings.HasPrefix(link, string(start))
}

// stops says in words what the chain does to pods' packets, and nothing if they
// may pass; and before which rule an accept helps, nil for the chain's end.
func (ch *hookedChain) stops(t *content, p *podPacket) (effect string, by *rule) {
	for _, f := range families() {
		if ch.family != unix.NFPROTO_INET && ch.family != f.proto || !p.has(f.proto) {
			continue
		}
		switch fate := ch.fate(t, p, f.proto); {
		case fate.how == dropped:
			return effectOfRule, fate.by
		case fate.how == comesBack && ch.policy != policyAccept:
			return effectOfPolicy, returnIn(t.chains[ch.name])
		}
	}
	return "", nil
}

// fate is what becomes of pods' packets of a family in the chain.
func (ch *hookedChain) fate(t *content, p *podPacket, family uint8) fate {
	pods := *p
	pods.sets, pods.family = t.sets, family
	if ch.beforeOurs() {
		pods.mark = 0
	}
	return newWalk(&pods, t.chains).chain(ch.name)
}

// returnIn gives the rule that has all packets go to a policy, if there is one.
func returnIn(rules []rule) *rule {
	for i := range rules {
		if len(rules[i].conditions) == 0 && (rules[i].verdict == returns || rules[i].verdict == goesTo) {
			return &rules[i]
		}
	}
	return nil
}

// indexOf is where a rule is among those of its chain.
func indexOf(rules []rule, r *rule) int {
	return slices.IndexFunc(rules, func(other rule) bool { return other.handle == r.handle })
}

const (
	effectOfRule   = "drops or rejects, by a rule for all that it does not know,"
	effectOfPolicy = "drops, by its policy,"
)

// beforeOurs says that our forward chain has not marked anything by then. Of chains
// with the same priority, the kernel calls the one first that it was told of last.
func (ch *hookedChain) beforeOurs() bool { return ch.priority <= nftnl.PriorityForward }

// obstacle names the chain, and an accept that helps: right before the rule that stops pods,
// or at the chain's end, so that it overrides nothing else.
func (ch *hookedChain) obstacle(effect string, by *rule, t *content, p *podPacket) Obstacle {
	o := Obstacle{Kind: OtherChain, Chain: ch.chain.String(), Effect: effect}
	bridge := shellWord(p.bridge)
	insert := fmt.Sprintf("nft add rule %s %s %s", nftnl.FamilyName(ch.family), shellWord(ch.table), shellWord(ch.name))
	if by != nil {
		insert = fmt.Sprintf("nft insert rule %s %s %s handle %d", nftnl.FamilyName(ch.family), shellWord(ch.table), shellWord(by.chain), by.handle)
	}
	switch {
	case ch.table == firewalldTable:
		ch.byFirewalld(&o, by, t, p)
	case ch.table == firewalldReload:
		o.Kind, o.Effect, o.Remedy = Firewalld, "drops, while firewalld loads its rules,", reloadFirewalld
	case !ch.beforeOurs():
		o.Remedy = fmt.Sprintf("%s 'meta mark & 0x%x == 0x%x counter accept'", insert, p.mark, p.mark)
	case ch.family != unix.NFPROTO_INET && ch.name == iptablesForward:
		// iptables' own, which could not print what nft would put there.
		insert = iptablesProgram(ch.family) + " -t " + shellWord(ch.table) + " " + iptablesPlace(t.chains, by)
		o.Remedy = fmt.Sprintf("%s -i %s -j ACCEPT && %s -o %s -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT", insert, bridge, insert, bridge)
	default:
		// A published port's first packet is no reply.
		o.Remedy = fmt.Sprintf("%s iifname %s accept && %s oifname %s ct state established,related accept && %s oifname %s ct status dnat accept",
			insert, bridge, insert, bridge, insert, bridge)
	}
	return o
}

// iptablesPlace is where iptables puts a rule that goes before another one, or to the end of
// FORWARD.
func iptablesPlace(chains map[string][]rule, before *rule) string {
	if before == nil {
		return "-A " + iptablesForward
	}
	return fmt.Sprintf("-I %s %d", shellWord(before.chain), indexOf(chains[before.chain], before)+1)
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
