package nftnl

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Bytes returns an attribute with the data b. It does not copy b.
func Bytes(typ uint16, b []byte) netlink.Attribute { return netlink.Attribute{Type: typ, Data: b} }

// String returns an attribute with a string that ends with a NUL.
func String(typ uint16, s string) netlink.Attribute {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return Bytes(typ, b)
}

// Uint32 returns an attribute with a number of four bytes in network byte order, as nf_tables expects.
func Uint32(typ uint16, v uint32) netlink.Attribute {
	return Bytes(typ, binary.BigEndian.AppendUint32(make([]byte, 0, 4), v))
}

// Uint64 returns an attribute with a number of eight bytes in network byte order.
func Uint64(typ uint16, v uint64) netlink.Attribute {
	return Bytes(typ, binary.BigEndian.AppendUint64(make([]byte, 0, 8), v))
}

// Nest returns an attribute that contains attrs. If they are too long, encoding the result fails.
func Nest(typ uint16, attrs ...netlink.Attribute) netlink.Attribute {
	b, err := marshal(attrs)
	if err != nil {
		return netlink.Attribute{Type: typ, Length: invalid}
	}
	return Bytes(netlink.Nested|typ, b)
}

// Header returns the header of a nested attribute without its content. The attributes in nested are the content, and
// must follow the header directly in the message. Header makes no allocation, unlike Nest, so messages of an ADD use
// it. If nested contains another Header, only the header itself is counted, since its content must be in nested too.
func Header(typ uint16, nested []netlink.Attribute) netlink.Attribute {
	n := unix.NLA_HDRLEN
	for i := range nested {
		n += unix.NLA_HDRLEN + (len(nested[i].Data)+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)
	}
	if n > math.MaxUint16 {
		n = invalid
	}
	return netlink.Attribute{Type: netlink.Nested | typ, Length: uint16(n)}
}

// invalid is a length that MarshalAttributes rejects, since it is shorter than an attribute's header.
const invalid = 1

// marshal encodes attributes. It returns an error if an attribute is too long. The library's function would silently
// truncate the length to 16 bits.
func marshal(attrs []netlink.Attribute) ([]byte, error) {
	for i := range attrs {
		if len(attrs[i].Data) > math.MaxUint16-unix.NLA_HDRLEN {
			return nil, fmt.Errorf("attribute %d: %w", attrs[i].Type&^netlink.Nested, errTooLong)
		}
	}
	return netlink.MarshalAttributes(attrs)
}

var errTooLong = errors.New("attribute is longer than 65,531 bytes")

// headerLen is the length of struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h).
const headerLen = 4

// message encodes a request. It reuses the memory of buf. resource is the subsystem in messages that begin or end a
// transaction, and 0 in others.
func message(buf []byte, typ netlink.HeaderType, flags netlink.HeaderFlags, family uint8, resource uint16,
	attrs []netlink.Attribute) (netlink.Message, error) {
	b, err := marshal(attrs)
	data := binary.BigEndian.AppendUint16(append(slices.Grow(buf[:0], headerLen+len(b)), family, unix.NFNETLINK_V0),
		resource)
	return netlink.Message{Header: netlink.Header{Type: typ, Flags: flags}, Data: append(data, b...)}, err
}

// Type returns the netlink message type for an NFT_MSG_* constant.
func Type(msg uint16) netlink.HeaderType {
	return netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | msg)
}

// body returns a callback that calls reply with the attributes of a message, after struct nfgenmsg. For a malformed
// message, the error matches nl.ErrMalformed.
func body(reply func([]byte) error) func(netlink.Message) error {
	return func(m netlink.Message) error {
		if len(m.Data) < headerLen {
			return fmt.Errorf("%w: a reply of %d bytes", nl.ErrMalformed, len(m.Data))
		}
		attrs := m.Data[headerLen:]
		if err := nl.Decode(attrs, func(*netlink.AttributeDecoder) {}); err != nil {
			return err
		}
		return reply(attrs)
	}
}

// Each calls fn with the content of each attribute in list.
func Each(list []byte, fn func([]byte)) {
	// If the list is malformed, fn gets only the attributes before the error.
	_ = nl.Decode(list, func(ad *netlink.AttributeDecoder) { fn(ad.Bytes()) })
}

// Find returns the content of a nested attribute: see nl.Find.
func Find(b []byte, path ...uint16) []byte { return nl.Find(b, path...) }

// Text returns the bytes before the first NUL as a string.
func Text(b []byte) string { return nl.Text(b) }

// Number returns the number in four bytes in network byte order. If b has another length, it returns 0.
func Number(b []byte) uint32 {
	if len(b) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(b)
}

// Number64 returns the number in eight bytes in network byte order. If b has another length, it returns 0.
func Number64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

// Comment returns text as userdata in the format of libnftables: one byte for the type, one for the length, and the
// text with a NUL. Rules, chains and elements use the same format.
func Comment(text string) []byte {
	return userdata.AppendString(make([]byte, 0, 2+len(text)+1), userdata.TypeComment, text)
}

// CommentOf returns the comment in userdata, or "" if there is none. It checks lengths, since other programs may write
// any bytes there. The function of package userdata panics on a wrong length.
func CommentOf(b []byte) string {
	for len(b) >= 2 && int(b[1]) <= len(b)-2 {
		end := 2 + int(b[1])
		if userdata.Type(b[0]) == userdata.TypeComment {
			return Text(b[2:end])
		}
		b = b[end:]
	}

	return ""
}

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

// Meta appends an expression that loads metadata of the packet, such as the mark or the incoming link, into a register.
func (x *Expressions) Meta(key expr.MetaKey, to Register) {
	x.Add(&expr.Meta{Key: key, Register: uint32(to)})
}

// Payload appends an expression that loads length bytes at an offset of a header into a register.
func (x *Expressions) Payload(base expr.PayloadBase, offset, length uint32, to Register) {
	x.Add(&expr.Payload{DestRegister: uint32(to), Base: base, Offset: offset, Len: length})
}

// Mask appends an expression that sets the first register to (register & mask) ^ xor. A nil xor means 0.
func (x *Expressions) Mask(mask, xor []byte) {
	if xor == nil {
		xor = make([]byte, len(mask))
	}
	x.Add(&expr.Bitwise{SourceRegister: uint32(First), DestRegister: uint32(First), Len: uint32(len(mask)), Mask: mask,
		Xor: xor})
}

// Compare appends an expression that ends the rule unless the comparison op of the first register with data is true.
func (x *Expressions) Compare(op expr.CmpOp, data []byte) {
	x.Add(&expr.Cmp{Op: op, Register: uint32(First), Data: data})
}

// Lookup appends an expression that ends the rule unless the set contains the key. The key begins in the first register
// and may continue in the next ones.
func (x *Expressions) Lookup(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set})
}

// LookupNone appends an expression that ends the rule if the set contains the key that begins in the first register.
func (x *Expressions) LookupNone(set string) {
	x.Add(&expr.Lookup{SourceRegister: uint32(First), SetName: set, Invert: true})
}

// Return appends an expression that ends the chain. In a base chain, the chain's policy then applies.
func (x *Expressions) Return() { x.Add(&expr.Verdict{Kind: expr.VerdictReturn}) }

// Drop appends an expression that drops the packet.
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

// DefaultMark is the mark bit if the field Mark of nft.Config or foreign.Config is 0. Packets with this bit may be
// forwarded for pods. docs/config.md lists the bits that other programs use.
const DefaultMark = 0x10

// DefaultTable is the name of our tables if the field Table of nft.Config or foreign.Config is empty.
const DefaultTable = "tombolo"

// maxTable is the maximum length in bytes of a table's name that CheckTable accepts. Such a name still fits into the
// comment of a rule.
const maxTable = 32

// CheckTable checks the fields Table and Mark of nft.Config or foreign.Config. If one is invalid, the error matches
// tombolo.ErrInvalid. An empty name means DefaultTable. A mark of 0 is valid only with DefaultTable: any other table
// needs its own mark.
func CheckTable(name string, mark uint32) error {
	isLetter := func(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }
	switch {
	case name != "" && !(ident.IsIdentifier(name) && isLetter(name[0])):
		return fmt.Errorf("%w: table %.64q: want a letter first, and then letters, digits, '_', '.' and '-'",
			tombolo.ErrInvalid, name)
	case len(name) > maxTable:
		return fmt.Errorf("%w: table %.64q: %d characters, where %d are the most", tombolo.ErrInvalid, name,
			len(name), maxTable)
	case name != "" && name != DefaultTable && mark == 0:
		return fmt.Errorf("%w: table %s needs a mark of its own: it clears the mark of table %s", tombolo.ErrInvalid,
			name, DefaultTable)
	}

	return nil
}

// PriorityForward is the priority of the chain that marks pods' packets. nft calls it "filter - 10".
const PriorityForward = -10

// FamilyName returns nft's name for a table family (unix.NFPROTO_*). For a family that it does not know, such as arp,
// it returns the number.
func FamilyName(family uint8) string {
	names := map[uint8]string{
		unix.NFPROTO_INET: "inet", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_NETDEV: "netdev",
		unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6",
	}
	return cmp.Or(names[family], strconv.Itoa(int(family)))
}

// Table describes a table in the kernel (NFT_MSG_NEWTABLE).
type Table struct{ Flags uint32 }

// IsDormant reports whether the table is inactive, with all chains unhooked (nft's flag "dormant").
func (t Table) IsDormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// DecodeTable parses the attributes of a table.
func DecodeTable(b []byte) Table { return Table{Flags: Number(Find(b, unix.NFTA_TABLE_FLAGS))} }

// Chain describes a chain in the kernel (NFT_MSG_NEWCHAIN). If Kind is empty, it is no base chain: only rules of its
// own table call it.
type Chain struct {
	Table, Name string
	Kind        string
	Hook        uint32
	Device      string // in family netdev: the name of the link with the hook, if there is exactly one
	Priority    int32
	Policy      uint32
	Uses        uint32 // the number of its rules plus the number of jumps to it
	Comment     string
}

// ChainUserdata is the attribute NFTA_CHAIN_USERDATA (Linux 5.10).
const ChainUserdata = 12

// DecodeChain parses the attributes of a chain.
func DecodeChain(b []byte) Chain {
	text := func(path ...uint16) string { return Text(Find(b, path...)) }
	number := func(path ...uint16) uint32 { return Number(Find(b, path...)) }
	return Chain{
		Table: text(unix.NFTA_CHAIN_TABLE), Name: text(unix.NFTA_CHAIN_NAME), Kind: text(unix.NFTA_CHAIN_TYPE),
		Hook:     number(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_HOOKNUM),
		Device:   text(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_DEV),
		Priority: int32(number(unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_PRIORITY)),
		Policy:   number(unix.NFTA_CHAIN_POLICY), Uses: number(unix.NFTA_CHAIN_USE),
		Comment: CommentOf(Find(b, ChainUserdata)),
	}
}

// DoctorName is the name of the thread in which `tombolo doctor` changes its own table. The kernel announces the
// thread's name with each change. So tombolod can ignore these changes.
const DoctorName = "tombolo-doctor"

// Queue describes the user-space queues (NFQUEUE) that a rule passes packets to: Total queues from First on.
type Queue struct {
	First, Total uint16
	Bypass       bool // the kernel accepts the packet if no program listens
}

// QueueOf returns the queues that a rule passes packets to. The parameter rule holds the attributes of an
// NFT_MSG_NEWRULE. ok is false for a rule without a queue, and for a rule that computes the queue's number.
func QueueOf(rule []byte) (q Queue, ok bool) {
	Each(Find(rule, unix.NFTA_RULE_EXPRESSIONS), func(b []byte) {
		own := Find(b, unix.NFTA_EXPR_DATA)
		const targetName, targetInfo = 1, 3
		info := Find(own, targetInfo)
		switch name := Text(Find(b, unix.NFTA_EXPR_NAME)); {
		case name == "queue":
			var e expr.Queue
			if err := expr.Unmarshal(0, own, &e); err == nil && e.Total > 0 {
				q, ok = Queue{e.Num, e.Total, e.Flag&expr.QueueFlagBypass != 0}, true
			}
		case name == "target" && Text(Find(own, targetName)) == "NFQUEUE" && len(info) >= 8:
			// info is a struct xt_NFQ_info_v3. The shorter structs of revisions 0 and 1 are padded with zeros.
			at := func(offset int) uint16 { return binary.NativeEndian.Uint16(info[offset:]) }
			q, ok = Queue{at(0), max(at(2), 1), at(4)&1 != 0}, true
		}
	})
	return q, ok
}

// QueueListeners returns the numbers of the queues that programs read in the calling thread's network namespace.
func QueueListeners() (map[uint16]bool, error) {
	text, err := os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_queue")
	if errors.Is(err, os.ErrNotExist) { // the module is not loaded
		err = nil
	}
	list := map[uint16]bool{}
	for line := range strings.Lines(string(text)) {
		var n uint16
		if _, err := fmt.Sscan(line, &n); err == nil {
			list[n] = true
		}
	}
	return list, err
}

// RuleComment returns the comment of a rule, no matter whether nft or iptables added the rule. The parameter rule holds
// the attributes of an NFT_MSG_NEWRULE. Without a comment, RuleComment returns "".
func RuleComment(rule []byte) string {
	comment := CommentOf(Find(rule, unix.NFTA_RULE_USERDATA))
	Each(Find(rule, unix.NFTA_RULE_EXPRESSIONS), func(b []byte) {
		const matchName, matchInfo = 1, 3
		own := Find(b, unix.NFTA_EXPR_DATA)
		if Text(Find(b, unix.NFTA_EXPR_NAME)) == "match" && Text(Find(own, matchName)) == "comment" {
			comment = Text(Find(own, matchInfo))
		}
	})
	return comment
}
