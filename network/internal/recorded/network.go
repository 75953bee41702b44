// Package recorded says what the records of networks and attachments call for in the kernel.
package recorded

import (
	"crypto/sha256"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/nft"
)

// MaxLearned is how many MACs a bridge of ours learns, as many as a large switch: a pod
// that macspoofchk, guard or lanGuard does not hold to its own may send as any number of them.
// There is no such limit of multicast groups: the kernel counts those of a port
// (mcast_max_groups) after it has made the entry that fills the bridge's table.
const MaxLearned = 16384

// LearnedLimit is the limit of a bridge that is there: one that somebody else made keeps
// what it has, and so does one of ours to which an operator gave another. One that was
// left half made has no alias yet.
func LearnedLimit(l *bridge.Link) uint32 {
	if l.Alias != endpoint.BridgeAlias && !l.Unfinished() || l.Bridge == nil || l.Bridge.MaxLearned == nil || *l.Bridge.MaxLearned != 0 {
		return 0
	}
	return MaxLearned
}

// OwnsBridge says whether we made the bridge, or have been told to route on it:
// then no router is to be heard there but us.
func OwnsBridge(rec *state.Network, l *bridge.Link) bool {
	return l.Alias == endpoint.BridgeAlias || len(rec.Gateways) > 0
}

// BridgeMTU is what the bridge's MTU is to be; 0 where it is the host's own link to its
// LAN, whose MTU pods have no say in.
func BridgeMTU(rec *state.Network) int {
	if rec.Uplink != "" {
		return 0
	}
	return rec.MTU
}

// BridgeFits says whether a bridge has the attributes that its network gave
// it.
func BridgeFits(l *bridge.Link, rec *state.Network) bool {
	return (rec.VLAN == state.VLAN{} || l.Bridge != nil && l.Bridge.VLANFiltering) && (rec.Promiscuous == nil || l.Promiscuous == *rec.Promiscuous) &&
		(rec.NFCall == nil || l.Bridge != nil && l.Bridge.NFCallIPTables == *rec.NFCall && l.Bridge.NFCallIP6Tables == *rec.NFCall)
}

// Rules describes a network to the firewall: as its record has it, and as its
// bridge is.
func Rules(rec *state.Network, l *bridge.Link) nft.Network {
	n := nft.Network{
		Name: rec.Name, Bridge: rec.GatewayLink(), Prefixes: rec.Subnets,
		Masquerade: rec.Masquerade, NonMasquerade: rec.NonMasquerade,
		Policy: max(policyOf(rec.Policy), policyOf(rec.ChainedPolicy)), Guard: rec.Guard, PortSNAT: rec.PortSNAT, Groups: true, LAN: rec.DefaultRoute != "",
		NFCall:      nfCall(l),
		DropReports: rec.SLAAC || slices.ContainsFunc(rec.Subnets, IsIPv6),
	}
	if rec.VLAN.ID != 0 {
		n.VLANOf = rec.Bridge
	}
	if !l.Promiscuous {
		return n
	}
	// Only what passes the firewall on the bridge is there twice: without that, the
	// rules would take the only copy.
	for _, gw := range rec.Gateways {
		if passesFirewall(l, gw.Addr().Is4()) {
			n.Dedup = append(n.Dedup, nft.Dedup{BridgeMAC: l.MAC, Gateway: gw.Addr(), Subnet: gw.Masked()})
		}
	}
	return n
}

// nfCall says whether what a bridge forwards passes the firewall.
func nfCall(l *bridge.Link) bool {
	return l.Bridge != nil && l.Bridge.NFCallIPTables && l.Bridge.NFCallIP6Tables && bridge.ProbeNetfilter() == nil
}

// passesFirewall says whether packets of a family that a bridge switches pass the
// firewall: by an attribute of the bridge, or by a parameter of its namespace.
func passesFirewall(l *bridge.Link, is4 bool) bool {
	own, path := l.Bridge.NFCallIPTables, "net/bridge/bridge-nf-call-iptables"
	if !is4 {
		own, path = l.Bridge.NFCallIP6Tables, "net/bridge/bridge-nf-call-ip6tables"
	}
	all, err := sysctl.Read(path)
	// Without the parameter there is no br_netfilter.
	return err == nil && (own || all == "1")
}

// IsIPv6 says whether a prefix is of IPv6.
func IsIPv6(p netip.Prefix) bool { return p.Addr().Is6() }

// A policy is on record by its name; the open one by none.

func policyOf(name string) nft.Policy {
	for _, p := range []nft.Policy{nft.SameBridge, nft.Isolated} {
		if name == p.String() {
			return p
		}
	}
	return nft.Open
}

// PolicyName is how a policy is on record.
func PolicyName(p nft.Policy) string {
	if p == nft.Open {
		return ""
	}
	return p.String()
}

// Where the default route of a pod on a LAN leads, as it is on record.
const (
	ExitHost   = "host"   // to the host
	ExitRouter = "router" // to the LAN's own router
)

// A pod of a LAN is a neighbour of the host's neighbours. Its default route may lead
// through the host all the same (defaultRoute "host"), so that the host's firewall and
// its services see what it sends; what comes back is bridged, and seen because the
// bridge calls the firewall.

// Routing is what the host has to be for a network's pods; ok is false where they do
// not go through it.
func Routing(rec *state.Network) (r bridge.Routing, ok bool) {
	return bridge.Routing{IPv4: true, IPv6: rec.SLAAC, NoRedirects: rec.Bridge}, rec.DefaultRoute == ExitHost
}

// RoutingDifferences lists what of it is not so.
func RoutingDifferences(rec *state.Network) ([]tombolo.Difference, error) {
	r, ok := Routing(rec)
	if !ok {
		return nil, nil
	}
	return bridge.CheckRouting(r)
}

// BridgeMAC is the MAC of a bridge that is made, the same whenever that happens in
// one life of the node: pods would send to the gateway's old one for half a minute.
func BridgeMAC(epoch, name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(epoch + " " + name))
	sum[0] = sum[0]&^1 | 2 // unicast, locally administered
	return sum[:6]
}
