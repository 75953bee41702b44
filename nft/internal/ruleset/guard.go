package ruleset

import (
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The guard restricts the frames that a pod may send through its port (GuardedPort).
//
// The chain guard sees frames when they come in by a port, before the bridge learns from them and before other rules
// run. It checks Ethernet, ARP, IP and neighbour discovery. So a pod whose addresses are known cannot pose as the host
// or as a router. The chain drops frames with any VLAN tag, and all protocols except IP and ARP, such as STP, LLDP and
// PPPoE. A port with nft.GuardMAC is only checked for its MAC. A frame from a port without a guard costs two set
// lookups.
//
// The chain untrusted applies to pods that must be hosts only. It keeps them from posing as DHCP or DHCPv6 servers and
// as multicast routers, and from sending redirects. The chains groups, groups-input and from-pods also apply to ports
// without a guard.
//
// The guard has limits. It does not limit rates. A pod may ask DHCP servers for any number of addresses with
// different client identifiers, which rules cannot read. The guard does not look at names in mDNS, LLMNR or NetBIOS,
// or at routing protocols over TCP.

const quietPrefix = "quiet-"

// Priorities in the bridge family. Its hooks have the same numbers as those of other families (uapi
// linux/netfilter_bridge.h).
const (
	// priorityGuard lets our chains run before other tables, and before the kernel passes bridged packets to iptables.
	priorityGuard = -300
	// priorityUntrusted and priorityFromPods are the priorities of the chains untrusted and from-pods. The chain
	// untrusted runs after the chain guard, and from-pods after it.
	priorityUntrusted = priorityGuard + 1
	priorityFromPods  = priorityUntrusted + 1

	priorityBridged = -200 // "filter" in nft's names for the family
)

// PodGroup is the link group (IFLA_GROUP) of pods' ports that the rules for multicast queries and listener reports
// apply to. These rules also apply to GatewayGroup. A pod that is a multicast router needs all reports: remove its
// port from the group with `ip link set PORT group 0`.
const PodGroup = 0x746f

// addGuard adds the chains that guard pods. All networks share them. If the network needs no guard, addGuard does not
// mark existing chains for deletion, since another network may need them. RemoveNetwork deletes the chains together
// with the table.
func (rs *Ruleset) addGuard(n *Network) {
	if n.Groups || n.Guard {
		rs.filter(InBridge("groups"), unix.NF_INET_PRE_ROUTING, priorityGuard, "link-local groups", (*rules).addGroups)

		// The chain groups-input sees the frames that the bridge passes to the host.
		rs.filter(InBridge("groups-input"), unix.NF_INET_LOCAL_IN, priorityGuard, "groups, servers",
			(*rules).addTowardHost)
		rs.filter(InBridge("from-pods"), unix.NF_INET_PRE_ROUTING, priorityFromPods, "tags, queries",
			(*rules).addFromPods)
	}

	if n.Guard {
		const settings = "spoof guard, or MAC alone"
		rs.filter(InBridge("guard"), unix.NF_INET_PRE_ROUTING, priorityGuard, settings, (*rules).addGuard)
		rs.filter(InBridge("untrusted"), unix.NF_INET_PRE_ROUTING, priorityUntrusted, "hosts only",
			(*rules).addUntrusted)
	}
}

// addReports adds the network's chain that drops multicast listener reports at ports of pods. Without DropReports, it
// marks the chain for deletion.
func (rs *Ruleset) addReports(n *Network) {
	if !n.DropReports {
		rs.gone = append(rs.gone, InBridge(quietPrefix+n.Key))
		return
	}
	settings := "quiet groups 0x" + strconv.FormatUint(GatewayGroup, 16) + " and on"
	rs.filter(InBridge(quietPrefix+n.Key), unix.NF_INET_FORWARD, priorityBridged, settings, (*rules).addReports)
}

// addReports appends rules that drop multicast listener reports on their way out by pods' ports. At this hook, the
// bridge has already learned from the reports (multicast snooping).
func (list *rules) addReports() {
	list.begin("all but ICMPv6").isNotL4(unix.IPPROTO_ICMPV6).Return()
	list.begin("multicast listener reports to pods").
		isPodGroup(expr.MetaKeyOIFGROUP).isDiscovery(listenerReportTwo, listenerReportTwo).Drop()
}

// The names of the guard's sets, which are in the table of family bridge and shared by all networks. Each key begins
// with the name of the port, which is the incoming link of its frames.
const (
	guardedSet   = "guarded"      // guarded ports
	guardFreeSet = "guard-free"   // ports with a known MAC and unknown addresses
	guardMACSet  = "guard-mac"    // each port's MAC
	guard4Set    = "guard4"       // each port's IPv4 addresses
	guard6Set    = "guard6"       // each port's IPv6 addresses, also the link-local one made from the MAC
	guardNDSet   = "guard-target" // the addresses in guard6, as targets of neighbour discovery
	guardLinkSet = "guard-lladdr" // MACs as in guard-mac, for link-layer addresses inside messages; not of all ports
	guardIDSet   = "guard-id"     // each port's interface identifier made from the MAC, for SLAAC

	guardUntrustedSet = "guard-untrusted" // ports of pods that must not be servers or routers
	// guardLeasingSet contains two kinds of ports: those in guard-untrusted that have no IPv4 address yet, and those
	// for which only the MAC is checked (nft.GuardMAC).
	guardLeasingSet = "guard-leasing"
)

// guardSets returns the sets of the guard. GuardedPort.Elements returns the elements for them.
//
// The sets for neighbour discovery repeat addresses and MACs of other sets, but as plain numbers. nft has no name for
// these bytes of a packet, and refuses to look up a number in a set of addresses. If the rules used the other sets,
// nft could not load its own listing of the rules again.
func guardSets() []Set {
	ports := func(name string, parts ...uint32) Set {
		return setOf(InBridge(name), append([]uint32{nftnl.TypeIfname}, parts...)...)
	}
	numbers := func(name string, offset, length, padded uint32) Set {
		s := ports(name, nftnl.TypeInteger)
		s.KeyLen, s.typeof = IfnameLen+padded, typeofPortAnd(offset, length)
		return s
	}
	return []Set{
		ports(guardedSet),
		ports(guardFreeSet),
		ports(guardMACSet, nftnl.TypeEther),
		ports(guard4Set, nftnl.TypeIPv4),
		ports(guard6Set, nftnl.TypeIPv6),
		numbers(guardNDSet, ndTarget, addr6Len, addr6Len),
		numbers(guardLinkSet, ndOption, EtherLen, EtherSlot),
		numbers(guardIDSet, ip6SourceID, interfaceIDLen, interfaceIDLen),
		ports(guardUntrustedSet),
		ports(guardLeasingSet),
	}
}

// GuardedPort is a port of a bridge with the addresses that the pod behind it may use. MAC, Addrs and SLAAC have the
// meaning of the fields of nft.Endpoint. MACOnly and Untrusted stand for nft.GuardMAC and nft.GuardUntrusted.
type GuardedPort struct {
	Name                      string
	MAC                       net.HardwareAddr
	Addrs                     []netip.Addr
	SLAAC, MACOnly, Untrusted bool
}

// Elements returns the port's elements in the sets of guardSets.
func (p *GuardedPort) Elements() []Element {
	list := make([]Element, 0, 7+2*len(p.Addrs))
	add := func(set string, rest []byte, pad int) {
		list = append(list, Element{Set: InBridge(set), Key: nftnl.LinkKey(p.Name, rest, pad)})
	}
	own4, own6 := p.own()
	free := len(p.Addrs) == 0 && !p.SLAAC && !p.Untrusted
	add(guardedSet, nil, 0)
	add(guardMACSet, p.MAC, EtherSlot)
	for _, a := range own4 {
		add(guard4Set, a.AsSlice(), 0)
	}

	if free {
		add(guardFreeSet, nil, 0)
	}

	if free || p.SLAAC || p.Untrusted || len(own6) > 0 {
		add(guardLinkSet, p.MAC, EtherSlot)
	}

	for _, a := range own6 {
		add(guard6Set, a.AsSlice(), 0)
		add(guardNDSet, a.AsSlice(), 0)
	}

	if p.SLAAC {
		own := ident.LinkLocal(p.MAC).As16()
		add(guardIDSet, own[8:], 0)
	}

	if p.MACOnly {
		add(guardLeasingSet, nil, 0)
	}

	if p.Untrusted {
		add(guardUntrustedSet, nil, 0)
		if len(own4) == 0 {
			add(guardLeasingSet, nil, 0)
		}
	}

	return list
}

// own returns the IPv4 and the IPv6 addresses that the port may send from, without duplicates. With SLAAC, it leaves
// out IPv6 addresses that end with the interface identifier of the MAC, since guard-id permits them.
func (p *GuardedPort) own() (own4, own6 []netip.Addr) {
	all := p.Addrs
	if slices.ContainsFunc(all, netip.Addr.Is6) {
		all = append(slices.Clip(all), ident.LinkLocal(p.MAC))
	}

	for i, a := range all {
		switch {
		case slices.Contains(all[:i], a), p.SLAAC && a.Is6() && ident.EndsAlike(a, ident.LinkLocal(p.MAC)):
		case a.Is4():
			own4 = append(own4, a)
		default:
			own6 = append(own6, a)
		}
	}

	return own4, own6
}

// addGuard appends the rules of the chain guard, which accepts the packets that a port may send and drops all others. A
// rule accepts packets by ending the chain for them (Return). Such packets go on to our later chains and to other
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

	// Drop all other frames. Among these are the protocols of bridges, which would reach the switches of a LAN.
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

// guardDiscovery appends the rules for neighbour discovery (RFC 4861). They check the target of duplicate address
// detection and the MAC in the options. guardIPv6 checks the target of advertisements.
func (list *rules) guardDiscovery() {
	// Drop fragments whose fragment header is followed by a header of hop-by-hop, routing, fragment or destination
	// options. The first fragment could end before the header that the rules need.
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
