// Package bridge puts pods on a Linux bridge: the bridge device, the veth pair of
// each pod, the attributes of its port, and the pod's addresses and routes.
//
//	conn, err := bridge.Dial(node) // nil is the calling thread's namespace
//	changed, err := conn.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
//	port := bridge.Port{
//		Bridge: "pods0", Name: bridge.HostName("example", "container-1", "eth0"), Peer: "eth0",
//		Alias: "example:container-1", Addresses: addresses, Routes: routes,
//	}
//	attached, err := conn.Attach(ctx, pod, port) // undoes itself where it fails
//	differences, err := conn.Check(ctx, port)
//	err = conn.Detach(ctx, port.Name, port.Alias) // what is gone is success
//
// Attach does all of it for one pod, Detach takes it down, Check says what is no longer as it was made of the host's
// end; the pod's end belongs to the pod from then on. None of them lists anything, or takes longer because there are
// other pods. The veth pair is made by one message, its peer in the pod's namespace: to move it there afterwards would
// cost grace periods of the kernel. The pod's link-local address is added like the others, and no address is looked for
// on the link (IFA_F_NODAD) unless that is asked for. MACs and MTUs are always set, so that neither the kernel nor udev
// changes them later.
//
// Ensure makes the bridge, or corrects one, and Bridge.Differences compares. How pods reach services on their own node, and
// themselves, is the choice of Port.Hairpin, Bridge.Promiscuous and Bridge.NFCall; hairpin ports with NFCall serve in
// every case.
//
// # Pods on the LAN
//
// A pod whose network has a router of its own may take IPv6 addresses from it:
// Port.Autoconf, and Solicit, which asks the router once the pod's frames get through
// and waits. Where the host is to be its gateway nevertheless, a next hop that nobody has, with a permanent entry of the
// host's MAC in Port.Neighbours, stays valid whatever addresses the host gets, and the kernel of the pod ignores ICMP
// redirects, since they come from another address than the next hop's.
//
// # Needs
//
// CAP_NET_ADMIN in the bridge's namespace and in the pod's, CAP_SYS_ADMIN to enter
// the pod's, and /proc. Linux 6.1 and later, with bridge and veth, and with
// br_netfilter for Bridge.NFCall. Errors are *tombolo.OpError, or wrap one.
package bridge
