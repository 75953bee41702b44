package nft

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

const (
	bridge6  = "fd00:22::1"
	other6   = "fd00:22::6"
	caller4  = "192.0.2.2" // outside's
	caller6  = "2001:db8:1::2"
	remote4  = "10.23.0.5" // a pod of another network's, on another bridge
	remote6  = "fd00:23::5"
	hostPort = 8080
	podPort  = 80
)

// published is a site whose pod has ports on the host, where nothing is forwarded but
// what has the mark.
type published struct {
	*site
	remote  *netns.NS
	network Network
	ep      Endpoint
}

func newPublished(tb testing.TB, nfCall bool, ports ...Port) *published {
	tb.Helper()
	p := &published{site: newSite(tb), remote: nstest.New(tb), network: podnet(), ep: pod("0123456789a", pod4, pod6)}
	nstest.Run(tb, p.host, "ip", "link", "add", "cbr1", "address", "02:00:00:00:00:02", "type", "bridge", "mcast_snooping", "0", "forward_delay", "0")
	nstest.Veth(tb, p.host, "veth3", p.remote, "eth0")
	nstest.Run(tb, p.host, "sh", "-ec", fmt.Sprintf(`
		ip link set lo up
		bridge link set dev veth1 hairpin on
		bridge link set dev veth2 hairpin on
		ip link set cbr0 type bridge nf_call_iptables %[1]d nf_call_ip6tables %[1]d
		ip link set veth3 master cbr1
		ip link set cbr1 up
		ip addr add 10.23.0.1/16 dev cbr1
		ip addr add fd00:23::1/64 dev cbr1 nodad
		ip addr add fe80::1/64 dev cbr1 nodad`, map[bool]int{true: 1}[nfCall]))
	nstest.Run(tb, p.other, "sh", "-ec", `
		ip addr del 203.0.113.6/32 dev eth0
		ip addr add fd00:22::6/64 dev eth0 nodad
		ip route add default via fd00:22::1`)
	nstest.Run(tb, p.remote, "sh", "-ec", `
		ip addr add 10.23.0.5/16 dev eth0
		ip addr add fd00:23::5/64 dev eth0 nodad
		ip route add default via 10.23.0.1
		ip route add default via fd00:23::1`)
	nft(tb, p.host, `table inet admin {
		chain forward {
			type filter hook forward priority filter; policy drop;
			meta mark & 0x10 == 0x10 counter accept
		}
	}`)
	nstest.WaitForAddresses(tb, p.host, p.other, p.remote)
	p.network.Bridge, p.network.NFCall = "cbr0", nfCall
	mustEnsure(tb, p.c, p.network)
	away := Network{Name: "away", Bridge: "cbr1", Masquerade: true, Prefixes: nstest.Prefixes("10.23.0.0/16", "fd00:23::/64")}
	mustEnsure(tb, p.c, away)
	must.Succeed(tb, p.c.SetHost(context.Background(), []string{"up0"}, nil, nil))
	// As callers are to do it: not before Ensure.
	nstest.Sysctl(tb, p.host, "net/ipv4/conf/cbr0/route_localnet", "1")
	p.ep.Ports = ports
	mustAdd(tb, p.c, p.ep,
		pod("0123456789b", other4, other6),
		Endpoint{Owner: "0123456789c", Network: "away", Bridge: "cbr1", Addrs: nstest.Addrs(remote4, remote6), Masquerade: true})
	return p
}

func allProtocols(p Port) []Port {
	var list []Port
	for _, protocol := range []Protocol{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
		p.Protocol = protocol
		list = append(list, p)
	}
	return list
}

// serve has the pod listen on its addresses.
func (p *published) serve(tb testing.TB) {
	tb.Helper()
	for _, addr := range p.ep.Addrs {
		for _, network := range []string{"tcp", "udp"} {
			nstest.Serve(tb, p.pod, network, netip.AddrPortFrom(addr, podPort))
		}
	}
}

func (p *published) where(name string) *netns.NS {
	return map[string]*netns.NS{
		"outside": p.outside, "host": p.host, "pod": p.pod, "other pod": p.other, "pod of another bridge": p.remote,
	}[name]
}

func TestPublishedPortIsReachedFromEverywhere(t *testing.T) {
	t.Parallel()
	for _, nfCall := range []bool{false, true} {
		// What another pod of the bridge is seen as.
		neighbour4, neighbour6 := bridge4, bridge6
		if nfCall {
			neighbour4, neighbour6 = other4, other6
		}
		nstest.RunParallel(t, fmt.Sprintf("NF call %v", nfCall), func(t *testing.T) {
			p := newPublished(t, nfCall, allProtocols(Port{HostPort: hostPort, PodPort: podPort})...)
			p.serve(t)
			for _, tc := range []struct{ from, to, seen string }{
				{"outside", host4, caller4},
				{"outside", host6, caller6},
				{"outside", bridge4, caller4},
				{"outside", bridge6, caller6},
				{"host", host4, host4},
				{"host", host6, host6},
				{"host", bridge4, bridge4},
				{"host", bridge6, bridge6},
				{"host", "127.0.0.1", bridge4},
				{"other pod", host4, neighbour4},
				{"other pod", host6, neighbour6},
				{"other pod", bridge4, neighbour4},
				{"other pod", bridge6, neighbour6},
				{"pod", host4, bridge4},
				{"pod", host6, bridge6},
				{"pod", bridge4, bridge4},
				{"pod", bridge6, bridge6},
				{"pod of another bridge", host4, remote4},
				{"pod of another bridge", host6, remote6},
				{"pod of another bridge", bridge4, remote4},
				{"pod of another bridge", "10.23.0.1", remote4},
			} {
				for _, network := range []string{"tcp", "udp"} {
					seen, err := nstest.Ask(t, p.where(tc.from), network, netip.AddrPortFrom(nstest.Addr(tc.to), hostPort))
					expect.That(t, err == nil && seen.Addr() == nstest.Addr(tc.seen),
						"%s calls %s over %s: seen as %s, %v; want %s", tc.from, tc.to, network, seen, err, tc.seen)
				}
			}
		})
	}
}

func tcpAndUDP(p Port) []Port { return allProtocols(p)[:2] }

// refused says whether calls over TCP and UDP are refused; the error tells what else
// became of them.
func refused(from *netns.NS, to netip.AddrPort) error {
	for _, network := range []string{"tcp", "udp"} {
		if err := call(from, network, to.String(), patience); !errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("%s to %s: got %v, want it refused", network, to, err)
		}
	}
	return nil
}

// call asks once, and waits that long for an answer.
func call(from *netns.NS, network, to string, wait time.Duration) error {
	return from.Do(func() error {
		conn, err := net.DialTimeout(network, to, wait)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		if _, err := conn.Write([]byte("?")); err != nil {
			return err
		}
		_, err = conn.Read(make([]byte, 64))
		return err
	})
}

// Tests wait briefly for what must not come, and with patience for what must: far longer
// than any machine needs, however busy.
const (
	briefly  = 200 * time.Millisecond
	patience = time.Minute
)

func mustTimeOut(tb testing.TB, err error, what string) {
	tb.Helper()
	var timeout net.Error
	expect.That(tb, errors.As(err, &timeout) && timeout.Timeout(), "%s: got %v, want no answer", what, err)
}

func TestPortOnOneAddressIsReachedByThatAlone(t *testing.T) {
	t.Parallel()
	ports := slices.Concat(
		tcpAndUDP(Port{HostAddr: nstest.Addr(host4), HostPort: 8081, PodPort: podPort}),
		tcpAndUDP(Port{HostAddr: nstest.Addr(host6), HostPort: 8081, PodPort: podPort}),
		tcpAndUDP(Port{HostAddr: nstest.Addr("127.0.0.1"), HostPort: 8082, PodPort: podPort}),
		tcpAndUDP(Port{HostAddr: nstest.Addr("0.0.0.0"), HostPort: 8083, PodPort: podPort}),
		tcpAndUDP(Port{HostAddr: nstest.Addr("::"), HostPort: 8084, PodPort: podPort}),
	)
	p := newPublished(t, true, ports...)
	p.serve(t)
	for _, tc := range []struct {
		from, to string
		port     uint16
		reached  bool
	}{
		{"outside", host4, 8081, true},
		{"outside", host6, 8081, true},
		{"outside", bridge4, 8081, false},
		{"outside", bridge6, 8081, false},
		{"host", host4, 8081, true},
		{"host", "127.0.0.1", 8081, false},
		{"pod", host6, 8081, true},
		{"host", "127.0.0.1", 8082, true},
		{"host", host4, 8082, false},
		{"outside", host4, 8082, false},
		{"outside", host4, 8083, true},
		{"outside", bridge4, 8083, true},
		{"outside", host6, 8083, false},
		{"outside", host6, 8084, true},
		{"outside", bridge6, 8084, true},
		{"outside", host4, 8084, false},
		{"outside", host4, podPort, false},
	} {
		at := netip.AddrPortFrom(nstest.Addr(tc.to), tc.port)
		if !tc.reached {
			expect.Success(t, refused(p.where(tc.from), at), "%s", tc.from)
			continue
		}
		for _, network := range []string{"tcp", "udp"} {
			expect.Success(t, expect.Err(nstest.Ask(t, p.where(tc.from), network, at)), "%s calls %s over %s", tc.from, at, network)
		}
	}
}

// Clients that try ::1 first are to turn to 127.0.0.1 at once.
func TestIPv6LoopbackIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true, tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort})...)
	p.serve(t)
	toLoopback := netip.AddrPortFrom(netip.IPv6Loopback(), hostPort)
	// By its number: Go keeps which link has a name for a minute, of whatever namespace.
	toLinkLocal := netip.MustParseAddrPort(fmt.Sprintf("[fe80::1%%%d]:%d", nstest.Index(t, p.outside, "eth0"), hostPort))
	expect.Success(t, refused(p.host, toLoopback))
	// The kernel leaves the route to link-local addresses to a worker.
	for began := time.Now(); nstest.Run(t, p.outside, "ip", "-6", "route", "show", "fe80::/64", "dev", "eth0") == ""; {
		must.That(t, time.Since(began) <= patience, "the outside gets no route to link-local addresses")
		time.Sleep(10 * time.Millisecond)
	}
	expect.Success(t, refused(p.outside, toLinkLocal))
	expect.Success(t, expect.Err(nstest.Ask(t, p.host, "tcp", netip.AddrPortFrom(nstest.Addr("127.0.0.1"), hostPort))))

	// Without the rules for it, it hangs.
	for _, chain := range []string{ruleset.HostPortsChain, ruleset.HostPortsLocalChain} {
		for _, handle := range handles(t, p.host, chain, "cannot be forwarded") {
			nft(t, p.host, "delete rule inet tombolo "+chain+" handle "+handle)
		}
	}
	mustTimeOut(t, call(p.host, "tcp", toLoopback.String(), briefly), "::1 without the rule")
	mustTimeOut(t, call(p.outside, "tcp", toLinkLocal.String(), briefly), "a link-local address without the rule")
	mustEnsure(t, p.c, p.network)
	expect.Success(t, refused(p.host, toLoopback))
}

// handles are those of a chain's rules whose comments start with a text.
func handles(tb testing.TB, ns *netns.NS, chain, comment string) []string {
	tb.Helper()
	var list []string
	for _, r := range listing(tb, ns)["rule"] {
		if text, _ := r["comment"].(string); r["chain"] == chain && strings.HasPrefix(text, comment) {
			list = append(list, fmt.Sprint(r["handle"]))
		}
	}
	must.That(tb, len(list) > 0, "no rule %q in chain %s", comment, chain)
	return list
}

// A port is the host's, wherever else packets with it go.
func TestOnlyWhatIsSentToTheHostIsCaught(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true, tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort})...)
	p.serve(t)
	nstest.Run(t, p.host, "ip", "route", "add", "10.24.0.0/16", "via", caller4)
	nstest.Run(t, p.outside, "ip", "addr", "add", "10.24.0.1/32", "dev", "lo")
	for _, server := range []string{far4, far6, "10.24.0.1"} {
		at := netip.AddrPortFrom(nstest.Addr(server), hostPort)
		nstest.Serve(t, p.outside, "tcp", at)
		want := host4
		if at.Addr().Is6() {
			want = host6
		}
		for _, from := range []*netns.NS{p.pod, p.host} {
			seen, err := nstest.Ask(t, from, "tcp", at)
			expect.That(t, err == nil && seen.Addr() == nstest.Addr(want),
				"a call to %s is seen there as %v, %v; want %s", at, seen, err, want)
		}
	}
}

// With route_localnet on, which ports on 127.0.0.1 need, the kernel takes what comes
// from pods for 127.0.0.0/8.
func TestHostsLoopbackIsOutOfPodsReach(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true, tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort})...)
	p.serve(t)
	const private = 9999
	for _, network := range []string{"tcp", "udp"} {
		nstest.Serve(t, p.host, network, netip.AddrPortFrom(nstest.Addr("127.0.0.1"), private))
	}
	// The pod does what it can.
	nstest.Sysctl(t, p.pod, "net/ipv4/conf/eth0/route_localnet", "1")
	nstest.Run(t, p.pod, "ip", "route", "add", "127.0.0.0/8", "via", bridge4, "src", pod4)
	attack := func(network string, wait time.Duration) error {
		return call(p.pod, network, fmt.Sprintf("127.0.0.1:%d", private), wait)
	}
	for _, network := range []string{"tcp", "udp"} {
		mustTimeOut(t, attack(network, briefly), "a pod that calls the host's loopback over "+network)
	}
	mustTimeOut(t, call(p.pod, "tcp", fmt.Sprintf("127.0.0.1:%d", hostPort), briefly), "a pod that calls a published port there")
	expect.Success(t, expect.Err(nstest.Ask(t, p.host, "tcp", netip.AddrPortFrom(nstest.Addr("127.0.0.1"), private))), "the host itself")

	nft(t, p.host, "flush chain inet tombolo loopback")
	for _, network := range []string{"tcp", "udp"} {
		expect.Success(t, attack(network, patience), "the attack over %s does not work without the rule, so it proves nothing", network)
	}
	mustEnsure(t, p.c, p.network)
	for _, network := range []string{"tcp", "udp"} {
		mustTimeOut(t, attack(network, briefly), "a pod that calls the host's loopback over "+network)
	}
}

// A program of the host has an address of its own there, as systemd-resolved has 127.0.0.53.
// What is published on that very address leads to the pod all the same.
func TestPortOnAllAddressesLeavesTheHostItsOtherLoopbackAddresses(t *testing.T) {
	t.Parallel()
	ports := append(allProtocols(Port{HostPort: hostPort, PodPort: podPort}),
		Port{Protocol: TCP, HostAddr: nstest.Addr("127.0.0.54"), HostPort: 9053, PodPort: podPort})
	p := newPublished(t, false, ports...)
	p.serve(t)
	at := netip.AddrPortFrom(nstest.Addr("127.0.0.53"), hostPort)
	for _, network := range []string{"tcp", "udp"} {
		nstest.Serve(t, p.host, network, at)
		for to, want := range map[netip.AddrPort]string{at: "127.0.0.1", netip.AddrPortFrom(nstest.Addr("127.0.0.1"), hostPort): bridge4} {
			if seen, err := nstest.Ask(t, p.host, network, to); err != nil || seen.Addr() != nstest.Addr(want) {
				t.Errorf("%s over %s: seen as %s, %v; want %s", to, network, seen, err, want)
			}
		}
	}
	if seen, err := nstest.Ask(t, p.host, "tcp", netip.MustParseAddrPort("127.0.0.54:9053")); err != nil || seen.Addr() != nstest.Addr(bridge4) {
		t.Errorf("a port on 127.0.0.54: seen as %s, %v; want %s", seen, err, bridge4)
	}
	expect.Failure(t, expect.Err(nstest.Ask(t, p.host, "tcp", netip.AddrPortFrom(nstest.Addr("127.0.0.2"), hostPort))), "127.0.0.2 leads to the pod")
}

// Services trust callers from 127.0.0.0/8.
func TestPodsCannotPassForTheHost(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true)
	const trusted = "127.0.0.2"
	nstest.Sysctl(t, p.pod, "net/ipv4/conf/eth0/route_localnet", "1")
	nstest.Run(t, p.pod, "ip", "addr", "add", trusted+"/32", "dev", "eth0")
	var server net.PacketConn
	err := p.host.Do(func() error {
		var err error
		server, err = net.ListenPacket("udp", netip.AddrPortFrom(nstest.Addr(bridge4), 9999).String())
		return err
	})
	must.Succeed(t, err)
	defer server.Close()
	send := func(from string) error {
		return p.pod.Do(func() error {
			conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(nstest.Addr(from), 0)),
				net.UDPAddrFromAddrPort(netip.AddrPortFrom(nstest.Addr(bridge4), 9999)))
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte("?"))
			return err
		})
	}
	heard := func() string {
		t.Helper()
		// What is sent later comes later.
		must.Succeed(t, nstest.OnOneCPU(func() error { return errors.Join(send(trusted), send(pod4)) }))
		first := ""
		for {
			must.Succeed(t, server.SetReadDeadline(time.Now().Add(patience)))
			_, from, err := server.ReadFrom(make([]byte, 16))
			must.Succeed(t, err)
			addr := netip.MustParseAddrPort(from.String()).Addr().String()
			if first == "" {
				first = addr
			}
			if addr == pod4 {
				return first
			}
		}
	}
	expect.Equal(t, heard(), pod4, "the host hears")
	nft(t, p.host, "flush chain inet tombolo loopback")
	expect.Equal(t, heard(), trusted, "the attack does not work without the rule, so it proves nothing: heard")
}

// The DROP policy of newPublished is the administrator's.
func TestOnlyPublishedPortsAreOpened(t *testing.T) {
	t.Parallel()
	for _, nfCall := range []bool{false, true} {
		nstest.RunParallel(t, fmt.Sprintf("NF call %v", nfCall), func(t *testing.T) {
			p := newPublished(t, nfCall, tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort})...)
			p.serve(t)
			for _, addr := range []string{host4, host6} {
				expect.Success(t, expect.Err(nstest.Ask(t, p.outside, "tcp", netip.AddrPortFrom(nstest.Addr(addr), hostPort))), "the published port")
			}
			for _, addr := range p.ep.Addrs {
				at := netip.AddrPortFrom(addr, podPort)
				for _, network := range []string{"tcp", "udp"} {
					mustTimeOut(t, call(p.outside, network, at.String(), briefly), "outside calls the pod's own "+at.String()+" over "+network)
				}
				expect.Success(t, expect.Err(nstest.Ask(t, p.other, "tcp", at)), "another pod of the bridge")
			}
			// Somebody else's redirection to another port of the pod is not ours to admit.
			nstest.Serve(t, p.pod, "tcp", netip.AddrPortFrom(nstest.Addr(pod4), 81))
			nft(t, p.host, `table ip foreign {
				chain dnats {
					type nat hook prerouting priority -101;
					tcp dport 8090 dnat to 10.22.0.5:81
				}
			}`)
			mustTimeOut(t, call(p.outside, "tcp", host4+":8090", briefly), "outside by way of a foreign redirection")
			nft(t, p.host, "add rule inet admin forward accept")
			expect.Success(t, call(p.outside, "tcp", host4+":8090", patience), "a foreign redirection that is admitted")
		})
	}
}

// Service addresses are redirected by other programs, which look after sources themselves where
// they see the answers.
func TestForeignRedirectionWithinABridge(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		nfCall bool
		seen   string
	}{{false, bridge4}, {true, other4}} {
		p := newPublished(t, tc.nfCall)
		p.serve(t)
		nft(t, p.host, `table ip services {
			chain dnats {
				type nat hook prerouting priority dstnat;
				ip daddr 10.96.0.1 tcp dport 8000 dnat to 10.22.0.5:80
			}
		}`)
		seen, err := nstest.Ask(t, p.other, "tcp", netip.MustParseAddrPort("10.96.0.1:8000"))
		expect.That(t, err == nil && seen.Addr() == nstest.Addr(tc.seen),
			"NF call %v: seen as %v, %v; want %s", tc.nfCall, seen, err, tc.seen)
	}
}

func TestPortIsGoneWithItsPod(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true, tcpAndUDP(Port{HostPort: hostPort, PodPort: podPort})...)
	p.serve(t)
	at := netip.AddrPortFrom(nstest.Addr(host4), hostPort)
	must.Succeed(t, expect.Err(nstest.Ask(t, p.outside, "tcp", at)))
	must.Succeed(t, p.c.Remove(context.Background(), p.ep))
	expect.Is(t, call(p.outside, "tcp", at.String(), patience), unix.ECONNREFUSED, "a port whose pod was removed")
}

// A bridge may lead to machines of a LAN, which a host that drops what it forwards
// would cut off from its pods.
func TestWhatStaysOnOurBridgeIsMarked(t *testing.T) {
	t.Parallel()
	p := newPublished(t, true)
	p.serve(t)
	must.Succeed(t, p.c.RemoveOwners(context.Background(), "0123456789b"))
	for _, addr := range p.ep.Addrs {
		expect.Success(t, call(p.other, "tcp", netip.AddrPortFrom(addr, podPort).String(), patience), "a machine of the bridge that is no pod of ours")
	}
	// The bridge is no network's any more.
	must.Succeed(t, p.c.RemoveNetwork(context.Background(), "podnet"))
	mustTimeOut(t, call(p.other, "tcp", netip.AddrPortFrom(p.ep.Addrs[0], podPort).String(), briefly), "on a bridge that is not ours")
}
