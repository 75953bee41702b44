package bench

import (
	"context"
	"fmt"
	"runtime/pprof"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// BenchmarkAdd is an ADD in this process, by what the pod asks for.
func BenchmarkAdd(b *testing.B) { byFeature(b, "ADD") }

// BenchmarkDel is the DEL of the same.
func BenchmarkDel(b *testing.B) { byFeature(b, "DEL") }

func byFeature(b *testing.B, timed string) {
	for _, f := range features() {
		b.Run("feature="+f.name, func(b *testing.B) {
			n := newNode(b, inProcess(), f).warm(b)
			n.fill(b, nil, 1, 1) // the only pod with a port opens and closes the node's loopback for it
			n.linked = links(b, n.host)
			comeAndGo(b, n, timed)
		})
	}
}

// BenchmarkPods is an ADD by how many pods there are.
func BenchmarkPods(whole *testing.B) {
	n := newNode(whole, inProcess(), ipv4()).warm(whole)
	var there []*pod
	for _, pods := range []int{0, 100, 400, 900} {
		whole.Run(fmt.Sprintf("pods=%d", pods), func(b *testing.B) {
			there = n.fill(whole, there, pods, 2)
			n.linked = links(b, n.host)
			comeAndGo(b, n, "ADD")
		})
	}
}

func BenchmarkCheck(b *testing.B)  { ask(b, "CHECK") }
func BenchmarkStatus(b *testing.B) { ask(b, "STATUS") }

// ask measures a verb that changes nothing.
func ask(b *testing.B, verb string) {
	n := newNode(b, inProcess(), ipv4()).warm(b)
	p := n.fill(b, nil, 1, 1)[0]
	m := newMeter(b)
	for range b.N {
		must.Succeed(b, m.time(n, verb, p))
	}
	m.report()
}

// inARow is how many pods come before they go. A DEL waits for the kernel's tick, and so do the samples of a profile:
// an ADD after each DEL would always be over before the next sample.
const inARow = 16

// comeAndGo has b.N pods come and go, and measures one verb.
func comeAndGo(b *testing.B, n *node, timed string) {
	pods := make([]*pod, min(inARow, b.N))
	for i := range pods {
		pods[i] = n.pod(b)
	}
	m := newMeter(b)
	for left := b.N; left > 0; left -= len(pods) {
		pods = pods[:min(len(pods), left)]
		for i := range pods {
			pods[i] = n.again(pods[i])
			must.Succeed(b, n.measureShapers(pods[i]))
			must.Succeed(b, m.call(n, "ADD", pods[i], timed))
			must.Succeed(b, n.prove(pods[i]))
		}
		workers := inARow // at once they wait for the kernel together
		if timed == "DEL" {
			workers = 1
		}
		must.Succeed(b, atOnce(pods, workers, func(p *pod) error { return m.call(n, "DEL", p, timed) }))
		n.proveGone(b, pods[0])
	}
	m.report()
}

// meter measures calls, and leaves out what is around them: the namespaces, the proof, the call that undoes it.
type meter struct {
	*testing.B
	took  []float64            // nanoseconds
	steps map[string][]float64 // of each ADD of everything, by their names in the log
}

func newMeter(b *testing.B) *meter {
	b.ReportAllocs()
	b.ResetTimer()
	b.StopTimer()
	return &meter{B: b, steps: map[string][]float64{}}
}

// call carries out a verb, and measures it if it is the one.
func (m *meter) call(n *node, verb string, p *pod, timed string) error {
	if verb == timed {
		return m.time(n, verb, p)
	}
	_, err := n.call(verb, p)
	return err
}

// time measures a call. In a CPU profile it has a label.
func (m *meter) time(n *node, verb string, p *pod) error {
	last := time.Now()
	if verb == "ADD" && n.feature.name == everything().name {
		n.after = func(step string) error {
			m.steps[step] = append(m.steps[step], float64(time.Since(last)))
			last = time.Now()
			return nil
		}
	}
	var c cost
	var err error
	m.StartTimer()
	pprof.Do(context.Background(), pprof.Labels("verb", verb), func(context.Context) { c, err = n.call(verb, p) })
	m.StopTimer()
	n.after = nil
	m.took = append(m.took, float64(c.wall))
	return err
}

// report gives the median for the time, which a busy machine moves less than the mean.
func (m *meter) report() {
	m.ReportMetric(median(m.took), "ns/op")
	m.ReportMetric(quantile(m.took, 0.95), "p95-ns/op")
	for step, took := range m.steps {
		m.ReportMetric(median(took), step+"-ns")
	}
}
