package ruleset

import (
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The guard is one chain of the bridge family, for all networks. It sees frames that come in by a bridge's port
// before the bridge learns from them. It restricts the ports in the first of these sets to their own addresses, which
// the other sets contain. The keys begin with the port's name, as the kernel has it there for the incoming link.
const (
	guardedSet   = "guarded"      // ports
	guardFreeSet = "guard-free"   // ports with only the MAC known
	guardMACSet  = "guard-mac"    // the MAC of each
	guard4Set    = "guard4"       // its addresses
	guard6Set    = "guard6"       // its addresses, and the link-local one made from the MAC
	guardNDSet   = "guard-target" // the same addresses, as targets of neighbour discovery
	guardLinkSet = "guard-lladdr" // the MAC, for link-layer addresses inside messages
	guardIDSet   = "guard-id"     // the interface identifier made from the MAC, for SLAAC

	guardUntrustedSet = "guard-untrusted" // ports of hosts that must not be servers or routers
	// The ports of guard-untrusted without an IPv4 address yet, and of the other ports those that are held to their
	// MAC alone.
	guardLeasingSet = "guard-leasing"
)

// guardSets returns the sets that the guard's rules look into. GuardedPort.Elements are for them.
//
// The sets for neighbour discovery have the content of the sets before them, as plain numbers. nft has no name for
// those bytes of a packet, and refuses to look up a number in a set of addresses. So a listing of such rules could
// not be loaded again.
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

// GuardedPort is a port of a bridge, with the permitted addresses of the pod behind it: see the fields of an
// nft.Endpoint.
type GuardedPort struct {
	Name                      string
	MAC                       net.HardwareAddr
	Addrs                     []netip.Addr
	SLAAC, MACOnly, Untrusted bool
}

// Elements returns the port's elements in the sets.
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

// own returns the addresses that the port may send from, each once. With SLAAC, it leaves out those that follow from
// its MAC.
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
