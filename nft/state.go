package nft

import (
	"errors"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// state is what the kernel has of a ruleset: of the chains and sets only those that
// the ruleset names, and not the elements.
type state struct {
	generation uint32
	table      *tableState // nil: there is none
	chains     map[string]chainState
	sets       map[string]setState
	rules      map[string][]string // the comments of the rules of each chain, in their order
}

// outline looks up the table and the chains that a ruleset names, by single gets.
func (c *Conn) outline(rs *ruleset) (*state, error) {
	st := &state{chains: make(map[string]chainState, len(rs.chains))}
	var b nl.Batch
	st.getOutline(&b, rs)
	return st, c.execute(&b)
}

func (st *state) getOutline(b *nl.Batch, rs *ruleset) {
	getTable(b, func(data []byte) error {
		t, err := decodeTable(data)
		st.table = &t
		return err
	})
	getChains := func(name string) {
		getChain(b, name, func(data []byte) error {
			ch, err := decodeChain(data)
			st.chains[name] = ch
			return err
		})
	}
	for i := range rs.chains {
		getChains(rs.chains[i].name)
	}
	for _, name := range rs.gone {
		getChains(name)
	}
}

// read looks up everything that a ruleset names. What it gives may be torn by a
// change meanwhile; a transaction with its generation is then refused.
func (c *Conn) read(rs *ruleset) (*state, error) {
	generation, err := c.settle()
	if err != nil {
		return nil, err
	}
	st := &state{
		generation: generation,
		chains:     map[string]chainState{}, sets: map[string]setState{}, rules: map[string][]string{},
	}
	var b nl.Batch
	st.getOutline(&b, rs)
	for _, s := range rs.sets {
		getSet(&b, s.name, func(data []byte) error {
			have, err := decodeSet(data)
			st.sets[s.name] = have
			return err
		})
	}
	if err := c.execute(&b); err != nil {
		return nil, err
	}
	err = c.dumpRules(func(data []byte) error {
		chain, comment, err := decodeRule(data)
		st.rules[chain] = append(st.rules[chain], comment)
		return err
	})
	if err != nil {
		return nil, err
	}
	return st, nil
}

// execute is for requests of which any may find nothing, and whose errors of
// certain kinds say the same.
func (c *Conn) execute(b *nl.Batch, same ...error) error {
	if err := c.nl.Execute(b); err == nil {
		return nil
	}
	same = append(same, fs.ErrNotExist)
	for i := range b.Len() {
		err := b.Err(i)
		if err != nil && !slices.ContainsFunc(same, func(s error) bool { return errors.Is(err, s) }) {
			return err
		}
	}
	return nil
}

// looksRight says that the table and the chains are as they should be, as far as
// an outline tells. Rules that look into a set hold it, so it is there too.
func (st *state) looksRight(rs *ruleset) bool {
	if st.table == nil || st.table.dormant() {
		return false
	}
	for i := range rs.chains {
		ch := &rs.chains[i]
		if have, ok := st.chains[ch.name]; !ok || !ch.matches(have) {
			return false
		}
	}
	return !slices.ContainsFunc(rs.gone, st.hasChain)
}

func (st *state) hasChain(name string) bool {
	_, ok := st.chains[name]
	return ok
}

// matches says that a chain is hooked in where it should be, was made with these
// rules, and has as many. A flush, a rule that someone added, or one that was deleted
// shows in the number.
func (ch *chain) matches(have chainState) bool {
	return ch.sameHook(have) && have.policy == policyAccept &&
		have.comment == ch.comment() && int(have.uses) == len(ch.rules)
}

func (ch *chain) sameHook(have chainState) bool {
	return have.kind == ch.kind && have.hook == ch.hook && have.priority == ch.priority
}

// hasRules says that a chain's rules are those that it should have.
func (st *state) hasRules(ch *chain) bool {
	return slices.EqualFunc(st.rules[ch.name], ch.rules, func(comment string, want rule) bool { return comment == want.comment })
}

// matches says that a set holds what it should, as plain elements that stay.
func (s *set) matches(have setState) bool {
	return have.flags == 0 && have.keyType == s.keyType && have.keyLen == s.keyLen
}

// dormant says that the table's chains are all unhooked (nft: flags dormant).
func (t *tableState) dormant() bool { return t.flags&unix.NFT_TABLE_F_DORMANT != 0 }
