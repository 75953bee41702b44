package nft

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// sctpPacket is an SCTP packet of one chunk (RFC 9260, sections 3.1 and 3.3.2). It
// needs no SCTP in the kernel.
func sctpPacket(from, to uint16, tag uint32, chunk byte, initTag uint32) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = binary.BigEndian.AppendUint32(b, tag)
	b = append(b, 0, 0, 0, 0) // the checksum
	b = append(b, chunk, 0, 0, 20)
	b = binary.BigEndian.AppendUint32(b, initTag)
	b = append(b, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1)
	binary.LittleEndian.PutUint32(b[8:], sctpChecksum(b))
	return b
}

func sctpChecksum(b []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	sum := crc32.Update(0, table, b[:8])
	sum = crc32.Update(sum, table, make([]byte, 4))
	return crc32.Update(sum, table, b[12:])
}

const sctpInit, sctpInitAck, sctpAbort = 1, 2, 6

func sctpListen(tb testing.TB, ns *netns.NS, addr string) *net.IPConn {
	tb.Helper()
	network := "ip6:132"
	if nstest.Addr(addr).Is4() {
		network = "ip4:132"
	}
	var conn *net.IPConn
	must.Succeed(tb, ns.Do(func() error {
		var err error
		conn, err = net.ListenIP(network, &net.IPAddr{IP: nstest.Addr(addr).AsSlice()})
		return err
	}))
	tb.Cleanup(func() { conn.Close() })
	return conn
}

// sctpReceive gives the next packet, and fails if its checksum is wrong. A kernel that
// has SCTP aborts what none of its own sockets knows of; that is passed over.
func sctpReceive(conn *net.IPConn) (from netip.AddrPort, to uint16, b []byte, _ error) {
	if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return from, 0, nil, err
	}
	for {
		b = make([]byte, 1500)
		n, addr, err := conn.ReadFromIP(b)
		if err != nil {
			return from, 0, nil, err
		}
		b = b[:n]
		if n >= 16 && b[12] == sctpAbort {
			continue
		}
		if n < 16 || sctpChecksum(b) != binary.LittleEndian.Uint32(b[8:]) {
			return from, 0, nil, fmt.Errorf("a broken packet: %x", b)
		}
		ip, _ := netip.AddrFromSlice(addr.IP)
		return netip.AddrPortFrom(ip.Unmap(), binary.BigEndian.Uint16(b)), binary.BigEndian.Uint16(b[2:]), b, nil
	}
}

// An INIT to the host gets to the pod's port, and the INIT ACK comes back from the
// host's.
func TestPublishedSCTPPortIsReached(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true, allProtocols(Port{HostPort: hostPort, PodPort: podPort})...)
	for _, tc := range []struct{ name, from, to, pod, seen string }{
		{"outside", caller4, host4, pod4, caller4},
		{"outside", caller6, host6, pod6, caller6},
		{"host", host4, host4, pod4, host4},
		{"host", host6, host6, pod6, host6},
		{"host", "127.0.0.1", "127.0.0.1", pod4, bridge4},
		{"other pod", other4, host4, pod4, other4},
		{"other pod", other6, host6, pod6, other6},
		{"pod", pod4, host4, pod4, bridge4},
		{"pod", pod6, host6, pod6, bridge6},
	} {
		const callerPort, tag, answerTag = 40000, 0x1111, 0x2222
		caller := sctpListen(t, p.where(tc.name), tc.from)
		called := sctpListen(t, p.pod, tc.pod)
		err := func() error {
			to := &net.IPAddr{IP: nstest.Addr(tc.to).AsSlice()}
			if _, err := caller.WriteToIP(sctpPacket(callerPort, hostPort, 0, sctpInit, tag), to); err != nil {
				return err
			}
			seen, at, _, err := sctpReceive(called)
			if err != nil {
				return fmt.Errorf("no INIT: %w", err)
			}
			if seen.Addr() != nstest.Addr(tc.seen) || at != podPort {
				return fmt.Errorf("INIT from %s to port %d", seen, at)
			}
			back := &net.IPAddr{IP: seen.Addr().AsSlice()}
			if _, err := called.WriteToIP(sctpPacket(podPort, seen.Port(), tag, sctpInitAck, answerTag), back); err != nil {
				return err
			}
			// The caller's raw socket may hear what goes to another one on its host.
			for {
				answered, at, b, err := sctpReceive(caller)
				if err != nil {
					return fmt.Errorf("no INIT ACK: %w", err)
				}
				if b[12] != sctpInitAck {
					continue
				}
				if answered != netip.AddrPortFrom(nstest.Addr(tc.to), hostPort) || at != callerPort {
					return fmt.Errorf("INIT ACK from %s to port %d", answered, at)
				}
				return nil
			}
		}()
		expect.Success(t, err, "%s calls %s", tc.name, tc.to)
		caller.Close()
		called.Close()
	}
}
