package nftnl

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Expressions are the steps of a rule, in the kernel's terms: `nft --debug=netlink` prints rules as rows of them. A
// step loads into a register, which a later step reads (include/uapi/linux/netfilter/nf_tables.h).
type Expressions []expr.Any

// Collect gives the steps that a function writes.
func Collect(write func(*Expressions)) []expr.Any {
	var x Expressions
	write(&x)
	return x
}

// Add appends a step.
func (x *Expressions) Add(e expr.Any) { *x = append(*x, e) }

// Marshal gives steps as attributes.
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

// ToLink sends a frame, or a copy of it, out by the link whose index is in a register, in family netdev. Package expr has
// no fwd, and its Dup is for packets of IP.
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

// Forward sends the frame out by a link.
func (x *Expressions) Forward(link int) { x.toLink(link, "fwd", 1) }

// Duplicate sends a copy of the frame out by a link.
func (x *Expressions) Duplicate(link int) { x.toLink(link, "dup", 2) }

func (x *Expressions) toLink(link int, name string, attribute uint16) {
	x.Add(&expr.Immediate{Register: uint32(First), Data: binary.NativeEndian.AppendUint32(nil, uint32(link))})
	x.Add(&ToLink{Name: name, Attribute: attribute, Register: First})
}

// Register is where steps put what they load, 16 bytes each.
type Register uint32

// First is the register that most steps go by. Second is right behind: a name of 16
// bytes and what follows make one key.
const (
	First  Register = unix.NFT_REG_1
	Second Register = unix.NFT_REG_2
)

// Behind is where a part of a key goes that others of so many bytes come before, a
// multiple of 4: registers of 16 bytes consist of such of 4.
func Behind(length uint32) Register {
	const parts = 4
	return unix.NFT_REG32_00 + Register(length/parts)
}

// Meta loads a property of the packet that is not in it.
func (x *Expressions) Meta(key expr.MetaKey, to Register) {
	x.Add(&expr.Meta{Key: key, Register: uint32(to)})
}

// Payload loads bytes of a header.
func (x *Expressions) Payload(base expr.PayloadBase, offset, length uint32, to Register) {
	x.Add(&expr.Payload{DestRegister: uint32(to), Base: base, Offset: offset, Len: length})
}

// Mask makes the first register (it & mask) ^ xor; a nil xor is 0.
func (x *Expressions) Mask(mask, xor []byte) {
	if xor == nil {
		xor = make([]byte, len(mask))
	}
	x.Add(&expr.Bitwise{SourceRegister: uint32(First), DestRegister: uint32(First), Len: uint32(len(mask)), Mask: mask, Xor: xor})
}

// Compare ends the rule unless the first register is (or is not) the data.
func (x *Expressions) Compare(op expr.CmpOp, data []byte) {
	x.Add(&expr.Cmp{Op: op, Register: uint32(First), Data: data})
}

// Lookup ends the rule unless the first register, and those behind it that the
// set's keys fill, are in the set.
func (x *Expressions) Lookup(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set})
}

// LookupNone ends the rule if they are.
func (x *Expressions) LookupNone(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set, Invert: true})
}

// Leave ends the chain: in a base chain the packet goes on by its policy.
func (x *Expressions) Leave() { x.Add(&expr.Verdict{Kind: expr.VerdictReturn}) }

// Drop ends the packet.
func (x *Expressions) Drop() { x.Add(&expr.Verdict{Kind: expr.VerdictDrop}) }

// nft's numbers of its data types (enum datatypes in its include/datatype.h); the kernel only
// stores them. Of a concatenation, each part has TypeBits.
const (
	TypeInteger  = 4
	TypeIPv4     = 7
	TypeIPv6     = 8
	TypeEther    = 9
	TypeProtocol = 12 // inet_proto
	TypePort     = 13 // inet_service
	TypeIfname   = 41
	TypeBits     = 6
)

// Lengths in bytes, of parts of keys.
const (
	IfnameLen = 16 // IFNAMSIZ: a name and at least one NUL
	EtherLen  = 6
	EtherSlot = 8 // parts of a concatenation fill registers of 4 bytes
	IPv4Len   = 4
	IPv6Len   = 16
)

// LinkKey is the key of a link and something behind it: the name fills 16 bytes, and the rest
// at least pad.
func LinkKey(link string, rest []byte, pad int) []byte {
	key := make([]byte, IfnameLen, IfnameLen+max(len(rest), pad))
	copy(key, link)
	key = append(key, rest...)
	for len(key) < IfnameLen+pad {
		key = append(key, 0)
	}
	return key
}
