package bridge_test

import (
	"slices"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// BenchmarkAttach gives the median of the time that an Attach takes. A Detach takes
// the kernel many times as long, and is not in it.
func BenchmarkAttach(b *testing.B) {
	v4 := port(0)
	v4.Addresses, v4.Routes = v4.Addresses[:1], v4.Routes[:1]
	for name, p := range map[string]bridge.Port{"IPv4": v4, "dual stack": port(0)} {
		b.Run(name, func(b *testing.B) {
			n := newNode(b)
			p.BridgeIndex, p.MTU = n.link.Index, n.link.MTU
			var took []time.Duration
			for b.Loop() {
				pod := nstest.New(b)
				start := time.Now()
				_, err := n.conn.Attach(b.Context(), pod, p)
				took = append(took, time.Since(start))
				must.Succeed(b, err)
				must.Succeed(b, n.conn.Detach(b.Context(), p.Name, p.Alias))
			}
			slices.Sort(took)
			b.ReportMetric(0, "ns/op") // the sum, and the namespaces
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "attach-ns/op")
		})
	}
}

// BenchmarkAutoconfigure gives the median of the time from a Solicit until the pod has
// its address, with a router that answers at once.
func BenchmarkAutoconfigure(b *testing.B) {
	l := newLAN(b)
	l.advertises(b)
	var took []time.Duration
	for b.Loop() {
		p := autoconfigured(0)
		pod, _ := attach(b, l.node, p)
		start := time.Now()
		mustAutoconfigure(b, l.conn, pod, p)
		took = append(took, time.Since(start))
		must.Succeed(b, l.conn.Detach(b.Context(), p.Name, p.Alias))
	}
	slices.Sort(took)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "autoconfigure-ns/op")
}
