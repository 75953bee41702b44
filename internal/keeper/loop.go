package keeper

import (
	"container/heap"
	"context"
	"fmt"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
)

// change is what a watch tells: a record was written or removed, or, with an empty name,
// something was lost and everything is to be looked at. A lease's name is its hash, an
// uplink's the NIC.
type change struct{ name string }

// entry is what the loop knows of one record.
type entry struct {
	hash  string
	wake  time.Time // of the next visit; zero: none, until its record changes
	at    int       // in the heap, -1 if not
	busy  bool      // a worker is at it
	again bool      // its record changed meanwhile
	stale bool      // the machine slept meanwhile, or the servers are to be asked
	mind  memory
	state lease.State // of its last visit, for the metrics
	next  time.Time   // of its next renewal, likewise
}

// visited is what a worker has to tell.
type visited struct {
	hash string
	slow bool
	outcome
}

// loop is the one place that decides what is done when. Nothing in it waits.
type loop struct {
	*Keeper
	ctx     context.Context
	entries map[string]*entry
	queue   queue
	done    chan visited
	running int
	// Visits that find no server wait for long. They get half of the workers at most, so
	// that renewals of other leases go on.
	slow    int
	waiting []*entry // for a slow worker
	clock   clock
	asked   map[string]time.Time // by bridge: when servers were, or are to be, asked since its uplink got its carrier again
}

func (k *Keeper) newLoop(ctx context.Context) *loop {
	return &loop{Keeper: k, ctx: ctx, entries: map[string]*entry{}, asked: map[string]time.Time{}, done: make(chan visited, k.workers)}
}

// run runs until the context is done or beat fails.
func (l *loop) run(changes <-chan change, beat func() error) error {
	k, ctx := l.Keeper, l.ctx
	if err := l.rescan(); err != nil {
		return err
	}
	err := l.beat(beat)
	if err == nil {
		k.ready()
	}
	ticker := time.NewTicker(lease.Beat)
	defer ticker.Stop()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for err == nil && ctx.Err() == nil {
		l.dispatch()
		timer.Reset(l.pause())
		select {
		case <-ctx.Done():
		case <-timer.C:
		case v := <-l.done:
			l.finish(v)
		case c, ok := <-changes:
			if !ok {
				err = fmt.Errorf("keep leases of %s: its directory is gone", k.leases.Path())
				break
			}
			err = l.changed(c)
		case bridge := <-l.carriers:
			l.askAgain(bridge)
		case <-ticker.C:
			err = l.beat(beat)
		}
	}
	// They end with ctx, or soon.
	for ; l.running > 0; l.running-- {
		<-l.done
	}
	return err
}

// beat gives the heartbeat, and looks whether the machine slept: sessions and timers do not count that, and records do.
func (l *loop) beat(beat func() error) error {
	if err := beat(); err != nil {
		return err
	}
	l.alive()
	l.metrics.turned()
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
		e.mind.session, e.mind.six.session = nil, nil
		l.wake(e, now())
	}
	return nil
}

// askedOnce bounds how often servers are asked about leases for a carrier: a bad cable loses it again and again.
const askedOnce = 10 * time.Second

// askAgain has servers asked about what pods of a bridge have by DHCPv6, now that its uplink has its carrier
// again (RFC 8415, section 18.2.12). Where that is too soon after the last time they are asked later, and once: the
// network may be another only since the last of several returns.
func (l *loop) askAgain(bridge string) {
	at, last := now(), l.asked[bridge]
	if next := last.Add(askedOnce); at.Before(last) {
		at = last // they are to be asked already
	} else if at.Before(next) {
		at = next
	}
	l.asked[bridge] = at
	for _, e := range l.entries {
		switch {
		case e.mind.six.bridge != bridge:
		case e.busy:
			e.stale = true
		default:
			e.mind.six.session = nil
			if e.wake.IsZero() || at.Before(e.wake) {
				l.wake(e, at)
			}
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
	listed := make(map[string]bool, len(hashes))
	for _, hash := range hashes {
		listed[hash] = true
	}
	for hash := range l.entries {
		if !listed[hash] {
			l.look(hash)
		}
	}
	return nil
}

func (l *loop) look(hash string) {
	e := l.entries[hash]
	if e == nil {
		e = &entry{hash: hash, at: -1}
		l.entries[hash] = e
	}
	if e.busy {
		e.again = true
		return
	}
	l.wake(e, now())
}

// wake has an entry visited at a time; the zero time is never.
func (l *loop) wake(e *entry, at time.Time) {
	e.wake = at
	switch {
	case at.IsZero() && e.at >= 0:
		heap.Remove(&l.queue, e.at)
	case at.IsZero() || e.busy:
	case e.at >= 0:
		heap.Fix(&l.queue, e.at)
	default:
		heap.Push(&l.queue, e)
	}
}

// dispatch gives what is due to workers.
func (l *loop) dispatch() {
	for l.running < l.workers && len(l.queue) > 0 && !l.queue[0].wake.After(now()) {
		e := heap.Pop(&l.queue).(*entry)
		slow := e.mind.slow
		if slow && l.slow >= max(l.workers/2, 1) {
			l.waiting = append(l.waiting, e)
			continue
		}
		e.busy, e.again, e.stale = true, false, false
		l.running++
		if slow {
			l.slow++
		}
		// The session is idle meanwhile: a worker has a copy of it.
		go func(hash string, m memory) {
			l.done <- visited{hash: hash, slow: slow, outcome: l.visit(l.ctx, hash, m)}
		}(e.hash, e.mind)
	}
}

// finish takes a worker's word.
func (l *loop) finish(v visited) {
	l.running--
	if v.slow {
		l.slow--
		for _, e := range l.waiting {
			// One that was woken meanwhile is in the queue already. Each keeps its time, so
			// that the one that has waited longest is next.
			if e.at < 0 && !e.busy && l.entries[e.hash] == e {
				l.wake(e, e.wake)
			}
		}
		l.waiting = l.waiting[:0]
	}
	e := l.entries[v.hash]
	e.busy = false
	l.metrics.moved(e.state, v.state)
	if v.gone && !e.again {
		delete(l.entries, v.hash)
		return
	}
	e.mind, e.state, e.next = v.mind, v.state, v.next
	if e.stale {
		e.mind.session, e.mind.six.session = nil, nil
	}
	if e.again || e.stale {
		v.wake = now()
	}
	l.wake(e, v.wake)
}

// longestPause is a pause in which nothing is due.
const longestPause = time.Minute

// pause is how long nothing is due.
func (l *loop) pause() time.Duration {
	var first time.Time
	if len(l.queue) > 0 {
		first = l.queue[0].wake
	}
	l.metrics.due(first)
	if first.IsZero() || l.running >= l.workers {
		return longestPause
	}
	return min(max(first.Sub(now()), 0), longestPause)
}

// queue is a heap of entries by their wake-up times (container/heap).
type queue []*entry

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].wake.Before(q[j].wake) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].at, q[j].at = i, j
}

// Push appends an entry.
func (q *queue) Push(x any) {
	e := x.(*entry)
	e.at = len(*q)
	*q = append(*q, e)
}

// Pop takes the last one off.
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*q, e.at = old[:len(old)-1], -1
	return e
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
