// Package network is a node's networks and pods: it connects a pod to a bridge, with addresses, host ports,
// masquerade, limits and a record of it, takes it down again, finds what is missing, and puts it back.
//
//	node, err := network.Open(ctx, &network.Config{StateDir: dir}) // by nil, DefaultStateDir
//	pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir + "/ipam", Ranges: ranges})
//	pods := network.Network{
//		Name: "pods", Bridge: "cbr0", Gateway: true, DefaultGateway: true, Masquerade: true, Hairpin: true,
//		Allocator: pool, Origin: network.Origin{Type: "host-local"}, // by which Del gives the address back
//	}
//	pod := network.Pod{ContainerID: "c1", IfName: "eth0", NetNS: ns, Path: path, Ports: ports}
//	made, err := node.Add(ctx, &pods, &pod)
//	differences, err := node.Check(ctx, &pods, &pod)
//	err = node.Del(ctx, made.Key, nil) // needs neither the pod nor its network
//
// It composes the other packages, and adds what they leave to their caller: the records in the state directory, the
// locks, and whose things are whose. So all that a kill leaves, at any moment, has an owner, and many calls may run
// at once, in as many processes. The project's docs/dev/architecture.md tells how; the CNI plugin tombolo is built
// on this package, and works beside other programs that are, if they share the state directory.
//
// # Needs
//
// CAP_NET_ADMIN and CAP_SYS_ADMIN, /proc, and Linux 6.1 or later, with bridge, veth and
// nf_tables.
//
// # Errors
//
// An argument that is not valid is ErrInvalid, and nothing was done then. See the variables for what else a program
// can branch on. Messages say what was asked, what the kernel said, and what to do; some name fields of the
// plugin's configuration.
package network
