package main

import (
	"testing"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// attachOn gives an attacher on a bridge in a namespace of its own, and the loop's
// way of using it: a fresh pod namespace each time.
func attachOn(tb testing.TB) func(number int, times *loopTimes) {
	tb.Helper()
	host := nstest.New(tb)
	a, err := newAttacher(host, "tmb0", subnets(false)[0])
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { a.conn.Close() })
	return func(number int, times *loopTimes) {
		tb.Helper()
		pod, err := netns.New()
		if err != nil {
			tb.Fatal(err)
		}
		// Not closed before the end: the kernel would take it down meanwhile.
		tb.Cleanup(func() { pod.Close() })
		if err := a.live(pod, number, times, func() error { return nil }); err != nil {
			tb.Fatal(err)
		}
	}
}

func TestAttacherTimesEveryPod(t *testing.T) {
	t.Parallel()
	live := attachOn(t)
	var times loopTimes
	for i := range 3 {
		live(i, &times)
	}
	if len(times.AddNs) != 3 || len(times.DelNs) != 3 {
		t.Errorf("%d and %d times of 3 pods", len(times.AddNs), len(times.DelNs))
	}
}

// BenchmarkAttachDetach measures both in one loop: a Detach takes the kernel many
// times as long as an Attach, so leaving it out of the timer would make the
// benchmark run for minutes.
func BenchmarkAttachDetach(b *testing.B) {
	live := attachOn(b)
	var times loopTimes
	for number := 0; b.Loop(); number++ {
		live(number, &times)
	}
	b.ReportMetric(0, "ns/op") // the sum, and the namespaces
	b.ReportMetric(medianOf(times.AddNs), "attach-ns/op")
	b.ReportMetric(medianOf(times.DelNs), "detach-ns/op")
}

func medianOf(ns []int64) float64 {
	values := make([]float64, len(ns))
	for i, n := range ns {
		values[i] = float64(n)
	}
	return median(values)
}
