package keeper

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// change is an event about lease records. name is the hash of the lease whose record was written or removed. An empty
// name means that events were lost, so that every record must be read.
type change struct{ name string }

// slot is the schedule for visits to a lease or a source (see source).
type slot struct {
	wake time.Time // the time of the next visit; if zero, no visit to the lease is scheduled (never zero for a source)
	busy bool      // a worker is visiting the lease or source
}

// entry holds the loop's knowledge about one lease.
type entry struct {
	slot
	hash       string
	isDueAgain bool // the record changed during a visit, so visit again at once
	stale      bool // the machine slept during a visit, so drop the DHCP sessions
	memory     memory
	state      lease.State // the lease's state at the last visit, for the metrics
}

// loop schedules all work. Only the goroutine of run uses the entries. Workers make the visits, which may block.
type loop struct {
	*Keeper
	ctx     context.Context
	stop    func()
	entries map[string]*entry
	sources []*source
	events  chan func() // functions for the loop to call, from sources and workers
	running int

	began     time.Time     // the first call of suspension, by the monotonic clock
	upAtBegin time.Duration // the time since boot at began, plus the suspensions since then
}

func (k *Keeper) newLoop(ctx context.Context) *loop {
	l := &loop{Keeper: k, entries: map[string]*entry{}, events: make(chan func(), k.workers)}
	l.ctx, l.stop = context.WithCancel(ctx)
	if k.Node != nil {
		firewall := &k.newFirewall(l.ctx).source
		l.sources = []*source{firewall, &k.newLinkSource(l.ctx, firewall).source, k.newReclaim(l.ctx)}
		if k.Bus != "" {
			l.sources = append(l.sources, k.newZones(l.ctx))
		}
	}
	return l
}

// run runs the loop until the context is done or an error occurs, for example because the directory of records is gone.
// It returns after all workers have ended.
func (l *loop) run(changes <-chan change, beat func() error) error {
	defer l.stop()
	if err := l.rescan(); err != nil {
		return err
	}

	err := l.beat(beat)
	if err == nil {
		l.Ready()
	}

	for _, s := range l.sources {
		s.wake = now()
		defer l.subscribe(s)()
	}

	ticker := time.NewTicker(lease.Beat)
	defer ticker.Stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for err == nil && l.ctx.Err() == nil {
		l.dispatch()
		timer.Reset(l.pause())
		select {
		case <-l.ctx.Done():
		case <-timer.C:
		case do := <-l.events:
			do()
		case c, ok := <-changes:
			if !ok {
				err = fmt.Errorf("keep leases of %s: its directory is gone: %w", l.Leases.Path(), os.ErrNotExist)
				break
			}
			if c.name != "" {
				l.schedule(c.name)
				break
			}
			l.Log.Warn("changes of lease records were lost: reading all of them")
			l.metrics.rescans.Inc()
			err = l.rescan()
		case <-ticker.C:
			err = l.beat(beat)
		}
	}

	l.stop()
	for l.running > 0 { // workers end with the context, or soon
		(<-l.events)()
	}

	return err
}

// beat calls the function beat, which records a heartbeat, and Keeper.Alive. After a suspension of the machine, it
// also schedules visits to all leases. It drops their DHCP sessions, whose times did not count the suspension.
func (l *loop) beat(beat func() error) error {
	if err := beat(); err != nil {
		return err
	}

	l.Alive()
	l.metrics.turn.Store(new(now()))
	slept, err := l.suspension()
	if err != nil || slept == 0 {
		return err
	}

	l.Log.Warn("the machine slept: looking at every lease", "for", slept)
	for _, e := range l.entries {
		if e.busy {
			e.stale = true // a worker is using the session
			continue
		}
		e.memory.session, e.memory.six.session = nil, nil
		e.wake = now()
	}

	return nil
}

// rescan schedules visits to the leases of all records, and to all known leases whose record no longer exists.
func (l *loop) rescan() error {
	hashes, err := l.Leases.Hashes()
	if err != nil {
		return err
	}

	for _, hash := range hashes {
		l.schedule(hash)
	}

	for hash := range l.entries {
		if _, listed := slices.BinarySearch(hashes, hash); !listed {
			l.schedule(hash)
		}
	}

	return nil
}

func (l *loop) schedule(hash string) {
	e := l.entries[hash]
	if e == nil {
		e = &entry{hash: hash}
		l.entries[hash] = e
	}
	e.isDueAgain, e.wake = e.busy, now()
}

// nextDue returns the lease with the earliest scheduled visit. It skips leases that a worker is visiting, and returns
// nil if no lease is left.
func (l *loop) nextDue() *entry {
	var first *entry
	for _, e := range l.entries {
		if !e.busy && !e.wake.IsZero() && (first == nil || e.wake.Before(first.wake)) {
			first = e
		}
	}
	return first
}

// dispatch starts a worker for each lease and source whose visit is due. While l.workers workers are running, leases
// wait. Sources do not wait, since each has at most one worker.
func (l *loop) dispatch() {
	for _, s := range l.sources {
		if !s.busy && !s.wake.After(now()) {
			l.start(&s.slot, s.work)
		}
	}

	for l.running < l.workers {
		e := l.nextDue()
		if e == nil || e.wake.After(now()) {
			return
		}
		e.isDueAgain, e.stale = false, false
		m := e.memory // the worker gets a copy, and the loop leaves the session alone until the worker ends
		l.start(&e.slot, func() func() {
			o := l.visit(l.ctx, e.hash, m)
			return func() { l.finish(e, o) }
		})
	}
}

// start runs work in a new goroutine. When work has returned, the loop calls the function that work returned.
func (l *loop) start(at *slot, work func() (end func())) {
	at.busy = true
	l.running++
	go func() {
		end := work()
		l.events <- func() {
			l.running--
			at.busy = false
			end()
		}
	}()
}

// finish stores the outcome of a visit, and schedules the lease's next visit. If o.gone is set, it deletes the lease's
// entry instead, unless the record changed during the visit.
func (l *loop) finish(e *entry, o outcome) {
	l.metrics.countTransition(e.state, o.state)
	if o.gone && !e.isDueAgain {
		delete(l.entries, e.hash)
		return
	}

	e.memory, e.state = o.memory, o.state
	if e.stale {
		e.memory.session, e.memory.six.session = nil, nil
	}

	if e.isDueAgain || e.stale {
		o.wake = now()
	}

	e.wake = o.wake
}

// longestPause is the maximum time that the loop waits if no visit is due and nothing happens.
const longestPause = time.Minute

// pause returns the time until the loop can start the next visit, at most longestPause. A visit that must wait for a
// running one does not count, since the end of a visit wakes the loop. pause also stores the time of the next visit to
// a lease, for the metrics.
func (l *loop) pause() time.Duration {
	next := now().Add(longestPause)
	var renewal time.Time
	if e := l.nextDue(); e != nil {
		renewal = e.wake
	}

	l.metrics.next.Store(&renewal)
	if l.running < l.workers {
		next = trace.Earliest(next, renewal)
	}

	for _, s := range l.sources {
		if !s.busy {
			next = trace.Earliest(next, s.wake)
		}
	}

	return max(next.Sub(now()), 0)
}

// sleptFrom is the shortest suspension that counts. It is shorter than every DHCPv4 lease, and longer than the time
// between the readings of the two clocks.
const sleptFrom = 2 * time.Second

// suspension returns how long the machine was suspended since the first call, or since the last suspension that it
// returned. It returns 0 for less than sleptFrom. The time since boot counts suspensions, and the monotonic clock does
// not.
func (l *loop) suspension() (time.Duration, error) {
	_, up, err := l.Leases.Clock()
	if l.began.IsZero() {
		l.began, l.upAtBegin = time.Now(), up
	}

	slept := up - l.upAtBegin - time.Since(l.began)
	if err != nil || slept < sleptFrom {
		return 0, err
	}

	l.upAtBegin += slept
	return slept.Round(time.Millisecond), nil
}
