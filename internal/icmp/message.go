package icmp

import "encoding/binary"

// kind is whether a message asks or answers: its type, which the families number
// differently.
type kind byte

const (
	request kind = iota + 1
	reply
)

// Types of messages that belong to an echo.
const (
	reply4, request4 = 0, 8     // RFC 792
	request6, reply6 = 128, 129 // RFC 4443, sections 4.1 and 4.2
)

// headerLen is the length of what stands before an echo's data: type, code,
// checksum, identifier and sequence number.
const headerLen = 8

const ipHeaderMin = 20 // IPv4 (RFC 791), without options

// message is an echo request or reply. A reply repeats all but the kind.
type message struct {
	kind    kind
	id, seq uint16
	data    []byte
}

// encode writes the message as a raw socket sends it. For IPv6 the kernel fills in
// the checksum, since that covers the addresses too.
func (m *message) encode(is4 bool) []byte {
	b := make([]byte, headerLen, headerLen+len(m.data))
	b[0] = m.typeNumber(is4)
	binary.BigEndian.PutUint16(b[4:], m.id)
	binary.BigEndian.PutUint16(b[6:], m.seq)
	b = append(b, m.data...)
	if is4 {
		binary.BigEndian.PutUint16(b[2:], checksum(b))
	}
	return b
}

func (m *message) typeNumber(is4 bool) byte {
	switch {
	case is4 && m.kind == request:
		return request4
	case is4:
		return reply4
	case m.kind == request:
		return request6
	default:
		return reply6
	}
}

// decode reads what a raw socket received, and is false for whatever is no echo.
// Its data is part of packet. The checksum is not looked at: the kernel has
// verified that of IPv6, and that of IPv4 is no better than data to be known by.
func decode(packet []byte, is4 bool) (message, bool) {
	b := packet
	if is4 {
		if len(b) < ipHeaderMin {
			return message{}, false
		}
		// The IP header comes along; its length is in units of 4 bytes.
		ipHeader := int(b[0]&15) * 4
		if ipHeader < ipHeaderMin || ipHeader > len(b) {
			return message{}, false
		}
		b = b[ipHeader:]
	}
	if len(b) < headerLen || b[1] != 0 {
		return message{}, false
	}
	m := message{
		id:   binary.BigEndian.Uint16(b[4:]),
		seq:  binary.BigEndian.Uint16(b[6:]),
		data: b[headerLen:],
	}
	for _, k := range []kind{request, reply} {
		if m.kind = k; m.typeNumber(is4) == b[0] {
			return m, true
		}
	}
	return message{}, false
}

// checksum is the Internet checksum (RFC 1071); an odd byte is padded with a zero.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
