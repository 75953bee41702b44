package nft

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func snatted(ep Endpoint, snat SNAT) Endpoint {
	ep.PortSNAT = snat
	return ep
}

// Whose calls come from the host's address is the endpoint's to say; the firewall sees to it
// where it must, whatever is said.
func TestPortSNATSaysWhoLosesItsAddress(t *testing.T) {
	t.Parallel()
	const none = "no answer"
	callers := []string{"outside", "host", "127.0.0.1", "pod", "other pod", "pod of another bridge"}
	for _, tc := range []struct {
		name   string
		snat   SNAT
		nfCall bool
		want   []string // of IPv4, as the callers are listed
	}{
		{"needed", SNATNeeded, false, []string{caller4, host4, bridge4, bridge4, bridge4, remote4}},
		{"all", SNATAll, false, []string{bridge4, bridge4, bridge4, bridge4, bridge4, bridge4}},
		{"all, where the firewall sees the answer", SNATAll, true, []string{bridge4, bridge4, bridge4, bridge4, bridge4, bridge4}},
		{"none", SNATNone, false, []string{caller4, host4, bridge4, none, none, remote4}},
		{"none, where the firewall sees the answer", SNATNone, true, []string{caller4, host4, bridge4, none, other4, remote4}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			ctx := context.Background()
			p := newPublished(t, tc.nfCall)
			ep := p.ep
			ep.Ports, ep.PortSNAT = tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort}), tc.snat
			n := p.network
			n.PortSNAT = true
			must.Succeed(t, p.c.Remove(ctx, p.ep))
			mustEnsure(t, p.c, n)
			mustAdd(t, p.c, ep)
			p.serve(t)
			six := map[string]string{bridge4: bridge6, other4: other6, caller4: caller6, host4: host6, remote4: remote6, none: none}
			var want, got []string
			for i, caller := range callers {
				at := map[string]string{host4: tc.want[i], host6: six[tc.want[i]]}
				from := p.where(caller)
				if caller == "127.0.0.1" {
					at, from = map[string]string{caller: tc.want[i]}, p.host
				}
				for _, to := range []string{host4, host6, "127.0.0.1"} {
					source, asked := at[to]
					if !asked {
						continue
					}
					for _, network := range []string{"tcp", "udp"} {
						want = append(want, strings.Join([]string{caller, "at", to, network, "is seen as", source}, " "))
						seen, err := nstest.AskWithin(t, from, network, netip.AddrPortFrom(nstest.Addr(to), hostPort), map[bool]time.Duration{true: briefly, false: patience}[source == none])
						text := seen.Addr().String()
						if err != nil {
							text = none
						}
						got = append(got, strings.Join([]string{caller, "at", to, network, "is seen as", text}, " "))
					}
				}
			}
			expect.NoDiff(t, cmp.Diff(want, got))
			expect.Of(checkAll(p.c, n, ep)).Len(t, 0, "Check")
			// Another one, as what it was is removed whole.
			ep.PortSNAT = SNATAll
			must.Succeed(t, p.c.Remove(ctx, ep))
			if eps, err := p.c.Endpoints(ctx, "podnet"); err != nil || len(eps) > 1 || strings.Contains(nft(t, p.host, "list", "table", "inet", "tombolo"), string(ep.Owner)) {
				t.Errorf("after Remove: %v, %v", eps, err)
			}
		})
	}
}

func TestPortSNATThatIsNone(t *testing.T) {
	t.Parallel()
	c, _ := dialNew(t)
	mustEnsure(t, c, Network{Name: "podnet", Masquerade: true, PortSNAT: true})
	ep := publisher(1, tcpPort("", 8080))
	ep.PortSNAT = snatAny
	expect.Is(t, c.Add(context.Background(), ep), tombolo.ErrInvalid, "Add")
}

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
