package nltest

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// Split takes a datagram apart into its messages, by its own reading of the
// format and not by package nl's. It panics at what no kernel would take, since a
// test that sends such a thing is broken.
func Split(b []byte) []netlink.Message {
	var list []netlink.Message
	for len(b) > 0 {
		if len(b) < 16 {
			panic(fmt.Sprintf("nltest: %d bytes after the last message", len(b)))
		}
		n := int(binary.NativeEndian.Uint32(b[0:]))
		if n < 16 || n > len(b) {
			panic(fmt.Sprintf("nltest: message of length %d in %d bytes", n, len(b)))
		}
		list = append(list, message(binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]),
			binary.NativeEndian.Uint32(b[8:]), b[16:n]))
		b = b[min((n+3)/4*4, len(b)):]
	}
	return list
}

// Message is one with a type and data alone.
func Message(typ uint16, data []byte) netlink.Message { return message(typ, 0, 0, data) }

func message(typ, flags uint16, seq uint32, data []byte) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{
			Length: uint32(16 + len(data)), Type: netlink.HeaderType(typ), Flags: netlink.HeaderFlags(flags), Sequence: seq,
		},
		Data: data,
	}
}

// Bytes is the inverse of Split, for one message.
func Bytes(m netlink.Message) []byte {
	b := make([]byte, 16, 16+len(m.Data)+3)
	binary.NativeEndian.PutUint32(b[0:], uint32(16+len(m.Data)))
	binary.NativeEndian.PutUint16(b[4:], uint16(m.Header.Type))
	binary.NativeEndian.PutUint16(b[6:], uint16(m.Header.Flags))
	binary.NativeEndian.PutUint32(b[8:], m.Header.Sequence)
	b = append(b, m.Data...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// Body is a fixed header and the attributes that fn writes.
func Body(head []byte, fn func(*netlink.AttributeEncoder)) []byte {
	m, err := nl.Encode(0, 0, head, fn)
	if err != nil {
		panic(fmt.Sprintf("nltest: %v", err))
	}
	return m.Data
}

// Attributes gives them as they are sent.
func Attributes(attrs ...netlink.Attribute) []byte {
	b, err := netlink.MarshalAttributes(attrs)
	if err != nil {
		panic(fmt.Sprintf("nltest: %v", err))
	}
	return b
}

// Reply is a message of some type that answers a request.
func Reply(req netlink.Message, typ, flags uint16, data []byte) []byte {
	return Bytes(message(typ, flags, req.Header.Sequence, data))
}

// Ack is the acknowledgement of a request.
func Ack(req netlink.Message) []byte { return Error(req, 0, "") }

// Error is the kernel's answer to a request that failed, as a socket with
// NETLINK_EXT_ACK and NETLINK_CAP_ACK gets it.
func Error(req netlink.Message, errno unix.Errno, text string) []byte {
	data := binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno)))
	data = append(data, Bytes(netlink.Message{Header: req.Header})...)
	binary.NativeEndian.PutUint32(data[4:], uint32(16+len(req.Data)))
	flags := uint16(unix.NLM_F_CAPPED)
	if text != "" {
		flags |= unix.NLM_F_ACK_TLVS
		data = append(data, Body(nil, func(ae *netlink.AttributeEncoder) { ae.String(unix.NLMSGERR_ATTR_MSG, text) })...)
	}
	return Reply(req, unix.NLMSG_ERROR, flags, data)
}

// Done ends a dump, with an errno or 0.
func Done(req netlink.Message, errno unix.Errno) []byte {
	data := binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno)))
	return Reply(req, unix.NLMSG_DONE, unix.NLM_F_MULTI, data)
}

// Join makes one datagram of several messages.
func Join(messages ...[]byte) []byte {
	var b []byte
	for _, m := range messages {
		b = append(b, m...)
	}
	return b
}

// Text writes messages for golden files: the type, the flags, the fixed header of
// the given length, and the attributes, those marked as nested by themselves:
//
//	20 flags 0x605: 02180000 01000000 [2: 0a010001] [1: 0a010001]
func Text(header int, datagrams ...[]byte) string {
	var b strings.Builder
	for _, d := range datagrams {
		for _, m := range Split(d) {
			fmt.Fprintf(&b, "%d flags %#x:", uint16(m.Header.Type), uint16(m.Header.Flags))
			h := min(header, len(m.Data))
			for i := 0; i < h; i += 4 {
				fmt.Fprintf(&b, " %x", m.Data[i:min(i+4, h)])
			}
			writeAttrs(&b, m.Data[h:])
			b.WriteByte('\n')
		}
	}
	return b.String()
}

func writeAttrs(w *strings.Builder, b []byte) {
	for len(b) >= 4 {
		n, typ := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])
		if n < 4 || n > len(b) {
			break
		}
		fmt.Fprintf(w, " [%d:", typ&^unix.NLA_F_NESTED)
		if typ&unix.NLA_F_NESTED != 0 {
			writeAttrs(w, b[4:n])
		} else {
			fmt.Fprintf(w, " %x", b[4:n])
		}
		w.WriteByte(']')
		b = b[min((n+3)/4*4, len(b)):]
	}
	if len(b) > 0 {
		fmt.Fprintf(w, " and %d bytes that are no attribute", len(b))
	}
}

// MustKeepUnknown fails where attributes are lost that no kernel of today has.
func MustKeepUnknown(t *testing.T, listed, copied []byte, header int) {
	t.Helper()
	const unheardOf = 64
	unknown := func(b []byte) []netlink.Attribute {
		var list []netlink.Attribute
		must.Succeed(t, nl.Decode(b[header:], func(ad *netlink.AttributeDecoder) {
			if ad.Type() >= unheardOf {
				list = append(list, nl.Keep(ad))
			}
		}))
		return list
	}
	diff := cmp.Diff(unknown(listed), unknown(copied))
	expect.That(t, diff == "", "unknown attributes (-listed +copied):\n%s", diff)
}
