package ruleset

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The chain guard lets the permitted packets of a port pass, and drops the rest. Except for the first rule, each rule
// lets some packets leave the chain, and the chain drops the others. Other tables, and our chains behind it, see the
// packets that leave.
func (list *rules) addGuard() {
	list.add("ports that are not guarded", func(x expressions) {
		x.linkNotIn(expr.MetaKeyIIFNAME, guardedSet)
		x.Leave()
	})
	list.add("from another's MAC", func(x expressions) {
		x.portNotIn(expr.PayloadBaseLLHeader, etherSource, EtherLen, guardMACSet)
		x.Drop()
	})
	list.add("from its own MAC, where no more is asked", func(x expressions) {
		x.linkIn(expr.MetaKeyIIFNAME, guardLeasingSet)
		x.linkNotIn(expr.MetaKeyIIFNAME, guardUntrustedSet)
		x.Leave()
	})

	// Others may remove the tag and look at the content. The rules below would see IP through it, and ARP not at all.
	list.add("VLAN tags", func(x expressions) { x.isEtherType(unix.ETH_P_8021Q); x.Drop() })
	list.add("outer VLAN tags", func(x expressions) { x.isEtherType(unix.ETH_P_8021AD); x.Drop() })
	list.guardIPv4()

	// This matches most of IPv6, if no other headers are in between. Other packets pass more rules.
	list.add("TCP and UDP from its own IPv6 address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IPV6)
		x.Payload(expr.PayloadBaseNetworkHeader, ip6NextHeader, 1, nftnl.First)

		// and protocols between their numbers, none of them an IPv6 extension header
		x.within(unix.IPPROTO_TCP, unix.IPPROTO_UDP)
		x.portIn(expr.PayloadBaseNetworkHeader, ip6Source, addr6Len, guard6Set)
		x.Leave()
	})

	list.add("TCP and UDP from an IPv6 address made of its MAC", func(x expressions) {
		x.isProtocol(unix.ETH_P_IPV6)
		x.Payload(expr.PayloadBaseNetworkHeader, ip6NextHeader, 1, nftnl.First)
		x.within(unix.IPPROTO_TCP, unix.IPPROTO_UDP)
		x.isOwnID(ip6SourceID)
		x.Leave()
	})

	list.guardARP()
	list.guardDiscovery()
	list.guardIPv6()

	// These include bridge protocols, which would reach the LAN's switches.
	list.add("all else", expressions.Drop)
}

func (list *rules) guardIPv4() {
	list.add("IPv4 from its own address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IP)
		x.portIn(expr.PayloadBaseNetworkHeader, ip4Source, Addr4Len, guard4Set)
		x.Leave()
	})

	// Accept messages from a DHCP client that has no address yet. Such a message claims no address, and the server may
	// refuse it.
	list.add("DHCP before there is an address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IP)
		x.isAt(expr.PayloadBaseNetworkHeader, ip4Source, make([]byte, Addr4Len))
		x.isL4(unix.IPPROTO_UDP)
		x.isAt(expr.PayloadBaseTransportHeader, 0, []byte{0, 68, 0, 67}) // source and destination port
		x.Leave()
	})

	list.add("IPv4 from any address, where none is known", func(x expressions) {
		x.isEtherType(unix.ETH_P_IP)
		x.isFree()
	})
}

func (list *rules) guardARP() {
	list.add("ARP of another's MAC", func(x expressions) {
		x.isEtherType(unix.ETH_P_ARP)
		x.portNotIn(expr.PayloadBaseNetworkHeader, arpSenderMAC, EtherLen, guardMACSet)
		x.Drop()
	})
	list.add("ARP of its own address", func(x expressions) {
		x.isEtherType(unix.ETH_P_ARP)
		x.isARPForm()
		x.portIn(expr.PayloadBaseNetworkHeader, arpSenderIP, Addr4Len, guard4Set)
		x.Leave()
	})

	// RFC 5227: they ask whether a host has the address, and change no neighbour table.
	list.add("ARP probes", func(x expressions) {
		x.isEtherType(unix.ETH_P_ARP)
		x.isARPProbe()
		x.Leave()
	})
	list.add("ARP of any address, where none is known", func(x expressions) {
		x.isEtherType(unix.ETH_P_ARP)
		x.isARPForm()
		x.isFree()
	})
}

// ICMPv6 types (RFC 4861, RFC 2710, RFC 3810).
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

// guardDiscovery appends the rules for neighbour discovery (RFC 4861): they check the address in question, and the
// MAC in the options.
func (list *rules) guardDiscovery() {
	// The first fragment could end before its content can be recognized.
	list.addSpans([]span{
		{"fragments of hop-by-hop options", unix.IPPROTO_HOPOPTS, unix.IPPROTO_HOPOPTS},
		{"fragments of routing and fragment headers", unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT},
		{"fragments of destination options", unix.IPPROTO_DSTOPTS, unix.IPPROTO_DSTOPTS},
	}, func(x expressions, headers span) {
		x.isEtherType(unix.ETH_P_IPV6)
		x.fragment(0, 1)
		x.within(byte(headers.from), byte(headers.to))
		x.Drop()
	})

	// The kernel would read their beginning as a header.
	list.add("later fragments from its own IPv6 address", func(x expressions) {
		x.isLaterFragment()
		x.portIn(expr.PayloadBaseNetworkHeader, ip6Source, addr6Len, guard6Set)
		x.Leave()
	})
	list.add("later fragments from an IPv6 address made of its MAC", func(x expressions) {
		x.isLaterFragment()
		x.isOwnID(ip6SourceID)
		x.Leave()
	})
	list.add("later fragments, where no address is known", func(x expressions) {
		x.isLaterFragment()
		x.isFree()
	})

	// RFC 6980, and more: the rules below look at fixed offsets.
	list.add("neighbour discovery behind extension headers", func(x expressions) {
		x.isDiscovery(routerSolicit, redirectMessage)
		x.Payload(expr.PayloadBaseNetworkHeader, ip6NextHeader, 1, nftnl.First)
		x.Compare(expr.CmpOpNeq, []byte{unix.IPPROTO_ICMPV6})
		x.Drop()
	})
	list.add("whether its own IPv6 address is taken", func(x expressions) {
		x.isUnspecified(neighbourSolicit)
		x.portIn(expr.PayloadBaseNetworkHeader, ndTarget, addr6Len, guardNDSet)
		x.Leave()
	})
	list.add("whether an IPv6 address made of its MAC is taken", func(x expressions) {
		x.isUnspecified(neighbourSolicit)
		x.isOwnID(ndTargetID)
		x.Leave()
	})
	list.add("whether an IPv6 address is taken, where none is known", func(x expressions) {
		x.isUnspecified(neighbourSolicit)
		x.isFree()
	})
	list.add("more than one option, neighbours", func(x expressions) {
		x.isDiscovery(neighbourSolicit, neighbourAdvert)
		x.longer(expr.CmpOpGt, ndNeighbourLen+ndOptionLen)
		x.Drop()
	})
	list.add("options with another's MAC, neighbours", func(x expressions) {
		x.isDiscovery(neighbourSolicit, neighbourAdvert)
		x.longer(expr.CmpOpNeq, ndNeighbourLen)
		x.portNotIn(expr.PayloadBaseNetworkHeader, ndOption, EtherLen, guardLinkSet)
		x.Drop()
	})
	list.add("more than one option, router solicitations", func(x expressions) {
		x.isDiscovery(routerSolicit, routerSolicit)
		x.longer(expr.CmpOpGt, ndRouterLen+ndOptionLen)
		x.Drop()
	})
	list.add("options with another's MAC, router solicitations", func(x expressions) {
		x.isDiscovery(routerSolicit, routerSolicit)
		x.longer(expr.CmpOpNeq, ndRouterLen)
		x.portNotIn(expr.PayloadBaseNetworkHeader, ndRouterOption, EtherLen, guardLinkSet)
		x.Drop()
	})
}

func (list *rules) guardIPv6() {
	list.add("IPv6 from any address, where none is known", func(x expressions) {
		x.isEtherType(unix.ETH_P_IPV6)
		x.isFree()
	})

	// A pod that may send only from its own addresses cannot be a router.
	list.add("router advertisements", func(x expressions) { x.isDiscovery(routerAdvert, routerAdvert); x.Drop() })
	list.add("redirects", func(x expressions) { x.isDiscovery(redirectMessage, redirectMessage); x.Drop() })
	list.add("advertisements of another's IPv6 address", func(x expressions) {
		x.isDiscovery(neighbourAdvert, neighbourAdvert)
		x.portNotIn(expr.PayloadBaseNetworkHeader, ndTarget, addr6Len, guardNDSet)
		x.portNotIn(expr.PayloadBaseNetworkHeader, ndTargetID, interfaceIDLen, guardIDSet)
		x.Drop()
	})
	list.add("IPv6 from its own address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IPV6)
		x.portIn(expr.PayloadBaseNetworkHeader, ip6Source, addr6Len, guard6Set)
		x.Leave()
	})
	list.add("IPv6 from an address made of its MAC", func(x expressions) {
		x.isProtocol(unix.ETH_P_IPV6)
		x.isOwnID(ip6SourceID)
		x.Leave()
	})

	// A host sends these before it has a usable address (RFC 4861, RFC 3590).
	list.addSpans([]span{
		{"router solicitations before there is an address", routerSolicit, routerSolicit},
		{"multicast listener reports before there is an address", listenerReportTwo, listenerReportTwo},
		{"multicast listener reports of version 1 before there is an address", listenerReport, listenerReport},
		{"multicast listeners' leave before there is an address", listenerDone, listenerDone},
	}, func(x expressions, types span) {
		x.isUnspecified(byte(types.from))
		x.Leave()
	})

	list.add("neighbour discovery from another's address", func(x expressions) {
		x.isDiscovery(routerSolicit, redirectMessage)
		x.Drop()
	})
}
