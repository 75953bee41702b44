package keeper

import (
	"errors"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
)

func TestAPodThatDiesIsNoticedWithinMinutes(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		w.add(r)
		w.start()
		w.later(time.Minute)
		w.kill(r)
		w.later(6 * time.Minute)
		if w.load(r) != nil || len(w.released()) != 1 {
			t.Errorf("record %v, released %v", w.load(r), w.released())
		}
	})
}

func TestAfterASuccessAFailureIsTriedAgainSoon(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		refuse := func(err error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			p.applyErr = err
		}
		refuse(errors.New("no such device"))
		w.start()
		w.later(20 * time.Minute) // the pauses are of minutes by now
		refuse(nil)
		w.later(2 * lastRetry)
		if p.addresses() != "[192.0.2.1/24]" {
			t.Fatalf("the pod has %s", p.addresses())
		}
		refuse(errors.New("no such device"))
		failures := w.counted("errors")
		for i := 0; w.counted("errors") == failures; i++ {
			if i > 3600 {
				t.Fatal("the lease is not renewed")
			}
			w.later(time.Second)
		}
		refuse(nil)
		before := p.applied
		w.later(2 * firstRetry)
		expect.That(t, p.applied > before, "after its first failure nothing was applied")
	})
}

func TestALeaseIsRenewedInTimeThoughItsPodWasOutOfReach(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		p := w.add(r)
		reach := func(err error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			p.outOfReach = err
		}
		w.start()
		w.later(time.Minute)
		reach(errors.New("too many open files"))
		w.later(29*time.Minute - 10*time.Second)
		if w.counted("errors") < 5 {
			t.Fatal("the pod was not out of reach")
		}
		w.said()
		reach(nil)
		w.later(15 * time.Second)
		only(t, w.said(), "REQUEST")
	})
}

func TestARememberedLeaseWithoutAnEndStays(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r, ends := w.record(1), w.record(2)
		r.Lease.Renew, r.Lease.Rebind, r.Lease.Expire = time.Time{}, time.Time{}, time.Time{}
		for _, one := range []*lease.Record{r, ends} {
			one.State, one.Client.Sticky = lease.Sticky, true
			w.add(one)
		}
		w.start()
		w.later(2 * time.Hour)
		if w.load(r) == nil || w.load(ends) != nil {
			t.Errorf("the one without an end is %v, the other %v", w.load(r), w.load(ends))
		}
	})
}

// Its lease is the later ADD's.
func TestAPodThatComesAgainMeanwhileKeepsItsLease(t *testing.T) {
	in(t, func(t *testing.T, w *world) {
		r := w.record(1)
		w.add(r)
		w.kill(r)
		w.atEnter = func(*lease.Record) {
			w.atEnter = nil
			w.del(r)
			again := w.record(1)
			w.add(again)
		}
		w.start()
		w.later(time.Minute)
		if w.load(r) == nil || len(w.released()) > 0 {
			t.Errorf("record %v, released %v", w.load(r), w.released())
		}
	})
}
