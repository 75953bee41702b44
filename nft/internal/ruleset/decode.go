package ruleset

import (
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// setState is a set as the kernel has it: NFT_MSG_NEWSET.
type setState struct {
	flags    uint32
	keyType  uint32
	keyLen   uint32
	dataType uint32 // of a map
	dataLen  uint32
}

func decodeSet(b []byte) (name string, s setState, _ error) {
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_SET_NAME:
			name = ad.String()
		case unix.NFTA_SET_FLAGS:
			s.flags = ad.Uint32()
		case unix.NFTA_SET_KEY_TYPE:
			s.keyType = ad.Uint32()
		case unix.NFTA_SET_KEY_LEN:
			s.keyLen = ad.Uint32()
		case unix.NFTA_SET_DATA_TYPE:
			s.dataType = ad.Uint32()
		case unix.NFTA_SET_DATA_LEN:
			s.dataLen = ad.Uint32()
		}
		return nil
	})
	return name, s, err
}

// decodeRule gives a rule's chain and its comment; a rule without one has an
// empty comment.
func decodeRule(b []byte) (chain, comment string, _ error) {
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_RULE_CHAIN:
			chain, _, _ = strings.Cut(ad.String(), "\x00")
		case unix.NFTA_RULE_USERDATA:
			comment, _ = nftnl.CommentOf(ad.Bytes())
		}
		return nil
	})
	return chain, comment, err
}

// ElementState is an element as the kernel has it. One without a comment, or with
// another program's, may stand in any of our sets.
type ElementState struct {
	Element
	Comment string
}

// DecodeElements takes apart a message that lists elements of one set
// (NFT_MSG_NEWSETELEM); a listing consists of several.
func DecodeElements(family uint8, b []byte) ([]ElementState, error) {
	var list []ElementState
	set := Place{Family: family}
	err := nftnl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.NFTA_SET_ELEM_LIST_SET:
			set.Name = ad.String()
		case unix.NFTA_SET_ELEM_LIST_ELEMENTS:
			return nftnl.Nested(ad, func(ad *netlink.AttributeDecoder) error {
				list = append(list, decodeElement(ad.Bytes()))
				return nil
			})
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].Set = set
	}
	return list, nil
}

func decodeElement(b []byte) ElementState {
	comment, _ := nftnl.CommentOf(nftnl.Find(b, unix.NFTA_SET_ELEM_USERDATA))
	return ElementState{Element{
		Key:  nftnl.Find(b, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE),
		Data: nftnl.Find(b, unix.NFTA_SET_ELEM_DATA, unix.NFTA_DATA_VALUE),
	}, comment}
}
