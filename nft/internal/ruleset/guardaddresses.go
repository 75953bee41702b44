package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// addGuard appends the rules of the chain guard, which accepts the packets that a port may send and drops all others.
// Most rules accept some packets by ending the chain for them. Such packets go on to our later chains and to other
// tables.
func (list *rules) addGuard() {
	const in = expr.MetaKeyIIFNAME

	list.begin("ports that are not guarded").linkNotIn(in, guardedSet).Return()
	list.begin("from another's MAC").
		portNotIn(expr.PayloadBaseLLHeader, etherSource, EtherLen, guardMACSet).Drop()
	list.begin("from its own MAC, where no more is asked").
		linkIn(in, guardLeasingSet).linkNotIn(in, guardUntrustedSet).Return()

	// Drop frames with a VLAN tag. Other machines may remove the tag and read the content, and the rules below would
	// not see ARP behind the tag.
	list.begin("VLAN tags").isEtherType(unix.ETH_P_8021Q).Drop()
	list.begin("outer VLAN tags").isEtherType(unix.ETH_P_8021AD).Drop()
	list.guardIPv4()

	// The next two rules match most IPv6 packets: those whose next header is TCP, UDP or a protocol numbered between
	// these. None of the numbers is an extension header's. Other packets pass more rules.
	list.begin("TCP and UDP from its own IPv6 address").
		isProtocol(unix.ETH_P_IPV6).nextHeader(unix.IPPROTO_TCP, unix.IPPROTO_UDP).
		isOwn(ip6Source, addr6Len, guard6Set).Return()
	list.begin("TCP and UDP from an IPv6 address made of its MAC").
		isProtocol(unix.ETH_P_IPV6).nextHeader(unix.IPPROTO_TCP, unix.IPPROTO_UDP).isOwnID(ip6SourceID).Return()

	list.guardARP()
	list.guardDiscovery()
	list.guardIPv6()

	// Drop all other protocols. Among these are the protocols of bridges, which would reach the switches of a LAN.
	list.begin("all else").Drop()
}

func (list *rules) guardIPv4() {
	list.begin("IPv4 from its own address").isProtocol(unix.ETH_P_IP).isOwn(ip4Source, Addr4Len, guard4Set).Return()

	// Accept messages from a DHCP client that has no address yet. Such a message does not claim an address, and the
	// server may refuse the request.
	list.begin("DHCP before there is an address").
		isProtocol(unix.ETH_P_IP).isAt(expr.PayloadBaseNetworkHeader, ip4Source, make([]byte, Addr4Len)).
		isL4(unix.IPPROTO_UDP).
		isAt(expr.PayloadBaseTransportHeader, 0, []byte{0, dhcpClient, 0, dhcpServer}). // source and destination port
		Return()

	list.begin("IPv4 from any address, where none is known").isEtherType(unix.ETH_P_IP).leaveFree()
}

func (list *rules) guardARP() {
	list.begin("ARP of another's MAC").
		isEtherType(unix.ETH_P_ARP).isNotOwn(arpSenderMAC, EtherLen, guardMACSet).Drop()
	list.begin("ARP of its own address").isARP(arpForm()).isOwn(arpSenderIP, Addr4Len, guard4Set).Return()

	// Accept ARP probes (RFC 5227). They ask whether a host has an address, and change no neighbour table.
	list.begin("ARP probes").isARP(append(arpForm(), 0, 1)).isNoSender().Return()
	list.begin("ARP of any address, where none is known").isARP(arpForm()).leaveFree()
}

// The types of ICMPv6 messages (RFC 4861, RFC 2710, RFC 3810).
const (
	listenerReport    = 131
	listenerDone      = 132
	routerSolicit     = 133
	routerAdvert      = 134
	neighbourSolicit  = 135
	neighbourAdvert   = 136
	redirectMessage   = 137
	listenerReportTwo = 143
)

// guardDiscovery appends the rules for neighbour discovery (RFC 4861). They check the target address and the MAC in
// the options.
func (list *rules) guardDiscovery() {
	// Drop fragments with extension headers, since a first fragment could end before the header that the rules need.
	list.addSpans([]span{
		{"fragments of hop-by-hop options", unix.IPPROTO_HOPOPTS, unix.IPPROTO_HOPOPTS},
		{"fragments of routing and fragment headers", unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT},
		{"fragments of destination options", unix.IPPROTO_DSTOPTS, unix.IPPROTO_DSTOPTS},
	}, func(x expressions, headers span) {
		x.isEtherType(unix.ETH_P_IPV6).loadFragment(0, 1).byteBetween(byte(headers.from), byte(headers.to)).Drop()
	})

	// Handle later fragments of a packet first. Otherwise a rule would take the beginning of such a fragment for a
	// header.
	list.begin("later fragments from its own IPv6 address").
		isLaterFragment().isOwn(ip6Source, addr6Len, guard6Set).Return()
	list.begin("later fragments from an IPv6 address made of its MAC").
		isLaterFragment().isOwnID(ip6SourceID).Return()
	list.begin("later fragments, where no address is known").isLaterFragment().leaveFree()

	// RFC 6980 forbids fragments of neighbour discovery. This rule also drops messages behind any other extension
	// header, since the rules below use fixed offsets.
	list.begin("neighbour discovery behind extension headers").
		isDiscovery(routerSolicit, redirectMessage).load(expr.PayloadBaseNetworkHeader, ip6NextHeader, 1).
		compare(expr.CmpOpNeq, []byte{unix.IPPROTO_ICMPV6}).Drop()
	list.begin("whether its own IPv6 address is taken").
		isUnspecified(neighbourSolicit).isOwn(ndTarget, addr6Len, guardNDSet).Return()
	list.begin("whether an IPv6 address made of its MAC is taken").
		isUnspecified(neighbourSolicit).isOwnID(ndTargetID).Return()
	list.begin("whether an IPv6 address is taken, where none is known").
		isUnspecified(neighbourSolicit).leaveFree()

	for _, message := range []struct {
		name           string
		from, to       byte
		length, option uint16 // the length before the options, and the offset of the first MAC
	}{
		{"neighbours", neighbourSolicit, neighbourAdvert, ndNeighbourLen, ndOption},
		{"router solicitations", routerSolicit, routerSolicit, ndRouterLen, ndRouterOption},
	} {
		list.begin("more than one option, "+message.name).
			isDiscovery(message.from, message.to).payloadLength(expr.CmpOpGt, message.length+ndOptionLen).Drop()
		list.begin("options with another's MAC, "+message.name).
			isDiscovery(message.from, message.to).payloadLength(expr.CmpOpNeq, message.length).
			isNotOwn(uint32(message.option), EtherLen, guardLinkSet).Drop()
	}
}

func (list *rules) guardIPv6() {
	list.begin("IPv6 from any address, where none is known").isEtherType(unix.ETH_P_IPV6).leaveFree()

	// Drop messages of routers. A pod that may send only from its own addresses cannot forward packets, so it is no
	// router.
	list.begin("router advertisements").isDiscovery(routerAdvert, routerAdvert).Drop()
	list.begin("redirects").isDiscovery(redirectMessage, redirectMessage).Drop()
	list.begin("advertisements of another's IPv6 address").
		isDiscovery(neighbourAdvert, neighbourAdvert).isNotOwn(ndTarget, addr6Len, guardNDSet).
		isNotOwn(ndTargetID, interfaceIDLen, guardIDSet).Drop()
	list.begin("IPv6 from its own address").
		isProtocol(unix.ETH_P_IPV6).isOwn(ip6Source, addr6Len, guard6Set).Return()
	list.begin("IPv6 from an address made of its MAC").isProtocol(unix.ETH_P_IPV6).isOwnID(ip6SourceID).Return()

	// Accept the messages that a host sends before it has a usable address (RFC 4861, RFC 3590).
	list.addSpans([]span{
		{"router solicitations before there is an address", routerSolicit, routerSolicit},
		{"multicast listener reports before there is an address", listenerReportTwo, listenerReportTwo},
		{"multicast listener reports of version 1 before there is an address", listenerReport, listenerReport},
		{"multicast listeners' leave before there is an address", listenerDone, listenerDone},
	}, func(x expressions, types span) {
		x.isUnspecified(byte(types.from)).Return()
	})

	list.begin("neighbour discovery from another's address").isDiscovery(routerSolicit, redirectMessage).Drop()
}
