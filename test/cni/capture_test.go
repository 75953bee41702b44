package cni

import (
	"encoding/binary"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// testProtocol is an Ethernet protocol that nobody speaks (IEEE 802's first one for
// local experiments).
const testProtocol = 0x88b5

// frame is one that a tap saw.
type frame struct {
	from, to string // MACs
	protocol uint16
	icmp6    uint8 // type of the ICMPv6 message, 0 if it is none
	incoming bool  // it came in by the link; else it went out
}

// tap sees all frames of a link, from when it is made.
type tap struct {
	t     testing.TB
	fd    int
	index int
}

func capture(t testing.TB, ns *netns.NS, link string) *tap {
	t.Helper()
	// Nobody waits longer than this for a frame that is to come.
	fd, index := nstest.PacketSocket(t, ns, link, unix.SOCK_RAW, unix.ETH_P_ALL, patience)
	return &tap{t, fd, index}
}

func (c *tap) send(from net.HardwareAddr, text string) {
	c.t.Helper()
	broadcast := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	data := append(append(broadcast, from...), byte(testProtocol>>8), byte(testProtocol&0xff))
	data = append(data, text...)
	data = append(data, make([]byte, max(0, 60-len(data)))...)
	to := &unix.SockaddrLinklayer{Ifindex: c.index, Halen: 6}
	copy(to.Addr[:], broadcast)
	must.Succeed(c.t, unix.Sendto(c.fd, data, 0, to))
}

// until gives all frames up to the first that is the last.
func (c *tap) until(last func(frame) bool) []frame {
	c.t.Helper()
	var seen []frame
	buf := make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(c.fd, buf, 0)
		if err == unix.EINTR {
			continue
		}
		must.That(c.t, err == nil, "wait for a frame: %v; seen so far: %+v", err, seen)
		f, ok := parseFrame(buf[:n])
		if !ok {
			continue
		}
		link, ok := from.(*unix.SockaddrLinklayer)
		f.incoming = ok && link.Pkttype != unix.PACKET_OUTGOING
		seen = append(seen, f)
		if last(f) {
			return seen
		}
	}
}

func parseFrame(b []byte) (frame, bool) {
	const header = 14
	if len(b) < header {
		return frame{}, false
	}
	f := frame{
		to: net.HardwareAddr(b[:6]).String(), from: net.HardwareAddr(b[6:12]).String(),
		protocol: binary.BigEndian.Uint16(b[12:]),
	}
	if f.protocol == unix.ETH_P_IPV6 {
		f.icmp6 = icmpType(b[header:])
	}
	return f, true
}

// icmpType is that of an ICMPv6 message, also behind the hop-by-hop options that
// multicast listener reports have.
func icmpType(b []byte) uint8 {
	const fixed = 40
	if len(b) < fixed+8 {
		return 0
	}
	next, rest := b[6], b[fixed:]
	if next == unix.IPPROTO_HOPOPTS {
		length := 8 + 8*int(rest[1])
		if len(rest) < length+1 {
			return 0
		}
		next, rest = rest[0], rest[length:]
	}
	if next != unix.IPPROTO_ICMPV6 {
		return 0
	}
	return rest[0]
}
