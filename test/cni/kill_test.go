package cni

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// kill starts a verb and kills its process after a while, 0 being at once, unless it
// ended before. It says which.
func (n *node) kill(c call, after time.Duration) (killed bool) {
	n.Helper()
	cmd := exec.Command(plugin())
	cmd.Env, cmd.Stdin = c.environ(), bytes.NewReader(c.stdin)
	must.Succeed(n, n.ns.Do(cmd.Start))
	if after <= 0 {
		_ = cmd.Process.Kill()
	} else {
		timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
		defer timer.Stop()
	}
	_ = cmd.Wait()
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// duration is how long a verb takes here and now: what the delays of a sweep are a
// part of.
func (n *node) duration(c call) time.Duration {
	n.Helper()
	start := time.Now()
	n.callOK(c)
	return time.Since(start)
}

// delays go from none to as long as a verb takes, in so many rounds, and over again. All
// but the first are others in each run, of which test-long makes several.
type delays struct {
	whole  time.Duration
	rounds int
}

func (d *delays) at(round int) time.Duration {
	part := max(d.whole/time.Duration(d.rounds), 1)
	if round %= d.rounds; round == 0 {
		return 0
	}
	return part*time.Duration(round-1) + rand.N(part)
}

// learn is for a sweep that met nothing: the verb that was measured was not like others,
// as on a busy machine none is.
func (d *delays) learn(killed, left bool) {
	switch {
	case !killed:
		d.whole -= d.whole / 4
	case !left:
		d.whole += d.whole / 4
	}
}

// most is how many sweeps are made at most, to meet what a test is for.
const most = 20

// TestADDMayBeKilledAtAnyPoint kills ADDs after delays from none to as long as one
// takes. What each leaves has to be taken away by one DEL, one GC, or one more ADD
// and its DEL.
func TestADDMayBeKilledAtAnyPoint(t *testing.T) {
	t.Parallel()
	const rounds = 10
	n := newNode(t)
	w := n.podnet(nil)
	add := func(p *pod) call {
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
	}
	del := func(p *pod) call { return call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)} }
	stays, first := n.pod("stays"), n.pod("first")
	w.add(stays)
	sweep := delays{whole: n.duration(add(first)), rounds: rounds}
	n.callOK(del(first))
	before := n.traces()
	kills, leftovers := 0, 0
	// Else nothing has been tested.
	enough := func() bool { return kills > 0 && leftovers > 0 }
	for i := 0; i < rounds || !enough() && i < most*rounds; i++ {
		for how, clean := range map[string]func(*pod){
			"DEL": func(p *pod) { n.callOK(del(p)) },
			"GC":  func(*pod) { w.gc(stays) },
			"ADD": func(p *pod) {
				// Only one that came to its end, of which nobody heard, is in the way.
				if o := n.call(add(p)); o.status != 0 {
					rec := nstest.ReadIf(t, n.state+"/attachments/podnet/"+strings.TrimPrefix(w.port(p), "veth")+".json")
					expect.Contains(t, rec, `"state":"ready"`, "ADD after one that was killed: %s; record", o.stdout)
					n.callOK(del(p))
					n.callOK(add(p))
				}
				n.callOK(del(p))
			},
		} {
			p := n.pod(fmt.Sprintf("%s-%d", how, i))
			delay := sweep.at(i)
			killed := n.kill(add(p), delay)
			left := len(n.traces()) != len(before)
			if killed {
				kills++
			}
			if killed && left {
				leftovers++
			}
			if i >= rounds {
				sweep.learn(killed, left)
			}
			clean(p)
			n.wantTraces(before)
			if t.Failed() {
				t.Fatalf("ADD killed after %s of %s, then %s; reservations %q", delay, sweep.whole, how, n.reservations(n.state+"/ipam/podnet"))
			}
		}
	}
	expect.That(t, enough(), "%d ADDs were killed, %d left anything", kills, leftovers)
	t.Logf("%d ADDs were killed, %d left anything", kills, leftovers)
	wantPing(t, stays.NS, gateway4, gateway6)
}

func TestFirstADDMayBeKilledWhileItBuildsTheNetwork(t *testing.T) {
	t.Parallel()
	const rounds = 10
	n := newNode(t)
	w := n.podnet(nil)
	add := func(p *pod) call {
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
	}
	sweep := delays{whole: n.duration(add(n.pod("first"))), rounds: rounds}
	kills := 0
	for i := 0; i < rounds || kills == 0 && i < most*rounds; i++ {
		w.gc()
		must.Succeed(t, n.remove("podnet").err())
		must.Succeed(t, os.RemoveAll(n.state))
		if n.kill(add(n.pod(fmt.Sprintf("killed-%d", i))), sweep.at(i)) {
			kills++
		}
		next := n.pod(fmt.Sprintf("next-%d", i))
		w.add(next)
		must.Succeed(t, w.check(next), "after an ADD that was killed")
		wantPing(t, next.NS, gateway4, gateway6)
	}
	expect.That(t, kills != 0, "no ADD was killed")
	w.gc()
	n.wantNothing()
}

func TestDELMayBeKilledAtAnyPoint(t *testing.T) {
	t.Parallel()
	const rounds = 10
	n := newNode(t)
	w := n.podnet(nil)
	del := func(p *pod) call { return call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)} }
	first := w.addPod("first")
	sweep := delays{whole: n.duration(del(first)), rounds: rounds}
	kills := 0
	for i := 0; i < rounds || kills == 0 && i < most*rounds; i++ {
		p := n.pod(fmt.Sprintf("pod-%d", i))
		w.add(p)
		if n.kill(del(p), sweep.at(i)) {
			kills++
		}
		n.callOK(del(p))
		n.wantNothing()
		if t.Failed() {
			t.FailNow()
		}
	}
	expect.That(t, kills != 0, "no DEL was killed")
}
