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

// Bytes returns an attribute with the data b. It does not copy b.
func Bytes(typ uint16, b []byte) netlink.Attribute { return netlink.Attribute{Type: typ, Data: b} }

// String returns an attribute with a string that ends with a NUL.
func String(typ uint16, s string) netlink.Attribute {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return Bytes(typ, b)
}

// Uint32 returns an attribute with a number of four bytes in network byte order, as nf_tables expects.
func Uint32(typ uint16, v uint32) netlink.Attribute {
	return Bytes(typ, binary.BigEndian.AppendUint32(make([]byte, 0, 4), v))
}

// Uint64 returns an attribute with a number of eight bytes in network byte order.
func Uint64(typ uint16, v uint64) netlink.Attribute {
	return Bytes(typ, binary.BigEndian.AppendUint64(make([]byte, 0, 8), v))
}

// Nest returns an attribute that contains attrs. If they are too long, encoding the result fails.
func Nest(typ uint16, attrs ...netlink.Attribute) netlink.Attribute {
	b, err := marshal(attrs)
	if err != nil {
		return netlink.Attribute{Type: typ, Length: invalid}
	}
	return Bytes(netlink.Nested|typ, b)
}

// Header returns the header of a nested attribute without its content. The attributes in nested are the content, and
// must follow the header directly in the message. Header makes no allocation, unlike Nest, so messages of an ADD use
// it. If nested contains another Header, only the header itself is counted, since its content must be in nested too.
func Header(typ uint16, nested []netlink.Attribute) netlink.Attribute {
	n := unix.NLA_HDRLEN
	for i := range nested {
		n += unix.NLA_HDRLEN + (len(nested[i].Data)+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)
	}
	if n > math.MaxUint16 {
		n = invalid
	}
	return netlink.Attribute{Type: netlink.Nested | typ, Length: uint16(n)}
}

// invalid is a length that MarshalAttributes rejects, since it is shorter than an attribute's header.
const invalid = 1

// marshal encodes attributes. It returns an error if an attribute is too long. The library's function would silently
// truncate the length to 16 bits.
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

// message encodes a request. It reuses the memory of buf. resource is the subsystem in messages that begin or end a
// transaction, and 0 in others.
func message(buf []byte, typ netlink.HeaderType, flags netlink.HeaderFlags, family uint8, resource uint16,
	attrs []netlink.Attribute) (netlink.Message, error) {
	b, err := marshal(attrs)
	data := binary.BigEndian.AppendUint16(append(slices.Grow(buf[:0], headerLen+len(b)), family, unix.NFNETLINK_V0),
		resource)
	return netlink.Message{Header: netlink.Header{Type: typ, Flags: flags}, Data: append(data, b...)}, err
}

// Type returns the netlink message type for an NFT_MSG_* constant.
func Type(msg uint16) netlink.HeaderType {
	return netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | msg)
}

// body returns a callback that calls reply with the attributes of a message, after struct nfgenmsg. For a malformed
// message, the error matches nl.ErrMalformed.
func body(reply func([]byte) error) func(netlink.Message) error {
	return func(m netlink.Message) error {
		if len(m.Data) < headerLen {
			return fmt.Errorf("%w: a reply of %d bytes", nl.ErrMalformed, len(m.Data))
		}
		attrs := m.Data[headerLen:]
		if err := nl.Decode(attrs, func(*netlink.AttributeDecoder) {}); err != nil {
			return err
		}
		return reply(attrs)
	}
}

// Each calls fn with the content of each attribute in list.
func Each(list []byte, fn func([]byte)) {
	// If the list is malformed, fn gets only the attributes before the error.
	_ = nl.Decode(list, func(ad *netlink.AttributeDecoder) { fn(ad.Bytes()) })
}

// Find returns the content of a nested attribute: see nl.Find.
func Find(b []byte, path ...uint16) []byte { return nl.Find(b, path...) }

// Text returns the bytes before the first NUL as a string.
func Text(b []byte) string { return nl.Text(b) }

// Number returns the number in four bytes in network byte order. If b has another length, it returns 0.
func Number(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// Number64 returns the number in eight bytes in network byte order. If b has another length, it returns 0.
func Number64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

// Comment returns text as userdata in the format of libnftables: one byte for the type, one for the length, and the
// text with a NUL. Rules, chains and elements use the same format.
func Comment(text string) []byte {
	return userdata.AppendString(make([]byte, 0, 2+len(text)+1), userdata.TypeComment, text)
}

// CommentOf returns the comment in userdata, and whether there is one. It checks lengths, since other programs may
// write any bytes there. The function of package userdata panics on a wrong length.
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
