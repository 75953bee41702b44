package nftnl

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Expressions is a list of the expressions of a rule, in the kernel's terms
// (include/uapi/linux/netfilter/nf_tables.h). The command `nft --debug=netlink` prints such expressions. One
// expression loads data into a register, and a later one reads the register.
type Expressions []expr.Any

// Collect returns the expressions that write appends.
func Collect(write func(*Expressions)) []expr.Any {
	var x Expressions
	write(&x)
	return x
}

// Add appends an expression.
func (x *Expressions) Add(e expr.Any) { *x = append(*x, e) }

// Marshal encodes expressions as attributes. family is the family of the rule's table.
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

// ToLink is an expression that sends a frame, or a copy of it, out of a link. A register contains the link's index.
// It works in the family netdev. Package expr has no fwd, and its Dup is only for IP packets.
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

// Forward appends expressions that send the frame out of the link with the given index.
func (x *Expressions) Forward(link int) { x.toLink(link, "fwd", 1) }

// Duplicate appends expressions that send a copy of the frame out of the link with the given index.
func (x *Expressions) Duplicate(link int) { x.toLink(link, "dup", 2) }

func (x *Expressions) toLink(link int, name string, attribute uint16) {
	x.Add(&expr.Immediate{Register: uint32(First), Data: binary.NativeEndian.AppendUint32(nil, uint32(link))})
	x.Add(&ToLink{Name: name, Attribute: attribute, Register: First})
}

// Register is the number of a register that an expression writes or reads.
type Register uint32

// First is the register that most expressions use. Second follows it in memory. A link name of 16 bytes in First and
// a value in Second form one key.
const (
	First  Register = unix.NFT_REG_1
	Second Register = unix.NFT_REG_2
)

// Behind returns the register for the next part of a key. length is the number of bytes of the parts before it, a
// multiple of 4. Each register of 16 bytes can also be used as four registers of 4 bytes.
func Behind(length uint32) Register {
	const parts = 4
	return unix.NFT_REG32_00 + Register(length/parts)
}

// Meta loads metadata of the packet, such as the mark or the incoming link.
func (x *Expressions) Meta(key expr.MetaKey, to Register) {
	x.Add(&expr.Meta{Key: key, Register: uint32(to)})
}

// Payload loads length bytes at an offset of a header.
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

// Compare ends the rule unless the comparison op of the first register with data is true.
func (x *Expressions) Compare(op expr.CmpOp, data []byte) {
	x.Add(&expr.Cmp{Op: op, Register: uint32(First), Data: data})
}

// Lookup ends the rule unless the set contains the key. The key begins in the first register and may continue in the
// next ones.
func (x *Expressions) Lookup(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set})
}

// LookupNone ends the rule if the set contains the key that begins in the first register.
func (x *Expressions) LookupNone(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set, Invert: true})
}

// Return ends the chain. In a base chain, the chain's policy then applies.
func (x *Expressions) Return() { x.Add(&expr.Verdict{Kind: expr.VerdictReturn}) }

// Drop drops the packet.
func (x *Expressions) Drop() { x.Add(&expr.Verdict{Kind: expr.VerdictDrop}) }

// nft's numbers for data types (enum datatypes in include/datatype.h). The kernel only stores them. The type of a
// concatenation has TypeBits bits for each part.
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

// LinkKey returns a key with the name of a link, padded to 16 bytes, followed by rest. It pads rest with zeros to at
// least pad bytes.
func LinkKey(link string, rest []byte, pad int) []byte {
	key := make([]byte, IfnameLen, IfnameLen+max(len(rest), pad))
	copy(key, link)
	key = append(key, rest...)
	for len(key) < IfnameLen+pad {
		key = append(key, 0)
	}
	return key
}
