// Package keeper renews the DHCP leases of pods as long as the pods live. It also repairs firewall rules, links, and
// NICs that the host shares with pods, after other programs have changed them. It takes down pods that died without a
// DEL.
//
// It learns about pods only from the records of packages lease and state on disk. So it may start before or after the
// plugin. It may be killed and upgraded at any time: the next keeper continues from the records.
//
// One loop schedules visits, and workers make them. A visit checks one lease or one source. A source is another subject
// of the keeper's work, such as the firewall. An idle lease takes no goroutine, thread or descriptor.
// docs/dev/architecture.md of the project describes the loop and its duties.
//
// If a lease's pod no longer exists, the keeper releases the lease from the host, on behalf of the pod. If the lease is
// sticky, the keeper instead leaves its record for the pod's next container. A pod no longer exists if the machine has
// booted since, or if both its namespace and the host's end of its link are gone. The namespace is gone if its path
// leads to nothing, to no network namespace, or to one with another cookie (SO_NETNS_COOKIE). If a pod exists but the
// keeper cannot open its namespace, the lease stays until it expires.
//
// The keeper does not trust a pod's namespace. It receives the answers of DHCP servers at the host's end of the pod's
// link, where the pod cannot forge them. When a lease ends, it also removes the address from the host's firewall, even
// if it cannot enter the pod.
//
// # Needs
//
// The package needs CAP_SYS_ADMIN to enter namespaces, and CAP_NET_RAW and CAP_NET_BIND_SERVICE for sockets. It needs
// CAP_NET_ADMIN to change links, addresses, routes and the firewall in pods and on the host. It must run in the host's
// network namespace. It needs Linux 6.1 or later.
package keeper
