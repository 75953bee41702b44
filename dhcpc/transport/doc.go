// Package transport has the sockets of package dhcpc, each opened inside a network
// namespace and then used from outside.
//
//	cfg := &transport.Config{NetNS: pod, Link: index, MAC: mac}
//	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: transport.Dialer(cfg)}) // DialRaw first, DialUDP to renew
//
// Each function opens one kind:
//
//   - DialRaw opens an AF_PACKET socket: it needs no address on the interface, receives unicast
//     answers to an address that is not configured yet, and gets nothing but answers to
//     its own MAC address, by a filter in the kernel that is set before the socket is
//     bound. Closing one takes the kernel 10 to 20 ms.
//   - DialUDP opens a UDP socket bound to the interface: for renewals, from the leased address,
//     through the kernel's routes and neighbours. It can also get a first lease
//     where the server is told to broadcast (Config.Broadcast of package dhcpc) and
//     rp_filter is 0 in the namespace.
//   - DialWitness receives at the other end of the client's link, where a process in the client's
//     namespace cannot forge an answer, and sends by any of the others.
//
// DialUDP6 and DialWitness6 are the like for package dhcp6: its messages all go to a group, from the link-local
// address that an interface has anyhow, so that it needs no packet sockets to send.
//
// Dialer gives the Dial of a dhcpc.Config. Release sends a RELEASE for a client whose interface is gone. Use each
// transport from one goroutine.
//
// # Needs
//
// Opening a socket in a namespace other than the thread's needs CAP_SYS_ADMIN; DialRaw needs
// CAP_NET_RAW there, and DialUDP and DialUDP6 CAP_NET_BIND_SERVICE for
// ports 68 and 546. Linux 5.0 and later.
// Errors of the kernel are *tombolo.OpError, or a *net.OpError below one, and match
// their errno.
package transport
