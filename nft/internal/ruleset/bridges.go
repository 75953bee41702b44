package ruleset

import (
	"slices"

	"github.com/google/nftables/expr"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

// The sets of bridges have their names, some as pairs of the same name, to match packets that come in and go out by
// one bridge.
const (
	OursSet     = "ours"     // the bridges of all networks, and their links in VLANs
	gatewaysSet = "gateways" // the links by which the host routes for networks
	bridgesSet  = "bridges"  // ours
	policiesSet = "policies" // those with a policy
	isolatedSet = "isolated" // those with the policy Isolated
	bypassSet   = "bypass"   // those whose packets pass the hooks by
	lansSet     = "lans"     // those with machines on them

	// SharesSet has the NICs of Shares, by which the host routes for pods. They are others' too.
	SharesSet = "shares"

	// UplinksSet has the host's uplinks among links of the kinds bridge and veth, which belong to no network.
	UplinksSet = "uplinks"
	// TrustedSet has the links of networks for which a firewall accepts too much by our doing.
	TrustedSet = "trusted"
)

// HostComment is the comment of elements that belong to the host, and to no network: those of HostSets.
const HostComment = OwnerPrefix + "host"

// HostSets returns the names of the sets that describe the host.
func HostSets() []string {
	families := Families()
	return []string{UplinksSet, TrustedSet, families[0].Services, families[1].Services}
}

// BridgeSets are the sets of bridges.
func BridgeSets() []Set {
	const pair = nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeIfname
	names := [...]string{
		bridgesSet, OursSet, gatewaysSet, policiesSet, isolatedSet, bypassSet, lansSet, SharesSet, UplinksSet, TrustedSet,
	}
	list := make([]Set, 0, len(names))
	for _, name := range names {
		s := Set{Place: InInet(name), KeyType: nftnl.TypeIfname, KeyLen: IfnameLen}
		if name == bridgesSet || name == isolatedSet {
			s.KeyType, s.KeyLen = pair, 2*IfnameLen
		}
		list = append(list, s)
	}
	return list
}

// addPolicies appends the rules of all policies to the chain forward.
func (list *rules) addPolicies() {
	list.add("drop what would stay on an isolated bridge", func(x expressions) {
		x.bridged()
		x.Lookup(isolatedSet)
		x.Drop()
	})
	list.add("drop what goes from one bridge with a policy to another", func(x expressions) {
		for _, link := range []expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME} {
			x.linkIn(link, policiesSet)
		}
		x.bridged()
		x.LookupNone(bridgesSet)
		x.Drop()
	})
}

// bridgeElements gives what a network has in the sets of bridges.
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
	if n.Share != nil {
		add(true, SharesSet, nftnl.LinkKey(n.Share.NIC, nil, 0))
	}
	return list
}

// BridgeComment is the comment of what a network has in the sets of bridges: that of
// an endpoint without an owner, and what the network is set to. So one that should
// have less there by now is known by what it has. Where networks share a bridge,
// the elements are those of one of them.
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
