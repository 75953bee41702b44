package nft

import (
	"bytes"
	"encoding/binary"
	"net"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Offsets in headers, in bytes; those of neighbour discovery are from the start of
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

// What follows are phrases for frames, in the bridge family. Each has the steps that
// nft makes of it, in their order.

// portAnd loads the key of a port that a frame comes in by, and of bytes of a header.
func (x expressions) portAnd(base, offset, length uint32) {
	x.port(unix.NFT_META_IIFNAME, base, offset, length)
}

// isEtherType holds for frames of a type. That of a frame with a VLAN tag is the
// tag's.
func (x expressions) isEtherType(typ uint16) {
	x.payload(unix.NFT_PAYLOAD_LL_HEADER, etherType, 2, first)
	x.compare(unix.NFT_CMP_EQ, binary.BigEndian.AppendUint16(nil, typ))
}

// isProtocol is the same, but for a VLAN tag, which it looks behind.
func (x expressions) isProtocol(typ uint16) {
	x.meta(unix.NFT_META_PROTOCOL, first)
	x.compare(unix.NFT_CMP_EQ, binary.BigEndian.AppendUint16(nil, typ))
}

// isL4 holds for packets whose last header, behind extensions, is of a protocol.
func (x expressions) isL4(protocol byte) {
	x.meta(unix.NFT_META_L4PROTO, first)
	x.compare(unix.NFT_CMP_EQ, []byte{protocol})
}

// isOwnID goes on if an address whose interface identifier is at an offset is one of
// those that SLAAC may give the port.
func (x expressions) isOwnID(offset uint32) {
	x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, interfaceIDLen)
	x.lookup(guardIDSet)
}

// isFree leaves the chain if the port's addresses are not known.
func (x expressions) isFree() {
	x.meta(unix.NFT_META_IIFNAME, first)
	x.lookup(guardFreeSet)
	x.leave()
}

// The start of an ARP message between Ethernet and IPv4 (RFC 826): the types of
// either's addresses and their lengths.
func arpForm() []byte { return []byte{0, unix.ARPHRD_ETHER, 8, 0, etherLen, addr4Len} }

// isARPForm holds for such messages, so that the rest is where it should be.
func (x expressions) isARPForm() {
	form := arpForm()
	x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 0, 4, first)
	x.compare(unix.NFT_CMP_EQ, form[:4])
	x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 4, 2, first)
	x.compare(unix.NFT_CMP_EQ, form[4:])
}

// isARPProbe holds for requests from no address.
func (x expressions) isARPProbe() {
	form := append(arpForm(), 0, 1) // a request
	x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 0, 4, first)
	x.compare(unix.NFT_CMP_EQ, form[:4])
	x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 4, 4, first)
	x.compare(unix.NFT_CMP_EQ, form[4:])
	x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, arpSenderIP, addr4Len, first)
	x.compare(unix.NFT_CMP_EQ, make([]byte, addr4Len))
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
	x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, ip6Source, addr6Len, first)
	x.compare(unix.NFT_CMP_EQ, make([]byte, addr6Len))
	x.isICMPv6(typ, typ)
}

func (x expressions) isICMPv6(from, to byte) {
	x.isL4(unix.IPPROTO_ICMPV6)
	x.firstByte(from, to)
}

// firstByte holds if that behind the IP headers is one of a row.
func (x expressions) firstByte(from, to byte) {
	x.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1, first)
	x.within(from, to)
}

// within holds if the byte in the first register is one of a row.
func (x expressions) within(from, to byte) { x.among([]byte{from}, []byte{to}) }

// among is the same for a number of several bytes.
func (x expressions) among(from, to []byte) {
	if bytes.Equal(from, to) {
		x.compare(unix.NFT_CMP_EQ, from)
		return
	}
	x.compare(unix.NFT_CMP_GTE, from)
	x.compare(unix.NFT_CMP_LTE, to)
}

// longer compares the length that an IPv6 header gives for what is behind it.
func (x expressions) longer(op uint32, length uint16) {
	x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, ip6Length, 2, first)
	x.compare(op, binary.BigEndian.AppendUint16(nil, length))
}

// fragment loads bytes of an IPv6 fragment's own header, and ends the rule if the
// packet is no fragment.
func (x expressions) fragment(offset, length uint32) {
	x.add("exthdr", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_EXTHDR_DREG, uint32(first))
		e.Uint8(unix.NFTA_EXTHDR_TYPE, unix.IPPROTO_FRAGMENT)
		e.Uint32BE(unix.NFTA_EXTHDR_OFFSET, offset)
		e.Uint32BE(unix.NFTA_EXTHDR_LEN, length)
	})
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

// isSentBy holds for what a bridge of a MAC sends out by a pod's port.
func (x expressions) isSentBy(mac net.HardwareAddr) {
	x.meta(unix.NFT_META_OIFNAME, first)
	x.compare(unix.NFT_CMP_EQ, []byte(podPorts)) // as far as it goes: nft's "veth*"
	x.payload(unix.NFT_PAYLOAD_LL_HEADER, etherSource, etherLen, first)
	x.compare(unix.NFT_CMP_EQ, mac)
}
