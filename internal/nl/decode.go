package nl

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ErrMalformed is wrapped by every error about a message that cannot be parsed.
var ErrMalformed = errors.New("malformed netlink message")

// next returns the first netlink message in b, and the rest of b. If b begins with no complete message, the error
// matches ErrMalformed.
func next(b []byte) (netlink.Message, []byte, error) {
	var m netlink.Message
	n := 0
	if len(b) >= unix.NLMSG_HDRLEN {
		n = int(binary.NativeEndian.Uint32(b))
	}
	if err := m.UnmarshalBinary(b[:min(align(n), len(b))]); err != nil {
		return netlink.Message{}, nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return m, b[align(n):], nil
}

// appendHeader appends the header of a request with a body of n bytes. Sequence number and port ID stay 0.
func appendHeader(b []byte, typ netlink.HeaderType, flags netlink.HeaderFlags, n int) []byte {
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.NLMSG_HDRLEN+n))
	b = binary.NativeEndian.AppendUint16(b, uint16(typ))
	b = binary.NativeEndian.AppendUint16(b, uint16(flags))

	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

func align(n int) int { return (n + 3) &^ 3 }

// Decode calls fn for each attribute in b. If the attributes are malformed, or if fn reads an attribute as a wrong
// type, the error matches ErrMalformed.
func Decode(b []byte, fn func(ad *netlink.AttributeDecoder)) error {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return malformed(err)
	}
	for ad.Next() {
		fn(ad)
	}
	return malformed(ad.Err())
}

// Pick returns a copy of the attributes with the given types. If the list is malformed, the copy also contains the
// malformed rest. Callers decode the copy instead of b: decoding an attribute costs an allocation, and a link has some
// sixty attributes.
func Pick(b []byte, types ...uint16) []byte {
	picked := make([]byte, 0, len(b))
	for len(b) >= unix.NLA_HDRLEN {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.NLA_HDRLEN || n > len(b) {
			break
		}
		typ := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
		end := min(align(n), len(b))
		if slices.Contains(types, typ) {
			picked = append(picked, b[:end]...)
		}
		b = b[end:]
	}

	return append(picked, b...)
}

// Cut splits b at the first attribute with the given type. The result before has the bytes before the attribute. The
// result behind has all bytes after the attribute's header, including those after the attribute's end. If there is no
// such attribute, before has all of b, and behind is nil.
func Cut(b []byte, typ uint16) (before, behind []byte) {
	for at := 0; at+unix.NLA_HDRLEN <= len(b); {
		n := int(binary.NativeEndian.Uint16(b[at:]))
		if n < unix.NLA_HDRLEN {
			break
		}
		if binary.NativeEndian.Uint16(b[at+2:])&^unix.NLA_F_NESTED == typ {
			return b[:at], b[at+unix.NLA_HDRLEN:]
		}
		at += align(n)
	}

	return b, nil
}

// Find returns the content of a nested attribute. path lists the types of the enclosing attributes, the outermost
// first, and then the type of the attribute itself. If there is no such attribute, Find returns nil. It allocates
// nothing.
func Find(b []byte, path ...uint16) []byte {
	for _, typ := range path {
		before, behind := Cut(b, typ)
		if behind == nil {
			return nil
		}
		n := int(binary.NativeEndian.Uint16(b[len(before):])) - unix.NLA_HDRLEN
		b = behind[:min(n, len(behind))]
	}
	return b
}

// Text returns the bytes before the first NUL as a string.
func Text(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

// malformed wraps a decoder's error so that it matches ErrMalformed.
func malformed(err error) error {
	if err == nil || errors.Is(err, ErrMalformed) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrMalformed, err)
}

// Addr returns a function for AttributeDecoder.Do that stores an address of 4 or 16 bytes in *into. It does not unmap
// IPv4-mapped IPv6 addresses.
func Addr(into *netip.Addr) func([]byte) error {
	return func(b []byte) error {
		v, ok := netip.AddrFromSlice(b)
		if !ok {
			return fmt.Errorf("an address of %d bytes", len(b))
		}
		*into = v
		return nil
	}
}

// Keep returns an attribute unchanged, with its flags. Use it to preserve attributes for PutOther.
func Keep(ad *netlink.AttributeDecoder) netlink.Attribute {
	return netlink.Attribute{Type: ad.Type() | ad.TypeFlags(), Data: ad.Bytes()}
}

// ackError parses an NLMSG_ERROR. For an acknowledgement, errno is 0. Otherwise it returns the errno, and the
// kernel's text if there is one (include/uapi/linux/netlink.h, enum nlmsgerr_attrs).
func ackError(m netlink.Message) (errno unix.Errno, text string, err error) {
	// The header is struct nlmsgerr: the errno and the request's header. The request's payload does not follow, since
	// newSocket sets NETLINK_CAP_ACK.
	const headerLen = 4 + unix.NLMSG_HDRLEN
	if len(m.Data) < headerLen {
		return 0, "", fmt.Errorf("%w: an acknowledgement of %d bytes", ErrMalformed, len(m.Data))
	}

	errno, text = kernelError(m, headerLen)
	return errno, text, nil
}

// kernelError returns the errno at the beginning of a message, and the kernel's text if there is one. The text follows
// a header of the given length in bytes.
func kernelError(m netlink.Message, header int) (errno unix.Errno, text string) {
	if m.Header.Flags&netlink.AcknowledgeTLVs != 0 {
		text = extAck(m.Data[header:])
	}
	return unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data))), text
}

// extAck returns the text of an extended acknowledgement, or a text about a missing attribute. If there is neither, it
// returns "".
func extAck(b []byte) string {
	text, missing := Text(Find(b, unix.NLMSGERR_ATTR_MSG)), Find(b, nlmsgerrAttrMissType)
	if text == "" && len(missing) == 4 {
		return fmt.Sprintf("attribute %d is missing", binary.NativeEndian.Uint32(missing))
	}
	return text
}

const nlmsgerrAttrMissType = 5 // NLMSGERR_ATTR_MISS_TYPE, Linux 6.1

// Encode returns a request that consists of a fixed header and the attributes that fn writes. The length of head must
// be a multiple of four. fn may be nil.
func Encode(typ netlink.HeaderType, flags netlink.HeaderFlags, head []byte,
	fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	m := netlink.Message{Header: netlink.Header{Type: typ, Flags: flags}, Data: head}
	if fn == nil {
		return m, nil
	}
	ae := netlink.NewAttributeEncoder()
	fn(ae)
	attrs, err := ae.Encode()
	m.Data = append(m.Data[:len(m.Data):len(m.Data)], attrs...)
	return m, err
}

// Marshal returns a request that consists of a body and the attributes that fn writes. body is the MarshalBinary
// method of a type of another package. It is not an encoding.BinaryMarshaler, since an interface would link the
// type's decoding methods into the program. fn may be nil.
func Marshal(typ netlink.HeaderType, flags netlink.HeaderFlags, body func() ([]byte, error),
	fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	b, err := body()
	if err != nil {
		return netlink.Message{}, err
	}
	return Encode(typ, flags, b, fn)
}

// Nested writes an attribute that contains the attributes that fn writes.
func Nested(ae *netlink.AttributeEncoder, typ uint16, fn func(*netlink.AttributeEncoder)) {
	ae.Nested(typ, func(ae *netlink.AttributeEncoder) error { fn(ae); return nil })
}

const errAddress = Invalid("address is not valid")

// PutAddr writes an attribute with an address of 4 or 16 bytes. If the address is invalid, encoding fails.
func PutAddr(ae *netlink.AttributeEncoder, typ uint16, a netip.Addr) {
	ae.Do(typ, func() ([]byte, error) {
		if !a.IsValid() {
			return nil, errAddress
		}
		return a.AsSlice(), nil
	})
}

// FamilyOf returns the family of an address: unix.AF_INET or unix.AF_INET6. For an IPv4-mapped IPv6 address, it
// returns AF_INET6.
func FamilyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// Index converts a link's index or an MTU to the number in a message. A number that does not fit becomes
// math.MaxInt32, which the kernel rejects. If it were truncated, it could mean another link.
func Index(i int) uint32 {
	if i != int(int32(i)) {
		return math.MaxInt32
	}
	return uint32(i)
}

// PutOther writes attributes that Keep returned.
func PutOther(ae *netlink.AttributeEncoder, list []netlink.Attribute) {
	for _, a := range list {
		ae.Bytes(a.Type, a.Data)
	}
}

// Prefix returns the prefix with the given address and length. If the address is not of the family, or is too short
// for the length, the error matches ErrMalformed.
func Prefix(family uint8, a netip.Addr, bits uint8) (netip.Prefix, error) {
	p := netip.PrefixFrom(a, int(bits))
	if !p.IsValid() || (family == unix.AF_INET) != a.Is4() {
		return netip.Prefix{}, fmt.Errorf("%w: family %d, prefix %s/%d", ErrMalformed, family, a, bits)
	}
	return p, nil
}

// TypeOf returns the type of an attribute without its flags.
func TypeOf(a netlink.Attribute) uint16 { return a.Type &^ (netlink.Nested | netlink.NetByteOrder) }

// debugger prints the messages of a socket to standard error. A nil debugger prints nothing.
type debugger struct{ protocol, fd int }

// newDebugger returns a debugger if the environment variable NLDEBUG is set, as for mdlayher/netlink, or nil.
func newDebugger(protocol, fd int) *debugger {
	if os.Getenv("NLDEBUG") == "" {
		return nil
	}
	return &debugger{protocol, fd}
}

// print prints one line for each message in b: direction, sequence number, type, flags and content.
func (d *debugger) print(direction string, b []byte) {
	for d != nil && len(b) > 0 {
		m, rest, err := next(b)
		if err != nil {
			fmt.Fprintf(os.Stderr, "nl: fd %d %s %v\n", d.fd, direction, err)
			return
		}
		name, content := d.describe(m)
		fmt.Fprintf(os.Stderr, "nl: fd %d %s seq %d %s flags %#x:%s\n",
			d.fd, direction, m.Header.Sequence, name, uint16(m.Header.Flags), content)
		b = rest
	}
}

// describe returns the name of a message's type and its content. The content is an error, or the fixed header in
// hexadecimal digits and the attributes. For an acknowledgement it is empty.
func (d *debugger) describe(m netlink.Message) (name, content string) {
	header, t := len(m.Data), int(m.Header.Type)
	switch {
	case m.Header.Type == netlink.Error:
		errno, text, err := ackError(m)
		if errno == 0 && err == nil {
			return "ACK", ""
		}
		return "ERROR", strings.TrimRight(fmt.Sprintf(" %v %s", cmp.Or(err, error(errno)), text), " ")
	case t < unix.NLMSG_MIN_TYPE:
		name = strings.ToUpper(m.Header.Type.String())
	case d.protocol == unix.NETLINK_ROUTE:
		name, header = routeName(t)
	case d.protocol == unix.NETLINK_NETFILTER:
		name, header = netfilterName(t), 4 // struct nfgenmsg
	default:
		name = fmt.Sprint("type ", t)
	}

	header = min(header, len(m.Data))
	return name, string(appendAttributes(fmt.Appendf(nil, " %x", m.Data[:header]), m.Data[header:]))
}

// routeName returns the name of a message type of rtnetlink, and the length of such a message's fixed header. For an
// unknown type, it returns a text with the number, and 0.
func routeName(t int) (name string, header int) {
	verbs := []string{"NEW", "DEL", "GET", "SET"}
	objects := []string{"LINK", "ADDR", "ROUTE", "NEIGH", "RULE", "QDISC", "TCLASS", "TFILTER"}
	headers := []int{unix.SizeofIfInfomsg, unix.SizeofIfAddrmsg, unix.SizeofRtMsg, unix.SizeofNdMsg, unix.SizeofRtMsg,
		sizeofTcmsg, sizeofTcmsg, sizeofTcmsg}
	i := (t - unix.RTM_BASE) / len(verbs)
	if i < 0 || i >= len(objects) {
		return fmt.Sprint("RTM_", t), 0
	}
	return "RTM_" + verbs[t%len(verbs)] + objects[i], headers[i]
}

// netfilterName returns the name of a message type of nfnetlink. It knows the messages of nf_tables up to
// NFT_MSG_TRACE, and the messages that begin and end a batch. For other types, it returns a text with the numbers of
// subsystem and message.
func netfilterName(t int) string {
	names := []string{"NEWTABLE", "GETTABLE", "DELTABLE", "NEWCHAIN", "GETCHAIN", "DELCHAIN", "NEWRULE", "GETRULE",
		"DELRULE", "NEWSET", "GETSET", "DELSET", "NEWSETELEM", "GETSETELEM", "DELSETELEM", "NEWGEN", "GETGEN", "TRACE"}
	switch subsystem, i := t>>8, t&0xff; {
	case t == unix.NFNL_MSG_BATCH_BEGIN:
		return "NFNL_MSG_BATCH_BEGIN"
	case t == unix.NFNL_MSG_BATCH_END:
		return "NFNL_MSG_BATCH_END"
	case subsystem == unix.NFNL_SUBSYS_NFTABLES && i < len(names):
		return "NFT_MSG_" + names[i]
	default:
		return fmt.Sprintf("NFNL_%d_%d", subsystem, i)
	}
}

// appendAttributes appends attributes to text as type:length:hex. If an attribute has the flag NLA_F_NESTED, it appends
// the attributes inside in braces. If the attributes in b are malformed, it appends b as hexadecimal digits.
func appendAttributes(text, b []byte) []byte {
	start := len(text)
	err := Decode(b, func(ad *netlink.AttributeDecoder) {
		value := ad.Bytes()
		text = fmt.Appendf(text, " %d:%d:", ad.Type(), len(value))
		if ad.TypeFlags()&netlink.Nested != 0 {
			text = append(appendAttributes(append(text, '{'), value), " }"...)
		} else {
			text = hex.AppendEncode(text, value)
		}
	})
	if err != nil {
		return fmt.Appendf(text[:start], " %x", b)
	}
	return text
}
