package keeper

import (
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// Timers and sessions do not count the time that the machine sleeps.
func TestALeaseGoesOnWhileTheMachineSleeps(t *testing.T) {
	for name, c := range map[string]struct {
		by   time.Duration
		want string
	}{
		"a moment":             {time.Second, ""},
		"less than a half":     {15 * time.Minute, ""},
		"more than a half":     {40 * time.Minute, "REQUEST"},
		"longer than it lasts": {2 * time.Hour, "DISCOVER"},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.record(1)
				w.add(r)
				w.start()
				w.later(10 * time.Minute)
				w.slept.Add(int64(c.by))
				w.later(lease.Beat + time.Second)
				said := w.said()
				if first := append(said, " ")[0]; c.want+" 1" != first && c.want+first != " " {
					t.Errorf("after %v of sleep it sent %v, want %s", c.by, said, c.want)
				}
				left := w.load(r).Lease.Left(now())
				if want := 50*time.Minute - c.by; c.want == "" && (left > want || left < want-time.Minute) {
					t.Errorf("%v are left, want %v", left, want)
				}
			})
		})
	}
}

// A worker has the session then, and would bring it back.
func TestASleepDuringAVisitIsLookedAtAfterIt(t *testing.T) {
	for name, sleeps := range map[string]bool{"slept": true, "not slept": false} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.record(1)
				w.add(r).slow = 2*lease.Beat + time.Second
				during := 0
				w.atBeat = func(l *loop) {
					if e := l.entries[r.Hash()]; e != nil && e.busy {
						during++
						if sleeps && during == 1 {
							w.slept.Add(int64(time.Minute))
						}
					}
				}
				w.start()
				w.later(2*lease.Beat + 2*time.Second)
				w.mu.Lock()
				defer w.mu.Unlock()
				want := 1
				if sleeps {
					want = 2
				}
				if during == 0 || w.entered != want {
					t.Errorf("%d heartbeats during a visit, and %d visits, want %d", during, w.entered, want)
				}
			})
		})
	}
}

// The machine was off for some of the time, and how long it is up says nothing.
func TestAcrossABootTheClockOnTheWallCounts(t *testing.T) {
	for name, c := range map[string]struct {
		off      time.Duration
		released int
	}{
		"the lease lasts":  {30 * time.Minute, 1},
		"the lease ended":  {2 * time.Hour, 0},
		"for a moment":     {time.Second, 1},
		"it ends just now": {time.Hour, 0},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				// The last boot was up for much longer than this one is.
				w.slept.Store(int64(100 * time.Hour))
				w.boot = lastBoot
				r := w.record(1)
				r.Boot = lastBoot
				w.add(r)
				w.later(c.off)
				w.boot = thisBoot
				w.slept.Store(-int64(c.off))
				w.start()
				w.later(time.Minute)
				if got := len(w.released()); got != c.released || w.load(r) != nil {
					t.Errorf("%d releases, want %d; on record is %+v", got, c.released, w.load(r))
				}
			})
		})
	}
}
