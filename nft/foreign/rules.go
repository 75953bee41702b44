package foreign

import (
	"net/netip"
	"slices"
)

// What follows is what has to be understood of rules that are not ours, in tables
// of nf_tables or of legacy iptables: which of them a pod's packet is sure to meet,
// and what becomes of it there.

// rule is a rule of somebody else's table, or of ours in such a table.
type rule struct {
	chain      string
	handle     uint64 // legacy: its offset in the table
	ours       bool   // made by Ensure, whatever it does by now
	comment    string // of nft's or of iptables' form
	conditions []condition
	verdict    verdict
	target     string // the chain of a jump or a goto
	// opaque says that it has a part which is not known, and may end it in any way, and
	// alters, that it does something to the packet, or keeps something of it.
	opaque, alters bool
}

// verdict is what a rule does with a packet that meets its conditions.
type verdict uint8

const (
	goesOn verdict = iota // to the next rule: the rule counts or logs, say
	accepts
	queues // hands to a program, which may accept
	drops  // or rejects
	returns
	jumps
	goesTo
	varies // by what the packet has, in a map
)

// condition is one of those that a packet has to meet for a rule to apply.
type condition struct {
	on      property
	negated bool

	mark, mask uint32       // onMark: what is left of the mark by the mask
	name       string       // onIn, onOut: the link's; onSet: the set's
	wildcard   bool         // onIn, onOut: of any link whose name starts so
	index      uint32       // onIndex
	prefix     netip.Prefix // onSource, onDestination
	family     uint8        // onFamily: unix.NFPROTO_*
	key        property     // onSet: what is looked up, or the first part of it
}

// property is what of a packet a condition is about.
type property uint8

const (
	onOther       property = iota // anything else
	onMark                        // its mark
	onIn                          // the name of the link that it came in by
	onIndex                       // and that link's index
	onOut                         // the name of the link that it will leave by
	onSource                      // its source address
	onDestination                 // and its destination's, of which nothing is known
	onFamily                      // whether it is IPv4 or IPv6
	onSet                         // something that is looked up in a set
)

// likelihood is how sure it is that a packet meets a condition.
type likelihood uint8

const (
	never likelihood = iota
	maybe
	// likely is taken for a yes where it lets the packet pass, and for a no where it
	// stops it: so that there are no false alarms.
	likely
	always
)

// podPacket is what is known of the packets in question: new connections of pods to
// elsewhere, through the bridge.
type podPacket struct {
	mark   uint32
	family uint8 // unix.NFPROTO_*; 0 is not known
	bridge string
	index  uint32 // the bridge's; 0 is not known
	// prefixes are the pods' addresses; an empty list is not known.
	prefixes []netip.Prefix
	// out and others are Path's.
	out    string
	others []string
	// sets says how likely it is that what is looked up is in them.
	sets map[lookup]likelihood
}

// meets says whether the packet meets a condition.
func (p *podPacket) meets(c *condition) likelihood {
	got := p.meetsPlain(c)
	if !c.negated {
		return got
	}
	switch got {
	case never:
		return always
	case maybe:
		return maybe
	default:
		return never
	}
}

func (p *podPacket) meetsPlain(c *condition) likelihood {
	switch c.on {
	case onMark:
		return sure(p.mark&c.mask == c.mark)
	case onIn:
		if p.bridge == "" {
			return maybe
		}
		return sure(c.names(p.bridge))
	case onIndex:
		if p.index == 0 {
			return maybe
		}
		return sure(p.index == c.index)
	case onOut:
		return p.leavesBy(c)
	case onFamily:
		if p.family == 0 {
			return maybe
		}
		return sure(p.family == c.family)
	case onSource:
		return p.comesFrom(c.prefix)
	case onSet:
		return max(maybe, p.sets[c.lookup()])
	}
	return maybe
}

// lookup is what a condition looks up in a set.
type lookup struct {
	set string
	key property
}

func (c *condition) lookup() lookup { return lookup{c.name, c.key} }

func sure(yes bool) likelihood {
	if yes {
		return always
	}
	return never
}

// names says that a condition is about a link.
func (c *condition) names(link string) bool {
	if c.wildcard {
		return len(link) >= len(c.name) && link[:len(c.name)] == c.name
	}
	return link == c.name
}

// leavesBy: a rule for all that leaves by some other link is taken to mean one that leads
// to elsewhere.
func (p *podPacket) leavesBy(c *condition) likelihood {
	switch {
	case p.out != "":
		return sure(c.names(p.out))
	case p.bridge == "":
		return maybe
	case c.names(p.bridge), !c.wildcard && slices.Contains(p.others, c.name):
		return never
	case c.negated:
		return maybe
	}
	return likely
}

// comesFrom: a prefix that holds some of the pods is meant for pods.
func (p *podPacket) comesFrom(prefix netip.Prefix) likelihood {
	if len(p.prefixes) == 0 {
		return maybe
	}
	for _, pods := range p.prefixes {
		switch {
		case !prefix.Overlaps(pods):
		case prefix.Bits() <= pods.Bits():
			return always
		default:
			return likely
		}
	}
	return never
}

// meetsAll says whether the packet meets all conditions of a rule. If the bridge is
// named, or the pods' addresses, others that are not known do not count: a rule for these lets at least some of
// their packets pass.
func (p *podPacket) meetsAll(r *rule) likelihood {
	got, _ := p.meetsAllOf(r, false)
	return got
}

// meetsAllOf is meetsAll for a rule in a chain to which only packets of pods come, if named is true. forPods says
// whether only these come to what the rule calls.
func (p *podPacket) meetsAllOf(r *rule, named bool) (_ likelihood, forPods bool) {
	got := always
	for i := range r.conditions {
		c := &r.conditions[i]
		m := p.meets(c)
		got = min(got, m)
		ofPods := c.on == onIn || c.on == onIndex || c.on == onSet && c.key != onOut || c.on == onSource && c.prefix.Bits() > 0
		named = named || ofPods && !c.negated && m >= likely
	}
	if named && got == maybe {
		return likely, true
	}
	return got, named
}

// fate is what becomes of a packet in a chain.
type fate struct {
	how fateKind
	by  *rule // which rule decided
	// via is the rule of the chain itself that led there: by, or a jump.
	via *rule
}

type fateKind uint8

const (
	comesBack fateKind = iota // to where it was called from, or to the policy
	accepted
	dropped
)

// walk follows a packet through the chains of a table. Conditions that the packet
// may or may not meet are taken for not met.
type walk struct {
	packet *podPacket
	chains map[string][]rule
	seen   map[called]fate // of the chains that were walked, or are being walked
}

// called is a chain, and whether only packets of pods come to it by the rule that called it.
type called struct {
	chain   string
	forPods bool
}

func newWalk(p *podPacket, chains map[string][]rule) *walk {
	return &walk{packet: p, chains: chains, seen: map[called]fate{}}
}

// chain says what becomes of the packet in a chain. The kernel keeps jumps from
// going in circles; here one that does comes back.
func (w *walk) chain(name string) fate { return w.call(called{chain: name}) }

func (w *walk) call(c called) fate {
	if f, ok := w.seen[c]; ok {
		return f
	}
	w.seen[c] = fate{}
	f := w.rules(w.chains[c.chain], c.forPods)
	w.seen[c] = f
	return f
}

func (w *walk) rules(rules []rule, forPods bool) fate {
	for i := range rules {
		f, end := w.rule(&rules[i], forPods)
		if f.how != comesBack {
			f.via = &rules[i]
			return f
		}
		if end {
			break
		}
	}
	return fate{}
}

// rule says what one rule makes of the packet, and whether the chain ends with it. A chain that is called for
// what pods send only is about pods, but not one that is gone to: firewalld assigns links to zones by gotos, and
// no zone is for pods alone.
func (w *walk) rule(r *rule, forPods bool) (f fate, end bool) {
	m, forPods := w.packet.meetsAllOf(r, forPods)
	if m < likely {
		return fate{}, false
	}
	switch r.verdict {
	case accepts, queues, varies:
		return fate{how: accepted, by: r}, true
	case drops:
		if m == always {
			return fate{how: dropped, by: r}, true
		}
	case returns:
		return fate{}, m == always
	case jumps, goesTo:
		f = w.call(called{r.target, forPods && r.verdict == jumps})
		if m == likely && f.how == dropped {
			return fate{}, false
		}
		return f, m == always && r.verdict == goesTo
	}
	return fate{}, false
}
