package icmp

import (
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// kind is whether a message asks or answers: its type, which the families number
// differently.
type kind byte

const (
	request kind = iota + 1
	reply
)

// message is an echo request or reply. A reply repeats all but the kind.
type message struct {
	kind    kind
	id, seq uint16
	data    []byte
}

// encode writes the message as a raw socket sends it. For IPv6 the kernel fills in
// the checksum, since that covers the addresses too.
func (m *message) encode(is4 bool) ([]byte, error) {
	one := icmp.Message{Type: m.kind.in(is4), Body: &icmp.Echo{ID: int(m.id), Seq: int(m.seq), Data: m.data}}
	return one.Marshal(nil)
}

func (k kind) in(is4 bool) icmp.Type {
	switch {
	case is4 && k == request:
		return ipv4.ICMPTypeEcho
	case is4:
		return ipv4.ICMPTypeEchoReply
	case k == request:
		return ipv6.ICMPTypeEchoRequest
	default:
		return ipv6.ICMPTypeEchoReply
	}
}

// decode reads what a raw socket received, and is false for whatever is no echo. The
// checksum is not looked at: the kernel has verified that of IPv6, and that of IPv4 is
// no better than data to be known by.
func decode(packet []byte, is4 bool) (message, bool) {
	protocol := unix.IPPROTO_ICMPV6
	if is4 {
		// The IP header comes along.
		h, err := ipv4.ParseHeader(packet)
		if err != nil || h.Len < ipv4.HeaderLen {
			return message{}, false
		}
		protocol, packet = unix.IPPROTO_ICMP, packet[h.Len:]
	}
	one, err := icmp.ParseMessage(protocol, packet)
	if err != nil || one.Code != 0 {
		return message{}, false
	}
	echo, ok := one.Body.(*icmp.Echo)
	if !ok {
		return message{}, false
	}
	m := message{kind: request, id: uint16(echo.ID), seq: uint16(echo.Seq), data: echo.Data}
	if one.Type != request.in(is4) {
		m.kind = reply
	}
	return m, true
}
