package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ErrMalformed is the cause of every error about a reply that does not parse.
var ErrMalformed = errors.New("malformed netlink message")

// next splits the first message off a receive buffer.
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

// Decode walks over attributes, and calls fn for each. Where they do not parse, or fn
// read one as something that it is not, the error matches ErrMalformed.
func Decode(b []byte, fn func(ad *netlink.AttributeDecoder) error) error {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return malformed(err)
	}
	for ad.Next() {
		if err := fn(ad); err != nil {
			return err
		}
	}
	return malformed(ad.Err())
}

// Pick copies the attributes of some types, and what does not parse as one. To decode the
// rest of them too costs an allocation for each, of which a link has some sixty.
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

// Cut gives the bytes before the first attribute of a type, and all bytes behind its header, also those beyond its
// length.
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

// malformed has an error of the library's match ErrMalformed.
func malformed(err error) error {
	if err == nil || errors.Is(err, ErrMalformed) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrMalformed, err)
}

// Addr reads an attribute of an address of 4 or of 16 bytes, for AttributeDecoder.Do. An
// IPv6 address that maps an IPv4 one stays what it is.
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

// Keep gives an attribute as it is, its flags included: one that the reader has no field
// for, and that is not to be lost.
func Keep(ad *netlink.AttributeDecoder) netlink.Attribute {
	return netlink.Attribute{Type: ad.Type() | ad.TypeFlags(), Data: ad.Bytes()}
}

// ackError reads the message of type NLMSG_ERROR: nil for an acknowledgement,
// else the errno, and the kernel's own text where there is one
// (include/uapi/linux/netlink.h, enum nlmsgerr_attrs).
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
		// The request's payload follows its header.
		n := int(binary.NativeEndian.Uint32(m.Data[4:]))
		if n < unix.NLMSG_HDRLEN || align(n) > len(m.Data)-4 {
			return errno, "", nil
		}
		skip = 4 + align(n)
	}
	return errno, extAck(m.Data[skip:]), nil
}

// extAck takes the text out of an extended acknowledgement. One that does not
// parse is no reason to hide the errno that it came with.
func extAck(b []byte) string {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return ""
	}
	var text string
	for ad.Next() {
		switch ad.Type() {
		case unix.NLMSGERR_ATTR_MSG:
			text = ad.String()
		case nlmsgerrAttrMissType:
			if missing := ad.Uint32(); text == "" && ad.Err() == nil {
				text = fmt.Sprintf("attribute %d is missing", missing)
			}
		}
	}
	return text
}

const nlmsgerrAttrMissType = 5 // NLMSGERR_ATTR_MISS_TYPE, Linux 6.1

// Encode puts a request together of a family's fixed header, whose length is a multiple
// of four, and the attributes that fn writes behind it. fn may be nil.
func Encode(typ netlink.HeaderType, flags netlink.HeaderFlags, head []byte, fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
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

// Marshal puts a request together of a body that another package writes, and the attributes that it cannot say,
// which fn writes behind it. fn may be nil. body is a method MarshalBinary, and not an encoding.BinaryMarshaler:
// that would keep the methods that read the same types in the program, which does not use them.
func Marshal(typ netlink.HeaderType, flags netlink.HeaderFlags, body func() ([]byte, error), fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	b, err := body()
	if err != nil {
		return netlink.Message{}, err
	}
	return Encode(typ, flags, b, fn)
}

const errAddress = Invalid("address is not valid")

// PutAddr writes an attribute of an address, of 4 bytes or of 16. To write one that is
// not valid is an error.
func PutAddr(ae *netlink.AttributeEncoder, typ uint16, a netip.Addr) {
	ae.Do(typ, func() ([]byte, error) {
		if !a.IsValid() {
			return nil, errAddress
		}
		return a.AsSlice(), nil
	})
}

// FamilyOf is the family of an address: unix.AF_INET or unix.AF_INET6, as which an IPv4 address in IPv6 form counts.
func FamilyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// Index is a link's index, or an MTU, as messages have it. The kernel would read one that does not fit as
// another; it is told one that it never gives instead, and says so.
func Index(i int) uint32 {
	if i != int(int32(i)) {
		return math.MaxInt32
	}
	return uint32(i)
}

// PutOther writes attributes of Keep.
func PutOther(ae *netlink.AttributeEncoder, list []netlink.Attribute) {
	for _, a := range list {
		ae.Bytes(a.Type, a.Data)
	}
}

// Prefix puts an address and the length from a header together, and checks that
// they are of the header's family.
func Prefix(family uint8, a netip.Addr, bits uint8) (netip.Prefix, error) {
	p := netip.PrefixFrom(a, int(bits))
	if !p.IsValid() || (family == unix.AF_INET) != a.Is4() {
		return netip.Prefix{}, fmt.Errorf("%w: family %d, prefix %s/%d", ErrMalformed, family, a, bits)
	}
	return p, nil
}

// TypeOf is an attribute's type without its flags.
func TypeOf(a netlink.Attribute) uint16 { return a.Type &^ (netlink.Nested | netlink.NetByteOrder) }
