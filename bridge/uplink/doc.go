// Package uplink makes a host's NIC a port of a bridge, with all that the host has
// on it, while traffic goes on: addresses, routes of every table, rules, neighbours
// and parameters move to the bridge. And it gives the NIC back.
//
//	rec, err := conn.Take(ctx, uplink.Uplink{NIC: "eth0", Bridge: "br0"}, journal)
//	…
//	err = conn.Restore(ctx, rec, journal)
//
// # How
//
// Make before break: no link goes down, and at each moment packets find a way out and
// are taken when they come in.
//
//	bridge       the bridge is made, with the NIC's MAC, MTU and parameters, loose ones meanwhile
//	addresses    the bridge gets the addresses and the rules; the NIC still has them too
//	port         the bridge gets the neighbours, and the NIC becomes its port
//	routes       the bridge gets the routes, and then the NIC loses its own
//	verify       the gateways that answered through the NIC have to answer through the bridge
//	release      the NIC's addresses and rules are deleted
//	settle       the bridge gets the strict parameters
//
// While the NIC is a port, what is sent through it goes out, and what comes in is
// delivered through the bridge. So the steps may take any time. Giving it
// back goes the other way round: the NIC stops being a port when nothing goes by the
// bridge any more.
//
// As a link becomes a port, or ceases to be one, the kernel drops what comes in by it for some
// ten microseconds: a datagram now and then, which TCP sends again.
//
// Plan computes the steps from a Snapshot, and touches nothing. They are made anew before each
// step, from what the kernel has by then and from the Record, so that every step may be
// repeated. The way back is planned by the same code, from the bridge to the NIC.
//
// # The point of no return
//
// The record of a takeover is saved before each step. Before the step "release", all
// is undone where something fails, the context is done, or nothing answers in time;
// and Recover undoes what a crash cut short. With that step the takeover is
// committed (Record.Committed): from there Take ignores the context, and Recover finishes
// it. What Restore began, Recover finishes too. The host is reachable all the while.
//
// # What changes while it is taken
//
// The host may get other addresses and another router on the bridge. Check and Mend take
// what has something else in its place for changed on purpose, and Restore gives the NIC
// what the bridge has by then. What Mend puts back where nothing is in its place comes
// from the Record: Check gives another where that is out of date.
//
// # What does not come along
//
// Plan refuses by name what would cut the host off, and warns of what goes on otherwise: multicast
// groups, routes by nexthop objects and VLANs stay on the NIC. Also:
//   - XDP and tc programs stay on the NIC, and see the packets of pods too.
//   - IPv6 addresses of a privacy extension become ordinary ones until they run out.
//   - The kernel's exceptions (path MTUs, redirects) are learnt anew.
//   - Sockets that are bound to the NIC, such as those of DHCP clients, receive nothing more.
//   - nft and iptables rules that name the NIC are not looked at.
//   - A default route that the kernel learnt from a router has a priority of one more,
//     until the router's next advertisement brings the kernel's own again.
//   - The kernel forgets masqueraded flows that go out by the NIC, as those of pods in other
//     networks do. The host's own go on.
//   - The route that the kernel makes with an address comes with it, though it was deleted.
//   - Tests run with veth pairs. A real NIC may reset its receive rings as it becomes
//     promiscuous, and what a cloud, a hypervisor or an access point does with foreign
//     MACs is its own matter.
//
// # Needs
//
// CAP_NET_ADMIN in the user namespace that owns the network namespace, CAP_SYS_ADMIN
// where a Config names a namespace, and /proc with a writable /proc/sys/net. Linux 6.1 and
// later, with bridge. Errors of the kernel are *tombolo.OpError, or wrap one.
//
// It keeps no files, and takes no locks: see Journal and Conn.
package uplink
