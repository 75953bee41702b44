package nft

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// replyBody hands on a reply's attributes, without struct nfgenmsg.
func replyBody(m nl.Message, reply func([]byte) error) error {
	const headerLen = 4
	if len(m.Data) < headerLen {
		return fmt.Errorf("%w: a reply of %d bytes", nl.ErrMalformed, len(m.Data))
	}
	return reply(m.Data[headerLen:])
}

// decodeGeneration reads a reply of NFT_MSG_NEWGEN.
func decodeGeneration(b []byte) (uint32, error) {
	var generation uint32
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		if attrs.Type == unix.NFTA_GEN_ID {
			generation = attrs.Uint32BE()
		}
	}
	return generation, attrs.Err()
}

// tableState is our table as the kernel has it: NFT_MSG_NEWTABLE.
type tableState struct{ flags uint32 }

func decodeTable(b []byte) (tableState, error) {
	var t tableState
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		if attrs.Type == unix.NFTA_TABLE_FLAGS {
			t.flags = attrs.Uint32BE()
		}
	}
	return t, attrs.Err()
}

// chainState is a chain as the kernel has it: NFT_MSG_NEWCHAIN. A chain that is no
// base chain has no kind, and nothing calls it but rules of the table.
type chainState struct {
	table, name string
	kind        string
	hook        uint32
	priority    int32
	policy      uint32
	uses        uint32 // how many rules it has, and jumps there are to it
	comment     string
}

func decodeChain(b []byte) (chainState, error) {
	var ch chainState
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_CHAIN_TABLE:
			ch.table = attrs.String()
		case unix.NFTA_CHAIN_NAME:
			ch.name = attrs.String()
		case unix.NFTA_CHAIN_TYPE:
			ch.kind = attrs.String()
		case unix.NFTA_CHAIN_POLICY:
			ch.policy = attrs.Uint32BE()
		case unix.NFTA_CHAIN_USE:
			ch.uses = attrs.Uint32BE()
		case chainUserdata:
			ch.comment, _ = decodeComment(attrs.Data)
		case unix.NFTA_CHAIN_HOOK:
			hook := attrs.Nested()
			for hook.Next() {
				switch hook.Type {
				case unix.NFTA_HOOK_HOOKNUM:
					ch.hook = hook.Uint32BE()
				case unix.NFTA_HOOK_PRIORITY:
					ch.priority = int32(hook.Uint32BE())
				}
			}
			if err := hook.Err(); err != nil {
				return ch, err
			}
		}
	}
	return ch, attrs.Err()
}

// setState is a set as the kernel has it: NFT_MSG_NEWSET.
type setState struct {
	flags    uint32
	keyType  uint32
	keyLen   uint32
	dataType uint32 // of a map
	dataLen  uint32
}

func decodeSet(b []byte) (name string, s setState, _ error) {
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_SET_NAME:
			name = attrs.String()
		case unix.NFTA_SET_FLAGS:
			s.flags = attrs.Uint32BE()
		case unix.NFTA_SET_KEY_TYPE:
			s.keyType = attrs.Uint32BE()
		case unix.NFTA_SET_KEY_LEN:
			s.keyLen = attrs.Uint32BE()
		case unix.NFTA_SET_DATA_TYPE:
			s.dataType = attrs.Uint32BE()
		case unix.NFTA_SET_DATA_LEN:
			s.dataLen = attrs.Uint32BE()
		}
	}
	return name, s, attrs.Err()
}

// decodeRule gives a rule's chain and its comment; a rule without one has an
// empty comment.
func decodeRule(b []byte) (chain, comment string, _ error) {
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_RULE_CHAIN:
			chain = attrs.String()
		case unix.NFTA_RULE_USERDATA:
			comment, _ = decodeComment(attrs.Data)
		}
	}
	return chain, comment, attrs.Err()
}

// elementState is an element as the kernel has it. One without a comment, or with
// another program's, may stand in any of our sets.
type elementState struct {
	element
	comment string
}

// owner is what the comment says; it is false for elements that are not ours.
func (e elementState) owner() (owner Owner, networkKey string, ok bool) { return parseOwner(e.comment) }

// decodeElements takes apart a message that lists elements of one set
// (NFT_MSG_NEWSETELEM); a listing consists of several.
func decodeElements(family uint8, b []byte) ([]elementState, error) {
	var list []elementState
	set := place{family: family}
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_SET_ELEM_LIST_SET:
			set.name = attrs.String()
		case unix.NFTA_SET_ELEM_LIST_ELEMENTS:
			elements := attrs.Nested()
			for elements.Next() {
				el, err := decodeElement(elements.Data)
				if err != nil {
					return nil, err
				}
				list = append(list, el)
			}
			if err := elements.Err(); err != nil {
				return nil, err
			}
		}
	}
	for i := range list {
		list[i].set = set
	}
	return list, attrs.Err()
}

func decodeElement(b []byte) (elementState, error) {
	var el elementState
	attrs := nl.ParseAttrs(b)
	for attrs.Next() {
		switch attrs.Type {
		case unix.NFTA_SET_ELEM_KEY:
			var err error
			if el.key, err = decodeValue(attrs.Nested()); err != nil {
				return el, err
			}
		case unix.NFTA_SET_ELEM_DATA:
			var err error
			if el.data, err = decodeValue(attrs.Nested()); err != nil {
				return el, err
			}
		case unix.NFTA_SET_ELEM_USERDATA:
			el.comment, _ = decodeComment(attrs.Data)
		}
	}
	return el, attrs.Err()
}

// decodeValue reads the bytes of a key or of data; a verdict has none.
func decodeValue(attrs *nl.Attrs) ([]byte, error) {
	var v []byte
	for attrs.Next() {
		if attrs.Type == unix.NFTA_DATA_VALUE {
			v = append([]byte(nil), attrs.Data...)
		}
	}
	return v, attrs.Err()
}
