package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

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

// Encoder appends one message's fixed header and attributes. Attributes are in
// the byte order of the machine unless the method says otherwise. An error
// sticks, and fails the batch before anything of it is sent.
type Encoder struct {
	b   []byte
	err error
}

var errAttributeTooLong = errors.New("attribute is longer than 65,531 bytes")

// Raw appends bytes as they are: a family's fixed header. It must come before
// the attributes and be a multiple of four bytes long.
func (e *Encoder) Raw(p []byte) { e.b = append(e.b, p...) }

// Bytes appends an attribute of raw bytes.
func (e *Encoder) Bytes(typ uint16, p []byte) {
	e.header(typ, len(p))
	e.b = append(e.b, p...)
	e.pad()
}

// String appends an attribute of a string and the NUL that the kernel expects
// behind it.
func (e *Encoder) String(typ uint16, s string) {
	e.header(typ, len(s)+1)
	e.b = append(e.b, s...)
	e.b = append(e.b, 0)
	e.pad()
}

// Flag appends an attribute that says all by being there.
func (e *Encoder) Flag(typ uint16) { e.header(typ, 0) }

// Uint8 appends an attribute of one byte.
func (e *Encoder) Uint8(typ uint16, v uint8) {
	e.header(typ, 1)
	e.b = append(e.b, v, 0, 0, 0)
}

// Uint16 appends an attribute of two bytes.
func (e *Encoder) Uint16(typ uint16, v uint16) {
	e.header(typ, 2)
	e.b = binary.NativeEndian.AppendUint16(e.b, v)
	e.pad()
}

// Uint32 appends an attribute of four bytes.
func (e *Encoder) Uint32(typ uint16, v uint32) {
	e.header(typ, 4)
	e.b = binary.NativeEndian.AppendUint32(e.b, v)
}

// Uint32BE appends an attribute of four bytes in network order, as nf_tables has
// all its numbers.
func (e *Encoder) Uint32BE(typ uint16, v uint32) {
	e.header(typ, 4)
	e.b = binary.BigEndian.AppendUint32(e.b, v)
}

// Uint64BE appends an attribute of eight bytes in network order.
func (e *Encoder) Uint64BE(typ uint16, v uint64) {
	e.header(typ, 8)
	e.b = binary.BigEndian.AppendUint64(e.b, v)
}

// Addr appends an attribute of an address: 4 bytes or 16. An invalid address is
// an error.
func (e *Encoder) Addr(typ uint16, a netip.Addr) {
	switch {
	case a.Is4():
		v := a.As4()
		e.Bytes(typ, v[:])
	case a.Is6():
		v := a.As16()
		e.Bytes(typ, v[:])
	default:
		e.Fail(errors.New("address is not valid"))
	}
}

// Nest appends an attribute that holds those which fn appends. NLA_F_NESTED is
// set: newer parsers insist on it (IFLA_PROTINFO), and older ones mask it.
func (e *Encoder) Nest(typ uint16, fn func(*Encoder)) {
	start := len(e.b)
	e.header(typ|unix.NLA_F_NESTED, 0)
	fn(e)
	n := len(e.b) - start
	if n > 0xffff {
		e.Fail(errAttributeTooLong)
		return
	}
	binary.NativeEndian.PutUint16(e.b[start:], uint16(n))
}

func (e *Encoder) header(typ uint16, n int) {
	if n > 0xffff-unix.NLA_HDRLEN {
		e.Fail(fmt.Errorf("attribute %d: %w", typ, errAttributeTooLong))
		n = 0
	}
	e.b = binary.NativeEndian.AppendUint16(e.b, uint16(unix.NLA_HDRLEN+n))
	e.b = binary.NativeEndian.AppendUint16(e.b, typ)
}

func (e *Encoder) pad() {
	for len(e.b)%unix.NLA_ALIGNTO != 0 {
		e.b = append(e.b, 0)
	}
}

// Fail gives up: err becomes the error of the request, and nothing of the batch
// is sent. Only the first one counts.
func (e *Encoder) Fail(err error) {
	if e.err == nil {
		e.err = err
	}
}

// Message is the library's.
type Message = netlink.Message

// encode writes a message into memory that the next one uses again: to append it to the
// batch copies it.
func (b *Batch) encode(typ, flags uint16, body func(*Encoder)) (netlink.Message, error) {
	b.enc = Encoder{b: b.enc.b[:0]}
	if body != nil {
		body(&b.enc)
	}
	return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(typ), Flags: netlink.HeaderFlags(flags)}, Data: b.enc.b}, b.enc.err
}

// Request is Add, by the encoder above.
func (b *Batch) Request(op string, obj fmt.Stringer, typ, flags uint16, body func(*Encoder)) {
	if b == nil {
		return // nobody will send it
	}
	m, err := b.encode(typ, flags, body)
	b.Add(op, obj, m, err)
}

// Get is AddGet, by the encoder above.
func (b *Batch) Get(op string, obj fmt.Stringer, typ, flags uint16, body func(*Encoder), reply func(Message) error) {
	if b == nil {
		return // nobody will send it
	}
	m, err := b.encode(typ, flags, body)
	b.AddGet(op, obj, m, err, reply)
}

// Silent is AddSilent, by the encoder above.
func (b *Batch) Silent(op string, obj fmt.Stringer, typ, flags uint16, body func(*Encoder)) {
	if b == nil {
		return // nobody will send it
	}
	m, err := b.encode(typ, flags, body)
	b.AddSilent(op, obj, m, err)
}

// Dump is List, by the encoder above.
func (c *Conn) Dump(op string, typ uint16, body func(*Encoder), each func(Message) error) error {
	var b Batch
	m, err := b.encode(typ, 0, body)
	return c.List(op, m, err, each)
}
