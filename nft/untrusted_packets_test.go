package nft

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// untrusted is the endpoint of the site's pod, as one that is nothing but a host.
func (s *guardSite) untrusted(addresses ...string) Endpoint {
	ep := s.guarded(addresses...)
	ep.Guard = GuardUntrusted
	return ep
}

// packet4with is packet4 with options in its header.
func packet4with(options []byte, src, dst string, fragment int, proto byte, payload []byte) []byte {
	length := 20 + len(options)
	h := join([]byte{0x40 | byte(length/4), 0}, be16(length+len(payload)), be16(7), be16(fragment), []byte{64, proto, 0, 0}, ip(src), ip(dst), options)
	return join(with(h, 10, checksum(h, 0)...), payload)
}

// routerAlert is an option of IPv4 that routers look at (RFC 2113).
func routerAlert() []byte { return []byte{0x94, 4, 0, 0} }

// Extension headers of IPv6: options that say nothing, and a fragment with its flags.
func padding6(next byte) []byte { return []byte{next, 0, 1, 4, 0, 0, 0, 0} }

func fragment6(next, more byte) []byte { return []byte{next, 0, 0, more, 0, 0, 0, 7} }

// listenerMessage is one of MLD, behind the header that it is always behind.
func listenerMessage(src, dst string, typ byte, body ...[]byte) []byte {
	return packet6(src, dst, unix.IPPROTO_HOPOPTS, []byte{58, 0, 5, 2, 0, 0, 1, 0}, icmp6(src, dst, typ, body...))
}

// serverFrames are frames by which a pod passes for a server or a router, under its own
// MAC and addresses.
func serverFrames() []namedFrame {
	ipv4 := func(packet []byte) []byte { return ether(broadcastMAC, podMAC, unix.ETH_P_IP, packet) }
	ipv6 := func(packet []byte) []byte { return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, packet) }
	udp4 := func(src, dst int, payload []byte) []byte {
		return packet4(pod4, "255.255.255.255", 0, 17, udpMessage(src, dst, payload))
	}
	udp6 := func(src, dst int, payload ...byte) []byte {
		return packet6(podLocal, allNodes, 17, udpMessage(src, dst, payload))
	}
	icmp4 := func(proto, typ byte) []byte {
		return packet4(pod4, other4, 0, proto, join([]byte{typ}, make([]byte, 15)))
	}
	message6 := func(typ byte) []byte {
		return packet6(podLocal, allNodes, 58, icmp6(podLocal, allNodes, typ, make([]byte, 20)))
	}
	offer := dhcpMessage(2, otherMAC, 53, 1, 2)
	ask := func(client string) []byte { return dhcpMessage(1, client, 53, 1, 1) }
	nobody := func(payload []byte) []byte {
		return packet4("0.0.0.0", "255.255.255.255", 0, 17, udpMessage(68, 67, payload))
	}
	advertise := udpMessage(547, 546, []byte{2, 0, 0, 7})
	return append(routingFrames(), []namedFrame{
		{"DHCP answer", ipv4(udp4(67, 68, offer))},
		{"DHCP answer from another port", ipv4(udp4(1067, 68, offer))},
		{"DHCP answer to another port", ipv4(udp4(67, 1068, offer))},
		{"DHCP answer from the client's port", ipv4(udp4(68, 68, offer))},
		{"answer of a boot server", ipv4(udp4(4011, 4011, offer))},
		{"answer of a boot server to another port", ipv4(udp4(4011, 30000, offer))},
		{"DHCP answer to a relay", ipv4(udp4(1067, 67, offer))},
		{"DHCP answer to one client", ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, udpMessage(1067, 68, offer)))},
		{"DHCP answer behind options", ipv4(packet4with(routerAlert(), pod4, "255.255.255.255", 0, 17, udpMessage(1067, 68, offer)))},
		{"DHCP answer behind as many options as there can be",
			ipv4(packet4with(slices.Repeat([]byte{1}, 40), pod4, "255.255.255.255", 0, 17, udpMessage(1067, 68, offer)))},
		{"first fragment of a DHCP answer", ipv4(packet4(pod4, "255.255.255.255", 0x2000, 17, udpMessage(1067, 68, offer)[:64]))},
		{"first fragment of a DHCP answer, with its ports alone", ipv4(packet4(pod4, "255.255.255.255", 0x2000, 17, udpMessage(1067, 68, offer)[:8]))},
		{"DHCP request in fragments", ipv4(packet4(pod4, other4, 0x2000, 17, udpMessage(68, 67, ask(podMAC))[:8]))},
		{"DHCP request in fragments, from no address", ipv4(packet4("0.0.0.0", "255.255.255.255", 0x2000, 17, udpMessage(68, 67, ask(podMAC))[:8]))},
		{"DHCP request for another's MAC", ipv4(nobody(ask(otherMAC)))},
		{"DHCP request for another's MAC, from its own address", ipv4(udp4(68, 67, ask(otherMAC)))},
		{"DHCP request for a longer MAC", ipv4(nobody(with(ask(podMAC), 2, 16)))},
		{"DHCP request for other hardware", ipv4(nobody(with(ask(podMAC), 1, 32)))},

		{"DHCPv6 answer", ipv6(udp6(547, 546, 2, 0, 0, 7))},
		{"DHCPv6 answer from another port", ipv6(udp6(1547, 546, 2, 0, 0, 7))},
		{"DHCPv6 answer to another port", ipv6(udp6(547, 1546, 2, 0, 0, 7))},
		{"DHCPv6 of a relay", ipv6(udp6(546, 547, 12, 0))},
		{"DHCPv6 to a relay", ipv6(udp6(546, 547, 13, 0))},
		{"DHCPv6 answer behind destination options", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_DSTOPTS, padding6(17), advertise))},
		{"DHCPv6 answer behind hop-by-hop options", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_HOPOPTS, padding6(17), advertise))},
		{"DHCPv6 answer behind both", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_HOPOPTS, padding6(unix.IPPROTO_DSTOPTS), padding6(17), advertise))},
		{"DHCPv6 answer behind a routing header", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_ROUTING, []byte{17, 0, 2, 0, 0, 0, 0, 0}, advertise))},
		{"DHCPv6 answer in a fragment", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragment6(17, 0), advertise))},
		{"first fragment of a DHCPv6 answer, with its ports alone", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragment6(17, 1), advertise[:8]))},
		{"first fragment of a DHCPv6 answer behind destination options",
			ipv6(packet6(podLocal, allNodes, unix.IPPROTO_DSTOPTS, padding6(unix.IPPROTO_FRAGMENT), fragment6(17, 1), advertise[:8]))},
		{"first fragment to a relay", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragment6(17, 1), udpMessage(546, 547, []byte{13})[:8]))},

		{"ARP probe for another's address", ether(broadcastMAC, podMAC, unix.ETH_P_ARP, arpMessage(1, podMAC, "0.0.0.0", other4))},

		{"ICMP redirect", ipv4(icmp4(1, 5))},
		{"ICMP redirect behind options", ipv4(packet4with(routerAlert(), pod4, other4, 0, 1, []byte{5, 1, 0, 0, 0, 0, 0, 0}))},
		{"first fragment of an ICMP redirect", ipv4(packet4(pod4, other4, 0x2000, 1, []byte{5, 1, 0, 0, 0, 0, 0, 0}))},
		{"ICMP router advertisement", ipv4(icmp4(1, 9))},
		{"IGMP query", ipv4(icmp4(2, 0x11))},
		{"IGMP query behind a router alert", ipv4(packet4with(routerAlert(), pod4, "224.0.0.1", 0, 2, join([]byte{0x11}, make([]byte, 11))))},
		{"DVMRP", ipv4(icmp4(2, 0x13))},
		{"PIM of version 1", ipv4(icmp4(2, 0x14))},
		{"multicast router advertisement", ipv4(icmp4(2, 0x30))},
		{"PIM", ipv4(icmp4(103, 0x20))},
		{"EIGRP", ipv4(icmp4(88, 2))},
		{"OSPF", ipv4(icmp4(89, 2))},
		{"VRRP", ipv4(icmp4(112, 0x21))},

		{"multicast listener query", ipv6(listenerMessage(podLocal, allNodes, 130, make([]byte, 20)))},
		{"multicast listener query without options", ipv6(message6(130))},
		{"fragment of a multicast listener query", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_FRAGMENT, fragment6(58, 1), icmp6(podLocal, allNodes, 130, make([]byte, 20))))},
		{"router renumbering", ipv6(message6(138))},
		{"inverse neighbour advertisement", ipv6(message6(142))},
		{"mobile prefix advertisement", ipv6(message6(147))},
		{"certification path advertisement", ipv6(message6(149))},
		{"multicast router advertisement over IPv6", ipv6(listenerMessage(podLocal, allNodes, 151, make([]byte, 4)))},
		{"OSPF over IPv6", ipv6(packet6(podLocal, "ff02::5", 89, make([]byte, 24)))},
		{"PIM over IPv6, behind destination options", ipv6(packet6(podLocal, "ff02::d", unix.IPPROTO_DSTOPTS, padding6(103), make([]byte, 24)))},
		{"VRRP over IPv6", ipv6(packet6(podLocal, "ff02::12", 112, make([]byte, 24)))},

		{"IPv4 that is longer than its frame", ipv4(with(packet4(pod4, other4, 0, 17, udpMessage(67, 68, offer)), 2, 0x20, 0))},
		{"IPv4 with too short a header", ipv4(with(packet4(pod4, other4, 0, 17, udpMessage(67, 68, offer)), 0, 0x44))},
		{"IPv6 that is longer than its frame", ipv6(with(udp6(547, 546, 2, 0, 0, 7), 4, 0x20, 0))},
		{"IPv6 whose headers do not end", ipv6(packet6(podLocal, allNodes, unix.IPPROTO_DSTOPTS, []byte{unix.IPPROTO_DSTOPTS, 99, 1, 4, 0, 0, 0, 0}, advertise))},
	}...)
}

// routingFrames are frames by which a pod passes for a router, or for one of a pair of
// routers, firewalls or load balancers.
func routingFrames() []namedFrame {
	to4 := func(group string, packet []byte) []byte {
		b := ip(group)
		return ether(fmt.Sprintf("01:00:5e:%02x:%02x:%02x", b[1]&0x7f, b[2], b[3]), podMAC, unix.ETH_P_IP, packet)
	}
	to6 := func(group string, packet []byte) []byte {
		b := ip(group)
		return ether(fmt.Sprintf("33:33:%02x:%02x:%02x:%02x", b[12], b[13], b[14], b[15]), podMAC, unix.ETH_P_IPV6, packet)
	}
	body := make([]byte, 24)
	var frames []namedFrame
	for _, protocol := range []struct {
		name   string
		port   int
		group4 string
		group6 string
	}{
		{"MANET neighbourhood discovery", 269, "224.0.0.109", "ff02::6d"},
		{"RIP", 520, "224.0.0.9", ""}, {"RIP of version 1", 520, "255.255.255.255", ""}, {"RIPng", 521, "", "ff02::9"},
		{"LDP", 646, "224.0.0.2", "ff02::2"}, {"AODV", 654, "255.255.255.255", "ff02::6d"}, {"OLSR", 698, "224.0.0.109", "ff02::6d"},
		{"HSRP", 1985, "224.0.0.2", ""}, {"HSRP of version 2", 1985, "224.0.0.102", ""}, {"HSRP over IPv6", 2029, "", "ff02::66"},
		{"WCCP", 2048, "224.0.1.87", ""}, {"GLBP", 3222, "224.0.0.102", "ff02::66"}, {"connections of a firewall", 3780, "225.0.0.50", ""},
		{"Babel", 6696, "224.0.0.111", "ff02::1:6"}, {"connections of a load balancer", 8848, "224.0.0.81", ""},
	} {
		if protocol.group4 != "" {
			frames = append(frames,
				namedFrame{protocol.name, to4(protocol.group4, packet4(pod4, protocol.group4, 0, 17, udpMessage(protocol.port, protocol.port, body)))},
				namedFrame{protocol.name + " from another port", to4(protocol.group4, packet4(pod4, protocol.group4, 0, 17, udpMessage(30000, protocol.port, body)))},
				namedFrame{protocol.name + " behind a router alert", to4(protocol.group4, packet4with(routerAlert(), pod4, protocol.group4, 0, 17, udpMessage(protocol.port, protocol.port, body)))},
				namedFrame{protocol.name + " in a fragment", to4(protocol.group4, packet4(pod4, protocol.group4, 0x2000, 17, udpMessage(protocol.port, protocol.port, body)[:8]))})
		}
		if protocol.group6 != "" {
			frames = append(frames,
				namedFrame{protocol.name + " to IPv6's group", to6(protocol.group6, packet6(podLocal, protocol.group6, 17, udpMessage(protocol.port, protocol.port, body)))},
				namedFrame{protocol.name + " to IPv6's group, behind options", to6(protocol.group6,
					packet6(podLocal, protocol.group6, unix.IPPROTO_HOPOPTS, padding6(17), udpMessage(protocol.port, protocol.port, body)))},
				namedFrame{protocol.name + " to IPv6's group, in a fragment", to6(protocol.group6,
					packet6(podLocal, protocol.group6, unix.IPPROTO_FRAGMENT, fragment6(17, 1), udpMessage(protocol.port, protocol.port, body)[:8]))})
		}
		frames = append(frames, namedFrame{protocol.name + " to one router",
			ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, udpMessage(protocol.port, protocol.port, body)))})
	}
	for _, protocol := range []struct {
		name   string
		number byte
	}{
		{"GGP", 3}, {"EGP", 8}, {"IGRP", 9}, {"IDRP", 45}, {"DSR", 48}, {"NHRP", 54}, {"NSFNET-IGP", 85}, {"DGP", 86},
		{"LARP", 91}, {"IS-IS over IP", 124}, {"MANET", 138}, {"pfsync", 240},
	} {
		frames = append(frames,
			namedFrame{protocol.name, to4("224.0.0.2", packet4(pod4, "224.0.0.2", 0, protocol.number, body))},
			namedFrame{protocol.name + " over IPv6", to6("ff02::2", packet6(podLocal, "ff02::2", protocol.number, body))})
	}
	return frames
}

// hostFrames are frames that a pod must be able to send, which is nothing but a host.
func hostFrames() []namedFrame {
	ipv4 := func(packet []byte) []byte { return ether(broadcastMAC, podMAC, unix.ETH_P_IP, packet) }
	ipv6 := func(packet []byte) []byte { return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, packet) }
	igmp := func(typ byte) []byte {
		return ipv4(packet4with(routerAlert(), pod4, "224.0.0.22", 0, 2, join([]byte{typ}, make([]byte, 15))))
	}
	icmp4 := func(typ byte) []byte { return ipv4(packet4(pod4, other4, 0, 1, join([]byte{typ}, make([]byte, 40)))) }
	frames := slices.DeleteFunc(decent(), func(f namedFrame) bool { return strings.HasPrefix(f.name, "DHCP") })
	// Whatever a pod wants of the world, and what is next to what it must not say.
	for _, port := range []int{
		53, 69, 123, 268, 270, 319, 320, 443, 500, 519, 522, 645, 647, 653, 655, 697, 699, 1701, 1900, 1984, 1986, 2028, 2030, 2047, 2049, 3221, 3223,
		3779, 3781, 3784, 4010, 4011, 4012, 4500, 4789, 5353, 5355, 6695, 6697, 8847, 8849, 33434, 51820, 65535,
	} {
		frames = append(frames,
			namedFrame{fmt.Sprintf("UDP to port %d", port), ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, datagram(40000, port)))},
			namedFrame{fmt.Sprintf("UDP to port %d over IPv6", port), ether(otherMAC, podMAC, unix.ETH_P_IPV6, packet6(pod6, other6, 17, datagram(40000, port)))})
	}
	for _, port := range []int{66, 67, 68, 520, 521, 546, 547, 646, 1985, 3222, 4011, 6696, 8848} {
		tcp := join(be16(port), be16(port), make([]byte, 16))
		frames = append(frames,
			namedFrame{fmt.Sprintf("TCP, port %d", port), ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 6, tcp))},
			namedFrame{fmt.Sprintf("TCP, port %d, over IPv6", port), ether(otherMAC, podMAC, unix.ETH_P_IPV6, packet6(pod6, other6, 6, tcp))})
	}
	for _, port := range []int{269, 520, 521, 646, 698, 1985, 3222, 6696, 8848} {
		// A server there answers.
		frames = append(frames, namedFrame{fmt.Sprintf("UDP from port %d", port),
			ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, datagram(port, 40000)))})
	}
	for name, protocol := range map[string]byte{
		"IPv4 in IPv4": 4, "IPv6 in IPv4": 41, "AH": 51, "RSVP": 46, "SCTP to a router": 132, "UDP-Lite": 136, "L2TP": 115, "protocol 90": 90, "protocol 104": 104,
	} {
		frames = append(frames, namedFrame{name, ipv4(packet4(pod4, other4, 0, protocol, make([]byte, 40)))})
	}
	to := func(group string, dst, port int) []byte { return packet6(podLocal, group, 17, datagram(dst, port)) }
	frames = append(frames, []namedFrame{
		{"multicast DNS over IPv6", ipv6(to("ff02::fb", 5353, 5353))},
		{"LLMNR", ipv4(packet4(pod4, "224.0.0.252", 0, 17, datagram(40000, 5355)))}, {"LLMNR over IPv6", ipv6(to("ff02::1:3", 40000, 5355))},
		{"SSDP", ipv4(packet4(pod4, "239.255.255.250", 0, 17, datagram(40000, 1900)))}, {"SSDP over IPv6", ipv6(to("ff02::c", 40000, 1900))},
		// Its receiver has a key of the pod's.
		{"AH over IPv6", ipv6(packet6(pod6, other6, unix.IPPROTO_AH, []byte{17, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1}, datagram(1024, 9)))},
		{"ESP over IPv6", ipv6(packet6(pod6, other6, unix.IPPROTO_ESP, make([]byte, 40)))},
		{"router solicitation of IPv4", icmp4(10)}, {"timestamp", icmp4(13)},
	}...)
	return append(append(frames, leasingFrames()[:4]...), []namedFrame{
		{"DHCP renewal, to the server", ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, udpMessage(68, 67, dhcpMessage(1, podMAC, 53, 1, 3))))},
		{"DHCP renewal, to all", ipv4(packet4(pod4, "255.255.255.255", 0, 17, udpMessage(68, 67, dhcpMessage(1, podMAC, 53, 1, 3))))},
		{"DHCP release", ether(otherMAC, podMAC, unix.ETH_P_IP, packet4(pod4, other4, 0, 17, udpMessage(68, 67, dhcpMessage(1, podMAC, 53, 1, 7))))},
		{"DHCPv6 solicitation", ipv6(packet6(podLocal, "ff02::1:2", 17, udpMessage(546, 547, []byte{1, 0, 0, 7})))},
		{"DHCPv6 information request", ipv6(packet6(podLocal, "ff02::1:2", 17, udpMessage(546, 547, []byte{11, 0, 0, 7})))},
		{"IGMP report of version 1", igmp(0x12)}, {"IGMP report of version 2", igmp(0x16)}, {"IGMP leave", igmp(0x17)}, {"IGMP report of version 3", igmp(0x22)},
		{"echo request", icmp4(8)}, {"echo reply", icmp4(0)}, {"destination unreachable", icmp4(3)}, {"time exceeded", icmp4(11)},
		{"packet too big", ipv6(packet6(pod6, other6, 58, icmp6(pod6, other6, 2, make([]byte, 48))))},
		{"echo request over IPv6", ipv6(packet6(pod6, other6, 58, icmp6(pod6, other6, 128, make([]byte, 48))))},
		{"multicast DNS", ipv4(packet4(pod4, "224.0.0.251", 0, 17, datagram(5353, 5353)))},
		{"ESP", ipv4(packet4(pod4, other4, 0, 50, make([]byte, 40)))},
		{"GRE", ipv4(packet4(pod4, other4, 0, 47, make([]byte, 40)))},
	}...)
}

// leasingFrames are what gets a pod its lease, from no address.
func leasingFrames() []namedFrame {
	dhcp := func(kind byte, options ...byte) []byte {
		return ether(broadcastMAC, podMAC, unix.ETH_P_IP, packet4("0.0.0.0", "255.255.255.255", 0, 17,
			udpMessage(68, 67, dhcpMessage(1, podMAC, append([]byte{53, 1, kind}, options...)...))))
	}
	probe := func(target string) []byte {
		return ether(broadcastMAC, podMAC, unix.ETH_P_ARP, arpMessage(1, podMAC, "0.0.0.0", target))
	}
	return []namedFrame{
		{"DHCP discovery", dhcp(1)},
		{"DHCP request", dhcp(3, 50, 4, 10, 22, 0, 5)},
		{"DHCP decline", dhcp(4, 50, 4, 10, 22, 0, 5)},
		{"ARP probe for its own address", probe(pod4)},
		{"ARP probe for what it is offered", probe("10.22.0.77")},
	}
}

func TestGuardStopsServersAndRouters(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	s.want(t, serverFrames(), true)
	// Their addresses are right, and what they are is their own business, unless a port
	// is said to be a host's.
	mustAdd(t, s.c, s.guarded(pod4, pod6))
	s.want(t, serverFrames(), true)
	must.Succeed(t, s.c.Move(context.Background(), s.guarded(pod4, pod6), s.untrusted(pod4, pod6)))
	s.want(t, serverFrames(), false)
	s.want(t, attacks(), false)
	s.want(t, hostFrames(), true)
	must.Succeed(t, s.c.Move(context.Background(), s.untrusted(pod4, pod6), s.guarded(pod4, pod6)))
	s.want(t, serverFrames(), true)
}

// A pod that has no address yet can get one, and nothing else of IPv4.
func TestGuardLetsAPodGetItsLease(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	var rest []namedFrame
	for _, f := range hostFrames() {
		isLease := slices.ContainsFunc(leasingFrames(), func(l namedFrame) bool { return l.name == f.name })
		// What speaks IPv6 before it has an address says nothing of anyone's.
		if early := strings.HasSuffix(f.name, "from no address"); !isLease && !early && f.name != "ARP probe" {
			rest = append(rest, f)
		}
	}
	mustAdd(t, s.c, s.untrusted())
	s.want(t, leasingFrames(), true)
	s.want(t, rest, false)
	s.want(t, slices.DeleteFunc(serverFrames(), func(f namedFrame) bool { return strings.HasPrefix(f.name, "ARP probe") }), false)
	s.want(t, attacks(), false)
	must.Succeed(t, s.c.Move(context.Background(), s.untrusted(), s.untrusted(pod4, pod6)))
	s.want(t, hostFrames(), true)
	s.want(t, serverFrames(), false)
	s.want(t, attacks(), false)
}

// slaacFrames are what a pod sends from addresses that are made of its MAC, whatever
// their prefixes.
func slaacFrames() []namedFrame {
	ipv6 := func(packet []byte) []byte { return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, packet) }
	var frames []namedFrame
	for _, own := range []string{podLocal, "2001:db8:7::ff:fe00:5", "fd00:77:1::ff:fe00:5"} {
		report := packet6(own, "ff02::16", unix.IPPROTO_HOPOPTS, []byte{58, 0, 5, 2, 0, 0, 1, 0}, icmp6(own, "ff02::16", listenerReportTwo, make([]byte, 24)))
		frames = append(frames, []namedFrame{
			{"TCP from " + own, ipv6(packet6(own, other6, 6, make([]byte, 20)))},
			{"UDP from " + own, ipv6(packet6(own, other6, 17, datagram(1024, 9)))},
			{"nothing from " + own, ipv6(packet6(own, other6, 59))},
			{"last fragment from " + own, ipv6(packet6(own, other6, unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 16, 0, 0, 0, 7}, datagram(1024, 9)))},
			{"destination options from " + own, ipv6(packet6(own, other6, unix.IPPROTO_DSTOPTS, padding6(17), datagram(1024, 9)))},
			{"echo request from " + own, ipv6(packet6(own, other6, 58, icmp6(own, other6, 128, make([]byte, 20))))},
			{"whether taken: " + own, ipv6(solicit6("::", "ff02::1:ff00:5", own))},
			{"solicitation from " + own, ipv6(solicit6(own, "ff02::1:ff00:6", other6, option(1, mac(podMAC))))},
			{"advertisement of " + own, ipv6(advert6(own, allNodes, own, option(2, mac(podMAC))))},
			{"advertisement of the link-local address's from " + own, ipv6(advert6(own, allNodes, podLocal, option(2, mac(podMAC))))},
			{"listener report from " + own, ipv6(report)},
		}...)
	}
	return frames
}

func TestGuardKnowsAddressesMadeOfTheMAC(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	foreign := func(own string) []namedFrame {
		ipv6 := func(packet []byte) []byte { return ether(allNodesMAC, podMAC, unix.ETH_P_IPV6, packet) }
		return []namedFrame{
			{"from " + own, ipv6(packet6(own, other6, 17, datagram(1024, 9)))},
			{"echo request from " + own, ipv6(packet6(own, other6, 58, icmp6(own, other6, 128, make([]byte, 20))))},
			{"last fragment from " + own, ipv6(packet6(own, other6, unix.IPPROTO_FRAGMENT, []byte{17, 0, 0, 16, 0, 0, 0, 7}, datagram(1024, 9)))},
			{"whether taken: " + own, ipv6(solicit6("::", allNodes, own))},
			{"solicitation from " + own, ipv6(solicit6(own, other6, other6, option(1, mac(podMAC))))},
			{"advertisement of " + own, ipv6(advert6(podLocal, allNodes, own, option(2, mac(podMAC))))},
		}
	}
	others := slices.Concat(foreign("2001:db8:7::ff:fe00:6"), foreign("2001:db8:7::5"), foreign("fe80::1"), foreign("2001:db8:7:0:ff:fe00:5:0"))
	mustAdd(t, s.c, s.untrusted(pod4))
	s.want(t, slaacFrames(), false)
	slaac := s.untrusted(pod4)
	slaac.SLAAC = true
	must.Succeed(t, s.c.Move(context.Background(), s.untrusted(pod4), slaac))
	s.want(t, slaacFrames(), true)
	s.want(t, others, false)
	// What pod6 and other6 are in the lists is not made of a MAC.
	known := s.untrusted(pod4, pod6)
	known.SLAAC = true
	must.Succeed(t, s.c.Move(context.Background(), slaac, known))
	s.want(t, slices.Concat(slaacFrames(), hostFrames()), true)
	s.want(t, slices.Concat(others, attacks(), serverFrames()), false)
}

// The kernel's own: it makes its addresses of what a router says, and moves on to
// others when that says otherwise.
func TestGuardedPodConfiguresItself(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	slaac := s.untrusted(pod4)
	slaac.SLAAC = true
	mustAdd(t, s.c, slaac)
	nstest.Run(t, s.pod, "sh", "-ec", `
		ip -6 addr flush dev eth0
		cd /proc/sys/net/ipv6/conf/eth0
		echo 1 >accept_ra; echo 1 >autoconf; echo 0 >use_tempaddr; echo 0 >addr_gen_mode`)
	got := s.settled(t, podLocal)
	must.That(t, got == "settled", "%s is %s", podLocal, got)
	nstest.Run(t, s.host, "ip", "addr", "add", "2001:db8:7::1/64", "dev", "cbr0", "nodad")
	nstest.Run(t, s.host, "ip", "addr", "add", "2001:db8:8::1/64", "dev", "cbr0", "nodad")
	for _, prefix := range []string{"2001:db8:7::", "2001:db8:8::"} {
		information := join([]byte{3, 4, 64, 0xc0, 0, 0, 0x0e, 0x10, 0, 0, 0x0e, 0x10, 0, 0, 0, 0}, ip(prefix))
		s.bridge.send(ether(allNodesMAC, bridgeMAC, unix.ETH_P_IPV6, packet6(gateLocal, allNodes, 58,
			icmp6(gateLocal, allNodes, routerAdvert, []byte{64, 0, 7, 8}, make([]byte, 8), information))))
		want := prefix + "ff:fe00:5"
		got := s.settled(t, want)
		must.That(t, got == "settled", "%s is %s", want, got)
		expect.Success(t, nstest.PingWith(t, s.pod, nstest.Addr(prefix+"1"), nstest.Echo{From: nstest.Addr(want)}), "from %s", want)
		nstest.Run(t, s.host, "ip", "neigh", "flush", "dev", "cbr0")
		expect.Success(t, nstest.Ping(t, s.host, nstest.Addr(want)), "to %s", want)
	}
}
