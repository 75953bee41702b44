package cni

import (
	"fmt"
	"math"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

const routeLocalnet = "net/ipv4/conf/cbr0/route_localnet"

// mayTry removes what of a neighbour's own keeps it from sending to 127.0.0.0/8.
func mayTry(t testing.TB, ns *netns.NS, link, src string) {
	t.Helper()
	nstest.Sysctl(t, ns, "net/ipv4/conf/"+link+"/route_localnet", "1")
	nstest.Run(t, ns, "ip", "address", "flush", "dev", "lo")
	nstest.Run(t, ns, "ip", "route", "add", "127.0.0.0/8", "via", gateway4, "src", src)
}

// wantLoopback compares whether a bridge has route_localnet, and our filter.
func (n *node) wantLoopback(when, routed string, filter bool) {
	n.Helper()
	expect.Equal(n, nstest.Sysctl(n, n.ns, routeLocalnet), routed, "%s: route_localnet is", when)
	expect.Equal(n, strings.Contains(n.run("tc", "filter", "show", "dev", "cbr0", "ingress"), "bytecode"), filter,
		"%s: a filter at the bridge's ingress", when)
	// On a bridge of ours it stays: see TestPortsThatComeAndGoCostOtherPodsNothing.
	ours := strings.Contains(n.run("ip", "link", "show", "dev", "cbr0"), "alias")
	got := strings.Contains(n.run("tc", "qdisc", "show", "dev", "cbr0"), "clsact")
	expect.That(n, got == filter || ours, "%s: clsact on the bridge: %t, want %t", when, got, filter)
}

// What an operator has set for the reference's pods is no ADD's to take back.
func TestAnOperatorsWayFrom127StaysWhereNoPodHadAPort(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	w.add(n.pod("a"))
	nstest.Sysctl(t, n.ns, routeLocalnet, "1")
	nstest.Serve(t, n.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:8080"))
	wantError(t, expect.Err(w.tryAdd(n.pod("b"), publish(t, "8080:80/tcp"))), 112, "8080")
	n.wantLoopback("an ADD with a port has failed", "1", false)
}

// A machine on the bridge and a pod are kept from what the host has on 127.0.0.1 when
// the firewall has gone, and the port on 127.0.0.1 is back with the next ADD.
func TestAFlushedFirewallDoesNotOpenTheHostsLoopback(t *testing.T) {
	t.Parallel()
	for _, call := range []bool{true, false} {
		nstest.RunParallel(t, fmt.Sprintf("bridgeNFCall %t", call), func(t *testing.T) {
			n := newNode(t)
			nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-iptables", "0")
			secret := nstest.Serve(t, n.ns, "tcp", netip.MustParseAddrPort("127.0.0.1:0"))
			w := n.portnet(conf{"bridgeNFCall": call})
			p := n.pod("a")
			r := w.add(p, publish(t, "8080:80/tcp"))
			p.serve(t, "tcp", 80)
			expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)), "by 127.0.0.1")
			machine := nstest.New(t)
			nstest.Veth(t, n.ns, "lan0", machine, "eth0")
			n.ip("link set lan0 master cbr0 up")
			nstest.Run(t, machine, "ip", "address", "add", "10.77.0.200/24", "dev", "eth0")
			nstest.Run(t, machine, "ip", "link", "set", "eth0", "up")
			mayTry(t, machine, "eth0", "10.77.0.200")
			mayTry(t, p.NS, "eth0", ip4(r).String())
			attackers := map[string]*netns.NS{"a pod": p.NS, "a machine": machine}
			n.nft("flush ruleset")
			for name, ns := range attackers {
				expect.Failure(t, dial(ns, secret, 300*time.Millisecond), "%s reaches what the host has bound to 127.0.0.1", name)
			}
			n.run("tc", "qdisc", "del", "dev", "cbr0", "clsact")
			for name, ns := range attackers {
				expect.Success(t, dial(ns, secret, patience), "%s: the attack does not work without the filter", name)
			}
			wantError(t, w.check(p, publish(t, "8080:80/tcp")), 113, "the filter is missing at its ingress")
			w.add(n.pod("b"), publish(t, "8081:80/tcp"))
			expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", "127.0.0.1", 8080)), "by 127.0.0.1, mended")
			n.wantLoopback("mended", "1", true)
			expect.Success(t, w.check(p, publish(t, "8080:80/tcp")))
			// A filter that is gone alone is put back by the next ADD with a port.
			n.run("tc", "qdisc", "del", "dev", "cbr0", "clsact")
			w.add(n.pod("c"), publish(t, "8082:80/tcp"))
			n.wantLoopback("mended again", "1", true)
		})
	}
}

func TestCHECKTellsOfRouteLocalnet(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	p, without := n.pod("a"), n.pod("b")
	w.add(p, publish(t, "8080:80/tcp"))
	w.add(without)
	nstest.Sysctl(t, n.ns, routeLocalnet, "0")
	wantError(t, w.check(p, publish(t, "8080:80/tcp")), 113, "route_localnet is off")
	expect.Success(t, w.check(without), "of a pod without ports")
	n.run(command(), "repair", "--state", n.state)
	expect.Success(t, w.check(p, publish(t, "8080:80/tcp")))
}

func TestRouteLocalnetGoesWithTheLastPort(t *testing.T) {
	t.Parallel()
	port := func(t *testing.T, host int) option { return publish(t, fmt.Sprintf("%d:80/tcp", host)) }
	for name, run := range map[string]func(t *testing.T, n *node, w *network){
		"DEL": func(t *testing.T, n *node, w *network) {
			a, b := n.pod("a"), n.pod("b")
			w.add(a, port(t, 1))
			w.add(b, port(t, 2))
			w.del(a)
			n.wantLoopback("with one left", "1", true)
			w.del(b)
			n.wantLoopback("with none", "0", false)
		},
		"DEL, without elements": func(t *testing.T, n *node, w *network) {
			a, b := n.pod("a"), n.pod("b")
			w.add(a, port(t, 1))
			w.add(b, port(t, 2))
			n.nft("flush ruleset")
			w.del(a)
			n.wantLoopback("with one left", "1", true)
			w.del(b)
			n.wantLoopback("with none", "0", false)
		},
		"DEL without a record": func(t *testing.T, n *node, w *network) {
			a := w.addPod("a", port(t, 1))
			must.Succeed(t, os.RemoveAll(n.state+"/attachments"))
			w.del(a)
			n.wantLoopback("after it", "0", false)
		},
		"GC": func(t *testing.T, n *node, w *network) {
			a, b := n.pod("a"), n.pod("b")
			w.add(a, port(t, 1))
			w.add(b, port(t, 2))
			w.gc(b)
			n.wantLoopback("with one left", "1", true)
			w.gc()
			n.wantLoopback("with none", "0", false)
		},
		"an ADD that fails": func(t *testing.T, n *node, w *network) {
			w.add(n.pod("a"))
			p := n.pod("b")
			nstest.Run(t, p.NS, "ip", "link", "add", "eth0", "type", "bridge")
			wantError(t, expect.Err(w.tryAdd(p, port(t, 1))), 111, "already")
			n.wantLoopback("after it", "0", false)
		},
		"another network on the bridge": func(t *testing.T, n *node, w *network) {
			other := n.network("other", conf{"bridge": "cbr0", "capabilities": conf{"portMappings": true}, "ipam": hostLocal("10.78.0.0/24")})
			a, b := n.pod("a"), n.pod("b")
			w.add(a, port(t, 1))
			other.add(b, port(t, 2))
			w.del(a)
			n.run(command(), "remove", "--state", n.state, "podnet")
			n.wantLoopback("with one left", "1", true)
			other.del(b)
			n.wantLoopback("with none", "0", false)
		},
		"an IPv6 port, or one of another protocol": func(t *testing.T, n *node, w *network) {
			a, b := n.pod("a"), n.pod("b")
			w.add(a, publish(t, ":::1:80/tcp"))
			n.wantLoopback("with one for IPv6", "0", false)
			w.add(b, publish(t, "1:80/udp"))
			n.wantLoopback("with one for both", "1", true)
			w.del(b)
			n.wantLoopback("with one for IPv6 again", "0", false)
		},
		"an operator's own setting": func(t *testing.T, n *node, w *network) {
			w.add(n.pod("a"))
			nstest.Sysctl(t, n.ns, routeLocalnet, "1")
			b := w.addPod("b", port(t, 1))
			n.wantLoopback("with a port", "1", true)
			w.del(b)
			n.wantLoopback("with none", "1", false)
		},
		"a filter that somebody deletes": func(t *testing.T, n *node, w *network) {
			a, b := n.pod("a"), n.pod("b")
			w.add(a, port(t, 1))
			n.run("tc", "qdisc", "del", "dev", "cbr0", "clsact")
			w.add(b, port(t, 2))
			n.wantLoopback("with two", "1", true)
			w.del(a)
			w.del(b)
			n.wantLoopback("with none", "0", false)
			w.add(a, port(t, 1))
			n.run("tc", "qdisc", "del", "dev", "cbr0", "clsact")
			w.del(a)
			n.wantLoopback("with none again", "0", false)
		},
		"a bridge of somebody else's": func(t *testing.T, n *node, w *network) {
			n.ip("link add cbr0 type bridge")
			n.run("tc", "qdisc", "add", "dev", "cbr0", "ingress")
			n.ip("link set cbr0 up")
			before := n.run("tc", "qdisc", "show", "dev", "cbr0")
			a := w.addPod("a", port(t, 1))
			expect.Equal(t, nstest.Sysctl(n, n.ns, routeLocalnet), "1", "route_localnet is")
			w.del(a)
			expect.Equal(t, n.run("tc", "qdisc", "show", "dev", "cbr0"), before, "qdiscs before:\n%s\nafter", before)
			n.wantLoopback("after it", "0", false)
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			run(t, n, n.portnet(nil))
		})
	}
}

// While a clsact comes to the bridge or goes, the kernel drops what the host sends to pods.
func TestPortsThatComeAndGoCostOtherPodsNothing(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	stays := n.pod("stays")
	at := addrPort(ip4(w.add(stays)).String(), 7)
	talk := nstest.NewTalk(t, "udp", stays.NS, at, n.ns, at)
	qdiscs := n.run("tc", "qdisc", "show", "dev", "cbr0")
	expect.Contains(t, qdiscs, "clsact", "qdiscs of a bridge whose pods have no ports")
	for range 3 {
		p := n.pod("a")
		for _, step := range []struct {
			name string
			do   func()
		}{
			{"the first port comes", func() { w.add(p, publish(t, "8080:80/tcp")) }},
			{"the last port goes", func() { w.del(p) }},
		} {
			step.do()
			expect.Equal(t, n.run("tc", "qdisc", "show", "dev", "cbr0"), qdiscs, "%s: qdiscs", step.name)
			talk.Check(t)
		}
	}
}

// A pod with a port that comes while the last one goes must find it open.
func TestPortsThatComeAndGoAtOnceLeaveTheLoopbackRight(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	rounds := 8
	if testing.Short() {
		rounds = 2
	}
	for round := range rounds {
		stays := n.pod(fmt.Sprintf("stays-%d", round))
		var all sync.WaitGroup
		for i := range 3 {
			p := n.pod(fmt.Sprintf("goes-%d-%d", round, i))
			opt := publish(t, fmt.Sprintf("%d:80/tcp", 9000+i))
			all.Go(func() {
				expect.Success(t, expect.Err(w.tryAdd(p, opt)))
				expect.Success(t, w.tryDel(p, opt))
			})
		}
		opt := publish(t, "8080:80/tcp")
		all.Go(func() { expect.Success(t, expect.Err(w.tryAdd(stays, opt))) })
		all.Wait()
		n.wantLoopback("with one that stays", "1", true)
		w.del(stays)
		n.wantLoopback("with none", "0", false)
	}
}

// The DEL of a bridge's last host port reads as many datagrams beside kube-proxy's rules for a thousand services as
// without them: it lists the rules of no other table.
func TestDELOfTheLastHostPortListsNoRulesOfOthers(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "strace")
	n := newNode(t)
	w := n.portnet(nil)
	// The fewest of several: events of links may come in between, more or less of them.
	read := func(name string) int {
		fewest := math.MaxInt
		for round := range 3 {
			p := n.pod(fmt.Sprintf("%s%d", name, round))
			w.add(p, publish(t, "8080:80/tcp"))
			must.That(t, nstest.Sysctl(t, n.ns, "net/ipv4/conf/cbr0/route_localnet") == "1",
				"127.0.0.1 does not lead to the port, so its end is not shown")
			fewest = min(fewest, len(n.traced(call{verb: "DEL", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}, "recvfrom,recvmsg")))
			expect.Equal(t, nstest.Sysctl(t, n.ns, "net/ipv4/conf/cbr0/route_localnet"), "0",
				"the port was not the last one")
		}
		return fewest
	}
	quiet := read("quiet")
	var services strings.Builder
	services.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n")
	for i := range 1000 {
		fmt.Fprintf(&services, ":KUBE-SVC-%d - [0:0]\n-A KUBE-SVC-%[1]d ! -s 10.244.0.0/16 -j MARK --set-mark 0x4000\n-A KUBE-SVC-%[1]d -m statistic --mode random --probability 0.5 -j DNAT -p tcp --to-destination 10.244.%[2]d.%[3]d:8080\n"+
			"-A KUBE-SERVICES -d 10.96.%[2]d.%[3]d/32 -p tcp --dport 80 -m comment --comment t/s%[1]d -j KUBE-SVC-%[1]d\n", i, i>>8, i&255)
	}
	services.WriteString("COMMIT\n")
	dir := t.TempDir()
	nstest.PutFile(t, dir, "services", services.String())
	n.run("iptables-restore", dir+"/services")
	busy := read("busy")
	expect.That(t, busy <= quiet, "DEL reads %d datagrams, and %d beside rules of others", quiet, busy)
}
