package bench

import (
	"context"
	"fmt"
	"runtime/pprof"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// meter measures one call of each round, and leaves out what is around it: the namespaces,
// the proof, the call that undoes it. Allocations count where the call is in this process.
type meter struct {
	*testing.B
	took []float64 // nanoseconds
}

func newMeter(b *testing.B, here bool) *meter {
	if here {
		b.ReportAllocs()
	}
	b.StopTimer()
	return &meter{B: b}
}

// measured is the label, in a CPU profile, of what is measured.
var measured = pprof.WithLabels(context.Background(), pprof.Labels("bench", "measured"))

// time runs what is measured; the cost that it gives counts, not the clock here.
func (m *meter) time(fn func() (cost, error)) {
	m.Helper()
	m.StartTimer()
	pprof.SetGoroutineLabels(measured)
	c, err := fn()
	pprof.SetGoroutineLabels(context.Background())
	m.StopTimer()
	must.Succeed(m, err)
	m.took = append(m.took, float64(c.wall))
}

// report gives the median for the time, which a busy machine moves less than the mean.
func (m *meter) report() {
	m.ReportMetric(median(m.took), "ns/op")
	m.ReportMetric(quantile(m.took, 0.95), "p95-ns/op")
}

// rounds has b.N pods come and go, by one verb after the other, and measures one verb.
func rounds(b *testing.B, n *node, verbs []string, timed string) {
	m := newMeter(b, n.name == "attach" || n.name == "tombolo-in-process")
	p := n.pod(b)
	for range b.N {
		p = n.again(p)
		must.Succeed(b, n.measureShapers(p))
		for _, verb := range verbs {
			call := func() (cost, error) { return n.call(verb, p) }
			if verb == timed {
				m.time(call)
			} else if _, err := call(); err != nil {
				b.Fatal(err)
			}
			if verb == "ADD" {
				must.Succeed(b, n.prove(p))
			}
		}
		n.proveGone(b, p)
	}
	m.report()
}

// verb measures one in the plugin as runtimes execute it, and in this process.
func verb(b *testing.B, timed string, verbs ...string) {
	for _, way := range []contender{tombolo(), inProcess()} {
		b.Run("way="+way.name, func(b *testing.B) { rounds(b, newNode(b, way, ipv4()).warm(b), verbs, timed) })
	}
}

func BenchmarkAdd(b *testing.B)    { verb(b, "ADD", "ADD", "DEL") }
func BenchmarkDel(b *testing.B)    { verb(b, "DEL", "ADD", "DEL") }
func BenchmarkCheck(b *testing.B)  { verb(b, "CHECK", "ADD", "CHECK", "DEL") }
func BenchmarkStatus(b *testing.B) { verb(b, "STATUS", "ADD", "STATUS", "DEL") }

// Attach and Detach are those of package bridge, for a program that embeds it.
func BenchmarkAttach(b *testing.B) { embedded(b, "ADD") }
func BenchmarkDetach(b *testing.B) { embedded(b, "DEL") }

func embedded(b *testing.B, timed string) {
	for _, f := range []feature{ipv4(), {name: "dual", dual: true}} {
		b.Run("feature="+f.name, func(b *testing.B) {
			rounds(b, newNode(b, attach(b), f).warm(b), []string{"ADD", "DEL"}, timed)
		})
	}
}

// steps are the parts of an ADD, by the name that it gives them when each is done.
func steps() [][2]string {
	return [][2]string{
		{"open", "open"}, {"record", "record"}, {"reservation", "ipam"}, {"network", "network"}, {"link", "link"},
		{"limits", "bandwidth"}, {"transaction", "firewall"}, {"commit", "commit"},
	}
}

// stepOf is inProcess, whose ADD costs what one step of it does.
func stepOf(done string) contender {
	c := inProcess()
	c.name = "tombolo-step" // its allocations are those of all steps
	c.call = func(n *node, verb string, p *pod) (cost, error) {
		var took cost
		last := time.Now()
		all, err := n.stepped(verb, p, func(step string) error {
			if step == done {
				took.wall = time.Since(last)
			}
			last = time.Now()
			return nil
		})
		if verb != "ADD" {
			return all, err
		}
		if err == nil && took.wall == 0 {
			err = fmt.Errorf("no step of it is called %q", done)
		}
		return took, err
	}
	return c
}

// BenchmarkStep is each step of an ADD in process alone, of a pod that asks for
// everything. The step "link" is the veth pair and the pod's side of it, in one Attach.
func BenchmarkStep(b *testing.B) {
	for _, step := range steps() {
		b.Run("step="+step[0], func(b *testing.B) {
			n := newNode(b, stepOf(step[1]), everything()).warm(b)
			n.fill(b, nil, 1, 1) // the only pod with a port opens and closes the node's loopback for it
			n.linked = links(b, n.host)
			rounds(b, n, []string{"ADD", "DEL"}, "ADD")
		})
	}
}

// BenchmarkFeature is an ADD in process, by what the pod asks for.
func BenchmarkFeature(b *testing.B) {
	for _, f := range features() {
		b.Run("feature="+f.name, func(b *testing.B) {
			rounds(b, newNode(b, inProcess(), f).warm(b), []string{"ADD", "DEL"}, "ADD")
		})
	}
}

// BenchmarkPods is an ADD by how many pods there are.
func BenchmarkPods(whole *testing.B) {
	n := newNode(whole, tombolo(), ipv4()).warm(whole)
	var there []*pod
	for _, pods := range []int{0, 100, 400, 900} {
		whole.Run(fmt.Sprintf("pods=%d", pods), func(b *testing.B) {
			if pods > 100 {
				skipHeavy(b, "half a minute")
			}
			there = n.fill(whole, there, pods, 2)
			n.linked = links(b, n.host)
			rounds(b, n, []string{"ADD", "DEL"}, "ADD")
		})
	}
}

// BenchmarkAtOnce is the wall time for each of so many pods whose ADDs begin at once.
func BenchmarkAtOnce(b *testing.B) {
	for _, pods := range []int{1, 8, 64} {
		b.Run(fmt.Sprintf("pods=%d", pods), func(b *testing.B) {
			n := newNode(b, tombolo(), ipv4()).warm(b)
			m := newMeter(b, false)
			crowd := make([]*pod, pods)
			for i := range crowd {
				crowd[i] = n.pod(b)
			}
			standInLine(b, max(min(b.N, 5), b.N/pods)) // of crowds
			for range b.N {
				m.time(func() (cost, error) { return n.crowd("ADD", crowd, pods) })
				for _, p := range crowd {
					must.Succeed(b, n.prove(p))
				}
				must.Succeed(b, expect.Err(n.crowd("DEL", crowd, pods)))
				for i, p := range crowd {
					n.proveGone(b, p)
					crowd[i] = n.again(p)
				}
			}
			for i := range m.took {
				m.took[i] /= float64(pods)
			}
			m.report()
		})
	}
}

// crowd calls a verb for pods, so many of them at a time, and takes the wall time of all.
func (n *node) crowd(verb string, pods []*pod, workers int) (cost, error) {
	start := time.Now()
	err := atOnce(pods, workers, func(p *pod) error {
		_, err := n.call(verb, p)
		return err
	})
	return cost{wall: time.Since(start)}, err
}

// BenchmarkChurn is the wall time for each of many pods that come, are proven, and go, in
// process, some at a time: while the kernel takes one down, others are added. It is what
// make profile looks at, since it has thousands of ADDs within seconds.
func BenchmarkChurn(b *testing.B) {
	const workers = 16
	n := newNode(b, inProcess(), ipv4()).warm(b)
	free := make(chan *pod, workers)
	for range workers {
		free <- n.pod(b)
	}
	start := time.Now()
	err := atOnce(make([]*pod, b.N), workers, func(*pod) error {
		p := n.again(<-free)
		defer func() { free <- p }()
		pprof.SetGoroutineLabels(measured)
		_, err := n.call("ADD", p)
		pprof.SetGoroutineLabels(context.Background())
		if err == nil {
			err = n.prove(p)
		}
		if err == nil {
			_, err = n.call("DEL", p)
		}
		return err
	})
	b.ReportMetric(float64(time.Since(start))/float64(b.N), "ns/op")
	must.Succeed(b, err)
	n.proveGone(b, <-free)
}

// BenchmarkDHCP is an ADD that leases its address, on a bridge that was there before.
func BenchmarkDHCP(b *testing.B) {
	needDHCP(b)
	for _, f := range []feature{dhcp("plain", false), dhcp("rapid", true)} {
		b.Run("commit="+f.name, func(b *testing.B) {
			rounds(b, newNode(b, tombolo(), f).warm(b), []string{"ADD", "DEL"}, "ADD")
		})
	}
}
