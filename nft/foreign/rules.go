package foreign

import "slices"

// rule is a rule of another program's chain, or of ours in such a chain.
type rule struct {
	chain   string
	handle  uint64
	comment string // of nft's or of iptables' form
	ours    bool   // by its comment, whatever it does by now
	verdict verdict
	target  string // the chain of a jump or a goto

	conditional bool // packets of pods may meet its conditions or not
	unmet       bool // no packet of pods meets them
	onMark      bool // one of its conditions is our mark
	logs        bool
	opaque      bool // a part of it is not known, and may end it in any way
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
	case accepts, queues:
		return passes
	case drops:
		return stops
	case returns:
		return b.policy
	case jumps, goesTo:
		return b.chainEnds(r.target, 1)
	}
	return comesBack
}

func (r *rule) isForAll() bool { return !r.conditional && !r.unmet && !r.opaque }

// chainEnds says how a chain that is called ends. Where it drops some of what comes to it before it drops the rest,
// nothing can be accepted for all. No chain is called deeper than the kernel has it.
func (b *base) chainEnds(name string, depth int) ending {
	const deepest = 16 // NFT_JUMP_STACK_SIZE
	how := stops
	for _, r := range b.chain(name) {
		switch {
		case r.unmet || !r.opaque && r.verdict == goesOn || r.conditional && r.does(accepts):
		case !r.isForAll() || depth > deepest:
			how = stopsAfterDrops
		case r.verdict == drops:
			return how
		case r.verdict == accepts:
			return passes
		case r.verdict == returns:
			return comesBack
		default:
			switch b.chainEnds(r.target, depth+1) {
			case passes:
				return passes
			case stops, stopsAfterDrops:
				return stopsAfterDrops
			}
			if !b.calls(&r, goesOn, accepts, returns) {
				how = stopsAfterDrops
			}
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

// couldAccept says that what pods send could be accepted by a rule, or by a chain that it calls. The kernel keeps
// jumps from going in circles; seen has the chains that were looked at.
func (b *base) couldAccept(r *rule, seen map[string]bool) bool {
	switch {
	case r.unmet || r.ours:
		return false
	case r.opaque || r.does(accepts, queues, varies):
		return true
	case r.target == "" || seen[r.target]:
		return false
	}
	seen[r.target] = true
	for _, r := range b.chain(r.target) {
		if b.couldAccept(&r, seen) {
			return true
		}
		if b.ends(&r) != comesBack || r.isForAll() && r.verdict == goesTo {
			break
		}
	}
	return false
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
