package dhcp6

import "strconv"

// State is where a Session stands. The package's comment has a diagram.
type State uint8

// Each is a wait: what is sent in it was sent on the way into it, or again since.
const (
	Init       State = iota // about to send a SOLICIT: at the start, or after a back-off
	Soliciting              // SOLICIT sent; waits for ADVERTISEs, or for a REPLY where rapid commit is on
	Requesting              // REQUEST sent to the server whose ADVERTISE was the best
	Checking                // a REPLY came; waits until its caller has looked whether the address is in use
	Bound                   // holds a lease; waits for T1
	Renewing                // past T1: RENEW sent to the server that gave the lease
	Rebinding               // past T2: REBIND sent to any server
	Declining               // DECLINE, or RELEASE, of an address that another host has, or that Config.Refuse refused
	Informing               // INFORMATION-REQUEST sent: wants options and no address
	Informed                // has them, and is done
	Confirming              // holds a lease; asks whether its address fits the link: see Machine.Confirm
)

// String gives the name in capitals.
func (s State) String() string {
	names := [...]string{"INIT", "SOLICITING", "REQUESTING", "CHECKING", "BOUND", "RENEWING", "REBINDING", "DECLINING", "INFORMING", "INFORMED", "CONFIRMING"}
	if int(s) < len(names) {
		return names[s]
	}
	return "state " + strconv.Itoa(int(s))
}
