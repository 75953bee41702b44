// Package dhcp6 is a DHCP client for IPv6 (RFC 8415). It leases one address.
//
//	machine, err := dhcp6.NewMachine(&dhcp6.Config{DUID: dhcp6.DUID(hash), IAID: 1})
//	session := machine.Start(time.Now(), rand.Uint64())
//	session, out := machine.Step(session, time.Now(), dhcp6.Event{}) // then send out.Send
//
// The package contains only the state machine, without sockets, clock and goroutines. Its caller sends the messages
// that Step returns, and calls Step again at the time Session.Wake or when a message arrives. The package's Example has
// such a loop. A dhcpc.Transport sends messages from the interface's link-local address to ff02::1:2, and receives the
// answers. A Lease6 holds everything needed to renew and release it, also in its JSON form and for another program.
//
// # States
//
//	┌──────┐ now, or after a back-off / SOLICIT
//	│ INIT │────────────┐
//	└──────┘            v
//	   ^        ┌────────────┐ the first wait ends, or preference 255
//	   │        │ SOLICITING │──────────────────┐ / REQUEST
//	   │        └────────────┘                  v
//	   │ refused       │ REPLY, rapid     ┌────────────┐
//	   ├───────────────│──────────────────│ REQUESTING │
//	   │               v                  └────────────┘
//	   │ in use   ┌──────────┐ REPLY            │
//	   └──────────│ CHECKING │<─────────────────┘
//	/ DECLINE     └──────────┘<──────────────────┐ REPLY of another address
//	                       │ unused              │
//	                       v     REPLY           │
//	                   ┌───────┐<──────┐ ┌───────────┐
//	                   │ BOUND │       ├─│ REBINDING │─ the lease ends: INIT
//	                   └───────┘       │ └───────────┘
//	                    T1 │ / RENEW   │       ^ T2 / REBIND
//	                       v           │       │
//	                     ┌──────────┐──┘       │
//	                     │ RENEWING │──────────┘
//	                     └──────────┘
//
// The machine enters CHECKING only with Config.DetectConflicts, and waits there for its caller. The caller adds the
// address to the interface and waits for the result of duplicate address detection (RFC 8415, section 18.2.10.1).
//
// # Conformance
//
// Retransmissions, their limits and their randomness follow RFC 8415, sections 7.6 and 15. There are four exceptions.
// The client ignores SOL_MAX_RT and INF_MAX_RT of servers, sends a DECLINE or a RELEASE only once, and does not delay
// the first SOLICIT or INFORMATION-REQUEST. A doubled pause varies by up to a tenth, not a twentieth. All messages go
// to the multicast group of all servers, as RFC 9915 requires: the client ignores the Server Unicast option and a
// status UseMulticast. It ignores a RECONFIGURE, since it could not authenticate one. It supports neither IA_TA nor
// prefix delegation. It never sends a CONFIRM: a client that was moved to another link notices it at its renewal.
//
// The client accepts a message if it has our transaction and client identifier and a server identifier. The answer
// to an INFORMATION-REQUEST may lack the client identifier. In REQUESTING and RENEWING it accepts only messages from
// the server that it addressed. It ignores an IA_NA with another IAID, or with a T1 after its T2. Lease6.Ignored
// names the unusable parts of a REPLY.
//
// # Needs
//
// This package needs nothing from the kernel.
package dhcp6
