package sockdiag

import (
	"context"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// crowd opens n sockets, half of them of TCP, at ports from 10000.
func crowd(tb testing.TB, ns *netns.NS, n int) {
	tb.Helper()
	for i := range n {
		proto := unix.IPPROTO_TCP
		if i%2 == 1 {
			proto = unix.IPPROTO_UDP
		}
		open(tb, ns, kind{proto: proto, at: fmt.Sprintf("0.0.0.0:%d", 10000+i)})
	}
}

func BenchmarkListeners(b *testing.B) {
	for _, others := range []int{1, 5000} {
		b.Run(fmt.Sprintf("others=%d", others), func(b *testing.B) {
			ns := newHost(b)
			crowd(b, ns, others)
			c := dial(b, ns)
			ten := []Want{}
			for port := uint16(80); port < 90; port++ {
				ten = append(ten, Want{Proto: unix.IPPROTO_UDP, Port: port})
			}
			for _, bc := range []struct {
				name  string
				wants []Want
			}{
				{"tcp=1", []Want{{Proto: unix.IPPROTO_TCP, Port: 80}}},
				{"udp=1", []Want{{Proto: unix.IPPROTO_UDP, Port: 80}}},
				{"udp=10", ten},
			} {
				b.Run(bc.name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						if list, err := c.Listeners(context.Background(), bc.wants); len(list) != 0 || err != nil {
							b.Fatal(list, err)
						}
					}
				})
			}
		})
	}
}
