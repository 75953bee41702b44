// Package uplink makes a host's NIC a port of a bridge, with all that the host has on it, while traffic goes on: static
// addresses, routes of every table, rules, neighbours and parameters move to the bridge. And it gives the NIC back.
//
//	conn, err := uplink.Dial(nil)
//	u := uplink.Uplink{NIC: "eth0", Bridge: "br0"}
//	steps, err := conn.Plan(ctx, u) // says what would be done
//	rec, err := conn.Take(ctx, u, journal)
//	err = conn.Restore(ctx, rec, journal)
//
// Pods need none of it to be on the LAN: package share connects a bridge to a NIC that stays the host's.
//
// # How
//
// Make before break: no link goes down, and at each moment packets find a way out and are taken when they come in.
//
//	bridge       the bridge is made, with the NIC's MAC, MTU and parameters, loose ones meanwhile
//	addresses    the bridge gets the addresses and the rules; the NIC still has them too
//	port         the bridge gets the neighbours, and the NIC becomes its port
//	routes       the bridge gets the routes, and then the NIC loses its own
//	release      the NIC's addresses and rules are deleted
//	settle       the bridge gets the strict parameters
//
// While the NIC is a port, what is sent through it goes out, and what comes in is delivered through the bridge. So the
// steps may take any time. When it is given back, it stops being a port when nothing goes by the bridge any more.
//
// Conn.Plan computes the steps, and touches nothing. They are planned anew before each step, so that every step may be
// repeated; the way back is, from the bridge to the NIC, the same.
//
// # Crashes
//
// The record of a takeover is saved before each step. Where something fails or the context is done, Take undoes all, and
// so does Recover after a crash. The host is reachable all the while.
//
// # What does not come along
//
// Plan refuses by name what would cut the host off: above all addresses and default routes that a DHCP client or router
// advertisements gave, since on a port these are heard no more. It warns of VLANs, which stay on the NIC. Also:
//   - The kernel forgets masqueraded flows that go out by the NIC. The host's own go on.
//   - XDP and tc programs stay on the NIC; nft and iptables rules that name it are not looked at.
//   - Sockets that are bound to the NIC, and multicast groups that were joined on it, receive nothing more.
//   - The route that the kernel makes with an address comes with it, though it was deleted.
//
// # Needs
//
// CAP_NET_ADMIN in the user namespace that owns the network namespace, CAP_SYS_ADMIN where Dial gets a namespace,
// and /proc with a writable /proc/sys/net. Linux 6.1 and later, with bridge. Errors of the kernel are *tombolo.OpError,
// or wrap one. It keeps no files, and takes no locks: see Journal and Conn.
package uplink
