// Package vlan puts ports of a bridge into VLANs (IEEE 802.1Q), and gives the host a link in a VLAN, over rtnetlink:
//
//	conn := links.VLANs() // links is a bridge.Conn, port and br are Links that it found
//	in := vlan.Membership{ID: 100, Trunk: vlan.Ranges{{First: 200, Last: 299}}} // the trunk's frames keep their tags
//	changed, err := conn.Ensure(ctx, port.Index, in)
//	changed, err = conn.EnsureLink(ctx, vlan.Link{Bridge: br.Index, Name: "br0.100", ID: 100, MTU: br.MTU})
//
// A bridge separates VLANs only if it filters them (VLANFiltering of bridge.Bridge). Each port is then in the VLANs
// that it was put into. A new port is also put into the bridge's default VLAN, which is usually VLAN 1. The bridge is
// a port of itself, which connects the host to VLANs.
//
// The host's link in a VLAN is of kind vlan, on top of the bridge. It receives the bridge's frames for the host with
// that tag, and its own frames enter the bridge with the tag. A veth pair with one end as a port would do as well,
// except for the host's firewall. If the firewall sees bridged packets (NFCall of bridge.Bridge), each packet of a
// pod would pass it twice. The first time the bridge would be the outgoing interface, and the packet would not be
// masqueraded.
package vlan
