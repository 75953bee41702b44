// Package bridge connects pods to a Linux bridge. It creates the bridge, a veth pair for each pod, and the addresses
// and routes inside the pod.
//
//	conn, err := bridge.Dial(node) // nil is the calling thread's namespace
//	changed, err := conn.Ensure(ctx, bridge.Bridge{Name: "pods0", Alias: "mycni"})
//	port := bridge.Port{
//		Bridge: "pods0", Name: bridge.HostName("example", "container-1", "eth0"), Peer: "eth0",
//		Alias: "example:container-1", Addresses: addresses, Routes: routes,
//	}
//	attached, err := conn.Attach(ctx, pod, port) // deletes its veth pair if it fails
//	differences, err := conn.Check(ctx, port)
//	err = conn.Detach(ctx, port.Name, port.Alias) // no error if nothing exists
//
// Attach connects one pod, Detach disconnects it, and Check compares the host's end of the veth pair with the Port.
// After Attach has returned, the pod's end belongs to the pod. None of these methods lists links, so the time they
// take does not depend on the number of pods.
//
// One message creates the veth pair, with the pod's end already in the pod's namespace. Moving it there later would
// take several RCU grace periods. If the pod uses IPv6, Attach adds the link-local address itself, like the other
// addresses. IPv6 addresses skip duplicate address detection (IFA_F_NODAD) unless Port.DAD is set. MACs and MTUs are
// always set explicitly, so that neither the kernel nor udev changes them later.
//
// Ensure creates or corrects the bridge, and Bridge.Differences compares a Link with the Bridge. How pods reach
// services on their own node, and themselves, depends on Port.Hairpin, Bridge.Promiscuous and Bridge.NFCall. Hairpin
// together with NFCall works in all cases.
//
// # Pods on the LAN
//
// A pod can take IPv6 addresses from the router of its network. Set Port.Autoconf, and call Solicit as soon as frames
// of the pod can pass. Solicit asks the router, and Solicitation.Wait waits for the answer. The host can still be the
// pod's gateway. Use a next hop address that no machine has, and add a permanent entry with the host's MAC to
// Port.Neighbours. The entry stays valid when the host's addresses change. The pod's kernel ignores ICMP redirects
// from the host, because they come from another address than the next hop.
//
// # Needs
//
// The package needs CAP_NET_ADMIN in the namespaces of the bridge and of the pod, CAP_SYS_ADMIN to enter the pod's
// namespace, and /proc. It needs Linux 6.1 or later with bridge and veth. Bridge.NFCall also needs br_netfilter.
// Errors from the kernel are, or wrap, a *tombolo.OpError.
package bridge
