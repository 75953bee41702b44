package dhcp6

import (
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc/internal/trace"
)

// Error is the failure of an Acquire or an Inform. Its causes are those of package dhcpc, to branch on with
// errors.Is: ErrTimeout, ErrNAK (a status that refuses), ErrDeclined, ErrRefused.
type Error struct {
	Op     string        // "acquire lease"
	Err    error         // dhcpc.ErrTimeout (a context's deadline too), context.Canceled, or a transport's error
	Last   error         // what else went wrong before; nil if nothing did
	Waited time.Duration // since the start
	Sent   []string      // "4 SOLICITs"
	Heard  []string      // `1 ADVERTISE from 00:01:…: NoAddrsAvail "no free address"`
}

// Error gives all of it in one line.
func (e *Error) Error() string {
	return (*trace.Failure)(e).Text("nothing came of", "does a DHCPv6 server serve this network, and do bridge and firewall let UDP ports 546 and 547 pass?")
}

// Unwrap gives both causes.
func (e *Error) Unwrap() []error { return (*trace.Failure)(e).Causes() }

// Failure makes an error of what a Session sent and heard so far, for a caller of Machine that gives
// up at a time, because of err.
func (s *Session) Failure(op string, now time.Time, err error) *Error {
	if s == nil {
		return &Error{Op: op, Err: err}
	}
	return (*Error)(s.trace.Failure(op, now, err))
}
