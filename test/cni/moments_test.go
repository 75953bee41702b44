package cni

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A call waits at a moment, which is known by what it has made or deleted by then, others act, and it goes on.

// asks is a verb about a pod's eth0.
func (w *network) asks(verb string, p *pod, fields conf) call {
	w.Helper()
	return call{verb: verb, id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(fields)}
}

// portOf80 has a port of the host lead to a pod's port 80.
func portOf80(port int) conf {
	return mapping(conf{"hostPort": port, "containerPort": 80, "protocol": "tcp"})
}

// operator is one of the operator's commands, as a call.
func operator(operands ...string) call { return call{program: command(), operands: operands} }

// halted is a call that waits at one of its system calls.
type halted struct {
	*node
	there chan struct{} // closed when it waits, or has ended
	ended chan struct{}
	leave func()
	end   *faulty
	run   *fault.Run
	waits bool
}

// halt has a call wait where at says so for the first time.
func (n *node) halt(c call, at func() bool) *halted {
	n.Helper()
	h := &halted{node: n, there: make(chan struct{}), ended: make(chan struct{})}
	leave := make(chan struct{})
	h.leave = sync.OnceFunc(func() { close(leave) })
	run, ended := n.startFaulty(c, fault.Fault{Before: func(string) {
		if !h.waits && at() {
			h.waits = true
			close(h.there)
			<-leave
		}
	}})
	h.run = run
	go func() {
		h.end = ended()
		if !h.waits {
			close(h.there)
		}
		close(h.ended)
	}()
	n.Cleanup(func() {
		h.leave()
		run.Kill()
		<-h.ended
	})
	return h
}

// await waits for one of them, or fails the test.
func (h *halted) await(c chan struct{}, what string) {
	h.Helper()
	select {
	case <-c:
	case <-time.After(patience / 2):
		h.Fatalf("within %s the call has not %s", patience/2, what)
	}
}

// arrive waits until the call waits, where it has done what is said.
func (h *halted) arrive(done string) {
	h.Helper()
	if h.await(h.there, done); !h.waits {
		h.Fatalf("the call never was where it has %s: %s", done, h.end)
	}
}

// ends has it go on, and gives how it ended.
func (h *halted) ends() *faulty {
	h.Helper()
	h.leave()
	h.await(h.ended, "come to its end")
	return h.end
}

// goOn has it go on, to a success.
func (h *halted) goOn() {
	h.Helper()
	f := h.ends()
	expect.That(h, f.status == 0, "it failed where others acted meanwhile: %s", f)
}

// dies ends it where it waits.
func (h *halted) dies() {
	h.Helper()
	h.run.Kill()
	h.ends()
}

// hasElements says that a pod's interface, which is there, is in the firewall's sets.
func (w *network) hasElements(p *pod, ifName string) bool {
	w.Helper()
	hash := ident.Hash(w.name, p.id, ifName)
	_, there := links(w, w.ns)["veth"+hash]
	return there && strings.Contains(strings.Join(w.owners(), "\n"), hash)
}

// recordOf is the text of an attachment's record; "" if it has none.
func (w *network) recordOf(p *pod) string {
	w.Helper()
	return nstest.ReadIf(w, w.state+"/attachments/"+w.name+"/"+strings.TrimPrefix(w.port(p), "veth")+".json")
}

// wantWell fails the test unless tombolo check finds nothing.
func (n *node) wantWell(when string) {
	n.Helper()
	o := n.operate("check", "--state", n.state)
	expect.That(n, o.status == 0, "%s, tombolo check says: %s%s", when, o.stdout, o.stderr)
}

func TestAnADDGoesOnWhereTheFirewallIsFlushedMeanwhile(t *testing.T) {
	t.Parallel()
	for _, guarded := range []bool{false, true} {
		for _, flush := range []string{"flush ruleset", "delete table inet tombolo"} {
			nstest.RunParallel(t, fmt.Sprintf("guard %t, %s", guarded, flush), func(t *testing.T) {
				n := newNode(t)
				n.outside()
				w := n.portnet(conf{"guard": guarded})
				w.add(n.pod("stays"))
				p := n.pod("a")
				add := n.halt(w.asks("ADD", p, portOf80(8080)), func() bool { return hasPort(n, w, p) })
				add.arrive("made its port")
				n.nft(flush)
				add.goOn()
				if n.wantWell("after an ADD that a flush came into"); t.Failed() {
					return
				}
				p.serve(t, "tcp", 80)
				wantPing(t, p.NS, outside4, outside6)
				expect.Success(t, expect.Err(askPort(t, n.ns, "tcp", uplink4, 8080)),
					"the ADD was a success, and its host port does not lead to the pod")
			})
		}
	}
}

// An ADD makes the tables again, puts the other pods back, and is about to say in the tables that all is there.
func TestAnADDPutsBackWhatIsFlushedAgainMeanwhile(t *testing.T) {
	t.Parallel()
	for _, flush := range []string{"flush ruleset", "delete table inet tombolo", "flush set inet tombolo pods4"} {
		nstest.RunParallel(t, flush, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			stays := w.addPod("stays")
			n.nft("delete table inet tombolo")
			add := n.halt(w.asks("ADD", n.pod("a"), nil), func() bool { return w.hasElements(stays, "eth0") })
			add.arrive("put the other pod back")
			n.nft(flush)
			add.goOn()
			n.wantWell("after an ADD that a second flush came into")
			wantPing(t, stays.NS, outside4, outside6)
		})
	}
}

// The other network's DEL finds the ADD unfinished, and can pass the port to nobody.
func TestAHostPortThatTheContainersOtherNetworkGivesUpDuringAnADDIsThatADDs(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	first := n.portnet(nil)
	second := n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64"), "capabilities": conf{"portMappings": true}})
	p := first.addPod("web", publish(t, "8080:80/tcp"))
	c := second.asks("ADD", p, portOf80(8080))
	c.ifName = "eth1"
	add := n.halt(c, func() bool { return second.hasElements(p, "eth1") })
	add.arrive("entered the pod into the firewall")
	// It waits for the ADD, when all else is done, to shut the way from 127.0.0.1.
	del := n.start(first.asks("DEL", p, portOf80(8080)))
	(&lan{node: n}).eventually(t, func() bool { return first.recordOf(p) == "" })
	add.goOn()
	del.wantSuccess("DEL")
	p.serve(t, "tcp", 80)
	expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)),
		"the container has a network still, and its host port leads nowhere")
}

func TestADELThatOvertakesAnADDAtItsVeryEndMakesItFail(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("stays"))
	before := n.traces()
	for at, ready := 1, false; !ready; at += 3 {
		p := n.pod(fmt.Sprintf("pod-%d", at))
		calls := 0
		add := n.halt(w.asks("ADD", p, nil), func() bool {
			if calls > 0 || w.hasElements(p, "eth0") {
				calls++
			}
			return calls == at
		})
		add.arrive(fmt.Sprintf("made %d calls since it entered the pod into the firewall", at))
		ready = strings.Contains(w.recordOf(p), `"state":"ready"`)
		del := n.start(w.asks("DEL", p, nil))
		(&lan{node: n}).eventually(t, func() bool { return w.recordOf(p) == "" })
		f := add.ends()
		del.wantSuccess("DEL")
		const says = `"code":11,"msg":"the attachment was deleted, or collected as garbage, while it was being made"`
		must.That(t, ready || f.status != 0 && strings.Contains(f.stdout, says),
			"a DEL came %d calls after the firewall's step and took all away, and the ADD ends with: %s", at, f)
		n.wantTraces(before)
	}
}

// The ADD that a DEL ended may go on for longer than the DEL waits, and the runtime adds the same anew.
func TestAnADDThatADELAndAnotherADDOvertookLeavesThePodOfTheOther(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	p := n.pod("a")
	first := n.halt(w.asks("ADD", p, nil), func() bool { return w.hasElements(p, "eth0") })
	first.arrive("entered the pod into the firewall")
	n.callOK(w.asks("DEL", p, nil))
	n.callOK(w.asks("ADD", p, nil))
	f := first.ends()
	expect.That(t, f.status != 0 && strings.Contains(f.stdout, `"code":11,`), "a DEL and another ADD overtook the ADD, which ends with: %s", f)
	expect.That(t, w.recordOf(p) != "", "the ADD that was overtaken undid what the other has made: its record is gone")
	n.wantWell("after the ADD that was overtaken")
	wantPing(t, p.NS, outside4, outside6)
}

func TestADELGivesTheAddressBackWhenThePortIsGone(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := n.pod("a")
	reservation := n.state + "/ipam/podnet/" + ip4(w.add(p)).String()
	must.That(t, nstest.ReadIf(t, reservation) != "", "no reservation at %s", reservation)
	del := n.halt(w.asks("DEL", p, nil), func() bool { return nstest.ReadIf(t, reservation) == "" })
	del.arrive("given the address back")
	expect.That(t, !hasPort(n, w, p),
		"DEL has given the address back, and the pod still has its port: another pod may get the address")
	del.goOn()
}

func TestGCLeavesTheAddressOfAnADDThatIsUnderWay(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": small("2")}) // one address
	p := n.pod("a")
	add := n.halt(w.asks("ADD", p, nil), func() bool { return hasPort(n, w, p) })
	add.arrive("made its port")
	w.gc()
	if r, err := w.tryAdd(n.pod("next")); err == nil {
		t.Errorf("a GC had the address of an ADD under way given to another pod: %v", ips(r))
	}
	add.goOn()
	n.wantWell("after a GC beside the ADD")
}

func TestGCLeavesAPodWhoseADDCameSinceItMadeItsList(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	pods := n.pods(4)
	for _, p := range pods {
		w.add(p)
	}
	gc := n.halt(call{verb: "GC", stdin: w.stdin(conf{"cni.dev/valid-attachments": []any{}})}, func() bool { return len(n.records()) < len(pods) })
	gc.arrive("taken one of the pods down")
	var again []*pod
	for _, p := range pods {
		if w.recordOf(p) != "" {
			n.callOK(w.asks("DEL", p, nil))
			n.callOK(w.asks("ADD", p, nil))
			again = append(again, p)
		}
	}
	gc.goOn()
	for _, p := range again {
		if w.recordOf(p) == "" {
			t.Errorf("GC had listed a pod of before, and took the one down that was added since: %s", p.id)
			continue
		}
		wantPing(t, p.NS, outside4, outside6)
	}
	expect.That(t, len(again) > 0, "GC had left no pod to add again: the test shows nothing")
	n.wantWell("after the GC")
}

// A DEL has read the record, and waits for the state's lock, while tombolo repair has the firewall follow the pod's lease to
// another address, and writes that into the record.
func TestADELTakesTheElementsOfAnAddressThatThePodGotMeanwhile(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	w := l.network(conf{"guard": true})
	p := l.pod("a")
	w.add(l.pod("stays"))
	before := l.owners()
	was := w.add(p).IPs[0].Address.String()
	const is = "192.168.50.77"
	name := strings.TrimPrefix(w.port(p), "veth") + ".json"
	nstest.PutFile(t, l.state+"-leases", name, strings.ReplaceAll(readFile(t, l.state+"-leases/"+name), was, is+"/24"))
	repair := l.halt(operator("repair", "--state", l.state), func() bool { return strings.Contains(l.run("nft", "list", "ruleset"), is) })
	repair.arrive("moved the pod to its lease's address")
	del := l.start(w.asks("DEL", p, nil))
	time.Sleep(time.Second) // it waits half of that for the record's lock, and then for the state's
	del.wantRunning()
	repair.ends() // the keeper, which does not run, is left to say
	del.wantSuccess("DEL")
	left := l.owners()
	expect.That(t, len(left) == len(before), "the pod is gone, and the firewall has %q", left)
}
