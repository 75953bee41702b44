package cni

import (
	"fmt"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// dying is a keeper that is killed before one of the system calls that it makes after it was armed.
type dying struct {
	run   *fault.Run
	armed atomic.Bool
	calls atomic.Int64
	last  atomic.Value
	ended chan struct{}
}

// keepUntil starts one; at 0 it is not killed.
func (l *lan) keepUntil(t *testing.T, at int) *dying {
	t.Helper()
	d := &dying{ended: make(chan struct{})}
	cmd := exec.Command(keeperPath(), "--leases", l.state+"-leases", "--state", l.state, "--metrics", "none")
	run, err := fault.Start(l.ns, cmd, fault.Fault{Before: func(call string) {
		if d.armed.Load() && d.calls.Add(1) == int64(at) {
			d.last.Store(call)
			d.run.Kill()
		}
	}})
	must.Succeed(t, err)
	d.run = run
	go func() { run.Wait(); close(d.ended) }()
	t.Cleanup(func() { run.Kill(); <-d.ended })
	l.eventually(t, func() bool { return l.network(conf{"ipam": conf{"type": "dhcp"}}).status() == nil })
	return d
}

// addedBeside adds a pod while a keeper dies, and the next one begins.
func (l *lan6) addedBeside(t *testing.T, w *network, p *pod, d *dying) (*current.Result, error) {
	t.Helper()
	var r *current.Result
	var err error
	done := make(chan struct{})
	d.armed.Store(true)
	go func() { defer close(done); r, err = w.tryAdd(p) }()
	select {
	case <-d.ended:
		l.keep(t)
		<-done
	case <-done:
	}
	d.armed.Store(false)
	return r, err
}

// The point of the records: a keeper that is killed between any two of its calls, from the SOLICIT to the
// pod's address, costs no lease and leaves none behind.
func TestKilledKeepersLoseAndDoubleNoDHCPv6Lease(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	l.serve6(t, "eth0")
	whole := l.keepUntil(t, 0)
	w := l.leasing(nil)
	p := l.pod("whole")
	own := six(t, mustAdd(t, l, w, p, whole))
	calls := int(whole.calls.Load())
	w.del(p)
	l.eventually(t, func() bool { return !l.holds(own) })
	const sample = 2
	points := must.Of(fault.Points(calls, sample)).Get(t)
	killed := make(chan bool, len(points))
	t.Run("points", func(t *testing.T) {
		for _, at := range points {
			t.Run(fmt.Sprint(at), func(t *testing.T) {
				t.Parallel()
				killed <- l.addedThoughKilled(t, at)
			})
		}
	})
	close(killed)
	n := 0
	for was := range killed {
		if was {
			n++
		}
	}
	expect.That(t, n >= len(points)/2, "%d of %d keepers were killed, of %d calls", n, len(points), calls)
}

func mustAdd(t *testing.T, l *lan6, w *network, p *pod, d *dying) *current.Result {
	t.Helper()
	return must.Of(l.addedBeside(t, w, p, d)).Get(t)
}

// addedThoughKilled is one kill, on a LAN of its own.
func (l *lan6) addedThoughKilled(t *testing.T, at int) bool {
	t.Helper()
	l = newLAN6(t)
	l.serve6(t, "eth0")
	d := l.keepUntil(t, at)
	w := l.leasing(nil)
	p := l.pod("a")
	r, err := l.addedBeside(t, w, p, d)
	call, fired := d.last.Load().(string)
	leased := func() int { return strings.Count(l.server.Leased(), " fd00:50::") }
	if err != nil {
		// No keeper ran when the ADD looked for one.
		wantError(t, err, 11, "tombolod")
		l.eventually(t, func() bool { return leased() == 0 })
	} else {
		own := six(t, r)
		if !l.holds(own) || leased() != 1 {
			t.Errorf("the pod has %s, the server:\n%s", own, l.server.Leased())
		}
		shown := nstest.Run(t, p.NS, "ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "global")
		expect.That(t, strings.Count(shown, "/128 ") == 1 && strings.Contains(shown, " "+own.String()+"/128 "),
			"want %s alone of DHCPv6:\n%s", own, shown)
		expect.Success(t, w.check(p))
		w.del(p)
		l.eventually(t, func() bool { return leased() == 0 })
	}
	l.wantNoLeaseRecords()
	expect.That(t, !t.Failed(), "killed before %s; %s=%d repeats it, or nearly so", call, fault.Variable, at)
	return fired
}
