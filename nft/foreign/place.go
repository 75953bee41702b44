package foreign

import "slices"

// What our rule accepts, no rule behind it sees. So it stands as late as it can: right before the first point of
// FORWARD where every packet is dropped. A drop of everything that is put ahead of it is meant: it stays behind that.

// place is what is to become of our rule.
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
		// Without ours, the next one would be put before the drop that is ahead of it now.
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
func (r *rule) isAdmission() bool {
	return r.ours && r.verdict == accepts && r.onMark && r.isForAll()
}

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
