package foreign

import "slices"

// rule is a parsed rule in a chain of another program. The rule itself may be one of ours.
type rule struct {
	handle  uint64
	comment string // in nft's or in iptables' form
	ours    bool   // the comment is ours, even if the rule was changed
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

// verdict is the effect of a rule on a packet that meets its conditions, or the effect of a chain on all packets of
// pods.
type verdict uint8

const (
	goesOn verdict = iota // continues with the next rule, or returns to the calling chain at the end of its chain
	accepts
	drops // drops or rejects the packet
	returns
	jumps
	goesTo
	dropsInTurn // the chain drops all packets at its end, and may drop some before
)

// base holds the rules of a base chain. Its function chain returns the rules of another chain, which the base chain
// calls.
type base struct {
	rules  []rule
	policy verdict
	chain  func(name string) []rule
	err    error // error of reading chains
}

// end returns the index of the first rule that ends the chain for all packets, and its effect. It begins at the index
// from, and skips our own rules. If there is no such rule, it returns the number of rules and the policy.
func (b *base) end(from int) (int, verdict) {
	for i := from; i < len(b.rules); i++ {
		if how := b.ends(&b.rules[i]); how != goesOn {
			return i, how
		}
	}
	return len(b.rules), b.policy
}

// ends returns the effect of a rule on all packets. If the rule does not end the chain for all of them, it returns
// goesOn.
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

// isForAll reports whether the rule certainly applies to all packets.
func (r *rule) isForAll() bool { return !r.conditional && !r.unmet && !r.opaque }

// chainEnds returns the effect of a called chain on all packets. It does not examine chains that this chain calls.
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

// does reports whether the rule certainly has one of these verdicts and no other effect. For a conditional rule with
// the verdict goesOn, it returns true only if the rule logs, since any other such rule may change packets.
func (r *rule) does(verdicts ...verdict) bool {
	return !r.opaque && slices.Contains(verdicts, r.verdict) && (r.verdict != goesOn || !r.conditional || r.logs)
}

// calls reports whether the rule calls a chain whose rules all have one of these verdicts.
func (b *base) calls(r *rule, verdicts ...verdict) bool {
	return r.does(jumps) && !slices.ContainsFunc(b.chain(r.target), func(called rule) bool {
		return !called.unmet && !called.does(verdicts...)
	})
}

// leadsTo reports whether a rule of the base chain, or of a chain that it calls directly, calls the given chain.
func (b *base) leadsTo(chain string) bool {
	calls := func(r rule) bool { return r.target == chain }
	return slices.ContainsFunc(b.rules, func(r rule) bool {
		return calls(r) || r.target != "" && slices.ContainsFunc(b.chain(r.target), calls)
	})
}

// place describes the place of our rules in FORWARD.
type place struct {
	// index is the index of the rule before which missing rules are inserted. The number of rules means the end, and
	// -1 means that no rules are needed.
	index int
	kept  []int // indexes of our rules in a right place, one for each comment
}

// decide returns the place for our rules, which is always after the call of the operator's chain admin. Its index is
// -1 if the chain needs no rules of ours. decide keeps our rules that are in a right place.
func (b *base) decide(admin string) place {
	decided := b.behindAdmin(admin)
	at, how := b.end(decided)
	ours := slices.IndexFunc(b.rules, func(r rule) bool { return r.ours })
	if ours > at && how != accepts {
		// A drop of everything that somebody put before our rules is intended. So our rules stay behind it, and
		// before the next drop.
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

// behindAdmin returns the index after the last rule that calls the operator's chain, since the operator's rules come
// before ours. If there is no such rule, it returns 0.
func (b *base) behindAdmin(admin string) int {
	for i := len(b.rules) - 1; i >= 0; i-- {
		if r := &b.rules[i]; r.comment == adminComment || admin != "" && r.target == admin {
			return i + 1
		}
	}
	return 0
}

// isAdmission reports whether the rule is ours and still accepts all packets of the bridge in its comment. It returns
// false if somebody added a condition to the rule or changed its verdict.
func (r *rule) isAdmission() bool { return r.ours && r.verdict == accepts && r.isForAll() }

// mayStop reports whether the rule could drop or change a packet that our rules accept. Our rules must stay behind
// it.
func (b *base) mayStop(r rule) bool {
	return !r.unmet && !r.ours && !r.does(goesOn, accepts) && !b.calls(&r, goesOn, accepts, returns)
}

// beforeLogs returns the index for a new rule that must come before the rule b.rules[at]. If logging rules stand
// right before b.rules[at], it returns the index of the first of them, else at. It does not examine b.rules[behind]
// and earlier rules.
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

// couldAccept reports whether one of the rules, or of the chains that they call, could accept packets of pods.
// visited records chains that were examined already.
func (b *base) couldAccept(rules []rule, visited map[string]bool) bool {
	for _, r := range rules {
		switch {
		case r.unmet || r.ours:
			continue
		case r.opaque || r.verdict == accepts:
			return true
		case r.target != "" && !visited[r.target]:
			visited[r.target] = true
			if b.couldAccept(b.chain(r.target), visited) {
				return true
			}
		}

		if r.isForAll() && r.does(drops, returns, goesTo) {
			return false
		}
	}

	return false
}
