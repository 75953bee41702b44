// Package transport provides the sockets for package dhcpc. Each is opened inside a network namespace and then used
// from outside.
//
//	cfg := &transport.Config{NetNS: pod, Link: link, MAC: mac}
//	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: transport.Dialer(cfg)})
//	lease, err := client.Acquire(ctx)
//	err = transport.Release(ctx, cfg, lease) // from another interface, if the client's is gone
//
// Each transport is for one goroutine:
//
//   - DialRaw opens an AF_PACKET socket. It needs no address on the interface, and receives unicast answers to an
//     address that is not configured yet. A filter in the kernel, set before the socket is bound, rejects
//     answers to other clients. The client's MAC address may differ from the interface's. Closing such a socket
//     takes the kernel 10 to 20 ms.
//   - DialUDP opens a UDP socket bound to the interface. It is for renewals from the leased address, through the
//     kernel's routes and neighbours. It can also get a first lease if the server is asked to broadcast
//     (Config.Broadcast of package dhcpc) and rp_filter is 0 in the namespace. If several such sockets are open on one
//     link, a unicast answer reaches only one of them.
//   - DialWitness receives at the other end of the client's link, where a process in the client's namespace cannot
//     forge an answer. It sends through one of the other transports.
//
// DialUDP6 and DialWitness6 are the counterparts for DHCPv6. All messages of DHCPv6 clients go to a multicast group,
// from the link-local address that every interface has. So a UDP socket can send them.
//
// Dialer returns the Dial function for a dhcpc.Config. Clients on one link, each with a Dialer for its own MAC, receive
// only their own answers.
//
// # Needs
//
// Opening a socket in a namespace other than the thread's needs CAP_SYS_ADMIN. A packet socket needs CAP_NET_RAW there,
// and DialUDP and DialUDP6 need CAP_NET_BIND_SERVICE for ports 68 and 546. The package needs Linux 5.1 or later
// (SO_BINDTOIFINDEX). Before Linux 5.7, binding a UDP socket to the interface needs CAP_NET_RAW too. Errors of the
// kernel are *tombolo.OpError, or contain a *net.OpError, and match their errno.
package transport
