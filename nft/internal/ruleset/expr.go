package ruleset

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// expressions builds the expressions of one rule. A method that returns expressions can be followed by another call,
// so that a rule reads as a sentence.
type expressions struct{ *nftnl.Expressions }

// load loads bytes of a header into the first register.
func (x expressions) load(base expr.PayloadBase, offset, length uint32) expressions {
	x.Payload(base, offset, length, nftnl.First)
	return x
}

// loadMeta loads a property of the packet into the first register.
func (x expressions) loadMeta(key expr.MetaKey) expressions {
	x.Meta(key, nftnl.First)
	return x
}

// compare ends the rule unless the comparison op of the first register with data is true.
func (x expressions) compare(op expr.CmpOp, data []byte) expressions {
	x.Compare(op, data)
	return x
}

// isIn ends the rule unless the loaded key is in the set.
func (x expressions) isIn(set string) expressions {
	x.Lookup(set)
	return x
}

// isNotIn ends the rule if the loaded key is in the set.
func (x expressions) isNotIn(set string) expressions {
	x.LookupNone(set)
	return x
}

// lookupData looks up the key that begins in the first register, and loads the map's data for it into the same
// registers. If the map does not contain the key, the rule does not match.
func (x expressions) lookupData(name string) expressions {
	x.Add(&expr.Lookup{SourceRegister: uint32(nftnl.First), DestRegister: uint32(nftnl.First), IsDestRegSet: true,
		SetName: name})

	return x
}

// loadDestinationType loads the type of the destination address according to the routing tables, such as RTN_LOCAL or
// RTN_UNICAST. The value is in the host's byte order.
func (x expressions) loadDestinationType() expressions {
	x.Add(&expr.Fib{Register: uint32(nftnl.First), ResultADDRTYPE: true, FlagDADDR: true})

	return x
}

// dnat changes the destination of the connection. The first register contains the new address, and the register
// behind the address contains the new port.
func (x expressions) dnat(f Family) {
	x.Add(&expr.NAT{
		Type: expr.NATTypeDestNAT, Family: uint32(f.Proto), RegAddrMin: uint32(nftnl.First),
		RegProtoMin: uint32(nftnl.Behind(f.AddrLen)),
	})
}

// masquerade changes the source of the connection to the address of the outgoing link.
func (x expressions) masquerade() { x.Add(&expr.Masq{}) }

// The following methods are the building blocks of rules. A method whose name begins with "is" adds a match.

// is matches packets of the family f. nft adds this match by itself to rules that read headers of the family, and
// omits it when it prints such rules.
func (x expressions) is(f Family) expressions { return x.isMeta(expr.MetaKeyNFPROTO, []byte{f.Proto}) }

// isEthernet matches packets whose incoming link has Ethernet headers. At an egress hook, which has no incoming link,
// the kernel checks the outgoing one.
func (x expressions) isEthernet() expressions {
	return x.isMeta(expr.MetaKeyIIFTYPE, binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_ETHER))
}

// isReply matches packets of connections that have seen an answer, and packets that are related to any connection. In
// nf_tables, bit n+1 stands for state n of the kernel's enum ip_conntrack_info.
func (x expressions) isReply() expressions {
	return x.hasConntrackBit(expr.CtKeySTATE, expr.CmpOpNeq, replyStates)
}

// replyStates are the bits of the conntrack states "established" and "related".
const replyStates = established | 1<<2

const established = 1 << 1

// isRedirected matches packets of connections whose destination was changed, by our rules or by another program's.
func (x expressions) isRedirected() expressions {
	return x.hasConntrackBit(expr.CtKeySTATUS, expr.CmpOpNeq, dstNAT)
}

const dstNAT = 1 << 5 // IPS_DST_NAT of enum ip_conntrack_status

// hasConntrackBit matches connections that have at least one of the bits if op is expr.CmpOpNeq. If op is
// expr.CmpOpEq, it matches connections that have none of them.
func (x expressions) hasConntrackBit(key expr.CtKey, op expr.CmpOp, bits uint32) expressions {
	x.Add(&expr.Ct{Key: key, Register: uint32(nftnl.First)})
	x.Mask(binary.NativeEndian.AppendUint32(nil, bits), nil)
	return x.compare(op, make([]byte, 4))
}

// isNotLoopback matches packets whose link is not lo. linkName selects the incoming or the outgoing link.
func (x expressions) isNotLoopback(linkName expr.MetaKey) expressions {
	return x.isNotMeta(linkName, nftnl.LinkKey(loopbackLink, nil, 0))
}

// isTo matches packets to an address in the prefix p.
func (x expressions) isTo(f Family, p netip.Prefix) expressions { return x.is(f).inPrefix(f.dst, p) }

// isFrom matches packets from an address in the prefix p.
func (x expressions) isFrom(f Family, p netip.Prefix) expressions { return x.is(f).inPrefix(f.src, p) }

// inPrefix matches packets whose address at an offset in the network header is in the prefix. The caller matches the
// family. A prefix of whole bytes is compared directly, and others after masking.
func (x expressions) inPrefix(offset uint32, p netip.Prefix) expressions {
	length, whole := uint32(p.Bits())/8, p.Bits()%8 == 0
	if !whole {
		length = uint32(p.Addr().BitLen()) / 8
	}

	x.load(expr.PayloadBaseNetworkHeader, offset, length)
	if !whole {
		x.Mask(netmask(p.Bits(), int(length)), nil)
	}
	return x.compare(expr.CmpOpEq, p.Masked().Addr().AsSlice()[:length])
}

// netmask returns a mask of length bytes in which the given number of leading bits is set.
func netmask(bits, length int) []byte {
	mask := make([]byte, length)
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// isMeta matches packets whose metadata for key are equal to data.
func (x expressions) isMeta(key expr.MetaKey, data []byte) expressions {
	return x.loadMeta(key).compare(expr.CmpOpEq, data)
}

// isNotMeta matches packets whose metadata for key differ from data.
func (x expressions) isNotMeta(key expr.MetaKey, data []byte) expressions {
	return x.loadMeta(key).compare(expr.CmpOpNeq, data)
}

// isAt matches packets that contain data at an offset of a header.
func (x expressions) isAt(base expr.PayloadBase, offset uint32, data []byte) expressions {
	return x.load(base, offset, uint32(len(data))).compare(expr.CmpOpEq, data)
}

// linkIn matches packets whose link is in the set. linkName selects the incoming or the outgoing link.
func (x expressions) linkIn(linkName expr.MetaKey, set string) expressions {
	return x.loadMeta(linkName).isIn(set)
}

// linkNotIn matches packets whose link is in none of the sets.
func (x expressions) linkNotIn(linkName expr.MetaKey, sets ...string) expressions {
	for _, set := range sets {
		x.loadMeta(linkName).isNotIn(set)
	}
	return x
}

// portNotIn matches packets if the set does not contain their incoming link together with some bytes of a header.
func (x expressions) portNotIn(base expr.PayloadBase, offset, length uint32, set string) expressions {
	return x.loadLinkAnd(expr.MetaKeyIIFNAME, base, offset, length).isNotIn(set)
}

// loadLinkAnd loads a link's name and some bytes of a header, which are the key of many sets.
func (x expressions) loadLinkAnd(linkName expr.MetaKey, base expr.PayloadBase, offset, length uint32) expressions {
	x.loadMeta(linkName).Payload(base, offset, length, nftnl.Second)
	return x
}

// isPod matches packets of family f whose address at an offset in the header is a pod's. The pod must be behind the
// packet's incoming or outgoing link, which link selects.
func (x expressions) isPod(f Family, link expr.MetaKey, offset uint32) expressions {
	return x.is(f).loadLinkAddress(link, offset, f).isIn(f.Pods)
}

// loadAddress loads an address at an offset of the IP header.
func (x expressions) loadAddress(offset uint32, f Family) expressions {
	return x.load(expr.PayloadBaseNetworkHeader, offset, f.AddrLen)
}

// loadLinkAddress loads a link's name and an address at an offset of the IP header.
func (x expressions) loadLinkAddress(linkName expr.MetaKey, offset uint32, f Family) expressions {
	return x.loadLinkAnd(linkName, expr.PayloadBaseNetworkHeader, offset, f.AddrLen)
}

// loadHostPort loads the key of a published port: the protocol and the destination port. length is the number of bytes
// that the registers already contain. The destination port is at the same offset in all protocols with ports.
func (x expressions) loadHostPort(length uint32) expressions {
	const dstPort, portLen = 2, 2
	x.Meta(expr.MetaKeyL4PROTO, nftnl.Behind(length))
	x.Payload(expr.PayloadBaseTransportHeader, dstPort, portLen, nftnl.Behind(length+Slot))

	return x
}

// loadPodPort loads the outgoing link, the destination, the protocol and the port of a packet: the key of a pod's port.
func (x expressions) loadPodPort(f Family) expressions {
	return x.loadLinkAddress(expr.MetaKeyOIFNAME, f.dst, f).loadHostPort(IfnameLen + f.AddrLen)
}

// loadBridges loads the names of the incoming and the outgoing link. A lookup in a set of equal pairs then matches
// packets that stay on a bridge.
func (x expressions) loadBridges() expressions {
	x.loadMeta(expr.MetaKeyIIFNAME).Meta(expr.MetaKeyOIFNAME, nftnl.Second)
	return x
}

// clearMark clears bits of the packet's mark.
func (x expressions) clearMark(bits uint32) { x.changeMark(bits, 0) }

// addMark sets bits of the packet's mark.
func (x expressions) addMark(bits uint32) { x.changeMark(bits, bits) }

func (x expressions) changeMark(cleared, set uint32) {
	number := func(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
	x.loadMeta(expr.MetaKeyMARK).Mask(number(^cleared), number(set))
	x.Add(&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: uint32(nftnl.First)})
}

// Family holds the differences between IPv4 and IPv6 that matter for rules.
type Family struct {
	name      string
	Proto     byte   // nf_tables' number of the family
	AddrLen   uint32 // length of an address in bytes
	addrType  uint32 // nft's number of the address type
	src, dst  uint32 // offsets of the addresses in the header
	All       netip.Prefix
	multicast netip.Prefix // all multicast addresses

	// The names of the sets and maps for pods and published ports. Pods contains the addresses of pods, each with the
	// link to the pod. HostPorts maps a port on all addresses of the host to a pod's address and port. HostAddrs is the
	// map for ports on one address. Published contains the pods' own ports that host ports lead to, unless
	// nft.Endpoint.Unadmitted is set. Selves contains pairs of two addresses of one pod, which match calls to itself.
	// Services contains host addresses that ports on all addresses are not published on. SNATAll and SNATNone contain
	// pods' ports with this value of nft.Endpoint.PortSNAT.
	Pods, HostAddrs, HostPorts, Published, Selves, Services, SNATAll, SNATNone string

	// The names of the sets for egress policies and for callers of host ports. egress contains the destinations that
	// pods of a bridge may call. limited contains the pods with a policy of their own, and podEgress their
	// destinations. refused contains sources that host ports are closed to, and excepted the links through which such
	// a source may call.
	egress, limited, podEgress, refused, excepted string
}

// Families returns the families IPv4 and IPv6, in this order.
func Families() [2]Family {
	return [2]Family{{
		name: "IPv4", Proto: unix.NFPROTO_IPV4, AddrLen: Addr4Len, addrType: nftnl.TypeIPv4, src: 12, dst: 16,
		All:       netip.PrefixFrom(netip.IPv4Unspecified(), 0),
		multicast: netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4),
		Pods:      Pods4Set, HostAddrs: "hostaddrs4", HostPorts: "hostports4", Published: "published4",
		Selves: "selves4", Services: "services4", SNATAll: "snatall4", SNATNone: "snatnone4",
		egress: "egress4", limited: "limited4", podEgress: "pod-egress4",
		refused: "refused4", excepted: "excepted4",
	}, {
		name: "IPv6", Proto: unix.NFPROTO_IPV6, AddrLen: addr6Len, addrType: nftnl.TypeIPv6, src: 8, dst: 24,
		All:       netip.PrefixFrom(netip.IPv6Unspecified(), 0),
		multicast: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8),
		Pods:      Pods6Set, HostAddrs: "hostaddrs6", HostPorts: "hostports6", Published: "published6",
		Selves: "selves6", Services: "services6", SNATAll: "snatall6", SNATNone: "snatnone6",
		egress: "egress6", limited: "limited6", podEgress: "pod-egress6",
		refused: "refused6", excepted: "excepted6",
	}}
}

// Is4 reports whether the family is IPv4.
func (f *Family) Is4() bool { return f.Proto == unix.NFPROTO_IPV4 }

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

// isEtherType matches frames with an EtherType. If a frame has a VLAN tag, its EtherType is the type of the tag, such
// as unix.ETH_P_8021Q, and not the type behind the tag.
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
	return x.loadLinkAnd(expr.MetaKeyIIFNAME, expr.PayloadBaseNetworkHeader, offset, length).isIn(set)
}

// isOwnID matches packets with an address that SLAAC may assign to the pod behind the incoming port. offset is the
// offset of the interface identifier in the IP header.
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

// isNoSender matches ARP messages whose sender address is 0.0.0.0. It compares only the address: match ARP before.
func (x expressions) isNoSender() expressions {
	return x.isAt(expr.PayloadBaseNetworkHeader, arpSenderIP, make([]byte, Addr4Len))
}

// isDiscovery matches ICMPv6 messages whose type is at least from and at most to, such as those of neighbour
// discovery.
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

// firstByte matches packets if the first byte of their transport header is at least from and at most to.
func (x expressions) firstByte(from, to byte) expressions {
	return x.load(expr.PayloadBaseTransportHeader, 0, 1).byteBetween(from, to)
}

// nextHeader matches packets whose IPv6 next header field is at least from and at most to.
func (x expressions) nextHeader(from, to byte) expressions {
	return x.load(expr.PayloadBaseNetworkHeader, ip6NextHeader, 1).byteBetween(from, to)
}

// byteBetween matches if the byte in the first register is at least from and at most to.
func (x expressions) byteBetween(from, to byte) expressions {
	return x.numberBetween([]byte{from}, []byte{to})
}

// numberBetween matches if the number in the first register is at least from and at most to, which are in network byte
// order.
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
