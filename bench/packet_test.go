package bench

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// flowPackets is how many datagrams of a flow come after its first. Every packet passes the
// rules that forward; only the first of a flow looks for the port.
const flowPackets = 50

// hostPort is the round trip of a datagram from a machine outside to a pod's host
// port, the first of its flow (first-ns) and the median of those after it (ns/op), on a
// node that has one port, or a thousand, a hundred of each pod.
func hostPort(whole *testing.B) {
	type probe struct {
		*node
		last        *pod
		first, next []float64
	}
	var probes []*probe
	for _, some := range []struct{ pods, each int }{{1, 1}, {10, 100}} {
		p := &probe{node: newNode(whole, tombolo(), feature{name: "ports", outside: true, datagrams: some.each})}
		for range some.pods {
			p.last = p.pod(whole)
			must.Succeed(whole, expect.Err(p.call("ADD", p.last)))
		}
		probes = append(probes, p)
	}
	for i, p := range probes {
		whole.Run(fmt.Sprintf("ports=%d", p.feature.datagrams*p.last.number), func(b *testing.B) {
			for round := len(p.first); i == 0 && round < b.N; round++ {
				for turn := range probes {
					q := probes[(round+turn)%len(probes)]
					trips := q.flow(b, q.last)
					q.first, q.next = append(q.first, trips[0]), append(q.next, median(trips[1:]))
				}
			}
			standInLine(b, len(p.first))
			b.ReportMetric(median(p.next), "ns/op")
			b.ReportMetric(median(p.first), "first-ns")
			if i > 0 {
				ratioOf(p.next, probes[0].next).report(b, "growth")
				ratioOf(p.first, probes[0].first).report(b, "first-growth")
			}
		})
	}
}

// flow gives the round trips, in nanoseconds, of a new flow to a pod's host port.
func (n *node) flow(b *testing.B, p *pod) (trips []float64) {
	b.Helper()
	var conn net.Conn
	to := netip.AddrPortFrom(nodeAddresses[0].Addr(), uint16(firstPort+p.number*n.feature.datagrams))
	must.Succeed(b, n.outside.Do(func() error {
		var err error
		conn, err = net.Dial("udp", to.String())
		return err
	}))
	defer conn.Close()
	answer := make([]byte, 64)
	for range 1 + flowPackets {
		start := time.Now()
		_, err := conn.Write([]byte("?"))
		if err == nil {
			_ = conn.SetReadDeadline(start.Add(patience))
			_, err = conn.Read(answer)
		}
		must.Succeed(b, err, "datagram %d to %s", len(trips), to)
		trips = append(trips, float64(time.Since(start)))
	}
	return trips
}

// uplink is the first ADD of a network whose uplink is a NIC with the host's
// address and default route: it makes the bridge, and shares the NIC. remove-ns is "tombolo
// remove", which takes all of that away.
func uplink(b *testing.B) {
	const nic = "nic0"
	n := newNode(b, tombolo(), feature{name: "uplink", options: object{"mode": "l2", "bridge": lanBridge, "uplink": nic}})
	router := nstest.New(b)
	nstest.Veth(b, n.host, nic, router, routerIfname)
	nstest.Run(b, router, "ip", "address", "add", "10.88.0.1/16", "dev", routerIfname)
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"address", "add", "10.88.255.2/16", "dev", nic}, {"route", "add", "default", "via", "10.88.0.1"}} {
		nstest.Run(b, n.host, "ip", args...)
	}
	n.linked = links(b, n.host)
	var added, removed []float64
	standInLine(b, max(min(b.N, 5), b.N/4))
	for range b.N {
		p := n.pod(b)
		added = append(added, float64(must.Of(n.call("ADD", p)).Get(b).wall))
		must.Succeed(b, n.prove(p))
		must.Succeed(b, ping(n.host, netip.MustParseAddr("10.88.0.1")), "the host after the first ADD")
		must.Succeed(b, expect.Err(n.call("DEL", p)))
		start := time.Now()
		nstest.Run(b, n.host, program(b, "tombolo"), "remove", "--state", filepath.Join(n.dir, "state"), "--leases", filepath.Join(n.dir, "leases"), networkName)
		removed = append(removed, float64(time.Since(start)))
		n.proveGone(b, p)
	}
	b.ReportMetric(median(added), "ns/op")
	b.ReportMetric(quantile(added, 0.95), "p95-ns/op")
	b.ReportMetric(median(removed), "remove-ns")
}
