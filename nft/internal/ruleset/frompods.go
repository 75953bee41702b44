package ruleset

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
)

// The chain from-pods drops frames that a pod could send to change the bridge's behaviour or to bypass the firewall.
// It applies to all pods, with a guard or without one.
//
// The chain drops IP packets and further tags behind a VLAN tag with the VLAN ID 0 (IEEE 802.1Q's priority tag). A host
// without a link for the tag removes it and reads the content, even behind several such tags
// (__netif_receive_skb_core). A bridge without VLANs forwards the frame unchanged. It does not pass the frame to the
// firewall, since br_netfilter does not recognize the content as IP. So such frames would reach other pods past every
// rule, policy and connection tracking. A single tag before a protocol other than IP may pass. Tags with any other VLAN
// ID may pass too, since the receiver needs a link for that VLAN.
//
// It also drops frames with two tags whose first tag is of the default VLAN. A bridge that separates VLANs removes
// this tag at ports that carry the default VLAN untagged, such as an uplink or a trunk. Then the second tag would
// come first, and move the frame into a VLAN that the pod's port is not a member of.
//
// It drops multicast queries. A query makes the bridge treat the sender as the multicast querier. From then on
// the bridge sends a group only to ports that have reported it. A pod could send one query that permits answers
// within hours (RFC 3810, section 5.1.3). The bridge forgets all reports after some minutes
// (mcast_membership_interval). Then neighbour solicitations, which are multicast, no longer reach any pod, whether
// they come from pods or from the host. This rule applies to PodGroup and GatewayGroup only, so an operator can run a
// pod that is a multicast router.

const (
	igmpQuery     = 0x11 // RFC 3376, section 4
	listenerQuery = 130  // RFC 3810, section 5.1

	vlanTag  = etherType + 2 // offset of a tag's priority and VLAN ID
	vlanType = vlanTag + 2   // offset of the EtherType after the tag

	vlanID      = 0x0fff // the bits of a tag with the number of the VLAN
	defaultVLAN = 1
)

func (list *rules) addFromPods() {
	const in = unix.NFT_META_IIFGROUP

	list.begin("IGMP queries of pods").
		isPodGroup(in).isProtocol(unix.ETH_P_IP).isL4(unix.IPPROTO_IGMP).firstByte(igmpQuery, igmpQuery).Drop()

	// Drop all IGMP fragments, since the bridge parses a later fragment as if it were a whole packet.
	list.begin("IGMP fragments of pods").isPodGroup(in).fragment4(0x3fff).isL4(unix.IPPROTO_IGMP).Drop()

	// Match only queries behind a hop-by-hop header, since the bridge parses no others.
	list.begin("MLD queries of pods").
		isPodGroup(in).isProtocol(unix.ETH_P_IPV6).nextHeader(unix.IPPROTO_HOPOPTS, unix.IPPROTO_HOPOPTS).
		isICMPv6(listenerQuery, listenerQuery).Drop()

	list.begin("of the LAN").isMeta(in, group(ident.ShareGroup)).Return()
	noTag := list.begin("no tag")
	for _, tag := range []uint16{unix.ETH_P_8021Q, unix.ETH_P_8021AD} {
		noTag.load(expr.PayloadBaseLLHeader, etherType, 2).compare(expr.CmpOpNeq, Number16(tag))
	}
	noTag.Return()

	for _, inner := range []struct {
		comment string
		typ     uint16
	}{{"a tag behind one of VLAN 1", unix.ETH_P_8021Q}, {"an outer tag behind one of VLAN 1", unix.ETH_P_8021AD}} {
		x := list.begin(inner.comment).load(expr.PayloadBaseLLHeader, vlanTag, 2)
		x.Mask(Number16(vlanID), Number16(0))
		x.compare(expr.CmpOpEq, Number16(defaultVLAN)).dropBehindTag(inner.typ)
	}

	list.begin("of a VLAN").load(expr.PayloadBaseLLHeader, vlanTag, 2).hasAny(vlanID).Return()
	list.begin("tagged IPv4").dropBehindTag(unix.ETH_P_IP)
	list.begin("tagged IPv6").dropBehindTag(unix.ETH_P_IPV6)
	list.begin("tags in a row").dropBehindTag(unix.ETH_P_8021Q)
	list.begin("outer tags in a row").dropBehindTag(unix.ETH_P_8021AD)
}

// dropBehindTag drops frames from a pod that have the given EtherType behind a VLAN tag.
func (x expressions) dropBehindTag(typ uint16) {
	x.isAt(expr.PayloadBaseLLHeader, vlanType, Number16(typ)).isPodPort(expr.MetaKeyIIFNAME).Drop()
}

// isPodPort matches packets whose link has a name that begins with "veth", as the ports of our pods do. Ports of other
// programs may match too. link selects the incoming or the outgoing link. nft prints the name as "veth*".
func (x expressions) isPodPort(link expr.MetaKey) expressions {
	return x.isMeta(link, []byte(podPorts))
}

// isPodGroup matches frames whose port is in PodGroup or GatewayGroup. link selects the incoming or the outgoing
// port. The two groups differ in one bit, so a mask covers them.
func (x expressions) isPodGroup(link expr.MetaKey) expressions {
	x.loadMeta(link).Mask(group(^uint32(PodGroup^GatewayGroup)), nil)
	return x.compare(expr.CmpOpEq, group(PodGroup&GatewayGroup))
}

// group returns the number of a link group as bytes in the host's byte order, in which rules compare it.
func group(number uint32) []byte { return binary.NativeEndian.AppendUint32(nil, number) }

// hasAny matches if at least one of the bits is set in the two bytes in the first register.
func (x expressions) hasAny(bits uint16) expressions {
	x.Mask(Number16(bits), Number16(0))
	return x.compare(expr.CmpOpNeq, Number16(0))
}

// Frames to the link-local groups, 01:80:c2:00:00:00 to :0f, are meant for the device at the other end of the wire
// (IEEE 802.1Q, table 8-1). Examples are STP, LACP, 802.1X and LLDP. Normally, a bridge does not forward them, but
// passes them to the host's own stack as frames from the port, not from the bridge. So they bypass every rule that
// names the bridge, and may contain anything, such as an IPv6 router advertisement or a datagram. A pod does not need
// to send such frames.
//
// The kernel calls rules in two places (br_handle_frame). The first is the bridge's input hook. The second is the
// prerouting hook, for groups that the kernel handles like any other frames. These are the groups in group_fwd_mask of
// the port or the bridge, and the STP group if STP is off on the bridge. The kernel calls no rule for :0e unless one of
// these masks contains the group. For :00 if STP is on, only the port's mask counts. The kernel drops pause frames
// (:01) itself.

// podPorts is the prefix of the names of our pods' ports, and of ports that many other plugins create. A match for it
// needs no set element, which would come and go with each pod. It needs no link group either, which an operator may
// change.
const podPorts = "veth"

func (list *rules) addGroups() {
	x := list.begin("to link-local groups, from pods").load(expr.PayloadBaseLLHeader, etherTarget, EtherLen)
	x.Mask([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xf0}, nil)
	x.compare(expr.CmpOpEq, []byte{0x01, 0x80, 0xc2, 0, 0, 0}).isPodPort(expr.MetaKeyIIFNAME).Drop()
}

// In a network whose gateway is the host, the host needs no DHCP server or router among the pods. But a program of
// the host may listen to such a server or router. For example, a network manager whose configuration matches every
// link runs a DHCP client and accepts router advertisements on the bridge. The DHCP client reads frames with a packet
// socket, which bypasses rules of family inet. So the following rules are at the bridge's input hook, which runs
// before any socket gets the frame. Frames that the bridge forwards do not pass this hook, so pods may serve each
// other.

// GatewayGroup is the link group of pods' ports in networks whose gateway is the host. Other pods' ports have
// PodGroup.
const GatewayGroup = PodGroup - 1

// addTowardHost appends the rules for frames that the bridge passes to the host.
func (list *rules) addTowardHost() {
	list.addGroups()
	list.begin("of ports behind which the host may have a server").
		isNotMeta(unix.NFT_META_IIFGROUP, group(GatewayGroup)).Return()
	list.begin("TCP to the host").isL4(unix.IPPROTO_TCP).Return()

	// A later fragment has no UDP or ICMP header to match. It is useless without the first fragment, so accept it.
	list.begin("later fragments of IPv4 to the host").fragment4(0x1fff).Return()
	list.begin("later fragments of IPv6 to the host").isLaterFragment().Return()
	list.begin("DHCP answers to the host").isUDP(udpTarget, dhcpClient).Drop()
	list.begin("DHCPv6 answers to the host").isUDP(udpTarget, dhcp6Client).Drop()
	for _, message := range []struct {
		comment       string
		protocol, typ byte
	}{
		{"ICMP redirects to the host", unix.IPPROTO_ICMP, icmpRedirect},
		{"ICMP router advertisements to the host", unix.IPPROTO_ICMP, icmpRouterAdvert},
		{"ICMPv6 redirects to the host", unix.IPPROTO_ICMPV6, redirectMessage},
		{"ICMPv6 router advertisements to the host", unix.IPPROTO_ICMPV6, routerAdvert},
	} {
		// Match the byte before the protocol. In the reverse order, nft would print the byte as a field, such as
		// "icmp type". When nft loads such a listing, it adds a check of the EtherType, which differs in frames with
		// a VLAN tag.
		list.begin(message.comment).firstByte(message.typ, message.typ).isL4(message.protocol).Drop()
	}

	// Drop IPv4 packets whose protocol the kernel cannot find. A DHCP client for IPv4 uses a packet socket, which may
	// receive packets that the kernel itself refuses.
	list.begin("protocols that can be read").isNotL4(unix.IPPROTO_RAW).Return()
	list.begin("IPv4 that cannot be read").isProtocol(unix.ETH_P_IP).Drop()
}

// addUntrusted appends the rules of the chain untrusted, which runs after the chain guard. It applies to guarded ports
// that must not have a server or router behind them. The chain guard already checks the MAC and the addresses. This
// chain drops packets by their protocol, and packets except ARP whose protocol the kernel cannot find.
func (list *rules) addUntrusted() {
	list.begin("ports that are not of hosts only").linkNotIn(expr.MetaKeyIIFNAME, guardUntrustedSet).Return()

	// Most packets are TCP, and no rule below is about TCP.
	list.begin("TCP").isL4(unix.IPPROTO_TCP).Return()
	list.addDHCP()
	list.addRouting()
	list.begin("other UDP").isL4(unix.IPPROTO_UDP).Return()
	list.addARPProbes()
	list.addRouters()

	// Accept packets whose protocol the kernel can find. The only exception is the reserved protocol 255 (RFC 5237). A
	// pod could send such packets, and the last rule drops them.
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
// server may send from any port, to a relay or to a client. The rules also drop fragmented messages to a server,
// since a fragment may contain the ports but not the fields that the rules check.
func (list *rules) addDHCP() {
	list.begin("from a DHCP server's port").isUDP(udpSource, dhcpServer).Drop()
	list.begin("to a DHCP client's port").isUDP(udpTarget, dhcpClient).Drop()
	list.begin("from a boot server's port").isUDP(udpSource, pxeServer).Drop()
	list.begin("from a DHCPv6 server's port").isUDP(udpSource, dhcp6Server).Drop()
	list.begin("to a DHCPv6 client's port").isUDP(udpTarget, dhcp6Client).Drop()

	const moreFragments = 0x2000
	list.begin("DHCP in fragments").fragment4(moreFragments).isUDP(udpTarget, dhcpServer).Drop()

	// Drop messages to a DHCP server's port if they are no requests, or if their hardware address is no MAC. Replies to
	// this port are for relays, and another kind of address would identify another client.
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

// addRouting appends rules that drop UDP messages between routers or firewalls. Such messages are about routes,
// about the owner of a shared address, or about connections. Receivers often accept them from any sender on the
// link. The destination is one of the following ports, at a group or at a single router, and the source port can be
// any.
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

// addARPProbes appends a rule that lets a pod with an IPv4 address probe only for its own addresses. A host that is
// probing for an address assumes a conflict if another host probes for it too (RFC 5227, section 2.1.1).
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
