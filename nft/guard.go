package nft

import (
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// The spoof guard is one chain of the bridge family, for all networks, which sees
// what comes in by a bridge's port before the bridge learns from it. It holds those
// ports to their own addresses that the first of these sets names, and the others
// say what those are. The keys start with the port's name, as the kernel has it
// there for the incoming link.
const (
	guardChain = "guard"

	guardedSet   = "guarded"      // ports
	guardFreeSet = "guard-free"   // ports of which only the MAC is known
	guardMACSet  = "guard-mac"    // the MAC of each
	guard4Set    = "guard4"       // its addresses
	guard6Set    = "guard6"       // and the link-local one that goes with the MAC
	guardNDSet   = "guard-target" // the same, for what neighbour discovery is about
	guardLinkSet = "guard-lladdr" // the MAC, for its link-layer address options
)

// The last two hold what the sets before them hold, as plain numbers: nft has no
// name for those bytes of a packet, and refuses to look up what it takes for a number
// in a set of addresses. A listing of such rules could not be loaded again.
const (
	guardNDLen   = ifnameLen + addr6Len
	guardLinkLen = ifnameLen + etherSlot
)

func guardSets() []set {
	return []set{
		{place: inBridge(guardedSet), keyType: typeIfname, keyLen: ifnameLen},
		{place: inBridge(guardFreeSet), keyType: typeIfname, keyLen: ifnameLen},
		{place: inBridge(guardMACSet), keyType: typeIfname<<typeBits | typeEther, keyLen: portsLen},
		{place: inBridge(guard4Set), keyType: typeIfname<<typeBits | typeIPv4, keyLen: pods4Len},
		{place: inBridge(guard6Set), keyType: typeIfname<<typeBits | typeIPv6, keyLen: pods6Len},
		{
			place: inBridge(guardNDSet), keyType: typeIfname<<typeBits | typeInteger, keyLen: guardNDLen,
			typeof: typeofPortAnd(ndTarget, addr6Len),
		},
		{
			place: inBridge(guardLinkSet), keyType: typeIfname<<typeBits | typeInteger, keyLen: guardLinkLen,
			typeof: typeofPortAnd(ndOption, etherLen),
		},
	}
}

// checkGuard says what is wrong with an endpoint's guard.
func (ep *Endpoint) checkGuard() error {
	const group = 1 // the bit of a MAC that makes it one of many
	switch {
	case ep.GuardedPort == "":
		return nil
	case !isLinkName(ep.GuardedPort):
		return invalid("endpoint %s: guarded port %q is no name of a link", ep.Owner, ep.GuardedPort)
	case len(ep.MAC) != etherLen || ep.MAC[0]&group != 0:
		return invalid("endpoint %s: port %s cannot be guarded: %q is no MAC of a pod", ep.Owner, ep.GuardedPort, ep.MAC)
	}
	return nil
}

// guardElements gives what an endpoint has in the guard's sets.
func (ep *Endpoint) guardElements() []element {
	if ep.GuardedPort == "" {
		return nil
	}
	port := ep.GuardedPort
	list := make([]element, 0, 5+2*len(ep.Addrs))
	add := func(set string, address []byte, pad int) {
		list = append(list, element{set: inBridge(set), key: concat(port, address, pad)})
	}
	add(guardedSet, nil, 0)
	add(guardMACSet, ep.MAC, etherSlot)
	own6 := make([]netip.Addr, 0, 1+len(ep.Addrs))
	for i, a := range ep.Addrs {
		switch {
		case a.Is6():
			own6 = append(own6, a)
		case !slices.Contains(ep.Addrs[:i], a):
			add(guard4Set, a.AsSlice(), 0)
		}
	}
	if len(ep.Addrs) == 0 {
		add(guardFreeSet, nil, 0)
	}
	if len(ep.Addrs) == 0 || len(own6) > 0 {
		add(guardLinkSet, ep.MAC, etherSlot)
	}
	if len(own6) > 0 {
		own6 = append(own6, linkLocal(ep.MAC))
	}
	for i, a := range own6 {
		if !slices.Contains(own6[:i], a) {
			add(guard6Set, a.AsSlice(), 0)
			add(guardNDSet, a.AsSlice(), 0)
		}
	}
	return list
}

// linkLocal is the address that a link has by itself, made of its MAC (RFC 4291,
// appendix A).
func linkLocal(mac net.HardwareAddr) netip.Addr {
	const global = 2 // the bit of an EUI-64 that is inverted
	return netip.AddrFrom16([16]byte{
		0: 0xfe, 1: 0x80,
		8: mac[0] ^ global, 9: mac[1], 10: mac[2], 11: 0xff, 12: 0xfe, 13: mac[3], 14: mac[4], 15: mac[5],
	})
}

// guarded takes a key of one of the guard's sets apart; what it does not hold is
// zero. Of addresses it says nothing: pods have the same in other sets, and there
// none that follows from the MAC.
func (e element) guarded() (port string, mac net.HardwareAddr, ok bool) {
	if !isGuardSet(e.set) || len(e.key) < ifnameLen {
		return "", nil, false
	}
	if e.set.name == guardMACSet && len(e.key) == portsLen {
		mac = net.HardwareAddr(e.key[ifnameLen:][:etherLen])
	}
	port, _, _ = strings.Cut(string(e.key[:ifnameLen]), "\x00")
	return port, mac, true
}

func isGuardSet(at place) bool {
	if at.family != unix.NFPROTO_BRIDGE {
		return false
	}
	return slices.ContainsFunc(guardSets(), func(s set) bool { return s.place == at })
}

// addGuard adds what guards the network's pods: the same for all networks.
func (rs *ruleset) addGuard(n *Network) {
	if !n.Guard {
		// The chain may be another network's too, and goes with the table.
		return
	}
	rs.needTable(unix.NFPROTO_BRIDGE)
	rs.sets = append(rs.sets, guardSets()...)
	rs.chains = append(rs.chains, guard())
}

// needTable has the table of a family made.
func (rs *ruleset) needTable(family uint8) {
	if !slices.Contains(rs.tables, family) {
		rs.tables = append(rs.tables, family)
	}
}

const (
	// The bridge's hooks have the numbers of the others' (uapi linux/netfilter_bridge.h).
	bridgePreRouting = unix.NF_INET_PRE_ROUTING
	// Before other tables, and before bridged packets are shown to iptables.
	priorityGuard = -300
)

// guard lets pass what a port may send, and drops the rest: but for the first rule,
// what is not said to be right is wrong. What is right leaves the chain for those of
// other tables, and for the guards of ours that may come behind it.
func guard() chain {
	ch := chain{
		place: inBridge(guardChain), kind: "filter", hook: bridgePreRouting, priority: priorityGuard,
		settings: "spoof guard",
	}
	ch.add("ports that are not guarded", func(x expressions) {
		x.meta(unix.NFT_META_IIFNAME, first)
		x.lookupNone(guardedSet)
		x.leave()
	})
	ch.add("from another's MAC", func(x expressions) {
		x.portAnd(unix.NFT_PAYLOAD_LL_HEADER, etherSource, etherLen)
		x.lookupNone(guardMACSet)
		x.drop()
	})
	// Others may take the tag off and look at what is behind it; the rules below would
	// see IP through it, and ARP not at all.
	ch.add("VLAN tags", func(x expressions) { x.isEtherType(unix.ETH_P_8021Q); x.drop() })
	ch.add("outer VLAN tags", func(x expressions) { x.isEtherType(unix.ETH_P_8021AD); x.drop() })
	ch.guardIPv4()
	// Most of IPv6, with nothing in between: the rest takes the long way.
	ch.add("TCP and UDP from its own IPv6 address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IPV6)
		x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, ip6NextHeader, 1, first)
		x.within(unix.IPPROTO_TCP, unix.IPPROTO_UDP) // and others, none of them a header of IPv6's own
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ip6Source, addr6Len)
		x.lookup(guard6Set)
		x.leave()
	})
	ch.guardARP()
	ch.guardDiscovery()
	ch.guardIPv6()
	// Bridging protocols among them, which would reach the LAN's switches.
	ch.add("all else", expressions.drop)
	return ch
}

func (ch *chain) guardIPv4() {
	ch.add("IPv4 from its own address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IP)
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ip4Source, addr4Len)
		x.lookup(guard4Set)
		x.leave()
	})
	// Of a DHCP client that has no address yet. It reaches a server that may as well
	// refuse it, and says nothing of anyone's address.
	ch.add("DHCP before there is an address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IP)
		x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, ip4Source, addr4Len, first)
		x.compare(unix.NFT_CMP_EQ, make([]byte, addr4Len))
		x.isL4(unix.IPPROTO_UDP)
		x.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 4, first)
		x.compare(unix.NFT_CMP_EQ, []byte{0, 68, 0, 67}) // source and destination port
		x.leave()
	})
	ch.add("IPv4 from any address, where none is known", func(x expressions) {
		x.isEtherType(unix.ETH_P_IP)
		x.isFree()
	})
}

func (ch *chain) guardARP() {
	ch.add("ARP of another's MAC", func(x expressions) {
		x.isEtherType(unix.ETH_P_ARP)
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, arpSenderMAC, etherLen)
		x.lookupNone(guardMACSet)
		x.drop()
	})
	ch.add("ARP of its own address", func(x expressions) {
		x.isEtherType(unix.ETH_P_ARP)
		x.isARPForm()
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, arpSenderIP, addr4Len)
		x.lookup(guard4Set)
		x.leave()
	})
	// RFC 5227: whether anyone has the address. Nobody learns anything by it.
	ch.add("ARP probes", func(x expressions) {
		x.isEtherType(unix.ETH_P_ARP)
		x.isARPProbe()
		x.leave()
	})
	ch.add("ARP of any address, where none is known", func(x expressions) {
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

// guardDiscovery is for neighbour discovery (RFC 4861): who it is of, and which MAC
// its options give.
func (ch *chain) guardDiscovery() {
	// The first fragment could end before anything shows of what it is.
	for _, headers := range []struct {
		name        string
		first, last byte
	}{
		{"hop-by-hop options", unix.IPPROTO_HOPOPTS, unix.IPPROTO_HOPOPTS},
		{"routing and fragment headers", unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT},
		{"destination options", unix.IPPROTO_DSTOPTS, unix.IPPROTO_DSTOPTS},
	} {
		ch.add("fragments of "+headers.name, func(x expressions) {
			x.isEtherType(unix.ETH_P_IPV6)
			x.fragment(0, 1)
			x.within(headers.first, headers.last)
			x.drop()
		})
	}
	// The kernel would take what they start with for a header.
	ch.add("later fragments from its own IPv6 address", func(x expressions) {
		x.isLaterFragment()
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ip6Source, addr6Len)
		x.lookup(guard6Set)
		x.leave()
	})
	ch.add("later fragments, where no address is known", func(x expressions) {
		x.isLaterFragment()
		x.isFree()
	})
	// RFC 6980, and more: the rules below look at fixed places.
	ch.add("neighbour discovery behind extension headers", func(x expressions) {
		x.isDiscovery(routerSolicit, redirectMessage)
		x.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, ip6NextHeader, 1, first)
		x.compare(unix.NFT_CMP_NEQ, []byte{unix.IPPROTO_ICMPV6})
		x.drop()
	})
	ch.add("whether its own IPv6 address is taken", func(x expressions) {
		x.isUnspecified(neighbourSolicit)
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ndTarget, addr6Len)
		x.lookup(guardNDSet)
		x.leave()
	})
	ch.add("whether an IPv6 address is taken, where none is known", func(x expressions) {
		x.isUnspecified(neighbourSolicit)
		x.isFree()
	})
	ch.add("more than one option, neighbours", func(x expressions) {
		x.isDiscovery(neighbourSolicit, neighbourAdvert)
		x.longer(unix.NFT_CMP_GT, ndNeighbourLen+ndOptionLen)
		x.drop()
	})
	ch.add("options with another's MAC, neighbours", func(x expressions) {
		x.isDiscovery(neighbourSolicit, neighbourAdvert)
		x.longer(unix.NFT_CMP_NEQ, ndNeighbourLen)
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ndOption, etherLen)
		x.lookupNone(guardLinkSet)
		x.drop()
	})
	ch.add("more than one option, router solicitations", func(x expressions) {
		x.isDiscovery(routerSolicit, routerSolicit)
		x.longer(unix.NFT_CMP_GT, ndRouterLen+ndOptionLen)
		x.drop()
	})
	ch.add("options with another's MAC, router solicitations", func(x expressions) {
		x.isDiscovery(routerSolicit, routerSolicit)
		x.longer(unix.NFT_CMP_NEQ, ndRouterLen)
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ndRouterOption, etherLen)
		x.lookupNone(guardLinkSet)
		x.drop()
	})
}

func (ch *chain) guardIPv6() {
	ch.add("IPv6 from any address, where none is known", func(x expressions) {
		x.isEtherType(unix.ETH_P_IPV6)
		x.isFree()
	})
	// Who may send from its own addresses alone can be nobody's router.
	ch.add("router advertisements", func(x expressions) { x.isDiscovery(routerAdvert, routerAdvert); x.drop() })
	ch.add("redirects", func(x expressions) { x.isDiscovery(redirectMessage, redirectMessage); x.drop() })
	ch.add("advertisements of another's IPv6 address", func(x expressions) {
		x.isDiscovery(neighbourAdvert, neighbourAdvert)
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ndTarget, addr6Len)
		x.lookupNone(guardNDSet)
		x.drop()
	})
	ch.add("IPv6 from its own address", func(x expressions) {
		x.isProtocol(unix.ETH_P_IPV6)
		x.portAnd(unix.NFT_PAYLOAD_NETWORK_HEADER, ip6Source, addr6Len)
		x.lookup(guard6Set)
		x.leave()
	})
	// What a host says before it has an address that it can use (RFC 4861, RFC 3590).
	for _, kind := range []struct {
		name string
		typ  byte
	}{
		{"router solicitations", routerSolicit},
		{"multicast listener reports", listenerReportTwo},
		{"multicast listener reports of version 1", listenerReport},
		{"multicast listeners' leave", listenerDone},
	} {
		ch.add(kind.name+" before there is an address", func(x expressions) {
			x.isUnspecified(kind.typ)
			x.leave()
		})
	}
}
