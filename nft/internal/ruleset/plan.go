package ruleset

// Changes holds the changes that are needed to turn the state in the kernel into the intended ruleset.
type Changes struct {
	tables    []uint8 // families whose tables must be created, or are dormant
	Sets      []Set
	Unmarked  []Set // sets that exist without our sentinel
	chains    []*Chain
	oldSets   []Place // sets to delete; most are created again
	oldChains []Place
	// add and del are the changes of the sets of bridges. comment is the comment of the added elements.
	add, del []Element
	comment  string
}

// IsEmpty reports whether no changes are needed.
func (p *Changes) IsEmpty() bool {
	return len(p.tables)+len(p.Sets)+len(p.Unmarked)+len(p.chains)+len(p.oldChains)+len(p.add)+len(p.del) == 0
}

// Plan computes the changes that turn the present state have into the intended ruleset want. It never changes an
// existing chain, but replaces the whole chain. So a chain's comment, which the kernel cannot change later, always
// describes its rules.
func Plan(want *Ruleset, have *State) *Changes {
	p := &Changes{Unmarked: have.unmarkedSets(want)}
	for _, family := range want.tables {
		if t, ok := have.Tables[family]; !ok || t.IsDormant() {
			p.tables = append(p.tables, family)
		}
	}

	for _, s := range want.Sets() {
		got, ok := have.sets[s.Place]
		if ok && s.matches(got) {
			continue
		}
		p.Sets = append(p.Sets, s)
		if ok {
			p.oldSets = append(p.oldSets, s.Place)
		}
	}

	for i := range want.Chains {
		ch := &want.Chains[i]
		got, ok := have.Chains[ch.Place]

		// A set cannot be replaced while rules use it, so replace the chains too.
		if ok && ch.matches(got) && have.hasRules(ch) && len(p.oldSets) == 0 {
			continue
		}

		p.chains = append(p.chains, ch)
		if ok {
			p.oldChains = append(p.oldChains, ch.Place)
		}
	}

	for _, at := range want.gone {
		if have.hasChain(at) {
			p.oldChains = append(p.oldChains, at)
		}
	}

	p.comment = want.BridgeComment
	p.add, p.del = have.bridgeChanges(want)
	return p
}

// Transaction returns a transaction that makes the changes. have is the state that Plan was called with. sentinels
// selects whether new sets get a sentinel.
func (p *Changes) Transaction(have *State, sentinels bool) *Transaction {
	t := have.table.begin(&have.Generation)
	for _, family := range p.tables {
		t.newTable(family)
	}

	for _, at := range p.oldChains {
		t.delChain(at)
	}

	for _, at := range p.oldSets {
		t.delSet(at)
	}

	for i, s := range p.Sets {
		t.newSet(s, uint32(i+1))
		if sentinels {
			t.NewElement(s.Sentinel(), SentinelComment+unsaved)
		}
	}

	for _, s := range p.Unmarked {
		if _, loaded := have.sentinels[s.Place]; loaded {
			t.DelElement(s.Sentinel())
		}
		t.NewElement(s.Sentinel(), SentinelComment+unsaved)
	}

	for _, ch := range p.chains {
		list := ch.Rules()
		t.newChain(ch, len(list))
		for _, r := range list {
			t.newRule(ch.Place, r)
		}
	}

	for _, el := range p.del {
		t.DelElement(el)
	}

	for _, el := range p.add {
		t.NewElement(el, p.comment)
	}

	return t
}
