package bridge_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestPodsLoopbackWorks(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	both, down := port(0), port(1)
	down.Down, down.Addresses, down.Routes = true, nil, nil
	for name, p := range map[string]bridge.Port{"pod": both, "pod whose interface stays down": down} {
		pod := nstest.New(t)
		must.That(t, nstest.PingWith(t, pod, nstest.Addr("127.0.0.1"), nstest.Echo{Wait: time.Millisecond}) != nil,
			"loopback is up already")
		must.Succeed(t, expect.Err(n.conn.Attach(t.Context(), pod, p)))
		for _, loopback := range []string{"127.0.0.1", "::1"} {
			expect.Success(t, nstest.Ping(t, pod, nstest.Addr(loopback)), "%s: %s", name, loopback)
		}
	}
}

// Some runtimes make namespaces in which IPv6 is off.
func TestPodWithIPv6HasItsLoopbackThoughIPv6WasOff(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for name, tt := range map[string]struct {
		port bridge.Port
		on   bool
	}{"IPv6": {port(0), true}, "IPv4 alone": {alone(port(1)), false}} {
		pod := nstest.New(t)
		nstest.Sysctl(t, pod, "net/ipv6/conf/all/disable_ipv6", "1")
		must.Succeed(t, expect.Err(n.conn.Attach(t.Context(), pod, tt.port)))
		err := nstest.PingWith(t, pod, nstest.Addr("::1"), nstest.Echo{Wait: patience})
		on := err == nil
		expect.That(t, on == tt.on, "%s: ::1 answers: %t (%v), want %t", name, on, err, tt.on)
	}
}

// alone gives a port its IPv4 addresses and routes alone.
func alone(p bridge.Port) bridge.Port {
	p.Addresses, p.Routes = p.Addresses[:1], p.Routes[:1]
	return p
}

// A neighbour that has the address with another MAC learns of the new one.
func TestAnnouncedAddressIsToldToAllPortsAtOnce(t *testing.T) {
	t.Parallel()
	for name, announce := range map[string]bool{"announced": true, "not announced": false} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			other, _ := attach(t, n, port(1))
			heard := listen(t, other, 2, unix.ETH_P_ARP)
			p := port(0)
			p.Announce, p.PeerMAC = announce, mac("02:00:00:00:00:77")
			pod := nstest.New(t)
			n.attachLate(t, pod, p)
			// Its question for the other pod's MAC comes after all that Attach made it send.
			must.Succeed(t, nstest.Ping(t, pod, addrs(port(1))[0]))
			own := addrs(p)[0].As4()
			gratuitous := slices.Concat(p.PeerMAC, own[:])
			told, asked := 0, 0
			for _, frame := range heard() {
				switch {
				case len(frame) < 28 || !bytes.Equal(frame[8:18], gratuitous):
				case bytes.Equal(frame[24:28], own[:]):
					told++
				default:
					asked++
				}
			}
			if (told > 0) != announce || asked == 0 {
				t.Errorf("%d announcements of %s at %s, and %d questions", told, addrs(p)[0], p.PeerMAC, asked)
			}
		})
	}
}

// attachLate attaches a pod when the kernel has had time to notice that the port has no
// carrier yet, so that it does not forward when the pod's interface comes up.
func (n *node) attachLate(tb testing.TB, pod *netns.NS, p bridge.Port) {
	tb.Helper()
	tr, err := nl.Open(unix.NETLINK_ROUTE, n.ns)
	must.Succeed(tb, err)
	host := nl.New(tr)
	closed := false
	conn := bridge.On(host, func() (tombolo.Socket, error) {
		tr, err := nl.Open(unix.NETLINK_ROUTE, nil)
		if err != nil {
			return nil, err
		}
		return nl.New(onlooker{tr, func(m netlink.Message) {
			if setsUp(m, 2) {
				host.RefreshCarrier(p.Name)
				// Linux 6.1 leaves it to its worker.
				must.Until(tb, "the port does not forward before the pod's interface is up", func() bool {
					closed = !strings.Contains(nstest.Run(tb, n.ns, "bridge", "link", "show", "dev", p.Name), "state forwarding")
					return closed
				})
			}
		}}), nil
	})
	defer conn.Close()
	must.Succeed(tb, expect.Err(conn.Attach(tb.Context(), pod, p)))
	expect.That(tb, closed, "the pod's interface did not come up by a request of its own")
}

// onlooker calls look before each datagram that leaves for the kernel.
type onlooker struct {
	nl.Transport
	look func(netlink.Message)
}

func (o onlooker) Send(b []byte) error {
	for _, m := range nltest.Split(append([]byte(nil), b...)) {
		o.look(m)
	}
	return o.Transport.Send(b)
}

// What a router advertises, and what duplicate detection sends, is settled before
// the interface is up: afterwards would be too late for the first packet.
func TestPodIsQuietBeforeItIsUp(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod := nstest.New(t)
	// A pod's defaults are the node's, which may be anything.
	nstest.Sysctl(t, pod, "net/ipv6/conf/default/accept_ra", "2")
	nstest.Sysctl(t, pod, "net/ipv6/conf/default/disable_ipv6", "1")
	var sent []uint16
	ups := 0
	host, err := nl.Open(unix.NETLINK_ROUTE, n.ns)
	must.Succeed(t, err)
	conn := bridge.On(nl.New(host), func() (tombolo.Socket, error) {
		tr, err := nl.Open(unix.NETLINK_ROUTE, nil)
		if err != nil {
			return nil, err
		}
		return nl.New(onlooker{tr, func(m netlink.Message) {
			sent = append(sent, uint16(m.Header.Type))
			if !setsUp(m, 2) {
				return
			}
			ups++
			out := nstest.Run(t, pod, "ip", "-o", "link", "show", "eth0")
			expect.That(t, !strings.Contains(out, "UP"), "the interface is up already:\n%s", out)
			for name, want := range map[string]string{"accept_ra": "0", "disable_ipv6": "0"} {
				expect.Equal(t, nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/"+name), want, "%s is", name)
			}
		}}), nil
	})
	defer conn.Close()
	a := must.Of(conn.Attach(t.Context(), pod, port(0))).Get(t)
	expect.That(t, ups == 1 && a.PeerIndex == 2, "%d requests set link %d up, want one", ups, a.PeerIndex)
	// The addresses first, without duplicate detection, then up.
	link, address := slices.Index(sent, unix.RTM_NEWLINK), slices.Index(sent, unix.RTM_NEWADDR)
	expect.That(t, link >= 0 && address >= link, "the pod's requests are of types %v", sent)
	// An address whose detection is off stays so: the flag is the kernel's to show.
	shown := nstest.Run(t, pod, "ip", "-6", "-o", "addr", "show", "dev", "eth0")
	total, nodad := strings.Count(shown, "inet6"), strings.Count(shown, "nodad")
	expect.That(t, total == 2 &&
		nodad == total, "%d of %d addresses are without duplicate detection, want 2 of 2:\n%s", nodad, total, shown)
}

// setsUp says whether a message sets a link up, by its index.
func setsUp(m netlink.Message, index uint32) bool {
	return m.Header.Type == unix.RTM_NEWLINK && binary.NativeEndian.Uint32(m.Data[4:]) == index &&
		binary.NativeEndian.Uint32(m.Data[8:])&unix.IFF_UP != 0
}

// Real solicitations, of which a pod with duplicate detection sends some.
func TestDuplicateDetectionSendsNothingUnlessAskedFor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for name, dad := range map[string]bool{"off": false, "on": true} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			p := port(0)
			if dad {
				p = port(1)
			}
			p.DAD = dad
			heard := listenToIPv6(t, n.ns, n.link.Index)
			attach(t, n, p)
			want := addrs(p)[1]
			// A frame of the pod's own that comes after all that Attach made it send.
			meet(t, n.ns, want)
			probes := 0
			for _, frame := range heard() {
				if isProbe(frame, want) {
					probes++
				}
			}
			expect.Equal(t, probes > 0, dad, "%d solicitations for %s from nobody", probes, want)
		})
	}
}

func listenToIPv6(tb testing.TB, ns *netns.NS, link int) func() [][]byte {
	tb.Helper()
	return listen(tb, ns, link, unix.ETH_P_IPV6)
}

// listen gathers the packets of one protocol that a link hears, from now on. What it
// gives gives those so far.
func listen(tb testing.TB, ns *netns.NS, link int, etherType uint16) func() [][]byte {
	tb.Helper()
	fd := -1
	inside(tb, ns, func() error {
		var err error
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	tb.Cleanup(func() { unix.Close(fd) })
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, etherType))
	must.Succeed(tb, unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link}))
	return func() [][]byte {
		var list [][]byte
		for {
			buf := make([]byte, 1500)
			n, _, err := unix.Recvfrom(fd, buf, 0)
			if err == unix.EAGAIN {
				return list
			}
			must.Succeed(tb, err)
			list = append(list, buf[:n])
		}
	}
}

// isProbe says whether a packet asks for the owner of an address, from no address: duplicate
// detection (RFC 4862, section 5.4.2).
func isProbe(packet []byte, target netip.Addr) bool {
	const header, solicitation = 40, 135
	if len(packet) < header+24 || packet[6] != unix.IPPROTO_ICMPV6 || packet[header] != solicitation {
		return false
	}
	source, _ := netip.AddrFromSlice(packet[8:24])
	about, _ := netip.AddrFromSlice(packet[header+8 : header+24])
	return source.IsUnspecified() && about == target
}

func TestRouterAdvertisementsGiveThePodNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	nstest.Run(t, n.ns, "ip", "addr", "add", "fe80::1/64", "dev", "br0", "nodad")
	p := port(0)
	pod, _ := attach(t, n, p)
	nstest.WaitForAddresses(t, n.ns)
	got := func() string {
		return nstest.Run(t, pod, "ip", "-6", "route", "show", "proto", "ra") + nstest.Run(t, pod, "ip", "-6", "addr", "show", "dev", "eth0", "dynamic")
	}
	advertise(t, n)
	meet(t, n.ns, addrs(p)...)
	expect.Equal(t, got(), "", "the pod has")
	// The very same is taken by a pod that hears routers.
	nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/accept_ra", "1")
	advertise(t, n)
	must.Until(t, "a route by the advertisement, without which the test is none", func() bool { return strings.Contains(got(), "via fe80::1") })
}

// advertise sends a router advertisement (RFC 4861, section 4.2) with a prefix out
// of the node's bridge.
func advertise(tb testing.TB, n *node) {
	tb.Helper()
	packet := []byte{134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0} // the checksum is the kernel's work
	prefix := []byte{3, 4, 64, 0xc0, 0, 0, 14, 16, 0, 0, 7, 8, 0, 0, 0, 0}
	address := nstest.Addr("2001:db8:bad::").As16()
	packet = append(append(packet, prefix...), address[:]...)
	fd := -1
	inside(tb, n.ns, func() error {
		var err error
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		return err
	})
	defer unix.Close(fd)
	for option, value := range map[int]int{unix.IPV6_MULTICAST_HOPS: 255, unix.IPV6_MULTICAST_IF: n.link.Index} {
		must.Succeed(tb, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, option, value))
	}
	from := nstest.Addr("fe80::1").As16()
	must.Succeed(tb, unix.Bind(fd, &unix.SockaddrInet6{Addr: from, ZoneId: uint32(n.link.Index)}))
	to := nstest.Addr("ff02::1").As16()
	must.Succeed(tb, unix.Sendto(fd, packet, 0, &unix.SockaddrInet6{Addr: to, ZoneId: uint32(n.link.Index)}))
}
