package ruleset

import (
	"slices"

	"github.com/google/nftables/expr"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The sets of bridges contain link names. Two of them contain pairs of a name with itself, to match packets that come
// in and go out by the same bridge.
const (
	OursSet     = "ours"     // the bridges of all networks, and their links in VLANs
	gatewaysSet = "gateways" // the links that the host uses to route for networks
	bridgesSet  = "bridges"  // the bridges of all networks
	policiesSet = "policies" // bridges with a policy
	isolatedSet = "isolated" // bridges with the policy Isolated
	bypassSet   = "bypass"   // link names under which bridged packets pass the hooks
	lansSet     = "lans"     // bridges that connect to other machines

	// SharesSet contains the NICs of all Shares. The host routes pods' packets through them, but other programs use
	// them too.
	SharesSet = "shares"

	// UplinksSet contains the bridges and veth links that are uplinks of the host and belong to no network.
	UplinksSet = "uplinks"
	// TrustedSet contains links of networks that another firewall trusts completely, such as firewalld's zone
	// trusted.
	TrustedSet = "trusted"
)

// HostComment is the comment of elements in HostSets that belong to the host and not to a network.
const HostComment = OwnerPrefix + "host"

// HostSets returns the names of the sets with facts about the host.
func HostSets() []string {
	families := Families()
	return []string{UplinksSet, TrustedSet, families[0].Services, families[1].Services}
}

// BridgeSets returns the sets of link names: bridges and other links of networks, shared NICs and the host's uplinks.
func BridgeSets() []Set {
	names := [...]string{
		bridgesSet, OursSet, gatewaysSet, policiesSet, isolatedSet, bypassSet, lansSet, SharesSet, UplinksSet,
		TrustedSet,
	}
	list := make([]Set, 0, len(names))
	for _, name := range names {
		s := keySet(name, nftnl.TypeIfname)
		if name == bridgesSet || name == isolatedSet {
			s = keySet(name, nftnl.TypeIfname, nftnl.TypeIfname)
		}
		list = append(list, s)
	}

	return list
}

// addPolicies appends the rules for the policies of all networks to the chain forward.
func (list *rules) addPolicies() {
	list.begin("drop what would stay on an isolated bridge").loadBridges().isIn(isolatedSet).Drop()
	list.begin("drop what goes from one bridge with a policy to another").
		linkIn(expr.MetaKeyIIFNAME, policiesSet).linkIn(expr.MetaKeyOIFNAME, policiesSet).
		loadBridges().isNotIn(bridgesSet).Drop()
}

// bridgeElements returns the network's elements in the sets of bridges.
func (n *Network) bridgeElements() []Element {
	if n.Bridge == "" {
		return nil
	}

	name := nftnl.LinkKey(n.Bridge, nil, 0)
	pair := slices.Concat(name, name)
	var list []Element
	add := func(is bool, set string, key []byte) {
		if is {
			list = append(list, Element{Set: InInet(set), Key: key})
		}
	}
	hasPolicy, vlanOf := n.Policy == policySameBridge || n.Policy == policyIsolated, nftnl.LinkKey(n.VLANOf, nil, 0)
	add(true, bridgesSet, pair)
	add(true, OursSet, name)
	add(n.VLANOf != "", bridgesSet, slices.Concat(vlanOf, vlanOf))
	add(n.VLANOf != "", OursSet, vlanOf)
	add(n.Gateway, gatewaysSet, name)
	add(hasPolicy, policiesSet, name)
	add(n.Policy == policyIsolated, isolatedSet, pair)
	add(!n.NFCall, bypassSet, name)
	add(n.LAN, lansSet, name)
	add(n.Internal, internalSet, name)
	add(n.Internal && n.VLANOf != "", internalSet, vlanOf)
	if n.Egress != nil {
		list = append(list, n.Egress.bridgeElements(n.Bridge)...)
	}

	if n.Share != nil {
		add(true, SharesSet, nftnl.LinkKey(n.Share.NIC, nil, 0))
	}

	return list
}

// BridgeComment returns the comment of the network's elements in the sets of bridges. It begins like the comment of
// an endpoint with an empty owner, and then lists settings of the network. So an element with outdated settings is
// recognized by its comment. If networks share a bridge, its elements have the comment of one of them.
func (n *Network) BridgeComment() string {
	comment := networkComment(n.Key) + "," + n.Policy
	if n.NFCall {
		comment += ",nf"
	}

	if n.LAN {
		comment += ",lan"
	}

	if n.Gateway {
		comment += ",gw"
	}

	if n.Internal {
		comment += ",internal"
	}

	return comment
}
