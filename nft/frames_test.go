package nft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// etherType is where the type of a frame is.
const etherType = 12

// ICMPv6 types (RFC 4861, RFC 2710, RFC 3810).
const (
	listenerReport    = 131
	listenerDone      = 132
	routerSolicit     = 133
	routerAdvert      = 134
	neighbourSolicit  = 135
	neighbourAdvert   = 136
	redirectMessage   = 137
	listenerReportTwo = 143
)

// What follows makes frames as no kernel would send them.

const (
	broadcastMAC = "ff:ff:ff:ff:ff:ff"
	allNodesMAC  = "33:33:00:00:00:01"
	foreignMAC   = "02:66:66:66:66:66"
)

func mac(s string) []byte {
	m, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return m
}

func ip(s string) []byte { return netip.MustParseAddr(s).AsSlice() }

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func be16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

func ether(dst, src string, typ int, payload ...[]byte) []byte {
	return join(mac(dst), mac(src), be16(typ), join(payload...))
}

// arpMessage is one of op 1 (request) or 2 (reply).
func arpMessage(op int, senderMAC, senderIP, targetIP string) []byte {
	return join([]byte{0, unix.ARPHRD_ETHER, 8, 0, ruleset.EtherLen, ruleset.Addr4Len}, be16(op), mac(senderMAC), ip(senderIP), make([]byte, 6), ip(targetIP))
}

// with gives a copy in which some bytes are others.
func with(b []byte, offset int, others ...byte) []byte {
	b = bytes.Clone(b)
	copy(b[offset:], others)
	return b
}

func checksum(b []byte, sum uint32) []byte {
	for len(b) > 1 {
		sum += uint32(b[0])<<8 | uint32(b[1])
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return be16(int(^sum & 0xffff))
}

// packet4 has fragment flags and offset as the header has them.
func packet4(src, dst string, fragment int, proto byte, payload []byte) []byte {
	h := join([]byte{0x45, 0}, be16(20+len(payload)), be16(7), be16(fragment), []byte{64, proto, 0, 0}, ip(src), ip(dst))
	return join(with(h, 10, checksum(h, 0)...), payload)
}

func packet6(src, dst string, next byte, payload ...[]byte) []byte {
	p := join(payload...)
	return join([]byte{0x60, 0, 0, 0}, be16(len(p)), []byte{next, 255}, ip(src), ip(dst), p)
}

// datagram is UDP without a checksum, which only IPv4 allows.
func datagram(src, dst int) []byte {
	return join(be16(src), be16(dst), be16(8+4), be16(0), []byte("abcd"))
}

// icmp6 has a right checksum, for what is sent between two addresses.
func icmp6(src, dst string, typ byte, body ...[]byte) []byte {
	b := join([]byte{typ, 0, 0, 0}, join(body...))
	pseudo := join(ip(src), ip(dst), be16(0), be16(len(b)), be16(0), be16(unix.IPPROTO_ICMPV6))
	return with(b, 2, checksum(join(pseudo, b), 0)...)
}

// option is one of neighbour discovery: 1 is the source's link-layer address, 2 the
// target's, 14 a nonce.
func option(typ byte, value []byte) []byte { return join([]byte{typ, 1}, value) }

// solicit6 and advert6 are the neighbour discovery messages as packets.
func solicit6(src, dst, target string, options ...[]byte) []byte {
	return packet6(src, dst, unix.IPPROTO_ICMPV6, icmp6(src, dst, neighbourSolicit, make([]byte, 4), ip(target), join(options...)))
}

func advert6(src, dst, target string, options ...[]byte) []byte {
	return packet6(src, dst, unix.IPPROTO_ICMPV6, icmp6(src, dst, neighbourAdvert, []byte{0x20, 0, 0, 0}, ip(target), join(options...)))
}

// wire sends and receives frames by one link.
type wire struct {
	tb    testing.TB
	fd    int
	index int
}

func openWire(tb testing.TB, ns *netns.NS, link string) *wire {
	tb.Helper()
	fd, index := nstest.PacketSocket(tb, ns, link, unix.SOCK_RAW, unix.ETH_P_ALL, patience)
	return &wire{tb, fd, index}
}

func (w *wire) send(frames ...[]byte) {
	w.tb.Helper()
	must.Succeed(w.tb, nstest.OnOneCPU(func() error {
		for _, frame := range frames {
			if err := unix.Sendto(w.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: w.index}); err != nil {
				return fmt.Errorf("send %x: %w", frame, err)
			}
		}
		return nil
	}))
}

// seenBefore says how many frames with a token at their ends came in until one did
// that ends with another.
func (w *wire) seenBefore(token, last []byte) int {
	w.tb.Helper()
	buf := make([]byte, 1<<16)
	for seen := 0; ; {
		n, from, err := unix.Recvfrom(w.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		must.Succeed(w.tb, err, "waiting for the last frame")
		if from.(*unix.SockaddrLinklayer).Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		switch {
		case bytes.HasSuffix(buf[:n], token):
			seen++
		case bytes.HasSuffix(buf[:n], last):
			return seen
		}
	}
}
