package bandwidth_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// BenchmarkEnsure is what shaping adds to an ADD, on a port that is up.
func BenchmarkEnsure(b *testing.B) {
	for _, c := range []struct {
		name  string
		shape bandwidth.Shape
	}{
		{"ingress", bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 10e6}}},
		{"egress", bandwidth.Shape{Egress: bandwidth.Limit{Rate: 10e6}}},
		{"both", bandwidth.Shape{Ingress: bandwidth.Limit{Rate: 10e6}, Egress: bandwidth.Limit{Rate: 10e6}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			n := newNode(b)
			b.ReportAllocs()
			for b.Loop() {
				if changed, err := n.conn.Ensure(b.Context(), n.target, c.shape); err != nil || !changed {
					b.Fatal(changed, err)
				}
				b.StopTimer()
				must.Succeed(b, n.conn.Remove(b.Context(), n.target))
				b.StartTimer()
			}
		})
	}
}

// BenchmarkEnsureAgain is what a repair costs that finds nothing to do.
func BenchmarkEnsureAgain(b *testing.B) {
	n := newNode(b)
	n.ensure(b, both)
	b.ReportAllocs()
	for b.Loop() {
		n.ensure(b, both)
	}
}

// BenchmarkRemove is what shaping adds to a DEL, of whose time nearly all is the
// kernel waiting for the ifb to be out of use.
func BenchmarkRemove(b *testing.B) {
	n := newNode(b)
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		n.ensure(b, both)
		b.StartTimer()
		must.Succeed(b, n.conn.Remove(b.Context(), n.target))
	}
}
