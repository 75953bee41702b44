package dhcpc

import (
	"runtime"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// A renewal, without the sockets: what a keeper's CPU has to do for it.
func BenchmarkRenewal(b *testing.B) {
	bench := newBench(b).bound()
	s := bench.s
	b.ReportAllocs()
	for b.Loop() {
		var out Output
		s, out = bench.m.Step(s, s.Wake(), Event{})
		d, err := dhcpv4.FromBytes(out.Send.Payload)
		must.Succeed(b, err)
		s, out = bench.m.Step(s, s.now, Event{Packet: answer(d, ack)})
		if out.Bound == nil {
			b.Fatal("not renewed")
		}
	}
}

// What a thousand leases take while nothing happens.
func BenchmarkIdleLeases(b *testing.B) {
	const n = 1000
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		sessions := make([]Session, n)
		for i := range sessions {
			sessions[i] = newBench(b).bound().s
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B/lease")
		runtime.KeepAlive(sessions)
	}
}
