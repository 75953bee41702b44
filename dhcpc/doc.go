// Package dhcpc is a DHCP client for IPv4. In this example, index and mac are the Index and the HardwareAddr of the
// client's net.Interface in the network namespace pod.
//
//	dial := transport.Dialer(&transport.Config{NetNS: pod, Link: index, MAC: mac})
//	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: dial})
//	lease, err := client.Acquire(ctx)
//	err = apply(nil, lease)
//	err = client.Run(ctx, lease, apply) // until ctx is done; apply gets each change
//	err = client.Release(context.WithoutCancel(ctx), held) // held is the last lease that apply got
//
// The package has three parts, which can be used separately:
//
//   - Machine and Session are the state machine. They have no sockets, no clock and no goroutines. From a client's
//     state, the time, and a received message, they compute the next state, the message to send, and the time of the
//     next step.
//   - Transport carries packets and knows no states. Package dhcpc/transport has raw and UDP sockets, opened in a
//     network namespace.
//   - Client combines the two with a clock: Acquire, Run, Release.
//
// A Lease contains everything needed to renew and release it, in JSON too: the program that got it may end, and
// another may continue.
//
// # States
//
// The states come from RFC 2131, figure 5, with PROBING for RFC 5227. An arrow has the received message, or the time
// that has come, and after the slash the sent message.
//
//	         ┌──────┐ now, or after a back-off / DISCOVER
//	┌───────>│ INIT │──────────────┐
//	│        └──────┘              v   ┌─ no OFFER / DISCOVER
//	│ NAK    ┌────────────┐      ┌───────────┐
//	├────────│ REQUESTING │<─────│ SELECTING │
//	│        └────────────┘ OFFER└───────────┘
//	│             │ ACK  / REQUEST   │ ACK with rapid commit
//	│             v                  │
//	│ conflict┌─────────┐            │
//	├─────────│ PROBING │<───────────┤ with conflict detection
//	│/ DECLINE└─────────┘            │
//	│             │ no answer        │ without
//	│             v                  │
//	│         ┌───────┐
//	│         │ BOUND │
//	│         └───────┘
//	│          │     ^
//	│       T1 │     │ ACK
//	│ / REQUEST│     │
//	│          v     │
//	│ NAK ┌──────────┐  T2    ┌───────────┐ NAK, or the lease ends
//	├─────│ RENEWING │───────>│ REBINDING │───────────────────┐
//	│     └──────────┘ / REQUEST to all───┘                   │
//	└──────────────────────────────────────────────────────────┘
//
// With Config.Last, INIT sends the REQUEST of INIT-REBOOT and goes to REBOOTING. An ACK leads to PROBING or BOUND, and
// a NAK to INIT. After at most 1 s without an answer, the client sends a DISCOVER.
//
// If a server answers neither of two REQUESTs in REQUESTING, the client sends a new DISCOVER, and a late ACK still
// counts. After a NAK it waits 1 s, doubled with each further failure up to 30 min. After a conflict it waits at least
// 10 s. A client whose lease expired requests its previous address in a DISCOVER.
//
// In REBINDING, as in RENEWING, an ACK leads to BOUND. In RENEWING the first REQUEST goes to the server, and the others
// go to all. The first pause is 10 s. Pauses double, up to half of the remaining time or to 60 s, whichever is longer.
// Every second REQUEST has the form for INIT-REBOOT, with the broadcast flag. Such a REQUEST reaches a server behind a
// relay. Its broadcast answer is accepted from any port and address.
//
// # Standards
//
// The package implements RFC 2131 and 2132, and options in the fields file and sname (option 52). It also implements
// RFC 3396 (long options), 3442 (classless routes, also in option 249), 4039 (rapid commit), 4361 (the caller chooses
// the client identifier) and 6842 (an echoed client identifier is compared). Of RFC 5227 it implements the probes
// before an address is used, but no announcements or defence after it. It does not wait a random time before its first
// DISCOVER, and asks an offering server twice instead of four times. It ignores a FORCERENEW (RFC 3203), since it could
// not authenticate one.
//
// A message counts if it is a reply with our transaction and hardware address, and names no other client identifier. If
// Config.Servers is not empty, the message must come from one of them. An ACK for a REQUEST counts from every such
// server, if its address is the requested one. In REQUESTING and RENEWING, a NAK of another server than the asked one
// does not count. In RENEWING, a NAK that names no server counts. If the client has a lease, and its transport reports
// the destinations of packets, an answer must be broadcast, or come from port 67 and from the client's subnet or its
// server. A machine outside the LAN can send any other answer. A server without an identifier is identified by its
// packets' source.
//
// Wrong options of a server (truncated, of the wrong size, or out of range) are ignored one by one, and listed in
// Lease.Ignored. If a server sends an option of fixed size twice, it is read once. The parts of any other option are
// joined (RFC 3396). An OFFER is unusable only if no client could use its address or lease time, or if its server is
// unknown.
//
// The client ignores BOOTP answers, which have no message type (option 53). Its raw sockets ignore IP fragments, and
// accept a tag of VLAN 0, which contains only a priority. From the third DISCOVER on it asks for broadcast answers.
//
// # Needs
//
// The package needs nothing from the kernel; its transports do.
package dhcpc
