// Package bridge puts pods on a Linux bridge: the bridge device, the veth pair of each pod, the attributes of its
// port, and the pod's addresses and routes.
//
//	conn, err := bridge.Dial(node) // nil is the calling thread's namespace
//	changed, err := conn.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
//	port := bridge.Port{
//		Bridge: "pods0", Name: bridge.HostName("example", "container-1", "eth0"), Peer: "eth0",
//		Alias: "example:container-1", Addresses: addresses, Routes: routes,
//	}
//	attached, err := conn.Attach(ctx, pod, port) // undoes itself where it fails
//	differences, err := conn.Check(ctx, port)
//	err = conn.Detach(ctx, port.Name, port.Alias) // success also if nothing is there
//
// Attach sets up one pod, Detach takes it down, and Check compares the host's end with the original. The pod's end
// belongs to the pod once Attach has returned. None of them lists anything, so their time does not grow with the
// number of pods. One message creates the veth pair with its peer in the pod's namespace; moving the peer there
// afterwards would cost grace periods of the kernel. The pod's link-local address is added like the others. Duplicate
// address detection is skipped (IFA_F_NODAD) unless requested. MACs and MTUs are always set, so that neither the
// kernel nor udev changes them later.
//
// Ensure creates or corrects the bridge, and Bridge.Differences compares it. Port.Hairpin, Bridge.Promiscuous and
// Bridge.NFCall determine how pods reach services on their own node, and themselves. Hairpin ports with NFCall work
// in every case.
//
// # Pods on the LAN
//
// A pod whose network has a router may take IPv6 addresses from it: set Port.Autoconf, and call Solicit when the
// pod's frames get through. Solicit asks the router, and its result waits for the answer. The host can still be the
// pod's gateway: use a next hop that no machine has, with a permanent entry of the host's MAC in Port.Neighbours. It
// stays valid when the host's addresses change, and the pod's kernel ignores ICMP redirects, which come from another
// address.
//
// # Needs
//
// The package needs CAP_NET_ADMIN in the bridge's namespace and in the pod's, CAP_SYS_ADMIN to enter the pod's, and
// /proc. It needs Linux 6.1 or later with bridge and veth, and with br_netfilter for Bridge.NFCall. Errors are a
// *tombolo.OpError, or wrap one.
package bridge
