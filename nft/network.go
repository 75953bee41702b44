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

// Network describes a network and its rules.
type Network struct {
	// Name is the network's name: letters, digits, "_", "." and "-", beginning with a letter or digit (as in CNI).
	Name string
	// Prefixes are the pods' own networks. Packets to them keep their source address.
	Prefixes []netip.Prefix
	// Masquerade gives packets from pods to other destinations the address of the link that they leave by. It applies
	// only to endpoints with Masquerade.
	Masquerade bool
	// NonMasquerade are further destinations. Packets to them keep the pod's address. 0.0.0.0/0 or ::/0 disables
	// masquerading for the whole family. Multicast always keeps its source address.
	NonMasquerade []netip.Prefix
	// Bridge is the name of the network's bridge. Without it, packets bridged between its pods have no mark, marks
	// are not cleared, foreign.Conn admits nothing, and the fields below have no effect.
	Bridge string
	// VLANOf names the bridge if the network is a VLAN of it, and Bridge is the host's link in that VLAN. Otherwise
	// it is empty, and Bridge is the bridge. Packets bridged within the VLAN pass the hooks with the name of VLANOf,
	// and packets routed by the host with that of Bridge.
	VLANOf string
	// NFCall means that bridged packets pass the firewall's hooks too (IFLA_BR_NF_CALL_IPTABLES and _IP6TABLES, or
	// the sysctl for all bridges). Without it, answers between pods of the bridge do not pass the host. So packets
	// between them whose destination was changed are masqueraded.
	NFCall bool
	// LAN means that a port of the bridge leads to machines in the same subnet as the pods, for example because a NIC
	// of the host is a port. They answer each other and the pods directly. So the host masquerades packets to such
	// machines whose destination it has changed, and without NFCall also those to pods.
	//
	// With NFCall, the bridge itself sends a packet whose destination was changed to another of its ports, and never
	// back by the port that it came in by. So a LAN machine whose packet is redirected to another machine there gets
	// no answer, unless frames from the LAN to the host's MAC are kept away from the bridge (for example by tc's
	// mirred, from the port's ingress to the bridge's).
	LAN bool
	// Gateway makes the host route for the network through Bridge, which leads to pods only. It only matters together
	// with Closed.
	Gateway bool
	// Closed lists the address families that the host routes for pods only. The kernel forwards them on all of the
	// host's links, because pods need it (bridge.Routing). So the firewall drops a packet of such a family unless it
	// comes from or goes to the Bridge of a network with Gateway, or has the mark of packets from or to pods. All
	// networks of a node share this rule, so set the same value in each.
	Closed []Closed
	// Policy selects the pods, of this and other networks, that may send to the network's pods.
	Policy Policy
	// Guard adds the rules that Endpoint.Guard needs. If it is cleared later, guarded ports stay guarded.
	Guard bool
	// Groups, which Guard implies, drops packets from pods to the link-local groups (01:80:c2:00:00:00 to :0f). A
	// bridge does not forward such frames, but passes them to the host as if received from the port, past every rule
	// that names the bridge. The rule applies to each port of each bridge whose name begins with "veth", also to
	// other programs' ports and to pods that the firewall does not know. So a veth that is no pod's, and whose STP or
	// LLDP frames a bridge without STP must pass on, needs another name. The kernel applies the rules to the groups
	// of STP and LLDP only if the port forwards them (bridge.Port's ForwardGroups).
	//
	// It also drops, from such ports, IP behind a tag of VLAN 0, which would reach other pods past the firewall's
	// hooks. From ports in PodGroup or GatewayGroup it drops multicast queries. From ports in GatewayGroup it drops
	// packets that would make the pod the host's DHCP server or router: packets to the ports of DHCP clients, router
	// advertisements and redirects, if the bridge would pass them to the host. Packets between pods pass.
	Groups bool
	// PortSNAT adds the rules for values of Endpoint.PortSNAT other than SNATNeeded. If it is cleared later, ports
	// that use them keep working.
	PortSNAT bool
	// Internal drops packets between the bridge and all other links, in both directions. The host itself and the
	// bridge's pods reach each other. Networks on one bridge are internal together.
	Internal bool
	// Egress lists the destinations that the pods of the bridge may open connections to, from any source address.
	// Networks on one bridge have the same Egress. It needs NFCall: without it, bridged packets do not pass.
	Egress Egress
	// PodEgress adds the rules that Endpoint.Egress needs.
	PodEgress bool
	// DropReports drops the multicast listener reports of others (MLDv2, RFC 3810) at the bridge's ports in PodGroup.
	// Each pod with IPv6 sends some when it starts, and a bridge that has seen no querier sends them to all ports.
	// Every pod's kernel looks at them, without a use: with hundreds of pods, they are most of the cost of starting
	// one. The bridge itself has seen them before. A port that leads to a multicast router must be in another group
	// (RFC 4541, section 2.1.1: only such ports should get reports).
	DropReports bool
	// Dedup lists subnets of a promiscuous bridge that calls iptables. Set it only while both hold: see Dedup.
	Dedup []Dedup
	// Share connects the bridge to a LAN through a NIC of the host that is not a port of it. Networks on one bridge
	// have the same Share. See Endpoint.NIC, and Conn.RemoveShare.
	Share *Share
}

// Share describes a NIC of the host, and a veth pair that leads from its hooks to a bridge (package bridge/share).
// Frames to the MACs of the bridge's endpoints go from the NIC into the pair, and so do copies of multicast frames.
// All other frames, and frames with a VLAN tag, take their usual way.
//
// It needs CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV, CONFIG_NFT_DUP_NETDEV and CONFIG_NETFILTER_EGRESS (Linux
// 5.16). If the pair or the NIC was created again, Ready is false until Ensure is called.
type Share struct {
	NIC   string
	MAC   net.HardwareAddr // the NIC's
	Outer int              // the index of the pair's end that is not on the bridge
	Port  string           // the pair's other end, a port of the bridge
}

// Closed is a family that the host forwards for pods only.
type Closed struct {
	IPv6 bool // false means IPv4
	// Routers are the links that the host's owner lets forward: packets that come in by them may go anywhere. The
	// answers come in by another link: list that link as well.
	Routers []string
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{tombolo.ErrInvalid}, args...)...)
}

// check returns an error if a network is invalid.
func (n *Network) check() error {
	if err := checkName(n.Name); err != nil {
		return err
	}

	for _, p := range slices.Concat(n.Prefixes, n.NonMasquerade) {
		if !p.IsValid() || p.Addr().Is4In6() {
			return invalid("network %s: prefix %v", n.Name, p)
		}
	}

	if err := n.checkDedup(); err != nil {
		return err
	}
	return n.checkBridge()
}

func checkName(name string) error {
	for i, c := range []byte(name) {
		if !isAlphanumeric(c) && (i == 0 || c != '_' && c != '.' && c != '-') {
			return invalid("network name %q: want letters and digits, and after the first one '_', '.' and '-' too",
				name)
		}
	}
	if name == "" {
		return invalid("a network without a name")
	}
	return nil
}

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// ruleset returns the intended rules of a network.
func (c *Conn) ruleset(n *Network) (*ruleset.Ruleset, error) {
	if err := cmp.Or(c.err, n.check()); err != nil {
		return nil, err
	}
	return ruleset.New(n.spec(), c.tables.Name, c.mark), nil
}

// spec converts the network to package ruleset's type.
func (n *Network) spec() *ruleset.Network {
	s := &ruleset.Network{
		Key: ruleset.NetworkKey(n.Name), Masquerade: n.Masquerade, Exempt: slices.Concat(n.Prefixes, n.NonMasquerade),
		Bridge: n.Bridge, VLANOf: n.VLANOf, NFCall: n.NFCall, LAN: n.LAN, Gateway: n.Gateway, Policy: n.Policy.String(),
		Guard: n.Guard, Groups: n.Groups, DropReports: n.DropReports, PortSNAT: n.PortSNAT, Internal: n.Internal,
		PodEgress: n.PodEgress,
	}
	s.Egress, _ = ruleset.ParseEgress(string(n.Egress)) // which check has read
	s.Share = (*ruleset.Share)(n.Share)
	for _, c := range n.Closed {
		s.Closed = append(s.Closed, ruleset.Closed(c))
	}

	for _, d := range n.Dedup {
		s.Dedup = append(s.Dedup, ruleset.Dedup(d))
	}

	return s
}

// Policy restricts packets between pods of different bridges or of one. It does not apply to packets from the host or
// from outside, or to networks without a policy: a packet is dropped only if it comes from a bridge with a policy and
// goes to such a bridge. This includes answers, so policies need no connection tracking. A published port of a pod
// does not bypass the policy.
//
// Networks on the same bridge share the strictest of their policies.
type Policy uint8

const (
	// Open drops nothing.
	Open Policy = iota
	// SameBridge drops packets between two bridges that both have a policy.
	SameBridge
	// Isolated also drops packets that stay on the bridge, including those from a pod to itself through the host.
	// Packets that the bridge itself forwards pass these rules only with Network.NFCall. Without it, the bridge's
	// ports must be isolated.
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

// UnmarshalText parses the name from String. The error matches tombolo.ErrInvalid.
func (p *Policy) UnmarshalText(text []byte) error {
	return unmarshal(p, text, Open, SameBridge, Isolated)
}

// Egress lists the destinations that pods may open connections to. Their answers always pass.
//
//   - "" and "all" permit every destination.
//   - "replies" permits none.
//   - Otherwise it is a list of entries with commas between. Each entry permits more. "public" is the internet without
//     private, shared, link-local and multicast addresses and without those of the host. A prefix or an address permits
//     all of it, including the host, or only one protocol and ports if these follow, as in
//     "10.9.0.0/16 tcp 5432, fd00::/8 udp 53-60, ::1 icmp".
//
// A pod sends ICMP errors only to permitted destinations.
type Egress string

// Check returns an error that matches tombolo.ErrInvalid if e is not a valid policy.
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
	case n.Share != nil && (n.Bridge == "" || n.VLANOf != "" || n.Share.check() != nil):
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

func (s *Share) check() error {
	if isNoLinkName(s.NIC) || isNoLinkName(s.Port) || s.Outer <= 0 || len(s.MAC) != ruleset.EtherLen {
		return tombolo.ErrInvalid
	}
	return nil
}

// Dedup is a subnet of a promiscuous bridge whose pods would get packets twice.
//
// Suppose a pod sends a packet to a service's address, which is changed to that of another pod on the bridge. If the
// bridge calls iptables (Network.NFCall), the packet takes two ways: the bridge itself forwards it, and the host,
// which sees a copy, routes it back to the bridge. The second copy is dropped when it leaves for the bridge: it comes
// from the bridge's own MAC, with a pod's address. But so does everything that the host alone forwards between pods
// of the subnet. If the bridge does not call iptables or is not promiscuous, or if the service's address is the
// host's own, as with IPVS, there is no first copy, and dedup would drop all. Pods with hairpin ports need no
// promiscuous bridge.
type Dedup struct {
	// BridgeMAC is the bridge's MAC.
	BridgeMAC net.HardwareAddr
	// Gateway is the host's address on the bridge, which may send to pods. For several gateways, repeat the Dedup
	// with each.
	Gateway netip.Addr
	// Subnet contains the pods' addresses, of the same family. Its host bits are ignored.
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

// checkDedup returns an error if an entry of the network's Dedup is invalid.
func (n *Network) checkDedup() error {
	for i := range n.Dedup {
		if err := n.Dedup[i].check(); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	return nil
}
