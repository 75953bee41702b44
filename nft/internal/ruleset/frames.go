package ruleset

import (
	"bytes"
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Offsets in headers of frames, in bytes; those of neighbour discovery are from the start of
// an IPv6 header that no other header stands behind.
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
	ndRouterLen    = 8  // of a router solicitation, and where its options start
	ndNeighbourLen = 24 // of a neighbour solicitation or advertisement
	ndOptionLen    = 8  // a type, a length, and a MAC
	ndTarget       = ip6Len + 8
	ndOption       = ip6Len + ndNeighbourLen + 2
	ndRouterOption = ip6Len + ndRouterLen + 2

	// An address ends in an interface identifier (RFC 4291, section 2.5.1).
	interfaceIDLen = 8
	ip6SourceID    = ip6Source + addr6Len - interfaceIDLen
	ndTargetID     = ndTarget + addr6Len - interfaceIDLen
)

// These are phrases for frames, in the bridge family. Each has the steps that nft makes of it, in their order.

// isEtherType holds for frames of a type; a frame with a VLAN tag has the tag's type.
func (x expressions) isEtherType(typ uint16) {
	x.isAt(expr.PayloadBaseLLHeader, etherType, binary.BigEndian.AppendUint16(nil, typ))
}

// isProtocol is the same, but for a VLAN tag, which it looks behind.
func (x expressions) isProtocol(typ uint16) {
	x.isMeta(expr.MetaKeyPROTOCOL, binary.BigEndian.AppendUint16(nil, typ))
}

// isL4 holds for packets whose last header, behind extensions, is of a protocol.
func (x expressions) isL4(protocol byte) {
	x.isMeta(expr.MetaKeyL4PROTO, []byte{protocol})
}

// isOwnID goes on if an address whose interface identifier is at an offset is one of
// those that SLAAC may give the port.
func (x expressions) isOwnID(offset uint32) {
	x.portIn(expr.PayloadBaseNetworkHeader, offset, interfaceIDLen, guardIDSet)
}

// isFree leaves the chain if the port's addresses are not known.
func (x expressions) isFree() {
	x.linkIn(expr.MetaKeyIIFNAME, guardFreeSet)
	x.Leave()
}

// The start of an ARP message between Ethernet and IPv4 (RFC 826): the types of
// either's addresses and their lengths.
func arpForm() []byte { return []byte{0, unix.ARPHRD_ETHER, 8, 0, EtherLen, Addr4Len} }

// isARPForm holds for such messages, so that the rest is where it should be.
func (x expressions) isARPForm() {
	form := arpForm()
	x.isAt(expr.PayloadBaseNetworkHeader, 0, form[:4])
	x.isAt(expr.PayloadBaseNetworkHeader, 4, form[4:])
}

// isARPProbe holds for requests from no address.
func (x expressions) isARPProbe() {
	form := append(arpForm(), 0, 1) // a request
	x.isAt(expr.PayloadBaseNetworkHeader, 0, form[:4])
	x.isAt(expr.PayloadBaseNetworkHeader, 4, form[4:])
	x.isAt(expr.PayloadBaseNetworkHeader, arpSenderIP, make([]byte, Addr4Len))
}

// isDiscovery holds for ICMPv6 of some types, the first and the last of which are
// given.
func (x expressions) isDiscovery(from, to byte) {
	x.isEtherType(unix.ETH_P_IPV6)
	x.isICMPv6(from, to)
}

// isUnspecified holds for ICMPv6 of a type, from no address.
func (x expressions) isUnspecified(typ byte) {
	x.isProtocol(unix.ETH_P_IPV6)
	x.isAt(expr.PayloadBaseNetworkHeader, ip6Source, make([]byte, addr6Len))
	x.isICMPv6(typ, typ)
}

func (x expressions) isICMPv6(from, to byte) {
	x.isL4(unix.IPPROTO_ICMPV6)
	x.firstByte(from, to)
}

// firstByte holds if that behind the IP headers is one of a row.
func (x expressions) firstByte(from, to byte) {
	x.Payload(expr.PayloadBaseTransportHeader, 0, 1, nftnl.First)
	x.within(from, to)
}

// within holds if the byte in the first register is one of a row.
func (x expressions) within(from, to byte) { x.among([]byte{from}, []byte{to}) }

// among is the same for a number of several bytes.
func (x expressions) among(from, to []byte) {
	if bytes.Equal(from, to) {
		x.Compare(expr.CmpOpEq, from)
		return
	}
	x.Compare(expr.CmpOpGte, from)
	x.Compare(expr.CmpOpLte, to)
}

// longer compares the length that an IPv6 header gives for what is behind it.
func (x expressions) longer(op expr.CmpOp, length uint16) {
	x.Payload(expr.PayloadBaseNetworkHeader, ip6Length, 2, nftnl.First)
	x.Compare(op, binary.BigEndian.AppendUint16(nil, length))
}

// fragment loads bytes of an IPv6 fragment's own header, and ends the rule if the
// packet is no fragment.
func (x expressions) fragment(offset, length uint32) {
	x.Add(&expr.Exthdr{DestRegister: uint32(nftnl.First), Type: unix.IPPROTO_FRAGMENT, Offset: offset, Len: length})
}

// isLaterFragment holds for fragments of IPv6 packets but for the first ones.
func (x expressions) isLaterFragment() {
	x.isEtherType(unix.ETH_P_IPV6)
	x.fragment(2, 2)
	x.hasAny(0xfff8) // behind it are flags
}

// typeofPortAnd is the userdata of a set by which nft knows that a key is a port and
// bytes of the network header, of which it has no name: "typeof iifname . @nh,384,128".
// The numbers are those of libnftables (enum expr_types, enum proto_bases and the
// *_build_udata functions); each stands behind a type of one byte, and a length.
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
			number(0, 0), number(1, 0), // no protocol, no field of it
			number(2, networkHeader), number(3, offset*bits), number(4, length*bits)))))
}
