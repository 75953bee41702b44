// Package keeper renews the DHCP leases of pods as long as the pods live. It also keeps NICs attached to their
// bridges, and repairs the firewall rules and links that pods need.
//
// It learns about pods only from the directories of packages lease and state. So it may start before or after the
// plugin. It may be killed and upgraded at any time: the next keeper continues from the records on disk.
//
// docs/dev/architecture.md of the project describes the loop and its other duties: the firewall, links, and pods that
// died without a DEL. The loop schedules visits, and workers make them. A visit checks one lease or one source, which
// is a part of the kernel's state that other programs may change. An idle lease takes some hundred bytes, and no
// goroutine, thread or descriptor.
//
// If a lease's pod no longer exists, the keeper releases the lease from the host's bridge, on behalf of the pod. If
// the lease is sticky, the keeper remembers it instead. A pod no longer exists in two cases: the machine has booted
// since, or both its namespace and its port in the host's namespace are gone. The namespace is gone if its path leads
// to nothing, or to a namespace with another cookie. A pod that exists out of the keeper's reach has its lease until
// that expires.
//
// The keeper does not trust a pod's namespace. It receives answers at the pod's port, on their way to the pod. When a
// lease ends, it also removes the address from the host's firewall, even if it cannot enter the pod.
//
// # Needs
//
// The package needs CAP_SYS_ADMIN to enter namespaces, CAP_NET_RAW and CAP_NET_BIND_SERVICE for sockets, and
// CAP_NET_ADMIN. The latter is for changes of links, addresses, routes and the firewall in pods and on the host. It
// must run in the host's network namespace. It needs Linux 6.1 or later.
package keeper
