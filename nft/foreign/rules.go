package foreign

import "slices"

// rule is a rule of another program's chain, or of ours in such a chain.
type rule struct {
	handle  uint64
	comment string // of nft's or of iptables' form
	ours    bool   // by its comment, whatever it does by now
	verdict verdict
	target  string // the chain of a jump or a goto

	conditional bool // packets of pods may meet its conditions or not
	unmet       bool // no packet of pods meets them
	logs        bool
	opaque      bool // a part of it is not known, and may end it in any way
}

// verdict is what a rule does with a packet that meets its conditions.
type verdict uint8

const (
	goesOn verdict = iota // to the next rule: the rule counts or logs, say
	accepts
	drops // or rejects
	returns
	jumps
	goesTo
)

// ending is how a chain ends for what pods send, as far as rules without a condition say.
type ending uint8

const (
	comesBack       ending = iota // to where it was called from, or to the policy
	passes                        // is accepted
	stops                         // is dropped or rejected
	stopsAfterDrops               // the same, and some of it by rules before
)

// base is a base chain, and what it calls.
type base struct {
	rules  []rule
	policy ending
	chain  func(name string) []rule
	admin  string // the operator's chain, which decides before ours does; empty: there is none
	err    error  // of reading a chain that it calls
}

// end is the first rule from an index on that ends the chain for all packets, as if there were no rule of ours, or
// the policy.
func (b *base) end(from int) (int, ending) {
	for i := from; i < len(b.rules); i++ {
		if how := b.ends(&b.rules[i]); how != comesBack {
			return i, how
		}
	}
	return len(b.rules), b.policy
}

func (b *base) ends(r *rule) ending {
	if r.ours || !r.isForAll() {
		return comesBack
	}
	switch r.verdict {
	case accepts:
		return passes
	case drops:
		return stops
	case returns:
		return b.policy
	case jumps, goesTo:
		return chainEnds(b.chain(r.target))
	}
	return comesBack
}

func (r *rule) isForAll() bool { return !r.conditional && !r.unmet && !r.opaque }

// chainEnds says how a chain that is called ends. Where it may drop some of what comes to it before it drops the rest,
// nothing can be accepted for all. Chains that it calls are not looked into.
func chainEnds(rules []rule) ending {
	how := stops
	for _, r := range rules {
		switch {
		case r.unmet || !r.opaque && r.verdict == goesOn || r.conditional && r.does(accepts):
		case !r.isForAll() || r.does(jumps, goesTo):
			how = stopsAfterDrops
		case r.verdict == drops:
			return how
		case r.verdict == accepts:
			return passes
		default:
			return comesBack
		}
	}
	return comesBack
}

// does says that all that a rule can do is one of these verdicts. One that goes on by conditions may change packets
// by what takes part in these, unless it logs.
func (r *rule) does(verdicts ...verdict) bool {
	return !r.opaque && slices.Contains(verdicts, r.verdict) && (r.verdict != goesOn || !r.conditional || r.logs)
}

// calls says that a rule calls a chain whose rules have these verdicts alone.
func (b *base) calls(r *rule, verdicts ...verdict) bool {
	return r.does(jumps) && !slices.ContainsFunc(b.chain(r.target), func(called rule) bool {
		return !called.unmet && !called.does(verdicts...)
	})
}

// place is what is to become of our rule. What it accepts, no rule behind it sees: so it stands as late as it can,
// right before the first point of FORWARD where every packet is dropped.
type place struct {
	needed bool
	keep   int // the index of a rule that is where ours should be; -1: there is none
	at     int // the index of the rule before which a new one goes; that behind the last is the end
}

// decide chooses the rule to keep, or the place for one.
func (b *base) decide() place {
	decided := b.behindAdmin()
	at, how := b.end(decided)
	ours := slices.IndexFunc(b.rules, func(r rule) bool { return r.ours })
	if ours > at && how != passes {
		// A drop of everything that is put ahead of ours is meant: ours stays behind it, and before the next one.
		at, how = b.end(ours + 1)
		if how != stops {
			at, how = ours+1, stops
		}
	}
	if how != stops {
		return place{keep: -1}
	}
	for i := range b.rules[:at] {
		if b.rules[i].isAdmission() && !slices.ContainsFunc(b.rules[i+1:at], b.mayStop) {
			return place{true, i, at}
		}
	}
	return place{true, -1, b.beforeLogs(max(ours, decided-1), at)}
}

// behindAdmin is the first place behind the rules that call the operator's chain: what is dropped there stays dropped,
// also if that is all.
func (b *base) behindAdmin() int {
	for i := len(b.rules) - 1; i >= 0; i-- {
		if r := &b.rules[i]; r.comment == adminComment || b.admin != "" && r.target == b.admin {
			return i + 1
		}
	}
	return 0
}

// isAdmission says that it is ours and does what it should.
func (r *rule) isAdmission() bool { return r.ours && r.verdict == accepts && r.isForAll() }

// mayStop says that a rule could stop or change a packet that ours would accept: ours stays behind it.
func (b *base) mayStop(r rule) bool {
	return !r.unmet && !r.ours && !r.does(goesOn, accepts) && !b.calls(&r, goesOn, accepts, returns)
}

// beforeLogs gives the place before a rule, and before those that log what it is about to drop, as long as that is
// behind another rule.
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

// stopsPods says whether what pods send ends at the rule with an index, or at the policy; unsure is that a rule
// before could accept it.
func (b *base) stopsPods() (at int, stopped, unsure bool) {
	at, how := b.end(0)
	if how == passes {
		return at, false, false
	}
	seen := map[string]bool{}
	return at, true, slices.ContainsFunc(b.rules[:min(at+1, len(b.rules))], func(r rule) bool { return b.couldAccept(&r, seen) })
}

// couldAccept says that what pods send could be accepted by a rule, or by a chain that it calls. seen has the chains
// that were looked at.
func (b *base) couldAccept(r *rule, seen map[string]bool) bool {
	switch {
	case r.unmet || r.ours:
		return false
	case r.opaque || r.does(accepts):
		return true
	case r.target == "" || seen[r.target]:
		return false
	}
	seen[r.target] = true
	for _, r := range b.chain(r.target) {
		if b.couldAccept(&r, seen) {
			return true
		}
		if r.isForAll() && r.does(drops, returns, goesTo) {
			break
		}
	}
	return false
}
