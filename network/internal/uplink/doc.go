// Package uplink makes a host's NIC a port of a bridge while traffic goes on, and gives the NIC back. Everything that
// the host has on the NIC moves to the bridge: static addresses, routes of all tables, rules, neighbours and
// parameters.
//
//	conn, err := uplink.Dial(nil)
//	u := uplink.Uplink{NIC: "eth0", Bridge: "br0"}
//	steps, err := conn.Plan(ctx, u) // the steps of Take
//	rec, err := conn.Take(ctx, u, journal)
//	err = conn.Restore(ctx, rec, journal)
//
// Pods need none of this to be on the LAN: package share connects a bridge to a NIC that stays the host's.
//
// # How
//
// Make before break: no link goes down, and at each moment packets find a way out, and incoming packets are accepted.
//
//	bridge       create the bridge with the NIC's MAC, MTU and parameters, some of them loosened for now
//	addresses    add the addresses and rules to the bridge; the NIC still has them too
//	port         copy the neighbours to the bridge, and make the NIC its port
//	routes       add the routes to the bridge, and then delete the NIC's
//	release      delete the NIC's addresses and rules
//	settle       set the strict parameters on the bridge
//
// While the NIC is a port, packets that the host sends through it go out, and incoming packets are delivered through
// the bridge. So the steps may take any time. When the NIC is given back, it stops being a port after the last route
// uses the bridge.
//
// Conn.Plan computes the steps and changes nothing. They are planned again before each step, so that every step may
// be repeated. The way back, from the bridge to the NIC, works alike.
//
// # Crashes
//
// The record of a takeover is saved before each step. If a step fails, or the context ends, Take undoes all steps.
// After a crash Recover undoes them. The host is reachable throughout.
//
// # Limits
//
// Plan refuses, with the reason, a takeover that would cut the host off. Above all it refuses addresses and default
// routes from a DHCP client or router advertisements, since on a port these are no longer received. It warns about
// VLANs, which stay on the NIC. Also:
//   - The kernel deletes masqueraded flows that leave by the NIC. The host's own flows continue.
//   - XDP and tc programs stay on the NIC. nft and iptables rules that name it are not examined.
//   - Sockets bound to the NIC, and multicast groups joined on it, receive nothing more.
//   - The route that the kernel adds with an address comes back, even if somebody deleted it.
//
// # Needs
//
// The package needs CAP_NET_ADMIN in the user namespace that owns the network namespace, CAP_SYS_ADMIN if Dial
// gets a namespace, and /proc with a writable /proc/sys/net. It needs Linux 6.1 or later with bridge. Errors of the
// kernel are a *tombolo.OpError, or wrap one. The package keeps no files and takes no locks: see Journal and Conn.
package uplink
