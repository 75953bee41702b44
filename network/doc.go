// Package network manages a node's networks and pods. It connects a pod to a bridge, with addresses, host ports,
// masquerade, limits and a record. It also disconnects pods, finds missing parts, and repairs them.
//
//	node, err := network.Open(ctx, &network.Config{StateDir: dir}) // by nil, DefaultStateDir
//	pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir + "/ipam", Ranges: ranges})
//	pods := network.Network{
//		Name: "pods", Bridge: "cbr0", Gateway: true, DefaultGateway: true, Masquerade: true, Hairpin: true,
//		Allocator: pool, Origin: network.Origin{Type: "host-local"}, // Del needs it to give the address back
//	}
//	pod := network.Pod{ContainerID: "c1", IfName: "eth0", NetNS: ns, Path: path, Ports: ports}
//	made, err := node.Add(ctx, &pods, &pod)
//	differences, err := node.Check(ctx, &pods, &pod)
//	err = node.Del(ctx, made.Key, nil) // needs neither the pod nor its network
//
// It composes the other packages, and adds the duties that they leave to their caller: the records in the state
// directory, the locks, and the ownership of objects. So after a kill at any moment, everything has an owner, and
// many calls may run at once, in as many processes. docs/dev/architecture.md of the project describes this. The CNI
// plugin tombolo is built on this package, and works beside other programs that use it if they share the state
// directory.
//
// # Needs
//
// The package needs CAP_NET_ADMIN and CAP_SYS_ADMIN, /proc, and Linux 6.1 or later with bridge, veth and nf_tables.
//
// # Errors
//
// For an invalid argument the error is ErrInvalid, and nothing was changed. The variables are the other errors that a
// program can distinguish. Messages contain the request, the kernel's answer, and advice. Some name fields of the
// plugin's configuration.
package network
