package dhcpc

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// Causes to branch on with errors.Is.
var (
	// ErrTimeout: no lease came in time. The Error around it says what was sent and
	// heard, and matches ErrNAK, ErrDeclined or ErrRefused too if that is what happened on the way.
	ErrTimeout = errors.New("no lease in time")
	// ErrNAK: a server refused the address that was asked for.
	ErrNAK = errors.New("server refused the address")
	// ErrDeclined: the address was in use by another host and was declined.
	ErrDeclined = errors.New("address is in use by another host")
	// ErrRefused: a server granted an address that Config.Refuse does not take, and that
	// was declined.
	ErrRefused = errors.New("address not taken")
	// ErrExpired: a lease ran out before any server renewed it.
	ErrExpired = errors.New("lease expired")
)

// Error is the failure of an Acquire or a Resume.
type Error struct {
	Op     string        // "acquire lease", "resume lease of 192.0.2.7"
	Err    error         // ErrTimeout (a context's deadline too), context.Canceled, or a transport's error
	Last   error         // what else went wrong before: a NAK or a conflict; nil if nothing did
	Waited time.Duration // since the start
	Sent   []string      // "4 DISCOVERs"
	Heard  []string      // "1 OFFER of 192.0.2.9 from 192.0.2.1: for another client"
}

// Error gives all of it in one line.
func (e *Error) Error() string {
	if e == nil {
		return "no error"
	}
	var b strings.Builder
	b.WriteString(e.Op + ": ")
	waited := e.Waited.Round(time.Millisecond)
	if len(e.Sent) > 0 && len(e.Heard) == 0 {
		fmt.Fprintf(&b, "no answer to %s in %s", strings.Join(e.Sent, ", "), waited)
	} else if len(e.Sent) > 0 {
		fmt.Fprintf(&b, "no lease after %s in %s; heard %s", strings.Join(e.Sent, ", "), waited, strings.Join(e.Heard, ", "))
	}
	if !errors.Is(e.Err, ErrTimeout) || len(e.Sent) == 0 {
		if len(e.Sent) > 0 {
			b.WriteString(": ")
		}
		fmt.Fprint(&b, e.Err)
	} else if len(e.Heard) == 0 {
		b.WriteString(" (does a DHCP server serve this network, and do bridge and firewall let UDP ports 67 and 68 pass?)")
	}
	if e.Last != nil {
		b.WriteString("; before: " + e.Last.Error())
	}
	return b.String()
}

// Unwrap gives both causes.
func (e *Error) Unwrap() []error {
	if e == nil {
		return nil
	}
	if e.Last == nil {
		return []error{e.Err}
	}
	return []error{e.Err, e.Last}
}

// maxHeard bounds the kinds of messages that a trace tells apart.
const maxHeard = 8

// trace counts what a session sent and heard since it last had a lease. It is
// part of a Session, so it is copied before it is changed.
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
		what = "message of other kinds"
	}
	return append(list, count{what, 1})
}

// String puts the first word into the plural: "2 OFFERs of 192.0.2.9 from 192.0.2.1".
func (c count) String() string {
	noun, rest, more := strings.Cut(c.what, " ")
	if c.n > 1 {
		noun += "s"
	}
	if more {
		noun += " " + rest
	}
	return fmt.Sprintf("%d %s", c.n, noun)
}

func texts(list []count) []string {
	var text []string
	for _, c := range list {
		text = append(text, c.String())
	}
	return text
}

// failure makes an Error of a trace.
func (t *trace) failure(op string, now time.Time, err error) *Error {
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err) // any deadline counts, also the caller's
	}
	return &Error{Op: op, Err: err, Last: t.last, Waited: now.Sub(t.began), Sent: texts(t.sent), Heard: texts(t.heard)}
}

// describe names a message as a trace does: "OFFER of 192.0.2.9 from 192.0.2.1".
func describe(m *message) string {
	s := m.kind.String()
	if m.kind == dhcpv4.MessageTypeNone {
		s = "message of no type"
	}
	if m.address.IsValid() && !m.address.IsUnspecified() {
		s += " of " + m.address.String()
	}
	if from := m.sender(); from.IsValid() {
		s += " from " + from.String()
	}
	return s
}

// refusal is the error of a NAK.
func refusal(m *message, asked netip.Addr) error {
	err := fmt.Errorf("%w %s: NAK from %s", ErrNAK, asked, m.sender())
	if text := printable(m.text); text != "" {
		err = fmt.Errorf("%w: %q", err, text)
	}
	return err
}
