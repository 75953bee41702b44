// Package share connects a bridge to a LAN through a NIC that the host keeps using.
//
//	links, err := bridge.Dial(nil)
//	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lan0", Alias: "mycni", NoIPv6: true})
//	conn := share.On(links.Socket())
//	changed, err := conn.Ensure(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//	differences, err := conn.Check(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//	err = conn.Remove(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//
// The NIC keeps its addresses, routes, leases and firewall zone, so the program that manages it is not affected. The
// host and the pods are neighbours on the LAN, as if they were connected to the same switch. The host has no address
// on the bridge.
//
// Ensure creates a veth pair with one end, the port, on the bridge. A BPF program on the port handles the frames that
// pods send. It passes them to the host's stack as if the NIC had received them, or sends them out of the NIC, or
// both. Ensure also makes the NIC promiscuous. For the other direction, nf_tables rules at the NIC's hooks select
// frames by the pods' MACs and send them into the pair. Package nft creates these rules: see Network.Share and
// Endpoint.NIC there. Without the rules, pods receive nothing from the LAN, and the host works as before.
//
// If Ensure is interrupted, the host still works. Call Ensure again if the NIC was created again or got another MAC.
//
// # Needs
//
// The package needs CAP_NET_ADMIN and CAP_BPF, and Linux 6.1 or later with veth, sch_ingress and cls_bpf. It refuses
// Wi-Fi links, since access points drop frames from unknown MACs. Clouds, and switches that permit only one MAC for
// each port, also drop such frames, but this package cannot detect this. Errors from the kernel are, or wrap, a
// *tombolo.OpError.
package share
