package nft

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
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

const (
	otherMAC  = "02:00:00:00:00:06"
	bridgeMAC = "02:00:00:00:00:01"
	podLocal  = "fe80::ff:fe00:5" // of podMAC
	gateLocal = "fe80::1"
	allNodes  = "ff02::1"
)

// guardSite is a site whose pods have link-local addresses too, and the wires of
// the pod that may be guarded, of another that is not, and of the bridge itself.
type guardSite struct {
	*site
	pod1, pod2, bridge *wire
	network            Network
	frames             int
}

func newGuardSite(tb testing.TB) *guardSite {
	tb.Helper()
	s := &guardSite{site: newSite(tb), network: Network{Name: "podnet", Guard: true}}
	nstest.Run(tb, s.pod, "sh", "-ec", `
		ip addr add `+podLocal+`/64 dev eth0 nodad`)
	nstest.Run(tb, s.other, "sh", "-ec", `
		ip link set eth0 address `+otherMAC+`
		ip addr add `+other6+`/64 dev eth0 nodad
		ip route add default via `+bridge6+`
		ip addr add fe80::ff:fe00:6/64 dev eth0 nodad`)
	nstest.WaitForAddresses(tb, s.pod, s.other)
	s.pod1, s.pod2, s.bridge = openWire(tb, s.pod, "eth0"), openWire(tb, s.other, "eth0"), openWire(tb, s.host, "cbr0")
	mustEnsure(tb, s.c, s.network)
	return s
}

// guarded is the endpoint of the site's pod.
func (s *guardSite) guarded(addresses ...string) Endpoint {
	return Endpoint{Owner: "0123456789a", Network: "podnet", Bridge: "cbr0", MAC: mac(podMAC), Guard: GuardAddresses, GuardedPort: "veth1", Addrs: nstest.Addrs(addresses...)}
}

// arrives says whether a frame of the pod's comes to the other pod. A frame that
// passes in any case is sent behind it, so nobody has to wait for what never comes.
func (s *guardSite) arrives(frame []byte) bool {
	s.frames++
	token, last := []byte(fmt.Sprintf("token%07d", s.frames)), []byte(fmt.Sprintf("last%08d", s.frames))
	s.pod1.send(join(frame, token), join(leasingFrames()[0].frame, last))
	return s.pod2.seenBefore(token, last) > 0
}

type namedFrame struct {
	name  string
	frame []byte
}

// attacks are frames by which a pod passes for another, its addresses being those
// of a site.
func attacks() []namedFrame {
	arp := func(message []byte) []byte { return ether(otherMAC, podMAC, unix.ETH_P_ARP, message) }
	ipv4 := func(packet []byte) []byte { return ether(otherMAC, podMAC, unix.ETH_P_IP, packet) }
	ipv6 := func(packet []byte) []byte { return ether(otherMAC, podMAC, unix.ETH_P_IPV6, packet) }
	udp := datagram(1024, 9)
	gratuitous := arpMessage(1, podMAC, bridge4, bridge4)
	poison := func(options ...[]byte) []byte { return advert6(podLocal, allNodes, bridge6, options...) }
	advertBody := icmp6(podLocal, allNodes, neighbourAdvert, []byte{0x20, 0, 0, 0}, ip(bridge6), option(2, mac(podMAC)))
	optionsHeader := func(next byte) []byte { return []byte{next, 0, 1, 4, 0, 0, 0, 0} }
	fragmentHeader := func(next byte, more byte) []byte { return []byte{next, 0, 0, more, 0, 0, 0, 7} }
	return []namedFrame{
		{"IPv4 from another's MAC", ether(otherMAC, foreignMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, udp))},
		{"IPv6 from another's MAC", ether(otherMAC, foreignMAC, unix.ETH_P_IPV6, packet6(pod6, other6, 59))},
		{"ARP from another's MAC", ether(broadcastMAC, foreignMAC, unix.ETH_P_ARP, arpMessage(1, podMAC, pod4, other4))},
		{"from the bridge's MAC", ether(otherMAC, bridgeMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, udp))},

		{"priority tag", ether(otherMAC, podMAC, unix.ETH_P_8021Q, be16(0xe000), be16(unix.ETH_P_ARP), gratuitous)},
		{"VLAN tag", ether(otherMAC, podMAC, unix.ETH_P_8021Q, be16(5), be16(unix.ETH_P_IP), packet4(pod4, other4, 0, 17, udp))},
		{"VLAN tag, IPv6", ether(otherMAC, podMAC, unix.ETH_P_8021Q, be16(5), be16(unix.ETH_P_IPV6), poison(option(2, mac(podMAC))))},
		{"outer VLAN tag", ether(otherMAC, podMAC, unix.ETH_P_8021AD, be16(5), be16(unix.ETH_P_IP), packet4(pod4, other4, 0, 17, udp))},
		{"two VLAN tags", ether(otherMAC, podMAC, unix.ETH_P_8021AD, be16(5), be16(unix.ETH_P_8021Q), be16(5), be16(unix.ETH_P_ARP), gratuitous)},

		{"ARP request of the gateway's address", arp(gratuitous)},
		{"ARP reply of another's address", arp(arpMessage(2, podMAC, bridge4, other4))},
		{"ARP reply of no address", arp(arpMessage(2, podMAC, "0.0.0.0", other4))},
		{"ARP of its own address at another's MAC", arp(arpMessage(2, foreignMAC, pod4, other4))},
		{"ARP probe of another's MAC", arp(arpMessage(1, foreignMAC, "0.0.0.0", other4))},
		{"ARP for other hardware", arp(with(arpMessage(2, podMAC, pod4, other4), 0, 0, 6))},
		{"ARP for another protocol", arp(with(arpMessage(2, podMAC, pod4, other4), 2, 0x86, 0xdd))},
		{"ARP with longer MACs", arp(with(arpMessage(2, podMAC, pod4, other4), 4, 8))},
		{"ARP with longer addresses", arp(with(arpMessage(2, podMAC, pod4, other4), 5, 16))},
		{"RARP", ether(broadcastMAC, podMAC, 0x8035, arpMessage(3, podMAC, pod4, other4))},

		{"IPv4 from another pod's address", ipv4(packet4(other4, bridge4, 0, 17, udp))},
		{"IPv4 from the gateway's address", ipv4(packet4(bridge4, other4, 0, 17, udp))},
		{"IPv4 from outside", ipv4(packet4(far4, other4, 0, 17, udp))},
		{"IPv4 from no address", ipv4(packet4("0.0.0.0", other4, 0, 17, udp))},
		{"IPv4 from no address, from the DHCP client's port", ipv4(packet4("0.0.0.0", other4, 0, 17, datagram(68, 53)))},
		{"IPv4 fragment from no address", ipv4(packet4("0.0.0.0", other4, 1, 17, udp))},
		{"IPv4 fragment from another pod's address", ipv4(packet4(other4, bridge4, 185, 17, udp))},
		{"DHCP of another's address", ipv4(packet4(other4, "255.255.255.255", 0, 17, datagram(68, 67)))},

		{"IPv6 from another pod's address", ipv6(packet6(other6, bridge6, 59))},
		{"IPv6 from the gateway's link-local address", ipv6(packet6(gateLocal, allNodes, 59))},
		{"IPv6 from a link-local address of no MAC", ipv6(packet6("fe80::5", allNodes, 59))},
		{"TCP from another pod's IPv6 address", ipv6(packet6(other6, bridge6, 6, make([]byte, 20)))},
		{"UDP from another pod's IPv6 address", ipv6(packet6(other6, bridge6, 17, udp))},
		{"IPv6 from outside", ipv6(packet6(far6, other6, 59))},
		{"IPv6 from no address", ipv6(packet6("::", allNodes, unix.IPPROTO_ICMPV6, icmp6("::", allNodes, 128, make([]byte, 4))))},
		{"IPv6 fragment from another pod's address", ipv6(packet6(other6, bridge6, unix.IPPROTO_FRAGMENT, fragmentHeader(17, 1), udp, udp))},

		{"last IPv6 fragment from another pod's address", ipv6(packet6(other6, bridge6, unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 16, 0, 0, 0, 7}, udp))},

		{"advertisement of the gateway's address", ipv6(poison(option(2, mac(podMAC))))},
		{"advertisement of the gateway's link-local address", ipv6(advert6(podLocal, allNodes, gateLocal, option(2, mac(podMAC))))},
		{"advertisement of the gateway's address without a MAC", ipv6(poison())},
		{"advertisement from no address", ipv6(advert6("::", allNodes, pod6, option(2, mac(podMAC))))},
		{"advertisement of its own address at another's MAC", ipv6(advert6(podLocal, allNodes, pod6, option(2, mac(foreignMAC))))},
		{"advertisement with a second option", ipv6(advert6(podLocal, allNodes, pod6, option(2, mac(podMAC)), option(2, mac(foreignMAC))))},
		{"solicitation with another's MAC", ipv6(solicit6(pod6, other6, other6, option(1, mac(foreignMAC))))},
		{"solicitation with a nonce before another's MAC", ipv6(solicit6(pod6, other6, other6, option(14, mac(podMAC)), option(1, mac(foreignMAC))))},
		{"solicitation from another's address", ipv6(solicit6(bridge6, other6, other6, option(1, mac(podMAC))))},
		{"whether another's address is taken", ipv6(solicit6("::", "ff02::1:ff00:6", other6))},
		{"router solicitation with another's MAC", ipv6(packet6(podLocal, "ff02::2", unix.IPPROTO_ICMPV6,
			icmp6(podLocal, "ff02::2", routerSolicit, make([]byte, 4), option(1, mac(foreignMAC)))))},
		{"router solicitation with a second option", ipv6(packet6(podLocal, "ff02::2", unix.IPPROTO_ICMPV6,
			icmp6(podLocal, "ff02::2", routerSolicit, make([]byte, 4), option(1, mac(podMAC)), option(1, mac(foreignMAC)))))},
		{"advertisement behind destination options", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_DSTOPTS, optionsHeader(58), advertBody))},
		{"advertisement behind hop-by-hop options", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_HOPOPTS, optionsHeader(58), advertBody))},
		{"advertisement in a fragment", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragmentHeader(58, 0), advertBody))},
		{"advertisement in the second fragment, of destination options",
			ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragmentHeader(unix.IPPROTO_DSTOPTS, 1), optionsHeader(58)))},
		{"advertisement in the second fragment, of hop-by-hop options",
			ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragmentHeader(unix.IPPROTO_HOPOPTS, 1), optionsHeader(58)))},
		{"advertisement in the second fragment, of a routing header",
			ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragmentHeader(unix.IPPROTO_ROUTING, 1), optionsHeader(58)))},
		{"advertisement in a fragment of a fragment",
			ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragmentHeader(unix.IPPROTO_FRAGMENT, 0), fragmentHeader(58, 0), advertBody))},
		{"router advertisement", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_ICMPV6,
			icmp6(podLocal, allNodes, routerAdvert, []byte{64, 0, 7, 8}, make([]byte, 8))))},
		{"redirect", ipv6(packet6(podLocal, other6, unix.IPPROTO_ICMPV6,
			icmp6(podLocal, other6, redirectMessage, make([]byte, 4), ip(podLocal), ip(far6))))},

		{"spanning tree", ether("01:80:c2:00:00:00", podMAC, 38, []byte{0x42, 0x42, 3}, make([]byte, 35))},
		{"ARP behind SNAP", ether(otherMAC, podMAC, 36, []byte{0xaa, 0xaa, 3, 0, 0, 0}, be16(unix.ETH_P_ARP), gratuitous)},
		{"IPv4 behind SNAP", ether(otherMAC, podMAC, 48, []byte{0xaa, 0xaa, 3, 0, 0, 0}, be16(unix.ETH_P_IP), packet4(bridge4, other4, 0, 17, udp))},
		{"its own IPv4 behind SNAP", ether(otherMAC, podMAC, 48, []byte{0xaa, 0xaa, 3, 0, 0, 0}, be16(unix.ETH_P_IP), packet4(pod4, other4, 0, 17, udp))},
		{"IPv6 behind SNAP", ether(otherMAC, podMAC, 60, []byte{0xaa, 0xaa, 3, 0, 0, 0}, be16(unix.ETH_P_IPV6), packet6(bridge6, other6, 17, udp))},
		{"IPv4 behind LLC", ether(otherMAC, podMAC, 35, []byte{6, 6, 3}, packet4(bridge4, other4, 0, 17, udp))},
		{"CDP", ether("01:00:0c:cc:cc:cc", podMAC, 40, []byte{0xaa, 0xaa, 3, 0, 0, 0x0c, 0x20, 0}, make([]byte, 32))},
		{"IS-IS", ether("01:80:c2:00:00:14", podMAC, 40, []byte{0xfe, 0xfe, 3, 0x83}, make([]byte, 36))},
		{"GARP", ether("01:80:c2:00:00:21", podMAC, 40, []byte{0x42, 0x42, 3, 0, 1}, make([]byte, 35))},
		{"loopback", ether(otherMAC, podMAC, unix.ETH_P_LOOPBACK, make([]byte, 46))},
		{"MACsec", ether(otherMAC, podMAC, unix.ETH_P_MACSEC, make([]byte, 46))},
		{"PPPoE discovery", ether(broadcastMAC, podMAC, unix.ETH_P_PPP_DISC, []byte{0x11, 7, 0, 0, 0, 0}, make([]byte, 40))},
		{"PPPoE session", ether(otherMAC, podMAC, unix.ETH_P_PPP_SES, []byte{0x11, 0, 0, 1, 0, 34, 0, 0x21}, packet4(bridge4, other4, 0, 17, udp))},
		{"profinet", ether(broadcastMAC, podMAC, 0x8892, make([]byte, 46))},
		{"time by Ethernet", ether("01:1b:19:00:00:00", podMAC, unix.ETH_P_1588, make([]byte, 46))},
		{"another mesh", ether(broadcastMAC, podMAC, unix.ETH_P_BATMAN, make([]byte, 46))},
		{"IPv4 from 127.0.0.1", ipv4(packet4("127.0.0.1", other4, 0, 17, udp))},
		{"IPv4 from a multicast address", ipv4(packet4("224.0.0.1", other4, 0, 17, udp))},
		{"IPv4 from the broadcast address", ipv4(packet4("255.255.255.255", other4, 0, 17, udp))},
		{"IPv4 from another's address, by way of its own", ipv4(packet4with([]byte{0x83, 7, 8, 10, 22, 0, 5, 0}, other4, bridge4, 0, 17, udp))},
		{"IPv6 from ::1", ipv6(packet6("::1", other6, 17, udp))},
		{"IPv6 from its own IPv4 address", ipv6(packet6("::ffff:"+pod4, other6, 17, udp))},
		{"IPv6 from a multicast address", ipv6(packet6("ff02::1", other6, 17, udp))},
		{"IPv4 in a frame of IPv6", ether(otherMAC, podMAC, unix.ETH_P_IPV6, packet4(pod4, other4, 0, 17, join(udp, make([]byte, 40))))},
		{"IPv6 in a frame of IPv4", ether(otherMAC, podMAC, unix.ETH_P_IP, packet6(pod6, other6, 17, udp))},
		{"IPv4 without a packet", ether(otherMAC, podMAC, unix.ETH_P_IP)},
		{"answer to who looks whether it has an address", ipv6(advert6("::", allNodes, other6))},
		{"advertisement with an option before the address", ipv6(advert6(podLocal, allNodes, pod6, option(14, mac(podMAC)), option(2, mac(foreignMAC))))},
		{"advertisement with a longer option", ipv6(advert6(podLocal, allNodes, pod6, join([]byte{2, 2}, mac(foreignMAC), make([]byte, 8))))},
		{"advertisement with an address of the wrong kind", ipv6(advert6(podLocal, allNodes, pod6, option(1, mac(foreignMAC))))},
		{"advertisement behind a routing header", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_ROUTING, optionsHeader(58), advertBody))},
		{"another protocol", ether(otherMAC, podMAC, 0x88cc, make([]byte, 40))},
		{"MPLS", ether(otherMAC, podMAC, 0x8847, []byte{0, 0, 1, 64}, packet4(other4, bridge4, 0, 17, udp))},
	}
}

func decent() []namedFrame {
	arp := func(message []byte) []byte { return ether(broadcastMAC, podMAC, unix.ETH_P_ARP, message) }
	ipv4 := func(packet []byte) []byte { return ether(otherMAC, podMAC, unix.ETH_P_IP, packet) }
	ipv6 := func(packet []byte) []byte { return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, packet) }
	udp := datagram(1024, 9)
	report := join([]byte{0, 0, 0, 1}, []byte{4, 0, 0, 0}, ip("ff02::1:ff00:5"))
	listener := func(src string, typ byte) []byte {
		return packet6(src, "ff02::16", unix.IPPROTO_HOPOPTS, []byte{58, 0, 5, 2, 0, 0, 1, 0}, icmp6(src, "ff02::16", typ, report))
	}
	routers := func(src string, options ...[]byte) []byte {
		return packet6(src, "ff02::2", unix.IPPROTO_ICMPV6, icmp6(src, "ff02::2", routerSolicit, make([]byte, 4), join(options...)))
	}
	return []namedFrame{
		{"ARP request", arp(arpMessage(1, podMAC, pod4, other4))},
		{"ARP reply", ether(otherMAC, podMAC, unix.ETH_P_ARP, arpMessage(2, podMAC, pod4, other4))},
		{"gratuitous ARP", arp(arpMessage(1, podMAC, pod4, pod4))},
		{"ARP probe", arp(arpMessage(1, podMAC, "0.0.0.0", pod4))},
		{"DHCP request without an address", ether(broadcastMAC, podMAC, unix.ETH_P_IP, packet4("0.0.0.0", "255.255.255.255", 0, 17, datagram(68, 67)))},
		{"DHCP renewal", ipv4(packet4(pod4, other4, 0, 17, datagram(68, 67)))},
		{"IPv4", ipv4(packet4(pod4, other4, 0, 17, udp))},
		{"IPv4 broadcast", ether(broadcastMAC, podMAC, unix.ETH_P_IP, packet4(pod4, "10.22.255.255", 0, 17, udp))},
		{"IPv4 multicast", ether("01:00:5e:00:00:fb", podMAC, unix.ETH_P_IP, packet4(pod4, "224.0.0.251", 0, 17, udp))},
		{"IGMP", ether("01:00:5e:00:00:16", podMAC, unix.ETH_P_IP, packet4(pod4, "224.0.0.22", 0, 2, []byte{0x22, 0, 0xdd, 0xff, 0, 0, 0, 0}))},
		{"first IPv4 fragment", ipv4(packet4(pod4, other4, 0x2000, 17, udp))},
		{"last IPv4 fragment", ipv4(packet4(pod4, other4, 185, 17, udp))},
		{"SCTP", ipv4(packet4(pod4, other4, 0, 132, make([]byte, 12)))},
		{"IPv6", ipv6(packet6(pod6, other6, 59))},
		{"TCP", ipv6(packet6(pod6, other6, 6, make([]byte, 20)))},
		{"UDP", ipv6(packet6(pod6, other6, 17, udp))},
		{"IPv6 from the link-local address", ipv6(packet6(podLocal, allNodes, 59))},
		{"IPv6 with destination options", ipv6(packet6(pod6, other6, unix.IPPROTO_DSTOPTS, []byte{17, 0, 1, 4, 0, 0, 0, 0}, udp))},
		{"first IPv6 fragment", ipv6(packet6(pod6, other6, unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 1, 0, 0, 0, 7}, udp, udp))},
		{"last IPv6 fragment", ipv6(packet6(pod6, other6, unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 16, 0, 0, 0, 7}, udp))},
		{"IPv6 multicast fragment", ipv6(packet6(podLocal, "ff02::fb", unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 1, 0, 0, 0, 7}, udp, udp))},
		{"fragment of an echo request", ipv6(packet6(pod6, other6, unix.IPPROTO_FRAGMENT, []byte{58, 0, 0, 1, 0, 0, 0, 7}, icmp6(pod6, other6, 128, make([]byte, 20))))},
		{"last fragment of an echo request, which starts as an advertisement does", ipv6(packet6(pod6, other6, unix.IPPROTO_FRAGMENT,
			[]byte{58, 0, 0, 16, 0, 0, 0, 7}, bytes.Repeat([]byte{neighbourAdvert}, 40)))},
		{"last fragment of an echo request, which starts as a router's advertisement does", ipv6(packet6(pod6, other6, unix.IPPROTO_FRAGMENT,
			[]byte{58, 0, 0, 16, 0, 0, 0, 7}, bytes.Repeat([]byte{routerAdvert}, 40)))},
		{"solicitation", ipv6(solicit6(pod6, "ff02::1:ff00:6", other6, option(1, mac(podMAC))))},
		{"solicitation from the link-local address", ipv6(solicit6(podLocal, "ff02::1:ff00:6", other6, option(1, mac(podMAC))))},
		{"solicitation without an option", ipv6(solicit6(pod6, other6, other6))},
		{"advertisement", ipv6(advert6(pod6, other6, pod6, option(2, mac(podMAC))))},
		{"advertisement of the link-local address", ipv6(advert6(podLocal, allNodes, podLocal, option(2, mac(podMAC))))},
		{"advertisement without an option", ipv6(advert6(pod6, other6, pod6))},
		{"whether its own address is taken", ipv6(solicit6("::", "ff02::1:ff00:5", pod6))},
		{"whether its own address is taken, with a nonce", ipv6(solicit6("::", "ff02::1:ff00:5", pod6, option(14, mac(foreignMAC))))},
		{"whether its link-local address is taken", ipv6(solicit6("::", "ff02::1:ff00:5", podLocal))},
		{"router solicitation", ipv6(routers(podLocal, option(1, mac(podMAC))))},
		{"router solicitation from no address", ipv6(routers("::"))},
		{"multicast listener report", ipv6(listener(podLocal, listenerReportTwo))},
		{"multicast listener report from no address", ipv6(listener("::", listenerReportTwo))},
		{"multicast listener report of version 1 from no address", ipv6(listener("::", listenerReport))},
		{"multicast listener's leave from no address", ipv6(listener("::", listenerDone))},
	}
}

func (s *guardSite) want(t *testing.T, frames []namedFrame, want bool) {
	t.Helper()
	for _, f := range frames {
		expect.Equal(t, s.arrives(f.frame), want, "%s arrives", f.name)
	}
}

func TestGuardStopsWhatPassesForAnother(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	nft(t, s.host, "flush chain bridge tombolo groups") // of which one is about spanning tree
	// Each does arrive where nothing guards the port, though another is guarded.
	mustAdd(t, s.c, Endpoint{Owner: "00000000002", Network: "podnet", Bridge: "cbr0", MAC: mac(otherMAC), Guard: GuardAddresses, GuardedPort: "veth2", Addrs: nstest.Addrs(other4, other6)})
	s.want(t, attacks(), true)
	s.want(t, decent(), true)
	mustAdd(t, s.c, s.guarded(pod4, pod6))
	s.want(t, attacks(), false)
	s.want(t, decent(), true)
	must.Succeed(t, s.c.Remove(context.Background(), s.guarded(pod4, pod6)))
	s.want(t, attacks(), true)
}

// Of a pod whose addresses nobody knows, only the MAC is held.
func TestGuardOfAPodWithoutAddressesHoldsItsMAC(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	stopped := map[string]bool{}
	for _, name := range []string{
		"IPv4 from another's MAC", "IPv6 from another's MAC", "ARP from another's MAC", "from the bridge's MAC",
		"priority tag", "VLAN tag", "VLAN tag, IPv6", "outer VLAN tag", "two VLAN tags",
		"ARP of its own address at another's MAC", "ARP probe of another's MAC", "ARP for other hardware", "ARP for another protocol",
		"ARP with longer MACs", "ARP with longer addresses", "RARP",
		"advertisement of its own address at another's MAC", "advertisement with a second option", "solicitation with another's MAC",
		"solicitation with a nonce before another's MAC", "router solicitation with another's MAC", "router solicitation with a second option",
		"advertisement behind destination options", "advertisement behind hop-by-hop options",
		"advertisement in the second fragment, of destination options", "advertisement in the second fragment, of hop-by-hop options",
		"advertisement in the second fragment, of a routing header", "advertisement in a fragment of a fragment", "advertisement in a fragment",
		"spanning tree", "ARP behind SNAP", "another protocol", "MPLS",
		"IPv4 behind SNAP", "its own IPv4 behind SNAP", "IPv6 behind SNAP", "IPv4 behind LLC", "CDP", "IS-IS", "GARP", "loopback", "MACsec",
		"PPPoE discovery", "PPPoE session", "profinet", "time by Ethernet", "another mesh",
		"advertisement with an option before the address", "advertisement with a longer option", "advertisement with an address of the wrong kind",
		"advertisement behind a routing header",
	} {
		stopped[name] = true
	}
	mustAdd(t, s.c, s.guarded())
	for _, f := range attacks() {
		got := s.arrives(f.frame)
		expect.That(t, got != stopped[f.name], "%s arrives: %v", f.name, got)
		delete(stopped, f.name)
	}
	for name := range stopped {
		t.Errorf("there is no attack named %s", name)
	}
	s.want(t, decent(), true)
}

// A pod that is held to its MAC and to nothing else sends as any address, and any protocol.
func TestGuardOfTheMACAloneLooksAtNothingElse(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	nft(t, s.host, "flush chain bridge tombolo groups") // of which one is about spanning tree
	ep := s.guarded(pod4, pod6)
	ep.Guard = GuardMAC
	mustAdd(t, s.c, ep)
	stopped := 0
	for _, f := range attacks() {
		foreign := bytes.HasPrefix(f.frame[6:], mac(foreignMAC)) || bytes.HasPrefix(f.frame[6:], mac(bridgeMAC))
		s.want(t, []namedFrame{f}, !foreign)
		if foreign {
			stopped++
		}
	}
	expect.Equal(t, stopped, 4, "attacks are from another's MAC")
	s.want(t, decent(), true)
	// The same pod is held to its addresses from one transaction to the next, and back.
	full := s.guarded(pod4, pod6)
	for _, step := range []struct {
		next Endpoint
		want bool
	}{{full, false}, {ep, true}} {
		must.Succeed(t, s.c.Replace(context.Background(), step.next))
		s.want(t, []namedFrame{{"IPv4 from another pod's address", ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(other4, bridge4, 0, 17, datagram(1024, 9)))}}, step.want)
	}
}

// A pod with addresses of one family has no business with the other.
func TestGuardOfOneFamilyStopsTheOther(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	for _, tc := range []struct {
		address string
		want    map[string]bool
	}{
		{pod4, map[string]bool{"IPv4": true, "ARP request": true, "IPv6": false, "IPv6 from the link-local address": false, "advertisement": false}},
		{pod6, map[string]bool{"IPv4": false, "ARP request": false, "IPv6": true, "IPv6 from the link-local address": true, "advertisement": true}},
	} {
		mustAdd(t, s.c, s.guarded(tc.address))
		for _, f := range decent() {
			if want, ok := tc.want[f.name]; ok {
				s.want(t, []namedFrame{f}, want)
				delete(tc.want, f.name)
			}
		}
		expect.That(t, len(tc.want) == 0, "there are no frames named %v", tc.want)
		must.Succeed(t, s.c.Remove(context.Background(), s.guarded(tc.address)))
	}
}

// macAt gives the MAC that a namespace has for an address.
func macAt(tb testing.TB, ns *netns.NS, link, address string) string {
	tb.Helper()
	for _, field := range strings.SplitAfter(nstest.Run(tb, ns, "ip", "neigh", "show", address, "dev", link), "lladdr ")[1:] {
		return strings.Fields(field)[0]
	}
	return ""
}

func TestGuardKeepsNeighboursFromBeingPoisoned(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	// They would not believe another advertisement within a second.
	for _, at := range []struct {
		ns   *netns.NS
		link string
	}{{s.other, "eth0"}, {s.host, "cbr0"}} {
		nstest.Sysctl(t, at.ns, "net/ipv4/neigh/"+at.link+"/locktime", "0")
		nstest.Sysctl(t, at.ns, "net/ipv6/neigh/"+at.link+"/locktime", "0")
	}
	poison := func(targetMAC, address string) []byte {
		if nstest.Addr(address).Is4() {
			return ether(targetMAC, podMAC, unix.ETH_P_ARP, arpMessage(2, podMAC, address, address))
		}
		return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, advert6(podLocal, allNodes, address, option(2, mac(podMAC))))
	}
	for _, guarded := range []bool{false, true} {
		if guarded {
			mustAdd(t, s.c, s.guarded(pod4, pod6))
		}
		for _, tc := range []struct {
			ns            *netns.NS
			link, mac     string
			address, owns string
		}{
			{s.other, "eth0", otherMAC, bridge4, bridgeMAC},
			{s.other, "eth0", otherMAC, bridge6, bridgeMAC},
			{s.host, "cbr0", bridgeMAC, other4, otherMAC},
			{s.host, "cbr0", bridgeMAC, other6, otherMAC},
		} {
			nstest.Run(t, tc.ns, "ip", "neigh", "flush", "dev", tc.link)
			must.Succeed(t, nstest.Ping(t, tc.ns, nstest.Addr(tc.address)))
			got := macAt(t, tc.ns, tc.link, tc.address)
			must.That(t, got == tc.owns, "%s is at %s, want %s", tc.address, got, tc.owns)
			want := podMAC
			if guarded {
				want = tc.owns
			}
			// Within the same tick of the kernel's clock, they stay with what they have; and
			// whose address it is may say so itself at any time.
			got = ""
			for range 100 {
				s.arrives(poison(tc.mac, tc.address))
				if got = macAt(t, tc.ns, tc.link, tc.address); got == podMAC {
					break
				}
			}
			expect.Equal(t, got, want, "guarded: %v: %s is at", guarded, tc.address)
			nstest.Run(t, tc.ns, "ip", "neigh", "flush", "dev", tc.link)
		}
	}
}

// learnt gives the MACs that the bridge has learnt at a port.
func (s *guardSite) learnt(tb testing.TB, port string) []string {
	tb.Helper()
	var macs []string
	for line := range strings.Lines(nstest.Run(tb, s.host, "bridge", "fdb", "show", "dev", port)) {
		if !strings.Contains(line, "permanent") {
			macs = append(macs, strings.Fields(line)[0])
		}
	}
	slices.Sort(macs)
	return macs
}

func TestGuardKeepsTheBridgeFromLearning(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	udp := packet4(pod4, far4, 0, 17, datagram(1024, 9)) // which nobody answers
	// The other pod may say something at any time, and be where it was.
	flood := func() (stolen bool) {
		for i := range 100 {
			s.pod1.send(ether(otherMAC, fmt.Sprintf("02:66:66:00:00:%02x", i), unix.ETH_P_IP, udp))
			s.arrives(ether(bridgeMAC, otherMAC, unix.ETH_P_IP, udp))
			stolen = stolen || slices.Contains(s.learnt(t, "veth1"), otherMAC)
		}
		return stolen
	}
	if stolen := flood(); !stolen || len(s.learnt(t, "veth1")) < 100 {
		t.Fatalf("without a guard, the bridge learns the other pod's MAC: %v, and %v", stolen, s.learnt(t, "veth1"))
	}
	nstest.Run(t, s.host, "sh", "-ec", "ip link set veth1 nomaster; ip link set veth1 master cbr0")
	mustAdd(t, s.c, s.guarded(pod4, pod6))
	expect.That(t, !flood(), "with it, the bridge has learnt the other pod's MAC")
	got := s.learnt(t, "veth1")
	expect.That(t, slices.Equal(got, []string{podMAC}), "with it, the bridge learns %v", got)
	must.Succeed(t, nstest.Ping(t, s.host, nstest.Addr(other4)))
	if got := s.learnt(t, "veth2"); !slices.Equal(got, []string{otherMAC}) {
		t.Errorf("at the other pod's port, there is %v", got)
	}
}

// The bridge does not show frames to 01:80:c2:00:00:0x to the guard, unless it has to
// forward them; only the program that enslaves a port can say that it has to. So the
// guard comes with rules for those that the bridge's input sees, and two groups are left.
func TestGuardNeedsGroupFramesForwarded(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	mustAdd(t, s.c, s.guarded(pod4, pod6))
	var server net.PacketConn
	err := s.host.Do(func() error {
		var err error
		server, err = net.ListenPacket("udp4", ":9")
		return err
	})
	must.Succeed(t, err)
	defer server.Close()
	must.Succeed(t, server.SetReadDeadline(time.Now().Add(patience)))
	// heard counts datagrams from another pod's address at the host, before one of the
	// pod's own.
	heard := func() int {
		for last := range 16 {
			s.pod1.send(ether(fmt.Sprintf("01:80:c2:00:00:%02x", last), fmt.Sprintf("02:66:66:66:66:%02x", last),
				unix.ETH_P_IP, packet4(other4, bridge4, 0, 17, datagram(1024, 9))))
		}
		s.pod1.send(ether(bridgeMAC, podMAC, unix.ETH_P_IP, packet4(pod4, bridge4, 0, 17, datagram(1024, 9))))
		for n := 0; ; n++ {
			_, from, err := server.ReadFrom(make([]byte, 16))
			must.Succeed(t, err)
			if strings.HasPrefix(from.String(), pod4) {
				return n
			}
		}
	}
	nft(t, s.host, "flush chain bridge tombolo groups; flush chain bridge tombolo groups-input")
	if n, macs := heard(), s.learnt(t, "veth1"); n != 14 || len(macs) != 15 {
		t.Errorf("the host hears %d datagrams, and the bridge learns %v: this kernel differs from what is documented", n, macs)
	}
	mustEnsure(t, s.c, s.network)
	nstest.Run(t, s.host, "bridge", "fdb", "flush", "dev", "cbr0", "nopermanent")
	if n, macs := heard(), s.learnt(t, "veth1"); n != 1 || len(macs) != 2 {
		t.Errorf("with rules for groups, the host hears %d datagrams, and the bridge learns %v, want one of LLDP's", n, macs)
	}
	nstest.Run(t, s.host, "sh", "-ec", "ip link set veth1 nomaster; ip link set veth1 master cbr0; "+
		"ip link set veth1 type bridge_slave group_fwd_mask 0x4001")
	if n, macs := heard(), s.learnt(t, "veth1"); n != 0 || !slices.Equal(macs, []string{podMAC}) {
		t.Errorf("where they are forwarded, the host hears %d datagrams, and the bridge learns %v", n, macs)
	}
}

func TestGuardedPodLivesAsBefore(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	nstest.Run(t, s.host, "sh", "-ec", "for l in veth1 veth2 cbr0; do ip link set $l mtu 9000; done")
	for _, ns := range []*netns.NS{s.pod, s.other} {
		nstest.Run(t, ns, "sh", "-ec", "ip link set lo up; ip link set eth0 mtu 9000")
	}
	nstest.Run(t, s.other, "ip", "addr", "add", "10.22.0.7/16", "dev", "eth0")
	mustAdd(t, s.c, s.guarded(pod4, pod6))
	for _, to := range []string{other4, other6, bridge4, bridge6, far4, far6} {
		t.Run(to, func(t *testing.T) {
			for _, echo := range []nstest.Echo{{}, {Size: 8900, DontFragment: true}, {Size: 30000}} {
				if far := to == far4 || to == far6; far && echo.Size > 0 {
					continue // by a link of another MTU
				}
				expect.Success(t, nstest.PingWith(t, s.pod, nstest.Addr(to), echo), "ping of %d bytes", echo.Size)
			}
			at := map[string]*netns.NS{other4: s.other, other6: s.other, far4: s.outside, far6: s.outside}[to]
			if at == nil {
				at = s.host
			}
			for _, network := range []string{"tcp", "udp"} {
				expect.Success(t, expect.Err(nstest.Ask(t, s.pod, network, nstest.Serve(t, at, network, netip.AddrPortFrom(nstest.Addr(to), 0)))), "%s", network)
			}
		})
	}
	for _, to := range []string{pod4, pod6} {
		nstest.Run(t, s.other, "ip", "neigh", "flush", "dev", "eth0")
		expect.Success(t, expect.Err(nstest.Ask(t, s.other, "tcp", nstest.Serve(t, s.pod, "tcp", netip.AddrPortFrom(nstest.Addr(to), 0)))), "called at %s", to)
	}
}

// settled waits until the pod's kernel has asked for others that have an address, and says what
// became of it.
func (s *guardSite) settled(tb testing.TB, address string) string {
	tb.Helper()
	for deadline := time.Now().Add(patience); ; runtime.Gosched() {
		line := nstest.Run(tb, s.pod, "ip", "-o", "addr", "show", "dev", "eth0", "to", address)
		switch {
		case strings.Contains(line, "dadfailed"):
			return "duplicate"
		case line != "" && !strings.Contains(line, "tentative"):
			return "settled"
		case time.Now().After(deadline):
			tb.Fatalf("%s is not there, or still tentative: %s", address, line)
		}
	}
}

// An address is tentative until the kernel has asked for others that have it.
func TestGuardedPodDetectsDuplicateAddresses(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	state := func(address string) string {
		t.Helper()
		nstest.Run(t, s.pod, "sh", "-ec", "ip addr del "+address+"/64 dev eth0 2>/dev/null || true; ip addr add "+address+"/64 dev eth0")
		return s.settled(t, address)
	}
	mustAdd(t, s.c, s.guarded(pod4, pod6))
	for _, address := range []string{pod6, podLocal} {
		expect.Equal(t, state(address), "settled", "%s is", address)
	}
	nstest.Run(t, s.other, "ip", "addr", "add", pod6+"/64", "dev", "eth0", "nodad")
	nstest.WaitForAddresses(t, s.other)
	expect.Equal(t, state(pod6), "duplicate", "another has %s: it is", pod6)
}

// What a pod does to itself cuts it off, and nobody else.
func TestGuardedPodThatChangesItselfIsCutOff(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	for _, change := range []string{
		"ip link set eth0 address " + foreignMAC,
		"ip link set eth0 address " + podMAC + "; ip addr flush dev eth0 scope global; " +
			"ip addr add 10.22.0.66/16 dev eth0; ip addr add fd00:22::66/64 dev eth0 nodad",
	} {
		nstest.Run(t, s.pod, "sh", "-ec", change)
		nstest.WaitForAddresses(t, s.pod)
		nstest.Run(t, s.other, "ip", "neigh", "flush", "dev", "eth0")
		nstest.Run(t, s.host, "ip", "neigh", "flush", "dev", "cbr0")
		for _, guarded := range []bool{false, true} {
			echo := nstest.Echo{}
			if guarded {
				echo.Wait = 200 * time.Millisecond
				mustAdd(t, s.c, s.guarded(pod4, pod6))
			}
			for _, to := range []string{other4, bridge4, other6, bridge6} {
				err := nstest.PingWith(t, s.pod, nstest.Addr(to), echo)
				expect.That(t, guarded != (err == nil), "after %s, guarded: %v: ping of %s: %v", change, guarded, to, err)
			}
			expect.Success(t, nstest.Ping(t, s.other, nstest.Addr(bridge4)), "after %s: the other pod", change)
		}
		must.Succeed(t, s.c.Remove(context.Background(), s.guarded(pod4, pod6)))
	}
}
