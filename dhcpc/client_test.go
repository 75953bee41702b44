package dhcpc

import (
	"context"
	"encoding/json"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

func wantLog(t *testing.T, w *world, want string) {
	t.Helper()
	expect.NoDiff(t, cmp.Diff(want, strings.Join(w.log, ", ")), "done")
}

func TestAcquire(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, honest())
	l := must.Of(c.Acquire(t.Context())).Get(t)
	if l.Address.String() != "10.9.0.7/24" || !w.now.Equal(epoch()) {
		t.Errorf("lease of %s after %s", l.Address, w.now.Sub(epoch()))
	}
	wantLog(t, w, "open raw, DISCOVER, REQUEST, close")
}

func TestAcquireSaysWhatItSentAndHeard(t *testing.T) {
	t.Parallel()
	silent := func(m *dhcpv4.DHCPv4, _ *Packet) []*Packet {
		if m.MessageType() != discover {
			return nil
		}
		return []*Packet{
			answer(m, offer, yiaddr(otherIP), func(d *dhcpv4.DHCPv4) { d.ClientHWAddr = []byte(otherMAC()) }),
			answer(m, offer),
		}
	}
	for _, tt := range []struct {
		name  string
		serve func(*dhcpv4.DHCPv4, *Packet) []*Packet
		is    []error
		want  string
	}{
		{"nobody there", nil, []error{ErrTimeout},
			`acquire lease: no answer to [34] DISCOVERs in 30s \(does a DHCP server serve this network, and do bridge and firewall let UDP ports 67 and 68 pass\?\)`},
		{"an OFFER, then silence", silent, []error{ErrTimeout}, `acquire lease: no lease after \d DISCOVERs, \d REQUESTs in 30s; ` +
			`heard \d OFFERs of 10.9.0.8 from 10.9.0.1: for another client, \d OFFERs of 10.9.0.7 from 10.9.0.1`},
		{"a server that refuses", refusing, []error{ErrTimeout, ErrNAK}, `acquire lease: no lease after \d DISCOVERs, \d REQUESTs in 30s; ` +
			`heard \d OFFERs of 10.9.0.7 from 10.9.0.1, \d NAKs from 10.9.0.1; before: server refused the address 10.9.0.7: NAK from 10.9.0.1`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, c := newWorld(t, tt.serve)
			_, err := c.Acquire(t.Context())
			for _, is := range tt.is {
				expect.Is(t, err, is)
			}
			expect.Equal(t, w.now.Sub(epoch()), 30*time.Second, "waited")
			expect.That(t, regexp.MustCompile("^"+tt.want+"$").MatchString(err.Error()),
				"error\n%s\nwant\n%s", err, tt.want)
		})
	}
}

func TestAcquireEndsWithItsContext(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, nil)
	ctx, cancel := context.WithCancel(t.Context())
	waits := 0
	w.onWait = func() {
		if waits++; waits == 2 {
			cancel()
		}
	}
	_, err := c.Acquire(ctx)
	expect.That(t, errors.Is(err, context.Canceled) && !errors.Is(err, ErrTimeout) &&
		strings.HasPrefix(err.Error(), "acquire lease: no answer to 2 DISCOVERs in ") && strings.HasSuffix(err.Error(), ": context canceled"),
		"error %v", err)
	w.log = nil
	if _, err := c.Acquire(ctx); !errors.Is(err, context.Canceled) || len(w.log) > 0 {
		t.Errorf("error %v, done %v: want nothing done for who is gone", err, w.log)
	}
}

func TestADeadlineIsATimeout(t *testing.T) {
	t.Parallel()
	_, c := newWorld(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), -1)
	defer cancel()
	_, err := c.Acquire(ctx)
	expect.That(t, errors.Is(err, ErrTimeout) && errors.Is(err, context.DeadlineExceeded), "error %v", err)
}

func TestAcquireEndsWithItsTransport(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, nil)
	w.closed = errBroken
	expect.Is(t, expect.Err(c.Acquire(t.Context())), errBroken, "error")
	w.closed, w.broken = nil, errBroken
	expect.Is(t, expect.Err(c.Acquire(t.Context())), errBroken, "error")
}

func TestADamagedLeaseIsAnError(t *testing.T) {
	t.Parallel()
	_, c := newWorld(t, nil)
	ctx := t.Context()
	for _, err := range []error{c.Run(ctx, &Lease{}, nil), c.Release(ctx, &Lease{})} {
		expect.Is(t, err, tombolo.ErrInvalid, "error")
	}
}

var errEnough = errors.New("enough")

func TestRunKeepsALeaseForDays(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, honest())
	var last *Lease
	renewals := 0
	err := c.Run(t.Context(), testLease(), func(old, next *Lease) error {
		expect.That(t, (last == nil || old == last) && next != nil && next.Obtained.After(old.Obtained),
			"from %+v to %+v", old, next)
		last = next
		expect.Equal(t, w.open, 0, "a socket is open while the lease is applied")
		if renewals++; renewals == 100 {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) || w.now.Sub(epoch()) < 50*time.Hour {
		t.Errorf("ended by %v after %s", err, w.now.Sub(epoch()))
	}
	expect.Equal(t, strings.Join(w.log[:6], ", "), "open 10.9.0.7, REQUEST, close, open 10.9.0.7, REQUEST, close", "done")
}

// The server is away, then another one is there that knows nothing: the address goes,
// and another comes.
func TestRunLosesALeaseAndGetsAnother(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, nil)
	l := testLease()
	w.onWait = func() {
		if w.now.After(l.Expire) {
			w.serve = honest(from(rogueIP), yiaddr(otherIP))
		}
	}
	var got []string
	name := func(l *Lease) string {
		if l == nil {
			return "none"
		}
		return l.Address.Addr().String()
	}
	expect.Is(t, c.Run(t.Context(), l, func(old, next *Lease) error {
		got = append(got, name(old)+" to "+name(next))
		expect.That(t, next != nil || !w.now.Before(l.Expire), "gone at %s, before its end", w.now)
		if len(got) == 3 {
			return errEnough
		}
		return nil
	}), errEnough)
	expect.NoDiff(t, cmp.Diff([]string{"10.9.0.7 to none", "none to 10.9.0.8", "10.9.0.8 to 10.9.0.8"}, got), "applied")
}

func TestRunSurvivesItsTransport(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, honest())
	l := testLease()
	w.broken = errBroken
	waits := 0
	w.onWait = func() {
		switch waits++; waits {
		case 3:
			w.broken, w.closed = nil, errBroken
		case 5:
			w.closed = nil
		}
	}
	err := c.Run(t.Context(), l, func(_, next *Lease) error {
		expect.That(t, next != nil, "lost the lease")
		return errEnough
	})
	expect.That(t, errors.Is(err, errEnough) && waits >= 5 && w.now.Before(l.Expire),
		"%v after %d waits, at %s", err, waits, w.now)
}

func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	for _, waits := range []int{1, 2, 3} { // while bound, while it listens, while it waits to ask again
		w, c := newWorld(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		w.onWait = func() {
			if n++; n == waits {
				cancel()
			}
		}
		expect.Is(t, c.Run(ctx, testLease(), nil), context.Canceled, "error")
	}
}

// No time passes meanwhile but on CLOCK_BOOTTIME.
func TestALeaseGoesOnWhileTheMachineSleeps(t *testing.T) {
	t.Parallel()
	for sleeps, want := range map[time.Duration]string{
		time.Second:      "open 10.9.0.7, REQUEST, close",            // at T1, as without
		20 * time.Minute: "open 10.9.0.7, REQUEST, close",            // at T1, which comes sooner
		40 * time.Minute: "open 10.9.0.7, REQUEST, close",            // at once
		55 * time.Minute: "open 10.9.0.7, REQUEST, close",            // at once, to all servers
		8 * time.Hour:    "open raw, DISCOVER, REQUEST, close, gone", // at once: the lease has ended
	} {
		w, c := newWorld(t, honest())
		w.sleeps = sleeps
		gone := false
		err := c.Run(t.Context(), testLease(), func(_, next *Lease) error {
			if next == nil {
				gone = true
				return nil
			}
			return errEnough
		})
		expect.Is(t, err, errEnough)
		if gone {
			w.log = append(w.log, "gone")
		}
		wantLog(t, w, want)
		at := max(30*time.Minute-sleeps, 0)
		if sleeps == time.Second {
			at = 30 * time.Minute
		}
		expect.That(t, w.now.Sub(epoch()) >= at && w.now.Sub(epoch()) <= at+2*time.Minute, "after a sleep of %s it asked after %s, want %s", sleeps, w.now.Sub(epoch()), at)
	}
}

// A sleep before there was a lease takes nothing from it.
func TestASleepWithoutALeaseIsNoneOfTheNextLeases(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, nil)
	w.sleeps = 8 * time.Hour
	var got []string
	err := c.Run(t.Context(), testLease(), func(_, next *Lease) error {
		if next != nil {
			got = append(got, "leased")
		} else if got = append(got, "gone"); len(got) == 1 {
			w.onWait = func() { w.sleeps, w.serve, w.onWait = 8*time.Hour, honest(), nil }
		}
		if len(got) == 3 {
			return errEnough
		}
		return nil
	})
	expect.Is(t, err, errEnough)
	expect.Equal(t, strings.Join(got, ", "), "gone, leased, leased", "the pod's lease")
}

func TestReleaseFromTheLeasedAddress(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, nil)
	must.Succeed(t, c.Release(t.Context(), testLease()))
	wantLog(t, w, "open 10.9.0.7, RELEASE, close")
	w.broken = errBroken
	err := c.Release(t.Context(), testLease())
	expect.That(t, errors.Is(err, errBroken) && strings.HasPrefix(err.Error(), "release lease of 10.9.0.7: "), "error %v", err)
}

// What a restarted program reads back is as good as what the first one had.
func TestALeaseOutlivesItsProgram(t *testing.T) {
	t.Parallel()
	w, c := newWorld(t, honest())
	l := must.Of(c.Acquire(t.Context())).Get(t)
	text := must.Of(json.Marshal(l)).Get(t)
	var read Lease
	must.Succeed(t, json.Unmarshal(text, &read))
	w.log = nil
	expect.Is(t, c.Run(t.Context(), &read, func(old, next *Lease) error {
		expect.That(t, next.Address == l.Address && !w.now.Before(l.Renew), "%s at %s", next.Address, w.now)
		return errEnough
	}), errEnough)
	wantLog(t, w, "open 10.9.0.7, REQUEST, close")
}

func TestSystemClock(t *testing.T) {
	t.Parallel()
	var c systemClock
	ctx, cancel := context.WithCancel(t.Context())
	expect.Success(t, c.Wait(ctx, c.Now()))
	cancel()
	for _, until := range []time.Time{{}, c.Now().Add(time.Hour)} {
		expect.Is(t, c.Wait(ctx, until), context.Canceled, "error")
	}
}
