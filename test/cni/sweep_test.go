package cni

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// sample is how many faults of each kind a verb meets, unless it meets all: see
// fault.Points.
const sample = 4

// faulty is a verb that met a fault, and how it ended.
type faulty struct {
	fault.Outcome
	fault.Fault
	stdout, stderr string
	status         int // -1: killed
}

func (f *faulty) String() string {
	return fmt.Sprintf("%s at call %d of %d, %s (status %d%s)", f.Kind, f.At, f.Calls, f.Call, f.status, strings.TrimSpace(f.stdout))
}

func (n *node) callFaulty(c call, f fault.Fault) *faulty {
	n.Helper()
	_, ended := n.startFaulty(c, f)
	return ended()
}

// startFaulty starts it, and gives what waits for its end.
func (n *node) startFaulty(c call, f fault.Fault) (*fault.Run, func() *faulty) {
	n.Helper()
	var out, errOut bytes.Buffer
	cmd := exec.Command(cmp.Or(c.program, plugin()), c.operands...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = c.environ(), bytes.NewReader(c.stdin), &out, &errOut
	run := must.Of(fault.Start(n.ns, cmd, f)).Get(n)
	return run, func() *faulty {
		o := run.Wait()
		return &faulty{Outcome: o, Fault: f, stdout: out.String(), stderr: errOut.String(), status: cmd.ProcessState.ExitCode()}
	}
}

// wantProperEnd fails the test unless a verb that met an error ended as the CNI
// specification has it: with success, or with an error object, and without a panic.
func (f *faulty) wantProperEnd(t *testing.T) {
	t.Helper()
	e := failure(f.stdout)
	unprinted := f.unprinted()
	switch {
	case f.Kind == fault.Kill && f.status != -1:
		t.Errorf("%s: it was to be killed", f)
	case f.Kind == fault.Kill:
	case f.stderr != "" && !unprinted:
		t.Errorf("%s: stderr: %s", f, f.stderr)
	case f.status != 0 && !unprinted && (e == nil || e.Msg == ""):
		t.Errorf("%s: no error object", f)
	}
}

// unprinted says that it was the output which failed: after all else was done, so that the
// runtime owes the DEL which clears up, and without a chance to say so.
func (f *faulty) unprinted() bool { return strings.HasPrefix(f.Call, "write(pipe:") }

// sweeper has a verb meet faults, one in each round.
type sweeper struct {
	*node
	// verb makes what the round's verb is about, and gives the verb.
	verb func(round string) call
	// after looks at what it left, and clears up. before is the node before verb.
	after func(f *faulty, round string, before nstest.Snapshot)
	talks []*nstest.Talk
}

// sweep has the faults, and fails the test if they do not happen.
func (s *sweeper) sweep(t *testing.T) {
	t.Helper()
	// Twice, since the first finds the firewall as another left it, and looks at all of it.
	var calls int
	for _, round := range []string{"first", "second"} {
		whole := s.callFaulty(s.verb(round), fault.Fault{})
		must.That(t, whole.status == 0, "without a fault: %s", whole)
		s.after(whole, round, s.snapshot())
		calls = whole.Calls
	}
	before := s.snapshot()
	met, missed := 0, 0
	for _, kind := range fault.Kinds() {
		points := must.Of(fault.Points(calls, sample)).Get(t)
		for _, at := range points {
			round := fmt.Sprintf("%s-%d", kind, at)
			f := s.callFaulty(s.verb(round), fault.Fault{At: at, Kind: kind})
			switch {
			case f.Fired:
				met++
				f.wantProperEnd(t)
			case at <= calls-calls/10:
				t.Errorf("%s: of %d calls", f, calls)
				fallthrough
			default:
				// Two threads share the work, so that one run has some calls more than another.
				missed++
			}
			s.after(f, round, before)
			s.wantSnapshot(f.String(), before)
			must.That(t, !t.Failed(), "%s; %s=%d repeats it, or nearly so", f, fault.Variable, at)
		}
	}
	for _, talk := range s.talks {
		talk.Check(t)
	}
	expect.That(t, met != 0, "no fault happened")
	t.Logf("%d calls, %d faults, %d beyond the last call", calls, met, missed)
}

// standing is a node with a network that has everything, and a pod on it that talks all
// the time: to the outside, and as one that publishes a port.
func standing(t *testing.T) (n *node, w *network, stays *pod, talks []*nstest.Talk) {
	t.Helper()
	n = newNode(t)
	out := n.outside()
	w = n.portnet(conf{"guard": true})
	stays = n.pod("stays")
	r := must.Of(w.tryAdd(stays, publish(t, "8080:80/tcp", "8080:80/udp"), limited(1e9, 1e9))).Get(t)
	at := addrPort(ip4(r).String(), 80)
	return n, w, stays, []*nstest.Talk{
		nstest.NewTalk(t, "udp", out, addrPort(outside4, 7), stays.NS, addrPort(outside4, 7)),
		nstest.NewTalk(t, "tcp", out, addrPort(outside6, 7), stays.NS, addrPort(outside6, 7)),
		nstest.NewTalk(t, "udp", stays.NS, at, out, addrPort(uplink4, 8080)),
		nstest.NewTalk(t, "tcp", stays.NS, at, out, addrPort(uplink4, 8080)),
	}
}

// rich is what an attachment of standing's asks for, by a port that others do not have.
func rich(w *network, port int) []byte {
	return w.stdin(conf{"runtimeConfig": conf{
		"portMappings": []conf{{"hostPort": port, "containerPort": 80, "protocol": "udp"}},
		"bandwidth":    conf{"ingressRate": 1e8, "ingressBurst": 1e8, "egressRate": 1e8, "egressBurst": 1e8},
	}})
}

const freePort = 9000

func TestADDMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	n, w, stays, talks := standing(t)
	others := n.traces()
	var p *pod
	add := func() call {
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: rich(w, freePort)}
	}
	del := func(f *faulty) {
		n.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
		// The next GC deletes half-written files.
		left := slices.DeleteFunc(n.traces(), func(trace string) bool { return strings.Contains(trace, ".tmp-") })
		expect.Equal(t, strings.Join(left, "\n"), strings.Join(others, "\n"), "%s, and a DEL: attachments have", f)
	}
	rounds := 0
	s := &sweeper{node: n, talks: talks}
	s.verb = func(round string) call {
		p = n.pod(round)
		return add()
	}
	s.after = func(f *faulty, round string, before nstest.Snapshot) {
		defer p.Close()
		if f.Kind == fault.Error && f.status > 0 && !f.unprinted() {
			// It undoes what it did itself.
			n.wantSnapshot(f.String()+", undone", before)
		}
		// The calls that find what a kill left.
		switch rounds++; rounds % 3 {
		case 0:
			del(f)
		case 2:
			if o := n.call(add()); o.status == 0 {
				expect.Equal(t, links(t, n.ns)[w.port(p)].Master, "cbr0", "%s: an ADD after it has made no port", f)
			}
			// The second ADD is refused only if the first one finished.
			expect.Contains(t, w.recordOf(p), `"state":"ready"`, "%s, and another ADD: the record", f)
			del(f)
		}
		w.gc(stays)
	}
	s.sweep(t)
}

func TestDELMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	n, w, stays, talks := standing(t)
	s := &sweeper{node: n, talks: talks}
	var c call
	var without nstest.Snapshot
	s.verb = func(round string) call {
		if without == nil {
			without = n.snapshot()
		}
		p := n.pod(round)
		n.callOK(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: rich(w, freePort)})
		c = call{verb: "DEL", id: p.id, ifName: "eth0", stdin: rich(w, freePort)}
		return c
	}
	s.after = func(f *faulty, round string, _ nstest.Snapshot) {
		if f.status == 0 {
			n.wantSnapshot(f.String()+", which said that all is gone", without)
		}
		n.callOK(c)
		n.wantSnapshot(f.String()+", and the next DEL", without.Plus(n.leavings()...))
		w.gc(stays)
	}
	s.sweep(t)
}

func TestGCMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	n, w, stays, talks := standing(t)
	s := &sweeper{node: n, talks: talks}
	collect := call{verb: "GC", stdin: w.stdin(conf{"cni.dev/valid-attachments": []conf{{"containerID": stays.id, "ifname": "eth0"}}})}
	var without nstest.Snapshot
	s.verb = func(round string) call {
		if without == nil {
			without = n.snapshot()
		}
		for i := range 2 {
			p := n.pod(fmt.Sprintf("%s-%d", round, i))
			n.callOK(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: rich(w, freePort+i)})
		}
		return collect
	}
	s.after = func(f *faulty, round string, _ nstest.Snapshot) {
		if f.status == 0 {
			n.wantSnapshot(f.String()+", which said that all is gone", without)
		}
		n.callOK(collect)
	}
	s.sweep(t)
}

func TestCHECKMayMeetAFaultAtAnyCall(t *testing.T) {
	t.Parallel()
	n, w, _, talks := standing(t)
	p := n.pod("checked")
	result := n.callOK(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: rich(w, freePort)})
	var fields conf
	unmarshal(t, string(rich(w, freePort)), &fields)
	fields["prevResult"] = json.RawMessage(result)
	check := call{verb: "CHECK", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(fields)}
	s := &sweeper{node: n, talks: talks}
	s.verb = func(string) call { return check }
	s.after = func(*faulty, string, nstest.Snapshot) { n.callOK(check) }
	s.sweep(t)
}

// TestFirstADDMayMeetAFaultAtAnyCall is about the one that builds the network.
func TestFirstADDMayMeetAFaultAtAnyCall(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.portnet(conf{"guard": true})
	s := &sweeper{node: n}
	var p *pod
	reset := func() {
		w.gc()
		must.Succeed(t, n.remove("podnet").err())
		must.Succeed(t, os.RemoveAll(n.state))
	}
	w.add(n.pod("first"))
	reset()
	s.verb = func(round string) call {
		p = n.pod(round)
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: rich(w, freePort)}
	}
	s.after = func(f *faulty, round string, _ nstest.Snapshot) {
		next := n.pod("next-" + round)
		w.add(next)
		expect.Success(t, w.check(next), "%s: CHECK of the next pod", f)
		wantPing(t, next.NS, gateway4, gateway6, outside4, outside6)
		n.callOK(call{verb: "DEL", id: p.id, ifName: "eth0", stdin: w.stdin(nil)})
		w.del(next)
		reset()
	}
	s.sweep(t)
}

// leavings are the files that a kill left half written, which the next GC takes.
func (n *node) leavings() []string {
	n.Helper()
	var list []string
	for _, line := range n.snapshot() {
		if strings.HasPrefix(line, "file .tmp-") || strings.Contains(line, "/.tmp-") {
			list = append(list, line)
		}
	}
	return list
}
