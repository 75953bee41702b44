package bench

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// What a packet to a host port costs has two parts. Every packet passes the rules that
// forward; only the first of a flow looks for the port.
const (
	flowPackets = 50
	eachPublish = 100 // ports of a pod: a pipe holds no more
	udpPort     = 9000
)

// BenchmarkHostPort is the round trip of a datagram from a machine outside to a pod's host
// port, the first of its flow (first-ns) and the median of those after it (ns/op), on a
// node that has one port, or a thousand.
func BenchmarkHostPort(whole *testing.B) {
	var probes []*probe
	for _, ports := range []int{1, 1000} {
		if ports > 1 && once() && !*heavy {
			ports = 2 * eachPublish
		}
		probes = append(probes, newProbe(whole, ports))
	}
	for i, p := range probes {
		whole.Run(fmt.Sprintf("ports=%d", p.ports), func(b *testing.B) {
			for round := len(p.first); i == 0 && round < b.N; round++ {
				for turn := range probes {
					q := probes[(round+turn)%len(probes)]
					if err := q.flow(); err != nil {
						b.Fatalf("%d ports: %v", q.ports, err)
					}
				}
			}
			b.N = len(p.first)
			b.ReportMetric(median(p.next), "ns/op")
			b.ReportMetric(median(p.first), "first-ns")
			if i > 0 {
				for name, r := range map[string]interval{"growth": ratioOf(p.next, probes[0].next), "first-growth": ratioOf(p.first, probes[0].first)} {
					b.ReportMetric(r.value, name)
					limit{"HostPort", "tombolo", name, 1.1}.check(b, r)
				}
			}
		})
	}
}

// probe sends datagrams to a node's last host port, whose pod sends them back.
type probe struct {
	node        *node
	ports       int
	first, next []float64 // nanoseconds
}

func newProbe(b *testing.B, ports int) *probe {
	b.Helper()
	f := feature{name: "ports", outside: true}
	n := newNode(b, tombolo(), f)
	p := &probe{node: n, ports: ports}
	var last *pod
	for from := 0; from < ports; from += eachPublish {
		last = n.pod(b)
		n.feature.datagrams = [2]int{firstPort + from, firstPort + min(from+eachPublish, ports)}
		if _, err := n.call("ADD", last); err != nil {
			b.Fatal(err)
		}
	}
	fd := udpSocket(b, last.ns)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: udpPort}); err != nil {
		b.Fatal(err)
	}
	echo(b, fd)
	return p
}

// echo sends back what comes to a socket, until the benchmark ends. The kernel refuses to
// shut down a socket without a peer, and wakes its readers all the same.
func echo(b *testing.B, fd int) {
	var stopped atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		var content [2]byte
		for !stopped.Load() {
			if n, from, err := unix.Recvfrom(fd, content[:], 0); err == nil && from != nil {
				_ = unix.Sendto(fd, content[:n], 0, from)
			}
		}
	}()
	b.Cleanup(func() {
		stopped.Store(true)
		_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		<-done
	})
}

// flow times the round trips of a new flow from outside the node.
func (p *probe) flow() error {
	to := netip.AddrPortFrom(nodeAddresses[0].Addr(), uint16(firstPort+p.ports-1))
	fd, err := openUDP(p.node.outside)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
		return fmt.Errorf("connect to %s: %w", to, err)
	}
	var trips []float64
	for i := range 1 + flowPackets {
		took, err := roundTrip(fd, byte(i))
		if err != nil {
			return fmt.Errorf("datagram %d to %s: %w", i, to, err)
		}
		trips = append(trips, float64(took))
	}
	p.first, p.next = append(p.first, trips[0]), append(p.next, median(trips[1:]))
	return nil
}

// roundTrip sends a datagram over a connected socket and waits for it. The socket blocks:
// the runtime's poller would cost more than the packet does.
func roundTrip(fd int, content byte) (time.Duration, error) {
	var got [2]byte
	start := time.Now()
	if _, err := again(func() (int, error) { return unix.Write(fd, []byte{content}) }); err != nil {
		return 0, err
	}
	n, err := again(func() (int, error) { return unix.Read(fd, got[:]) })
	took := time.Since(start)
	if err == nil && (n != 1 || got[0] != content) {
		err = fmt.Errorf("%v came back for %d", got[:n], content)
	}
	return took, err
}

// again calls once more what a signal interrupted: the Go runtime sends itself some.
func again(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func udpSocket(b *testing.B, ns *netns.NS) int {
	b.Helper()
	fd, err := openUDP(ns)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { unix.Close(fd) })
	return fd
}

// openUDP opens an IPv4 socket in a namespace, which blocks, though not for ever.
func openUDP(ns *netns.NS) (int, error) {
	fd := -1
	err := ns.Do(func() error {
		var err error
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, err
	}
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	return fd, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit)
}

// BenchmarkUplink is the first ADD of a network whose uplink is a NIC with the host's
// address and default route: it makes the bridge, and takes the NIC over. restore-ns is
// "tombolo uplink restore", which gives the NIC back what it had.
func BenchmarkUplink(b *testing.B) {
	const nic = "nic0"
	n := newNode(b, tombolo(), feature{name: "uplink", options: object{"mode": "l2", "bridge": lanBridge, "uplink": nic}})
	router := nstest.New(b)
	nstest.Veth(b, n.host, nic, router, routerIfname)
	nstest.Run(b, router, "ip", "address", "add", "10.88.0.1/16", "dev", routerIfname)
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"address", "add", "10.88.255.2/16", "dev", nic}, {"route", "add", "default", "via", "10.88.0.1"}} {
		nstest.Run(b, n.host, "ip", args...)
	}
	n.linked = links(b, n.host)
	m := newMeter(b, false)
	var restored []float64
	b.N = max(min(b.N, 5), b.N/4) // so what stands in the line
	for range b.N {
		p := n.pod(b)
		m.time(func() (cost, error) { return n.call("ADD", p) })
		if err := n.prove(p); err != nil {
			b.Fatal(err)
		}
		if err := ping(n.host, netip.MustParseAddr("10.88.0.1")); err != nil {
			b.Fatalf("the host after the takeover: %v", err)
		}
		if _, err := n.call("DEL", p); err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		nstest.Run(b, n.host, program(b, "tombolo"), "uplink", "restore", "--state", filepath.Join(n.dir, "state"), "--leases", filepath.Join(n.dir, "leases"), nic)
		restored = append(restored, float64(time.Since(start)))
		n.proveGone(b, p)
	}
	m.report()
	b.ReportMetric(median(restored), "restore-ns")
}
