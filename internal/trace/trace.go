// Package trace contains code that the DHCPv4 client, the DHCPv6 client and their callers share. It counts messages for
// the error of a failed session, generates random numbers, and has helpers for errors and times.
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

// ErrTimeout is the cause of an error if no lease came in time. Package dhcpc exports it.
var ErrTimeout = errors.New("no lease in time")

// ErrSilent is a further cause of an error with the cause ErrTimeout if no server answered at all.
var ErrSilent = errors.New("no server answered")

// Invalid is an error that matches tombolo.ErrInvalid.
type Invalid string

func (e Invalid) Error() string { return string(e) }

// Is reports whether target is tombolo.ErrInvalid.
func (e Invalid) Is(target error) bool { return target == tombolo.ErrInvalid }

// Invalidf returns an Invalid error with a formatted text.
func Invalidf(format string, args ...any) error { return Invalid(fmt.Sprintf(format, args...)) }

// Unusable returns an Invalid error about the content of a lease.
func Unusable(format string, args ...any) error { return Invalidf("invalid lease: "+format, args...) }

// CheckTimes returns an Invalid error unless the times of a lease are in their order. A lease that never ends has only
// the time when it began.
func CheckTimes(obtained, renew, rebind, expire time.Time) error {
	switch {
	case obtained.IsZero():
		return Unusable("it does not say when it began")
	case renew.IsZero() && rebind.IsZero() && expire.IsZero():
		return nil
	case renew.Before(obtained) || rebind.Before(renew) || expire.Before(rebind):
		return Unusable("times %s, %s, %s, %s are not in their order", obtained.Format(time.RFC3339),
			renew.Format(time.RFC3339), rebind.Format(time.RFC3339), expire.Format(time.RFC3339))
	}
	return nil
}

// Argument returns an Invalid error about an argument of a call.
func Argument(what string) error { return Invalid(tombolo.ErrInvalid.Error() + ": " + what) }

// Shun returns list with server added, limited to the last 8 servers. If list contains server already, it returns list
// unchanged. It never changes list itself.
func Shun[T comparable](list []T, server T) []T {
	const most = 8
	if slices.Contains(list, server) {
		return list
	}
	list = append(slices.Clone(list), server)
	return list[max(len(list)-most, 0):]
}

// maxHeard is the number of kinds of messages that a Counts counts separately. It counts all other kinds together, so
// that a flood of odd messages takes little memory.
const maxHeard = 8

// Trace counts the messages of one attempt to get or renew a lease. Copies of a session have copies of its Trace, which
// share their lists. So the methods make new lists instead of changing a list.
type Trace struct {
	Began       time.Time
	Sent, Heard Counts
	Last        error // the error before the one that ends the session; nil if there was none
}

// Counts holds the number of messages of each kind, in the order of their first occurrence.
type Counts []count

type count struct {
	what string
	n    int
}

// Add counts one more message of a kind. It makes a new list, so that copies of the previous list stay unchanged.
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

// String returns each kind with its number, such as "2 OFFERs of 192.0.2.9 from 192.0.2.1". If the number is greater
// than 1, the kind's first word has a plural s.
func (c Counts) String() string {
	var list []string
	for _, one := range c {
		if noun, rest, _ := strings.Cut(one.what, " "); one.n > 1 {
			one.what = strings.TrimSpace(noun + "s " + rest)
		}
		list = append(list, strconv.Itoa(one.n)+" "+one.what)
	}

	return strings.Join(list, ", ")
}

// Failure returns the error of a session that ends at the time now because of err. Its text begins with op. Then
// follows vain if answers came, but led to no lease. The text contains hint, advice for the reader, if no answer came
// before a timeout. If no message was sent, err follows op instead. The error matches err and Last. After a timeout it
// also matches ErrTimeout, and ErrSilent if no answer came.
func (t *Trace) Failure(op string, now time.Time, err error, vain, hint string) error {
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrTimeout, err) // also if the caller set the deadline
	}

	sent, waited := t.Sent.String(), now.Sub(t.Began).Round(time.Millisecond)
	silent, timeout := len(t.Heard) == 0, errors.Is(err, ErrTimeout)
	text := fmt.Sprintf("%s %s in %s; heard %s", vain, sent, waited, t.Heard)
	if silent {
		text = fmt.Sprintf("no answer to %s in %s", sent, waited)
	}

	switch {
	case sent == "":
		text = fmt.Sprint(err)
	case !timeout:
		text += ": " + fmt.Sprint(err)
	case silent:
		text += " (" + hint + ")"
	}

	causes := []error{err}
	if silent && timeout {
		causes = append(causes, ErrSilent)
	}

	if t.Last != nil {
		text += "; before: " + t.Last.Error()
		causes = append(causes, t.Last)
	}

	return &failure{op + ": " + text, causes}
}

// failure is an error with a complete text and several causes.
type failure struct {
	text   string
	causes []error
}

func (f *failure) Error() string { return f.text }

func (f *failure) Unwrap() []error { return f.causes }

// Earliest returns the earliest of several times. The zero time means never.
func Earliest(times ...time.Time) time.Time {
	var first time.Time
	for _, t := range times {
		if first.IsZero() || !t.IsZero() && t.Before(first) {
			first = t
		}
	}
	return first
}

// Random is the state of a SplitMix64 generator. It is part of a session, so that equal sessions behave equally.
type Random uint64

// Next returns the next random number.
func (r *Random) Next() uint64 {
	*r += 0x9e3779b97f4a7c15
	z := uint64(*r)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// Between returns a random duration from lo to hi, both included.
func (r *Random) Between(lo, hi time.Duration) time.Duration {
	if hi <= lo {
		return lo
	}
	return lo + time.Duration(r.Next()%uint64(hi-lo+1))
}

// firstBackOff and longestBackOff are the shortest and the longest back-off after a refusal or a conflict.
const (
	firstBackOff   = time.Second
	longestBackOff = 30 * time.Minute
)

// BackOff returns the pause after a failure. The parameter is the number of failures in a row before that one.
func BackOff(failures int) time.Duration { return Doubled(firstBackOff, failures, longestBackOff) }

// Doubled returns the duration d doubled n times, limited to the maximum in the parameter most.
func Doubled(d time.Duration, n int, most time.Duration) time.Duration {
	for ; n > 0 && d < most; n-- { // stop early, to avoid an overflow
		d *= 2
	}
	return min(d, most)
}

// IsDomain reports whether a name may be written to a resolv.conf. The name comes from the network, and a space or a
// line break in it would let its sender add a directive.
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

// Printable returns a server's text without characters that are not printable ASCII, cut to 80 bytes.
func Printable(s string) string {
	s = strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return -1
		}
		return c
	}, s)
	return s[:min(len(s), 80)]
}
