package nltest

import (
	"bytes"
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"
)

// Canonical writes attributes in the order of their types, nested ones too, and without
// numbers that are 0: the kernel takes those for what it takes where there are none.
func Canonical(b []byte) []byte {
	type attribute struct {
		typ  uint16
		data []byte
	}
	var list []attribute
	for len(b) > 0 {
		n, typ := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])
		data := b[4:n]
		if typ&unix.NLA_F_NESTED != 0 {
			data = Canonical(data)
		} else if bytes.Equal(data, make([]byte, 4)) {
			data = nil
		}
		if len(data) > 0 {
			list = append(list, attribute{typ, data})
		}
		b = b[(n+3)&^3:]
	}
	slices.SortStableFunc(list, func(a, b attribute) int { return int(a.typ) - int(b.typ) })
	var out []byte
	for _, a := range list {
		out = binary.NativeEndian.AppendUint16(out, uint16(4+len(a.data)))
		out = binary.NativeEndian.AppendUint16(out, a.typ)
		out = append(out, a.data...)
	}
	return out
}
