package state

import "strconv"

// VLAN is which VLANs of the bridge a network's ports are in; the zero VLAN leaves them in
// the bridge's default one.
type VLAN struct {
	ID          int    `json:"id,omitempty"`          // of frames without a tag
	Trunk       string `json:"trunk,omitempty"`       // of frames with one: "2-4,100"
	KeepDefault bool   `json:"keepDefault,omitempty"` // and those that a port is in by itself
}

// GatewayLink names the link by which the host is in the network: the bridge, or its own in
// the network's VLAN, though there be none where the host is no gateway.
func (n *Network) GatewayLink() string { return n.VLAN.link(n.Bridge) }

// GatewayLink is that of the attachment's network.
func (a *Attachment) GatewayLink() string { return a.VLAN.link(a.Bridge) }

func (v *VLAN) link(bridge string) string {
	if v.ID == 0 || bridge == "" {
		return bridge
	}
	return bridge + "." + strconv.Itoa(v.ID)
}

// VLANLink is GatewayLink, and empty where there is no VLAN.
func (a *Attachment) VLANLink() string {
	if a.VLAN.ID == 0 {
		return ""
	}
	return a.GatewayLink()
}
