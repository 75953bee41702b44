// Package trace counts what a session of a DHCP client sent and heard, for the error that it ends with.
package trace

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// ErrTimeout is dhcpc.ErrTimeout.
var ErrTimeout = errors.New("no lease in time")

// maxHeard bounds the kinds of messages that a Trace tells apart.
const maxHeard = 8

// Trace is what was sent and heard since there last was a lease. It is part of a session, of which
// copies are made, so that no list is changed in place.
type Trace struct {
	Began       time.Time
	Sent, Heard Counts
	Last        error // what went wrong before
}

// Counts says how many there were of each kind.
type Counts []count

type count struct {
	what string
	n    int
}

// Add counts one more of something, in a copy.
func (c *Counts) Add(what string) {
	list := append(Counts(nil), *c...)
	*c = list
	for i := range list {
		if list[i].what == what || i == maxHeard {
			list[i].n++
			return
		}
	}
	if len(list) == maxHeard {
		what = "message of other kinds"
	}
	*c = append(list, count{what, 1})
}

// Texts gives each with its number, and the first word in the plural: "2 OFFERs of 192.0.2.9 from 192.0.2.1".
func (c Counts) Texts() []string {
	var list []string
	for _, one := range c {
		noun, rest := one.what, ""
		if at := strings.IndexByte(noun, ' '); at > 0 {
			noun, rest = noun[:at], noun[at:]
		}
		if one.n > 1 {
			noun += "s"
		}
		list = append(list, strconv.Itoa(one.n)+" "+noun+rest)
	}
	return list
}

// Failure is dhcpc.Error and dhcp6.Error.
type Failure struct {
	Op     string
	Err    error
	Last   error
	Waited time.Duration
	Sent   []string
	Heard  []string
}

// Failure makes the error of a session that ends now, because of err.
func (t *Trace) Failure(op string, now time.Time, err error) *Failure {
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err) // any deadline counts, also the caller's
	}
	return &Failure{Op: op, Err: err, Last: t.Last, Waited: now.Sub(t.Began), Sent: t.Sent.Texts(), Heard: t.Heard.Texts()}
}

// Text gives all of it in one line. vain is how it says that what was heard did not do, and hint what
// to look at where nothing was heard.
func (f *Failure) Text(vain, hint string) string {
	if f == nil {
		return "no error"
	}
	sent, waited := strings.Join(f.Sent, ", "), f.Waited.Round(time.Millisecond).String()
	text := f.Op + ": "
	switch {
	case sent == "":
		text += fmt.Sprint(f.Err)
	case len(f.Heard) == 0:
		text += "no answer to " + sent + " in " + waited
	default:
		text += vain + " " + sent + " in " + waited + "; heard " + strings.Join(f.Heard, ", ")
	}
	switch {
	case sent == "":
	case !errors.Is(f.Err, ErrTimeout):
		text += ": " + fmt.Sprint(f.Err)
	case len(f.Heard) == 0:
		text += " (" + hint + ")"
	}
	if f.Last != nil {
		text += "; before: " + f.Last.Error()
	}
	return text
}

// Causes gives both.
func (f *Failure) Causes() []error {
	switch {
	case f == nil:
		return nil
	case f.Last == nil:
		return []error{f.Err}
	}
	return []error{f.Err, f.Last}
}

// Earlier gives the earlier of two times; the zero time never comes.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
