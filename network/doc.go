// Package network manages a node's networks and pods. It connects a pod to a bridge, with addresses, host ports,
// masquerade, limits and a record. It also disconnects pods, finds missing parts of networks and pods, and repairs
// them.
//
//	node, err := network.Open(ctx, &network.Config{StateDir: dir}) // a nil Config means DefaultStateDir
//	pool, err := ipam.NewHostLocal(&ipam.Config{Network: "pods", Dir: dir + "/ipam", Ranges: ranges})
//	pods := network.Network{
//		Name: "pods", Bridge: "cbr0", Gateway: true, DefaultGateway: true, Masquerade: true, Hairpin: true,
//		Allocator: pool, Origin: network.Origin{Type: "host-local"}, // Del needs Origin to release the address
//	}
//	pod := network.Pod{ContainerID: "c1", IfName: "eth0", NetNS: ns, Path: path, Ports: ports}
//	made, err := node.Add(ctx, &pods, &pod)
//	differences, err := node.Check(ctx, &pods, &pod)
//	err = node.Del(ctx, made.Key, nil) // needs neither the pod nor its network
//
// The package combines the other packages. It keeps the records in the state directory, takes the locks, and marks
// the objects that it creates in the kernel with their owner. So every object has an owner even after a kill, and
// many calls may run at once, in any number of processes. docs/dev/architecture.md describes records, locks and
// marks. The CNI plugin tombolo is built on this package. Other programs may use the package on the same node if they
// use the same state directory.
//
// # Needs
//
// The package needs CAP_NET_ADMIN and CAP_SYS_ADMIN, /proc, and Linux 6.1 or later with bridge, veth and nf_tables.
//
// # Errors
//
// If an argument is invalid, the error matches ErrInvalid. The other variables, such as ErrExists, are the errors that
// a program can distinguish. An error's message contains the failed operation, the kernel's answer, and advice. Some
// messages name fields of the plugin's configuration.
package network
