package nl

import (
	"math"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

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

// Marshal puts a request together of a body that another package writes, and the
// attributes that it cannot say, which fn writes behind it. fn may be nil. body is a
// method MarshalBinary, and not an encoding.BinaryMarshaler: that would keep the methods
// by which the same types are read, and nobody reads them so, in the program.
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
