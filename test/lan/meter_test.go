package lan

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// meter runs flows, and says what became of their messages while something happened.
type meter struct {
	*lan
	flows []*flow
	stop  chan struct{}

	senders, receivers sync.WaitGroup
	ended              sync.Once
}

// between is a pair of places between which flows go, both ways unless the second
// place does not see the first one's address.
type between [2]place

// measure starts flows over UDP and TCP and the families between the places, and
// waits until all of them flow.
func (l *lan) measure(families []int, pairs ...between) *meter {
	l.Helper()
	return l.measureBy([]string{"udp", "tcp"}, families, pairs...)
}

// measureBy is measure by some of the protocols.
func (l *lan) measureBy(networks []string, families []int, pairs ...between) *meter {
	l.Helper()
	m := &meter{lan: l, stop: make(chan struct{})}
	for _, family := range families {
		for _, r := range pairs {
			for _, network := range networks {
				m.flows = append(m.flows, connect(l, network, family, r[0], r[1]))
				if r[0].name != masqueraded {
					m.flows = append(m.flows, connect(l, network, family, r[1], r[0]))
				}
			}
		}
	}
	for _, f := range m.flows {
		m.senders.Go(func() { f.send(m.stop) })
		m.receivers.Go(f.receive)
	}
	l.Cleanup(m.end)
	m.pass(m.position())
	for _, f := range m.flows {
		must.That(l, f.arrived(0) != 0, "%s: nothing arrives: sending %v, receiving %v", f.name, f.refused, f.broken)
	}
	return m
}

// end ends the flows, which otherwise end with the test.
func (m *meter) end() {
	m.ended.Do(func() {
		close(m.stop)
		for _, f := range m.flows {
			f.out.SetWriteDeadline(time.Now()) // a stream without a way would block its sender for minutes
		}
		m.senders.Wait()
		for _, f := range m.flows {
			f.in.Close()
		}
		m.receivers.Wait()
		for _, f := range m.flows {
			f.out.Close()
		}
	})
}

// report is what became of a flow's messages.
type report struct {
	name          string
	tcp           bool
	sent          int
	lost          int           // of those sent; what the kernel refused to send is lost as well
	again         int           // came more than once
	retransmitted int           // segments of TCP, by either end, that were due
	gap           time.Duration // the longest between two arrivals, whatever the reason
	stall         time.Duration // the longest with something under way, and nothing arriving
	err           error
	dropped       int // of all flows, by processors that could not keep up: see nstest.Overload
}

func (r report) String() string {
	s := fmt.Sprintf("%s: %d sent, %d lost, %d came again, %d retransmitted, longest gap %s, longest stall %s",
		r.name, r.sent, r.lost, r.again, r.retransmitted, r.gap.Round(100*time.Microsecond), r.stall.Round(100*time.Microsecond))
	if r.err != nil {
		s += ": " + r.err.Error()
	}
	return s
}

const (
	// tail is how many messages of each flow after an event count as sent during it.
	tail = 100
	// late is how many later messages arrive before one may count as lost.
	late = 50
	// looks is how often as many arrive again before it does: what waits at a processor
	// that is busy may be overtaken by what was sent by another one.
	looks = 4
	// patience is how long a flow may be dead before nobody waits for it.
	patience = time.Minute
)

// during reports on what each flow sent while something was done, and right after it.
func (m *meter) during(what func()) []report {
	m.Helper()
	begin, before, dropped := m.position(), m.retransmissions(), nstest.Overload(m, m.namespaces()...)
	what()
	end := m.position()
	m.pass(end)
	for i := range end {
		end[i] += tail
	}
	list := m.reports(begin, end, before)
	for n := 1; n < looks && !allWell(list); n++ {
		m.pass(m.position())
		last := list
		list = m.reports(begin, end, before)
		for i := range list {
			// More of them are of later.
			list[i].retransmitted = min(list[i].retransmitted, last[i].retransmitted)
		}
	}
	for i := range list {
		list[i].dropped = dropped()
	}
	return list
}

// reports are those of the messages from begin to before end, as it is now. before are
// the retransmissions of before.
func (m *meter) reports(begin, end, before []int) []report {
	m.Helper()
	after := m.retransmissions()
	var list []report
	for i, f := range m.flows {
		r := f.report(begin[i], end[i])
		r.retransmitted = after[i] - before[i]
		list = append(list, r)
	}
	return list
}

// allWell says that nothing is missing, so that there is nothing to wait for.
func allWell(list []report) bool {
	return !slices.ContainsFunc(list, func(r report) bool { return r.lost > 0 || r.retransmitted > 0 })
}

// excused leaves out of the reports as much as processors have dropped because they could
// not keep up, which is no fault of the network's. There is next to never any: a meter's
// flows are no load.
func excused(t testing.TB, list []report) []report {
	t.Helper()
	if len(list) == 0 || list[0].dropped == 0 || allWell(list) {
		return list
	}
	left := list[0].dropped
	t.Logf("processors have dropped %d packets, and as much is excused of this:\n%s", left, lines(list))
	list = slices.Clone(list)
	for i := range list {
		for _, count := range []*int{&list[i].lost, &list[i].retransmitted} {
			excuse := max(min(*count, left), 0)
			*count -= excuse
			left -= excuse
		}
	}
	return list
}

// position is the number of messages that each flow has sent.
func (m *meter) position() []int {
	list := make([]int, len(m.flows))
	for i, f := range m.flows {
		f.mu.Lock()
		list[i] = len(f.messages)
		f.mu.Unlock()
	}
	return list
}

// sendOnce waits until every flow has sent one more message at least.
func (m *meter) sendOnce() {
	poll := time.NewTicker(pace)
	defer poll.Stop()
	for i, before := range m.position() {
		for m.position()[i] < before+2 {
			<-poll.C
		}
	}
}

func (m *meter) retransmissions() []int {
	m.Helper()
	list := make([]int, len(m.flows))
	for i, f := range m.flows {
		list[i] = must.Of(f.retransmissions()).Get(m)
	}
	return list
}

// pass waits until enough of what every flow sent a tail after a position has
// arrived, or those that still lack it have been dead for long.
func (m *meter) pass(position []int) {
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for seen, since := -1, time.Now(); ; <-poll.C {
		lacking, arrived := 0, 0
		for i, f := range m.flows {
			if n := f.arrived(position[i] + tail); n < late {
				lacking++
				arrived += n + f.arrived(position[i])
			}
		}
		if lacking == 0 || time.Since(since) > patience {
			return
		}
		if arrived != seen {
			seen, since = arrived, time.Now()
		}
	}
}

// arrived counts the messages that came, from one of them on.
func (f *flow) arrived(from int) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	count := 0
	for _, m := range f.messages[min(from, len(f.messages)):] {
		if !m.came.IsZero() {
			count++
		}
	}
	return count
}

// report is that of the messages from begin to before end.
func (f *flow) report(begin, end int) report {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := report{name: f.name, tcp: f.tcp, err: f.broken}
	if r.err == nil {
		r.err = f.refused
	}
	var last, since time.Time // the last arrival; since when one is due
	for _, m := range f.messages[begin:min(end, len(f.messages))] {
		r.sent++
		r.again += m.again
		if since.IsZero() {
			since = m.sent
		}
		if m.came.IsZero() {
			r.lost++
			continue
		}
		if !last.IsZero() {
			r.gap = max(r.gap, m.came.Sub(last))
		}
		if since.Before(last) {
			since = last
		}
		r.stall = max(r.stall, m.came.Sub(since))
		last, since = m.came, time.Time{}
	}
	return r
}

// limit is what may befall a flow.
type limit struct{ lost, retransmitted int }

// wantWithin fails the test for each flow that lost more than it may, or got anything
// twice. It logs and gives the longest gap and stall of all flows. That of datagrams is
// the kernel's word; for streams, it has in it how late their reader woke up.
func wantWithin(t testing.TB, what string, allowed limit, reports []report) pause {
	t.Helper()
	var longest pause
	for _, r := range excused(t, reports) {
		expect.That(t, r.lost <= allowed.lost && r.retransmitted <= allowed.retransmitted && r.again <= 0,
			"%s: %s; want at most %d lost, %d retransmitted, none again", what, r, allowed.lost, allowed.retransmitted)
		longest.gap = max(longest.gap, r.gap)
		if r.tcp {
			longest.streams = max(longest.streams, r.stall)
		} else {
			longest.datagrams = max(longest.datagrams, r.stall)
		}
	}
	t.Logf("%s: %s", what, longest)
	return longest
}

// pause is the longest gap, and the longest stall of datagrams and of streams.
type pause struct{ gap, datagrams, streams time.Duration }

func (p pause) String() string {
	return fmt.Sprintf("longest gap %s; longest stall of datagrams %s, of streams %s",
		p.gap.Round(100*time.Microsecond), p.datagrams.Round(100*time.Microsecond), p.streams.Round(100*time.Microsecond))
}

// summary is the median and the longest of what some runs did.
func summary(pauses []pause) string {
	pick := func(of func(pause) time.Duration) (median, longest time.Duration) {
		var list []time.Duration
		for _, p := range pauses {
			list = append(list, of(p).Round(100*time.Microsecond))
		}
		slices.Sort(list)
		return list[len(list)/2], list[len(list)-1]
	}
	gap, gapMax := pick(func(p pause) time.Duration { return p.gap })
	stall, stallMax := pick(func(p pause) time.Duration { return p.datagrams })
	return fmt.Sprintf("%d runs: gap %s median, %s longest; stall of datagrams %s median, %s longest", len(pauses), gap, gapMax, stall, stallMax)
}

// lost is what all of the flows lost.
func lost(reports []report) int {
	total := 0
	for _, r := range reports {
		total += r.lost
	}
	return total
}

func lines(reports []report) string {
	var list []string
	for _, r := range reports {
		list = append(list, r.String())
	}
	return strings.Join(list, "\n")
}
