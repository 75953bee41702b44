// Package dhcpc is a DHCP client for IPv4.
//
//	dial := transport.Dialer(&transport.Config{NetNS: pod, Link: index, MAC: mac})
//	client, err := dhcpc.New(&dhcpc.Config{MAC: mac, Dial: dial})
//	lease, err := client.Acquire(ctx)
//	err = apply(nil, lease)
//	err = client.Run(ctx, lease, apply) // until ctx is done; apply gets each change
//	err = client.Release(context.WithoutCancel(ctx), held)
//
// It comes in three parts, each of use without the others:
//
//   - Machine and Session are the state machine. They have no sockets, no clock and
//     no goroutines: they compute, from what a client knows, the time, and what it
//     received, its next state, what it sends and when it wants to be woken.
//   - Transport carries packets and knows no states. Package dhcpc/transport has raw
//     and UDP sockets, opened in a network namespace.
//   - Client puts the two together with a clock: Acquire, Run, Release.
//
// A Lease is all that is needed to renew and to release it, in JSON too: the program
// that got it may end, and another go on.
//
// # States
//
// They are those of RFC 2131, figure 5, and PROBING for RFC 5227. An arrow has the message
// that is received, or the time that comes, and after the stroke what is sent.
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
// With Config.Last, INIT sends the REQUEST of INIT-REBOOT and goes to REBOOTING: an ACK leads to BOUND, a NAK to INIT,
// and after 1 s there is a DISCOVER.
//
// A REQUEST without an answer in REQUESTING leads to a new DISCOVER, and a late ACK still counts. After a NAK the client
// waits 1 s, doubled with each up to 30 min; after a conflict 10 s at least. A client without an address asks for its
// earlier one in a DISCOVER.
//
// In RENEWING the first REQUEST goes to the server. The next one follows after 10 s, doubled with each up to half of
// the time that is left, and goes to all. Each second REQUEST is that of INIT-REBOOT, with the broadcast flag: it
// reaches a server behind a relay, and its answer is believed whatever port and address it comes from.
//
// # Standards
//
// RFC 2131 and 2132; 3396 (long options) and overloaded fields; 3442 (classless routes,
// with option 249); 4039 (rapid commit); 4361 (the client identifier is the caller's);
// 5227, of which it sends the probes before an address is used, and neither announces
// nor defends it after; 6842 (an echoed client identifier is compared). It does not wait
// a random time before its first DISCOVER, and it asks an offering server twice rather
// than four times. A FORCERENEW (RFC 3203) is ignored, since it cannot be authenticated.
//
// A message counts if it is a reply with our transaction and hardware address, names no other client identifier, and
// comes from a server of Config.Servers, if there are any. An ACK counts from every server, but not of an address that
// was not requested. A NAK in REQUESTING and RENEWING counts from the server that was asked alone. An answer to a client with
// an address must come from an address of its subnet or its server, and from port 67, or be broadcast: a machine
// outside the LAN can send any other one. A server without an identifier is known by its packets' source. Wrong options of a server are ignored one by one, with a word about it in
// Lease.Ignored: an option that is cut short, of the wrong size, or out of range. An option of fixed size that a server
// sends twice is read once, and the parts of any other option are joined (RFC 3396). Only an address or a lease time that
// no client could use makes an OFFER unusable.
//
// Ignored as a whole are an answer of BOOTP, which has no message type (option 53), and IP fragments. A tag of VLAN 0,
// which carries a priority alone, changes nothing. From the third DISCOVER on the client asks for broadcast answers.
//
// # Needs
//
// This package needs nothing of the kernel; its transports do. Errors are about values
// and time.
package dhcpc
