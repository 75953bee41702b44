package keeper

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

func TestTheClockIsWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newClock()
		time.Sleep(time.Hour)
		if by := c.jump(); by != 0 {
			t.Errorf("jumped by %v while time passed", by)
		}
		for _, by := range []time.Duration{time.Hour, -time.Hour} {
			c.wall = c.wall.Add(-by)
			if got := c.jump(); got != by {
				t.Errorf("jumped by %v, want %v", got, by)
			}
		}
	})
}

// setBack is what a clock that is set back by so much makes of all that was noted
// before: it is that far ahead.
func (w *world) setBack(l *loop, r *lease.Record, by time.Duration) {
	w.t.Helper()
	for _, at := range []*time.Time{&r.Lease.Obtained, &r.Lease.Renew, &r.Lease.Rebind, &r.Lease.Expire} {
		*at = at.Add(by)
	}
	w.lock(r, func(h *lease.Held) error { return h.Replace(r) })
	e := l.entries[r.Hash()]
	s, err := e.mind.machine.Restore(now().Add(by), 1, r.Lease)
	if err != nil {
		w.t.Fatal(err)
	}
	if e.mind.session.Wake().Add(by) != s.Wake() {
		w.t.Fatalf("the session wakes at %v, want %v", s.Wake(), e.mind.session.Wake().Add(by))
	}
	e.mind.session, e.mind.look = &s, e.mind.look.Add(by)
	l.clock.wall = l.clock.wall.Add(by)
}

func TestARenewalIsNotPutOffByAClockThatIsSetBack(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		w.add(r)
		set := false
		w.atBeat = func(l *loop) {
			if e := l.entries[r.Hash()]; !set && now().After(r.Lease.Obtained.Add(10*time.Minute)) && !e.busy {
				w.setBack(l, w.load(r), 2*time.Hour)
				set = true
			}
		}
		w.start()
		w.later(12 * time.Minute)
		if !set {
			t.Fatal("the clock was not set back")
		}
		// The server's times are asked for again: what is left of the lease cannot be known.
		only(t, w.said(), "REQUEST")
		if left := w.load(r).Lease.Left(now()); left > time.Hour || left < 50*time.Minute {
			t.Errorf("%v are left", left)
		}
	})
}

// A worker has the session then, and would bring it back.
func TestAClockThatIsSetDuringAVisitIsLookedAtAfterIt(t *testing.T) {
	for name, jumps := range map[string]bool{"set": true, "not set": false} {
		t.Run(name, func(t *testing.T) {
			in(t, func(t *testing.T, w *world) {
				r := w.record(1)
				w.add(r).slow = 2*lease.Beat + time.Second
				during := 0
				w.atBeat = func(l *loop) {
					if e := l.entries[r.Hash()]; e != nil && e.busy {
						during++
						if jumps && during == 1 {
							l.clock.wall = l.clock.wall.Add(-time.Hour)
						}
					}
				}
				w.start()
				w.later(2*lease.Beat + 2*time.Second)
				w.mu.Lock()
				defer w.mu.Unlock()
				want := 1
				if jumps {
					want = 2
				}
				if during == 0 || w.entered != want {
					t.Errorf("%d heartbeats during a visit, and %d visits, want %d", during, w.entered, want)
				}
			})
		})
	}
}
