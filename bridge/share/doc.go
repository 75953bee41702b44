// Package share connects a bridge to a LAN through a NIC that the host keeps using.
//
//	links, err := bridge.Dial(nil)
//	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lan0", Alias: "mycni", NoIPv6: true})
//	conn := share.On(links.Socket())
//	changed, err := conn.Ensure(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//	differences, err := conn.Check(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//	err = conn.Remove(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//
// The NIC keeps its addresses, routes, leases and firewall zone, and the program that manages it notices nothing.
// Host and pods are neighbours on one LAN, as if a switch stood in front of the host. The bridge is only a switch:
// the host has no address on it.
//
// Ensure creates a veth pair. One end, the port, is on the bridge. A BPF program at the other end sends the pods'
// frames to the host's stack, as if the NIC had received them, to the wire, or to both. The NIC becomes promiscuous.
// For the other direction, from the NIC into the pair, nf_tables rules at the NIC's hooks select frames by the pods'
// MACs. Package nft makes these rules: see its Network.Share and Endpoint.NIC. Without them pods receive nothing from
// the LAN, and the host works as before.
//
// Every intermediate state is harmless to the host. A NIC that was created again or got another MAC needs another
// Ensure.
//
// # Needs
//
// The package needs CAP_NET_ADMIN and CAP_BPF, and Linux 6.1 or later with veth, sch_ingress and cls_bpf. It refuses
// Wi-Fi, since access points drop frames from foreign MACs. Clouds, and switches that allow one MAC on a link, do
// likewise, but this package cannot detect them. Errors are a *tombolo.OpError, or wrap one.
package share
