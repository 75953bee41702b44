package foreign

import "slices"

// rule is a rule in another program's chain, possibly one of ours.
type rule struct {
	handle  uint64
	comment string // in nft's or in iptables' form
	ours    bool   // ours by its comment, even if somebody changed the rule
	verdict verdict
	target  string // the target chain of a jump or goto

	conditional bool // packets of pods may or may not meet its conditions
	unmet       bool // no packet of pods meets its conditions
	logs        bool
	sets        uint32 // bits that it sets in the mark of a packet or a connection
	destination []byte // the address, or the whole bytes of a prefix, that it requires as destination; nil for any
	opaque      bool   // a part of it is unknown, and may end the rule in any way
	family      uint8  // family of the packets that it concerns; 0 for both
	reversePath bool   // it compares the incoming link with the route back to the source
}

// verdict is the effect of a rule on a packet that meets its conditions, or of a chain on all packets of pods.
type verdict uint8

const (
	goesOn verdict = iota // continues with the next rule, or returns to the calling chain at the end of its chain
	accepts
	drops // drops or rejects
	returns
	jumps
	goesTo
	dropsInTurn // the chain drops some packets, and then all; no accept can precede all of its drops
)

// base is a base chain together with the chains that it calls.
type base struct {
	rules  []rule
	policy verdict
	chain  func(name string) []rule
	err    error // error of reading chains
}

// end returns the first rule from an index on that ends the chain for all packets, and its effect. It skips our own
// rules. Without such a rule it returns the number of rules and the policy.
func (b *base) end(from int) (int, verdict) {
	for i := from; i < len(b.rules); i++ {
		if how := b.ends(&b.rules[i]); how != goesOn {
			return i, how
		}
	}
	return len(b.rules), b.policy
}

// ends returns the effect of a rule on all packets, or goesOn if it does not end the chain for all.
func (b *base) ends(r *rule) verdict {
	switch {
	case r.ours || !r.isForAll():
		return goesOn
	case r.does(jumps, goesTo):
		return chainEnds(b.chain(r.target))
	case r.verdict == returns:
		return b.policy
	}
	return r.verdict
}

// isForAll reports whether the rule applies to all packets.
func (r *rule) isForAll() bool { return !r.conditional && !r.unmet && !r.opaque }

// chainEnds returns the effect of a called chain on all packets. It does not look into the chains that this one calls
// in turn.
func chainEnds(rules []rule) verdict {
	how := drops
	for _, r := range rules {
		switch {
		case r.unmet || !r.opaque && r.verdict == goesOn || r.conditional && r.does(accepts):
		case !r.isForAll() || r.does(jumps, goesTo):
			how = dropsInTurn
		case r.verdict == drops:
			return how
		case r.verdict == accepts:
			return accepts
		default:
			return goesOn
		}
	}

	return goesOn
}

// does reports whether the rule certainly has one of these verdicts and no other effect. A rule with conditions that
// goes on may change packets, unless it logs.
func (r *rule) does(verdicts ...verdict) bool {
	return !r.opaque && slices.Contains(verdicts, r.verdict) && (r.verdict != goesOn || !r.conditional || r.logs)
}

// calls reports whether the rule calls a chain whose rules have only these verdicts.
func (b *base) calls(r *rule, verdicts ...verdict) bool {
	return r.does(jumps) && !slices.ContainsFunc(b.chain(r.target), func(called rule) bool {
		return !called.unmet && !called.does(verdicts...)
	})
}

// leadsTo reports whether a rule, or a rule of a called chain, calls the given chain.
func (b *base) leadsTo(chain string) bool {
	calls := func(r rule) bool { return r.target == chain }
	return slices.ContainsFunc(b.rules, func(r rule) bool {
		return calls(r) || r.target != "" && slices.ContainsFunc(b.chain(r.target), calls)
	})
}

// place is the place of our rules.
type place struct {
	// missing rules go before the rule with this index; the number of rules means the end, and -1 that none are
	// needed
	index int
	kept  []int // indexes of our rules that are in a right place, each with a different comment
}

// decide returns the rules of ours to keep and the place for missing ones, after the call of the operator's chain.
func (b *base) decide(admin string) place {
	decided := b.behindAdmin(admin)
	at, how := b.end(decided)
	ours := slices.IndexFunc(b.rules, func(r rule) bool { return r.ours })
	if ours > at && how != accepts {
		// If somebody put a drop of everything before our rules, it is intended. Ours stay behind it, and before the
		// next drop.
		at, how = b.end(ours + 1)
		if how != drops {
			for at = ours; at < len(b.rules) && b.rules[at].ours; at++ {
			}
			how = drops
		}
	}

	if how != drops {
		return place{index: -1}
	}

	var p place
	for i := range b.rules[:at] {
		again := func(kept int) bool { return b.rules[kept].comment == b.rules[i].comment }
		if b.rules[i].isAdmission() && !slices.ContainsFunc(b.rules[i+1:at], b.mayStop) &&
			!slices.ContainsFunc(p.kept, again) {
			p.kept = append(p.kept, i)
		}
	}

	if len(p.kept) > 0 {
		p.index = p.kept[0]
	} else {
		p.index = b.beforeLogs(max(ours, decided-1), at)
	}

	return p
}

// behindAdmin returns the index after the rules that call the operator's chain, whose rules take precedence over
// ours. Without such rules it returns 0.
func (b *base) behindAdmin(admin string) int {
	for i := len(b.rules) - 1; i >= 0; i-- {
		if r := &b.rules[i]; r.comment == adminComment || admin != "" && r.target == admin {
			return i + 1
		}
	}
	return 0
}

// isAdmission reports whether the rule is one of ours and unchanged in its effect.
func (r *rule) isAdmission() bool { return r.ours && r.verdict == accepts && r.isForAll() }

// mayStop reports whether a rule could stop or change a packet that ours would accept. Ours must stay behind such a
// rule.
func (b *base) mayStop(r rule) bool {
	return !r.unmet && !r.ours && !r.does(goesOn, accepts) && !b.calls(&r, goesOn, accepts, returns)
}

// beforeLogs returns the place before the rule at, and before the rules right ahead of it that only log, down to the
// rule behind.
func (b *base) beforeLogs(behind, at int) int {
	for i := at - 1; i > behind; i-- {
		r := &b.rules[i]
		if !r.unmet && !r.does(goesOn) && !b.calls(r, goesOn) {
			break
		}
		if r.logs || r.does(jumps) && slices.ContainsFunc(b.chain(r.target), func(r rule) bool { return r.logs }) {
			at = i
		}
	}

	return at
}

// couldAccept reports whether these rules, or chains that they call, could accept packets of pods. seen collects the
// chains that were examined.
func (b *base) couldAccept(rules []rule, seen map[string]bool) bool {
	for _, r := range rules {
		switch {
		case r.unmet || r.ours:
			continue
		case r.opaque || r.verdict == accepts:
			return true
		case r.target != "" && !seen[r.target]:
			seen[r.target] = true
			if b.couldAccept(b.chain(r.target), seen) {
				return true
			}
		}

		if r.isForAll() && r.does(drops, returns, goesTo) {
			return false
		}
	}

	return false
}
