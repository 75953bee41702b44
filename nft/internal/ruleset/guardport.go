package ruleset

import (
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The names of the guard's sets, which are in the table of family bridge and shared by all networks. guardedSet
// contains the guarded ports. The other sets contain the MACs and addresses that these ports may use. Each key begins
// with the name of the port, which is the incoming link of its frames.
const (
	guardedSet   = "guarded"      // guarded ports
	guardFreeSet = "guard-free"   // ports with a known MAC and unknown addresses
	guardMACSet  = "guard-mac"    // each port's MAC
	guard4Set    = "guard4"       // each port's IPv4 addresses
	guard6Set    = "guard6"       // each port's IPv6 addresses, also the link-local one made from the MAC
	guardNDSet   = "guard-target" // the addresses in guard6, as targets of neighbour discovery
	guardLinkSet = "guard-lladdr" // each port's MAC, for link-layer addresses inside messages
	guardIDSet   = "guard-id"     // each port's interface identifier made from the MAC, for SLAAC

	guardUntrustedSet = "guard-untrusted" // ports of hosts that must not be servers or routers
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
	set := func(name string, part, length uint32, typeof []byte) Set {
		return Set{Place: InBridge(name), KeyType: nftnl.TypeIfname<<nftnl.TypeBits | part, KeyLen: length,
			typeof: typeof}
	}
	ports := func(name string) Set { return linkSet(InBridge(name)) }
	return []Set{
		ports(guardedSet),
		ports(guardFreeSet),
		set(guardMACSet, nftnl.TypeEther, portsLen, nil),
		set(guard4Set, nftnl.TypeIPv4, pods4Len, nil),
		set(guard6Set, nftnl.TypeIPv6, pods6Len, nil),
		set(guardNDSet, nftnl.TypeInteger, pods6Len, typeofPortAnd(ndTarget, addr6Len)),
		set(guardLinkSet, nftnl.TypeInteger, portsLen, typeofPortAnd(ndOption, EtherLen)),
		set(guardIDSet, nftnl.TypeInteger, IfnameLen+interfaceIDLen, typeofPortAnd(ip6SourceID, interfaceIDLen)),
		ports(guardUntrustedSet),
		ports(guardLeasingSet),
	}
}

// GuardedPort is a port of a bridge with the addresses that the pod behind it may use. The fields have the meaning of
// the fields of nft.Endpoint.
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

// own returns the addresses that the port may send from, without duplicates. With SLAAC, it leaves out IPv6 addresses
// that end with the interface identifier of the MAC, since guard-id permits them.
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
