package state

import (
	"strconv"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
)

// GatewayLink names the link by which the host is in the network: the bridge, or its own in
// the network's VLAN, though there be none where the host is no gateway.
func (n *Network) GatewayLink() string { return linkIn(n.VLAN, n.Bridge) }

// GatewayLink is that of the attachment's network.
func (a *Attachment) GatewayLink() string { return linkIn(a.VLAN, a.Bridge) }

func linkIn(v vlan.Membership, bridge string) string {
	if v.ID == 0 || bridge == "" {
		return bridge
	}
	return bridge + "." + strconv.Itoa(int(v.ID))
}

// VLANLink is GatewayLink, and empty where there is no VLAN.
func (a *Attachment) VLANLink() string {
	if a.VLAN.ID == 0 {
		return ""
	}
	return a.GatewayLink()
}
