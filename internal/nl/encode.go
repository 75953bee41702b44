package nl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

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
