package nft

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

// place is where a chain or a set is: its name in our table of a family.
type place struct {
	family uint8 // unix.NFPROTO_*
	name   string
}

func inInet(name string) place   { return place{unix.NFPROTO_INET, name} }
func inBridge(name string) place { return place{unix.NFPROTO_BRIDGE, name} }

// tableName is the name of our tables, which is the same in each family.
type tableName string

// of is the table of a family, as errors name it.
func (name tableName) of(family uint8) nl.Name {
	return nl.Name(nftnl.FamilyName(family) + " " + string(name))
}

// label names what is in it.
func (name tableName) label(kind string, p place) label { return label{kind, p, name} }

// label names an object in errors, by its kind and its place.
type label struct {
	kind string
	place
	table tableName
}

func (l label) String() string {
	return l.kind + " " + l.name + " of table " + l.table.of(l.family).String()
}

// transaction is one of nf_tables about our tables.
type transaction struct {
	*nftnl.Transaction
	generation *uint32 // nil: any
	table      tableName
}

// begin starts a transaction. One with a generation is refused (ERESTART) if
// anything of this namespace's nf_tables has changed since: see Conn.settle.
func (name tableName) begin(generation *uint32) *transaction {
	return &transaction{nftnl.Begin(generation), generation, name}
}

// newTable makes a table, or wakes one that was made dormant.
func (t *transaction) newTable(family uint8) {
	t.Add("add table", t.table.of(family), family, unix.NFT_MSG_NEWTABLE, netlink.Create,
		nftnl.String(unix.NFTA_TABLE_NAME, string(t.table)), nftnl.Uint32(unix.NFTA_TABLE_FLAGS, 0))
}

// delTable deletes a table and all that is in it.
func (t *transaction) delTable(family uint8) {
	t.Add("delete table", t.table.of(family), family, unix.NFT_MSG_DELTABLE, 0, nftnl.String(unix.NFTA_TABLE_NAME, string(t.table)))
}

// newSet makes a set, exclusively: one with other keys must not pass for it. The
// id is any number that no other set of the transaction has.
func (t *transaction) newSet(s set, id uint32) {
	attrs := []netlink.Attribute{
		nftnl.String(unix.NFTA_SET_TABLE, string(t.table)), nftnl.String(unix.NFTA_SET_NAME, s.name),
		nftnl.Uint32(unix.NFTA_SET_FLAGS, s.flags()),
		nftnl.Uint32(unix.NFTA_SET_KEY_TYPE, s.keyType), nftnl.Uint32(unix.NFTA_SET_KEY_LEN, s.keyLen),
	}
	if s.dataLen > 0 {
		attrs = append(attrs, nftnl.Uint32(unix.NFTA_SET_DATA_TYPE, s.dataType), nftnl.Uint32(unix.NFTA_SET_DATA_LEN, s.dataLen))
	}
	t.Add("add", t.table.label("set", s.place), s.family, unix.NFT_MSG_NEWSET, netlink.Create|netlink.Excl, append(attrs,
		nftnl.Uint32(unix.NFTA_SET_ID, id), nftnl.Bytes(unix.NFTA_SET_USERDATA, s.userdata()))...)
}

// userdata tells nft the byte order of keys and of data, without which it would
// print single addresses backwards, and single names as empty.
func (s set) userdata() []byte {
	const ofEachPart, hostEndian, bigEndian = 0, 1, 2 // enum byteorder; the first one for a concatenation
	order := func(b []byte, of userdata.Type, typ uint32) []byte {
		order := uint32(bigEndian)
		switch {
		case typ >= 1<<nftnl.TypeBits:
			order = ofEachPart
		case typ == nftnl.TypeIfname:
			order = hostEndian
		}
		return userdata.Append(b, of, binary.NativeEndian.AppendUint32(nil, order))
	}
	b := order(nil, userdata.NFTNL_UDATA_SET_KEYBYTEORDER, s.keyType)
	if s.dataLen > 0 {
		b = order(b, userdata.NFTNL_UDATA_SET_DATABYTEORDER, s.dataType)
	}
	return append(b, s.typeof...)
}

// delSet deletes a set with its elements; the kernel refuses it (EBUSY) while a
// rule looks into the set.
func (t *transaction) delSet(p place) {
	t.Add("delete", t.table.label("set", p), p.family, unix.NFT_MSG_DELSET, 0, t.table.named(p, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME)...)
}

// newChain makes a base chain, for so many rules. Its userdata can only be given
// here: the kernel passes over them when a chain is changed.
func (t *transaction) newChain(ch *chain, rules int) {
	t.Add("add", t.table.label("chain", ch.place), ch.family, unix.NFT_MSG_NEWCHAIN, netlink.Create|netlink.Excl,
		nftnl.String(unix.NFTA_CHAIN_TABLE, string(t.table)), nftnl.String(unix.NFTA_CHAIN_NAME, ch.name),
		nftnl.Nest(unix.NFTA_CHAIN_HOOK,
			nftnl.Uint32(unix.NFTA_HOOK_HOOKNUM, ch.hook), nftnl.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(ch.priority))),
		nftnl.Uint32(unix.NFTA_CHAIN_POLICY, policyAccept), nftnl.String(unix.NFTA_CHAIN_TYPE, ch.kind),
		nftnl.Bytes(nftnl.ChainUserdata, nftnl.Comment(ch.comment(rules))))
}

const policyAccept = uint32(expr.VerdictAccept)

// delChain deletes a chain and its rules. A transaction may make one of the same
// name: packets see either the old one or the new one.
func (t *transaction) delChain(p place) {
	t.Add("delete", t.table.label("chain", p), p.family, unix.NFT_MSG_DELCHAIN, 0, t.table.named(p, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME)...)
}

// newRule appends a rule to a chain.
func (t *transaction) newRule(chain place, r rule) {
	op := fmt.Sprintf("add rule %q to", r.comment)
	t.AddRule(op, t.table.label("chain", chain), chain.family, netlink.Append, r.comment, r.steps, t.table.named(chain, unix.NFTA_RULE_TABLE, unix.NFTA_RULE_CHAIN)...)
}

func (r *rule) steps(x *nftnl.Expressions) { r.write(expressions{x}) }

// newElement adds an element exclusively: without NLM_F_EXCL the kernel takes one
// that is there for a success and keeps its comment, so that it stays another's.
func (t *transaction) newElement(el element, comment string) {
	t.putElement(el, comment, netlink.Excl)
}

// shareElement adds an element that may be there already, and is then left as it is.
func (t *transaction) shareElement(el element, comment string) { t.putElement(el, comment, 0) }

func (t *transaction) putElement(el element, comment string, flags netlink.HeaderFlags) {
	t.Add("add element", el, el.set.family, unix.NFT_MSG_NEWSETELEM, netlink.Create|flags, t.table.elementAttributes(el, comment)...)
}

// delElement deletes an element by its key, whoever's it is.
func (t *transaction) delElement(el element) {
	t.Add("delete element", el, el.set.family, unix.NFT_MSG_DELSETELEM, 0, t.table.elementAttributes(element{set: el.set, key: el.key}, "")...)
}

// elementAttributes is the list of one element, with which they are added, got and
// deleted.
func (name tableName) elementAttributes(el element, comment string) []netlink.Attribute {
	const list, entry, key = 2, 3, 4 // where the headers are
	attrs := append(name.named(el.set, unix.NFTA_SET_ELEM_LIST_TABLE, unix.NFTA_SET_ELEM_LIST_SET),
		netlink.Attribute{}, netlink.Attribute{}, netlink.Attribute{}, nftnl.Bytes(unix.NFTA_DATA_VALUE, el.key))
	attrs[key] = nftnl.Header(unix.NFTA_SET_ELEM_KEY, attrs[key+1:])
	if len(el.data) > 0 {
		value := nftnl.Bytes(unix.NFTA_DATA_VALUE, el.data)
		attrs = append(attrs, nftnl.Header(unix.NFTA_SET_ELEM_DATA, []netlink.Attribute{value}), value)
	}
	if comment != "" {
		attrs = append(attrs, nftnl.Bytes(unix.NFTA_SET_ELEM_USERDATA, nftnl.Comment(comment)))
	}
	attrs[entry] = nftnl.Header(unix.NFTA_LIST_ELEM, attrs[key:])
	attrs[list] = nftnl.Header(unix.NFTA_SET_ELEM_LIST_ELEMENTS, attrs[entry:])
	return attrs
}

// named gives the attributes that say which table and which chain or set is meant, and
// room for those of an element. Both names share their memory.
func (name tableName) named(p place, table, object uint16) []netlink.Attribute {
	names := string(name) + "\x00" + p.name + "\x00"
	b, n := []byte(names), len(name)+1
	return append(make([]netlink.Attribute, 0, 9), nftnl.Bytes(table, b[:n:n]), nftnl.Bytes(object, b[n:]))
}

func (c *Conn) generation() (uint32, error) { return nftnl.Generation(c.nl) }

// settle gives the generation that whatever is read next belongs to, or to a later one.
func (c *Conn) settle() (uint32, error) { return nftnl.SeenGeneration(c.nl) }

// unchanged fails (ERESTART) unless the generation is still that.
func (c *Conn) unchanged(generation uint32) error { return nftnl.Unchanged(c.nl, generation) }

func (name tableName) getTable(b *nl.Batch, family uint8, reply func([]byte) error) {
	nftnl.Get(b, name.of(family), family, unix.NFT_MSG_GETTABLE, reply, nftnl.String(unix.NFTA_TABLE_NAME, string(name)))
}

func (name tableName) getChain(b *nl.Batch, p place, reply func([]byte) error) {
	nftnl.Get(b, name.label("chain", p), p.family, unix.NFT_MSG_GETCHAIN, reply, name.named(p, unix.NFTA_CHAIN_TABLE, unix.NFTA_CHAIN_NAME)...)
}

func (name tableName) getSet(b *nl.Batch, p place, reply func([]byte) error) {
	nftnl.Get(b, name.label("set", p), p.family, unix.NFT_MSG_GETSET, reply, name.named(p, unix.NFTA_SET_TABLE, unix.NFTA_SET_NAME)...)
}

func (name tableName) getElement(b *nl.Batch, el element, reply func([]byte) error) {
	nftnl.Get(b, el, el.set.family, unix.NFT_MSG_GETSETELEM, reply, name.elementAttributes(element{set: el.set, key: el.key}, "")...)
}

// The listings below are of our table of a family alone, but for that of chains,
// which the kernel does not narrow down to a table.

func (c *Conn) dumpChains(family uint8, each func([]byte) error) error {
	return c.dump("list chains", family, unix.NFT_MSG_GETCHAIN, each)
}

func (c *Conn) dumpSets(family uint8, each func([]byte) error) error {
	return c.dump("list sets", family, unix.NFT_MSG_GETSET, each, nftnl.String(unix.NFTA_SET_TABLE, string(c.table)))
}

func (c *Conn) dumpElements(set place, each func([]byte) error) error {
	return c.dump("list elements of set "+set.name, set.family, unix.NFT_MSG_GETSETELEM, each,
		c.table.named(set, unix.NFTA_SET_ELEM_LIST_TABLE, unix.NFTA_SET_ELEM_LIST_SET)...)
}

func (c *Conn) dumpRules(family uint8, each func([]byte) error) error {
	return c.dump("list rules", family, unix.NFT_MSG_GETRULE, each, nftnl.String(unix.NFTA_RULE_TABLE, string(c.table)))
}

func (c *Conn) dump(op string, family uint8, msg uint16, each func([]byte) error, attrs ...netlink.Attribute) error {
	return nftnl.List(c.nl, op, family, msg, each, attrs...)
}
