// Package vlan puts ports of a bridge into VLANs (IEEE 802.1Q), and gives the host a link
// in one, over rtnetlink:
//
//	conn := links.VLANs() // of a bridge.Conn
//	in := vlan.Membership{ID: 100, Trunk: vlan.Ranges{{First: 200, Last: 299}}} // the trunk's keep their tags
//	changed, err := conn.Ensure(ctx, port.Index, in)
//	changed, err = conn.EnsureLink(ctx, vlan.Link{Bridge: br.Index, Name: "br0.100", ID: 100, MTU: br.MTU})
//
// A bridge keeps VLANs apart only once it filters them (bridge.Bridge's VLANFiltering).
// Each port then is in the VLANs that it was put into, and is put into the bridge's default
// one when it becomes a port: VLAN 1, unless the bridge says otherwise. The bridge is a port
// of itself, by which the host is in VLANs.
//
// The host's link in a VLAN is one of kind vlan on the bridge: the kernel hands it what the
// bridge gets for the host with that tag, and what it sends enters the bridge with it. A
// veth pair of which one end is a port would do as well, but for the host's firewall: where
// it sees what is bridged (bridge.Bridge's NFCall), each packet of a pod would pass it twice,
// the first time with the bridge as its way out, by which nothing is masqueraded.
package vlan
