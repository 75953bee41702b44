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

// Owner names the owner of an element, as a hash of its full name: up to 16 lower-case letters and digits.
type Owner string

// OwnerOf is the Owner of an attachment: a hash of its network, its container and its
// interface. Tombolo's plugin has it of every pod, so that another program knows its
// elements by the same name. (44 bits: with 1,000 attachments, two are the same on one node
// in 35 million.)
func OwnerOf(network, containerID, ifname string) Owner {
	return Owner(ident.Hash(network, containerID, ifname))
}

// Endpoint is a pod's interface, as far as the firewall is concerned.
type Endpoint struct {
	Owner Owner
	// Network is the name of its network.
	Network string
	// Bridge is the name of the bridge that the pod is a port of: its packets come
	// in by that link.
	Bridge string
	// NIC is the link by which the bridge is connected to a LAN (Network.Share); empty is none. The host routes the
	// pod's packets by it, and frames to the pod's MAC are led to the bridge.
	NIC string
	// Addrs are the pod's addresses; IPv4 ones as such, not mapped into IPv6.
	Addrs []netip.Addr
	// MAC is the pod's. It stands in for addresses where there are none, so that
	// every pod is known, and a guard needs it; else it is not used.
	MAC net.HardwareAddr
	// Guard says to what the pod is held behind GuardedPort, the bridge's port: the host's end of its veth pair.
	// Other packets that come in by the port are dropped. The network must be one with Guard.
	//
	// Frames to 01:80:c2:00:00:00 to :0f do not come by the guard: the bridge learns from
	// them and hands them to the host. See Network.Groups.
	Guard       Guard
	GuardedPort string
	// SLAAC lets a guarded pod use every IPv6 address, link-local or not, that ends in the interface identifier
	// made of its MAC (modified EUI-64, RFC 4291, appendix A): routers give such addresses their prefixes, later,
	// and others another day. It has no others then but those among Addrs: no temporary ones (RFC 8981), no
	// stable opaque ones (RFC 7217).
	SLAAC bool
	// Masquerade has the pod's packets masqueraded, by the rules of its network,
	// which must be one with masquerade.
	Masquerade bool
	// Ports are published on the host's addresses, each for the first of the pod's
	// addresses of either family. A port on an address of a family that the pod has
	// no address of is passed over; one that is listed twice counts once.
	Ports []Port
	// PortSNAT says whose calls of Ports come to the pod with the host's address in place of their own.
	PortSNAT SNAT
	// Egress says what the pod may send by itself; what its network forbids stays forbidden. It needs a Guard, so that the
	// pod cannot send from other addresses. The network must be one with PodEgress.
	Egress Egress
	// Callers are addresses of the pod on other bridges. Its calls of Ports from there come with the host's
	// address, as those of Addrs do, since the pod takes packets from its own addresses for forged.
	Callers []netip.Addr
}

func (o Owner) check() error {
	good := len(o) > 0 && len(o) <= ruleset.MaxOwner
	for _, c := range []byte(o) {
		good = good && isAlphanumeric(c) && (c < 'A' || c > 'Z')
	}
	if !good {
		return invalid("owner %q: want 1 to %d lower-case letters and digits, as OwnerOf gives them", string(o), ruleset.MaxOwner)
	}
	return nil
}

// check says what is wrong with an endpoint. One without faults makes keys of the right length, and a comment that
// nft prints and parseOwner reads.
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
	return ep.checkPorts()
}

// elements gives what an endpoint has in the sets; at least one, by which it can be
// found again.
func (ep *Endpoint) elements() []ruleset.Element {
	if len(ep.Addrs) == 0 {
		known := ruleset.Element{Set: ruleset.InInet(ruleset.PortsSet), Key: nftnl.LinkKey(ep.link(), ep.MAC, ruleset.EtherSlot)}
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
			list = append(list, ruleset.Element{Set: ruleset.InInet(ruleset.MasqueradeSet(a.Is4(), key)), Key: a.AsSlice()})
		}
	}
	list = append(list, ep.portElements()...)
	list = append(list, ep.shareElements()...)
	list = append(list, ep.egressElements()...)
	return append(list, ep.guardElements()...)
}

// egressElements returns the elements of the endpoint's egress policy. A pod with an address of IPv6 has a link-local one
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

// link returns the name of the link by which the host routes the pod's packets.
func (ep *Endpoint) link() string { return cmp.Or(ep.NIC, ep.Bridge) }

// shareElements returns what leads frames from the LAN to the pod.
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

// traces gives all elements that an endpoint may have in the sets: its record may be younger than its elements.
func (ep Endpoint) traces() []ruleset.Element {
	ep.Masquerade = true
	if ep.PortSNAT != SNATNeeded {
		ep.PortSNAT = snatAny
	}
	return append(ep.elements(), ep.leftovers()...)
}

// ownerComment is the comment of an endpoint's elements: tombolo:1:OWNER:NETWORK.
func ownerComment(o Owner, networkKey string) string {
	return ruleset.OwnerPrefix + string(o) + ":" + networkKey
}

// parseOwner takes such a comment apart; it is false for any other.
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

// ownerOf is what an element's comment says; it is false for elements that are not ours.
func ownerOf(el *ruleset.ElementState) (owner Owner, networkKey string, ok bool) {
	return parseOwner(el.Comment)
}

// PodGroup is the group of links (IFLA_GROUP) that ports of pods have to be in for Network.DropReports, and for the
// rules about multicast queries (Network.Groups), to say something of them. One that is taken out of it, by `ip link
// set PORT group 0`, gets all reports again, as a pod needs that is a multicast router.
const PodGroup = ruleset.PodGroup

// GatewayGroup is PodGroup for ports of a network whose gateway is the host. From such a port the host gets no answers
// of DHCP servers, no router advertisements and no redirects (Network.Groups).
const GatewayGroup = ruleset.GatewayGroup

// Guard is what a pod is held to; the zero Guard is nothing.
type Guard string

const (
	// GuardMAC is the source address of its Ethernet frames, and nothing else: it may use any address, VLAN
	// tags, and protocols other than IP, as a pod with a bridge or router of its own does.
	GuardMAC Guard = "mac"
	// GuardAddresses is its MAC and addresses: it may send from these alone, and IPv4, IPv6 and ARP only. With an
	// address of IPv6 goes the link-local one that is made of the MAC (addr_gen_mode eui64); without any of IPv6
	// it sends none. A pod without addresses is held to its MAC alone, unless it has SLAAC.
	GuardAddresses Guard = "addresses"
	// GuardUntrusted is GuardAddresses, and drops packets by which a pod would pass for a server or router, as a
	// switch does at a port for hosts (DHCP snooping, RFC 6105's RA guard, RFC 7610's DHCPv6 shield): answers of
	// DHCP or DHCPv6 servers and relays from any port, DHCP requests for another's MAC, queries of IGMP and MLD,
	// ICMP redirects, and packets between routers or firewalls: of protocols of IP (PIM, OSPF, EIGRP, VRRP and
	// CARP, IS-IS, NHRP, pfsync and others), and to the UDP ports of RIP, OLSR, LDP, HSRP, GLBP, Babel, WCCP and
	// others, at any address. GuardAddresses drops router advertisements and redirects of IPv6 already, if
	// addresses are known. The guard does not look at TCP, nor into IPsec.
	//
	// A pod without IPv4 addresses may ask DHCP servers for one and look whether another host has it (RFC 5227),
	// and send nothing else of IPv4.
	GuardUntrusted Guard = "untrusted"
)

// Check refuses what is no Guard. The error matches tombolo.ErrInvalid.
func (g Guard) Check() error {
	if !slices.Contains([]Guard{"", GuardMAC, GuardAddresses, GuardUntrusted}, g) {
		return invalid("guard %q", string(g))
	}
	return nil
}

const multicast = 1 // the bit of a MAC that makes it one of many

// checkGuard says what is wrong with an endpoint's guard.
func (ep *Endpoint) checkGuard() error {
	switch {
	case ep.Guard == "" || ep.Guard.Check() != nil:
		return ep.Guard.Check()
	case !ident.IsLinkName(ep.GuardedPort):
		return invalid("endpoint %s: guarded port %q is no name of a link"+ident.LinkNameForm, ep.Owner, ep.GuardedPort)
	case len(ep.MAC) != ruleset.EtherLen || ep.MAC[0]&multicast != 0:
		return invalid("endpoint %s: port %s cannot be guarded: %q cannot be the MAC of a pod", ep.Owner, ep.GuardedPort, ep.MAC)
	}
	return nil
}

// guardElements gives what an endpoint has in the guard's sets.
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

// leftovers returns elements that a guarded endpoint should not have in the sets, but may have had before: without
// addresses, with or without SLAAC, or guarded by its MAC alone.
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
