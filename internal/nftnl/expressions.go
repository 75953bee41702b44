package nftnl

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Expressions are the steps of a rule, in the kernel's terms (include/uapi/linux/netfilter/nf_tables.h). `nft
// --debug=netlink` prints them. A step loads data into a register, and a later step reads the register.
type Expressions []expr.Any

// Collect returns the steps that write appends.
func Collect(write func(*Expressions)) []expr.Any {
	var x Expressions
	write(&x)
	return x
}

// Add appends a step.
func (x *Expressions) Add(e expr.Any) { *x = append(*x, e) }

// Marshal encodes steps as attributes.
func Marshal(family uint8, steps []expr.Any) ([]byte, error) {
	list := make([]netlink.Attribute, len(steps))
	for i, step := range steps {
		b, err := marshalStep(family, step)
		if err != nil {
			return nil, err
		}
		list[i] = Bytes(netlink.Nested|unix.NFTA_LIST_ELEM, b)
	}
	return marshal(list)
}

// ToLink sends a frame, or a copy of it, out of the link whose index is in a register (family netdev). Package expr
// has no fwd, and its Dup is only for IP packets.
type ToLink struct {
	expr.Any
	Name      string // "fwd" or "dup"
	Attribute uint16 // NFTA_FWD_SREG_DEV or NFTA_DUP_SREG_DEV
	Register  Register
}

func marshalStep(family uint8, step expr.Any) ([]byte, error) {
	to, ok := step.(*ToLink)
	if !ok {
		return expr.Marshal(family, step)
	}
	return marshal([]netlink.Attribute{
		String(unix.NFTA_EXPR_NAME, to.Name), Nest(unix.NFTA_EXPR_DATA, Uint32(to.Attribute, uint32(to.Register))),
	})
}

// Forward adds a step that sends the frame out of a link.
func (x *Expressions) Forward(link int) { x.toLink(link, "fwd", 1) }

// Duplicate adds a step that sends a copy of the frame out of a link.
func (x *Expressions) Duplicate(link int) { x.toLink(link, "dup", 2) }

func (x *Expressions) toLink(link int, name string, attribute uint16) {
	x.Add(&expr.Immediate{Register: uint32(First), Data: binary.NativeEndian.AppendUint32(nil, uint32(link))})
	x.Add(&ToLink{Name: name, Attribute: attribute, Register: First})
}

// Register is a register of 16 bytes that a step writes or reads.
type Register uint32

// First is the register that most steps use. Second follows it in memory: a link's name of 16 bytes in First and the
// value in Second form one key.
const (
	First  Register = unix.NFT_REG_1
	Second Register = unix.NFT_REG_2
)

// Behind returns the register for the next part of a key whose previous parts have length bytes, a multiple of 4. A
// register of 16 bytes consists of four registers of 4 bytes.
func Behind(length uint32) Register {
	const parts = 4
	return unix.NFT_REG32_00 + Register(length/parts)
}

// Meta loads a property of the packet that its bytes do not contain.
func (x *Expressions) Meta(key expr.MetaKey, to Register) {
	x.Add(&expr.Meta{Key: key, Register: uint32(to)})
}

// Payload loads length bytes of a header.
func (x *Expressions) Payload(base expr.PayloadBase, offset, length uint32, to Register) {
	x.Add(&expr.Payload{DestRegister: uint32(to), Base: base, Offset: offset, Len: length})
}

// Mask sets the first register to (register & mask) ^ xor. A nil xor means 0.
func (x *Expressions) Mask(mask, xor []byte) {
	if xor == nil {
		xor = make([]byte, len(mask))
	}
	x.Add(&expr.Bitwise{SourceRegister: uint32(First), DestRegister: uint32(First), Len: uint32(len(mask)), Mask: mask,
		Xor: xor})
}

// Compare ends the rule unless the first register equals (or differs from) data.
func (x *Expressions) Compare(op expr.CmpOp, data []byte) {
	x.Add(&expr.Cmp{Op: op, Register: uint32(First), Data: data})
}

// Lookup ends the rule unless the key in the first register, and in the following ones if the key is longer, is in
// the set.
func (x *Expressions) Lookup(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set})
}

// LookupNone ends the rule if that key is in the set.
func (x *Expressions) LookupNone(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set, Invert: true})
}

// Leave ends the chain. In a base chain its policy then decides about the packet.
func (x *Expressions) Leave() { x.Add(&expr.Verdict{Kind: expr.VerdictReturn}) }

// Drop drops the packet.
func (x *Expressions) Drop() { x.Add(&expr.Verdict{Kind: expr.VerdictDrop}) }

// nft's numbers for its data types (enum datatypes in its include/datatype.h). The kernel only stores them. The type
// of a concatenation has TypeBits bits for each part.
const (
	TypeInteger  = 4
	TypeIPv4     = 7
	TypeIPv6     = 8
	TypeEther    = 9
	TypeProtocol = 12 // inet_proto
	TypePort     = 13 // inet_service
	TypeFibAddr  = 38 // fib_addrtype
	TypeIfname   = 41
	TypeBits     = 6
)

// Lengths of parts of keys, in bytes.
const (
	IfnameLen = 16 // IFNAMSIZ, with at least one NUL
	EtherLen  = 6
	EtherSlot = 8 // a part of a concatenation fills whole registers of 4 bytes
	IPv4Len   = 4
	IPv6Len   = 16
)

// LinkKey returns a key that consists of a link's name, padded to 16 bytes, and rest, padded to at least pad bytes.
func LinkKey(link string, rest []byte, pad int) []byte {
	key := make([]byte, IfnameLen, IfnameLen+max(len(rest), pad))
	copy(key, link)
	key = append(key, rest...)
	for len(key) < IfnameLen+pad {
		key = append(key, 0)
	}
	return key
}
