package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// addUntrusted appends the rules of the chain untrusted, which runs after the chain guard. It applies to guarded
// ports that must not have a server or router behind them. The chain guard already checks the MAC and the addresses.
// This chain drops packets by their protocol, and accepts all others.
func (list *rules) addUntrusted() {
	list.begin("ports that are not of hosts only").linkNotIn(expr.MetaKeyIIFNAME, guardUntrustedSet).Return()

	// Most packets are TCP, and no rule below is about TCP.
	list.begin("TCP").isL4(unix.IPPROTO_TCP).Return()
	list.addDHCP()
	list.addRouting()
	list.begin("other UDP").isL4(unix.IPPROTO_UDP).Return()
	list.addARPProbes()
	list.addRouters()

	// Accept every packet whose protocol the kernel can find. No such packet has the reserved protocol 255 (RFC
	// 5237).
	list.begin("other protocols").isNotL4(unix.IPPROTO_RAW).Return()
	list.begin("other ARP").isEtherType(unix.ETH_P_ARP).Return()
	list.begin("what cannot be read").Drop()
}

// UDP ports of DHCP (RFC 2131, section 4.1) and DHCPv6 (RFC 8415, section 7.2), and offsets in their messages.
const (
	dhcpServer   = 67
	dhcpClient   = 68
	pxeServer    = 4011 // Intel's Preboot Execution Environment 2.1, section 2.2.3
	ipvsSync     = 8848 // Linux's IPVS: the highest of the dropped ports
	dhcp6Client  = 546
	dhcp6Server  = 547
	udpSource    = 0 // offsets in the UDP header
	udpTarget    = 2
	udpLen       = 8
	dhcpHardware = udpLen + 28 // offset of the field chaddr
)

// addDHCP appends rules that drop messages of DHCP servers and relays, and requests that could deceive a server. A
// server may send from any port, to a relay or to a client. The rules also drop fragments, since a fragment may
// contain the ports but not the fields that the rules check.
func (list *rules) addDHCP() {
	list.begin("from a DHCP server's port").isUDP(udpSource, dhcpServer).Drop()
	list.begin("to a DHCP client's port").isUDP(udpTarget, dhcpClient).Drop()
	list.begin("from a boot server's port").isUDP(udpSource, pxeServer).Drop()
	list.begin("from a DHCPv6 server's port").isUDP(udpSource, dhcp6Server).Drop()
	list.begin("to a DHCPv6 client's port").isUDP(udpTarget, dhcp6Client).Drop()

	const moreFragments = 0x2000
	list.begin("DHCP in fragments").fragment4(moreFragments).isUDP(udpTarget, dhcpServer).Drop()

	// Drop all other messages to a DHCP server's port: those to relays, and those with a different type or length of
	// the hardware address, which would identify another client.
	list.begin("DHCP but for requests by Ethernet").
		isUDP(udpTarget, dhcpServer).load(expr.PayloadBaseTransportHeader, udpLen, 3).
		compare(expr.CmpOpNeq, []byte{1, unix.ARPHRD_ETHER, EtherLen}).Drop() // op, htype, hlen
	list.begin("DHCP requests for another's MAC").
		isUDP(udpTarget, dhcpServer).
		portNotIn(expr.PayloadBaseTransportHeader, dhcpHardware, EtherLen, guardLinkSet).Drop()
	list.begin("DHCPv6 in fragments").
		isEtherType(unix.ETH_P_IPV6).loadFragment(0, 1).byteBetween(unix.IPPROTO_UDP, unix.IPPROTO_UDP).
		isUDP(udpTarget, dhcp6Server).Drop()

	const informationRequest = 11 // the highest message type that clients send (RFC 8415, section 7.3)
	list.begin("DHCPv6 of relays, and to them").
		isUDP(udpTarget, dhcp6Server).load(expr.PayloadBaseTransportHeader, udpLen, 1).
		compare(expr.CmpOpGt, []byte{informationRequest}).Drop()
}

// addRouting appends rules that drop UDP messages between routers or firewalls. Such messages are about routes, about
// the owner of a shared address, or about connections. Receivers often accept them from any sender on the right link.
// The destination is one of the following ports, at a group or at a single router, and the source port can be any.
func (list *rules) addRouting() {
	list.begin("UDP to higher ports").
		isL4(unix.IPPROTO_UDP).load(expr.PayloadBaseTransportHeader, udpTarget, 2).
		compare(expr.CmpOpGt, Number16(ipvsSync)).Return()
	list.addSpans([]span{
		{"MANET and OLSR 2", 269, 269}, // RFC 5498
		{"RIP and RIPng", 520, 521},    // RFC 2453, RFC 2080
		{"LDP", 646, 646},              // RFC 5036
		{"AODV", 654, 654},             // RFC 3561
		{"OLSR", 698, 698},             // RFC 3626
		{"HSRP", 1985, 1985},           // RFC 2281; version 2 too
		{"HSRP over IPv6", 2029, 2029},
		{"WCCP", 2048, 2048},
		{"GLBP", 3222, 3222},
		{"conntrackd", 3780, 3780}, // the port in conntrackd's examples
		{"Babel", 6696, 6696},      // RFC 8966
		{"IPVS synchronization", ipvsSync, ipvsSync},
	}, func(x expressions, ports span) {
		x.isL4(unix.IPPROTO_UDP).load(expr.PayloadBaseTransportHeader, udpTarget, 2).
			numberBetween(Number16(ports.from), Number16(ports.to)).Drop()
	})
}

// addARPProbes appends a rule that lets a pod with an IPv4 address probe only for its own addresses. A probe for
// another host's address makes that host assume a conflict (RFC 5227, section 2.1.1).
func (list *rules) addARPProbes() {
	list.begin("ARP probes for another's address").
		isEtherType(unix.ETH_P_ARP).isNoSender().linkNotIn(expr.MetaKeyIIFNAME, guardLeasingSet).
		isNotOwn(arpTargetIP, Addr4Len, guard4Set).Drop()
}

// ICMP types of messages that only routers send (RFC 792, RFC 1256).
const (
	icmpRedirect     = 5
	icmpRouterAdvert = 9
)

// addRouters appends rules that drop messages of routers and of routing protocols. If a host sends queries or
// advertisements of multicast routers, snooping switches send all multicast to that host. When the host stops, the
// switches forget the listeners.
func (list *rules) addRouters() {
	list.addSpans([]span{
		{"ICMP redirects", icmpRedirect, icmpRedirect},
		{"ICMP router advertisements", icmpRouterAdvert, icmpRouterAdvert},
	}, func(x expressions, types span) {
		x.isEtherType(unix.ETH_P_IP).isL4(unix.IPPROTO_ICMP).firstByte(byte(types.from), byte(types.to)).Drop()
	})

	list.addSpans([]span{
		{"IGMP reports of version 1", 0x12, 0x12},             // RFC 1112
		{"IGMP reports of version 2, and leaves", 0x16, 0x17}, // RFC 2236
		{"IGMP reports of version 3", 0x22, 0x22},             // RFC 3376
	}, func(x expressions, types span) {
		x.isEtherType(unix.ETH_P_IP).isL4(unix.IPPROTO_IGMP).firstByte(byte(types.from), byte(types.to)).Return()
	})

	// This rule drops queries, and advertisements of multicast routers (RFC 4286).
	list.begin("other IGMP").isL4(unix.IPPROTO_IGMP).Drop()
	list.addSpans([]span{
		{"multicast listener queries", 130, 130},
		{"ICMPv6 of routers", 138, 142},        // renumbering, information on nodes, and inverse discovery
		{"ICMPv6 that is no host's", 144, 255}, // mobility, certificates, multicast routers
	}, func(x expressions, types span) {
		x.isDiscovery(byte(types.from), byte(types.to)).Drop()
	})

	list.addSpans([]span{
		{"GGP", 3, 3},
		{"EGP and IGRP", 8, 9},
		{"IDRP", 45, 45},
		{"DSR", 48, 48}, // RFC 4728
		{"NHRP", 54, 54},
		{"NSFNET-IGP and DGP", 85, 86},
		{"EIGRP and OSPF", 88, 89},
		{"LARP", 91, 91},
		{"PIM", 103, 103},
		{"VRRP and CARP", 112, 112},
		{"IS-IS over IP", 124, 124},
		{"MANET", 138, 138}, // RFC 5498
		{"pfsync", 240, 240},
	}, func(x expressions, protocols span) {
		x.loadMeta(expr.MetaKeyL4PROTO).byteBetween(byte(protocols.from), byte(protocols.to)).Drop()
	})
}

// isUDP matches UDP packets with a port at an offset of the UDP header.
func (x expressions) isUDP(offset uint32, port uint16) expressions {
	return x.isL4(unix.IPPROTO_UDP).isAt(expr.PayloadBaseTransportHeader, offset, Number16(port))
}
