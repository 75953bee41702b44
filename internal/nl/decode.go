package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// ErrMalformed is the cause of every error about a reply that does not parse.
var ErrMalformed = errors.New("malformed netlink message")

// Message is one message of a reply, without its netlink header.
type Message struct {
	Type  uint16 // RTM_NEWLINK, …
	Flags uint16 // NLM_F_*
	Seq   uint32 // the request that it answers
	Data  []byte // the family's fixed header and the attributes; good until the next receive
}

// next splits the first message off a receive buffer.
func next(b []byte) (Message, []byte, error) {
	if len(b) < unix.NLMSG_HDRLEN {
		return Message{}, nil, fmt.Errorf("%w: %d bytes where a header of %d is due", ErrMalformed, len(b), unix.NLMSG_HDRLEN)
	}
	n := int(binary.NativeEndian.Uint32(b))
	if n < unix.NLMSG_HDRLEN || n > len(b) {
		return Message{}, nil, fmt.Errorf("%w: length %d in a buffer of %d bytes", ErrMalformed, n, len(b))
	}
	m := Message{
		Type:  binary.NativeEndian.Uint16(b[4:]),
		Flags: binary.NativeEndian.Uint16(b[6:]),
		Seq:   binary.NativeEndian.Uint32(b[8:]),
		Data:  b[unix.NLMSG_HDRLEN:n],
	}
	return m, b[min(align(n), len(b)):], nil
}

func align(n int) int { return (n + 3) &^ 3 }

// Attrs walks over attributes:
//
//	attrs := nl.ParseAttrs(m.Data[unix.SizeofIfInfomsg:])
//	for attrs.Next() {
//		switch attrs.Type { … attrs.Uint32() … }
//	}
//	return attrs.Err()
//
// A value of the wrong size is an error, reads as zero, and ends the walk.
type Attrs struct {
	Type uint16 // without the NESTED and NET_BYTEORDER bits
	Data []byte // the attribute's value

	rest []byte
	err  error
}

// ParseAttrs starts a walk.
func ParseAttrs(b []byte) *Attrs { return &Attrs{rest: b} }

// Next goes to the next attribute, and is false at the end or at an error.
func (a *Attrs) Next() bool {
	if a.err != nil || len(a.rest) == 0 {
		return false
	}
	if len(a.rest) < unix.NLA_HDRLEN {
		a.fail("%d bytes after the last attribute", len(a.rest))
		return false
	}
	n := int(binary.NativeEndian.Uint16(a.rest))
	if n < unix.NLA_HDRLEN || n > len(a.rest) {
		a.fail("attribute of length %d in %d bytes", n, len(a.rest))
		return false
	}
	a.Type = binary.NativeEndian.Uint16(a.rest[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
	a.Data = a.rest[unix.NLA_HDRLEN:n]
	a.rest = a.rest[min(align(n), len(a.rest)):]
	return true
}

// Err gives the first error of the walk.
func (a *Attrs) Err() error { return a.err }

// Nested starts a walk over the attributes within this one. Its error is its own.
func (a *Attrs) Nested() *Attrs { return ParseAttrs(a.Data) }

// Uint8 gives a value of one byte.
func (a *Attrs) Uint8() uint8 {
	if !a.size(1) {
		return 0
	}
	return a.Data[0]
}

// Uint16 gives a value of two bytes.
func (a *Attrs) Uint16() uint16 {
	if !a.size(2) {
		return 0
	}
	return binary.NativeEndian.Uint16(a.Data)
}

// Uint32 gives a value of four bytes.
func (a *Attrs) Uint32() uint32 {
	if !a.size(4) {
		return 0
	}
	return binary.NativeEndian.Uint32(a.Data)
}

// Uint32BE gives a value of four bytes in network order.
func (a *Attrs) Uint32BE() uint32 {
	if !a.size(4) {
		return 0
	}
	return binary.BigEndian.Uint32(a.Data)
}

// Uint64BE gives a value of eight bytes in network order.
func (a *Attrs) Uint64BE() uint64 {
	if !a.size(8) {
		return 0
	}
	return binary.BigEndian.Uint64(a.Data)
}

// String gives a value up to its first NUL.
func (a *Attrs) String() string {
	for i, c := range a.Data {
		if c == 0 {
			return string(a.Data[:i])
		}
	}
	return string(a.Data)
}

// Addr gives an address of 4 or of 16 bytes. An IPv6 address that maps an IPv4
// one stays what it is.
func (a *Attrs) Addr() netip.Addr {
	v, ok := netip.AddrFromSlice(a.Data)
	if !ok {
		a.fail("attribute %d: an address of %d bytes", a.Type, len(a.Data))
	}
	return v
}

func (a *Attrs) size(n int) bool {
	if len(a.Data) != n {
		a.fail("attribute %d: %d bytes where %d are due", a.Type, len(a.Data), n)
		return false
	}
	return true
}

func (a *Attrs) fail(format string, args ...any) {
	if a.err == nil {
		a.err = fmt.Errorf("%w: "+format, append([]any{ErrMalformed}, args...)...)
	}
}

// ackError reads the message of type NLMSG_ERROR: nil for an acknowledgement,
// else the errno, and the kernel's own text where there is one
// (include/uapi/linux/netlink.h, enum nlmsgerr_attrs).
func ackError(m Message) (errno unix.Errno, text string, err error) {
	const headerLen = 4 + unix.NLMSG_HDRLEN // struct nlmsgerr: the errno and the request's header
	if len(m.Data) < headerLen {
		return 0, "", fmt.Errorf("%w: an acknowledgement of %d bytes", ErrMalformed, len(m.Data))
	}
	errno = unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
	if m.Flags&unix.NLM_F_ACK_TLVS == 0 {
		return errno, "", nil
	}
	skip := headerLen
	if m.Flags&unix.NLM_F_CAPPED == 0 {
		// The request's payload follows its header.
		n := int(binary.NativeEndian.Uint32(m.Data[4:]))
		if n < unix.NLMSG_HDRLEN || align(n) > len(m.Data)-4 {
			return errno, "", nil
		}
		skip = 4 + align(n)
	}
	return errno, extAck(m.Data[skip:]), nil
}

// extAck takes the text out of an extended acknowledgement. One that does not
// parse is no reason to hide the errno that it came with.
func extAck(b []byte) string {
	var text string
	attrs := ParseAttrs(b)
	for attrs.Next() {
		switch attrs.Type {
		case unix.NLMSGERR_ATTR_MSG:
			text = attrs.String()
		case nlmsgerrAttrMissType:
			if text == "" && len(attrs.Data) == 4 {
				text = fmt.Sprintf("attribute %d is missing", attrs.Uint32())
			}
		}
	}
	return text
}

const nlmsgerrAttrMissType = 5 // NLMSGERR_ATTR_MISS_TYPE, Linux 6.1
