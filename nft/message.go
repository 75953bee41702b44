package nft

import (
	"encoding/binary"
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// place is where a chain or a set is: its name in our table of a family.
type place struct {
	family uint8 // unix.NFPROTO_*
	name   string
}

func inInet(name string) place   { return place{unix.NFPROTO_INET, name} }
func inBridge(name string) place { return place{unix.NFPROTO_BRIDGE, name} }

// table is one of our tables, as errors name it.
func table(family uint8) nl.Name { return nl.Name(familyName(family) + " " + tableName) }

func (p place) table() nl.Name { return table(p.family) }

func familyName(family uint8) string {
	switch family {
	case unix.NFPROTO_INET:
		return "inet"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	case unix.NFPROTO_IPV4:
		return "ip"
	case unix.NFPROTO_IPV6:
		return "ip6"
	}
	return strconv.Itoa(int(family))
}

// label names an object in errors, by its kind and its place.
type label struct {
	kind string
	place
}

func (l label) String() string { return l.kind + " " + l.name + " of table " + l.table().String() }

// nfTables is what a transaction as a whole is about.
const nfTables = nl.Name("nf_tables")

// messageType gives the netlink message type of an NFT_MSG_*.
func messageType(msg uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | msg }

// header appends struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h).
// Messages that begin and end a transaction name a subsystem as their resource.
func header(e *nl.Encoder, family uint8, resource uint16) {
	e.Raw([]byte{family, unix.NFNETLINK_V0, byte(resource >> 8), byte(resource)})
}

// transaction is a row of changes of which the kernel makes all or none, and which
// packets, listings and other programs see at once. The attributes of its messages
// are those of include/uapi/linux/netfilter/nf_tables.h.
type transaction struct {
	b          nl.Batch
	generation *uint32 // nil: any
}

// begin starts a transaction. One with a generation is refused (ERESTART) if
// anything of this namespace's nf_tables has changed since: see Conn.settle.
func begin(generation *uint32) *transaction {
	t := &transaction{generation: generation}
	t.b.Silent("change", nfTables, unix.NFNL_MSG_BATCH_BEGIN, 0, func(e *nl.Encoder) {
		header(e, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
		if generation != nil {
			e.Uint32BE(unix.NFNL_BATCH_GENID, *generation)
		}
	})
	return t
}

// empty says that nothing would change.
func (t *transaction) empty() bool { return t.b.Len() == 1 }

// add appends a change. One acknowledgement is enough to know that the kernel has
// worked through all, and one for each would overflow the socket's buffer; Linux
// before 6.10 gives none for the message that ends a transaction.
func (t *transaction) add(op string, obj fmt.Stringer, family uint8, msg, flags uint16, body func(*nl.Encoder)) {
	full := func(e *nl.Encoder) {
		header(e, family, 0)
		body(e)
	}
	if t.empty() {
		t.b.Request(op, obj, messageType(msg), flags, full)
	} else {
		t.b.Silent(op, obj, messageType(msg), flags, full)
	}
}

func (t *transaction) end() {
	t.b.Silent("change", nfTables, unix.NFNL_MSG_BATCH_END, 0, func(e *nl.Encoder) {
		header(e, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	})
}

// commit puts a transaction to the kernel. Its error is that of the first change
// that was refused, or of the transaction as a whole.
func (c *Conn) commit(t *transaction) error {
	if t.empty() {
		return nil
	}
	t.end()
	return c.nl.Execute(&t.b)
}

// newTable makes a table, or wakes one that was made dormant.
func (t *transaction) newTable(family uint8) {
	t.add("add table", table(family), family, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, func(e *nl.Encoder) {
		e.String(unix.NFTA_TABLE_NAME, tableName)
		e.Uint32BE(unix.NFTA_TABLE_FLAGS, 0)
	})
}

// delTable deletes a table and all that is in it.
func (t *transaction) delTable(family uint8) {
	t.add("delete table", table(family), family, unix.NFT_MSG_DELTABLE, 0, func(e *nl.Encoder) {
		e.String(unix.NFTA_TABLE_NAME, tableName)
	})
}

// newSet makes a set, exclusively: one with other keys must not pass for it. The
// id is any number that no other set of the transaction has.
func (t *transaction) newSet(s set, id uint32) {
	t.add("add", label{"set", s.place}, s.family, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
		e.String(unix.NFTA_SET_TABLE, tableName)
		e.String(unix.NFTA_SET_NAME, s.name)
		e.Uint32BE(unix.NFTA_SET_FLAGS, s.flags())
		e.Uint32BE(unix.NFTA_SET_KEY_TYPE, s.keyType)
		e.Uint32BE(unix.NFTA_SET_KEY_LEN, s.keyLen)
		if s.dataLen > 0 {
			e.Uint32BE(unix.NFTA_SET_DATA_TYPE, s.dataType)
			e.Uint32BE(unix.NFTA_SET_DATA_LEN, s.dataLen)
		}
		e.Uint32BE(unix.NFTA_SET_ID, id)
		e.Bytes(unix.NFTA_SET_USERDATA, s.userdata())
	})
}

// userdata tells nft the byte order of keys and of data, without which it would
// print single addresses backwards, and single names as empty.
func (s set) userdata() []byte {
	const ofKey, ofData = 0, 1                        // NFTNL_UDATA_SET_KEYBYTEORDER, _DATABYTEORDER
	const ofEachPart, hostEndian, bigEndian = 0, 1, 2 // enum byteorder; the first one for a concatenation
	order := func(b []byte, of byte, typ uint32) []byte {
		order := uint32(bigEndian)
		switch {
		case typ >= 1<<typeBits:
			order = ofEachPart
		case typ == typeIfname:
			order = hostEndian
		}
		return binary.NativeEndian.AppendUint32(append(b, of, 4), order)
	}
	b := order(nil, ofKey, s.keyType)
	if s.dataLen > 0 {
		b = order(b, ofData, s.dataType)
	}
	return append(b, s.typeof...)
}

// delSet deletes a set with its elements; the kernel refuses it (EBUSY) while a
// rule looks into the set.
func (t *transaction) delSet(p place) {
	t.add("delete", label{"set", p}, p.family, unix.NFT_MSG_DELSET, 0, func(e *nl.Encoder) {
		e.String(unix.NFTA_SET_TABLE, tableName)
		e.String(unix.NFTA_SET_NAME, p.name)
	})
}

// newChain makes a base chain, for so many rules. Its userdata can only be given
// here: the kernel passes over them when a chain is changed.
func (t *transaction) newChain(ch *chain, rules int) {
	t.add("add", label{"chain", ch.place}, ch.family, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
		e.String(unix.NFTA_CHAIN_TABLE, tableName)
		e.String(unix.NFTA_CHAIN_NAME, ch.name)
		e.Nest(unix.NFTA_CHAIN_HOOK, func(e *nl.Encoder) {
			e.Uint32BE(unix.NFTA_HOOK_HOOKNUM, ch.hook)
			e.Uint32BE(unix.NFTA_HOOK_PRIORITY, uint32(ch.priority))
		})
		e.Uint32BE(unix.NFTA_CHAIN_POLICY, policyAccept)
		e.String(unix.NFTA_CHAIN_TYPE, ch.kind)
		e.Bytes(chainUserdata, encodeComment(ch.comment(rules)))
	})
}

const (
	policyAccept  = 1  // NF_ACCEPT
	chainUserdata = 12 // NFTA_CHAIN_USERDATA, Linux 5.10
)

// delChain deletes a chain and its rules. A transaction may make one of the same
// name: packets see either the old one or the new one.
func (t *transaction) delChain(p place) {
	t.add("delete", label{"chain", p}, p.family, unix.NFT_MSG_DELCHAIN, 0, func(e *nl.Encoder) {
		e.String(unix.NFTA_CHAIN_TABLE, tableName)
		e.String(unix.NFTA_CHAIN_NAME, p.name)
	})
}

// newRule appends a rule to a chain.
func (t *transaction) newRule(chain place, r rule) {
	op := fmt.Sprintf("add rule %q to", r.comment)
	t.add(op, label{"chain", chain}, chain.family, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(e *nl.Encoder) {
		e.String(unix.NFTA_RULE_TABLE, tableName)
		e.String(unix.NFTA_RULE_CHAIN, chain.name)
		e.Nest(unix.NFTA_RULE_EXPRESSIONS, func(e *nl.Encoder) { r.write(expressions{e}) })
		e.Bytes(unix.NFTA_RULE_USERDATA, encodeComment(r.comment))
	})
}

// newElement adds an element exclusively: without NLM_F_EXCL the kernel takes one
// that is there for a success and keeps its comment, so that it stays another's.
func (t *transaction) newElement(el element, comment string) {
	t.putElement(el, comment, unix.NLM_F_EXCL)
}

// shareElement adds an element that may be there already, and is then left as it is.
func (t *transaction) shareElement(el element, comment string) { t.putElement(el, comment, 0) }

func (t *transaction) putElement(el element, comment string, flags uint16) {
	t.add("add element", el, el.set.family, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE|flags, func(e *nl.Encoder) {
		elementBody(e, el, comment)
	})
}

// delElement deletes an element by its key, whoever's it is.
func (t *transaction) delElement(el element) {
	t.add("delete element", el, el.set.family, unix.NFT_MSG_DELSETELEM, 0, func(e *nl.Encoder) {
		elementBody(e, element{set: el.set, key: el.key}, "")
	})
}

// elementBody is the list of one element, with which they are added, got and
// deleted.
func elementBody(e *nl.Encoder, el element, comment string) {
	e.String(unix.NFTA_SET_ELEM_LIST_TABLE, tableName)
	e.String(unix.NFTA_SET_ELEM_LIST_SET, el.set.name)
	e.Nest(unix.NFTA_SET_ELEM_LIST_ELEMENTS, func(e *nl.Encoder) {
		e.Nest(unix.NFTA_LIST_ELEM, func(e *nl.Encoder) {
			value(e, unix.NFTA_SET_ELEM_KEY, el.key)
			if len(el.data) > 0 {
				value(e, unix.NFTA_SET_ELEM_DATA, el.data)
			}
			if comment != "" {
				e.Bytes(unix.NFTA_SET_ELEM_USERDATA, encodeComment(comment))
			}
		})
	})
}

// get appends a request for one object of our table of a family, which is answered
// by ENOENT where it is not there.
func get(b *nl.Batch, obj fmt.Stringer, family uint8, msg uint16, body func(*nl.Encoder), reply func([]byte) error) {
	b.Get("get", obj, messageType(msg), 0, func(e *nl.Encoder) {
		header(e, family, 0)
		body(e)
	}, func(m nl.Message) error { return replyBody(m, reply) })
}

// generation reads the number that every transaction in this namespace counts up,
// whoever's it is.
func (c *Conn) generation() (uint32, error) {
	var b nl.Batch
	var generation uint32
	b.Get("get generation of nf_tables", nil, messageType(unix.NFT_MSG_GETGEN), 0, func(e *nl.Encoder) {
		header(e, unix.AF_UNSPEC, 0)
	}, func(m nl.Message) error {
		return replyBody(m, func(data []byte) error {
			var err error
			generation, err = decodeGeneration(data)
			return err
		})
	})
	err := c.nl.Execute(&b)
	return generation, err
}

// settle gives the generation that whatever is read next belongs to, or to a later
// one. Kernels (6.1 does) count up a moment before the changes can be seen, so that
// a new number could go with an old view.
func (c *Conn) settle() (uint32, error) {
	generation, err := c.generation()
	if err == nil {
		err = c.unchanged(generation)
	}
	return generation, err
}

// unchanged waits for a transaction that the kernel is at, and fails (ERESTART)
// unless it is that of the generation: by one that changes nothing.
func (c *Conn) unchanged(generation uint32) error {
	t := begin(&generation)
	t.end()
	return c.nl.Execute(&t.b)
}

func getTable(b *nl.Batch, family uint8, reply func([]byte) error) {
	get(b, table(family), family, unix.NFT_MSG_GETTABLE, func(e *nl.Encoder) {
		e.String(unix.NFTA_TABLE_NAME, tableName)
	}, reply)
}

func getChain(b *nl.Batch, p place, reply func([]byte) error) {
	get(b, label{"chain", p}, p.family, unix.NFT_MSG_GETCHAIN, func(e *nl.Encoder) {
		e.String(unix.NFTA_CHAIN_TABLE, tableName)
		e.String(unix.NFTA_CHAIN_NAME, p.name)
	}, reply)
}

func getSet(b *nl.Batch, p place, reply func([]byte) error) {
	get(b, label{"set", p}, p.family, unix.NFT_MSG_GETSET, func(e *nl.Encoder) {
		e.String(unix.NFTA_SET_TABLE, tableName)
		e.String(unix.NFTA_SET_NAME, p.name)
	}, reply)
}

func getElement(b *nl.Batch, el element, reply func([]byte) error) {
	get(b, el, el.set.family, unix.NFT_MSG_GETSETELEM, func(e *nl.Encoder) {
		elementBody(e, element{set: el.set, key: el.key}, "")
	}, reply)
}

// The listings below are of our table of a family alone, but for that of chains,
// which the kernel does not narrow down to a table.

func (c *Conn) dumpChains(family uint8, each func([]byte) error) error {
	return c.dump("list chains", family, unix.NFT_MSG_GETCHAIN, func(*nl.Encoder) {}, each)
}

func (c *Conn) dumpSets(family uint8, each func([]byte) error) error {
	return c.dump("list sets", family, unix.NFT_MSG_GETSET, func(e *nl.Encoder) {
		e.String(unix.NFTA_SET_TABLE, tableName)
	}, each)
}

func (c *Conn) dumpElements(set place, each func([]byte) error) error {
	return c.dump("list elements of set "+set.name, set.family, unix.NFT_MSG_GETSETELEM, func(e *nl.Encoder) {
		e.String(unix.NFTA_SET_ELEM_LIST_TABLE, tableName)
		e.String(unix.NFTA_SET_ELEM_LIST_SET, set.name)
	}, each)
}

func (c *Conn) dumpRules(family uint8, each func([]byte) error) error {
	return c.dump("list rules", family, unix.NFT_MSG_GETRULE, func(e *nl.Encoder) {
		e.String(unix.NFTA_RULE_TABLE, tableName)
	}, each)
}

func (c *Conn) dump(op string, family uint8, msg uint16, body func(*nl.Encoder), each func([]byte) error) error {
	return c.nl.Dump(op, messageType(msg), func(e *nl.Encoder) {
		header(e, family, 0)
		body(e)
	}, func(m nl.Message) error { return replyBody(m, each) })
}
