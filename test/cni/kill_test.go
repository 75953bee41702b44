package cni

import (
	"bytes"
	"fmt"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// kill starts a verb and kills its process after a while, unless it ended before.
// It says which.
func (n *node) kill(c call, after time.Duration) (killed bool) {
	n.Helper()
	cmd := exec.Command(plugin())
	cmd.Env, cmd.Stdin = c.environ(), bytes.NewReader(c.stdin)
	if err := n.ns.Do(cmd.Start); err != nil {
		n.Fatal(err)
	}
	timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
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

// TestADDMayBeKilledAtAnyPoint kills ADDs after delays from none to as long as one
// takes. What each leaves has to be taken away by one DEL, one GC, or one more ADD
// and its DEL.
func TestADDMayBeKilledAtAnyPoint(t *testing.T) {
	t.Parallel()
	const rounds = 30
	n := newNode(t)
	w := n.podnet(nil)
	add := func(p *pod) call {
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
	}
	del := func(p *pod) call { return call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)} }
	stays, first := n.pod("stays"), n.pod("first")
	w.add(stays)
	whole := n.duration(add(first))
	n.callOK(del(first))
	before := n.traces()
	kills, leftovers := 0, 0
	for i := range rounds {
		for how, clean := range map[string]func(*pod){
			"DEL": func(p *pod) { n.callOK(del(p)) },
			"GC":  func(*pod) { w.gc(stays) },
			"ADD": func(p *pod) {
				// A runtime does not do this; the message says what it should do.
				if o := n.call(add(p)); o.status != 0 {
					n.callOK(del(p))
					n.callOK(add(p))
				}
				n.callOK(del(p))
			},
		} {
			p := n.pod(fmt.Sprintf("%s-%d", how, i))
			delay := whole * time.Duration(i) / rounds
			killed := n.kill(add(p), delay)
			if killed {
				kills++
			}
			if killed && len(n.traces()) != len(before) {
				leftovers++
			}
			clean(p)
			n.wantTraces(before)
			if t.Failed() {
				t.Fatalf("ADD killed after %s of %s, then %s; reservations %q", delay, whole, how, n.reservations(n.state+"/ipam/podnet"))
			}
		}
	}
	// Else nothing has been tested.
	if kills == 0 || leftovers == 0 {
		t.Errorf("%d of %d ADDs were killed, %d left anything", kills, 3*rounds, leftovers)
	}
	t.Logf("%d of %d ADDs were killed, %d left anything", kills, 3*rounds, leftovers)
	wantPing(t, stays.NS, gateway4, gateway6)
}

func TestFirstADDMayBeKilledWhileItBuildsTheNetwork(t *testing.T) {
	t.Parallel()
	const rounds = 25
	n := newNode(t)
	w := n.podnet(nil)
	add := func(p *pod) call {
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
	}
	whole := n.duration(add(n.pod("first")))
	kills := 0
	for i := range rounds {
		w.gc()
		if o := n.remove("podnet"); o.status != 0 {
			t.Fatal(o.stderr)
		}
		removeAll(t, n.state)
		if n.kill(add(n.pod(fmt.Sprintf("killed-%d", i))), whole*time.Duration(i)/rounds) {
			kills++
		}
		next := n.pod(fmt.Sprintf("next-%d", i))
		w.add(next)
		if err := w.check(next); err != nil {
			t.Fatalf("after an ADD that was killed: %v", err)
		}
		wantPing(t, next.NS, gateway4, gateway6)
	}
	if kills == 0 {
		t.Error("no ADD was killed")
	}
	w.gc()
	n.wantNothing()
}

func TestDELMayBeKilledAtAnyPoint(t *testing.T) {
	t.Parallel()
	const rounds = 25
	n := newNode(t)
	w := n.podnet(nil)
	del := func(p *pod) call { return call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)} }
	first := n.pod("first")
	w.add(first)
	whole := n.duration(del(first))
	kills := 0
	for i := range rounds {
		p := n.pod(fmt.Sprintf("pod-%d", i))
		w.add(p)
		if n.kill(del(p), whole*time.Duration(i)/rounds) {
			kills++
		}
		n.callOK(del(p))
		n.wantNothing()
		if t.Failed() {
			t.FailNow()
		}
	}
	if kills == 0 {
		t.Error("no DEL was killed")
	}
}
