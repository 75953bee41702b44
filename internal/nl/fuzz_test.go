package nl

import (
	"errors"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// The seeds of these targets are what a kernel sent: see TestRecordSeeds.

func FuzzMessages(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		for rest := b; len(rest) > 0; {
			m, left, err := next(rest)
			if err != nil {
				if !errors.Is(err, ErrMalformed) {
					t.Fatalf("%v is not %v", err, ErrMalformed)
				}
				return
			}
			if used := len(rest) - len(left); used < unix.NLMSG_HDRLEN+len(m.Data) || used > align(unix.NLMSG_HDRLEN+len(m.Data)) {
				t.Fatalf("a message of %d bytes took %d of the buffer", len(m.Data), used)
			}
			rest = left
		}
	})
}

func FuzzAttrs(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) { walk(t, b, 0) })
}

func walk(t *testing.T, b []byte, depth int) {
	attrs := ParseAttrs(b)
	total := 0
	for attrs.Next() {
		total += unix.NLA_HDRLEN + len(attrs.Data)
		if attrs.Type&(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER) != 0 {
			t.Fatalf("type %#x has its flags left", attrs.Type)
		}
		if s := attrs.String(); len(s) > len(attrs.Data) {
			t.Fatalf("a string of %d bytes out of %d", len(s), len(attrs.Data))
		}
		// Each reading is a walk of its own, since one that does not fit ends it.
		for size, read := range map[int]func(*Attrs){
			1: func(a *Attrs) { a.Uint8() },
			2: func(a *Attrs) { a.Uint16() },
			4: func(a *Attrs) { a.Uint32(); a.Uint32BE(); a.Addr() },
			8: func(a *Attrs) { a.Uint64BE() },
		} {
			one := &Attrs{Type: attrs.Type, Data: attrs.Data}
			read(one)
			if fits := len(attrs.Data) == size; fits != (one.Err() == nil) {
				t.Fatalf("%d bytes read as %d: %v", len(attrs.Data), size, one.Err())
			}
		}
		if depth < 4 {
			walk(t, attrs.Data, depth+1)
		}
	}
	if total > len(b) {
		t.Fatalf("%d bytes of attributes in %d", total, len(b))
	}
	if err := attrs.Err(); err != nil && !errors.Is(err, ErrMalformed) {
		t.Fatalf("%v is not %v", err, ErrMalformed)
	}
}

func FuzzAckError(f *testing.F) {
	f.Fuzz(func(t *testing.T, flags uint16, data []byte) {
		errno, text, err := ackError(netlink.Message{Header: netlink.Header{Type: netlink.Error, Flags: netlink.HeaderFlags(flags)}, Data: data})
		if err != nil && (errno != 0 || text != "" || !errors.Is(err, ErrMalformed)) {
			t.Fatalf("errno %d, text %q and %v", errno, text, err)
		}
		_ = dumpError("list", netlink.Message{Header: netlink.Header{Type: netlink.Done, Flags: netlink.HeaderFlags(flags)}, Data: data})
	})
}
