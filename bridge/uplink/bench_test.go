package uplink_test

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/route"
)

func BenchmarkPlan200Routes(b *testing.B) {
	s := plain(b)
	for i := range 200 {
		s.Routes = append(s.Routes, route.Route{
			Family: unix.AF_INET, Dst: netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 16, byte(i), 0}), 24), Gateway: netip.MustParseAddr("10.0.0.1"),
			Link: s.NIC.Index, Table: route.TableMain, Type: route.Unicast, Protocol: route.ProtocolStatic,
		})
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := uplink.Plan(s, toBridge()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkTakeAndRestore(b *testing.B) {
	l := newLAN(b)
	var j memory
	b.ReportAllocs()
	for b.Loop() {
		rec, err := l.conn.Take(b.Context(), toBridge(), &j)
		if err != nil {
			b.Fatal(err)
		}
		if err := l.conn.Restore(b.Context(), rec, &j); err != nil {
			b.Fatal(err)
		}
	}
}
