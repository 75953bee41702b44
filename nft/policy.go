package nft

import (
	"fmt"

	"github.com/tombolo-cni/tombolo/internal/ident"
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

// MarshalText gives what String does.
func (p Policy) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText reads what String gives. The error matches tombolo.ErrInvalid.
func (p *Policy) UnmarshalText(text []byte) error {
	return unmarshal(p, text, Open, SameBridge, Isolated)
}

func (n *Network) checkBridge() error {
	switch {
	case n.Bridge != "" && !ident.IsLinkName(n.Bridge):
		return invalid("network %s: bridge %q is no name of a link", n.Name, n.Bridge)
	case n.VLANOf != "" && (n.Bridge == "" || !ident.IsLinkName(n.VLANOf)):
		return invalid("network %s: link %q in a VLAN of bridge %q", n.Name, n.Bridge, n.VLANOf)
	case n.Policy > Isolated:
		return invalid("network %s: %s", n.Name, n.Policy)
	case n.Bridge == "" && n.Policy != Open:
		return invalid("network %s: policy %s without the name of a bridge", n.Name, n.Policy)
	}
	return nil
}
