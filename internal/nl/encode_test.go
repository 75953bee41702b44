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
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
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

func TestEncodeWritesAttributes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		body func(*netlink.AttributeEncoder)
		want []byte
	}{
		{"nothing", func(*netlink.AttributeEncoder) {}, nil},
		{"no function", nil, nil},
		{"bytes, padded", func(ae *netlink.AttributeEncoder) { ae.Bytes(9, []byte{1, 2, 3, 4, 5}) },
			concat(native(9, 9), []byte{1, 2, 3, 4, 5, 0, 0, 0})},
		{"no bytes", func(ae *netlink.AttributeEncoder) { ae.Bytes(9, nil) }, native(4, 9)},
		{"string with its NUL", func(ae *netlink.AttributeEncoder) { ae.String(3, "eth0") }, concat(native(9, 3), []byte("eth0\x00\x00\x00\x00"))},
		{"empty string", func(ae *netlink.AttributeEncoder) { ae.String(3, "") }, concat(native(5, 3), []byte{0, 0, 0, 0})},
		{"flag", func(ae *netlink.AttributeEncoder) { ae.Flag(7, true) }, native(4, 7)},
		{"uint8", func(ae *netlink.AttributeEncoder) { ae.Uint8(1, 0xfe) }, concat(native(5, 1), []byte{0xfe, 0, 0, 0})},
		{"uint16", func(ae *netlink.AttributeEncoder) { ae.Uint16(1, 0x1234) }, concat(native(6, 1, 0x1234), []byte{0, 0})},
		{"uint32", func(ae *netlink.AttributeEncoder) { ae.Uint32(1, 0x12345678) },
			concat(native(8, 1), binary.NativeEndian.AppendUint32(nil, 0x12345678))},
		{"uint32 in network order", func(ae *netlink.AttributeEncoder) { ae.ByteOrder = binary.BigEndian; ae.Uint32(1, 0x12345678) }, concat(native(8, 1), []byte{0x12, 0x34, 0x56, 0x78})},
		{"uint64 in network order", func(ae *netlink.AttributeEncoder) { ae.ByteOrder = binary.BigEndian; ae.Uint64(1, 0x123456789abcdef0) },
			concat(native(12, 1), []byte{0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0})},
		{"IPv4 address", func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, 1, netip.MustParseAddr("10.1.2.3")) }, concat(native(8, 1), []byte{10, 1, 2, 3})},
		{"IPv6 address", func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, 1, netip.MustParseAddr("fd00::1")) },
			concat(native(20, 1), []byte{0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1})},
		{"IPv4 address in IPv6 form", func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, 1, netip.MustParseAddr("::ffff:1.2.3.4")) },
			concat(native(20, 1), []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 1, 2, 3, 4})},
		{"nest in a nest", func(ae *netlink.AttributeEncoder) {
			ae.Nested(1, func(ae *netlink.AttributeEncoder) error {
				ae.Nested(2, func(ae *netlink.AttributeEncoder) error { ae.Uint8(3, 4); return nil })
				ae.Flag(5, true)
				return nil
			})
		}, concat(native(20, 1|unix.NLA_F_NESTED, 12, 2|unix.NLA_F_NESTED, 5, 3), []byte{4, 0, 0, 0}, native(4, 5))},
		{"empty nest", func(ae *netlink.AttributeEncoder) { ae.Nested(1, func(*netlink.AttributeEncoder) error { return nil }) }, native(4, 1|unix.NLA_F_NESTED)},
		{"the longest attribute", func(ae *netlink.AttributeEncoder) { ae.Bytes(1, make([]byte, 65531)) },
			concat(native(0xffff, 1), make([]byte, 65532))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b nl.Batch
			m, err := nl.Encode(unix.RTM_NEWADDR, 0, []byte{2, 24, 0, 0}, tt.body)
			b.Add("do", nil, m, err)
			must.Succeed(t, fake(nltest.AckAll).Execute(&b))
			got := nltest.Split(b.Bytes())[0].Data
			expect.NoDiff(t, cmp.Diff(append([]byte{2, 24, 0, 0}, tt.want...), got), "bytes")
			// The reader that the kernel's answers get agrees.
			expect.Success(t, nl.Decode(got[4:], func(*netlink.AttributeDecoder) {}), "reading it back")
		})
	}
}

func TestEncodingKeepsItsFirstError(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	for _, tt := range []struct {
		name string
		body func(*netlink.AttributeEncoder)
		want string
	}{
		{"address that is none", func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, 1, netip.Addr{}) }, "address is not valid"},
		{"attribute too long", func(ae *netlink.AttributeEncoder) { ae.Bytes(7, make([]byte, 65532)) }, "byte slice is too large to fit in a netlink attribute"},
		{"string too long", func(ae *netlink.AttributeEncoder) { ae.String(7, strings.Repeat("x", 65531)) }, "invalid attribute; length too short or too large"},
		{"nest too long", func(ae *netlink.AttributeEncoder) {
			ae.Nested(7, func(ae *netlink.AttributeEncoder) error {
				ae.Bytes(1, make([]byte, 40000))
				ae.Bytes(2, make([]byte, 40000))
				return nil
			})
		}, "byte slice produced by Do is too large to fit in a netlink attribute"},
		{"within a nest", func(ae *netlink.AttributeEncoder) {
			ae.Nested(1, func(*netlink.AttributeEncoder) error { return broken })
			ae.Uint8(1, 1)
		}, "broken"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rec := nltest.Record(nltest.NewFake(nltest.AckAll))
			var b nl.Batch
			b.Add("do", nl.Name("this"), request(unix.RTM_NEWADDR, nil), nil)
			m, err := nl.Encode(unix.RTM_NEWADDR, 0, nil, tt.body)
			b.Add("do", nl.Name("that"), m, err)
			err = nl.New(rec).Execute(&b)
			expect.That(t, err != nil && err.Error() == "do that: "+tt.want,
				"Execute: %v, want %s", err, "do that: "+tt.want)
			if b.Err(0) != nil || b.Err(1) == nil {
				t.Errorf("errors of the requests: %v and %v, want only the second", b.Err(0), b.Err(1))
			}
			sent := rec.Sent()
			expect.That(t, len(sent) == 0, "%d datagrams were sent", len(sent))
		})
	}
}

func TestBatchIsARowOfMessages(t *testing.T) {
	t.Parallel()
	var b nl.Batch
	m, err := nl.Encode(unix.RTM_NEWADDR, netlink.Create|netlink.Excl, []byte{2, 24, 0, 0}, func(ae *netlink.AttributeEncoder) { ae.Uint8(1, 7) })
	b.Add("add", nil, m, err)
	b.AddGet("get", nil, request(unix.RTM_GETLINK, nil), nil, nil)
	b.AddSilent("begin", nil, request(unix.NFNL_MSG_BATCH_BEGIN, []byte{0, 0, 0, 10}), nil)
	want := []netlink.Message{
		{Header: netlink.Header{Length: 28, Type: unix.RTM_NEWADDR, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Excl},
			Data: concat([]byte{2, 24, 0, 0}, native(5, 1), []byte{7, 0, 0, 0})},
		{Header: netlink.Header{Length: 16, Type: unix.RTM_GETLINK, Flags: netlink.Request}, Data: []byte{}},
		{Header: netlink.Header{Length: 20, Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: netlink.Request}, Data: []byte{0, 0, 0, 10}},
	}
	expect.NoDiff(t, cmp.Diff(want, nltest.Split(b.Bytes())), "messages")
	if b.Len() != 3 || len(b.Bytes()) != 28+16+20 {
		t.Errorf("%d requests in %d bytes, want 3 in 64", b.Len(), len(b.Bytes()))
	}
	b.Reset()
	if b.Len() != 0 || len(b.Bytes()) != 0 {
		t.Errorf("after Reset: %d requests in %d bytes", b.Len(), len(b.Bytes()))
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
			diff := cmp.Diff(tt.want, nl.Pick(tt.from, 1, 3))
			expect.That(t, diff == "", "%v", diff)
		})
	}
}
