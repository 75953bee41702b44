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

// conntrackState loads the state of the packet's connection, as a set of bits.
func (x expressions) conntrackState() {
	x.add("ct", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_CT_KEY, unix.NFT_CT_STATE)
		e.Uint32BE(unix.NFTA_CT_DREG, uint32(first))
	})
}

// leave ends the chain: in a base chain the packet goes on by its policy.
func (x expressions) leave() {
	verdict := int32(unix.NFT_RETURN)
	x.add("immediate", func(e *nl.Encoder) {
		e.Uint32BE(unix.NFTA_IMMEDIATE_DREG, uint32(verdictRegister))
		e.Nest(unix.NFTA_IMMEDIATE_DATA, func(e *nl.Encoder) {
			e.Nest(unix.NFTA_DATA_VERDICT, func(e *nl.Encoder) {
				e.Uint32BE(unix.NFTA_VERDICT_CODE, uint32(verdict))
			})
		})
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

// isTo holds for a destination within a prefix. The whole bytes of a prefix are
// compared as they are, and others after masking.
func (x expressions) isTo(f family, p netip.Prefix) {
	x.is(f)
	length := uint32(p.Bits()) / 8
	if whole := p.Bits()%8 == 0; whole {
		x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, f.dst, length, first)
	} else {
		length = f.addrLen
		x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, f.dst, length, first)
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
	name     string
	proto    byte   // of nf_tables
	addrLen  uint32 // bytes
	src, dst uint32 // offsets in the header
	pods     string // the set
	all      netip.Prefix
	// multicast is every multicast address.
	multicast netip.Prefix
}

func families() [2]family {
	return [2]family{{
		name: "IPv4", proto: unix.NFPROTO_IPV4, addrLen: addr4Len, src: 12, dst: 16, pods: pods4Set,
		all:       netip.PrefixFrom(netip.IPv4Unspecified(), 0),
		multicast: netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4),
	}, {
		name: "IPv6", proto: unix.NFPROTO_IPV6, addrLen: addr6Len, src: 8, dst: 24, pods: pods6Set,
		all:       netip.PrefixFrom(netip.IPv6Unspecified(), 0),
		multicast: netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8),
	}}
}

func (f *family) is4() bool { return f.proto == unix.NFPROTO_IPV4 }
