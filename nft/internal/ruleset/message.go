package ruleset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sort"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Place identifies a chain or a set by the family of its table and its name.
type Place struct {
	Family uint8 // unix.NFPROTO_*
	Name   string
}

// InInet returns the Place of a name in the table of family inet.
func InInet(name string) Place { return Place{unix.NFPROTO_INET, name} }

// InNetdev returns the Place of a name in the table of family netdev.
func InNetdev(name string) Place { return Place{unix.NFPROTO_NETDEV, name} }

// InBridge returns the Place of a name in the table of family bridge.
func InBridge(name string) Place { return Place{unix.NFPROTO_BRIDGE, name} }

// TableName is the name of our tables. The tables of all families share one name.
type TableName string

// Of returns the name of the table of a family, such as "inet tombolo", for error messages.
func (name TableName) Of(family uint8) nl.Name {
	return nl.Name(nftnl.FamilyName(family) + " " + string(name))
}

// Label returns the name of a chain or a set for error messages. kind is "chain" or "set".
func (name TableName) Label(kind string, p Place) label { return label{kind, p, name} }

// label is the name of a chain or a set in error messages.
type label struct {
	kind string
	Place
	table TableName
}

func (l label) String() string {
	return l.kind + " " + l.Name + " of table " + l.table.Of(l.Family).String()
}

// Transaction is an nf_tables transaction that changes our tables.
type Transaction struct {
	*nftnl.Transaction
	Generation *uint32 // nil if the transaction applies to any generation
	table      TableName
}

// Begin starts a transaction. If generation is not nil, the kernel refuses the transaction (ERESTART) if anything in
// the namespace's nf_tables has changed since that generation. See nftnl.VisibleGeneration.
func (name TableName) Begin(generation *uint32) *Transaction {
	return &Transaction{nftnl.Begin(generation), generation, name}
}

// newTable creates a table. If the table exists, it clears the flag "dormant".
func (t *Transaction) newTable(family uint8) {
	t.Add("add table", t.table.Of(family), family, unix.NFT_MSG_NEWTABLE, netlink.Create,
		nftnl.String(unix.NFTA_TABLE_NAME, string(t.table)), nftnl.Uint32(unix.NFTA_TABLE_FLAGS, 0))
}

// delTable deletes a table with all its content.
func (t *Transaction) delTable(family uint8) {
	t.Add("delete table", t.table.Of(family), family, unix.NFT_MSG_DELTABLE,
		0, nftnl.String(unix.NFTA_TABLE_NAME, string(t.table)))
}

// Constants of include/uapi/linux/netfilter/nf_tables.h that package unix lacks.
const (
	setConcat  = 0x80 // NFT_SET_CONCAT
	descConcat = 2    // NFTA_SET_DESC_CONCAT
	fieldLen   = 1    // NFTA_SET_FIELD_LEN
	keyEnd     = 10   // NFTA_SET_ELEM_KEY_END
)

// newSet creates a set. The kernel refuses the transaction if the set already exists, since it could have other keys.
// id can be any number that no other new set of the transaction has.
func (t *Transaction) newSet(s Set, id uint32) {
	attrs := []netlink.Attribute{
		nftnl.String(unix.NFTA_SET_TABLE, string(t.table)), nftnl.String(unix.NFTA_SET_NAME, s.Name),
		nftnl.Uint32(unix.NFTA_SET_FLAGS, s.flags),
		nftnl.Uint32(unix.NFTA_SET_KEY_TYPE, s.KeyType), nftnl.Uint32(unix.NFTA_SET_KEY_LEN, s.KeyLen),
	}
	if s.hasIntervals() {
		var parts []netlink.Attribute
		for _, length := range s.fields() {
			parts = append(parts, nftnl.Nest(unix.NFTA_LIST_ELEM, nftnl.Uint32(fieldLen, uint32(length))))
		}
		attrs = append(attrs, nftnl.Nest(unix.NFTA_SET_DESC, nftnl.Nest(descConcat, parts...)))
	}

	if s.DataLen > 0 {
		attrs = append(attrs, nftnl.Uint32(unix.NFTA_SET_DATA_TYPE, s.DataType),
			nftnl.Uint32(unix.NFTA_SET_DATA_LEN, s.DataLen))
	}

	t.Add("add", t.table.Label("set", s.Place), s.Family, unix.NFT_MSG_NEWSET, netlink.Create|netlink.Excl,
		append(attrs, nftnl.Uint32(unix.NFTA_SET_ID, id), nftnl.Bytes(unix.NFTA_SET_USERDATA, s.userdata()))...)
}

// userdata returns the set's userdata for nft: the byte order of keys and data, and the set's typeof. Without it, nft
// would print single addresses backwards, and single link names as empty.
func (s Set) userdata() []byte {
	const ofEachPart, hostEndian, bigEndian = 0, 1, 2 // enum byteorder; ofEachPart is for a concatenation
	order := func(b []byte, field userdata.Type, typ uint32) []byte {
		order := uint32(bigEndian)
		switch {
		case typ >= 1<<nftnl.TypeBits:
			order = ofEachPart
		case typ == nftnl.TypeIfname:
			order = hostEndian
		}
		return userdata.Append(b, field, binary.NativeEndian.AppendUint32(nil, order))
	}

	b := order(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, s.KeyType)
	if s.DataLen > 0 {
		b = order(b, userdata.NFTNL_UDATA_SET_DATABYTEORDER, s.DataType)
	}

	return append(b, s.typeof...)
}

// delSet deletes a set with its elements. The kernel refuses this (EBUSY) while a rule uses the set.
func (t *Transaction) delSet(p Place) {
	t.Add("delete", t.table.Label("set", p), p.Family, unix.NFT_MSG_DELSET, 0, t.table.named(p, unix.NFTA_SET_NAME)...)
}

// newChain appends the request that creates a base chain with a comment. The comment contains the parameter rules,
// which is the number of rules that the chain will have. A chain can get a comment only when it is created: the kernel
// ignores userdata in later changes.
func (t *Transaction) newChain(ch *Chain, rules int) {
	hook := []netlink.Attribute{
		nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, ch.Hook), nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(ch.Priority)),
	}
	if ch.Device != "" {
		hook = append(hook, nftnl.String(unix.NFTA_HOOK_DEV, ch.Device))
	}
	t.Add("add", t.table.Label("chain", ch.Place), ch.Family, unix.NFT_MSG_NEWCHAIN, netlink.Create|netlink.Excl,
		nftnl.String(unix.NFTA_CHAIN_TABLE, string(t.table)), nftnl.String(unix.NFTA_CHAIN_NAME, ch.Name),
		nftnl.Nest(unix.NFTA_CHAIN_HOOK, hook...),
		nftnl.Uint32(unix.NFTA_CHAIN_POLICY, PolicyAccept), nftnl.String(unix.NFTA_CHAIN_TYPE, ch.Kind),
		nftnl.Bytes(nftnl.ChainUserdata, nftnl.Comment(ch.Comment(rules))))
}

// PolicyAccept is the kernel's number for the chain policy "accept", which all our chains have.
const PolicyAccept = uint32(expr.VerdictAccept)

// delChain deletes a chain and its rules. The same transaction may create another chain with this name. In that case,
// each packet passes either the old chain or the new one.
func (t *Transaction) delChain(p Place) {
	t.Add("delete", t.table.Label("chain", p), p.Family, unix.NFT_MSG_DELCHAIN, 0,
		t.table.named(p, unix.NFTA_CHAIN_NAME)...)
}

// newRule appends a rule to a chain.
func (t *Transaction) newRule(chain Place, r Rule) {
	op := fmt.Sprintf("add rule %q to", r.Comment)
	t.AddRule(op, t.table.Label("chain", chain), chain.Family, netlink.Append, r.Comment, r.Steps,
		t.table.named(chain, unix.NFTA_RULE_CHAIN)...)
}

// NewElement adds an element, which must not exist yet. Without NLM_F_EXCL the kernel would silently keep an existing
// element with its comment, so the element would still belong to another owner.
func (t *Transaction) NewElement(el Element) {
	t.Add("add element", el, el.Set.Family, unix.NFT_MSG_NEWSETELEM, netlink.Create|netlink.Excl,
		t.table.ElementAttributes(el)...)
}

// DelElement deletes an element by its key, regardless of its comment.
func (t *Transaction) DelElement(el Element) {
	t.Add("delete element", el, el.Set.Family, unix.NFT_MSG_DELSETELEM, 0,
		t.table.ElementAttributes(Element{Set: el.Set, Key: el.Key, End: el.End})...)
}

// ElementAttributes returns the attributes of a message that adds, gets or deletes one element.
func (name TableName) ElementAttributes(el Element) []netlink.Attribute {
	const list, entry, key = 2, 3, 4 // the indexes in attrs of the attributes that contain the following ones
	attrs := append(name.named(el.Set, unix.NFTA_SET_ELEM_LIST_SET),
		netlink.Attribute{}, netlink.Attribute{}, netlink.Attribute{})
	attrs = append(attrs, nftnl.Bytes(unix.NFTA_DATA_VALUE, el.Key))
	attrs[key] = nftnl.Header(unix.NFTA_SET_ELEM_KEY, attrs[key+1:])
	if len(el.End) > 0 {
		attrs = append(attrs, netlink.Attribute{}, nftnl.Bytes(unix.NFTA_DATA_VALUE, el.End))
		attrs[key+2] = nftnl.Header(keyEnd, attrs[key+3:])
	}

	if len(el.Data) > 0 {
		value := nftnl.Bytes(unix.NFTA_DATA_VALUE, el.Data)
		attrs = append(attrs, nftnl.Header(unix.NFTA_SET_ELEM_DATA, []netlink.Attribute{value}), value)
	}

	if el.Comment != "" {
		attrs = append(attrs, nftnl.Bytes(unix.NFTA_SET_ELEM_USERDATA, nftnl.Comment(el.Comment)))
	}

	attrs[entry] = nftnl.Header(unix.NFTA_LIST_ELEM, attrs[key:])
	attrs[list] = nftnl.Header(unix.NFTA_SET_ELEM_LIST_ELEMENTS, attrs[entry:])
	return attrs
}

// named returns the attributes with the names of the table and of a chain or set. The parameter attribute is the type
// of the attribute for the chain or set, which depends on the message. The table's attribute has the same type in all
// messages. The result has room for the attributes of an element. Both names share one allocation.
func (name TableName) named(p Place, attribute uint16) []netlink.Attribute {
	names := string(name) + "\x00" + p.Name + "\x00"
	b, n := []byte(names), len(name)+1
	return append(make([]netlink.Attribute, 0, 9), nftnl.Bytes(unix.NFTA_CHAIN_TABLE, b[:n:n]),
		nftnl.Bytes(attribute, b[n:]))
}

func (name TableName) getTable(b *nl.Batch, family uint8, reply func([]byte) error) {
	nftnl.Get(b, name.Of(family), family, unix.NFT_MSG_GETTABLE, reply,
		nftnl.String(unix.NFTA_TABLE_NAME, string(name)))
}

func (name TableName) getChain(b *nl.Batch, p Place, reply func([]byte) error) {
	nftnl.Get(b, name.Label("chain", p), p.Family, unix.NFT_MSG_GETCHAIN, reply, name.named(p, unix.NFTA_CHAIN_NAME)...)
}

func (name TableName) getSet(b *nl.Batch, p Place, reply func([]byte) error) {
	nftnl.Get(b, name.Label("set", p), p.Family, unix.NFT_MSG_GETSET, reply, name.named(p, unix.NFTA_SET_NAME)...)
}

func (name TableName) getElement(b *nl.Batch, el Element, reply func([]byte) error) {
	nftnl.Get(b, el, el.Set.Family, unix.NFT_MSG_GETSETELEM, reply,
		name.ElementAttributes(Element{Set: el.Set, Key: el.Key, End: el.End})...)
}

// Tables identifies our tables by their name, and holds a connection to their network namespace.
type Tables struct {
	Conn *nl.Conn
	Name TableName
}

// OurFamilies returns the families in which we may have a table.
func OurFamilies() [3]uint8 {
	return [...]uint8{unix.NFPROTO_INET, unix.NFPROTO_BRIDGE, unix.NFPROTO_NETDEV}
}

// setNames lists all sets in our table of a family. If the table does not exist, the result is empty.
func (t Tables) setNames(family uint8) ([]Place, error) {
	var sets []Place
	err := t.dump("sets", family, unix.NFT_MSG_GETSET, func(data []byte) error {
		sets = append(sets, Place{family, nftnl.Text(nftnl.Find(data, unix.NFTA_SET_NAME))})
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return sets, err
}

// ElementsOf lists the elements of the given sets, without sentinels. It skips sets that are not ours or do not
// exist.
func (t Tables) ElementsOf(sets []Place) ([]Element, error) {
	var all []Element
	for _, at := range sets {
		if _, is := setAt(at); !is {
			continue
		}

		list, err := t.ElementsOfSet(at)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		for _, el := range list {
			if el.Comment != SentinelComment {
				all = append(all, el)
			}
		}
	}

	return all, nil
}

// ElementsOfSet lists the elements of a set, also its sentinel, sorted by key. The kernel resizes the hash table of a
// set in the background. During that time, a listing may contain some elements twice and lack as many others. In that
// case, the error is nftnl.ErrOvertaken.
func (t Tables) ElementsOfSet(set Place) ([]Element, error) {
	var list []Element
	err := nftnl.List(t.Conn, "list elements of set "+set.Name, set.Family, unix.NFT_MSG_GETSETELEM,
		func(data []byte) error {
			list = append(list, DecodeElements(set.Family, data)...)
			return nil
		}, t.Name.named(set, unix.NFTA_SET_ELEM_LIST_SET)...)
	if err != nil {
		return nil, err
	}

	sort.Slice(list, func(i, j int) bool { return bytes.Compare(list[i].Key, list[j].Key) < 0 })
	all := len(list)
	list = slices.CompactFunc(list, func(a, b Element) bool { return a.Equal(b) })
	if len(list) < all {
		return nil, nftnl.ErrOvertaken
	}

	return list, nil
}

// dump lists the objects of a kind in our table of a family, and calls each with every message. For chains, the kernel
// ignores the table's name, so the caller must skip the chains of other tables. The attribute of the table's name has
// the same number in all kinds of messages.
func (t Tables) dump(what string, family uint8, msg uint16, each func([]byte) error) error {
	return nftnl.List(t.Conn, "list "+what, family, msg, each, nftnl.String(unix.NFTA_RULE_TABLE, string(t.Name)))
}

// Lookup looks up elements by their keys, and returns them in the same order. For an element that does not exist, the
// result contains nil.
func (t Tables) Lookup(elements []Element) ([]*Element, error) {
	have := make([]*Element, len(elements))
	for start := 0; start < len(elements); start += GroupSize {
		var b nl.Batch
		for i := start; i < min(start+GroupSize, len(elements)); i++ {
			t.Name.getElement(&b, elements[i], func(data []byte) error {
				list := DecodeElements(elements[i].Set.Family, data)
				if len(list) == 1 && list[0].Equal(elements[i]) {
					have[i] = &list[0]
				}
				return nil
			})
		}

		// Ignore EINVAL. The kernel returns it if another program created the set with keys of another length, so the
		// set cannot have our elements.
		if err := nftnl.ExecuteGets(t.Conn, &b, unix.EINVAL); err != nil {
			return nil, err
		}
	}

	return have, nil
}

// GroupSize is the approximate number of elements that one batch looks up or changes. With this number, the answers
// fit into the default buffer of a socket (212,992 bytes).
const GroupSize = 32

// Elements lists the elements of all our sets in all families, without sentinels.
func (t Tables) Elements() (all []Element, _ error) {
	for _, family := range OurFamilies() {
		sets, err := t.setNames(family)
		if err != nil {
			return nil, err
		}
		list, err := t.ElementsOf(sets)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}

	return all, nil
}

// Inventory lists the chains, sets and elements of our table of one family. Table is false if the table does not exist.
type Inventory struct {
	family   uint8
	Table    bool
	Elements []Element
	chains   []Place
	sets     []Place
}

// Inventory reads the table's chains, its sets and their elements with several requests. It reads no rules, and leaves
// out sentinels. If something changes in between, the result may be inconsistent. A transaction with a generation from
// before the call then fails.
func (t Tables) Inventory(family uint8) (*Inventory, error) {
	inv := &Inventory{family: family}
	var b nl.Batch
	t.Name.getTable(&b, family, func([]byte) error { inv.Table = true; return nil })
	if err := nftnl.ExecuteGets(t.Conn, &b); err != nil || !inv.Table {
		return inv, err
	}

	err := t.dump("chains", family, unix.NFT_MSG_GETCHAIN, func(data []byte) error {
		if ch := nftnl.DecodeChain(data); ch.Table == string(t.Name) {
			inv.chains = append(inv.chains, Place{family, ch.Name})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}

	if inv.sets, err = t.setNames(family); err != nil {
		return nil, err
	}

	inv.Elements, err = t.ElementsOf(inv.sets)
	return inv, err
}

// RemoveNetwork deletes the chains and sets of a network from the table. If inUse is false, RemoveNetwork deletes the
// whole table, including the chains that all networks share.
func (inv *Inventory) RemoveNetwork(t *Transaction, key string, inUse bool) {
	if inv.Table && !inUse {
		t.delTable(inv.family)
		return
	}
	inv.remove(t, func(at Place) bool { return networkOf(at.Name) == key })
}

// remove deletes the chains and sets for which match returns true.
func (inv *Inventory) remove(t *Transaction, match func(Place) bool) {
	for _, at := range inv.chains {
		if match(at) {
			t.delChain(at)
		}
	}

	for _, at := range inv.sets {
		if match(at) {
			t.delSet(at)
		}
	}
}

// InUse reports whether the table contains a chain or set of a network other than key, or any element except the
// host's.
func (inv *Inventory) InUse(key string) bool {
	other := func(at Place) bool {
		owner := networkOf(at.Name)
		return owner != "" && owner != key
	}
	element := func(el Element) bool { return el.Comment != HostComment }
	return slices.ContainsFunc(inv.Elements, element) || slices.ContainsFunc(slices.Concat(inv.chains, inv.sets), other)
}

// Has reports whether the table contains a chain or set of the network, or an element that describes the network and
// not an endpoint.
func (inv *Inventory) Has(key string) bool {
	own := func(at Place) bool { return networkOf(at.Name) == key }
	return slices.ContainsFunc(slices.Concat(inv.chains, inv.sets), own) ||
		slices.ContainsFunc(inv.Elements, func(el Element) bool { return el.IsNetwork(key) })
}

// networkOf returns the key of the network that a chain or set belongs to. For chains and sets of several networks,
// it returns "".
func networkOf(name string) string {
	for _, prefix := range []string{masqueradePrefix, masquerade4Prefix, masquerade6Prefix, dedupPrefix, quietPrefix} {
		if key, ok := strings.CutPrefix(name, prefix); ok {
			return key
		}
	}
	return ""
}
