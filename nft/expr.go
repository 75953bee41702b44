package nft

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// expressions writes the steps of a rule, in the kernel's terms: `nft
// --debug=netlink` prints rules as rows of them. What a step loads goes to a
// register, which a later step reads (include/uapi/linux/netfilter/nf_tables.h).
//
// They are few and short enough to be written here, in place, by the same encoder
// as everything else.
type expressions struct{ e *nl.Encoder }

// add appends one step: its name, and its own attributes.
func (x expressions) add(name string, body func(e *nl.Encoder)) {
	x.e.Nest(unix.NFTA_LIST_ELEM, func(e *nl.Encoder) {
		e.String(unix.NFTA_EXPR_NAME, name)
		e.Nest(unix.NFTA_EXPR_DATA, body)
	})
}

// register is where expressions put what they load, 16 bytes each.
type register uint32

const (
	verdictRegister register = unix.NFT_REG_VERDICT
	first           register = unix.NFT_REG_1
	second          register = unix.NFT_REG_2 // right behind: a name of 16 bytes and what follows make one key
)

// behind is where a part of a key goes that others of so many bytes come before, a
// multiple of 4: registers of 16 bytes consist of such of 4.
func behind(length uint32) register {
	const parts = 4
	return unix.NFT_REG32_00 + register(length/parts)
}

// meta loads a property of the packet that is not in it.
func (x expressions) meta(key uint32, to register) {
	x.add("meta", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_META_KEY, key)
		e.Uint32BE(unix.NFTA_META_DREG, uint32(to))
	})
}

// setMark makes the first register the packet's mark.
func (x expressions) setMark() {
	x.add("meta", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_META_KEY, unix.NFT_META_MARK)
		e.Uint32BE(unix.NFTA_META_SREG, uint32(first))
	})
}

// payload loads bytes of a header.
func (x expressions) payload(base, offset, length uint32, to register) {
	x.add("payload", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_PAYLOAD_DREG, uint32(to))
		e.Uint32BE(unix.NFTA_PAYLOAD_BASE, base)
		e.Uint32BE(unix.NFTA_PAYLOAD_OFFSET, offset)
		e.Uint32BE(unix.NFTA_PAYLOAD_LEN, length)
	})
}

// bitwise makes the first register (it & mask) ^ xor.
func (x expressions) bitwise(mask, xor []byte) {
	x.add("bitwise", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_BITWISE_SREG, uint32(first))
		e.Uint32BE(unix.NFTA_BITWISE_DREG, uint32(first))
		e.Uint32BE(unix.NFTA_BITWISE_LEN, uint32(len(mask)))
		value(e, unix.NFTA_BITWISE_MASK, mask)
		value(e, unix.NFTA_BITWISE_XOR, xor)
	})
}

// compare ends the rule unless the first register is (or is not) the data.
func (x expressions) compare(op uint32, data []byte) {
	x.add("cmp", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_CMP_SREG, uint32(first))
		e.Uint32BE(unix.NFTA_CMP_OP, op)
		value(e, unix.NFTA_CMP_DATA, data)
	})
}

// lookup ends the rule unless the first register, and those behind it that the
// set's keys fill, are in the set.
func (x expressions) lookup(set string) { x.lookupFlags(set, 0) }

// lookupNone ends the rule if they are.
func (x expressions) lookupNone(set string) { x.lookupFlags(set, unix.NFT_LOOKUP_F_INV) }

func (x expressions) lookupFlags(set string, flags uint32) {
	x.add("lookup", func(e *nl.Encoder) {
		e.String(unix.NFTA_LOOKUP_SET, set)
		e.Uint32BE(unix.NFTA_LOOKUP_SREG, uint32(first))
		e.Uint32BE(unix.NFTA_LOOKUP_FLAGS, flags)
	})
}

// lookupData puts the data that a map has for the key in the first register and
// those behind it into the same; without such an entry the rule ends.
func (x expressions) lookupData(name string) {
	x.add("lookup", func(e *nl.Encoder) {
		e.String(unix.NFTA_LOOKUP_SET, name)
		e.Uint32BE(unix.NFTA_LOOKUP_SREG, uint32(first))
		e.Uint32BE(unix.NFTA_LOOKUP_DREG, uint32(first))
		e.Uint32BE(unix.NFTA_LOOKUP_FLAGS, 0)
	})
}

// destinationType loads what the routing table for local traffic has the
// destination for: RTN_LOCAL, RTN_UNICAST and so on, in the host's byte order.
func (x expressions) destinationType() {
	x.add("fib", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_FIB_DREG, uint32(first))
		e.Uint32BE(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
		e.Uint32BE(unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_F_DADDR)
	})
}

// conntrackState loads the state of the packet's connection, as a set of bits.
func (x expressions) conntrackState() {
	x.add("ct", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_CT_KEY, unix.NFT_CT_STATE)
		e.Uint32BE(unix.NFTA_CT_DREG, uint32(first))
	})
}

// conntrackStatus loads the status bits of the packet's connection.
func (x expressions) conntrackStatus() {
	x.add("ct", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_CT_KEY, unix.NFT_CT_STATUS)
		e.Uint32BE(unix.NFTA_CT_DREG, uint32(first))
	})
}

// leave ends the chain: in a base chain the packet goes on by its policy.
func (x expressions) leave() { x.verdict(unix.NFT_RETURN) }

// drop ends the packet.
func (x expressions) drop() { x.verdict(verdictDrop) }

const verdictDrop = 0 // NF_DROP

func (x expressions) verdict(verdict int32) {
	x.add("immediate", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_IMMEDIATE_DREG, uint32(verdictRegister))
		e.Nest(unix.NFTA_IMMEDIATE_DATA, func(e *nl.Encoder) {
			e.Nest(unix.NFTA_DATA_VERDICT, func(e *nl.Encoder) {
				e.Uint32BE(unix.NFTA_VERDICT_CODE, uint32(verdict))
			})
		})
	})
}

// dnat gives the connection another destination: an address of the family in the
// first register, and a port behind it.
func (x expressions) dnat(f family) {
	x.add("nat", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
		e.Uint32BE(unix.NFTA_NAT_FAMILY, uint32(f.proto))
		e.Uint32BE(unix.NFTA_NAT_REG_ADDR_MIN, uint32(first))
		e.Uint32BE(unix.NFTA_NAT_REG_PROTO_MIN, uint32(behind(f.addrLen)))
	})
}

// masquerade gives the connection the address of the link that it leaves by.
func (x expressions) masquerade() { x.add("masq", func(*nl.Encoder) {}) }

func value(e *nl.Encoder, typ uint16, data []byte) {
	e.Nest(typ, func(e *nl.Encoder) { e.Bytes(unix.NFTA_DATA_VALUE, data) })
}

// What follows are the phrases that rules are made of.

// is holds for packets of a family. nft puts it before whatever looks into their
// headers, and takes it as said when it prints such a rule.
func (x expressions) is(f family) {
	x.meta(unix.NFT_META_NFPROTO, first)
	x.compare(unix.NFT_CMP_EQ, []byte{f.proto})
}

// isEthernet holds for packets that came in by a link with Ethernet headers.
func (x expressions) isEthernet() {
	x.meta(unix.NFT_META_IIFTYPE, first)
	x.compare(unix.NFT_CMP_EQ, binary.NativeEndian.AppendUint16(nil, unix.ARPHRD_ETHER))
}

// isReply holds for packets of connections that an answer has been seen of, and
// for what belongs to such (enum ip_conntrack_info: bit n+1 stands for state n).
func (x expressions) isReply() {
	const established, related = 1 << 1, 1 << 2
	x.conntrackState()
	x.bitwise(binary.NativeEndian.AppendUint32(nil, established|related), make([]byte, 4))
	x.compare(unix.NFT_CMP_NEQ, make([]byte, 4))
}

// isRedirected holds for packets of connections whose destination was changed, by
// us or by others.
func (x expressions) isRedirected() {
	const dstNAT = 1 << 5 // IPS_DST_NAT of enum ip_conntrack_status
	x.conntrackStatus()
	x.bitwise(binary.NativeEndian.AppendUint32(nil, dstNAT), make([]byte, 4))
	x.compare(unix.NFT_CMP_NEQ, make([]byte, 4))
}

// isLink holds for packets whose incoming or outgoing link is (or is not) of a name.
func (x expressions) isLink(linkName, op uint32, name string) {
	x.meta(linkName, first)
	x.compare(op, interfaceName(name))
}

// isTo holds for a destination within a prefix.
func (x expressions) isTo(f family, p netip.Prefix) { x.isWithin(f, f.dst, p) }

// isFrom holds for a source within a prefix.
func (x expressions) isFrom(f family, p netip.Prefix) { x.isWithin(f, f.src, p) }

// isWithin holds for an address within a prefix. The whole bytes of a prefix are
// compared as they are, and others after masking.
func (x expressions) isWithin(f family, offset uint32, p netip.Prefix) {
	x.is(f)
	x.inPrefix(offset, p)
}

// inPrefix holds for an address of the prefix's family at an offset in the header.
func (x expressions) inPrefix(offset uint32, p netip.Prefix) {
	length := uint32(p.Bits()) / 8
	if whole := p.Bits()%8 == 0; whole {
		x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, length, first)
	} else {
		length = uint32(p.Addr().BitLen()) / 8
		x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, offset, length, first)
		x.bitwise(netmask(p.Bits(), int(length)), make([]byte, length))
	}
	x.compare(unix.NFT_CMP_EQ, p.Masked().Addr().AsSlice()[:length])
}

// netmask is a prefix length as the bytes of a mask.
func netmask(bits, length int) []byte {
	mask := make([]byte, length)
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return mask
}

// port loads a link's name and an address: the key of a pod's port.
func (x expressions) port(linkName, base, offset, length uint32) {
	x.meta(linkName, first)
	x.payload(base, offset, length, second)
}

// hostPort loads the key of a published port, from behind what is there already: the
// protocol and the port that the packet is sent to, which all that have ports at
// all keep at the same place.
func (x expressions) hostPort(length uint32) {
	const dstPort, portLen = 2, 2
	x.meta(unix.NFT_META_L4PROTO, behind(length))
	x.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, dstPort, portLen, behind(length+slot))
}

// podPort loads the key of the port of a pod that a packet goes to.
func (x expressions) podPort(f family) {
	x.port(unix.NFT_META_OIFNAME, unix.NFT_PAYLOAD_NETWORK_HEADER, f.dst, f.addrLen)
	x.hostPort(ifnameLen + f.addrLen)
}

// bridged loads the key of what comes in and goes out by the same bridge.
func (x expressions) bridged() {
	x.meta(unix.NFT_META_IIFNAME, first)
	x.meta(unix.NFT_META_OIFNAME, second)
}

// clearMark takes bits out of the packet's mark.
func (x expressions) clearMark(bits uint32) { x.changeMark(bits, 0) }

// addMark puts them in.
func (x expressions) addMark(bits uint32) { x.changeMark(bits, bits) }

func (x expressions) changeMark(clear, set uint32) {
	x.meta(unix.NFT_META_MARK, first)
	x.bitwise(binary.NativeEndian.AppendUint32(nil, ^clear), binary.NativeEndian.AppendUint32(nil, set))
	x.setMark()
}

// family is what the rules of IPv4 and IPv6 differ in.
type family struct {
	name                                    string
	proto                                   byte   // of nf_tables
	addrLen                                 uint32 // bytes
	src, dst                                uint32 // offsets in the header
	pods                                    string // the sets and maps
	hostAddrs, hostPorts, published, selves string
	all                                     netip.Prefix
	// multicast is every multicast address.
	multicast netip.Prefix
}

func families() [2]family {
	return [2]family{{
		name: "IPv4", proto: unix.NFPROTO_IPV4, addrLen: addr4Len, src: 12, dst: 16, pods: pods4Set,
		hostAddrs: hostAddrs4Map, hostPorts: hostPorts4Map, published: published4Set, selves: selves4Set,
		all:       netip.PrefixFrom(netip.IPv4Unspecified(), 0),
		multicast: netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4),
	}, {
		name: "IPv6", proto: unix.NFPROTO_IPV6, addrLen: addr6Len, src: 8, dst: 24, pods: pods6Set,
		hostAddrs: hostAddrs6Map, hostPorts: hostPorts6Map, published: published6Set, selves: selves6Set,
		all:       netip.PrefixFrom(netip.IPv6Unspecified(), 0),
		multicast: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8),
	}}
}

func (f *family) is4() bool { return f.proto == unix.NFPROTO_IPV4 }
