// Package trace counts what a session of a DHCP client sent and received. The error with which the session
// ends lists it.
package trace

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// ErrTimeout is what dhcpc exports as ErrTimeout.
var ErrTimeout = errors.New("no lease in time")

// maxHeard is how many kinds of messages a Trace counts by themselves. It counts the rest together, so that
// a flood of odd messages takes no memory.
const maxHeard = 8

// Trace counts the messages since the client last had a lease. A Trace is copied along with its session,
// and the copies share their lists, so its methods make a new list instead of changing one.
type Trace struct {
	Began       time.Time
	Sent, Heard Counts
	Last        error // the error before the one that ends the session; nil if there was none
}

// Counts says how many there were of each kind.
type Counts []count

type count struct {
	what string
	n    int
}

// Add counts one more of a kind. The list of before stays as it is.
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

// Texts gives each kind with its number, with the first word in the plural where there are several: "2 OFFERs of 192.0.2.9 from 192.0.2.1".
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

// Failure has what dhcpc.Error and dhcp6.Error say in common.
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
		err = fmt.Errorf("%w: %w", ErrTimeout, err) // whether the deadline is the client's or the caller's
	}
	return &Failure{Op: op, Err: err, Last: t.Last, Waited: now.Sub(t.Began), Sent: t.Sent.Texts(), Heard: t.Heard.Texts()}
}

// Text gives the failure in one line. vain begins it where the answers led to no lease, and hint says what to
// check where no answer came.
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

// Causes gives Err and, if there is one, Last, for errors.Is.
func (f *Failure) Causes() []error {
	switch {
	case f == nil:
		return nil
	case f.Last == nil:
		return []error{f.Err}
	}
	return []error{f.Err, f.Last}
}

// Earlier gives the earlier of two times, of which a zero one means never.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
