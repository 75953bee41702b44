// Package dhcp6 is a DHCP client for IPv6 (RFC 8415), for one address.
//
//	machine, err := dhcp6.NewMachine(&dhcp6.Config{DUID: dhcp6.DUID(hash), IAID: 1})
//	session := machine.Start(time.Now(), rand.Uint64())
//	session, out := machine.Step(session, time.Now(), dhcp6.Event{}) // out.Send is to be sent
//
// It is the state machine alone, without sockets, clock and goroutines: its caller sends what a Step says, and
// steps again when the time comes or a message does. The example has such a loop. A Transport carries messages
// between the interface's link-local address and ff02::1:2. A Lease is all that is needed to renew and release it,
// in JSON too, by another program as well.
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
//	┌───────────┐ in  ┌──────────┐ REPLY        │
//	│ DECLINING │<────│ CHECKING │<─────────────┘
//	└───────────┘ use └──────────┘<──────────────┐ REPLY of another address
//	/ DECLINE              │ unused              │
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
// CHECKING waits for its caller, which adds the address to the interface and looks whether duplicate
// address detection finds another host that has it (RFC 8415, section 18.2.10.1).
//
// # What it follows, and what not
//
// Retransmissions, their bounds and their random parts are those of RFC 8415, sections 7.6 and
// 15; SOL_MAX_RT and INF_MAX_RT of servers are obeyed. The first SOLICIT is not delayed. All messages
// go to all servers, as RFC 9915 has it: the Server Unicast option is ignored, and so is a status
// UseMulticast. A RECONFIGURE is ignored, since it cannot be authenticated. There is no
// IA_TA and no prefix delegation. Machine.Confirm begins in CONFIRMING, which leads to BOUND, or to INIT where the
// address does not fit the link (NotOnLink).
//
// A message counts if it has our transaction and client identifier and a server identifier; in REQUESTING, RENEWING
// and DECLINING only the server that was asked is heard. Of an IA_NA with another IAID, or whose T1 is after its
// T2, nothing is taken. Lease.Ignored names the parts of a REPLY that cannot be used.
//
// # Needs
//
// This package needs nothing of the kernel. Errors are about values and time.
package dhcp6
