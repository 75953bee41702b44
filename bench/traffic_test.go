package bench

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// ownBridge is Tombolo with a bridge of the system's, whose port the NIC is. guarded is Tombolo with a guarded pod, which
// computes checksums and segments itself. Hosts of the filtered contenders have br_netfilter and a rule that drops
// invalid packets, so that the kernel tracks bridged frames; all other hosts are without br_netfilter.
const (
	ownBridge, guarded = "tombolo-on-bridge", "tombolo-guarded"
	filtered           = "-filtered"
)

// The addresses of the LAN of a lanTraffic: its router, the host, and the pod where Tombolo does not choose it.
const lanRouter, lanHost, lanPod = "10.88.0.1", "10.88.255.2", "10.88.255.3"

const (
	streamLen   = 64 << 20 // bytes, some 50 ms
	roundTrips  = 50
	streamChunk = 256 << 10
)

// machines are those of one contender, by where a path begins or ends.
type machines map[string]machine

type machine struct {
	ns      *netns.NS
	address netip.Addr
}

// lanTraffic measures traffic between a pod on the host's LAN, the host and another machine: streams (MiB-ns is the time
// of a MiB) and round trips of a datagram (ns/op). Contenders are a shared NIC, with and without a guard; a NIC that is a
// bridge's port, with a pod of Tombolo's and without any rules; and macvlan, as netavark has it, by which host and pod do
// not reach each other.
func lanTraffic(whole *testing.B) {
	contenders := []string{"tombolo", guarded, ownBridge, "bridge", "macvlan", "tombolo" + filtered, "bridge" + filtered}
	all := map[string]machines{}
	for _, name := range contenders {
		all[name] = newMachines(whole, name)
	}
	for _, path := range [][2]string{{"pod", "lan"}, {"lan", "pod"}, {"host", "pod"}, {"pod", "host"}} {
		streams, trips := map[string][]float64{}, map[string][]float64{}
		for _, name := range contenders {
			if name == "macvlan" && (path[0] == "host" || path[1] == "host") {
				continue
			}
			whole.Run(fmt.Sprintf("path=%s-to-%s/contender=%s", path[0], path[1], name), func(b *testing.B) {
				for round := len(streams["bridge"]); round < b.N; round++ {
					for turn := range contenders {
						other := contenders[(round+turn)%len(contenders)]
						if from, to := all[other][path[0]], all[other][path[1]]; from.ns != nil && to.ns != nil {
							streams[other] = append(streams[other], stream(b, from.ns, to.ns, to.address))
							trips[other] = append(trips[other], trip(b, from.ns, to.ns, to.address))
						}
					}
				}
				standInLine(b, len(streams[name]))
				b.ReportMetric(median(trips[name]), "ns/op")
				b.ReportMetric(quantile(trips[name], 0.95), "p95-ns/op")
				b.ReportMetric(median(streams[name]), "MiB-ns")
				for _, other := range contenders {
					if streams[other] != nil && isCompared(name, other) {
						ratioOf(streams[name], streams[other]).report(b, "stream/"+other)
						ratioOf(trips[name], trips[other]).report(b, "trip/"+other)
					}
				}
			})
		}
	}
}

// isCompared reports whether the line of a contender has the ratio over another one: a host with br_netfilter is
// compared with its like.
func isCompared(name, other string) bool {
	return name == "tombolo" && other != name && !strings.HasSuffix(other, filtered) ||
		name == "tombolo"+filtered && other == "bridge"+filtered
}

// newMachines makes a host with a NIC, a machine at its other end, and a pod on the LAN.
func newMachines(b *testing.B, contender string) machines {
	b.Helper()
	const nic = "nic0"
	router, m := nstest.New(b), machines{}
	contender, isFiltered := strings.CutSuffix(contender, filtered)
	var host *netns.NS
	at, pod := nic, netip.MustParseAddr(lanPod)
	var n *node
	isTombolo := contender == "tombolo" || contender == guarded || contender == ownBridge
	if isTombolo {
		options := object{"mode": "l2", "bridge": lanBridge, "uplink": nic, "guard": contender == guarded}
		if contender == ownBridge {
			delete(options, "uplink")
		}
		n = newNode(b, tombolo(), feature{name: "lan-traffic", options: options})
		host = n.host
	} else {
		host = nstest.New(b)
	}
	filterBridged(b, host, isFiltered)
	nstest.Veth(b, host, nic, router, routerIfname)
	nstest.Run(b, router, "ip", "address", "add", lanRouter+"/16", "dev", routerIfname)
	if contender == "bridge" || contender == ownBridge {
		at = lanBridge
		nstest.Run(b, host, "ip", "link", "add", lanBridge, "type", "bridge")
		nstest.Run(b, host, "ip", "link", "set", nic, "master", lanBridge)
		nstest.Run(b, host, "ip", "link", "set", lanBridge, "up")
	}
	nstest.Run(b, host, "ip", "address", "add", lanHost+"/16", "dev", at)
	nstest.Run(b, host, "ip", "route", "add", "default", "via", lanRouter)

	inside := nstest.New(b)
	link := podIfname
	switch contender {
	case "tombolo", guarded, ownBridge:
		p := n.pod(b)
		must.Succeed(b, expect.Err(n.call("ADD", p)))
		inside, pod = p.ns, must.Of(leaseOf(p)).Get(b)
	case "bridge":
		nstest.Veth(b, host, "pod0", inside, link)
		nstest.Run(b, host, "ip", "link", "set", "pod0", "master", lanBridge)
	case "macvlan":
		nstest.Run(b, host, "ip", "link", "add", "pod0", "link", nic, "type", "macvlan", "mode", "bridge")
		nstest.Run(b, host, "ip", "link", "set", "pod0", "netns", fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), inside.FD()))
		link = "pod0"
		nstest.Run(b, inside, "ip", "link", "set", link, "up")
	}
	if !isTombolo {
		nstest.Run(b, inside, "ip", "address", "add", lanPod+"/16", "dev", link)
	}
	m["lan"], m["pod"] = machine{router, netip.MustParseAddr(lanRouter)}, machine{inside, pod}
	if contender != "macvlan" {
		m["host"] = machine{host, netip.MustParseAddr(lanHost)}
	}
	return m
}

// filterBridged turns br_netfilter on or off for a host's bridges. Where it is on, the host has a rule that makes the
// kernel track bridged packets.
func filterBridged(b *testing.B, host *netns.NS, isFiltered bool) {
	b.Helper()
	value := "0"
	if isFiltered {
		value = "1"
		nstest.Run(b, host, "nft", "add table inet filter; add chain inet filter forward { type filter hook forward priority 0; }; "+
			"add rule inet filter forward ct state invalid drop")
	}
	for _, name := range []string{"iptables", "ip6tables", "arptables"} {
		nstest.Sysctl(b, host, "net/bridge/bridge-nf-call-"+name, value)
	}
}

// stream returns the nanoseconds that a MiB of a TCP connection takes.
func stream(b *testing.B, from, to *netns.NS, address netip.Addr) float64 {
	b.Helper()
	var l net.Listener
	must.Succeed(b, to.Do(func() (err error) {
		l, err = net.Listen("tcp4", netip.AddrPortFrom(address, 0).String())
		return err
	}))
	defer l.Close()
	var out net.Conn
	must.Succeed(b, from.Do(func() (err error) {
		out, err = net.DialTimeout("tcp4", l.Addr().String(), patience)
		return err
	}))
	in := must.Of(l.Accept()).Get(b)
	defer in.Close()
	start := time.Now()
	sent := make(chan error, 1)
	go func() {
		chunk := make([]byte, streamChunk)
		var err error
		for done := 0; done < streamLen && err == nil; done += len(chunk) {
			_, err = out.Write(chunk)
		}
		sent <- errors.Join(err, out.Close())
	}()
	buf, got := make([]byte, streamChunk), 0
	for {
		n, err := in.Read(buf)
		got += n
		if err == io.EOF {
			break
		}
		must.Succeed(b, err)
	}
	must.Succeed(b, <-sent)
	must.That(b, got == streamLen, "%d bytes came", got)
	return float64(time.Since(start)) / (streamLen >> 20)
}

// trip returns the median of round trips of a datagram, in nanoseconds. One processor runs both ends, since a wakeup of
// another one takes longer than the whole path of the datagram.
func trip(b *testing.B, from, to *netns.NS, address netip.Addr) float64 {
	b.Helper()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	at := nstest.Serve(b, to, "udp4", netip.AddrPortFrom(address, 0))
	var conn net.Conn
	must.Succeed(b, from.Do(func() (err error) {
		conn, err = net.Dial("udp4", at.String())
		return err
	}))
	defer conn.Close()
	answer := make([]byte, 64)
	var trips []float64
	for range roundTrips {
		start := time.Now()
		_, err := conn.Write([]byte("?"))
		if err == nil {
			_ = conn.SetReadDeadline(start.Add(patience))
			_, err = conn.Read(answer)
		}
		must.Succeed(b, err, "a round trip to %s", address)
		trips = append(trips, float64(time.Since(start)))
	}
	return median(trips)
}
