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
	guardLinkSet = "guard-lladdr" // the MAC, for link-layer addresses inside of messages
	guardIDSet   = "guard-id"     // the interface identifier that goes with the MAC, of SLAAC

	guardUntrustedSet = "guard-untrusted" // ports of hosts that are no servers or routers
	guardLeasingSet   = "guard-leasing"   // those of them that have no IPv4 address yet
)

// Those of neighbour discovery hold what the sets before them hold, as plain numbers:
// nft has no name for those bytes of a packet, and refuses to look up what it takes for
// a number in a set of addresses. A listing of such rules could not be loaded again.
const (
	guardNDLen   = ifnameLen + addr6Len
	guardLinkLen = ifnameLen + etherSlot
	guardIDLen   = ifnameLen + interfaceIDLen
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
		{
			place: inBridge(guardIDSet), keyType: typeIfname<<typeBits | typeInteger, keyLen: guardIDLen,
			typeof: typeofPortAnd(ip6SourceID, interfaceIDLen),
		},
		{place: inBridge(guardUntrustedSet), keyType: typeIfname, keyLen: ifnameLen},
		{place: inBridge(guardLeasingSet), keyType: typeIfname, keyLen: ifnameLen},
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
	list := make([]element, 0, 7+2*len(ep.Addrs))
	add := func(set string, address []byte, pad int) {
		list = append(list, element{set: inBridge(set), key: concat(port, address, pad)})
	}
	own4, own6 := ep.guardedAddrs()
	free := len(ep.Addrs) == 0 && !ep.SLAAC && !ep.Untrusted
	add(guardedSet, nil, 0)
	add(guardMACSet, ep.MAC, etherSlot)
	for _, a := range own4 {
		add(guard4Set, a.AsSlice(), 0)
	}
	if free {
		add(guardFreeSet, nil, 0)
	}
	if free || ep.SLAAC || ep.Untrusted || len(own6) > 0 {
		add(guardLinkSet, ep.MAC, etherSlot)
	}
	for _, a := range own6 {
		add(guard6Set, a.AsSlice(), 0)
		add(guardNDSet, a.AsSlice(), 0)
	}
	if ep.SLAAC {
		id := interfaceID(ep.MAC)
		add(guardIDSet, id[:], 0)
	}
	if ep.Untrusted {
		add(guardUntrustedSet, nil, 0)
		if len(own4) == 0 {
			add(guardLeasingSet, nil, 0)
		}
	}
	return list
}

// leftovers gives what a guarded endpoint should not have in the sets, but may have had
// as another one: as one without addresses, or with SLAAC.
func (ep *Endpoint) leftovers() []element {
	if ep.GuardedPort == "" {
		return nil
	}
	bare := Endpoint{Bridge: ep.Bridge, MAC: ep.MAC, GuardedPort: ep.GuardedPort}
	leasing := bare
	leasing.SLAAC, leasing.Untrusted = true, true
	known := ep.elements()
	var list []element
	for _, el := range append(bare.elements(), leasing.guardElements()...) {
		if !slices.ContainsFunc(known, el.equal) {
			known, list = append(known, el), append(list, el)
		}
	}
	return list
}

// guardedAddrs are the addresses that a guarded endpoint may send from, each once;
// with SLAAC, those that follow from its MAC go without saying.
func (ep *Endpoint) guardedAddrs() (own4, own6 []netip.Addr) {
	all := ep.Addrs
	if slices.ContainsFunc(all, netip.Addr.Is6) {
		all = append(slices.Clip(all), linkLocal(ep.MAC))
	}
	id := interfaceID(ep.MAC)
	for i, a := range all {
		b := a.As16()
		switch {
		case slices.Contains(all[:i], a), ep.SLAAC && a.Is6() && [8]byte(b[8:]) == id:
		case a.Is4():
			own4 = append(own4, a)
		default:
			own6 = append(own6, a)
		}
	}
	return own4, own6
}

// interfaceID is what addresses end in that are made of a MAC: a modified EUI-64
// (RFC 4291, appendix A).
func interfaceID(mac net.HardwareAddr) [interfaceIDLen]byte {
	const global = 2 // the bit that is inverted
	return [...]byte{mac[0] ^ global, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]}
}

// linkLocal is the address that a link has by itself, if it is made of its MAC.
func linkLocal(mac net.HardwareAddr) netip.Addr {
	a := [16]byte{0: 0xfe, 1: 0x80}
	id := interfaceID(mac)
	copy(a[8:], id[:])
	return netip.AddrFrom16(a)
}

// noteGuard adds what an element of the guard's sets tells of an endpoint; it is false
// for any other. Of addresses it says nothing: pods have the same in other sets, and
// there none that follows from the MAC.
func (ep *Endpoint) noteGuard(el *elementState) bool {
	if !isGuardSet(el.set) || len(el.key) < ifnameLen {
		return false
	}
	ep.GuardedPort, _, _ = strings.Cut(string(el.key[:ifnameLen]), "\x00")
	switch el.set.name {
	case guardMACSet:
		if len(el.key) == portsLen {
			ep.MAC = net.HardwareAddr(el.key[ifnameLen:][:etherLen])
		}
	case guardIDSet:
		ep.SLAAC = true
	case guardUntrustedSet:
		ep.Untrusted = true
	}
	return true
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
	rs.chains = append(rs.chains, guard(), untrusted())
}

// needTable has the table of a family made.
func (rs *ruleset) needTable(family uint8) {
	if !slices.Contains(rs.tables, family) {
		rs.tables = append(rs.tables, family)
	}
}
