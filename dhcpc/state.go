package dhcpc

import "strconv"

// State is one of the states of RFC 2131, figure 5, or Probing. Each is a wait:
// what is sent in it was sent on the way into it, or again since.
type State uint8

// The package's comment has a diagram of them.
const (
	initial    State = iota // about to send a DISCOVER: at the start, or after a back-off
	selecting               // DISCOVER sent; waits for an OFFER, or for an ACK where rapid commit is on
	requesting              // REQUEST for an offered address sent; waits for the server's ACK or NAK
	probing                 // an ACK came; asks by ARP whether anybody has the address (RFC 5227)
	Bound                   // holds a lease; waits for T1
	Renewing                // past T1: REQUEST sent to the server that gave the lease
	Rebinding               // past T2: REQUEST sent to any server
)

// String gives the name in RFC 2131's spelling.
func (s State) String() string {
	names := [...]string{"INIT", "SELECTING", "REQUESTING", "PROBING", "BOUND", "RENEWING", "REBINDING"}
	if int(s) < len(names) {
		return names[s]
	}
	return "state " + strconv.Itoa(int(s))
}
