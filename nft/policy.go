package nft

import (
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables/expr"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
)

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
	// Isolated drops what stays on the bridge, too: what a pod sends to itself by
	// way of the host included. What the bridge forwards by itself only passes
	// here with Network.NFCall; without it the bridge's ports have to be isolated.
	Isolated
)

// String gives the policy as the field ingressPolicy of CNI's firewall plugin has it.
func (p Policy) String() string {
	switch p {
	case Open:
		return "open"
	case SameBridge:
		return "same-bridge"
	case Isolated:
		return "isolated"
	}
	return fmt.Sprintf("policy %d", uint8(p))
}

// What is known of bridges: the name of each, in some twice, for what comes in and
// goes out by the same one.
const (
	bridgesSet  = "bridges"  // ours
	policiesSet = "policies" // those with a policy
	isolatedSet = "isolated" // those with the policy Isolated
	bypassSet   = "bypass"   // those whose packets pass the hooks by
	lansSet     = "lans"     // those with machines on them
)

func bridgeSets() []set {
	const pair = nftnl.TypeIfname<<nftnl.TypeBits | nftnl.TypeIfname
	return []set{
		{place: inInet(bridgesSet), keyType: pair, keyLen: 2 * ifnameLen},
		{place: inInet(policiesSet), keyType: nftnl.TypeIfname, keyLen: ifnameLen},
		{place: inInet(isolatedSet), keyType: pair, keyLen: 2 * ifnameLen},
		{place: inInet(bypassSet), keyType: nftnl.TypeIfname, keyLen: ifnameLen},
		{place: inInet(lansSet), keyType: nftnl.TypeIfname, keyLen: ifnameLen},
	}
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
			x.Meta(link, nftnl.First)
			x.Lookup(policiesSet)
		}
		x.bridged()
		x.LookupNone(bridgesSet)
		x.Drop()
	})
}

func (n *Network) checkBridge() error {
	switch {
	case n.Bridge != "" && !ident.IsLinkName(n.Bridge):
		return invalid("network %s: bridge %q is no name of a link", n.Name, n.Bridge)
	case n.Policy > Isolated:
		return invalid("network %s: %s", n.Name, n.Policy)
	case n.Bridge == "" && n.Policy != Open:
		return invalid("network %s: policy %s without the name of a bridge", n.Name, n.Policy)
	}
	return nil
}

// bridgeElements gives what a network has in the sets of bridges.
func (n *Network) bridgeElements() []element {
	if n.Bridge == "" {
		return nil
	}
	name := interfaceName(n.Bridge)
	pair := slices.Concat(name, name)
	list := []element{{set: inInet(bridgesSet), key: pair}}
	if n.Policy != Open {
		list = append(list, element{set: inInet(policiesSet), key: name})
	}
	if n.Policy == Isolated {
		list = append(list, element{set: inInet(isolatedSet), key: pair})
	}
	if !n.NFCall {
		list = append(list, element{set: inInet(bypassSet), key: name})
	}
	if n.LAN {
		list = append(list, element{set: inInet(lansSet), key: name})
	}
	return list
}

// bridgeComment is the comment of what a network has in the sets of bridges: that of
// an endpoint without an owner, and what the network is set to. So one that should
// have less there by now is known by what it has. Where networks share a bridge,
// the elements are those of one of them.
func (n *Network) bridgeComment() string {
	comment := networkComment(networkKey(n.Name)) + "," + n.Policy.String()
	if n.NFCall {
		comment += ",nf"
	}
	if n.LAN {
		comment += ",lan"
	}
	return comment
}

func networkComment(networkKey string) string { return ownerPrefix + ":" + networkKey }

// isNetwork says that an element is a network's own.
func (e *elementState) isNetwork(key string) bool {
	own, _, _ := strings.Cut(e.comment, ",")
	return own == networkComment(key)
}
