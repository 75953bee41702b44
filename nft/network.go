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

// Network describes a network whose rules Conn.Ensure makes. Name is required. Most networks also set Prefixes, Bridge,
// NFCall as the bridge has it, and Masquerade or Guard. A field with its zero value asks for nothing.
type Network struct {
	// Name is the network's name: letters, digits, "_", "." and "-", not starting with one of the latter three, as in
	// CNI.
	Name string
	// Prefixes are the subnets of the network's pods. Packets to them are never masqueraded.
	Prefixes []netip.Prefix
	// Masquerade lets endpoints be masqueraded: packets from an endpoint with Endpoint.Masquerade leave the host with
	// the address of the link that they leave by.
	Masquerade bool
	// NonMasquerade are further destinations to which packets keep their source address. 0.0.0.0/0 or ::/0 turns
	// masquerade off for the whole family. Packets to multicast groups are never masqueraded.
	NonMasquerade []netip.Prefix
	// Bridge is the name of the network's bridge, which need not exist yet. It has to be the bridge's own name and not
	// an alternative one. Without it, packets that are bridged between the network's pods are not marked, foreign.Conn
	// admits nothing, and the fields below have no effect.
	Bridge string
	// VLANOf is for a network in a VLAN of a bridge: the name of that bridge, while Bridge is the host's link in the
	// VLAN. Packets that are bridged within the VLAN pass the firewall's hooks by the name of VLANOf, and packets that
	// the host routes by that of Bridge.
	VLANOf string
	// NFCall says that packets which the bridge forwards pass the firewall's hooks too, by bridge.Bridge's NFCall or by
	// the sysctls for all bridges. Without it, answers between pods of the bridge do not pass the host, so rules
	// masquerade packets between pods whose destination the host has changed.
	NFCall bool
	// LAN says that a port of the bridge leads to machines in the pods' subnet, such as a NIC of the host. They answer
	// each other and pods without the host. So rules masquerade packets to such a machine whose destination the host
	// has changed, and without NFCall also such packets to pods.
	//
	// With NFCall, the bridge sends a packet whose destination was changed to another port, but never back to the port
	// that it came in by. So a machine of the LAN that is led to another machine of the LAN gets no answer, unless
	// frames from the LAN to the host's MAC never reach the bridge: tc's mirred can lead them past it.
	LAN bool
	// Gateway says that the host routes for the network, and that Bridge leads to pods alone. It matters with Closed.
	Gateway bool
	// Closed lists the families that the host forwards for pods alone: it is no router, although its links forward
	// (bridge.Routing). The rules drop a packet unless it comes from or goes to the Bridge of a network with Gateway,
	// or was marked as a pod's. All networks of a node share this rule, so give each the same list.
	Closed []Closed
	// Policy is the set of pods that may send to the network's pods. The zero value is Open: all may.
	Policy Policy
	// Guard makes the rules that Endpoint.Guard needs. Without it, ports that were guarded before stay guarded.
	Guard bool
	// Groups drops frames from pods to the link-local groups (01:80:c2:00:00:00 to :0f). Guard implies it. A bridge
	// does not forward such frames, but hands them to the host as from the port, past every rule that names the bridge.
	//
	// It applies to all ports of all bridges whose names begin with "veth", other programs' included. If a bridge
	// without STP has to pass STP from a veth, give that veth another name. The kernel asks the rules about the groups
	// of STP and LLDP only if the port forwards them (bridge.Port's ForwardGroups).
	//
	// From the same ports it also drops IP behind a tag of VLAN 0, which would pass the hooks unseen. From ports in
	// PodGroup or GatewayGroup it drops multicast queries. From ports in GatewayGroup it drops packets to the host by
	// which a pod would become the host's DHCP server or router: packets to the ports of DHCP clients, router
	// advertisements and redirects.
	Groups bool
	// PortSNAT makes the rules that an Endpoint.PortSNAT other than SNATNeeded needs. Without it, ports that had one
	// keep it.
	PortSNAT bool
	// Internal drops packets between the bridge and all other links, in both directions. The host itself and the bridge's
	// pods reach each other. Networks on one bridge are internal together.
	Internal bool
	// Egress says what the pods of the bridge may send by themselves, whatever address they send from. Networks on one
	// bridge have the same. It needs NFCall, without which packets that the bridge switches do not pass.
	Egress Egress
	// PodEgress has what Endpoint.Egress needs.
	PodEgress bool
	// DropReports keeps the multicast listener reports of others (MLDv2, RFC 3810) from the ports of the bridge that are
	// in PodGroup. A bridge without a querier sends them to all ports, and every pod looks at them in vain: with
	// hundreds of pods this is most of the cost of starting one. The bridge itself has seen them before.
	//
	// A port with a multicast router behind it needs the reports (RFC 4541, section 2.1.1), so put it into another
	// group.
	DropReports bool
	// Dedup drops second copies of packets, on a promiscuous bridge with NFCall. See the type.
	Dedup []Dedup
	// Share connects the bridge to a LAN by a NIC of the host that is no port of the bridge. Networks on one bridge have
	// the same Share. See Endpoint.NIC and Conn.RemoveShare.
	Share *Share
}

// Share is a NIC of the host, and a veth pair that leads from its hooks to a bridge (package bridge/share). Frames to
// the MACs of the bridge's endpoints go from the NIC into the pair, and copies of multicast frames do. All others, and
// those with the tag of a VLAN, go where they went before.
//
// It needs CONFIG_NF_TABLES_NETDEV, CONFIG_NFT_FWD_NETDEV, CONFIG_NFT_DUP_NETDEV and CONFIG_NETFILTER_EGRESS (Linux 5.16).
// Where the pair or the NIC was made anew, Ready is false until Ensure is called.
type Share struct {
	NIC   string
	MAC   net.HardwareAddr // the NIC's
	Outer int              // the index of the pair's end that is not on the bridge
	Port  string           // its other end, the bridge's port
}

// Closed is a family that the host forwards for pods only.
type Closed struct {
	IPv6 bool // false means IPv4
	// Routers are the links that the host's owner lets forward: packets that come in by them may go anywhere.
	Routers []string
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{tombolo.ErrInvalid}, args...)...)
}

// check says what is wrong with a network.
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
			return invalid("network name %q: want letters and digits, and after the first one '_', '.' and '-' too", name)
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

// ruleset gives what there should be for a network.
func (c *Conn) ruleset(n *Network) (*ruleset.Ruleset, error) {
	if err := cmp.Or(c.err, n.check()); err != nil {
		return nil, err
	}
	return ruleset.New(n.spec(), c.tables.Name, c.mark), nil
}

// spec is the network as package ruleset has it.
func (n *Network) spec() *ruleset.Network {
	s := &ruleset.Network{
		Key: ruleset.NetworkKey(n.Name), Masquerade: n.Masquerade, Exempt: slices.Concat(n.Prefixes, n.NonMasquerade),
		Bridge: n.Bridge, VLANOf: n.VLANOf, NFCall: n.NFCall, LAN: n.LAN, Gateway: n.Gateway, Policy: n.Policy.String(),
		Guard: n.Guard, Groups: n.Groups, DropReports: n.DropReports, PortSNAT: n.PortSNAT, Internal: n.Internal, PodEgress: n.PodEgress,
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

// Policy says from where pods may be sent to, as far as other pods are concerned.
// It does not concern the host, what comes from outside, and networks that have none:
// a packet is dropped only if it comes from a bridge with a policy, and goes to
// such a bridge. So is one that answers to it: policies need to know nothing of
// connections. A port that a pod has published on the host is no way round them.
//
// Networks on the same bridge share the strictest of their policies.
type Policy uint8

const (
	// Open drops nothing.
	Open Policy = iota
	// SameBridge drops what comes from or goes to another bridge with a policy.
	SameBridge
	// Isolated drops what stays on the bridge, too: what a pod sends to itself by way of the host included. Packets
	// that the bridge forwards by itself pass here only with Network.NFCall; without it the bridge's ports have to
	// be isolated.
	Isolated
)

// String gives the policy as the field ingressPolicy of CNI's firewall plugin has it.
func (p Policy) String() string { return nameOf("policy", uint8(p), "open", "same-bridge", "isolated") }

// MarshalText gives what String does.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what String gives. The error matches tombolo.ErrInvalid.
func (p *Policy) UnmarshalText(text []byte) error {
	return unmarshal(p, text, Open, SameBridge, Isolated)
}

// Egress says what pods may send by themselves; their answers always pass:
//
//   - "" and "all": everything
//   - "replies": nothing
//   - otherwise entries with commas between, of which each allows more: "public" is the internet without private, shared,
//     link-local and multicast addresses and without those of the host; a prefix or an address is all of it, the host
//     included, or one protocol and ports if these follow, as in "10.9.0.0/16 tcp 5432, fd00::/8 udp 53-60, ::1 icmp"
//
// A pod sends no ICMP errors, unless it may send there by itself.
type Egress string

// Check reports an error, which matches tombolo.ErrInvalid, if the text is no policy.
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
// A packet of such a pod to a service's address, which is changed to that of another pod of the bridge, takes two
// ways where the bridge calls iptables (Network.NFCall): the bridge forwards it by itself, and the host, which sees
// a copy, routes it back to the bridge. The second copy is dropped where it leaves the bridge: it comes from the
// bridge's own MAC, with a pod's address. So does everything that the host alone forwards between pods of the
// subnet: where the bridge does not call iptables or is not promiscuous, and where the service's address is the
// host's own, as IPVS has it, there is no first copy, and dedup drops all. Pods with hairpin ports need no
// promiscuous bridge.
type Dedup struct {
	// BridgeMAC is the bridge's.
	BridgeMAC net.HardwareAddr
	// Gateway is the host's address on the bridge, from which it may send to pods. For
	// more than one of them, the rest is given again.
	Gateway netip.Addr
	// Subnet has the pods' addresses, of the same family; its host bits do not matter.
	Subnet netip.Prefix
}

func (d *Dedup) check() error {
	switch {
	case len(d.BridgeMAC) != ruleset.EtherLen:
		return invalid("dedup: %q cannot be the MAC of a bridge", d.BridgeMAC)
	case !d.Subnet.IsValid() || d.Subnet.Addr().Is4In6() || d.Subnet.Bits() == 0:
		return invalid("dedup: subnet %v", d.Subnet)
	case d.Gateway.Is4() != d.Subnet.Addr().Is4() || !d.Gateway.IsValid() || d.Gateway.Zone() != "" || d.Gateway.Is4In6():
		return invalid("dedup: gateway %v of subnet %v", d.Gateway, d.Subnet)
	}
	return nil
}

// checkDedup says what is wrong with the network's.
func (n *Network) checkDedup() error {
	for i := range n.Dedup {
		if err := n.Dedup[i].check(); err != nil {
			return fmt.Errorf("network %s: %w", n.Name, err)
		}
	}
	return nil
}
