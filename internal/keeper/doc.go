// Package keeper keeps DHCP leases renewed for as long as their pods live, NICs on
// the bridges that they were put on, and what pods need of firewall and links. It knows of them by directories alone, those of
// packages lease and state, and so it may start before or after the plugin, be killed
// and be upgraded at any time: it takes up each where it stands.
//
// The project's docs/dev/architecture.md has the loop, and what else it looks after: the firewall, links, and pods
// that died without a DEL. An idle lease is some hundred bytes: no goroutine, thread or descriptor.
//
// A lease whose pod is gone is released from the host's bridge with the pod's MAC address; one of a client that is
// sticky is remembered instead. A pod is gone if its namespace's path names another namespace, by the cookie, or
// none, and its port in the host's namespace is gone too; or if the machine has booted since. A pod that is merely
// out of reach keeps its lease. Nothing in a pod's namespace is relied on: answers are heard at the pod's port, as
// they leave it towards the pod, and a lease that has ended is withdrawn from the host's side, with any state of
// the pod.
//
// # Needs
//
// CAP_SYS_ADMIN to enter namespaces, CAP_NET_ADMIN to change links, addresses, routes and
// the firewall there and in the host's, CAP_NET_RAW and CAP_NET_BIND_SERVICE for sockets,
// and the host's network namespace.
// Linux 6.1 and later.
package keeper
