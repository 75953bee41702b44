// Package uplink makes a host's NIC a port of a bridge while traffic goes on, and gives the NIC back. The NIC's static
// addresses and its routes of all tables move to the bridge. Its neighbours and kernel parameters are copied.
//
//	conn := uplink.On(socket)
//	u := uplink.Uplink{NIC: "eth0", Bridge: "br0"}
//	plan, err := conn.Plan(ctx, u)
//	rec, err := conn.Take(ctx, u, journal)
//	err = conn.Restore(ctx, rec, journal)
//
// Pods need none of this to be on the LAN: package share connects a bridge to a NIC that stays the host's.
//
// # How
//
// Make before break: no link goes down. At each moment packets find a way out, and incoming packets are accepted.
//
//	bridge       create the bridge with the NIC's MAC, MTU and parameters, some of them loosened for now
//	addresses    add the addresses to the bridge; the NIC still has them too
//	port         copy the neighbours to the bridge, and make the NIC its port
//	routes       add the routes to the bridge, and then delete the NIC's
//	release      delete the NIC's addresses
//	settle       copy the loosened parameters too
//
// While the NIC is a port, packets that the host sends through it go out, and incoming packets are delivered through
// the bridge. So the steps may take any time. Each step is planned by the present state, so that it may be repeated.
// The way back works alike: the NIC stops being a port after all routes have moved.
//
// The record of a takeover is saved before each step. If a step fails, or the context ends, Take undoes all steps.
// After a crash Restore undoes them. The host is reachable throughout.
//
// # Limits
//
// Plan refuses, with the reason, a takeover that would cut the host off. Masqueraded flows through the NIC end. Sockets
// bound to the NIC and multicast groups joined on it stay there, and receive nothing more. XDP and tc programs stay
// there too. Firewall rules that name the NIC are not examined. The package takes no locks: see Conn.
package uplink
