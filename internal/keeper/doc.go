// Package keeper renews the DHCP leases of pods as long as the pods live. It also keeps NICs on their bridges, and
// the firewall rules and links that pods need in order.
//
// It learns about pods only from two directories, those of the packages lease and state. So it may start before or
// after the plugin, and may be killed and upgraded at any time: it continues from the state on disk.
//
// docs/dev/architecture.md of the project describes the loop and its other duties: the firewall, links, and pods that
// died without a DEL. An idle lease takes some hundred bytes, and no goroutine, thread or descriptor.
//
// If a lease's pod no longer exists, the keeper releases the lease from the host's bridge with the pod's MAC address.
// If the lease is sticky, the keeper remembers it instead. A pod no longer exists in two cases: the machine has
// booted since, or both its namespace and its port in the host's namespace are gone. The namespace is gone if its
// path leads to nothing, or to a namespace with another cookie. A pod that is only out of reach keeps its lease.
//
// The keeper relies on nothing in a pod's namespace. It receives answers at the pod's port, on their way to the pod,
// and withdraws an ended lease from the host's side, in every state of the pod.
//
// # Needs
//
// The package needs CAP_SYS_ADMIN to enter namespaces, CAP_NET_ADMIN to change links, addresses, routes and the
// firewall there and in the host's namespace, CAP_NET_RAW and CAP_NET_BIND_SERVICE for sockets, and the host's
// network namespace. It needs Linux 6.1 or later.
package keeper
