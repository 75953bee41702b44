package nft

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Network describes a network of pods and the rules that the firewall needs for it.
type Network struct {
	// Name is the network's name. It consists of letters, digits, "_", "." and "-", and begins with a letter or a
	// digit, as in CNI.
	Name string
	// Prefixes are the subnets of the network's own pods. Masquerade never applies to packets to these destinations.
	Prefixes []netip.Prefix
	// Masquerade replaces the source address of packets from pods by the address of the outgoing link. Only packets of
	// endpoints that also have Masquerade are changed, and only if their destination is outside of Prefixes and
	// NonMasquerade. Packets that any rule redirected to a published port of a pod are not changed, unless
	// Endpoint.Unadmitted is set for the port.
	Masquerade bool
	// NonMasquerade lists further destinations that are not masqueraded. 0.0.0.0/0 or ::/0 disables masquerading for
	// the whole family. Packets to multicast addresses and to 255.255.255.255 are never masqueraded.
	NonMasquerade []netip.Prefix
	// Bridge is the name of the network's bridge. Without a Bridge, the firewall does not mark packets that are
	// bridged between pods, and does not clear marks. foreign.Conn adds no rules for such a network. VLANOf, Policy,
	// Internal, Egress and Share need a Bridge. NFCall, LAN and Gateway have no effect without one.
	Bridge string
	// VLANOf is the name of the VLAN-aware bridge if the network is a VLAN of that bridge, else "". With VLANOf,
	// Bridge is the host's link in the VLAN. At the hooks, packets that are bridged within the VLAN have the link
	// name VLANOf. Packets that the host routes have the link name Bridge.
	VLANOf string
	// NFCall states that bridged packets pass the firewall's hooks too. Options of the bridge
	// (IFLA_BR_NF_CALL_IPTABLES and IFLA_BR_NF_CALL_IP6TABLES) or sysctls for all bridges cause this. Without NFCall,
	// an answer from one pod to another on the bridge bypasses the host. So the firewall masquerades packets between
	// such pods if their destination was changed.
	NFCall bool
	// LAN states that a port of the bridge leads to machines in the pods' own subnet. For example, a NIC of the host
	// is a port. Such machines send answers directly to each other and to the pods, bypassing the host. So the
	// firewall masquerades packets to these machines if any rule changed the packets' destination, unless a pod sent
	// them. Without NFCall, it also masquerades such packets from pods and to pods.
	//
	// With NFCall, the bridge itself delivers a packet whose destination was changed. It never sends the packet back
	// through the port where it arrived. So a LAN machine gets no answer if its packet is redirected to another machine
	// behind the same port. To avoid this, keep frames from the LAN to the host's MAC away from the bridge. For
	// example, tc's mirred action can redirect them from the port's ingress to the bridge's ingress.
	LAN bool
	// Gateway states that the host routes for the network through Bridge, and that only pods are behind Bridge. It
	// exempts packets from and to Bridge from the drop rules of Closed, and has no other effect.
	Gateway bool
	// Closed lists the address families that the host routes for pods only. Pods need forwarding, and bridge.Routing
	// enables it on all of the host's links. So the firewall drops other forwarded packets of such a family. It does
	// not drop packets from or to the Bridge of a network with Gateway, nor packets that have the mark. Multicast
	// passes too, and so do packets that another bridge forwards itself. All networks of a node share this rule, so set
	// the same value in each network.
	Closed []Closed
	// Policy selects the pods, of this network and of others, that may send to the network's pods.
	Policy Policy
	// Guard adds the rules for endpoints with Endpoint.Guard. If a later Ensure has no Guard, the rules stay, and
	// guarded ports stay guarded.
	Guard bool
	// Groups drops packets from pods to the link-local groups (01:80:c2:00:00:00 to :0f). Guard implies Groups.
	// Normally, a bridge does not forward such frames. It passes them to the host as if the port had received them, so
	// rules that name the bridge do not match.
	//
	// The rule applies to each port of each bridge if the port's name begins with "veth". This includes ports of other
	// programs, and pods that the firewall does not know. If such a port must pass STP or LLDP frames through a bridge,
	// give the port another name. The kernel calls no rule for LLDP frames, or for STP frames while the bridge runs
	// STP, unless the port forwards these groups (ForwardGroups of bridge.Port). For LLDP, the bridge's group_fwd_mask
	// has the same effect.
	//
	// Groups also drops, from such ports, IP packets and further tags behind a VLAN tag with VLAN ID 0. Such packets
	// would reach other pods without passing the firewall's hooks. It drops frames with a second tag behind a tag of
	// VLAN 1. From ports in PodGroup or GatewayGroup, it drops multicast queries. From ports in GatewayGroup, it also
	// drops packets that would let a pod pose as the host's DHCP server or router. Among these are packets to DHCP
	// client ports, router advertisements and redirects, if the bridge would pass them to the host. Packets between
	// pods pass.
	Groups bool
	// PortSNAT adds the rules for endpoints whose Endpoint.PortSNAT is not SNATNeeded. If a later Ensure has no
	// PortSNAT, the rules stay, and ports that use them keep working.
	PortSNAT bool
	// Internal drops packets between the bridge and all other links, in both directions. Pods on the bridge and the
	// host can still reach each other. If several networks share a bridge, Internal applies to all of them.
	Internal bool
	// Egress lists the destinations that the pods on the bridge may open connections to, from any source address.
	// Networks on the same bridge must have the same Egress. Without NFCall, packets between pods on the bridge bypass
	// the firewall, so Egress does not restrict them.
	Egress Egress
	// PodEgress adds the rules for endpoints with Endpoint.Egress.
	PodEgress bool
	// DropReports drops multicast listener reports (MLDv2, RFC 3810) that would leave by ports in PodGroup or
	// GatewayGroup, of any bridge. Each pod with IPv6 sends some reports when it starts. A bridge that has seen no
	// querier sends them to all ports, and the kernel handles them in every pod, though no pod needs them. With
	// hundreds of pods, this is the largest part of the cost of starting one. The bridge itself still learns from the
	// reports. A port that leads to a multicast router must be in another group, since routers need the reports (RFC
	// 4541, section 2.1.1).
	DropReports bool
	// Dedup lists the subnets in which the firewall drops duplicate packets. Set it only while the bridge is
	// promiscuous and NFCall is set: see Dedup.
	Dedup []Dedup
	// Share connects the bridge to a LAN through a NIC of the host that is not a port of the bridge. Networks on the
	// same bridge must have the same Share. See Endpoint.NIC and Conn.RemoveShare.
	Share *Share
}

// Share describes a NIC of the host that is shared with pods, and the veth pair between the NIC and a bridge (package
// bridge/share). If the NIC receives or is about to send a frame to the MAC of an endpoint on the bridge, the firewall
// sends the frame into the pair instead. It also sends copies of multicast frames into the pair. Other frames, frames
// that pods sent, and frames of a VLAN go their usual way.
//
// Share needs CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV, CONFIG_NFT_DUP_NETDEV and CONFIG_NETFILTER_EGRESS (Linux
// 5.16). After the pair was created again, Ready returns false until Ensure is called.
type Share struct {
	NIC   string
	MAC   net.HardwareAddr // the NIC's MAC
	Outer int              // index of the pair's end outside of the bridge
	Port  string           // name of the pair's other end, a port of the bridge
}

// Closed describes an address family that the host forwards for pods only.
type Closed struct {
	IPv6 bool // false means IPv4
	// Routers are the links on which the host's owner has enabled forwarding of the family. The firewall does not
	// drop packets that come in by one of them. Answers mostly come in by another link, so list that link as well.
	Routers []string
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{tombolo.ErrInvalid}, args...)...)
}

func (n *Network) check() error {
	if err := checkName(n.Name); err != nil {
		return err
	}

	for _, p := range slices.Concat(n.Prefixes, n.NonMasquerade) {
		if !p.IsValid() || p.Addr().Is4In6() {
			return invalid("network %s: prefix %v", n.Name, p)
		}
	}

	for i := range n.Dedup {
		if err := n.Dedup[i].check(); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	return n.checkBridge()
}

func checkName(name string) error {
	if !ident.IsIdentifier(name) {
		return invalid("network name %q: want letters and digits, and after the first one '_', '.' and '-' too", name)
	}
	return nil
}

// ruleset returns the intended rules of the network n. It returns an error if n is invalid or if the Conn has an
// invalid configuration.
func (c *Conn) ruleset(n *Network) (*ruleset.Ruleset, error) {
	if err := cmp.Or(c.err, n.check()); err != nil {
		return nil, err
	}
	return ruleset.New(n.spec(), c.tables.Name, c.mark), nil
}

// spec converts the network to the Network type of package ruleset.
func (n *Network) spec() *ruleset.Network {
	s := &ruleset.Network{
		Key: ruleset.NetworkKey(n.Name), Masquerade: n.Masquerade, Exempt: slices.Concat(n.Prefixes, n.NonMasquerade),
		Bridge: n.Bridge, VLANOf: n.VLANOf, NFCall: n.NFCall, LAN: n.LAN, Gateway: n.Gateway, Policy: n.Policy.String(),
		Guard: n.Guard, Groups: n.Groups, DropReports: n.DropReports, PortSNAT: n.PortSNAT, Internal: n.Internal,
		PodEgress: n.PodEgress,
	}
	s.Egress, _ = ruleset.ParseEgress(string(n.Egress)) // cannot fail: check has parsed it
	s.Share = (*ruleset.Share)(n.Share)
	for _, c := range n.Closed {
		s.Closed = append(s.Closed, ruleset.Closed(c))
	}

	for _, d := range n.Dedup {
		s.Dedup = append(s.Dedup, ruleset.Dedup(d))
	}

	return s
}

// Policy restricts packets between pods, on the same bridge or on different bridges. The firewall drops a packet only
// if both the incoming and the outgoing bridge have a policy. So a policy does not affect packets from the host or
// from outside. It also has no effect on packets from or to a bridge without a policy. Answers are restricted like
// other packets, so policies need no connection tracking. A published port does not bypass the policy.
//
// If networks on the same bridge have different policies, the strictest one applies.
type Policy uint8

const (
	// Open drops no packets.
	Open Policy = iota
	// SameBridge drops packets between two bridges that both have a policy.
	SameBridge
	// Isolated also drops packets that stay on the bridge. This includes packets that a pod sends to itself through the
	// host. Without Network.NFCall, and with VLANOf, the rules do not match packets that the bridge itself forwards.
	// The ports of the bridge must then be isolated (bridge.Port).
	Isolated
)

// String returns the policy's name, as in the field ingressPolicy of CNI's firewall plugin.
func (p Policy) String() string {
	if names := [...]string{"open", "same-bridge", "isolated"}; int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("policy %d", p)
}

// MarshalText returns the name from String.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText parses a name that String returns. For other names, the error matches tombolo.ErrInvalid.
func (p *Policy) UnmarshalText(text []byte) error {
	return unmarshal(p, text, Open, SameBridge, Isolated)
}

// Egress lists the destinations that pods may open connections to. Answers always pass.
//
//   - "" and "all" permit every destination.
//   - "replies" permits no destination.
//   - Any other value is a comma-separated list of entries. A destination is permitted if one entry permits it.
//
// The entry "public" permits the public internet. It leaves out private, shared, link-local, multicast and other
// reserved addresses, and addresses of the host. Any other entry begins with a prefix or an address, and permits all of
// it, including addresses of the host. A protocol, or a protocol and ports, may follow to permit only these. An example
// is "10.9.0.0/16 tcp 5432, fd00::/8 udp 53-60, ::1 icmp".
//
// A pod can send ICMP errors only to permitted destinations.
type Egress string

// Check returns an error that matches tombolo.ErrInvalid if e is not a valid list of destinations.
func (e Egress) Check() error {
	if _, err := ruleset.ParseEgress(string(e)); err != nil {
		return invalid("egress policy: %w", err)
	}
	return nil
}

func isNoLinkName(name string) bool { return !ident.IsLinkName(name) }

func (n *Network) checkBridge() error {
	switch {
	case n.Bridge != "" && !ident.IsLinkName(n.Bridge):
		return invalid("network %s: bridge %q is no name of a link"+ident.LinkNameForm, n.Name, n.Bridge)
	case n.VLANOf != "" && (n.Bridge == "" || !ident.IsLinkName(n.VLANOf)):
		return invalid("network %s: link %q in a VLAN of bridge %q", n.Name, n.Bridge, n.VLANOf)
	case slices.ContainsFunc(n.Closed, func(c Closed) bool { return slices.ContainsFunc(c.Routers, isNoLinkName) }):
		return invalid("network %s: Closed names no link in %v"+ident.LinkNameForm, n.Name, n.Closed)
	case n.Share != nil && (n.Bridge == "" || n.VLANOf != "" || !n.Share.isValid()):
		return invalid("network %s: bridge %q is to share a NIC by %+v", n.Name, n.Bridge, *n.Share)
	case n.Policy > Isolated:
		return invalid("network %s: %s", n.Name, n.Policy)
	case n.Bridge == "" && (n.Internal || n.Egress != ""):
		return invalid("network %s: it is internal or has an egress policy, and no bridge", n.Name)
	case n.Egress.Check() != nil:
		return fmt.Errorf("network %s: %w", n.Name, n.Egress.Check())
	case n.Bridge == "" && n.Policy != Open:
		return invalid("network %s: policy %s without the name of a bridge", n.Name, n.Policy)
	}

	return nil
}

func (s *Share) isValid() bool {
	return ident.IsLinkName(s.NIC) && ident.IsLinkName(s.Port) && s.Outer > 0 && len(s.MAC) == ruleset.EtherLen
}

// Dedup describes a subnet behind a promiscuous bridge. Its pods would get some packets twice without the rules for
// Dedup.
//
// Suppose a pod sends a packet to the address of a service, and a rule changes the destination to another pod on the
// bridge. If the bridge calls iptables (Network.NFCall), the packet is delivered twice. The bridge itself forwards
// one copy. The host receives another copy, because the bridge is promiscuous, and routes it back to the bridge. The
// rules drop the second copy when it leaves the bridge. They recognize it by the bridge's own MAC as source MAC,
// together with a pod's source address.
//
// Every packet that only the host forwards between pods of the subnet looks like a second copy. So Dedup would drop
// all of them if the bridge forwarded no first copy. The bridge forwards none if it does not call iptables or is not
// promiscuous. There is no first copy either if the service's address belongs to the host, as with IPVS. Pods behind
// hairpin ports need no promiscuous bridge.
type Dedup struct {
	// BridgeMAC is the MAC of the bridge.
	BridgeMAC net.HardwareAddr
	// Gateway is the host's address on the bridge. Packets from it are not dropped. If the host has several addresses
	// there, list one Dedup for each.
	Gateway netip.Addr
	// Subnet contains the addresses of the pods. It has the same family as Gateway. Its host bits are ignored.
	Subnet netip.Prefix
}

func (d *Dedup) check() error {
	switch {
	case len(d.BridgeMAC) != ruleset.EtherLen:
		return invalid("dedup: %q cannot be the MAC of a bridge", d.BridgeMAC)
	case !d.Subnet.IsValid() || d.Subnet.Addr().Is4In6() || d.Subnet.Bits() == 0:
		return invalid("dedup: subnet %v", d.Subnet)
	case d.Gateway.Is4() != d.Subnet.Addr().Is4() || !d.Gateway.IsValid() || d.Gateway.Zone() != "" ||
		d.Gateway.Is4In6():
		return invalid("dedup: gateway %v of subnet %v", d.Gateway, d.Subnet)
	}

	return nil
}
