package ruleset

import (
	"bytes"
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Offsets in headers of frames, in bytes. Those of neighbour discovery are from the start of an IPv6 header without
// extension headers.
const (
	etherTarget   = 0
	etherSource   = 6
	etherType     = 12
	ip4Source     = 12
	ip6Length     = 4
	ip6NextHeader = 6
	ip6Source     = 8
	arpSenderMAC  = 8
	arpSenderIP   = 14
	arpTargetIP   = 24

	ip6Len         = 40
	ndRouterLen    = 8  // length of a router solicitation before its options
	ndNeighbourLen = 24 // length of a neighbour solicitation or advertisement before its options
	ndOptionLen    = 8  // length of an option with a type, a length and a MAC
	ndTarget       = ip6Len + 8
	ndOption       = ip6Len + ndNeighbourLen + 2
	ndRouterOption = ip6Len + ndRouterLen + 2

	// An address ends with an interface identifier (RFC 4291, section 2.5.1).
	interfaceIDLen = 8
	ip6SourceID    = ip6Source + addr6Len - interfaceIDLen
	ndTargetID     = ndTarget + addr6Len - interfaceIDLen
)

// The following methods are phrases for frames, in the bridge family. Each has the steps that nft produces for it, in
// the same order.

// isEtherType matches frames with a type. A frame with a VLAN tag has the tag's type.
func (x expressions) isEtherType(typ uint16) {
	x.isAt(expr.PayloadBaseLLHeader, etherType, binary.BigEndian.AppendUint16(nil, typ))
}

// isProtocol matches frames with a type too, but looks behind a VLAN tag.
func (x expressions) isProtocol(typ uint16) {
	x.isMeta(expr.MetaKeyPROTOCOL, binary.BigEndian.AppendUint16(nil, typ))
}

// isL4 matches packets whose last header, behind extensions, is of a protocol.
func (x expressions) isL4(protocol byte) {
	x.isMeta(expr.MetaKeyL4PROTO, []byte{protocol})
}

// isOwnID matches addresses, with the interface identifier at an offset, that SLAAC may give the port.
func (x expressions) isOwnID(offset uint32) {
	x.portIn(expr.PayloadBaseNetworkHeader, offset, interfaceIDLen, guardIDSet)
}

// isFree lets a packet leave the chain if the port's addresses are not known.
func (x expressions) isFree() {
	x.linkIn(expr.MetaKeyIIFNAME, guardFreeSet)
	x.Leave()
}

// arpForm returns the start of an ARP message between Ethernet and IPv4 (RFC 826): the types of both addresses and
// their lengths.
func arpForm() []byte { return []byte{0, unix.ARPHRD_ETHER, 8, 0, EtherLen, Addr4Len} }

// isARPForm matches such messages, so that the other fields are at known offsets.
func (x expressions) isARPForm() {
	form := arpForm()
	x.isAt(expr.PayloadBaseNetworkHeader, 0, form[:4])
	x.isAt(expr.PayloadBaseNetworkHeader, 4, form[4:])
}

// isARPProbe matches requests from no address.
func (x expressions) isARPProbe() {
	form := append(arpForm(), 0, 1) // a request
	x.isAt(expr.PayloadBaseNetworkHeader, 0, form[:4])
	x.isAt(expr.PayloadBaseNetworkHeader, 4, form[4:])
	x.isAt(expr.PayloadBaseNetworkHeader, arpSenderIP, make([]byte, Addr4Len))
}

// isDiscovery matches ICMPv6 with a type in a range.
func (x expressions) isDiscovery(from, to byte) {
	x.isEtherType(unix.ETH_P_IPV6)
	x.isICMPv6(from, to)
}

// isUnspecified matches ICMPv6 of a type, from the unspecified address.
func (x expressions) isUnspecified(typ byte) {
	x.isProtocol(unix.ETH_P_IPV6)
	x.isAt(expr.PayloadBaseNetworkHeader, ip6Source, make([]byte, addr6Len))
	x.isICMPv6(typ, typ)
}

func (x expressions) isICMPv6(from, to byte) {
	x.isL4(unix.IPPROTO_ICMPV6)
	x.firstByte(from, to)
}

// firstByte matches if the first byte behind the IP headers is in a range.
func (x expressions) firstByte(from, to byte) {
	x.Payload(expr.PayloadBaseTransportHeader, 0, 1, nftnl.First)
	x.within(from, to)
}

// within matches if the byte in the first register is in a range.
func (x expressions) within(from, to byte) { x.among([]byte{from}, []byte{to}) }

// among is within for a number of several bytes.
func (x expressions) among(from, to []byte) {
	if bytes.Equal(from, to) {
		x.Compare(expr.CmpOpEq, from)
		return
	}
	x.Compare(expr.CmpOpGte, from)
	x.Compare(expr.CmpOpLte, to)
}

// longer compares the payload length in an IPv6 header.
func (x expressions) longer(op expr.CmpOp, length uint16) {
	x.Payload(expr.PayloadBaseNetworkHeader, ip6Length, 2, nftnl.First)
	x.Compare(op, binary.BigEndian.AppendUint16(nil, length))
}

// fragment loads bytes of an IPv6 fragment header. If the packet is not a fragment, the rule ends.
func (x expressions) fragment(offset, length uint32) {
	x.Add(&expr.Exthdr{DestRegister: uint32(nftnl.First), Type: unix.IPPROTO_FRAGMENT, Offset: offset, Len: length})
}

// isLaterFragment matches all fragments of IPv6 packets except the first ones.
func (x expressions) isLaterFragment() {
	x.isEtherType(unix.ETH_P_IPV6)
	x.fragment(2, 2)
	x.hasAny(0xfff8) // flags follow
}

// typeofPortAnd returns a set's userdata, which tells nft that a key is a port and bytes of the network header
// without a name in nft: "typeof iifname . @nh,384,128". The numbers come from libnftables (enum expr_types, enum
// proto_bases and the *_build_udata functions). Each follows a type of one byte, and a length.
func typeofPortAnd(offset, length uint32) []byte {
	const (
		ofKeyType, itself, inside = 3, 0, 1
		payload, meta, concat     = 7, 9, 13
		networkHeader             = 2
		bits                      = 8
	)
	nest := func(typ byte, parts ...[]byte) []byte {
		b := []byte{typ, 0}
		for _, part := range parts {
			b = append(b, part...)
		}
		b[1] = byte(len(b) - 2)
		return b
	}

	number := func(typ byte, n uint32) []byte { return nest(typ, binary.NativeEndian.AppendUint32(nil, n)) }
	return nest(ofKeyType, number(itself, concat), nest(inside,
		nest(0, number(itself, meta), nest(inside, number(0, unix.NFT_META_IIFNAME))),
		nest(1, number(itself, payload), nest(inside,
			number(0, 0), number(1, 0), // no protocol, and no field of it
			number(2, networkHeader), number(3, offset*bits), number(4, length*bits)))))
}
