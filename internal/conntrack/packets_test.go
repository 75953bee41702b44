package conntrack

import (
	"net"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// site is a host that forwards, with two pods and a client on links of their own.
type site struct {
	host, client, old, new *netns.NS
	c                      *Conn
}

// family is one of the two in which site has addresses.
type family struct {
	host, other, client, old, new string
	nft                           string // nft's name of it
}

func families() map[string]family {
	return map[string]family{
		"IPv4": {"192.0.2.1", "203.0.113.1", "192.0.2.9", "10.22.0.5", "10.22.1.6", "ip"},
		"IPv6": {"2001:db8::1", "2001:db8:f::1", "2001:db8::9", "fd00:22::5", "fd00:22:1::6", "ip6"},
	}
}

func newSite(tb testing.TB) *site {
	tb.Helper()
	s := &site{host: nstest.New(tb), client: nstest.New(tb), old: nstest.New(tb), new: nstest.New(tb)}
	s.c = dial(tb, s.host)
	nstest.Veth(tb, s.host, "up0", s.client, "eth0")
	nstest.Veth(tb, s.host, "veth1", s.old, "eth0")
	nstest.Veth(tb, s.host, "veth2", s.new, "eth0")
	nstest.Run(tb, s.host, "sh", "-ec", `
		ip link set lo up
		ip addr add 192.0.2.1/24 dev up0
		ip addr add 203.0.113.1/32 dev lo
		ip addr add 2001:db8::1/64 dev up0 nodad
		ip addr add 2001:db8:f::1/128 dev lo
		ip addr add 10.22.0.1/24 dev veth1
		ip addr add fd00:22::1/64 dev veth1 nodad
		ip addr add 10.22.1.1/24 dev veth2
		ip addr add fd00:22:1::1/64 dev veth2 nodad
		for link in up0 veth1 veth2; do ip addr add fe80::1/64 dev $link nodad; done
		# However slow the test is, no flow ends by itself.
		echo 36000 >/proc/sys/net/netfilter/nf_conntrack_udp_timeout
		echo 36000 >/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream
		echo 1 >/proc/sys/net/ipv4/ip_forward
		echo 1 >/proc/sys/net/ipv6/conf/all/forwarding
		nft add table inet t
		nft 'add chain inet t prerouting { type nat hook prerouting priority dstnat; }'
		# The kernel tracks only while a rule needs it.
		nft 'add chain inet t forward { type filter hook forward priority filter; }'
		nft 'add rule inet t forward ct state established accept'`)
	for ns, addrs := range map[*netns.NS][2]string{
		s.client: {"192.0.2.9/24", "2001:db8::9/64"},
		s.old:    {"10.22.0.5/24", "fd00:22::5/64"},
		s.new:    {"10.22.1.6/24", "fd00:22:1::6/64"},
	} {
		nstest.Run(tb, ns, "ip", "addr", "add", addrs[0], "dev", "eth0")
		nstest.Run(tb, ns, "ip", "addr", "add", addrs[1], "dev", "eth0", "nodad")
		nstest.Run(tb, ns, "ip", "addr", "add", "fe80::2/64", "dev", "eth0", "nodad")
	}
	for ns, gateways := range map[*netns.NS][2]string{
		s.client: {"192.0.2.1", "2001:db8::1"},
		s.old:    {"10.22.0.1", "fd00:22::1"},
		s.new:    {"10.22.1.1", "fd00:22:1::1"},
	} {
		nstest.Run(tb, ns, "ip", "route", "add", "default", "via", gateways[0])
		nstest.Run(tb, ns, "ip", "route", "add", "default", "via", gateways[1])
	}
	nstest.WaitForAddresses(tb, s.host, s.client, s.old, s.new)
	return s
}

// publish leads a UDP port of the host to a pod, and to none but that.
func (s *site) publish(tb testing.TB, f family, hostPort uint16, pod netip.AddrPort) {
	tb.Helper()
	s.unpublish(tb)
	nstest.Run(tb, s.host, "nft", "add", "rule", "inet", "t", "prerouting", "fib", "daddr", "type", "local",
		"udp", "dport", strconv.Itoa(int(hostPort)), "dnat", f.nft, "to", pod.String())
}

func (s *site) unpublish(tb testing.TB) {
	tb.Helper()
	nstest.Run(tb, s.host, "nft", "flush", "chain", "inet", "t", "prerouting")
}

// open opens a UDP socket. It is not connected, so that no ICMP error ends it.
func open(tb testing.TB, ns *netns.NS, at string) *net.UDPConn {
	tb.Helper()
	var conn *net.UDPConn
	err := ns.Do(func() error {
		var err error
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(mustPort(at)))
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { conn.Close() })
	return conn
}

func send(tb testing.TB, conn *net.UDPConn, to netip.AddrPort, text string) {
	tb.Helper()
	if _, err := conn.WriteToUDPAddrPort([]byte(text), to); err != nil {
		tb.Fatal(err)
	}
}

// patience is far longer than any machine needs, however busy.
const patience = time.Minute

// hear gives the next datagram that arrives, and does not wait for ever.
func hear(tb testing.TB, conn *net.UDPConn) string {
	tb.Helper()
	conn.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 100)
	n, _, err := conn.ReadFromUDPAddrPort(buf)
	if err != nil {
		tb.Fatal(err)
	}
	return string(buf[:n])
}

// hearNothing fails the test if a datagram has arrived by now. It does not wait for
// one: what should have come before has been heard.
func hearNothing(tb testing.TB, conn *net.UDPConn) {
	tb.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		tb.Fatal(err)
	}
	buf := make([]byte, 100)
	err = raw.Control(func(fd uintptr) {
		if n, _, err := unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT); err != unix.EAGAIN {
			tb.Errorf("heard %q, %v; want nothing", buf[:n], err)
		}
	})
	if err != nil {
		tb.Fatal(err)
	}
}

const hostPort = 5300

func isSites(a netip.Addr) bool {
	switch a.String() {
	case "192.0.2.1", "203.0.113.1", "2001:db8::1", "2001:db8:f::1":
		return true
	}
	return false
}

func TestClientThatKeepsItsFlowAliveReachesTheNewPodAfterAFlushOnly(t *testing.T) {
	t.Parallel()
	for name, f := range families() {
		for _, before := range []string{"no pod before", "another pod before", "an address of the host by name"} {
			t.Run(name+", "+before, func(t *testing.T) {
				t.Parallel()
				s := newSite(t)
				to := netip.AddrPortFrom(nstest.Addr(f.host), hostPort)
				pod := netip.AddrPortFrom(nstest.Addr(f.new), 53)
				stale, fresh := open(t, s.client, "[::]:4000"), open(t, s.client, "[::]:4001")
				published := Publication{unix.IPPROTO_UDP, netip.AddrPortFrom(netip.Addr{}, hostPort), pod}
				filter := published.Stale(isSites)

				switch before {
				case "another pod before":
					oldPod := netip.AddrPortFrom(nstest.Addr(f.old), 53)
					was := open(t, s.old, oldPod.String())
					s.publish(t, f, hostPort, oldPod)
					send(t, stale, to, "to the old pod")
					if got := hear(t, was); got != "to the old pod" {
						t.Fatalf("the old pod heard %q", got)
					}
				case "an address of the host by name":
					published.Host = to
					filter = published.Stale(nil)
					fallthrough
				default:
					host := open(t, s.host, to.String())
					send(t, stale, to, "to the host")
					if got := hear(t, host); got != "to the host" {
						t.Fatalf("the host heard %q", got)
					}
					host.Close()
				}

				server := open(t, s.new, pod.String())
				s.publish(t, f, hostPort, pod)
				// The attack: a flow that began before is not heard, one that begins now is.
				send(t, stale, to, "before the flush")
				send(t, fresh, to, "from a new client")
				if got := hear(t, server); got != "from a new client" {
					t.Fatalf("the new pod heard %q: the stale flow does not starve it, so this test shows nothing", got)
				}
				mustFlush(t, s.c, 1, filter)
				send(t, stale, to, "after the flush")
				if got := hear(t, server); got != "after the flush" {
					t.Errorf("the new pod heard %q", got)
				}
				hearNothing(t, server)
				// Nothing is left to flush: both lead to the pod.
				mustFlush(t, s.c, 0, filter)
			})
		}
	}
}

func TestFlowsOfOthersGoOnDuringAFlush(t *testing.T) {
	t.Parallel()
	for name, f := range families() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			// The old pod stays, and answers at the same port, but of its own address
			// and of one address of the host by name; it asks a server elsewhere.
			oldPod, elsewhere := netip.AddrPortFrom(nstest.Addr(f.old), hostPort), netip.AddrPortFrom(nstest.Addr(f.client), hostPort)
			named := netip.AddrPortFrom(nstest.Addr(f.other), hostPort)
			nstest.Run(t, s.host, "nft", "add", "rule", "inet", "t", "prerouting", f.nft, "daddr", f.other, "udp", "dport", "5300", "dnat", f.nft, "to", oldPod.String())
			client, asked := open(t, s.client, "[::]:4000"), open(t, s.client, "[::]:5300")
			server := open(t, s.old, oldPod.String())
			for _, to := range []netip.AddrPort{oldPod, named} {
				send(t, client, to, "to the old pod")
				hear(t, server)
			}
			send(t, server, elsewhere, "from the old pod")
			hear(t, asked)
			before := listed(t, s.host)

			// The new pod gets the port of the other address by name.
			pod := netip.AddrPortFrom(nstest.Addr(f.new), 53)
			mustFlush(t, s.c, 0, Publication{unix.IPPROTO_UDP, netip.AddrPortFrom(nstest.Addr(f.host), hostPort), pod}.Stale(nil))
			wantListed(t, s.host, before...)
			// And had it been any address, the flow to the named one would have been its own.
			mustFlush(t, s.c, 1, Publication{unix.IPPROTO_UDP, netip.AddrPortFrom(netip.Addr{}, hostPort), pod}.Stale(isSites))
			if got := len(listed(t, s.host)); got != len(before)-1 {
				t.Errorf("%d flows are left of %d", got, len(before))
			}
		})
	}
}

func TestClientOfADeletedPodIsNoLongerSentToIt(t *testing.T) {
	t.Parallel()
	for name, f := range families() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			to, pod := netip.AddrPortFrom(nstest.Addr(f.host), hostPort), netip.AddrPortFrom(nstest.Addr(f.old), 53)
			server, client := open(t, s.old, pod.String()), open(t, s.client, "[::]:4000")
			s.publish(t, f, hostPort, pod)
			send(t, client, to, "published")
			hear(t, server)
			s.unpublish(t)
			send(t, client, to, "no longer published")
			if got := hear(t, server); got != "no longer published" {
				t.Fatalf("the pod heard %q: its flow did not outlive its rule, so this test shows nothing", got)
			}
			mustFlush(t, s.c, 1, Publication{unix.IPPROTO_UDP, netip.AddrPortFrom(netip.Addr{}, hostPort), pod}.Flows())
			// The host gets the next one.
			host := open(t, s.host, to.String())
			send(t, client, to, "to the host")
			if got := hear(t, host); got != "to the host" {
				t.Errorf("the host heard %q", got)
			}
			hearNothing(t, server)
		})
	}
}

func TestAddressThatIsUsedAgainInheritsNoTranslation(t *testing.T) {
	t.Parallel()
	for name, f := range families() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			nstest.Run(t, s.host, "nft", "add chain inet t postrouting { type nat hook postrouting priority srcnat; }")
			snat := func(to string) {
				nstest.Run(t, s.host, "nft", "flush", "chain", "inet", "t", "postrouting")
				nstest.Run(t, s.host, "nft", "add", "rule", "inet", "t", "postrouting", f.nft, "saddr", f.old, "snat", f.nft, "to", to)
			}
			server := netip.AddrPortFrom(nstest.Addr(f.client), 53)
			asked, pod := open(t, s.client, server.String()), open(t, s.old, "[::]:4000")
			seen := func() string {
				t.Helper()
				send(t, pod, server, "?")
				asked.SetReadDeadline(time.Now().Add(patience))
				_, from, err := asked.ReadFromUDPAddrPort(make([]byte, 10))
				if err != nil {
					t.Fatal(err)
				}
				return from.Addr().Unmap().String()
			}
			snat(f.host)
			if got := seen(); got != f.host {
				t.Fatalf("seen as %s, want %s", got, f.host)
			}
			snat(f.other)
			if got := seen(); got != f.host {
				t.Fatalf("seen as %s: the flow did not outlive its rule, so this test shows nothing", got)
			}
			mustFlush(t, s.c, 1, Of(nstest.Addr(f.old))...)
			if got := seen(); got != f.other {
				t.Errorf("seen as %s, want %s", got, f.other)
			}
		})
	}
}
