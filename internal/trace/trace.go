// Package trace has what the sessions of both DHCP clients share: the count of what was sent and received,
// which the error of a failure lists, and the numbers at random.
package trace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo"
)

// ErrTimeout is what dhcpc exports as ErrTimeout.
var ErrTimeout = errors.New("no lease in time")

// Invalid is an error that matches tombolo.ErrInvalid.
type Invalid string

func (e Invalid) Error() string { return string(e) }

// Is makes it match.
func (e Invalid) Is(target error) bool { return target == tombolo.ErrInvalid }

// Invalidf is fmt.Errorf for such errors.
func Invalidf(format string, args ...any) error { return Invalid(fmt.Sprintf(format, args...)) }

// Unusable is the error about what a lease says.
func Unusable(format string, args ...any) error { return Invalidf("invalid lease: "+format, args...) }

// Argument is the error about an argument that is not valid.
func Argument(what string) error { return Invalid(tombolo.ErrInvalid.Error() + ": " + what) }

// Shun gives the servers to avoid, the last 8, with one more. The list of before stays as it is.
func Shun[T comparable](list []T, server T) []T {
	const most = 8
	if slices.Contains(list, server) {
		return list
	}
	list = append(slices.Clone(list), server)
	return list[max(len(list)-most, 0):]
}

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

// String gives each kind with its number, with the first word in the plural where there are several: "2 OFFERs of 192.0.2.9 from 192.0.2.1".
func (c Counts) String() string {
	var list []string
	for _, one := range c {
		noun, rest, more := strings.Cut(one.what, " ")
		if one.n > 1 {
			noun += "s"
		}
		if more {
			noun += " " + rest
		}
		list = append(list, strconv.Itoa(one.n)+" "+noun)
	}
	return strings.Join(list, ", ")
}

// Failure is the error of a session that ends at some time, because of err. vain begins its text where the
// answers led to no lease, and hint says what to check where no answer came. It matches err and Last.
func (t *Trace) Failure(op string, now time.Time, err error, vain, hint string) error {
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err) // whether the deadline is the client's or the caller's
	}
	sent, waited := t.Sent.String(), now.Sub(t.Began).Round(time.Millisecond)
	silent, timeout := len(t.Heard) == 0, errors.Is(err, ErrTimeout)
	text := ""
	switch {
	case sent == "":
		text = fmt.Sprint(err)
	case silent:
		text = fmt.Sprintf("no answer to %s in %s", sent, waited)
	default:
		text = fmt.Sprintf("%s %s in %s; heard %s", vain, sent, waited, t.Heard)
	}
	switch {
	case sent == "":
	case !timeout:
		text += ": " + fmt.Sprint(err)
	case silent:
		text += " (" + hint + ")"
	}
	causes := []error{err}
	if t.Last != nil {
		text += "; before: " + t.Last.Error()
		causes = append(causes, t.Last)
	}
	return &failure{op + ": " + text, causes}
}

type failure struct {
	text   string
	causes []error
}

func (f *failure) Error() string { return f.text }

func (f *failure) Unwrap() []error { return f.causes }

// Earlier gives the earlier of two times, of which a zero one means never.
func Earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// Random is the state of the SplitMix64 generator. It is part of a session, so that what a session does is a
// function of it alone.
type Random uint64

// Next gives the next number.
func (r *Random) Next() uint64 {
	*r += 0x9e3779b97f4a7c15
	z := uint64(*r)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// Between gives a time from lo to hi.
func (r *Random) Between(lo, hi time.Duration) time.Duration {
	if hi <= lo {
		return lo
	}
	return lo + time.Duration(r.Next()%uint64(hi-lo+1))
}

// The back-off after a refusal or a conflict.
const (
	firstBackOff   = time.Second
	longestBackOff = 30 * time.Minute
)

// BackOff is the pause after so many failures in a row.
func BackOff(failures int) time.Duration { return Doubled(firstBackOff, failures, longestBackOff) }

// Doubled doubles a time n times, up to a maximum.
func Doubled(d time.Duration, n int, most time.Duration) time.Duration {
	for ; n > 0 && d < most; n-- { // so it never overflows
		d *= 2
	}
	return min(d, most)
}

// IsDomain takes what may go into a resolv.conf: the name comes from the network, and
// a space or a line break in it would be a directive of its sender's choice.
func IsDomain(name string) bool {
	if len(name) > 253 {
		return false
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 || strings.Trim(label, letters) != "" {
			return false
		}
	}
	return true
}

const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"

// Printable is what of a server's text may be shown to people.
func Printable(s string) string {
	s = strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return -1
		}
		return c
	}, s)
	return s[:min(len(s), 80)]
}
