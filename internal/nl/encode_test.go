package nl_test

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
)

// native gives the bytes of 16-bit numbers in the machine's order.
func native(numbers ...uint16) []byte {
	var b []byte
	for _, n := range numbers {
		b = binary.NativeEndian.AppendUint16(b, n)
	}
	return b
}

func concat(parts ...[]byte) []byte {
	var b []byte
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

func TestEncoderWritesAttributes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		body func(*nl.Encoder)
		want []byte
	}{
		{"nothing", func(*nl.Encoder) {}, []byte{}},
		{"raw", func(e *nl.Encoder) { e.Raw([]byte{1, 2, 3, 4}) }, []byte{1, 2, 3, 4}},
		{"bytes, padded", func(e *nl.Encoder) { e.Bytes(9, []byte{1, 2, 3, 4, 5}) },
			concat(native(9, 9), []byte{1, 2, 3, 4, 5, 0, 0, 0})},
		{"no bytes", func(e *nl.Encoder) { e.Bytes(9, nil) }, native(4, 9)},
		{"string with its NUL", func(e *nl.Encoder) { e.String(3, "eth0") }, concat(native(9, 3), []byte("eth0\x00\x00\x00\x00"))},
		{"empty string", func(e *nl.Encoder) { e.String(3, "") }, concat(native(5, 3), []byte{0, 0, 0, 0})},
		{"flag", func(e *nl.Encoder) { e.Flag(7) }, native(4, 7)},
		{"uint8", func(e *nl.Encoder) { e.Uint8(1, 0xfe) }, concat(native(5, 1), []byte{0xfe, 0, 0, 0})},
		{"uint16", func(e *nl.Encoder) { e.Uint16(1, 0x1234) }, concat(native(6, 1, 0x1234), []byte{0, 0})},
		{"uint32", func(e *nl.Encoder) { e.Uint32(1, 0x12345678) },
			concat(native(8, 1), binary.NativeEndian.AppendUint32(nil, 0x12345678))},
		{"uint32 in network order", func(e *nl.Encoder) { e.Uint32BE(1, 0x12345678) }, concat(native(8, 1), []byte{0x12, 0x34, 0x56, 0x78})},
		{"uint64 in network order", func(e *nl.Encoder) { e.Uint64BE(1, 0x123456789abcdef0) },
			concat(native(12, 1), []byte{0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0})},
		{"IPv4 address", func(e *nl.Encoder) { e.Addr(1, netip.MustParseAddr("10.1.2.3")) }, concat(native(8, 1), []byte{10, 1, 2, 3})},
		{"IPv6 address", func(e *nl.Encoder) { e.Addr(1, netip.MustParseAddr("fd00::1")) },
			concat(native(20, 1), []byte{0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1})},
		{"IPv4 address in IPv6 form", func(e *nl.Encoder) { e.Addr(1, netip.MustParseAddr("::ffff:1.2.3.4")) },
			concat(native(20, 1), []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 1, 2, 3, 4})},
		{"nest in a nest", func(e *nl.Encoder) {
			e.Nest(1, func(e *nl.Encoder) {
				e.Nest(2, func(e *nl.Encoder) { e.Uint8(3, 4) })
				e.Flag(5)
			})
		}, concat(native(20, 1|unix.NLA_F_NESTED, 12, 2|unix.NLA_F_NESTED, 5, 3), []byte{4, 0, 0, 0}, native(4, 5))},
		{"empty nest", func(e *nl.Encoder) { e.Nest(1, func(*nl.Encoder) {}) }, native(4, 1|unix.NLA_F_NESTED)},
		{"the longest attribute", func(e *nl.Encoder) { e.Bytes(1, make([]byte, 65531)) },
			concat(native(0xffff, 1), make([]byte, 65532))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b nl.Batch
			b.Request("do", nil, unix.RTM_NEWADDR, 0, tt.body)
			if err := fake(nltest.AckAll).Execute(&b); err != nil {
				t.Fatal(err)
			}
			got := nltest.Split(b.Bytes())[0].Data
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("bytes (-want +got):\n%s", diff)
			}
			// The reader that the kernel's answers get agrees.
			if len(got) > 0 && tt.name != "raw" {
				attrs := nl.ParseAttrs(got)
				for attrs.Next() {
				}
				if err := attrs.Err(); err != nil {
					t.Errorf("reading it back: %v", err)
				}
			}
		})
	}
}

func TestEncoderKeepsItsFirstError(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for _, tt := range []struct {
		name string
		body func(*nl.Encoder)
		want string
	}{
		{"address that is none", func(e *nl.Encoder) { e.Addr(1, netip.Addr{}) }, "address is not valid"},
		{"attribute too long", func(e *nl.Encoder) { e.Bytes(7, make([]byte, 65532)) }, "attribute 7: attribute is longer than 65,531 bytes"},
		{"string too long", func(e *nl.Encoder) { e.String(7, strings.Repeat("x", 65531)) }, "attribute 7: attribute is longer than 65,531 bytes"},
		{"nest too long", func(e *nl.Encoder) {
			e.Nest(7, func(e *nl.Encoder) { e.Bytes(1, make([]byte, 40000)); e.Bytes(2, make([]byte, 40000)) })
		}, "attribute is longer than 65,531 bytes"},
		{"the caller's own", func(e *nl.Encoder) { e.Fail(broken); e.Addr(1, netip.Addr{}) }, "broken"},
		{"within a nest", func(e *nl.Encoder) { e.Nest(1, func(e *nl.Encoder) { e.Fail(broken) }); e.Uint8(1, 1) }, "broken"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rec := nltest.Record(nltest.NewFake(nltest.AckAll))
			var b nl.Batch
			b.Request("do", nl.Name("this"), unix.RTM_NEWADDR, 0, func(*nl.Encoder) {})
			b.Request("do", nl.Name("that"), unix.RTM_NEWADDR, 0, tt.body)
			err := nl.New(rec).Execute(&b)
			if err == nil || err.Error() != "do that: "+tt.want {
				t.Errorf("Execute: %v, want %s", err, "do that: "+tt.want)
			}
			if b.Err(0) != nil || b.Err(1) == nil {
				t.Errorf("errors of the requests: %v and %v, want only the second", b.Err(0), b.Err(1))
			}
			if sent := rec.Sent(); len(sent) != 0 {
				t.Errorf("%d datagrams were sent", len(sent))
			}
		})
	}
}

func TestBatchIsARowOfMessages(t *testing.T) {
	t.Parallel()
	var b nl.Batch
	b.Request("add", nil, unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
		e.Raw([]byte{2, 24, 0, 0})
		e.Uint8(1, 7)
	})
	b.Get("get", nil, unix.RTM_GETLINK, 0, nil, nil)
	b.Silent("begin", nil, unix.NFNL_MSG_BATCH_BEGIN, 0, func(e *nl.Encoder) { e.Raw([]byte{0, 0, 0, 10}) })
	want := []netlink.Message{
		{Header: netlink.Header{Length: 28, Type: unix.RTM_NEWADDR, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl},
			Data: concat([]byte{2, 24, 0, 0}, native(5, 1), []byte{7, 0, 0, 0})},
		{Header: netlink.Header{Length: 16, Type: unix.RTM_GETLINK, Flags: netlink.Request}, Data: []byte{}},
		{Header: netlink.Header{Length: 20, Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: netlink.Request}, Data: []byte{0, 0, 0, 10}},
	}
	if diff := cmp.Diff(want, nltest.Split(b.Bytes())); diff != "" {
		t.Errorf("messages (-want +got):\n%s", diff)
	}
	if b.Len() != 3 || b.Size() != 28+16+20 {
		t.Errorf("%d requests in %d bytes, want 3 in 64", b.Len(), b.Size())
	}
	b.Reset()
	if b.Len() != 0 || b.Size() != 0 {
		t.Errorf("after Reset: %d requests in %d bytes", b.Len(), b.Size())
	}
}

func TestPickKeepsWhatIsWantedAndWhatDoesNotParse(t *testing.T) {
	t.Parallel()
	one, two, nested := concat(native(5, 1), []byte{9, 0, 0, 0}), native(4, 2), concat(native(8, 3|unix.NLA_F_NESTED), native(4, 7))
	for _, tt := range []struct {
		name       string
		from, want []byte
	}{
		{"nothing", nil, []byte{}},
		{"some", concat(one, two, nested), concat(one, nested)},
		{"without padding at the end", one[:5], one[:5]},
		{"a length that is too long", concat(two, native(9, 2)), native(9, 2)},
		{"a length that is too short", concat(two, native(3, 2), one), concat(native(3, 2), one)},
		{"part of a header", concat(two, []byte{4, 0, 1}), []byte{4, 0, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tt.want, nl.Pick(tt.from, 1, 3)); diff != "" {
				t.Error(diff)
			}
		})
	}
}
