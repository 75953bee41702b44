package dhcp6

import "strconv"

// State is where a Session stands. The package's comment has a diagram; those that have a name here
// are what a caller may have to know.
type State uint8

// Each is a wait: what is sent in it was sent on the way into it, or again since.
const (
	initial    State = iota // about to send a SOLICIT: at the start, or after a back-off
	soliciting              // SOLICIT sent; waits for ADVERTISEs, or for a REPLY where rapid commit is on
	requesting              // REQUEST sent to the server whose ADVERTISE was the best
	checking                // a REPLY came; waits until its caller has looked whether the address is in use
	bound                   // holds a lease; waits for T1
	renewing                // past T1: RENEW sent to the server that gave the lease
	rebinding               // past T2: REBIND sent to any server
	declining               // DECLINE, or RELEASE, of an address that another host has, or that Config.Refuse refused
	informing               // INFORMATION-REQUEST sent: wants options and no address
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
