package nft

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Owner identifies the endpoint that an element belongs to. It is a hash from OwnerOf, or another unique name of 1 to
// 16 lower-case letters and digits.
type Owner string

// OwnerOf returns the Owner of a pod's interface: a hash of its network, container ID and interface name. Tombolo's
// plugin uses it for every pod, so other programs can find the pod's elements. The hash has 44 bits: with 1,000
// interfaces on one node, the probability that two hashes are equal is 1 in 35 million.
func OwnerOf(network, containerID, ifname string) Owner {
	return Owner(ident.Hash(network, containerID, ifname))
}

// Endpoint describes a pod's interface for the firewall.
type Endpoint struct {
	Owner Owner
	// Network is the name of the network that the endpoint belongs to.
	Network string
	// Bridge is the name in the Bridge field of the endpoint's Network. Unless NIC is set, the host receives the pod's
	// packets from this link.
	Bridge string
	// NIC is the link that connects the bridge to a LAN (Share.NIC of Network.Share), or empty. The host then routes
	// the pod's packets through the NIC, and the firewall passes frames to the pod's MAC from the NIC to the bridge.
	NIC string
	// Addrs are the pod's addresses. IPv4-mapped IPv6 addresses are invalid.
	Addrs []netip.Addr
	// MAC is the pod's MAC. It is required for a pod without addresses, and for a pod with a Guard or a NIC. If the
	// pod has an IPv6 address, Egress also applies to the link-local address made from the MAC.
	MAC net.HardwareAddr
	// Guard restricts the packets that the pod may send through GuardedPort, which is the host's end of the pod's
	// veth pair. The firewall drops all other packets that come in by this port. The network must have Network.Guard
	// set.
	//
	// The guard does not see frames to 01:80:c2:00:00:00 to :0f that the bridge does not forward. The rules of
	// Network.Groups drop such frames.
	Guard       Guard
	GuardedPort string
	// SLAAC permits a guarded pod to use every IPv6 address that ends with the interface identifier of its MAC
	// (modified EUI-64, RFC 4291, appendix A). Routers announce the prefixes of such addresses later, and may change
	// them, so the caller cannot list the addresses in Addrs. Temporary addresses (RFC 8981) and stable opaque
	// addresses (RFC 7217) are not permitted, unless they are in Addrs.
	SLAAC bool
	// Masquerade enables masquerading for the pod's packets. The network must have Network.Masquerade set.
	Masquerade bool
	// Ports are the pod's ports to publish on the host's addresses. For each family, a port leads to the first
	// address of that family in Addrs. A port with a HostAddr is ignored if the pod has no address of that family.
	// Duplicates are ignored too.
	Ports []Port
	// PortSNAT selects the callers of Ports that are masqueraded. The pod sees the host's address as the source of
	// their packets.
	PortSNAT SNAT
	// PublishFrom limits the callers of Ports, except the host itself, to those that every list contains. An entry of
	// a list is a prefix, an address or the name of a link that calls come in by. A protocol and host ports may
	// follow, as in "192.0.2.0/24, wg0 tcp 443, fd00::/8 udp 53-60". "" and "all" contain everyone. All other calls
	// go to the host itself, as if the port were not published.
	PublishFrom []string
	// Unadmitted lets the host's own firewall decide about new connections to Ports. A packet that opens such a
	// connection gets no mark, unless a pod sent it. After the pod has answered, all packets of the connection get the
	// mark.
	Unadmitted bool
	// Egress lists the destinations that the pod may open connections to. Only destinations that the network's Egress
	// permits too are reachable. Set a Guard too: Egress does not restrict packets from other source addresses. The
	// network must have Network.PodEgress set.
	Egress Egress
	// Callers are the pod's addresses on other bridges, without duplicates. If the pod calls its own Ports from one of
	// them, the firewall masquerades the call, like a call from the address that the port leads to. Without
	// masquerading, the pod would drop the packets, because their source is its own address. If PortSNAT is SNATNone,
	// Callers has no effect.
	Callers []netip.Addr
}

func (o Owner) check() error {
	const characters = "abcdefghijklmnopqrstuvwxyz0123456789"
	if o == "" || len(o) > ruleset.MaxOwner || strings.Trim(string(o), characters) != "" {
		return invalid("owner %q: want 1 to %d lower-case letters and digits, as OwnerOf gives them", string(o),
			ruleset.MaxOwner)
	}
	return nil
}

// check returns an error if the endpoint is invalid. For a valid endpoint, the keys of all elements have the right
// length, and nft can print the comment and ownerOf can parse it.
func (ep *Endpoint) check() error {
	if err := ep.Owner.check(); err != nil {
		return err
	}

	if err := checkName(ep.Network); err != nil {
		return fmt.Errorf("endpoint %s: %w", ep.Owner, err)
	}

	for _, a := range ep.Addrs {
		if !a.IsValid() || a.IsUnspecified() || a.Zone() != "" || a.Is4In6() {
			return invalid("endpoint %s: address %q", ep.Owner, a)
		}
	}

	switch {
	case !ident.IsLinkName(ep.Bridge):
		return invalid("endpoint %s: bridge %q is no name of a link"+ident.LinkNameForm, ep.Owner, ep.Bridge)
	case ep.NIC != "" && (isNoLinkName(ep.NIC) || !ep.hasMAC()):
		return invalid("endpoint %s: %q cannot be the MAC of a pod on a LAN by link %q", ep.Owner, ep.MAC, ep.NIC)
	case len(ep.Addrs) == 0 && len(ep.MAC) != ruleset.EtherLen:
		return invalid("endpoint %s: it has neither an address nor a MAC of %d bytes", ep.Owner, ruleset.EtherLen)
	}

	if err := cmp.Or(ep.Egress.Check(), CheckCallers(ep.PublishFrom...)); err != nil {
		return fmt.Errorf("endpoint %s: %w", ep.Owner, err)
	}
	return cmp.Or(ep.checkGuard(), ep.checkPorts())
}

// hasMAC reports whether MAC is a unicast MAC.
func (ep *Endpoint) hasMAC() bool { return len(ep.MAC) == ruleset.EtherLen && ep.MAC[0]&multicast == 0 }

// elements returns the endpoint's elements in all sets, with the comment that names their owner. There is at least one,
// so that a listing finds the endpoint.
func (ep *Endpoint) elements() []ruleset.Element {
	key := ruleset.NetworkKey(ep.Network)
	list := make([]ruleset.Element, 0, max(2*len(ep.Addrs), 1))
	if len(ep.Addrs) == 0 {
		list = append(list, ruleset.Element{Set: ruleset.InInet(ruleset.PortsSet),
			Key: nftnl.LinkKey(ep.link(), ep.MAC, ruleset.EtherSlot)})
	}

	for i, a := range ep.Addrs {
		if slices.Contains(ep.Addrs[:i], a) {
			continue // a repeated address must not conflict with itself
		}

		list = append(list, podElement(ep.link(), a))
		if ep.Masquerade {
			list = append(list,
				ruleset.Element{Set: ruleset.InInet(ruleset.MasqueradeSet(a.Is4(), key)), Key: a.AsSlice()})
		}
	}

	list = append(list, ep.portElements()...)
	list = append(list, ep.shareElements()...)
	list = append(list, ep.egressElements()...)

	return ruleset.WithComment(append(list, ep.guardElements()...), ep.comment())
}

// egressElements returns the elements for the endpoint's Egress. A pod with an IPv6 address also has a link-local
// address, so Egress applies to that address too.
func (ep *Endpoint) egressElements() []ruleset.Element {
	policy, err := ruleset.ParseEgress(string(ep.Egress))
	if err != nil || policy == nil {
		return nil
	}
	addrs := ep.Addrs
	if len(ep.MAC) == ruleset.EtherLen && slices.ContainsFunc(addrs, netip.Addr.Is6) {
		addrs = append(slices.Clip(addrs), ident.LinkLocal(ep.MAC))
	}
	return policy.PodElements(ep.link(), addrs)
}

// link returns the name of the link through which the host routes the pod's packets: NIC if it is set, else Bridge.
func (ep *Endpoint) link() string { return cmp.Or(ep.NIC, ep.Bridge) }

// shareElements returns the element that makes the firewall send frames from the NIC to the pod, or nil without a
// NIC.
func (ep *Endpoint) shareElements() []ruleset.Element {
	if ep.NIC == "" {
		return nil
	}
	return []ruleset.Element{{Set: ruleset.InNetdev(ruleset.ShareSet(ep.Bridge)), Key: ep.MAC}}
}

// podElement returns the element of set pods4 or pods6 for a pod's address. link is the pod's bridge or, if
// Endpoint.NIC is set, the NIC.
func podElement(link string, a netip.Addr) ruleset.Element {
	return ruleset.Element{Set: ruleset.InInet(ruleset.FamilyOf(a).Pods), Key: nftnl.LinkKey(link, a.AsSlice(), 0)}
}

// traces returns the elements that the endpoint may have in the kernel, also from an earlier state. It includes the
// elements for masquerading, the elements from leftovers and, unless PortSNAT is SNATNeeded, the elements for every
// PortSNAT.
func (ep Endpoint) traces() []ruleset.Element {
	ep.Masquerade = true
	if ep.PortSNAT != SNATNeeded {
		ep.PortSNAT = snatAny
	}
	return append(ep.elements(), ep.leftovers()...)
}

func (ep *Endpoint) comment() string { return ownerComment(ep.Owner, ruleset.NetworkKey(ep.Network)) }

// ownerComment returns the comment of an owner's elements: tombolo:1:OWNER:NETWORK.
func ownerComment(o Owner, networkKey string) string {
	return ruleset.OwnerPrefix + string(o) + ":" + networkKey
}

// ownerOf returns the owner and the network from the comment of an element (see ownerComment). For an element that
// belongs to no endpoint, ok is false.
func ownerOf(el *ruleset.Element) (owner Owner, networkKey string, ok bool) {
	rest, ok := strings.CutPrefix(el.Comment, ruleset.OwnerPrefix)
	o, key, _ := strings.Cut(rest, ":")
	if !ok || Owner(o).check() != nil || key == "" {
		return "", "", false
	}
	return Owner(o), key, true
}

// isOf reports whether an element belongs to an endpoint of the network with the given key.
func isOf(el *ruleset.Element, networkKey string) bool {
	_, key, ok := ownerOf(el)
	return ok && key == networkKey
}

// PodGroup is the link group (IFLA_GROUP) of pods' ports. Network.DropReports and the rules about multicast queries
// (Network.Groups) apply to ports in this group or in GatewayGroup. A pod that is a multicast router needs all
// reports: remove its port from the group with `ip link set PORT group 0`.
const PodGroup = ruleset.PodGroup

// GatewayGroup is the link group of pods' ports in a network whose gateway is the host. All rules for PodGroup apply
// to it. From such a port, the host also accepts no answers of DHCP servers, no router advertisements and no
// redirects (Network.Groups).
const GatewayGroup = ruleset.GatewayGroup

// Guard restricts the source addresses and the kinds of packets that a pod may send. The zero value restricts
// nothing.
type Guard string

const (
	// GuardMAC checks only the source MAC of Ethernet frames. The pod may use any IP address, VLAN tags, and protocols
	// other than IP. This suits a pod that is a router.
	GuardMAC Guard = "mac"
	// GuardAddresses checks the source MAC and the source address. The pod may send only IPv4, IPv6 and ARP, and only
	// from its MAC and its addresses. A pod with an IPv6 address may also use the link-local address made from its MAC
	// (addr_gen_mode eui64). From the unspecified address, any pod may send DHCP requests, ARP probes, router
	// solicitations and multicast listener reports. Unless SLAAC is set, a pod with only IPv4 addresses may send no
	// other IPv6, and a pod without any addresses may use all IP addresses.
	GuardAddresses Guard = "addresses"
	// GuardUntrusted includes all checks of GuardAddresses. It also drops packets that would let a pod pose as a server
	// or router. Switches drop such packets at ports for hosts (DHCP snooping, RA guard of RFC 6105, DHCPv6 shield of
	// RFC 7610). Among the dropped packets are:
	//
	//   - answers of DHCP or DHCPv6 servers and relays from any port
	//   - DHCP requests for another MAC
	//   - IGMP and MLD queries
	//   - ICMP redirects and router advertisements
	//   - packets of IP protocols between routers or firewalls, at any address: PIM, OSPF, EIGRP, VRRP and CARP,
	//     IS-IS, NHRP, pfsync and others
	//   - packets to the UDP ports of RIP, OLSR, LDP, HSRP, GLBP, Babel, WCCP and others
	//
	// GuardAddresses already drops router advertisements and IPv6 redirects, if addresses are known. The guard does
	// not look at TCP or into IPsec.
	//
	// A pod without IPv4 addresses may ask DHCP servers for one, and may check whether another host has it (RFC
	// 5227). It may send no other IPv4 packets.
	GuardUntrusted Guard = "untrusted"
)

// Check returns an error that matches tombolo.ErrInvalid if the guard is unknown.
func (g Guard) Check() error {
	if !slices.Contains([]Guard{"", GuardMAC, GuardAddresses, GuardUntrusted}, g) {
		return invalid("guard %q", string(g))
	}
	return nil
}

const multicast = 1 // the bit in the first byte of a MAC that marks a group address

// checkGuard returns an error if the endpoint's Guard is invalid, or if its GuardedPort or MAC does not fit it.
func (ep *Endpoint) checkGuard() error {
	switch {
	case ep.Guard == "" || ep.Guard.Check() != nil:
		return ep.Guard.Check()
	case !ident.IsLinkName(ep.GuardedPort):
		return invalid("endpoint %s: guarded port %q is no name of a link"+ident.LinkNameForm, ep.Owner, ep.GuardedPort)
	case !ep.hasMAC():
		return invalid("endpoint %s: port %s cannot be guarded: %q cannot be the MAC of a pod", ep.Owner,
			ep.GuardedPort, ep.MAC)
	}

	return nil
}

// guardElements returns the endpoint's elements in the sets of the guard, or nil without a Guard.
func (ep *Endpoint) guardElements() []ruleset.Element {
	if ep.Guard == "" {
		return nil
	}
	port := ruleset.GuardedPort{
		Name: ep.GuardedPort, MAC: ep.MAC, Addrs: ep.Addrs, SLAAC: ep.SLAAC,
		MACOnly: ep.Guard == GuardMAC, Untrusted: ep.Guard == GuardUntrusted,
	}
	return port.Elements()
}

// leftovers returns the elements that a guarded endpoint must not have now, but may have from an earlier state. In that
// state the endpoint had no addresses, another value of SLAAC, or another Guard. If the endpoint has no Guard now, it
// returns nil.
func (ep *Endpoint) leftovers() []ruleset.Element {
	if ep.Guard == "" {
		return nil
	}

	bare := Endpoint{Bridge: ep.Bridge, NIC: ep.NIC, MAC: ep.MAC, Guard: GuardAddresses, GuardedPort: ep.GuardedPort}
	leasing := bare
	leasing.SLAAC, leasing.Guard = true, GuardUntrusted
	stable := *ep
	stable.SLAAC = false
	had := slices.Concat(bare.elements(), leasing.guardElements(), stable.guardElements())
	known := ep.elements()
	var list []ruleset.Element
	for _, el := range had {
		if !slices.ContainsFunc(known, el.Equal) {
			known, list = append(known, el), append(list, el)
		}
	}

	return ruleset.WithComment(list, ep.comment())
}
