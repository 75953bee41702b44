package nftnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Bytes is an attribute of bytes, which are kept.
func Bytes(typ uint16, b []byte) netlink.Attribute { return netlink.Attribute{Type: typ, Data: b} }

// String is an attribute of a string and a NUL.
func String(typ uint16, s string) netlink.Attribute {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return Bytes(typ, b)
}

// Uint32 is an attribute of a number, which nf_tables has in network order.
func Uint32(typ uint16, v uint32) netlink.Attribute {
	return Bytes(typ, binary.BigEndian.AppendUint32(make([]byte, 0, 4), v))
}

// Uint64 is the same for eight bytes.
func Uint64(typ uint16, v uint64) netlink.Attribute {
	return Bytes(typ, binary.BigEndian.AppendUint64(make([]byte, 0, 8), v))
}

// Nest is an attribute of attributes. Where those cannot be written, neither can it.
func Nest(typ uint16, attrs ...netlink.Attribute) netlink.Attribute {
	b, err := marshal(attrs)
	if err != nil {
		return netlink.Attribute{Type: typ, Length: invalid}
	}
	return Bytes(netlink.Nested|typ, b)
}

// Header is Nest without memory of its own, for what an ADD sends: the attribute's header
// alone, which those that it holds are to follow. Headers among them count as such.
func Header(typ uint16, held []netlink.Attribute) netlink.Attribute {
	n := unix.NLA_HDRLEN
	for i := range held {
		n += unix.NLA_HDRLEN + (len(held[i].Data)+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)
	}
	if n > math.MaxUint16 {
		n = invalid
	}
	return netlink.Attribute{Type: netlink.Nested | typ, Length: uint16(n)}
}

// invalid is a length that MarshalAttributes refuses: it is shorter than a header.
const invalid = 1

// marshal writes attributes. The library's function cuts lengths down to 16 bits.
func marshal(attrs []netlink.Attribute) ([]byte, error) {
	for i := range attrs {
		if len(attrs[i].Data) > math.MaxUint16-unix.NLA_HDRLEN {
			return nil, fmt.Errorf("attribute %d: %w", attrs[i].Type&^netlink.Nested, errTooLong)
		}
	}
	return netlink.MarshalAttributes(attrs)
}

var errTooLong = errors.New("attribute is longer than 65,531 bytes")

// headerLen is the length of struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h).
const headerLen = 4

// message puts a request together in some memory. Messages that begin and end a
// transaction name a subsystem as their resource.
func message(buf []byte, typ netlink.HeaderType, flags netlink.HeaderFlags, family uint8, resource uint16, attrs []netlink.Attribute) (netlink.Message, error) {
	b, err := marshal(attrs)
	data := binary.BigEndian.AppendUint16(append(slices.Grow(buf[:0], headerLen+len(b)), family, unix.NFNETLINK_V0), resource)
	return netlink.Message{Header: netlink.Header{Type: typ, Flags: flags}, Data: append(data, b...)}, err
}

// Type gives the netlink message type of an NFT_MSG_*.
func Type(msg uint16) netlink.HeaderType {
	return netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | msg)
}

// body hands on a reply's attributes, without struct nfgenmsg. An error matches nl.ErrMalformed.
func body(reply func([]byte) error) func(netlink.Message) error {
	return func(m netlink.Message) error {
		if len(m.Data) < headerLen {
			return fmt.Errorf("%w: a reply of %d bytes", nl.ErrMalformed, len(m.Data))
		}
		attrs := m.Data[headerLen:]
		if err := nl.Decode(attrs, func(*netlink.AttributeDecoder) error { return nil }); err != nil {
			return err
		}
		return reply(attrs)
	}
}

// Each calls fn with what is in each attribute of a list.
func Each(list []byte, fn func([]byte)) {
	// Of a list that does not parse, fn gets what there is.
	_ = nl.Decode(list, func(ad *netlink.AttributeDecoder) error { fn(ad.Bytes()); return nil })
}

// Find gives what is in an attribute of others, or in one within that, and so on; nil where there is none. It takes no
// memory of its own.
func Find(b []byte, path ...uint16) []byte {
	for _, typ := range path {
		before, behind := nl.Cut(b, typ)
		if behind == nil {
			return nil
		}
		n := int(binary.NativeEndian.Uint16(b[len(before):])) - unix.NLA_HDRLEN
		b = behind[:min(n, len(behind))]
	}
	return b
}

// Text is what is before a NUL.
func Text(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

// Number is one of four bytes, and 0 if it has others.
func Number(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// Number64 is one of eight bytes, and 0 if it has others.
func Number64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

// Comment makes userdata of a text, as libnftables does: a type of one byte, a length of
// one byte, and the text with a NUL. It is the same for rules, chains and elements.
func Comment(text string) []byte {
	return userdata.AppendString(make([]byte, 0, 2+len(text)+1), userdata.TypeComment, text)
}

// CommentOf finds the comment in userdata, which may be anyone's and anything: Get of
// package userdata panics where a length is too large.
func CommentOf(b []byte) (string, bool) {
	for len(b) >= 2 {
		typ, n := userdata.Type(b[0]), int(b[1])
		if n > len(b)-2 {
			return "", false
		}
		if typ == userdata.TypeComment {
			text, _, _ := strings.Cut(string(b[2:2+n]), "\x00")
			return text, true
		}
		b = b[2+n:]
	}
	return "", false
}
