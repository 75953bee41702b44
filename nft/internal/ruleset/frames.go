package ruleset

import (
	"bytes"
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// Offsets in the headers of frames, in bytes. Offsets for neighbour discovery count from the start of an IPv6 header
// that no extension headers follow.
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

	// The last bytes of an IPv6 address are an interface identifier (RFC 4291, section 2.5.1).
	interfaceIDLen = 8
	ip6SourceID    = ip6Source + addr6Len - interfaceIDLen
	ndTargetID     = ndTarget + addr6Len - interfaceIDLen
)

// The following methods are the building blocks of rules of the family bridge. Each adds the same expressions as nft,
// in the same order.

// isEtherType matches frames with an EtherType. If a frame has a VLAN tag, its EtherType is the type of the tag.
func (x expressions) isEtherType(typ uint16) expressions {
	return x.isAt(expr.PayloadBaseLLHeader, etherType, Number16(typ))
}

// isProtocol matches frames with an EtherType. If a frame has a VLAN tag, the type behind the tag counts.
func (x expressions) isProtocol(typ uint16) expressions {
	return x.isMeta(expr.MetaKeyPROTOCOL, Number16(typ))
}

// isL4 matches packets of a protocol. IPv6 extension headers before the protocol's header are skipped.
func (x expressions) isL4(protocol byte) expressions {
	return x.isMeta(expr.MetaKeyL4PROTO, []byte{protocol})
}

// isNotL4 matches packets whose protocol is known and differs from protocol.
func (x expressions) isNotL4(protocol byte) expressions {
	return x.isNotMeta(expr.MetaKeyL4PROTO, []byte{protocol})
}

// isOwn matches packets with a value that belongs to their incoming port. The value consists of length bytes at an
// offset in the network header, and set contains the values of all ports.
func (x expressions) isOwn(offset, length uint32, set string) expressions {
	return x.portIn(expr.PayloadBaseNetworkHeader, offset, length, set)
}

// isOwnID matches addresses that SLAAC may assign to the pod behind the incoming port. offset is the offset of the
// interface identifier in the IP header.
func (x expressions) isOwnID(offset uint32) expressions {
	return x.isOwn(offset, interfaceIDLen, guardIDSet)
}

// isNotOwn matches packets whose value at the offset does not belong to their incoming port. See isOwn.
func (x expressions) isNotOwn(offset, length uint32, set string) expressions {
	return x.portNotIn(expr.PayloadBaseNetworkHeader, offset, length, set)
}

// leaveFree accepts packets from ports in guardFreeSet, whose addresses are not known, by ending the chain.
func (x expressions) leaveFree() { x.linkIn(expr.MetaKeyIIFNAME, guardFreeSet).Return() }

// arpForm returns the first six bytes of an ARP message for IPv4 over Ethernet (RFC 826): the types of both addresses
// and their lengths.
func arpForm() []byte { return []byte{0, unix.ARPHRD_ETHER, 8, 0, EtherLen, Addr4Len} }

// isARP matches ARP messages that begin with the bytes of form, so that the other fields are at known offsets.
func (x expressions) isARP(form []byte) expressions {
	return x.isEtherType(unix.ETH_P_ARP).isAt(expr.PayloadBaseNetworkHeader, 0, form[:4]).
		isAt(expr.PayloadBaseNetworkHeader, 4, form[4:])
}

// isNoSender matches ARP messages whose sender address is 0.0.0.0.
func (x expressions) isNoSender() expressions {
	return x.isAt(expr.PayloadBaseNetworkHeader, arpSenderIP, make([]byte, Addr4Len))
}

// isDiscovery matches ICMPv6 messages with a type between from and to. It is used for neighbour discovery.
func (x expressions) isDiscovery(from, to byte) expressions {
	return x.isEtherType(unix.ETH_P_IPV6).isICMPv6(from, to)
}

// isUnspecified matches ICMPv6 messages of type typ whose source address is :: (unspecified).
func (x expressions) isUnspecified(typ byte) expressions {
	return x.isProtocol(unix.ETH_P_IPV6).isAt(expr.PayloadBaseNetworkHeader, ip6Source, make([]byte, addr6Len)).
		isICMPv6(typ, typ)
}

func (x expressions) isICMPv6(from, to byte) expressions {
	return x.isL4(unix.IPPROTO_ICMPV6).firstByte(from, to)
}

// firstByte matches packets if the first byte of their transport header is between from and to.
func (x expressions) firstByte(from, to byte) expressions {
	return x.load(expr.PayloadBaseTransportHeader, 0, 1).byteBetween(from, to)
}

// nextHeader matches packets whose IPv6 next header field is between from and to.
func (x expressions) nextHeader(from, to byte) expressions {
	return x.load(expr.PayloadBaseNetworkHeader, ip6NextHeader, 1).byteBetween(from, to)
}

// byteBetween matches if the byte in the first register is between from and to.
func (x expressions) byteBetween(from, to byte) expressions {
	return x.numberBetween([]byte{from}, []byte{to})
}

// numberBetween matches if the number in the first register is between from and to, which are in network byte order.
func (x expressions) numberBetween(from, to []byte) expressions {
	if bytes.Equal(from, to) {
		return x.compare(expr.CmpOpEq, from)
	}
	return x.compare(expr.CmpOpGte, from).compare(expr.CmpOpLte, to)
}

// payloadLength compares the payload length of an IPv6 header with length. op selects the comparison.
func (x expressions) payloadLength(op expr.CmpOp, length uint16) expressions {
	return x.load(expr.PayloadBaseNetworkHeader, ip6Length, 2).compare(op, Number16(length))
}

// loadFragment loads bytes of the IPv6 fragment header. If the packet has no such header, the rule does not match.
func (x expressions) loadFragment(offset, length uint32) expressions {
	x.Add(&expr.Exthdr{DestRegister: uint32(nftnl.First), Type: unix.IPPROTO_FRAGMENT, Offset: offset, Len: length})
	return x
}

// isLaterFragment matches all fragments of an IPv6 packet except the first one.
func (x expressions) isLaterFragment() expressions {
	return x.isEtherType(unix.ETH_P_IPV6).loadFragment(2, 2).hasAny(0xfff8) // the other bits are flags
}

// fragment4 matches IPv4 packets in which at least one of the given bits is set. bits is a mask of the 16-bit field
// of fragment flags and offset.
func (x expressions) fragment4(bits uint16) expressions {
	const flagsAndOffset = 6
	return x.isProtocol(unix.ETH_P_IP).load(expr.PayloadBaseNetworkHeader, flagsAndOffset, 2).hasAny(bits)
}

// typeofPortAnd returns the userdata of a set of ports. Each key of the set is a port's name and bytes of the network
// header that have no name in nft. nft prints this type as "typeof iifname . @nh,384,128". The numbers come from
// libnftables (enum expr_types, enum proto_bases and the *_build_udata functions). Each attribute begins with one
// byte for the type and one for the length.
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
			number(0, 0), number(1, 0), // no protocol and no field
			number(2, networkHeader), number(3, offset*bits), number(4, length*bits)))))
}
