package ruleset

import (
	"encoding/binary"
	"fmt"

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
func (t Tables) Begin(generation *uint32) *Transaction { return t.Name.begin(generation) }

func (name TableName) begin(generation *uint32) *Transaction {
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
		nftnl.Uint32(unix.NFTA_SET_FLAGS, s.flags()),
		nftnl.Uint32(unix.NFTA_SET_KEY_TYPE, s.KeyType), nftnl.Uint32(unix.NFTA_SET_KEY_LEN, s.KeyLen),
	}
	if s.intervals {
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

// userdata returns the set's userdata, which contains the byte order of keys and data for nft. Without it, nft would
// print single addresses backwards, and single link names as empty.
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

// newChain appends the request that creates a base chain with a comment. The comment contains rules, the number of
// rules that the chain will have. A chain can get a comment only when it is created: the kernel ignores userdata in
// later changes.
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
func (t *Transaction) NewElement(el Element, comment string) {
	t.Add("add element", el, el.Set.Family, unix.NFT_MSG_NEWSETELEM, netlink.Create|netlink.Excl,
		t.table.ElementAttributes(el, comment)...)
}

// DelElement deletes an element by its key, regardless of its comment.
func (t *Transaction) DelElement(el Element) {
	t.Add("delete element", el, el.Set.Family, unix.NFT_MSG_DELSETELEM, 0,
		t.table.ElementAttributes(Element{Set: el.Set, Key: el.Key, End: el.End}, "")...)
}

// ElementAttributes returns the attributes of a message that adds, gets or deletes one element.
func (name TableName) ElementAttributes(el Element, comment string) []netlink.Attribute {
	const list, entry, key = 2, 3, 4 // the indexes of the headers
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

	if comment != "" {
		attrs = append(attrs, nftnl.Bytes(unix.NFTA_SET_ELEM_USERDATA, nftnl.Comment(comment)))
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
		name.ElementAttributes(Element{Set: el.Set, Key: el.Key, End: el.End}, "")...)
}
