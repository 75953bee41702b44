package transport_test

import (
	"context"
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// DISCOVER to ACK, with the socket opened and given up, from a server in this process.
func BenchmarkAcquire(b *testing.B) {
	l := newLAN(b)
	nstest.Sysctl(b, l.pod, "net/ipv4/conf/all/rp_filter", "0")
	nstest.Sysctl(b, l.pod, "net/ipv4/conf/eth0/rp_filter", "0")
	heard := serve(b, l.host, l.link, nil)
	go func() {
		for range heard {
		}
	}()
	b.Cleanup(func() { close(heard) })
	for _, bb := range []struct {
		name string
		dial func(context.Context, netip.Addr) (dhcpc.Transport, error)
	}{
		{"raw", transport.Dialer(l.config())},
		{"UDP", udpOnly(l)},
	} {
		b.Run(bb.name, func(b *testing.B) {
			c := l.client(b, func(c *dhcpc.Config) { c.Broadcast, c.Dial = true, bb.dial })
			for b.Loop() {
				must.Succeed(b, expect.Err(c.Acquire(context.Background())))
			}
		})
	}
}
