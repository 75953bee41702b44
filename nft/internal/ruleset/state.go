package ruleset

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/diff"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// State is the state in the kernel of the tables, chains and sets that a ruleset names. It does not contain the
// elements of endpoints.
type State struct {
	table      TableName
	Generation uint32
	Tables     map[uint8]nftnl.Table // the existing tables, by family
	Chains     map[Place]nftnl.Chain
	sets       map[Place]setType
	rules      map[Place][]string // the comments of the rules of each chain, in order
	// sentinels has an entry for each set that contains a sentinel (see SentinelLink). The value is true if we added
	// the sentinel, and false if another program loaded it from a saved copy.
	sentinels map[Place]bool
	// bridges lists elements of the sets of bridges. After Outline, these are only the elements that the ruleset
	// names. After Read, these are all elements.
	bridges []Element
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

// bridgeChanges compares the sets of bridges with the ruleset. add lists missing elements. del lists elements of the
// network that must not exist or that have a wrong comment.
func (st *State) bridgeChanges(rs *Ruleset) (add, del []Element) {
	missing := slices.Clone(rs.Bridge)
	for i := range st.bridges {
		el := &st.bridges[i]
		right := el.Comment == rs.of.BridgeComment() && slices.ContainsFunc(rs.Bridge, el.Equal)

		// Keep elements of SharesSet if this network has no Share. Another network's Share may need them.
		unknown := rs.of.Share == nil && el.Set == InInet(SharesSet)
		if el.IsNetwork(rs.network) && !right && !unknown {
			del = append(del, *el)
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

// matches reports whether the chain in the kernel has the right hook, policy and comment, and still as many rules as
// when it was created. Flushing the chain, and adding or deleting a rule, change this number.
func (ch *Chain) matches(have nftnl.Chain) bool {
	return ch.sameHook(have) && have.Policy == PolicyAccept && have.Comment == ch.Comment(int(have.Uses))
}

func (ch *Chain) sameHook(have nftnl.Chain) bool {
	return have.Kind == ch.Kind && have.Hook == ch.Hook && have.Device == ch.Device && have.Priority == ch.Priority
}

// hasRules reports whether the chain in the kernel contains the intended rules, by comparing comments. After Outline,
// the rules are unknown, and it returns true.
func (st *State) hasRules(ch *Chain) bool {
	return st.rules == nil || slices.EqualFunc(st.rules[ch.Place], ch.Rules(),
		func(comment string, want Rule) bool { return comment == want.Comment })
}

// Outline looks up the tables and chains of a ruleset, the network's elements in the sets of bridges, and the
// sentinels. It requests each object by its name or key, and lists nothing.
func (t Tables) Outline(rs *Ruleset) (*State, error) {
	st := newState(rs)
	var b nl.Batch
	st.getOutline(&b, rs)
	for _, want := range rs.Bridge {
		st.table.getElement(&b, want, func(data []byte) error {
			st.bridges = append(st.bridges, DecodeElements(want.Set.Family, data)...)
			return nil
		})
	}

	st.getSentinels(&b, rs.Sets())
	return st, nftnl.ExecuteGets(t.Conn, &b, unix.EINVAL) // ignore EINVAL: a set has keys of another length
}

// Read reads everything that a ruleset names, including the comments of all rules. If something changes in between,
// the result may be inconsistent. A transaction with the result's Generation then fails.
func (t Tables) Read(rs *Ruleset) (*State, error) {
	generation, err := nftnl.VisibleGeneration(t.Conn)
	if err != nil {
		return nil, err
	}

	st := newState(rs)
	st.Generation, st.sets, st.rules = generation, map[Place]setType{}, map[Place][]string{}
	var b nl.Batch
	st.getOutline(&b, rs)

	// Read all sets of bridges, even those that the ruleset does not name. A network that was internal or had an
	// egress policy may still have elements there.
	bridges := slices.Concat(BridgeSets(), internalSets(), egressSets())
	for _, s := range slices.Concat(rs.Sets(), bridges) {
		st.table.getSet(&b, s.Place, func(data []byte) error {
			st.sets[s.Place] = decodeSet(data)
			return nil
		})
	}

	st.getSentinels(&b, rs.Sets())
	if err := nftnl.ExecuteGets(t.Conn, &b, unix.EINVAL); err != nil {
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
		if have, ok := st.sets[s.Place]; ok && s.setType == have {
			places = append(places, s.Place)
		}
	}

	st.bridges, err = t.ElementsOf(places)
	return st, err
}

func decodeSet(b []byte) setType {
	number := func(typ uint16) uint32 { return nftnl.Number(nftnl.Find(b, typ)) }
	return setType{
		flags:   number(unix.NFTA_SET_FLAGS),
		KeyType: number(unix.NFTA_SET_KEY_TYPE), KeyLen: number(unix.NFTA_SET_KEY_LEN),
		DataType: number(unix.NFTA_SET_DATA_TYPE), DataLen: number(unix.NFTA_SET_DATA_LEN),
	}
}

// decodeRule returns the chain and the comment of a rule. Without a comment, it returns "".
func decodeRule(b []byte) (chain, comment string) {
	return nftnl.Text(nftnl.Find(b, unix.NFTA_RULE_CHAIN)), nftnl.CommentOf(nftnl.Find(b, unix.NFTA_RULE_USERDATA))
}

// DecodeElements parses a message with elements of one set (NFT_MSG_NEWSETELEM). A listing may consist of several
// such messages.
func DecodeElements(family uint8, b []byte) (list []Element) {
	set := Place{family, nftnl.Text(nftnl.Find(b, unix.NFTA_SET_ELEM_LIST_SET))}
	nftnl.Each(nftnl.Find(b, unix.NFTA_SET_ELEM_LIST_ELEMENTS), func(el []byte) {
		list = append(list, Element{
			Set:     set,
			Key:     nftnl.Find(el, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE),
			End:     nftnl.Find(el, keyEnd, unix.NFTA_DATA_VALUE),
			Data:    nftnl.Find(el, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE),
			Comment: nftnl.CommentOf(nftnl.Find(el, unix.NFTA_SET_ELEM_USERDATA)),
		})
	})

	return list
}

// The comments of chains do not show that another program changed the elements of a set. It may have emptied the set
// (nft flush set), or deleted the table and loaded an older copy of it (nft -f). So each set and map contains one
// additional element without an owner, the sentinel. One request for the sentinel shows whether this has happened. A
// flush deletes the sentinel. A loaded copy contains the sentinel with a shorter comment, since nft prints and loads a
// comment only up to its first NUL.
//
// A sentinel matches no real packet. If the key contains a link, this link has an impossible name, since the kernel
// permits no slash in names. Other keys contain an address or a MAC of zeros, or the reserved protocol 255 and port 0.
const (
	SentinelLink     = "/sentinel"
	sentinelProtocol = unix.IPPROTO_RAW
	SentinelComment  = OwnerPrefix + "sentinel"

	// unsaved is the end of the comment of a sentinel that we added. It begins with NUL, so nft does not save it.
	unsaved = "\x00unsaved"
)

// Sentinel returns the sentinel element of the set (see SentinelLink).
func (s *Set) Sentinel() Element {
	el := Element{Set: s.Place, Key: make([]byte, s.KeyLen), Comment: SentinelComment + unsaved}
	const parts = 5 // the largest number of parts
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

	if s.hasIntervals() {
		el.End = el.Key
	}

	if s.DataLen > 0 {
		el.Data = make([]byte, s.DataLen) // zero bytes: no address and no port
	}

	return el
}

// getSentinels appends requests for the sentinels of the sets. The answers are stored in st.sentinels.
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

// Changes holds the changes that are needed to turn the state in the kernel into the intended ruleset.
type Changes struct {
	tables []uint8 // families whose tables must be created, or are dormant
	Sets   []Set
	// Unmarked lists sets that exist with the right type but do not contain our sentinel (see SentinelLink). Another
	// program has emptied or loaded them, or Prepare has created them. After Outline, Unmarked lists all sets
	// without our sentinel, even missing ones.
	Unmarked  []Set
	chains    []*Chain
	oldSets   []Place // sets of the wrong type, to delete and create again
	oldChains []Place
	add, del  []Element // changes of the sets of bridges
}

// IsEmpty reports whether no changes are needed.
func (p *Changes) IsEmpty() bool {
	return len(p.tables)+len(p.Sets)+len(p.Unmarked)+len(p.chains)+len(p.oldChains)+len(p.add)+len(p.del) == 0
}

// Plan computes the changes that turn the present state have into the intended ruleset want. It never changes an
// existing chain, but replaces the whole chain. So a chain's comment, which the kernel cannot change later, always
// describes its rules.
//
// If have comes from Outline, Plan compares the tables, the chains, the elements in the sets of bridges and the
// sentinels. It does not compare the sets themselves, since a sentinel shows that its set exists.
func Plan(want *Ruleset, have *State) (p Changes) {
	for _, family := range want.tables {
		if t, ok := have.Tables[family]; !ok || t.IsDormant() {
			p.tables = append(p.tables, family)
		}
	}

	for _, s := range want.Sets() {
		switch got, ok := have.sets[s.Place]; {
		case ok && s.setType != got:
			p.oldSets = append(p.oldSets, s.Place)
			fallthrough
		case !ok && have.sets != nil:
			p.Sets = append(p.Sets, s)
		case !have.sentinels[s.Place]:
			p.Unmarked = append(p.Unmarked, s)
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

	p.add, p.del = have.bridgeChanges(want)
	return p
}

// Transaction returns a transaction that makes the changes. have is the state that Plan was called with. sentinels
// selects whether new sets get a sentinel.
func (p *Changes) Transaction(have *State, sentinels bool) *Transaction {
	t := have.table.Begin(&have.Generation)
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
			t.NewElement(s.Sentinel())
		}
	}

	for _, s := range p.Unmarked {
		if _, loaded := have.sentinels[s.Place]; loaded {
			t.DelElement(s.Sentinel())
		}
		t.NewElement(s.Sentinel())
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
		t.NewElement(el)
	}

	return t
}

// Differences returns the differences between the state in the kernel and the ruleset. If a table does not exist, its
// sets and chains are not listed.
func (rs *Ruleset) Differences(have *State) []tombolo.Difference {
	var list diff.List
	for _, family := range rs.tables {
		table := rs.table.Of(family).String()
		if t, ok := have.Tables[family]; !ok {
			list.Add("nf_tables", "table", table, "")
		} else if t.IsDormant() {
			list.Add("table "+table, "flag", "", "dormant")
		}
	}

	for _, s := range rs.Sets() {
		if !have.hasTable(s.Family) {
			continue
		}
		// If a program loaded a table from a save, all its sets have the same difference. List it once.
		if d, differs := s.difference(have); differs && !slices.Contains(list, d) {
			list = append(list, d)
		}
	}

	for i := range rs.Chains {
		if ch := &rs.Chains[i]; have.hasTable(ch.Family) {
			ch.addDifferences(&list, have)
		}
	}

	for _, at := range rs.gone {
		if have.hasChain(at) {
			list.Add("table "+rs.table.Of(at.Family).String(), "chain", "", at.Name)
		}
	}

	// Leave out elements of missing sets, since the sets themselves are listed above.
	add, del := have.bridgeChanges(rs)
	for _, el := range add {
		if _, ok := have.sets[el.Set]; ok {
			list.Add(rs.table.Label("set", el.Set).String(), "element", el.KeyText(), "")
		}
	}

	for _, el := range del {
		list.Add(rs.table.Label("set", el.Set).String(), "element", "", el.KeyText())
	}
	return list
}

func (st *State) hasTable(family uint8) bool {
	_, ok := st.Tables[family]
	return ok
}

func (s *Set) difference(have *State) (d tombolo.Difference, differs bool) {
	table, set := "table "+have.table.Of(s.Family).String(), have.table.Label("set", s.Place).String()
	got, ok := have.sets[s.Place]
	isSaved, isLoaded := have.sentinels[s.Place]
	switch {
	case !ok:
		return tombolo.Difference{Object: table, What: "set", Want: s.Name}, true
	case s.setType != got:
		return tombolo.Difference{Object: set, What: "type", Want: s.describe(), Have: got.describe()}, true
	case isSaved:
		return d, false
	case isLoaded:
		d.Text = table + ": another program has loaded elements from a save, which may be old"
		return d, true
	}
	return tombolo.Difference{Object: set, What: "element", Want: s.Sentinel().KeyText()}, true
}

func (s setType) describe() string {
	text := fmt.Sprintf("key type %#x of %d bytes with flags %#x", s.KeyType, s.KeyLen, s.flags)
	if s.DataLen > 0 {
		text += fmt.Sprintf(" to data type %#x of %d bytes", s.DataType, s.DataLen)
	}
	return text
}

// addDifferences adds the differences of a chain and of its rules. It compares rules by their comments.
func (ch *Chain) addDifferences(list *diff.List, have *State) {
	got, ok := have.Chains[ch.Place]
	if !ok {
		list.Add("table "+have.table.Of(ch.Family).String(), "chain", ch.Name, "")
		return
	}

	object := have.table.Label("chain", ch.Place).String()
	list.Add(object, "hook", ch.describe(), describeHook(got))
	if got.Kind != "" && got.Policy != PolicyAccept {
		list.Add(object, "policy", "accept", "drop")
	}

	rules, comments := ch.Rules(), have.rules[ch.Place]
	list.Add(object, "comment (version and settings)", strconv.Quote(ch.Comment(len(rules))),
		strconv.Quote(got.Comment))

	before, rest := len(*list), slices.Clone(comments)
	for _, want := range rules {
		if i := slices.Index(rest, want.Comment); i >= 0 {
			rest = slices.Delete(rest, i, i+1)
		} else {
			list.Add(object, "rule", strconv.Quote(want.Comment), "")
		}
	}

	for _, comment := range rest {
		list.Add(object, "rule", "", strconv.Quote(comment))
	}

	inOrder := slices.EqualFunc(comments, rules, func(is string, want Rule) bool { return is == want.Comment })
	if len(*list) == before && !inOrder {
		list.Add(object, "order of the rules", "as they were made", "another")
	}
}

func (ch *Chain) describe() string {
	return describeHook(nftnl.Chain{Kind: ch.Kind, Hook: ch.Hook, Device: ch.Device, Priority: ch.Priority})
}

func describeHook(ch nftnl.Chain) string {
	hook := strconv.Itoa(int(ch.Hook))

	// The names of enum nf_inet_hooks, in the kernel's order.
	if names := [...]string{"prerouting", "input", "forward", "output", "postrouting"}; int(ch.Hook) < len(names) {
		hook = names[ch.Hook]
	}

	if ch.Kind == "" {
		return "none"
	}

	if ch.Device != "" {
		hook = [...]string{"ingress", "egress"}[ch.Hook&unix.NF_NETDEV_EGRESS] + " device " + ch.Device
	}

	return fmt.Sprintf("type %s hook %s priority %d", ch.Kind, hook, ch.Priority)
}
