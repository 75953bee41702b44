package nft

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// attackedLAN is a LAN with one pod that attacks the others.
type attackedLAN struct {
	*lan
	attacker *wire
	targets  map[string]*attackable
	frames   int
}

// attackable is one that may be attacked, or passed for.
type attackable struct {
	ns        *netns.NS
	link, mac string
	wire      *wire
	ip4, ip6  string
}

func newAttackedLAN(tb testing.TB) *attackedLAN {
	tb.Helper()
	l := &attackedLAN{lan: newLAN(tb)}
	const machineMAC = "02:00:00:00:07:20"
	nstest.Run(tb, l.machine, "ip", "link", "set", "eth0", "address", machineMAC)
	l.attacker = openWire(tb, l.pod, "eth0")
	l.targets = map[string]*attackable{
		"the router":    {ns: l.router, link: "eth0", mac: lanRouterMAC, ip4: router4, ip6: router6},
		"a machine":     {ns: l.machine, link: "eth0", mac: machineMAC, ip4: machine4, ip6: machine6},
		"the host":      {ns: l.host, link: "br0", mac: lanHostMAC, ip4: lanHost4, ip6: lanHost6},
		"the other pod": {ns: l.other, link: "eth0", mac: otherMAC, ip4: lanOther4, ip6: lanOther6},
	}
	for _, v := range l.targets {
		v.wire = openWire(tb, v.ns, v.link)
		// They would not believe another message within a second, and none in fragments.
		nstest.Sysctl(tb, v.ns, "net/ipv4/neigh/"+v.link+"/locktime", "0")
		nstest.Sysctl(tb, v.ns, "net/ipv6/neigh/"+v.link+"/locktime", "0")
		nstest.Sysctl(tb, v.ns, "net/ipv6/conf/"+v.link+"/suppress_frag_ndisc", "0")
	}
	mustEnsure(tb, l.c, Network{Name: "lan", Bridge: "br0", LAN: true, Guard: true})
	// The other pod is guarded throughout: this is not about it.
	mustAdd(tb, l.c, l.endpoint("00000000002", "veth2", otherMAC, lanOther4, lanOther6, "fe80::51"))
	return l
}

func (l *attackedLAN) guard(tb testing.TB) {
	tb.Helper()
	mustAdd(tb, l.c, l.endpoint("00000000001", "veth1", podMAC, lanPod4, lanPod6, "fe80::50"))
}

// attack sends a frame, and waits until all have had the time to look at it.
func (l *attackedLAN) attack(frame []byte) {
	l.attacker.tb.Helper()
	l.frames++
	last := []byte(fmt.Sprintf("last%08d", l.frames))
	l.attacker.send(frame, join(leasingFrames()[0].frame, last))
	for _, v := range l.targets {
		v.wire.seenBefore([]byte("none"), last)
	}
}

// tagged gives a frame a tag of VLAN 0, which says nothing but a priority: hosts look
// at what is behind it.
func tagged(frame []byte) []byte {
	return join(frame[:12], be16(unix.ETH_P_8021Q), be16(0xe000), frame[12:])
}

// poison gives ways to have a machine believe that another's address is at the pod.
func (v *attackable) poison(target *attackable) []namedFrame {
	arp := func(op int) []byte {
		return ether(v.mac, podMAC, unix.ETH_P_ARP, arpMessage(op, podMAC, target.ip4, v.ip4))
	}
	own := "fe80::50"
	ipv6 := func(packet []byte) []byte { return ether(v.mac, podMAC, unix.ETH_P_IPV6, packet) }
	body := func(src string) []byte {
		return icmp6(src, v.ip6, neighbourAdvert, []byte{0x20, 0, 0, 0}, ip(target.ip6), option(2, mac(podMAC)))
	}
	return []namedFrame{
		{"ARP request", arp(1)},
		{"ARP reply", arp(2)},
		{"ARP reply with a priority", tagged(arp(2))},
		{"ARP reply as from itself", ether(v.mac, target.mac, unix.ETH_P_ARP, arpMessage(2, podMAC, target.ip4, v.ip4))},
		{"advertisement", ipv6(packet6(own, v.ip6, 58, body(own)))},
		{"advertisement with a priority", tagged(ipv6(packet6(own, v.ip6, 58, body(own))))},
		{"advertisement as from itself", ipv6(packet6(target.ip6, v.ip6, 58, body(target.ip6)))},
		{"advertisement behind destination options", ipv6(packet6(own, v.ip6, unix.IPPROTO_DSTOPTS, padding6(58), body(own)))},
		{"advertisement behind hop-by-hop options", ipv6(packet6(own, v.ip6, unix.IPPROTO_HOPOPTS, padding6(58), body(own)))},
		{"advertisement in a fragment", ipv6(packet6(own, v.ip6, unix.IPPROTO_FRAGMENT, fragment6(58, 0), body(own)))},
		{"solicitation", ipv6(solicit6(target.ip6, v.ip6, v.ip6, option(1, mac(podMAC))))},
	}
}

func TestGuardedPodPoisonsNobody(t *testing.T) {
	t.Parallel()
	l := newAttackedLAN(t)
	nft(t, l.host, "flush chain bridge tombolo from-pods") // which drops IP with a priority, guarded or not
	poisoned := func(v, target *attackable, f namedFrame, tries int) string {
		t.Helper()
		address := target.ip4
		if !strings.HasPrefix(f.name, "ARP") {
			address = target.ip6
		}
		nstest.Run(t, v.ns, "ip", "neigh", "flush", "dev", v.link)
		must.Succeed(t, nstest.Ping(t, v.ns, nstest.Addr(address)))
		// Within the same tick of the kernel's clock, they stay with what they have; and
		// whose address it is may say so itself at any time.
		believed := ""
		for range tries {
			l.attack(f.frame)
			if believed = macAt(t, v.ns, v.link, address); believed == podMAC {
				break
			}
		}
		return believed
	}
	for _, guarded := range []bool{false, true} {
		tries := 100
		if guarded {
			l.guard(t)
			tries = 5
		}
		for name, v := range l.targets {
			for targetName, target := range l.targets {
				if v == target {
					continue
				}
				for _, f := range v.poison(target) {
					// Every way once, and everyone by the plainest.
					if plain := f.name == "ARP reply" || f.name == "advertisement"; !plain && (name != "a machine" || targetName != "the router") {
						continue
					}
					want := podMAC
					if guarded {
						want = target.mac
					}
					expect.Equal(t, poisoned(v, target, f, tries), want, "guarded: %v: after an %s to %s, %s is at", guarded, f.name, name, targetName)
				}
			}
		}
	}
}

func TestGuardedPodIsNobodysRouter(t *testing.T) {
	t.Parallel()
	l := newAttackedLAN(t)
	nft(t, l.host, "flush chain bridge tombolo from-pods") // which drops IP with a priority, guarded or not
	const own = "fe80::50"
	body := icmp6(own, allNodes, routerAdvert, []byte{64, 0x08, 7, 8}, make([]byte, 8), option(1, mac(podMAC))) // of high preference
	ipv6 := func(packet []byte) []byte { return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, packet) }
	frames := []namedFrame{
		{"advertisement", ipv6(packet6(own, allNodes, 58, body))},
		{"advertisement with a priority", tagged(ipv6(packet6(own, allNodes, 58, body)))},
		{"advertisement as from the router", ipv6(packet6("fe80::1", allNodes, 58, icmp6("fe80::1", allNodes, routerAdvert, []byte{64, 0, 7, 8}, make([]byte, 8))))},
		{"advertisement behind destination options", ipv6(packet6(own, allNodes, unix.IPPROTO_DSTOPTS, padding6(58), body))},
		{"advertisement behind hop-by-hop options", ipv6(packet6(own, allNodes, unix.IPPROTO_HOPOPTS, padding6(58), body))},
		{"advertisement in a fragment", ipv6(packet6(own, allNodes, unix.IPPROTO_FRAGMENT, fragment6(58, 0), body))},
	}
	for _, name := range []string{"a machine", "the host", "the other pod"} {
		v := l.targets[name]
		nstest.Sysctl(t, v.ns, "net/ipv6/conf/"+v.link+"/accept_ra", "2")
	}
	for _, guarded := range []bool{false, true} {
		if guarded {
			l.guard(t)
		}
		for _, f := range frames {
			l.attack(f.frame)
			for _, name := range []string{"a machine", "the host", "the other pod"} {
				v := l.targets[name]
				routes := nstest.Run(t, v.ns, "ip", "-6", "route", "show", "default", "proto", "ra")
				expect.Equal(t, routes == "", guarded, "guarded: %v: after an %s, %s has the routes %q", guarded, f.name, name, routes)
			}
			for _, name := range []string{"a machine", "the host", "the other pod"} {
				nstest.Run(t, l.targets[name].ns, "ip", "-6", "route", "flush", "proto", "ra")
			}
		}
	}
}

// A host that the bridge believes to be at the pod's port gets nothing any more.
func TestGuardedPodDrawsNobodysFrames(t *testing.T) {
	t.Parallel()
	l := newAttackedLAN(t)
	at := func(mac string) string {
		for line := range strings.Lines(nstest.Run(t, l.host, "bridge", "fdb", "show", "br", "br0")) {
			if f := strings.Fields(line); f[0] == mac && !strings.Contains(line, "permanent") {
				return f[2]
			}
		}
		return ""
	}
	router := l.targets["the router"]
	frame := ether(broadcastMAC, lanRouterMAC, unix.ETH_P_IP, packet4(router4, "255.255.255.255", 0, 17, datagram(1024, 9)))
	for _, guarded := range []bool{false, true} {
		if guarded {
			l.guard(t)
		}
		nstest.Reaches(t, l.host, router4, true)
		got := at(lanRouterMAC)
		must.That(t, got == "eth0", "the router is at %q", got)
		want := "veth1"
		if guarded {
			want = "eth0"
		}
		// The router may have said something meanwhile, and be where it was.
		got = ""
		for range 100 {
			l.attack(frame)
			if got = at(lanRouterMAC); got == want {
				break
			}
		}
		expect.Equal(t, got, want, "guarded: %v: the bridge has the router at", guarded)
		router.wire.send(ether(broadcastMAC, lanRouterMAC, unix.ETH_P_ARP, arpMessage(1, lanRouterMAC, router4, router4)))
	}
}

// leaseTries are more than any machine needs, however busy: one a second.
const leaseTries = 60

// lease has a real client get a lease, and gives the address; "" if nobody answers.
func lease(tb testing.TB, ns *netns.NS, tries int) string {
	tb.Helper()
	nstest.Need(tb, "busybox")
	file := filepath.Join(tb.TempDir(), "udhcpc")
	must.Succeed(tb, os.WriteFile(file, []byte("#!/bin/sh\nif test \"$1\" = bound; then echo leased $ip; fi\n"), 0o755))
	out, _ := nstest.Try(ns, "busybox", "udhcpc", "-i", "eth0", "-f", "-q", "-n", "-s", file, "-t", fmt.Sprint(tries), "-T", "1")
	for line := range strings.Lines(out) {
		if address, ok := strings.CutPrefix(strings.TrimSpace(line), "leased "); ok {
			return address
		}
	}
	return ""
}

func TestGuardedPodIsNobodysDHCPServer(t *testing.T) {
	t.Parallel()
	l := newAttackedLAN(t)
	heard := nstest.NewDnsmasq(t, l.pod, "eth0", "--dhcp-range=10.7.0.200,10.7.0.220,255.255.255.0,120s", "--dhcp-option=3,"+lanPod4).Logged
	got := lease(t, l.machine, leaseTries)
	must.That(t, strings.HasPrefix(got, "10.7.0.2"), "without a guard, the machine leases %q from the pod", got)
	l.guard(t)
	offers := func() int { return strings.Count(heard(), "DHCPOFFER") }
	// It may be slower than the right one.
	tried := func(before int) bool {
		for deadline := time.Now().Add(patience); offers() == before; time.Sleep(2 * time.Millisecond) {
			if time.Now().After(deadline) {
				return false
			}
		}
		return true
	}
	before := offers()
	expect.Equal(t, lease(t, l.machine, 1), "", "nobody but the pod is there to answer, and the machine leases")
	expect.That(t, tried(before), "the pod has not tried")
	nstest.NewDnsmasq(t, l.router, "eth0", "--dhcp-range=10.7.0.100,10.7.0.120,255.255.255.0,120s")
	for _, name := range []string{"a machine", "the other pod"} {
		// As a client that has no address, the other pod too.
		v := l.targets[name]
		before := offers()
		got := lease(t, v.ns, leaseTries)
		expect.That(t, strings.HasPrefix(got, "10.7.0.1"), "%s leases %q", name, got)
		expect.That(t, tried(before), "the pod has not tried to answer %s", name)
	}
}

// The whole life of a pod's lease, with a real client and a real server.
func TestGuardedPodGetsItsLease(t *testing.T) {
	t.Parallel()
	l := newAttackedLAN(t)
	nstest.NewDnsmasq(t, l.router, "eth0", "--dhcp-range=10.7.0.100,10.7.0.120,255.255.255.0,120s")
	nstest.Run(t, l.pod, "ip", "addr", "flush", "dev", "eth0")
	waiting := l.endpoint("00000000001", "veth1", podMAC)
	mustAdd(t, l.c, waiting)
	address := lease(t, l.pod, leaseTries)
	must.That(t, strings.HasPrefix(address, "10.7.0.1"), "the pod leases %q", address)
	nstest.Run(t, l.pod, "sh", "-ec", "ip addr add "+address+"/24 dev eth0; ip route add default via "+lanHost4)
	all := []string{router4, machine4, lanHost4, lanOther4}
	for _, to := range all {
		nstest.Reaches(t, l.pod, to, false)
	}
	leased := l.endpoint("00000000001", "veth1", podMAC, address)
	must.Succeed(t, l.c.Move(context.Background(), waiting, leased))
	for _, to := range append(all, internet4) {
		nstest.Reaches(t, l.pod, to, true)
	}
	// Another one, which it does not have.
	nstest.Run(t, l.pod, "sh", "-ec", "ip addr add 10.7.0.99/24 dev eth0; ip route replace 10.7.0.20 dev eth0 src 10.7.0.99")
	nstest.Reaches(t, l.pod, machine4, false)
	expect.Equal(t, lease(t, l.pod, leaseTries), address, "asked again, the server")
	expect.That(t, slices.Contains(guardedAddresses(t, l.lan), address), "the guard does not know of %s", address)
}

// guardedAddresses are those of IPv4 of the LAN's guarded pods.
func guardedAddresses(tb testing.TB, l *lan) []string {
	tb.Helper()
	eps := must.Of(l.c.Endpoints(context.Background(), "lan")).Get(tb)
	var list []string
	for _, ep := range eps {
		for _, a := range ep.Addrs {
			if a.Is4() {
				list = append(list, a.String())
			}
		}
	}
	return list
}
