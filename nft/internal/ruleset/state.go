package ruleset

import (
	"bytes"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// State is the kernel's state of a ruleset: only the chains and sets that the ruleset names, without the elements.
type State struct {
	table      TableName
	Generation uint32
	Tables     map[uint8]nftnl.Table // the existing ones, by family
	Chains     map[Place]nftnl.Chain
	sets       map[Place]setState
	rules      map[Place][]string // the comments of the rules of each chain, in order
	// sentinels has an entry for each set with a sentinel: true for our own, false for one that another program
	// loaded.
	sentinels map[Place]bool
	// bridges are the elements of the sets of bridges: those that the ruleset names or, after Read, all.
	bridges []ElementState
}

func newState(rs *Ruleset) *State {
	return &State{
		table:     rs.table,
		Tables:    make(map[uint8]nftnl.Table, len(rs.tables)),
		Chains:    make(map[Place]nftnl.Chain, len(rs.Chains)),
		sentinels: map[Place]bool{},
	}
}

func (st *State) getOutline(b *nl.Batch, rs *Ruleset) {
	for _, family := range rs.tables {
		st.table.getTable(b, family, func(data []byte) error {
			st.Tables[family] = nftnl.DecodeTable(data)
			return nil
		})
	}

	getChains := func(p Place) {
		st.table.getChain(b, p, func(data []byte) error {
			st.Chains[p] = nftnl.DecodeChain(data)
			return nil
		})
	}
	for i := range rs.Chains {
		getChains(rs.Chains[i].Place)
	}

	for _, p := range rs.gone {
		getChains(p)
	}
}

// getBridge looks up the network's elements in the sets of bridges.
func (st *State) getBridge(b *nl.Batch, rs *Ruleset) {
	for _, want := range rs.Bridge {
		st.table.getElement(b, want, func(data []byte) error {
			st.bridges = append(st.bridges, DecodeElements(want.Set.Family, data)...)
			return nil
		})
	}
}

// LooksRight reports whether the tables and chains are right, as far as an outline shows, and whether each set has
// our own sentinel. A rule that looks into a set keeps the set, so the sets are not looked up.
func (st *State) LooksRight(rs *Ruleset) bool {
	for _, family := range rs.tables {
		if t, ok := st.Tables[family]; !ok || t.IsDormant() {
			return false
		}
	}

	for i := range rs.Chains {
		ch := &rs.Chains[i]
		if have, ok := st.Chains[ch.Place]; !ok || !ch.matches(have) {
			return false
		}
	}

	add, del := st.bridgeChanges(rs)
	touched := func(s Set) bool { return !st.sentinels[s.Place] }
	return !slices.ContainsFunc(rs.gone, st.hasChain) && len(add)+len(del) == 0 &&
		!slices.ContainsFunc(rs.Sets(), touched)
}

// bridgeChanges returns the elements that are missing in the sets of bridges, and those of the network that should
// not exist or have wrong comments.
func (st *State) bridgeChanges(rs *Ruleset) (add, del []Element) {
	missing := slices.Clone(rs.Bridge)
	for i := range st.bridges {
		el := &st.bridges[i]
		right := el.Comment == rs.BridgeComment && slices.ContainsFunc(rs.Bridge, el.Equal)

		// Without its pair a share is not known, and its elements stay until RemoveShare.
		unknown := rs.of.Share == nil && el.Set == InInet(SharesSet)
		if el.IsNetwork(rs.network) && !right && !unknown {
			del = append(del, el.Element)
			continue
		}
		missing = slices.DeleteFunc(missing, el.Equal)
	}

	return missing, del
}

func (st *State) hasChain(p Place) bool {
	_, ok := st.Chains[p]
	return ok
}

// matches reports whether a chain is hooked in at the right place, was created with these rules, and still has as
// many. A flush, an added rule or a deleted one changes the number.
func (ch *Chain) matches(have nftnl.Chain) bool {
	return ch.sameHook(have) && have.Policy == PolicyAccept && have.Comment == ch.Comment(int(have.Uses))
}

func (ch *Chain) sameHook(have nftnl.Chain) bool {
	return have.Kind == ch.Kind && have.Hook == ch.Hook && have.Device == ch.Device && have.Priority == ch.Priority
}

// hasRules reports whether a chain has the right rules.
func (st *State) hasRules(ch *Chain) bool {
	return slices.EqualFunc(st.rules[ch.Place], ch.Rules(),
		func(comment string, want Rule) bool { return comment == want.Comment })
}

// matches reports whether a set has the right type, with plain elements that stay.
func (s *Set) matches(have setState) bool {
	return have == s.state()
}

// Outline looks up the tables and chains that a ruleset names, with single requests.
func (t Tables) Outline(rs *Ruleset) (*State, error) {
	st := newState(rs)
	var b nl.Batch
	st.getOutline(&b, rs)
	st.getBridge(&b, rs)
	st.getSentinels(&b, rs.Sets())
	return st, nftnl.Look(t.Conn, &b, unix.EINVAL) // EINVAL: a set with other keys
}

// Read looks up everything that a ruleset names. A change during the lookup may make the result inconsistent. Then a
// transaction with its generation is refused.
func (t Tables) Read(rs *Ruleset) (*State, error) {
	generation, err := nftnl.SeenGeneration(t.Conn)
	if err != nil {
		return nil, err
	}

	st := newState(rs)
	st.Generation, st.sets, st.rules = generation, map[Place]setState{}, map[Place][]string{}
	var b nl.Batch
	st.getOutline(&b, rs)

	// Networks that were internal before have elements in a set that the ruleset no longer names.
	bridges := slices.Concat(BridgeSets(), internalSets(), egressSets())
	for _, s := range slices.Concat(rs.Sets(), bridges) {
		st.table.getSet(&b, s.Place, func(data []byte) error {
			st.sets[s.Place] = decodeSet(data)
			return nil
		})
	}

	st.getSentinels(&b, rs.Sets())
	if err := nftnl.Look(t.Conn, &b, unix.EINVAL); err != nil {
		return nil, err
	}

	for _, family := range rs.tables {
		err = t.dump("rules", family, unix.NFT_MSG_GETRULE, func(data []byte) error {
			chain, comment := decodeRule(data)
			at := Place{family, chain}
			st.rules[at] = append(st.rules[at], comment)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}

	var places []Place
	for _, s := range bridges {
		if have, ok := st.sets[s.Place]; ok && s.matches(have) {
			places = append(places, s.Place)
		}
	}

	st.bridges, err = t.ElementsOf(places)
	return st, err
}

// setState is a set in the kernel: NFT_MSG_NEWSET.
type setState struct {
	flags    uint32
	keyType  uint32
	keyLen   uint32
	dataType uint32 // of a map
	dataLen  uint32
}

func decodeSet(b []byte) setState {
	number := func(typ uint16) uint32 { return nftnl.Number(nftnl.Find(b, typ)) }
	return setState{
		flags:   number(unix.NFTA_SET_FLAGS),
		keyType: number(unix.NFTA_SET_KEY_TYPE), keyLen: number(unix.NFTA_SET_KEY_LEN),
		dataType: number(unix.NFTA_SET_DATA_TYPE), dataLen: number(unix.NFTA_SET_DATA_LEN),
	}
}

// decodeRule returns a rule's chain and comment. A rule without one has an empty comment.
func decodeRule(b []byte) (chain, comment string) {
	comment, _ = nftnl.CommentOf(nftnl.Find(b, unix.NFTA_RULE_USERDATA))
	return nftnl.Text(nftnl.Find(b, unix.NFTA_RULE_CHAIN)), comment
}

// ElementState is an element in the kernel. Any of our sets may contain elements without a comment, or with another
// program's.
type ElementState struct {
	Element
	Comment string
}

// DecodeElements parses a message that lists elements of one set (NFT_MSG_NEWSETELEM). A listing consists of several
// messages.
func DecodeElements(family uint8, b []byte) (list []ElementState) {
	set := Place{family, nftnl.Text(nftnl.Find(b, unix.NFTA_SET_ELEM_LIST_SET))}
	nftnl.Each(nftnl.Find(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS), func(el []byte) {
		comment, _ := nftnl.CommentOf(nftnl.Find(el, unix.NFTA_SET_ELEM_USERDATA))
		list = append(list, ElementState{Comment: comment, Element: Element{
			Set:  set,
			Key:  nftnl.Find(el, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE),
			End:  nftnl.Find(el, keyEnd, unix.NFTA_DATA_VALUE),
			Data: nftnl.Find(el, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE),
		}})
	})

	return list
}

// Rules and their number do not show that another program changed the elements of a set: that it emptied the set (nft
// flush set), or deleted the table and loaded an older copy of it (nft -f). So each set and map has one element
// without an owner, its sentinel, and one request for it shows both. A flush deletes the sentinel. A loaded copy
// contains it, but without the end of its comment, since nft prints and loads a comment up to its first NUL.
//
// Sentinels match no packet that goes anywhere. Those with a link have an impossible name: the kernel permits no name
// with a slash. The others have the unspecified address, which nothing is sent to, or the reserved protocol 255 and
// port 0.
const (
	SentinelLink     = "/sentinel"
	sentinelProtocol = unix.IPPROTO_RAW
	SentinelComment  = OwnerPrefix + "sentinel"

	// unsaved ends the comment of a sentinel that we added.
	unsaved = "\x00unsaved"
)

// Sentinel returns a set's sentinel.
func (s *Set) Sentinel() Element {
	el := Element{Set: s.Place, Key: make([]byte, s.KeyLen)}
	const parts = 5 // at most
	rest := el.Key
	for shift := parts * nftnl.TypeBits; shift >= 0; shift -= nftnl.TypeBits {
		typ := s.KeyType >> shift & (1<<nftnl.TypeBits - 1)
		if typ == 0 {
			continue
		}

		switch typ {
		case nftnl.TypeIfname:
			copy(rest, SentinelLink)
		case nftnl.TypeProtocol:
			rest[0] = sentinelProtocol
		}
		rest = rest[min(len(rest), (typeLen(typ)+Slot-1)/Slot*Slot):]
	}

	if s.intervals {
		el.End = el.Key
	}

	if s.DataLen > 0 {
		el.Data = make([]byte, s.DataLen) // no address, and no port
	}

	return el
}

// getSentinels looks up the sentinels of sets.
func (st *State) getSentinels(b *nl.Batch, sets []Set) {
	for i := range sets {
		at := sets[i].Place
		st.table.getElement(b, sets[i].Sentinel(), func(data []byte) error {
			comment := nftnl.Find(data, unix.NFTA_SET_ELEM_LIST_ELEMENTS, unix.NFTA_LIST_ELEM,
				unix.NFTA_SET_ELEM_USERDATA)
			st.sentinels[at] = bytes.HasSuffix(comment, []byte(unsaved+"\x00"))
			return nil
		})
	}
}

// touched returns the sets that exist with the right type but without our sentinel, because another program emptied
// or loaded them.
func (st *State) touched(rs *Ruleset) []Set {
	return slices.DeleteFunc(rs.Sets(), func(s Set) bool {
		have, ok := st.sets[s.Place]
		return !ok || !s.matches(have) || st.sentinels[s.Place]
	})
}
