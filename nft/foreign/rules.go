package foreign

import "slices"

// rule is a rule of another program's chain, or ours in it.
type rule struct {
	handle  uint64
	comment string // of nft's or of iptables' form
	ours    bool   // by its comment, even if it was changed
	verdict verdict
	target  string // the chain of a jump or a goto

	conditional bool // packets of pods may meet its conditions or not
	unmet       bool // no packet of pods meets them
	logs        bool
	sets        uint32 // the bits that it sets in the mark of a packet or of a connection
	destination []byte // the address, or the whole bytes of a prefix, that packets have to go to; nil: any
	opaque      bool   // a part of it is not known, and may end it in any way
	family      uint8  // of the packets that it concerns; 0 is both
	reversePath bool   // it looks whether the way to the source is by the link that the packet came in by
}

// verdict is what a rule does with a packet that meets its conditions, or how a chain ends for all that pods send.
type verdict uint8

const (
	goesOn verdict = iota // to the next rule, or to where the chain was called from
	accepts
	drops // or rejects
	returns
	jumps
	goesTo
	dropsInTurn // a chain drops some, then all: nothing can be accepted for all before it
)

// base is a base chain, and what it calls.
type base struct {
	rules  []rule
	policy verdict
	chain  func(name string) []rule
	err    error // of reading these
}

// end is the first rule from an index on that ends the chain for all packets, ours apart, or the policy.
func (b *base) end(from int) (int, verdict) {
	for i := from; i < len(b.rules); i++ {
		if how := b.ends(&b.rules[i]); how != goesOn {
			return i, how
		}
	}
	return len(b.rules), b.policy
}

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

func (r *rule) isForAll() bool { return !r.conditional && !r.unmet && !r.opaque }

// chainEnds says how a chain that is called ends. Chains that it calls are not looked into.
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

// does says that a rule does nothing but one of these verdicts. A rule with conditions that goes on may change
// packets, unless it logs.
func (r *rule) does(verdicts ...verdict) bool {
	return !r.opaque && slices.Contains(verdicts, r.verdict) && (r.verdict != goesOn || !r.conditional || r.logs)
}

// calls says that a rule calls a chain whose rules have these verdicts alone.
func (b *base) calls(r *rule, verdicts ...verdict) bool {
	return r.does(jumps) && !slices.ContainsFunc(b.chain(r.target), func(called rule) bool {
		return !called.unmet && !called.does(verdicts...)
	})
}

// leadsTo says that a rule, or one of a chain that it calls, calls a chain.
func (b *base) leadsTo(chain string) bool {
	calls := func(r rule) bool { return r.target == chain }
	return slices.ContainsFunc(b.rules, func(r rule) bool {
		return calls(r) || r.target != "" && slices.ContainsFunc(b.chain(r.target), calls)
	})
}

// place is where our rules have to be.
type place struct {
	index int   // of the rule before which missing ones go; that behind the last is the end. -1: none are needed
	kept  []int // the indexes of those that are where they should be, each with a comment of its own
}

// decide chooses the rules to keep, and the place for others, behind the operator's chain.
func (b *base) decide(admin string) place {
	decided := b.behindAdmin(admin)
	at, how := b.end(decided)
	ours := slices.IndexFunc(b.rules, func(r rule) bool { return r.ours })
	if ours > at && how != accepts {
		// A drop of everything that is put ahead of ours is meant: ours stays behind it, and before the next one.
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
		if b.rules[i].isAdmission() && !slices.ContainsFunc(b.rules[i+1:at], b.mayStop) && !slices.ContainsFunc(p.kept, again) {
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

// behindAdmin is the first place behind the rules that call the operator's chain, which decides before ours does; empty:
// there is none.
func (b *base) behindAdmin(admin string) int {
	for i := len(b.rules) - 1; i >= 0; i-- {
		if r := &b.rules[i]; r.comment == adminComment || admin != "" && r.target == admin {
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

// couldAccept says that rules, or chains that they call, could accept what pods send. seen has the chains looked at.
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
