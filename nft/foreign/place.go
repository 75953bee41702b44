package foreign

import (
	"cmp"
	"slices"
)

// What our rule accepts, no rule behind it sees. So it stands as late as it can: right
// before the point where every packet is dropped, and what its owner drops before that
// stays dropped. A drop of everything that is put ahead of a rule of ours is meant: then
// ours stays behind it.

// spot is a place in a chain: before the rule with that index, or at the chain's end.
type spot struct {
	chain string
	index int
}

// ending is how a chain ends for a packet that meets no condition but those that are
// sure.
type ending uint8

const (
	endsOpen    ending = iota // at its end, or by a return
	endsDecided               // by an accept, or by a program (queue)
	endsStopped               // by a drop or a reject
)

// course is how a packet ends, and where: the last spot is that in the last chain, and
// those before it are the jumps that lead there.
type course struct {
	end  ending
	path []spot
}

// placer finds where our rule belongs in one table. Conditions that a packet may or may
// not meet are taken for not met where that would end its way, and for met where a rule
// could stop it.
type placer struct {
	packet podPacket
	// load gives the rules of a chain, and references how many rules or maps call it.
	load       func(chain string) ([]rule, error)
	references func(chain string) (int, error)

	chains  map[string][]rule // those read so far
	courses map[string]course // the same of scan
	stops   map[string]bool   // and of chainMayStop
	err     error             // the first of load and references
}

func newPlacer(family uint8, mark uint32) *placer {
	return &placer{
		packet: podPacket{mark: mark, family: family},
		chains: map[string][]rule{}, courses: map[string]course{}, stops: map[string]bool{},
	}
}

func (p *placer) rules(chain string) []rule {
	rules, ok := p.chains[chain]
	if !ok && p.err == nil {
		rules, p.err = p.load(chain)
		p.chains[chain] = rules
	}
	return rules
}

// scan follows a packet through a chain as if there were no rule of ours. The kernel keeps
// jumps from going in circles; here one that does comes back.
func (p *placer) scan(chain string) course {
	if c, ok := p.courses[chain]; ok {
		return c
	}
	p.courses[chain] = course{}
	c := p.scanFrom(chain, 0)
	p.courses[chain] = c
	return c
}

// scanFrom is scan from a rule of the chain on.
func (p *placer) scanFrom(chain string, first int) course {
	rules := p.rules(chain)
	for i := first; i < len(rules); i++ {
		r := &rules[i]
		if r.ours || p.packet.meetsAll(r) != always {
			continue
		}
		here := []spot{{chain, i}}
		switch r.verdict {
		case accepts, queues:
			return course{endsDecided, here}
		case drops:
			return course{endsStopped, here}
		case returns:
			return course{endsOpen, here}
		case jumps, goesTo:
			if c := p.scan(r.target); c.end != endsOpen || r.verdict == goesTo {
				return course{c.end, append(here, c.path...)}
			}
		}
	}
	return course{endsOpen, []spot{{chain, len(rules)}}}
}

// mayStop says that a rule could do something to a packet that an accept before it would
// spare it: drop it, hand it to a program, or change it. What it merely counts, logs or
// accepts does not matter.
func (p *placer) mayStop(r *rule) bool {
	if r.ours || p.packet.meetsAll(r) == never {
		return false
	}
	switch r.verdict {
	case drops, queues, varies:
		return true
	case jumps, goesTo:
		if p.chainMayStop(r.target) {
			return true
		}
	}
	return r.opaque || r.alters
}

func (p *placer) chainMayStop(chain string) bool {
	if stops, ok := p.stops[chain]; ok {
		return stops
	}
	p.stops[chain] = false
	rules := p.rules(chain)
	stops := p.anyMayStop(rules)
	p.stops[chain] = stops
	return stops
}

func (p *placer) anyMayStop(rules []rule) bool {
	for i := range rules {
		if p.mayStop(&rules[i]) {
			return true
		}
	}
	return false
}

// decidesNothing says that a rule decides nothing: our rule goes before those that only log what
// is about to be dropped.
func (p *placer) decidesNothing(r *rule) bool {
	if r.ours || p.packet.meetsAll(r) == never {
		return true
	}
	if r.comment == adminComment {
		return false // an empty chain of the operator's may get rules later
	}
	switch r.verdict {
	case goesOn:
		return !r.opaque && !r.alters
	case jumps:
		rules := p.rules(r.target)
		// One level is enough: what firewalls log, they log in a chain of its own.
		return !slices.ContainsFunc(rules, func(r rule) bool {
			return !r.ours && (r.verdict != goesOn || r.opaque || r.alters)
		})
	}
	return false
}

// destination is where our rule belongs. Without path none is needed.
type destination struct {
	// path leads to the point where every packet is dropped.
	path []spot
	// at is where a new rule goes. It is not set where there is no such place (blocked).
	at spot
	// blocked is the chain that has that point, where nothing can be put before it: other
	// rules call it too, and before it the chain may stop packets.
	blocked string
	// stays says that nothing is to be moved: path leads to a rule of ours, and what is behind
	// it has no place for one.
	stays bool
}

// find looks for the first point where every packet is dropped, the policy included, and that
// no rule of ours is behind.
func (p *placer) find(policy uint32) destination {
	c := p.scan(iptablesForward)
	if c.end == endsDecided || c.end == endsOpen && policy == policyAccept {
		return destination{}
	}
	ours := p.findOurs()
	if ours == nil || slices.CompareFunc(ours, c.path, compareSpots) < 0 {
		return p.place(c.path)
	}
	// It is needed even if nothing else stops packets: without it, the next one would be put
	// before the drop that is ahead of it now.
	w := p.place(p.scanBehind(ours).path)
	if w.blocked != "" || w.leads(ours) {
		return destination{path: ours, at: ours[len(ours)-1], stays: true}
	}
	return w
}

// leads says that a place is before a jump which leads to a rule: what stops packets between
// the two would be passed over.
func (w *destination) leads(to []spot) bool {
	level := slices.IndexFunc(w.path, func(s spot) bool { return s.chain == w.at.chain })
	return level < len(to)-1 && slices.Equal(w.path[:level], to[:level]) && w.at.index <= to[level].index
}

// compareSpots orders spots of one chain; only where these are the same, what they jump to
// matters.
func compareSpots(a, b spot) int { return cmp.Compare(a.index, b.index) }

// findOurs gives the first rule of ours that packets get to, and the jumps that lead there, as
// if nothing stopped them before. Chains that not every packet is sent to are read
// only if there is none in the others.
func (p *placer) findOurs() []spot {
	for _, least := range []likelihood{always, maybe} {
		if path := p.findOursIn(iptablesForward, least, map[string]bool{}); path != nil {
			return path
		}
	}
	return nil
}

func (p *placer) findOursIn(chain string, least likelihood, seen map[string]bool) []spot {
	if seen[chain] {
		return nil
	}
	seen[chain] = true
	rules := p.rules(chain)
	for i := range rules {
		r := &rules[i]
		here := []spot{{chain, i}}
		switch {
		case r.ours:
			return here
		case r.verdict != jumps && r.verdict != goesTo || p.packet.meetsAll(r) < least:
		default:
			if path := p.findOursIn(r.target, least, seen); path != nil {
				return append(here, path...)
			}
		}
	}
	return nil
}

// scanBehind is scan of what is behind a rule of ours.
func (p *placer) scanBehind(ours []spot) course {
	for level := len(ours) - 1; ; level-- {
		c := p.scanFrom(ours[level].chain, ours[level].index+1)
		c.path = slices.Concat(ours[:level], c.path)
		for ; c.end == endsOpen && level > 0; level-- {
			if from := ours[level-1]; p.rules(from.chain)[from.index].verdict != goesTo {
				break
			}
		}
		if c.end != endsOpen || level == 0 {
			return c
		}
	}
}

// place finds where a rule can stand that is to be reached before the end of a path, and to
// spare packets as little as possible.
func (p *placer) place(path []spot) destination {
	w := destination{path: path}
	for i := len(w.path) - 1; ; i-- {
		s := w.path[i]
		rules := p.rules(s.chain)
		if i > 0 && !p.anyMayStop(rules[:s.index]) {
			continue // it can stand before the jump as well
		}
		if i > 0 && p.isShared(s.chain) {
			w.blocked = s.chain
			return w
		}
		w.at = s
		for j := s.index - 1; j >= 0 && p.decidesNothing(&rules[j]); j-- {
			if !rules[j].ours {
				w.at.index = j
			}
		}
		return w
	}
}

// isShared says that more than one rule leads to a chain: what is accepted there, is for
// all of them.
func (p *placer) isShared(chain string) bool {
	n, err := p.references(chain)
	if p.err == nil {
		p.err = err
	}
	return n != 1
}

// suits says that a rule, which is at an index of its chain, may stay there: every packet
// gets to it before the point, and nothing in between could stop one.
func (p *placer) suits(w *destination, chain string, index int) bool {
	if w.stays {
		return w.at == spot{chain, index}
	}
	level := slices.IndexFunc(w.path, func(s spot) bool { return s.chain == chain })
	if level < 0 || index >= w.path[level].index {
		return false
	}
	from := index + 1
	for _, s := range w.path[level:] {
		if rules := p.rules(s.chain); from < s.index && p.anyMayStop(rules[from:s.index]) {
			return false
		}
		from = 0
	}
	return level == 0 || !p.isShared(chain)
}
