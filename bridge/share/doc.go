// Package share connects a bridge to a LAN through a NIC that stays the host's own.
//
//	links, err := bridge.Dial(nil)
//	_, err = links.Ensure(ctx, bridge.Bridge{Name: "lan0", Alias: "mycni", NoIPv6: true})
//	conn := share.On(links.Socket())
//	changed, err := conn.Ensure(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//	differences, err := conn.Check(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//	err = conn.Remove(ctx, share.Share{NIC: "eth0", Bridge: "lan0", Alias: "mycni"})
//
// The NIC keeps its addresses, routes, leases and firewall zone, and the program that manages it notices nothing. Host
// and pods are neighbours on one LAN, as if a switch stood in front of the host. The bridge is only a switch: the host
// has no address on it.
//
// Ensure makes a veth pair whose one end, the port, is on the bridge. A BPF program at the port's egress sends what pods
// send to the host's stack, as if the NIC had received it, to the wire, or to both. The NIC becomes promiscuous. The
// other direction, from the NIC into the pair, is a matter of rules of nf_tables at the NIC's hooks, which go by the
// pods' MACs: without them pods hear nothing from the LAN, and the host works as before.
//
// Every state in between is harmless to the host. A NIC that is made anew or gets another MAC needs another Ensure.
//
// # Needs
//
// CAP_NET_ADMIN and CAP_BPF, Linux 6.1 and later with veth, sch_ingress and cls_bpf. Wi-Fi is refused, since access
// points drop frames of foreign MACs. Clouds and switches that allow one MAC on a link do the same, which nothing
// here can see. Errors are *tombolo.OpError, or wrap one.
package share
