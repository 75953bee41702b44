package guard

import (
	"fmt"
	"iter"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The spoof guard is one chain of the bridge family, for all networks, which sees
// what comes in by a bridge's port before the bridge learns from it. It holds those
// ports to their own addresses that the first of these sets names, and the others
// say what those are. The keys start with the port's name, as the kernel has it
// there for the incoming link.
const (
	guardedSet   = "guarded"      // ports
	guardFreeSet = "guard-free"   // ports of which only the MAC is known
	guardMACSet  = "guard-mac"    // the MAC of each
	guard4Set    = "guard4"       // its addresses
	guard6Set    = "guard6"       // and the link-local one that goes with the MAC
	guardNDSet   = "guard-target" // the same, for what neighbour discovery is about
	guardLinkSet = "guard-lladdr" // the MAC, for link-layer addresses inside of messages
	guardIDSet   = "guard-id"     // the interface identifier that goes with the MAC, of SLAAC

	guardUntrustedSet = "guard-untrusted" // ports of hosts that are no servers or routers
	// Those of guard-untrusted that have no IPv4 address yet; and, of the others, those that
	// are held to their MAC alone.
	guardLeasingSet = "guard-leasing"
)

// Those of neighbour discovery hold what the sets before them hold, as plain numbers:
// nft has no name for those bytes of a packet, and refuses to look up what it takes for
// a number in a set of addresses. A listing of such rules could not be loaded again.
const (
	guardNDLen   = ifnameLen + addr6Len
	guardLinkLen = ifnameLen + etherSlot
	guardIDLen   = ifnameLen + interfaceIDLen
)

// Sets are those that the rules of Guarded look into, and Port.Elements are for.
func Sets() []Set {
	return []Set{
		{Name: guardedSet, KeyType: nftnl.TypeIfname, KeyLen: ifnameLen},
		{Name: guardFreeSet, KeyType: nftnl.TypeIfname, KeyLen: ifnameLen},
		{Name: guardMACSet, KeyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeEther, KeyLen: portsLen},
		{Name: guard4Set, KeyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeIPv4, KeyLen: pods4Len},
		{Name: guard6Set, KeyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeIPv6, KeyLen: pods6Len},
		{
			Name: guardNDSet, KeyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeInteger, KeyLen: guardNDLen,
			Userdata: typeofPortAnd(ndTarget, addr6Len),
		},
		{
			Name: guardLinkSet, KeyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeInteger, KeyLen: guardLinkLen,
			Userdata: typeofPortAnd(ndOption, etherLen),
		},
		{
			Name: guardIDSet, KeyType: nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeInteger, KeyLen: guardIDLen,
			Userdata: typeofPortAnd(ip6SourceID, interfaceIDLen),
		},
		{Name: guardUntrustedSet, KeyType: nftnl.TypeIfname, KeyLen: ifnameLen},
		{Name: guardLeasingSet, KeyType: nftnl.TypeIfname, KeyLen: ifnameLen},
	}
}

// IsSet says whether a set is one of them.
func IsSet(name string) bool {
	return slices.ContainsFunc(Sets(), func(s Set) bool { return s.Name == name })
}

// Port is a port of a bridge, and what the pod behind it may send as.
type Port struct {
	// Name is that of the link on the host.
	Name string
	// MAC is the pod's.
	MAC net.HardwareAddr
	// Addrs are the pod's addresses; IPv4 ones as such, not mapped into IPv6. From these alone it may send, and
	// IPv4, IPv6 and ARP only. With one of IPv6 goes the link-local one that is made of the MAC (addr_gen_mode
	// eui64); without any of IPv6 it sends none. A pod without any is held to its MAC
	// alone, unless SLAAC or Untrusted says more.
	Addrs []netip.Addr
	// SLAAC lets it use every IPv6 address, link-local or not, that ends in the interface identifier made of
	// its MAC (modified EUI-64, RFC 4291, appendix A): routers give such addresses their prefixes, later, and
	// others another day. It has no others then but those among Addrs: no temporary ones (RFC 8981), no stable
	// opaque ones (RFC 7217).
	SLAAC bool
	// MACOnly holds it to the source address of its Ethernet frames, and to nothing else: it may use any
	// address, VLAN tags, and protocols other than IP, as a pod with a bridge or router of its own does.
	MACOnly bool
	// Untrusted, which MACOnly excludes, is what switches call a port of hosts, behind which no server or
	// router is to be (DHCP snooping, RFC 6105's RA guard, RFC 7610's DHCPv6 shield): it sends no answers of
	// DHCP or DHCPv6 servers and relays, by no port, no DHCP requests for another's MAC, no queries of IGMP and
	// MLD, no ICMP redirects, and nothing of what routers and firewalls tell each other: not by a protocol of
	// IP (PIM, OSPF, EIGRP, VRRP and CARP, IS-IS, NHRP, pfsync and the like), nor to the UDP ports of RIP,
	// OLSR, LDP, HSRP, GLBP, Babel, WCCP and the like, wherever that is. Router advertisements and redirects of
	// IPv6 no guarded pod sends whose addresses are known. TCP is not looked at, nor what IPsec hides.
	//
	// Without addresses of IPv4 it is about to get one: it may ask DHCP servers for it
	// and look whether another host has it (RFC 5227), and nothing else of IPv4.
	Untrusted bool
}

// Check says what is wrong with a port. The error matches tombolo.ErrInvalid.
func (p *Port) Check() error {
	const group = 1 // the bit of a MAC that makes it one of many
	switch {
	case p == nil || !ident.IsLinkName(p.Name):
		name := ""
		if p != nil {
			name = p.Name
		}
		return fmt.Errorf("%w: guarded port %q is no name of a link", tombolo.ErrInvalid, name)
	case len(p.MAC) != etherLen || p.MAC[0]&group != 0:
		return fmt.Errorf("%w: port %s cannot be guarded: %q cannot be the MAC of a pod", tombolo.ErrInvalid, p.Name, p.MAC)
	}
	if p.MACOnly && p.Untrusted {
		return fmt.Errorf("%w: guarded port %s: MACOnly and Untrusted exclude each other", tombolo.ErrInvalid, p.Name)
	}
	for _, a := range p.Addrs {
		if !a.IsValid() || a.IsUnspecified() || a.Zone() != "" || a.Is4In6() {
			return fmt.Errorf("%w: guarded port %s: address %q", tombolo.ErrInvalid, p.Name, a)
		}
	}
	return nil
}

// Elements gives what the port has in the sets, by their names; nothing of one that Check
// refuses.
func (p *Port) Elements() iter.Seq2[string, []byte] {
	return func(yield func(set string, key []byte) bool) {
		if p.Check() == nil {
			p.elements(yield)
		}
	}
}

func (p *Port) elements(yield func(set string, key []byte) bool) {
	more := true
	add := func(set string, rest []byte, pad int) {
		more = more && yield(set, nftnl.LinkKey(p.Name, rest, pad))
	}
	own4, own6 := p.own()
	free := len(p.Addrs) == 0 && !p.SLAAC && !p.Untrusted
	add(guardedSet, nil, 0)
	add(guardMACSet, p.MAC, etherSlot)
	for _, a := range own4 {
		add(guard4Set, a.AsSlice(), 0)
	}
	if free {
		add(guardFreeSet, nil, 0)
	}
	if free || p.SLAAC || p.Untrusted || len(own6) > 0 {
		add(guardLinkSet, p.MAC, etherSlot)
	}
	for _, a := range own6 {
		add(guard6Set, a.AsSlice(), 0)
		add(guardNDSet, a.AsSlice(), 0)
	}
	if p.SLAAC {
		id := interfaceID(p.MAC)
		add(guardIDSet, id[:], 0)
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
}

// own are the addresses that the port may send from, each once;
// with SLAAC, those that follow from its MAC go without saying.
func (p *Port) own() (own4, own6 []netip.Addr) {
	all := p.Addrs
	if slices.ContainsFunc(all, netip.Addr.Is6) {
		all = append(slices.Clip(all), linkLocal(p.MAC))
	}
	id := interfaceID(p.MAC)
	for i, a := range all {
		b := a.As16()
		switch {
		case slices.Contains(all[:i], a), p.SLAAC && a.Is6() && [8]byte(b[8:]) == id:
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
