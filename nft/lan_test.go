package nft

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// The addresses of a LAN: of the host's bridge, of pods behind it, and of machines.
const (
	lanHost4, lanHost6       = "10.7.0.10", "fd07::10"
	lanPod4, lanPod6         = "10.7.0.50", "fd07::50"
	lanOther4, lanOther6     = "10.7.0.51", "fd07::51"
	router4, router6         = "10.7.0.1", "fd07::1"
	machine4, machine6       = "10.7.0.20", "fd07::20"
	server4, server6         = "10.7.0.21", "fd07::21"
	printer4, printer6       = "10.7.0.30", "fd07::30"
	internet4, internet6     = "198.51.100.1", "2001:db8:2::1"
	lanHostMAC, lanRouterMAC = "02:00:00:00:07:10", "02:00:00:00:07:01"
)

// lan is a LAN with a router and the internet behind it, two machines at its switch,
// and a host whose NICs, one to the switch and one to a printer, are ports of a bridge
// with two pods, which have the host for their router.
type lan struct {
	router, internet, machine, server, printer *netns.NS
	host, pod, other                           *netns.NS
	c                                          *Conn
}

// noNFCall has bridges of a new namespace not call iptables, where they do by default.
const noNFCall = `
		for family in ip ip6; do
			sysctl=/proc/sys/net/bridge/bridge-nf-call-${family}tables
			! test -e $sysctl || echo 0 >$sysctl
		done`

func newLAN(tb testing.TB) *lan {
	tb.Helper()
	l := &lan{host: nstest.New(tb)}
	l.c = dial(tb, l.host)
	wire := nstest.New(tb)
	nstest.Run(tb, wire, "sh", "-ec", noNFCall+`
		ip link add sw0 type bridge mcast_snooping 0 forward_delay 0
		ip link set sw0 addrgenmode none up`)
	nstest.Run(tb, l.host, "sh", "-ec", noNFCall+`
		ip link add br0 address `+lanHostMAC+` type bridge mcast_snooping 0 forward_delay 0
		ip link set br0 addrgenmode none up
		for all in /proc/sys/net/ipv4/conf/all /proc/sys/net/ipv4/conf/br0; do echo 0 >$all/send_redirects; done
		echo 1 >/proc/sys/net/ipv4/ip_forward
		echo 1 >/proc/sys/net/ipv6/conf/all/forwarding`)
	plug := func(at *netns.NS, bridge, port string) *netns.NS {
		ns := nstest.New(tb)
		nstest.Veth(tb, at, port, ns, "eth0")
		nstest.Run(tb, at, "ip", "link", "set", port, "master", bridge)
		return ns
	}
	l.router, l.machine, l.server = plug(wire, "sw0", "p1"), plug(wire, "sw0", "p2"), plug(wire, "sw0", "p3")
	nstest.Veth(tb, wire, "p4", l.host, "eth0")
	nstest.Run(tb, wire, "ip", "link", "set", "p4", "master", "sw0")
	nstest.Run(tb, l.host, "ip", "link", "set", "eth0", "master", "br0")
	l.printer = plug(l.host, "br0", "eth1")
	l.pod, l.other = plug(l.host, "br0", "veth1"), plug(l.host, "br0", "veth2")
	l.internet = nstest.New(tb)
	nstest.Veth(tb, l.router, "wan", l.internet, "eth0")

	address := func(ns *netns.NS, link, mac, ip4, ip6, via4, via6 string) {
		nstest.Run(tb, ns, "sh", "-ec", fmt.Sprintf(`
			ip link set lo up
			test -z "%[2]s" || ip link set %[1]s address %[2]s
			ip addr add %[3]s/24 dev %[1]s
			ip addr add %[4]s/64 dev %[1]s nodad
			ip addr add fe80::%[7]s/64 dev %[1]s nodad
			test -z "%[5]s" || ip route add default via %[5]s
			test -z "%[6]s" || ip route add default via %[6]s
			for all in all %[1]s; do echo 0 >/proc/sys/net/ipv4/conf/$all/accept_redirects; done`,
			link, mac, ip4, ip6, via4, via6, ip6[strings.LastIndex(ip6, ":")+1:]))
	}
	address(l.host, "br0", "", lanHost4, lanHost6, router4, router6)
	address(l.router, "eth0", lanRouterMAC, router4, router6, "", "")
	address(l.machine, "eth0", "", machine4, machine6, router4, router6)
	address(l.server, "eth0", "", server4, server6, router4, router6)
	address(l.printer, "eth0", "", printer4, printer6, router4, router6)
	address(l.pod, "eth0", podMAC, lanPod4, lanPod6, lanHost4, lanHost6)
	address(l.other, "eth0", otherMAC, lanOther4, lanOther6, lanHost4, lanHost6)
	address(l.router, "wan", "", "198.51.100.2", "2001:db8:2::2", "", "")
	address(l.internet, "eth0", "", internet4, internet6, "198.51.100.2", "2001:db8:2::2")
	nstest.Run(tb, l.router, "sh", "-ec", "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 1 >/proc/sys/net/ipv6/conf/all/forwarding")
	nstest.WaitForAddresses(tb, l.host, l.router, l.machine, l.server, l.printer, l.pod, l.other, l.internet)
	return l
}

// call has the bridge call iptables, or not.
func (l *lan) call(tb testing.TB, call bool) {
	tb.Helper()
	value := map[bool]string{false: "0", true: "1"}[call]
	nstest.Run(tb, l.host, "ip", "link", "set", "br0", "type", "bridge", "nf_call_iptables", value, "nf_call_ip6tables", value)
}

// strict drops what conntrack makes no sense of, as kube-proxy and ufw do.
const strict = `table inet strict {
	chain forward {
		type filter hook forward priority filter
		ct state invalid drop
	}
}`

// services is what another program of the host leads to backends: a cluster's services,
// and a port of the host's own.
func services(backends map[string]netip.AddrPort) string {
	var rules strings.Builder
	for service, backend := range backends {
		at := netip.MustParseAddrPort(service)
		family, to := "ip", backend.String()
		if at.Addr().Is6() {
			family = "ip6"
		}
		fmt.Fprintf(&rules, "%s daddr %s meta l4proto { tcp, udp } th dport %d dnat %s to %s\n", family, at.Addr(), at.Port(), family, to)
	}
	return "table inet services {\nchain dstnat {\ntype nat hook prerouting priority dstnat - 5\n" + rules.String() + "}\n}"
}

// newServices is a LAN whose bridge calls iptables, or not, with our network on it and,
// of another program, services with a backend each: a machine, the other pod, a machine
// in the internet, and one behind the host. The other pod has published its port 80.
func newServices(tb testing.TB, call, asLAN bool) *lan {
	tb.Helper()
	l := newLAN(tb)
	l.call(tb, call)
	mustEnsure(tb, l.c, Network{Name: "lan", Bridge: "br0", NFCall: call, LAN: asLAN, Guard: true})
	other := l.endpoint("00000000002", "veth2", otherMAC, lanOther4, lanOther6)
	other.Ports = tcpAndUDP(Port{HostPort: 8081, PodPort: 80})
	mustAdd(tb, l.c, l.endpoint("00000000001", "veth1", podMAC, lanPod4, lanPod6), other)
	nft(tb, l.host, strict)
	backends := map[string]netip.AddrPort{}
	for service, backend := range map[string]string{
		toServer: server4, toOther: lanOther4, toInternet: internet4, toPrinter: printer4, hostPort4: server4,
		toServer6: server6, toOther6: lanOther6, toInternet6: internet6, toPrinter6: printer6, hostPort6: server6,
	} {
		backends[service] = netip.AddrPortFrom(nstest.Addr(backend), 80)
	}
	nft(tb, l.host, services(backends))
	for address, ns := range map[string]*netns.NS{
		server4: l.server, lanOther4: l.other, internet4: l.internet, printer4: l.printer,
		server6: l.server, lanOther6: l.other, internet6: l.internet, printer6: l.printer,
	} {
		for _, network := range []string{"tcp", "udp"} {
			nstest.Serve(tb, ns, network, netip.AddrPortFrom(nstest.Addr(address), 80))
		}
	}
	return l
}

// The services of newServices, and the ports of the host that lead to the server and to
// the other pod.
const (
	toServer, toServer6     = "10.96.0.1:80", "[fd96::1]:80"
	toOther, toOther6       = "10.96.0.2:80", "[fd96::2]:80"
	toInternet, toInternet6 = "10.96.0.3:80", "[fd96::3]:80"
	toPrinter, toPrinter6   = "10.96.0.4:80", "[fd96::4]:80"
	hostPort4, hostPort6    = lanHost4 + ":8080", "[" + lanHost6 + "]:8080"
	podPort4, podPort6      = lanHost4 + ":8081", "[" + lanHost6 + "]:8081"
)

func (l *lan) endpoint(owner Owner, port, mac string, addresses ...string) Endpoint {
	ep := lanPod(owner, port, mac, addresses...)
	ep.Network, ep.Bridge = "lan", "br0"
	return ep
}

// lanCall is one over the LAN, and the source that the callee is to see; "" where it is
// not to hear of it, or not to be heard.
type lanCall struct {
	name string
	from *netns.NS
	to   string
	want string
}

// wantCalls makes the calls, all at once, since some have to wait for nothing.
func wantCalls(t *testing.T, calls []lanCall, networks ...string) {
	t.Helper()
	var all sync.WaitGroup
	for _, c := range calls {
		for _, network := range networks {
			all.Go(func() {
				var got string
				wait := time.Minute
				if c.want == "" {
					wait = 3 * time.Second
				}
				seen, err := nstest.AskWithin(t, c.from, network, netip.MustParseAddrPort(c.to), wait)
				if err == nil {
					got = seen.Addr().String()
				}
				expect.Equal(t, got, c.want, "%s calls %s by %s: seen as %q (%v), want %q", c.name, c.to, network, got, err, c.want)
			})
		}
	}
	all.Wait()
}

// both gives a call over both families.
func both(name string, from *netns.NS, to4, to6, want4, want6 string) []lanCall {
	return []lanCall{{name, from, to4, want4}, {name, from, to6, want6}}
}

func TestAnswersOfTheLANComeBackByTheHost(t *testing.T) {
	t.Parallel()
	for _, call := range []bool{false, true} {
		nstest.RunParallel(t, fmt.Sprintf("the bridge calls iptables: %v", call), func(t *testing.T) {
			l := newServices(t, call, true)
			host := func(name string, from *netns.NS, to4, to6 string) []lanCall {
				return both(name, from, to4, to6, lanHost4, lanHost6)
			}
			// What passes the hooks on its way back needs nothing.
			own := func(name string, from *netns.NS, to4, to6, own4, own6 string) []lanCall {
				if !call {
					return host(name, from, to4, to6)
				}
				return both(name, from, to4, to6, own4, own6)
			}
			// What came in by the port that leads on is redirected by the bridge itself
			// then, and no bridge sends back by the port something came in by.
			back := func(name string, from *netns.NS, to4, to6 string) []lanCall {
				if !call {
					return host(name, from, to4, to6)
				}
				return both(name, from, to4, to6, "", "")
			}
			wantCalls(t, slices.Concat(
				own("a pod", l.pod, toServer, toServer6, lanPod4, lanPod6),
				own("a pod", l.pod, toInternet, toInternet6, lanPod4, lanPod6),
				own("a pod", l.pod, toPrinter, toPrinter6, lanPod4, lanPod6),
				own("a pod", l.pod, hostPort4, hostPort6, lanPod4, lanPod6),
				host("the printer", l.printer, hostPort4, hostPort6),
				own("a pod", l.pod, toOther, toOther6, lanPod4, lanPod6),
				own("a pod", l.pod, podPort4, podPort6, lanPod4, lanPod6),
				own("a machine", l.machine, podPort4, podPort6, machine4, machine6),
				own("the internet", l.internet, podPort4, podPort6, internet4, internet6),
				own("the printer", l.printer, podPort4, podPort6, printer4, printer6),
				back("a machine", l.machine, hostPort4, hostPort6),
				back("the internet", l.internet, hostPort4, hostPort6),
			), "tcp", "udp")
		})
	}
}

// Without the network's being a LAN, they do not, where the bridge does not call
// iptables: so the test before this one shows something.
func TestAnswersOfTheLANGoPastTheHostOtherwise(t *testing.T) {
	t.Parallel()
	l := newServices(t, false, false)
	wantCalls(t, slices.Concat(
		both("a machine", l.machine, podPort4, podPort6, "", ""),
		both("the printer", l.printer, podPort4, podPort6, "", ""),
		both("a machine", l.machine, hostPort4, hostPort6, "", ""),
		both("the internet", l.internet, hostPort4, hostPort6, "", ""),
		both("the printer", l.printer, hostPort4, hostPort6, "", ""),
	), "udp")
}

func TestNetworkBecomesALANAndIsOneNoMore(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	c, ns := dialNew(t)
	plain := Network{Name: "lan", Bridge: "br0", NFCall: true}
	asLAN := plain
	asLAN.LAN = true
	lans := func() string {
		_, elements, _ := strings.Cut(nft(t, ns, "list", "set", "inet", "tombolo", "lans"), "elements")
		return elements
	}
	for _, n := range []Network{plain, asLAN, plain, asLAN} {
		expect.Of(c.Ready(ctx, n)).Is(t, false, "%+v: Ready before", n)
		mustEnsure(t, c, n)
		wantReady(t, c, n)
		if got := lans(); strings.Contains(got, `"br0" comment "tombolo:1::lan,open,nf,lan"`) != n.LAN || strings.Contains(got, "br0") != n.LAN {
			t.Errorf("%+v: %q", n, got)
		}
	}
	mustEnsure(t, c, Network{Name: "other", Bridge: "br1", LAN: true})
	must.Succeed(t, c.RemoveNetwork(ctx, "lan"))
	got := lans()
	expect.That(t, !strings.Contains(got, "br0") && strings.Contains(got, "br1"), "after it was removed: %q", got)
}

// With a rule that drops what conntrack makes no sense of, a pod's own connections need
// the hooks on their way back, too.
func TestConnectionsByTheHostNeedTheHooks(t *testing.T) {
	t.Parallel()
	for _, call := range []bool{false, true} {
		nstest.RunParallel(t, fmt.Sprintf("the bridge calls iptables: %v", call), func(t *testing.T) {
			l := newServices(t, call, true)
			want4, want6 := "", ""
			if call {
				want4, want6 = lanPod4, lanPod6
			}
			wantCalls(t, both("a pod", l.pod, internet4+":80", "["+internet6+"]:80", want4, want6), "tcp")
			wantCalls(t, both("a pod", l.pod, server4+":80", "["+server6+"]:80", lanPod4, lanPod6), "tcp", "udp")
			wantCalls(t, both("a machine", l.machine, lanOther4+":80", "["+lanOther6+"]:80", machine4, machine6), "tcp", "udp")
		})
	}
}

// dhcpMessage is one of DHCP for a client: 1 asks and 2 answers; then options.
func dhcpMessage(op byte, client string, options ...byte) []byte {
	return join([]byte{op, 1, 6, 0, 0, 0, 0, 7, 0, 0, 0x80, 0}, make([]byte, 16), mac(client), make([]byte, 10+64+128),
		[]byte{0x63, 0x82, 0x53, 0x63}, options, []byte{255})
}

// udpMessage is a datagram without a checksum.
func udpMessage(src, dst int, payload []byte) []byte {
	return join(be16(src), be16(dst), be16(8+len(payload)), be16(0), payload)
}

// passes says whether a frame that one sends comes to another: before one behind it
// that comes there in any case. The frame ends in a token, within its packet: what is
// behind a packet does not pass the hooks.
func passes(from, to *wire, sender string, frame func(token []byte) []byte, number int) bool {
	from.tb.Helper()
	token, last := []byte(fmt.Sprintf("token%07d", number)), []byte(fmt.Sprintf("last%08d", number))
	from.send(frame(token), join(ether(broadcastMAC, sender, unix.ETH_P_ARP, arpMessage(1, sender, "0.0.0.0", "192.0.2.99")), last))
	return to.seenBefore(token, last) > 0
}

func TestBridgedTrafficOfALANPassesAForwardPolicyOfDrop(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.call(t, true)
	network := Network{Name: "lan", Bridge: "br0", NFCall: true, LAN: true, Guard: true}
	mustEnsure(t, l.c, network)
	mustAdd(t, l.c, l.endpoint("00000000001", "veth1", podMAC))
	nstest.Script(t, l.host, "iptables -P FORWARD DROP")
	nft(t, l.host, strict)

	for i, ns := range []*netns.NS{l.machine, l.router, l.printer} {
		nstest.Run(t, ns, "ip", "link", "set", "eth0", "address", fmt.Sprintf("02:00:00:00:07:2%d", i))
	}
	const machineMAC, routerMAC, printerMAC = "02:00:00:00:07:20", "02:00:00:00:07:21", "02:00:00:00:07:22"
	pod, other := openWire(t, l.pod, "eth0"), openWire(t, l.other, "eth0")
	machine, router, printer := openWire(t, l.machine, "eth0"), openWire(t, l.router, "eth0"), openWire(t, l.printer, "eth0")
	over4 := func(dstMAC, srcMAC, src, dst string, srcPort, dstPort int, payload ...byte) func([]byte) []byte {
		return func(token []byte) []byte {
			return ether(dstMAC, srcMAC, unix.ETH_P_IP, packet4(src, dst, 0, 17, udpMessage(srcPort, dstPort, join(payload, token))))
		}
	}
	over6 := func(dstMAC, srcMAC, src, dst string, srcPort, dstPort int, payload ...byte) func([]byte) []byte {
		return func(token []byte) []byte {
			return ether(dstMAC, srcMAC, unix.ETH_P_IPV6, packet6(src, dst, 17, udpMessage(srcPort, dstPort, join(payload, token))))
		}
	}
	discover, offer := dhcpMessage(1, podMAC, 53, 1, 1), dhcpMessage(2, podMAC, 53, 1, 2)
	frames := []struct {
		name     string
		from, to *wire
		sender   string
		frame    func(token []byte) []byte
	}{
		{"a DHCP request to all", pod, router, podMAC, over4(broadcastMAC, podMAC, "0.0.0.0", "255.255.255.255", 68, 67, discover...)},
		{"its answer to all", router, pod, routerMAC, over4(broadcastMAC, routerMAC, router4, "255.255.255.255", 67, 68, offer...)},
		{"its answer to the pod", router, pod, routerMAC, over4(podMAC, routerMAC, router4, lanPod4, 67, 68, offer...)},
		{"a DHCPv6 request", pod, router, podMAC, over6("33:33:00:01:00:02", podMAC, podLocal, "ff02::1:2", 546, 547, 1, 0, 0, 7)},
		{"its answer", router, pod, routerMAC, over6(podMAC, routerMAC, "fe80::1", podLocal, 547, 546, 2, 0, 0, 7)},
		{"what a pod is sent unasked", machine, other, machineMAC, over4(otherMAC, machineMAC, machine4, lanOther4, 1024, 9)},
		{"the same over IPv6", machine, other, machineMAC, over6(otherMAC, machineMAC, machine6, lanOther6, 1024, 9)},
		{"between two ports of the LAN", machine, printer, machineMAC, over4(printerMAC, machineMAC, machine4, printer4, 1024, 9)},
		{"and back, over IPv6", printer, machine, printerMAC, over6(machineMAC, printerMAC, printer6, machine6, 1024, 9)},
		{"multicast", machine, pod, machineMAC, over4("01:00:5e:00:00:fb", machineMAC, machine4, "224.0.0.251", 5353, 5353)},
	}
	number := 0
	check := func(want bool) {
		t.Helper()
		for _, f := range frames {
			number++
			expect.Equal(t, passes(f.from, f.to, f.sender, f.frame, number), want, "%s passes", f.name)
		}
	}
	check(false)
	must.Succeed(t, expect.Err(foreign.On(l.c.Socket(), nil).Ensure(context.Background())))
	check(true)
	// Connections, too, before the pods are known.
	must.Succeed(t, l.c.Remove(context.Background(), l.endpoint("00000000001", "veth1", podMAC)))
	for _, to := range []string{machine4, machine6, printer4, printer6, internet4, internet6} {
		nstest.Reaches(t, l.other, to, true)
	}
	for _, to := range []string{lanOther4, lanOther6, printer4, printer6} {
		nstest.Reaches(t, l.machine, to, true)
	}
}
