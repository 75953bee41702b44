// Package keeper keeps DHCP leases renewed for as long as their pods live. It knows of
// them by the directory of package lease alone, and so it may start before or after the
// plugin, be killed and be upgraded at any time: it takes up each lease where it stands.
//
// # How it works
//
// One loop holds a heap of wake-up times, one for each lease. What is due is visited by
// one of a bounded number of workers, which reads the record, enters the pod's namespace,
// opens a socket, runs the exchange, applies what changed, writes the record and closes
// everything. An idle lease is some hundred bytes: no goroutine, thread or descriptor.
// The loop hears of new and removed records by inotify(7), and reads the whole directory
// again where that lost something.
//
// A lease whose pod is gone is released from the host's bridge with the pod's MAC
// address; one of a client that is sticky is remembered instead. A pod is gone if its
// namespace's path names another namespace, by the cookie, or none, and its port in the
// host's namespace is gone too; or if the machine has booted since. What is merely out
// of reach is left alone.
//
// # Needs
//
// CAP_SYS_ADMIN to enter namespaces, CAP_NET_ADMIN to change addresses and routes there,
// CAP_NET_RAW and CAP_NET_BIND_SERVICE for sockets, and the host's network namespace.
// Linux 6.1 and later.
package keeper
