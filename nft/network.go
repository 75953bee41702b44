package nft

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// Network is what rules are made for.
type Network struct {
	// Name is the network's name: letters, digits, "_", "." and "-", not starting
	// with one of the latter three (as CNI has it).
	Name string
	// Prefixes are the pods' own: what goes to them keeps its source address.
	Prefixes []netip.Prefix
	// Masquerade gives what pods send to elsewhere the address of the link that it
	// leaves by. It takes effect for endpoints that ask for it too.
	Masquerade bool
	// NonMasquerade are further destinations for which pods keep their address;
	// 0.0.0.0/0 or ::/0 switches masquerade off for the whole family. Multicast
	// keeps its source address in any case.
	NonMasquerade []netip.Prefix
	// Bridge is the name of the bridge that the network is on. Without it, what is
	// bridged between its pods has no mark, and the fields below say nothing.
	Bridge string
	// VLANOf is the bridge whose VLAN the network is, where Bridge is the host's link in that
	// VLAN; empty where Bridge is the bridge. What is bridged within the VLAN passes the hooks
	// by the name of VLANOf, and what the host routes by that of Bridge.
	VLANOf string
	// NFCall says that what the bridge forwards passes the firewall's hooks too
	// (IFLA_BR_NF_CALL_IPTABLES and _IP6TABLES, or the sysctl that does it for all
	// bridges). Without it, answers between pods of the bridge pass by the host: what
	// one of them sends to another by way of a changed destination is masqueraded.
	NFCall bool
	// LAN says that a port of the bridge leads to machines that are in one subnet with
	// the pods, as where a NIC of the host's is such a port. They answer to each other
	// and to pods past the host: so what it has changed the destination of, and sends
	// to one of them, is masqueraded; without NFCall, what it sends to pods is too.
	//
	// With NFCall, the bridge itself redirects what is led on to another of its ports,
	// and never sends back by the one that something came in by: a machine of the LAN
	// that is led to another machine there reaches nobody, unless the frames that the
	// LAN sends to the host's MAC are kept from the bridge (as tc's mirred does it, from
	// the port's ingress to the bridge's).
	LAN bool
	// Policy says which pods of other networks, and of this one, may send to the
	// network's pods.
	Policy Policy
	// Guard has what Endpoint.GuardedPort, SLAAC and Untrusted need. Without it, ports
	// that were guarded before stay so.
	Guard bool
	// Groups, which Guard implies, drops what pods send to the link-local groups (01:80:c2:00:00:00 to :0f):
	// frames that a bridge does not forward, but hands to the host as from the port, past
	// every rule that names the bridge. It holds for each port of each bridge whose name
	// begins with "veth", by whatever program, and whether the firewall knows the pod or not:
	// a veth that is no pod's, and whose STP a bridge without STP has to pass on, or LLDP,
	// needs another name. For the groups of STP and LLDP the port has to be told to
	// forward them (bridge.Port's ForwardGroups), or no rule is asked.
	//
	// It also drops, from such ports, IP behind a tag of VLAN 0, which reaches other pods past
	// the firewall's hooks, and, from ports in PodGroup, multicast queries.
	Groups bool
	// PortSNAT has what Endpoint.PortSNAT needs that is not SNATNeeded. Without it, ports that had that keep it.
	PortSNAT bool
	// DropReports keeps the multicast listener reports of others (MLDv2, RFC 3810) from those
	// ports of the bridge that are in PodGroup. Each pod with IPv6 sends some when it
	// starts, and a bridge that has heard of no querier sends them to all ports, where
	// every pod looks at them, and none reads them: with hundreds of pods, most of what the
	// start of one costs. The bridge itself has seen them before, and a port with a
	// multicast router behind it has to be in another group (RFC 4541, section 2.1.1: such
	// ports alone are to get reports).
	DropReports bool
	// Dedup is for a promiscuous bridge that calls iptables, and for as long as it is
	// both: see there.
	Dedup []Dedup
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
	if err := n.check(); err != nil {
		return nil, err
	}
	return ruleset.New(n.spec(), c.tables.Name, c.mark), nil
}

// spec is the network as package ruleset has it.
func (n *Network) spec() *ruleset.Network {
	s := &ruleset.Network{
		Key: ruleset.NetworkKey(n.Name), Masquerade: n.Masquerade, Exempt: slices.Concat(n.Prefixes, n.NonMasquerade),
		Bridge: n.Bridge, VLANOf: n.VLANOf, NFCall: n.NFCall, LAN: n.LAN, Policy: n.Policy.String(),
		Guard: n.Guard, Groups: n.Groups, DropReports: n.DropReports, PortSNAT: n.PortSNAT,
	}
	for _, d := range n.Dedup {
		s.Dedup = append(s.Dedup, ruleset.Dedup(d))
	}
	return s
}
