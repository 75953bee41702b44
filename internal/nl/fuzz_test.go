package nl

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// The seeds of these targets are what a kernel sent: see TestRecordSeeds.

func FuzzMessages(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		for rest := b; len(rest) > 0; {
			m, left, err := next(rest)
			if err != nil {
				must.That(t, errors.Is(err, ErrMalformed), "%v is not %v", err, ErrMalformed)
				return
			}
			for _, protocol := range []int{unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER, unix.NETLINK_SOCK_DIAG} {
				name, _ := (&debugger{protocol: protocol}).describe(m)
				must.That(t, name != "", "type %d has no name", m.Header.Type)
			}
			if used := len(rest) - len(left); used < unix.NLMSG_HDRLEN+len(m.Data) || used > align(unix.NLMSG_HDRLEN+len(m.Data)) {
				t.Fatalf("a message of %d bytes took %d of the buffer", len(m.Data), used)
			}
			rest = left
		}
	})
}

func FuzzAttrs(f *testing.F) { f.Fuzz(func(t *testing.T, b []byte) { walk(t, b, 0) }) }

func walk(t *testing.T, b []byte, depth int) {
	total := 0
	err := Decode(b, func(ad *netlink.AttributeDecoder) {
		data := ad.Bytes()
		total += unix.NLA_HDRLEN + len(data)
		if ad.Type()&(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER) != 0 {
			t.Fatalf("type %#x has its flags left", ad.Type())
		}
		s := ad.String()
		must.That(t, len(s) <= len(data), "a string of %d bytes out of %d", len(s), len(data))
		readings(t, ad.Type(), data)
		if depth < 4 {
			walk(t, data, depth+1)
		}
	})
	must.That(t, total <= len(b), "%d bytes of attributes in %d", total, len(b))
	must.That(t, err == nil || errors.Is(err, ErrMalformed), "%v is not %v", err, ErrMalformed)
}

// readings reads a value as one of each size. Each is a walk of its own, since one that
// does not fit ends it.
func readings(t *testing.T, typ uint16, data []byte) {
	one := must.Of(netlink.MarshalAttributes([]netlink.Attribute{{Type: typ, Data: data}})).Get(t)
	for size, read := range map[int]func(*netlink.AttributeDecoder){
		1: func(ad *netlink.AttributeDecoder) { ad.Uint8() },
		2: func(ad *netlink.AttributeDecoder) { ad.Uint16() },
		4: func(ad *netlink.AttributeDecoder) { ad.Uint32(); ad.Do(Addr(new(netip.Addr))) },
		8: func(ad *netlink.AttributeDecoder) { ad.Uint64() },
	} {
		err := Decode(one, read)
		must.That(t, (len(data) == size) == (err == nil) && (err == nil || errors.Is(err, ErrMalformed)),
			"%d bytes read as %d: %v", len(data), size, err)
	}
}

func FuzzAckError(f *testing.F) {
	f.Fuzz(func(t *testing.T, flags uint16, data []byte) {
		errno, text, err := ackError(netlink.Message{Header: netlink.Header{Type: netlink.Error, Flags: netlink.HeaderFlags(flags)}, Data: data})
		must.That(t, err == nil || errno == 0 && text == "" && errors.Is(err, ErrMalformed),
			"errno %d, text %q and %v", errno, text, err)
		_ = dumpError("list", netlink.Message{Header: netlink.Header{Type: netlink.Done, Flags: netlink.HeaderFlags(flags)}, Data: data})
	})
}
