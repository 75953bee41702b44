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

// Owner identifies the owner of an element, by a hash of its full name: up to 16 lower-case letters and digits.
type Owner string

// OwnerOf returns the Owner of an attachment: a hash of its network, container and interface. Tombolo's plugin uses
// it for every pod, so another program can find the pod's elements by it. (It has 44 bits: with 1,000 attachments on
// one node, the probability of two equal ones is 1 in 35 million.)
func OwnerOf(network, containerID, ifname string) Owner {
	return Owner(ident.Hash(network, containerID, ifname))
}

// Endpoint describes a pod's interface for the firewall.
type Endpoint struct {
	Owner Owner
	// Network is the name of the network that it belongs to.
	Network string
	// Bridge is the name of the bridge that the pod is a port of. The pod's packets come in by that link.
	Bridge string
	// NIC is the link that connects the bridge to a LAN (Network.Share), or empty. The host routes the pod's packets
	// through it, and frames to the pod's MAC are sent to the bridge.
	NIC string
	// Addrs are the pod's addresses. IPv4 addresses must not be mapped into IPv6.
	Addrs []netip.Addr
	// MAC is the pod's MAC. It identifies a pod without addresses, and a guard needs it. Otherwise it is unused.
	MAC net.HardwareAddr
	// Guard restricts the packets that the pod may send by GuardedPort, the bridge's port: the host's end of its veth
	// pair. Other packets that come in by the port are dropped. The network must have Guard set.
	//
	// Frames to 01:80:c2:00:00:00 to :0f bypass the guard: the bridge learns from them and passes them to the host.
	// See Network.Groups.
	Guard       Guard
	GuardedPort string
	// SLAAC permits a guarded pod to use every IPv6 address, link-local or not, that ends in the interface identifier
	// made from its MAC (modified EUI-64, RFC 4291, appendix A). Routers announce the prefixes of such addresses
	// later, and may change them. Beyond these only Addrs are permitted: no temporary addresses (RFC 8981), and no
	// stable opaque ones (RFC 7217).
	SLAAC bool
	// Masquerade makes the rules of its network masquerade the pod's packets. The network must have Masquerade set.
	Masquerade bool
	// Ports are published on the host's addresses, each for the first of the pod's addresses of each family. A port
	// on a host address of a family that the pod has no address of is skipped. A port that is listed twice counts
	// once.
	Ports []Port
	// PortSNAT selects the callers of Ports whose packets reach the pod with the host's address instead of their own.
	PortSNAT SNAT
	// PublishFrom limits the callers of Ports, except the host itself, to those that every list contains. An entry of
	// a list is a prefix, an address or the name of a link that calls come in by. A protocol and host ports may
	// follow, as in "192.0.2.0/24, wg0 tcp 443, fd00::/8 udp 53-60". "" and "all" contain everyone. The host itself
	// receives all other calls, as without the port.
	PublishFrom []string
	// Unadmitted leaves calls of Ports to the host's firewall: they have no mark, unless a pod calls.
	Unadmitted bool
	// Egress lists the destinations that the pod may open connections to, among those that its network permits. It
	// needs a Guard, so that the pod cannot send from other addresses. The network must have PodEgress set.
	Egress Egress
	// Callers are addresses of the pod on other bridges. Its calls of Ports from there get the host's address, like
	// those from Addrs, since the pod rejects packets from its own addresses as forged.
	Callers []netip.Addr
}

func (o Owner) check() error {
	good := len(o) > 0 && len(o) <= ruleset.MaxOwner
	for _, c := range []byte(o) {
		good = good && isAlphanumeric(c) && (c < 'A' || c > 'Z')
	}
	if !good {
		return invalid("owner %q: want 1 to %d lower-case letters and digits, as OwnerOf gives them", string(o),
			ruleset.MaxOwner)
	}
	return nil
}

// check returns an error if an endpoint is invalid. A valid endpoint makes keys of the right length, and a comment
// that nft prints and parseOwner parses.
func (ep *Endpoint) check() error {
	if err := ep.Owner.check(); err != nil {
		return err
	}

	if err := checkName(ep.Network); err != nil {
		return fmt.Errorf("endpoint %s: %w", ep.Owner, err)
	}

	if !ident.IsLinkName(ep.Bridge) {
		return invalid("endpoint %s: bridge %q is no name of a link"+ident.LinkNameForm, ep.Owner, ep.Bridge)
	}

	for _, a := range ep.Addrs {
		if !a.IsValid() || a.IsUnspecified() || a.Zone() != "" || a.Is4In6() {
			return invalid("endpoint %s: address %q", ep.Owner, a)
		}
	}

	if ep.NIC != "" && (!ident.IsLinkName(ep.NIC) || len(ep.MAC) != ruleset.EtherLen || ep.MAC[0]&multicast != 0) {
		return invalid("endpoint %s: %q cannot be the MAC of a pod on a LAN by link %q", ep.Owner, ep.MAC, ep.NIC)
	}

	if len(ep.Addrs) == 0 && len(ep.MAC) != ruleset.EtherLen {
		return invalid("endpoint %s: it has neither an address nor a MAC of %d bytes", ep.Owner, ruleset.EtherLen)
	}

	if err := ep.checkGuard(); err != nil {
		return err
	}

	if err := ep.Egress.Check(); err != nil {
		return fmt.Errorf("endpoint %s: %w", ep.Owner, err)
	}

	if err := CheckCallers(ep.PublishFrom...); err != nil {
		return fmt.Errorf("endpoint %s: %w", ep.Owner, err)
	}

	return ep.checkPorts()
}

// elements returns an endpoint's elements in the sets. There is at least one, so that the endpoint can be found.
func (ep *Endpoint) elements() []ruleset.Element {
	if len(ep.Addrs) == 0 {
		known := ruleset.Element{Set: ruleset.InInet(ruleset.PortsSet),
			Key: nftnl.LinkKey(ep.link(), ep.MAC, ruleset.EtherSlot)}
		return slices.Concat([]ruleset.Element{known}, ep.shareElements(), ep.guardElements())
	}

	key := ruleset.NetworkKey(ep.Network)
	list := make([]ruleset.Element, 0, 2*len(ep.Addrs))
	for i, a := range ep.Addrs {
		if slices.Contains(ep.Addrs[:i], a) {
			continue // an address that was given twice must not conflict with itself
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
	return append(list, ep.guardElements()...)
}

// egressElements returns the elements of the endpoint's egress policy. A pod with an IPv6 address has a link-local one
// too.
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

// link returns the name of the link that the host uses to route the pod's packets.
func (ep *Endpoint) link() string { return cmp.Or(ep.NIC, ep.Bridge) }

// shareElements returns the elements that send frames from the LAN to the pod.
func (ep *Endpoint) shareElements() []ruleset.Element {
	if ep.NIC == "" {
		return nil
	}
	return []ruleset.Element{{Set: ruleset.InNetdev(ruleset.ShareSet(ep.Bridge)), Key: ep.MAC}}
}

// podElement returns the element of a pod's address behind a bridge.
func podElement(bridge string, a netip.Addr) ruleset.Element {
	set := ruleset.Pods6Set
	if a.Is4() {
		set = ruleset.Pods4Set
	}
	return ruleset.Element{Set: ruleset.InInet(set), Key: nftnl.LinkKey(bridge, a.AsSlice(), 0)}
}

// traces returns all elements that an endpoint may have in the sets, since its record may be newer than its elements.
func (ep Endpoint) traces() []ruleset.Element {
	ep.Masquerade = true
	if ep.PortSNAT != SNATNeeded {
		ep.PortSNAT = snatAny
	}
	return append(ep.elements(), ep.leftovers()...)
}

// comment returns the comment of an endpoint's elements.
func (ep *Endpoint) comment() string { return ownerComment(ep.Owner, ruleset.NetworkKey(ep.Network)) }

// ownerComment returns such a comment: tombolo:1:OWNER:NETWORK.
func ownerComment(o Owner, networkKey string) string {
	return ruleset.OwnerPrefix + string(o) + ":" + networkKey
}

// parseOwner parses such a comment. It returns false for any other.
func parseOwner(comment string) (owner Owner, networkKey string, ok bool) {
	rest, ok := strings.CutPrefix(comment, ruleset.OwnerPrefix)
	if !ok {
		return "", "", false
	}
	o, key, ok := strings.Cut(rest, ":")
	if !ok || Owner(o).check() != nil || key == "" {
		return "", "", false
	}
	return Owner(o), key, true
}

// ownerOf returns the owner and network in an element's comment. It returns false for elements that are not ours.
func ownerOf(el *ruleset.ElementState) (owner Owner, networkKey string, ok bool) {
	return parseOwner(el.Comment)
}

// isOf reports whether an element is that of an endpoint of a network.
func isOf(el *ruleset.ElementState, networkKey string) bool {
	_, key, ok := ownerOf(el)
	return ok && key == networkKey
}

// PodGroup is the link group (IFLA_GROUP) of the pods' ports that Network.DropReports, and the rules for multicast
// queries (Network.Groups), apply to. A port that is removed from it, by `ip link set PORT group 0`, receives all
// reports again, as a pod that is a multicast router needs.
const PodGroup = ruleset.PodGroup

// GatewayGroup is PodGroup for ports of a network with the host as gateway. From such a port the host accepts no
// answers of DHCP servers, no router advertisements and no redirects (Network.Groups).
const GatewayGroup = ruleset.GatewayGroup

// Guard is a restriction of a pod's packets. The zero Guard restricts nothing.
type Guard string

const (
	// GuardMAC checks the source address of Ethernet frames only. The pod may use any address, VLAN tags, and
	// protocols other than IP, like a pod with a bridge or router inside.
	GuardMAC Guard = "mac"
	// GuardAddresses checks MAC and addresses. The pod may send only from these, and only IPv4, IPv6 and ARP. If it
	// has an IPv6 address, it may also use the link-local address made from the MAC (addr_gen_mode eui64). Without
	// any, it may send no IPv6. For a pod without addresses, only the MAC is checked, unless it has SLAAC.
	GuardAddresses Guard = "addresses"
	// GuardUntrusted is GuardAddresses, and also drops packets that would make a pod look like a server or router, as
	// a switch does at a port for hosts (DHCP snooping, RFC 6105's RA guard, RFC 7610's DHCPv6 shield): answers of
	// DHCP or DHCPv6 servers and relays from any port, DHCP requests for another's MAC, queries of IGMP and MLD, and
	// ICMP redirects. It also drops packets between routers or firewalls, at any address: of IP protocols (PIM, OSPF,
	// EIGRP, VRRP and CARP, IS-IS, NHRP, pfsync and others), and to the UDP ports of RIP, OLSR, LDP, HSRP, GLBP,
	// Babel, WCCP and others. GuardAddresses drops router advertisements and redirects of IPv6 already, if addresses
	// are known. The guard does not look at TCP, or into IPsec.
	//
	// A pod without IPv4 addresses may ask DHCP servers for one, and check whether another host has it (RFC 5227). It
	// may send no other IPv4 packets.
	GuardUntrusted Guard = "untrusted"
)

// Check returns an error for an unknown Guard. The error matches tombolo.ErrInvalid.
func (g Guard) Check() error {
	if !slices.Contains([]Guard{"", GuardMAC, GuardAddresses, GuardUntrusted}, g) {
		return invalid("guard %q", string(g))
	}
	return nil
}

const multicast = 1 // the bit of a group MAC

// checkGuard returns an error if an endpoint's guard is invalid.
func (ep *Endpoint) checkGuard() error {
	switch {
	case ep.Guard == "" || ep.Guard.Check() != nil:
		return ep.Guard.Check()
	case !ident.IsLinkName(ep.GuardedPort):
		return invalid("endpoint %s: guarded port %q is no name of a link"+ident.LinkNameForm, ep.Owner, ep.GuardedPort)
	case len(ep.MAC) != ruleset.EtherLen || ep.MAC[0]&multicast != 0:
		return invalid("endpoint %s: port %s cannot be guarded: %q cannot be the MAC of a pod", ep.Owner,
			ep.GuardedPort, ep.MAC)
	}

	return nil
}

// guardElements returns an endpoint's elements in the guard's sets.
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

// leftovers returns the elements that a guarded endpoint must not have, but may still have from an earlier state:
// without addresses, with SLAAC, or with only its MAC checked.
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

	return list
}
