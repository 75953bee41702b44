package keeper

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// change is what a watch tells: a record was written or removed, or, with an empty name,
// something was lost and everything is to be looked at. A lease's name is its hash, an
// uplink's the NIC.
type change struct{ name string }

// slot is when something is due, and whether a worker is at it.
type slot struct {
	wake time.Time // of the next visit; zero: none, until something happens
	busy bool
}

// entry is what the loop knows of one lease.
type entry struct {
	slot
	hash   string
	again  bool // its record changed meanwhile
	stale  bool // the machine slept meanwhile, or the servers are to be asked
	memory memory
	state  lease.State // of its last visit, for the metrics
	next   time.Time   // of its next renewal, likewise
}

// loop is the one place that decides what is done when. Nothing in it waits: workers do what is due.
type loop struct {
	*Keeper
	ctx     context.Context
	stop    func()
	entries map[string]*entry
	sources []*source
	events  chan func() // what sources and workers have the loop do
	running int
	clock   clock
	asked   time.Time // when servers were, or are to be, asked since an uplink got its carrier again
}

func (k *Keeper) newLoop(ctx context.Context) *loop {
	l := &loop{Keeper: k, entries: map[string]*entry{}, events: make(chan func(), k.workers)}
	l.ctx, l.stop = context.WithCancel(ctx)
	if k.network != nil {
		firewall := &k.newFirewall(l.ctx).source
		l.sources = []*source{firewall, &k.newLinkage(l.ctx, firewall).source, k.newReclaim(l.ctx)}
	}
	return l
}

// run runs until the context is done or beat fails.
func (l *loop) run(changes <-chan change, beat func() error) error {
	defer l.stop()
	if err := l.rescan(); err != nil {
		return err
	}
	err := l.beat(beat)
	if err == nil {
		l.ready()
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
				err = fmt.Errorf("keep leases of %s: its directory is gone", l.leases.Path())
				break
			}
			err = l.changed(c)
		case <-l.carriers:
			l.askAgain()
		case <-ticker.C:
			err = l.beat(beat)
		}
	}
	l.stop()
	for l.running > 0 { // they end with the context, or soon
		(<-l.events)()
	}
	return err
}

// beat gives the heartbeat, and looks whether the machine slept: sessions and timers do not count that time, but
// the times on record do.
func (l *loop) beat(beat func() error) error {
	if err := beat(); err != nil {
		return err
	}
	l.alive()
	l.metrics.turn.Store(new(now()))
	slept, err := l.slept()
	if err != nil || slept == 0 {
		return err
	}
	l.log.Warn("the machine slept: looking at every lease", "for", slept)
	for _, e := range l.entries {
		if e.busy {
			e.stale = true // a worker has the session
			continue
		}
		e.memory.session, e.memory.six.session = nil, nil
		e.wake = now()
	}
	return nil
}

// askedOnce bounds how often servers are asked about leases for a carrier: a bad cable loses it again and again.
const askedOnce = 10 * time.Second

// askAgain has servers asked about what pods have by DHCPv6, now that an uplink has its carrier again (RFC 8415,
// section 18.2.12). It asks for all pods: which bridge a lease is behind is known only after its first visit. Where
// that is too soon after the last time they are asked later, and once: the network may be another only since the last
// of several returns.
func (l *loop) askAgain() {
	at, last := now(), l.asked
	if next := last.Add(askedOnce); at.Before(last) {
		at = last // they are to be asked already
	} else if at.Before(next) {
		at = next
	}
	l.asked = at
	for _, e := range l.entries {
		if e.busy {
			e.stale = true
			continue
		}
		e.memory.six.session = nil
		if e.wake.IsZero() || at.Before(e.wake) {
			e.wake = at
		}
	}
}

// changed has a record looked at.
func (l *loop) changed(c change) error {
	if c.name == "" {
		l.log.Warn("changes of lease records were lost: reading all of them")
		l.metrics.rescans.Inc()
		return l.rescan()
	}
	l.look(c.name)
	return nil
}

// rescan has every record looked at, and those that are gone.
func (l *loop) rescan() error {
	hashes, err := l.leases.Hashes()
	if err != nil {
		return err
	}
	for _, hash := range hashes {
		l.look(hash)
	}
	for hash := range l.entries {
		if _, listed := slices.BinarySearch(hashes, hash); !listed {
			l.look(hash)
		}
	}
	return nil
}

func (l *loop) look(hash string) {
	e := l.entries[hash]
	if e == nil {
		e = &entry{hash: hash}
		l.entries[hash] = e
	}
	e.again, e.wake = e.busy, now()
}

// first gives the lease that is due first, of those that no worker is at; nil where none is ever.
func (l *loop) first() *entry {
	var first *entry
	for _, e := range l.entries {
		if !e.busy && !e.wake.IsZero() && (first == nil || e.wake.Before(first.wake)) {
			first = e
		}
	}
	return first
}

// dispatch gives what is due to workers. Sources do not wait for one, as leases do: each has a single worker at most.
func (l *loop) dispatch() {
	for _, s := range l.sources {
		if !s.busy && !s.wake.After(now()) {
			l.start(&s.slot, s.work)
		}
	}
	for l.running < l.workers {
		e := l.first()
		if e == nil || e.wake.After(now()) {
			return
		}
		e.again, e.stale = false, false
		m := e.memory // the session is idle meanwhile: the worker has a copy of it
		l.start(&e.slot, func() func() {
			o := l.visit(l.ctx, e.hash, m)
			return func() { l.finish(e, o) }
		})
	}
}

// start has a worker do something; the loop does then what that gives.
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

// finish takes down what a visit came to.
func (l *loop) finish(e *entry, o outcome) {
	l.metrics.moved(e.state, o.state)
	if o.gone && !e.again {
		delete(l.entries, e.hash)
		return
	}
	e.memory, e.state, e.next = o.memory, o.state, o.next
	if e.stale {
		e.memory.session, e.memory.six.session = nil, nil
	}
	if e.again || e.stale {
		o.wake = now()
	}
	e.wake = o.wake
}

// longestPause is a pause in which nothing is due.
const longestPause = time.Minute

// pause is how long nothing is due.
func (l *loop) pause() time.Duration {
	next := now().Add(longestPause)
	var renewal time.Time
	if e := l.first(); e != nil {
		renewal = e.wake
	}
	l.metrics.next.Store(&renewal)
	if l.running < l.workers {
		next = earliest(next, renewal)
	}
	for _, s := range l.sources {
		if !s.busy {
			next = earliest(next, s.wake)
		}
	}
	return max(next.Sub(now()), 0)
}

// clock is a look at two clocks, of which the monotonic one stands still while the machine sleeps.
type clock struct {
	up   time.Duration
	mono time.Time
}

// sleptFrom is less than any lease lasts, and more than what lies between the looks at the two clocks.
const sleptFrom = 2 * time.Second

// slept says for how long the machine slept since it was last said, 0 if it did not.
func (l *loop) slept() (time.Duration, error) {
	_, up, err := l.leases.Clock()
	is := clock{up: up, mono: time.Now()}
	if l.clock.mono.IsZero() {
		l.clock = is
	}
	by := is.up - l.clock.up - is.mono.Sub(l.clock.mono)
	if err != nil || by < sleptFrom {
		return 0, err
	}
	l.clock = is
	return by.Round(time.Millisecond), nil
}
