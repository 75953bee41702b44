package nft

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// state is what the kernel has of a ruleset: of the chains and sets only those that
// the ruleset names, and not the elements.
type state struct {
	table      tableName
	generation uint32
	tables     map[uint8]nftnl.Table // by family; those that are there
	chains     map[place]nftnl.Chain
	sets       map[place]setState
	rules      map[place][]string // the comments of the rules of each chain, in their order
	sentinels  map[place]bool     // the sets that have theirs
	// bridges are the elements of the sets of bridges: those that the ruleset names,
	// or, from read, all.
	bridges []elementState
}

func newState(rs *ruleset) *state {
	return &state{
		table:     rs.table,
		tables:    make(map[uint8]nftnl.Table, len(rs.tables)),
		chains:    make(map[place]nftnl.Chain, len(rs.chains)),
		sentinels: map[place]bool{},
	}
}

// outline looks up the tables and the chains that a ruleset names, by single gets.
func (c *Conn) outline(rs *ruleset) (*state, error) {
	st := newState(rs)
	var b nl.Batch
	st.getOutline(&b, rs)
	st.getBridge(&b, rs)
	st.getSentinels(&b, rs.sets())
	return st, nftnl.Look(c.nl, &b, unix.EINVAL) // EINVAL: a set with other keys
}

func (st *state) getOutline(b *nl.Batch, rs *ruleset) {
	for _, family := range rs.tables {
		st.table.getTable(b, family, func(data []byte) error {
			t, err := nftnl.DecodeTable(data)
			st.tables[family] = t
			return err
		})
	}
	getChains := func(p place) {
		st.table.getChain(b, p, func(data []byte) error {
			ch, err := nftnl.DecodeChain(data)
			st.chains[p] = ch
			return err
		})
	}
	for i := range rs.chains {
		getChains(rs.chains[i].place)
	}
	for _, p := range rs.gone {
		getChains(p)
	}
}

// getBridge looks up the network's elements of the sets of bridges.
func (st *state) getBridge(b *nl.Batch, rs *ruleset) {
	for _, want := range rs.bridge {
		st.table.getElement(b, want, func(data []byte) error {
			list, err := decodeElements(want.set.family, data)
			st.bridges = append(st.bridges, list...)
			return err
		})
	}
}

// read looks up everything that a ruleset names. What it gives may be torn by a
// change meanwhile; a transaction with its generation is then refused.
func (c *Conn) read(rs *ruleset) (*state, error) {
	generation, err := c.settle()
	if err != nil {
		return nil, err
	}
	st := newState(rs)
	st.generation, st.sets, st.rules = generation, map[place]setState{}, map[place][]string{}
	var b nl.Batch
	st.getOutline(&b, rs)
	for _, s := range rs.sets() {
		st.table.getSet(&b, s.place, func(data []byte) error {
			_, have, err := decodeSet(data)
			st.sets[s.place] = have
			return err
		})
	}
	st.getSentinels(&b, rs.sets())
	if err := nftnl.Look(c.nl, &b, unix.EINVAL); err != nil {
		return nil, err
	}
	for _, family := range rs.tables {
		err = c.dumpRules(family, func(data []byte) error {
			chain, comment, err := decodeRule(data)
			at := place{family, chain}
			st.rules[at] = append(st.rules[at], comment)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	var places []place
	for _, s := range bridgeSets() {
		if have, ok := st.sets[s.place]; ok && s.matches(have) {
			places = append(places, s.place)
		}
	}
	st.bridges, err = c.elementsOf(places)
	return st, err
}

// looksRight says that the tables and the chains are as they should be, as far as
// an outline tells, and that nobody has emptied a set. Rules that look into a set hold
// it, so it is there too.
func (st *state) looksRight(rs *ruleset) bool {
	for _, family := range rs.tables {
		if t, ok := st.tables[family]; !ok || t.IsDormant() {
			return false
		}
	}
	for i := range rs.chains {
		ch := &rs.chains[i]
		if have, ok := st.chains[ch.place]; !ok || !ch.matches(have) {
			return false
		}
	}
	add, del := st.bridgeChanges(rs)
	return !slices.ContainsFunc(rs.gone, st.hasChain) && len(add)+len(del) == 0 && len(st.sentinels) == len(rs.sets())
}

// bridgeChanges are the elements that are missing from the sets of bridges, and those
// of the network that should not be there, or not with their comments.
func (st *state) bridgeChanges(rs *ruleset) (add, del []element) {
	missing := slices.Clone(rs.bridge)
	for i := range st.bridges {
		el := &st.bridges[i]
		right := el.comment == rs.bridgeComment && slices.ContainsFunc(rs.bridge, el.equal)
		if el.isNetwork(rs.network) && !right {
			del = append(del, el.element)
			continue
		}
		missing = slices.DeleteFunc(missing, el.equal)
	}
	return missing, del
}

func (st *state) hasChain(p place) bool {
	_, ok := st.chains[p]
	return ok
}

// matches says that a chain is hooked in where it should be, was made with these
// rules, and has as many as then. A flush, a rule that someone added, or one that was
// deleted shows in the number.
func (ch *chain) matches(have nftnl.Chain) bool {
	return ch.sameHook(have) && have.Policy == policyAccept && have.Comment == ch.comment(int(have.Uses))
}

func (ch *chain) sameHook(have nftnl.Chain) bool {
	return have.Kind == ch.kind && have.Hook == ch.hook && have.Priority == ch.priority
}

// hasRules says that a chain's rules are those that it should have.
func (st *state) hasRules(ch *chain) bool {
	return slices.EqualFunc(st.rules[ch.place], ch.rules(), func(comment string, want rule) bool { return comment == want.comment })
}

// matches says that a set holds what it should, as plain elements that stay.
func (s *set) matches(have setState) bool {
	return have == s.state()
}
