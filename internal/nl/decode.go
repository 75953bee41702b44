package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ErrMalformed is wrapped by every error about a message that cannot be parsed.
var ErrMalformed = errors.New("malformed netlink message")

// next returns the first netlink message in b, and the rest of b. If b begins with no complete message, the error
// matches ErrMalformed.
func next(b []byte) (netlink.Message, []byte, error) {
	var m netlink.Message
	n := 0
	if len(b) >= unix.NLMSG_HDRLEN {
		n = int(binary.NativeEndian.Uint32(b))
	}
	if err := m.UnmarshalBinary(b[:min(align(n), len(b))]); err != nil {
		return netlink.Message{}, nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return m, b[align(n):], nil
}

func align(n int) int { return (n + 3) &^ 3 }

// Decode calls fn for each attribute in b. If the attributes are malformed, or if fn reads an attribute as a wrong
// type, the error matches ErrMalformed.
func Decode(b []byte, fn func(ad *netlink.AttributeDecoder)) error {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return malformed(err)
	}
	for ad.Next() {
		fn(ad)
	}
	return malformed(ad.Err())
}

// Pick returns a copy of the attributes with the given types. If the list is malformed, the copy also contains the
// malformed rest. Decoding an attribute costs an allocation, and a link has some sixty attributes.
func Pick(b []byte, types ...uint16) []byte {
	picked := make([]byte, 0, len(b))
	for len(b) >= unix.NLA_HDRLEN {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.NLA_HDRLEN || n > len(b) {
			break
		}
		typ := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		end := min(align(n), len(b))
		if slices.Contains(types, typ) {
			picked = append(picked, b[:end]...)
		}
		b = b[end:]
	}

	return append(picked, b...)
}

// Cut splits b at the first attribute with the given type. The result before has the bytes before the attribute. The
// result behind has all bytes after the attribute's header, including those after the attribute's end. If there is no
// such attribute, before has all of b, and behind is nil.
func Cut(b []byte, typ uint16) (before, behind []byte) {
	for at := 0; at+unix.NLA_HDRLEN <= len(b); {
		n := int(binary.NativeEndian.Uint16(b[at:]))
		if n < unix.NLA_HDRLEN {
			break
		}
		if binary.NativeEndian.Uint16(b[at+2:])&^unix.NLA_F_NESTED == typ {
			return b[:at], b[at+unix.NLA_HDRLEN:]
		}
		at += align(n)
	}

	return b, nil
}

// Find returns the content of a nested attribute. path lists the types of the enclosing attributes, the outermost
// first, and then the type of the attribute itself. If there is no such attribute, Find returns nil. It allocates
// nothing.
func Find(b []byte, path ...uint16) []byte {
	for _, typ := range path {
		before, behind := Cut(b, typ)
		if behind == nil {
			return nil
		}
		n := int(binary.NativeEndian.Uint16(b[len(before):])) - unix.NLA_HDRLEN
		b = behind[:min(n, len(behind))]
	}
	return b
}

// Text returns the bytes before the first NUL as a string.
func Text(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

// malformed wraps an error of the library so that it matches ErrMalformed.
func malformed(err error) error {
	if err == nil || errors.Is(err, ErrMalformed) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrMalformed, err)
}

// Addr returns a function for AttributeDecoder.Do that stores an address of 4 or 16 bytes in *into. It does not unmap
// IPv4-mapped IPv6 addresses.
func Addr(into *netip.Addr) func([]byte) error {
	return func(b []byte) error {
		v, ok := netip.AddrFromSlice(b)
		if !ok {
			return fmt.Errorf("an address of %d bytes", len(b))
		}
		*into = v
		return nil
	}
}

// Keep returns an attribute unchanged, with its flags. Use it to preserve attributes for PutOther.
func Keep(ad *netlink.AttributeDecoder) netlink.Attribute {
	return netlink.Attribute{Type: ad.Type() | ad.TypeFlags(), Data: ad.Bytes()}
}

// ackError parses an NLMSG_ERROR. For an acknowledgement, errno is 0. Otherwise it returns the errno, and the
// kernel's text if there is one (include/uapi/linux/netlink.h, enum nlmsgerr_attrs).
func ackError(m netlink.Message) (errno unix.Errno, text string, err error) {
	const headerLen = 4 + unix.NLMSG_HDRLEN // struct nlmsgerr: the errno and the request's header
	if len(m.Data) < headerLen {
		return 0, "", fmt.Errorf("%w: an acknowledgement of %d bytes", ErrMalformed, len(m.Data))
	}

	errno = unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
	if m.Header.Flags&netlink.AcknowledgeTLVs == 0 {
		return errno, "", nil
	}

	skip := headerLen
	if m.Header.Flags&netlink.Capped == 0 {
		// Skip the request's payload, which follows its header.
		n := int(binary.NativeEndian.Uint32(m.Data[4:]))
		if n < unix.NLMSG_HDRLEN || align(n) > len(m.Data)-4 {
			return errno, "", nil
		}
		skip = 4 + align(n)
	}

	return errno, extAck(m.Data[skip:]), nil
}

// extAck returns the text of an extended acknowledgement. If the acknowledgement is malformed, it returns "", since
// the errno is still valid.
func extAck(b []byte) string {
	text, missing := Text(Find(b, unix.NLMSGERR_ATTR_MSG)), Find(b, nlmsgerrAttrMissType)
	if text == "" && len(missing) == 4 {
		return fmt.Sprintf("attribute %d is missing", binary.NativeEndian.Uint32(missing))
	}
	return text
}

const nlmsgerrAttrMissType = 5 // NLMSGERR_ATTR_MISS_TYPE, Linux 6.1

// Encode returns a request that consists of a fixed header and the attributes that fn writes. The length of head is a
// multiple of four. fn may be nil.
func Encode(typ netlink.HeaderType, flags netlink.HeaderFlags, head []byte,
	fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	m := netlink.Message{Header: netlink.Header{Type: typ, Flags: flags}, Data: head}
	if fn == nil {
		return m, nil
	}
	ae := netlink.NewAttributeEncoder()
	fn(ae)
	attrs, err := ae.Encode()
	m.Data = append(m.Data[:len(m.Data):len(m.Data)], attrs...)
	return m, err
}

// Marshal returns a request that consists of a body and the attributes that fn writes. body is the MarshalBinary
// method of a type of another package. It is not an encoding.BinaryMarshaler, since an interface would link the
// type's decoding methods into the program. fn may be nil.
func Marshal(typ netlink.HeaderType, flags netlink.HeaderFlags, body func() ([]byte, error),
	fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	b, err := body()
	if err != nil {
		return netlink.Message{}, err
	}
	return Encode(typ, flags, b, fn)
}

// Nested writes an attribute that contains the attributes that fn writes.
func Nested(ae *netlink.AttributeEncoder, typ uint16, fn func(*netlink.AttributeEncoder)) {
	ae.Nested(typ, func(ae *netlink.AttributeEncoder) error { fn(ae); return nil })
}

const errAddress = Invalid("address is not valid")

// PutAddr writes an attribute with an address of 4 or 16 bytes. If the address is invalid, encoding fails.
func PutAddr(ae *netlink.AttributeEncoder, typ uint16, a netip.Addr) {
	ae.Do(typ, func() ([]byte, error) {
		if !a.IsValid() {
			return nil, errAddress
		}
		return a.AsSlice(), nil
	})
}

// FamilyOf returns the family of an address: unix.AF_INET or unix.AF_INET6. For an IPv4-mapped IPv6 address, it
// returns AF_INET6.
func FamilyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// Index converts a link's index or an MTU to the number in a message. A number that does not fit becomes
// math.MaxInt32, which the kernel rejects. If it were truncated, it could mean another link.
func Index(i int) uint32 {
	if i != int(int32(i)) {
		return math.MaxInt32
	}
	return uint32(i)
}

// PutOther writes attributes that Keep returned.
func PutOther(ae *netlink.AttributeEncoder, list []netlink.Attribute) {
	for _, a := range list {
		ae.Bytes(a.Type, a.Data)
	}
}

// Prefix returns the prefix with the given address and length. If they do not belong to the family, the error matches
// ErrMalformed.
func Prefix(family uint8, a netip.Addr, bits uint8) (netip.Prefix, error) {
	p := netip.PrefixFrom(a, int(bits))
	if !p.IsValid() || (family == unix.AF_INET) != a.Is4() {
		return netip.Prefix{}, fmt.Errorf("%w: family %d, prefix %s/%d", ErrMalformed, family, a, bits)
	}
	return p, nil
}

// TypeOf returns the type of an attribute without its flags.
func TypeOf(a netlink.Attribute) uint16 { return a.Type &^ (netlink.Nested | netlink.NetByteOrder) }
