package dhcp6

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// Error is the failure of an Acquire or an Inform. Its causes are those of package dhcpc, to branch on with
// errors.Is: ErrTimeout, ErrNAK (a status that refuses), ErrDeclined, ErrRefused.
type Error struct {
	Op     string        // "acquire lease"
	Err    error         // dhcpc.ErrTimeout (a context's deadline too), context.Canceled, or a transport's error
	Last   error         // what else went wrong before; nil if nothing did
	Waited time.Duration // since the start
	Sent   []string      // "4 SOLICIT"
	Heard  []string      // `1 ADVERTISE from 00:01:…: NoAddrsAvail "no free address"`
}

// Error gives all of it in one line.
func (e *Error) Error() string {
	if e == nil {
		return "no error"
	}
	waited := e.Waited.Round(time.Millisecond)
	text := e.Op + ": "
	switch {
	case len(e.Sent) > 0 && len(e.Heard) == 0:
		text += fmt.Sprintf("no answer to %s in %s", strings.Join(e.Sent, ", "), waited)
	case len(e.Sent) > 0:
		text += fmt.Sprintf("nothing came of %s in %s; heard %s", strings.Join(e.Sent, ", "), waited, strings.Join(e.Heard, ", "))
	}
	switch {
	case len(e.Sent) == 0:
		text += fmt.Sprint(e.Err)
	case !errors.Is(e.Err, dhcpc.ErrTimeout):
		text += ": " + fmt.Sprint(e.Err)
	case len(e.Heard) == 0:
		text += " (does a DHCPv6 server serve this network, and do bridge and firewall let UDP ports 546 and 547 pass?)"
	}
	if e.Last != nil {
		text += "; before: " + e.Last.Error()
	}
	return text
}

// Unwrap gives both causes.
func (e *Error) Unwrap() []error {
	switch {
	case e == nil:
		return nil
	case e.Last == nil:
		return []error{e.Err}
	}
	return []error{e.Err, e.Last}
}

// maxHeard bounds the kinds of messages that a trace tells apart.
const maxHeard = 8

// trace counts what a session sent and heard since it last had a lease. It is part of a Session, so
// it is copied before it is changed.
type trace struct {
	began time.Time
	sent  []count
	heard []count
	last  error
}

type count struct {
	what string
	n    int
}

// add counts one more of something, in a copy.
func add(list []count, what string) []count {
	list = append([]count(nil), list...)
	for i := range list {
		if list[i].what == what || i == maxHeard {
			list[i].n++
			return list
		}
	}
	if len(list) == maxHeard {
		what = "of other kinds"
	}
	return append(list, count{what, 1})
}

func texts(list []count) []string {
	var text []string
	for _, c := range list {
		text = append(text, fmt.Sprintf("%d %s", c.n, c.what))
	}
	return text
}

// Failure makes an error of what a Session sent and heard so far, for a caller of Machine that gives
// up at a time, because of err.
func (s *Session) Failure(op string, now time.Time, err error) *Error {
	if s == nil {
		return &Error{Op: op, Err: err}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", dhcpc.ErrTimeout, err) // any deadline counts, also the caller's
	}
	return &Error{Op: op, Err: err, Last: s.last, Waited: now.Sub(s.began), Sent: texts(s.trace.sent), Heard: texts(s.heard)}
}
