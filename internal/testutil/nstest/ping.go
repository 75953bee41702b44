package nstest

import (
	"context"
	"net/netip"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/netns"
)

// Echo says how to ping. The zero value is what Ping does: to wait for a minute. A test
// that expects no answer should give a short Wait.
type Echo = icmp.Echo

// ErrNoEcho is the error of a ping that nobody answered.
var ErrNoEcho = icmp.ErrNoReply

// Ping sends ICMP echo requests from a namespace until one is answered, for a minute:
// it is for those that are to be answered. Its error is ErrNoEcho, or what the kernel
// says (EHOSTUNREACH, ECONNREFUSED, …).
func Ping(tb testing.TB, ns *netns.NS, dst netip.Addr) error {
	tb.Helper()
	return PingWith(tb, ns, dst, Echo{})
}

// PingWith is Ping with options. It needs no binary and no ping_group_range: its
// socket is a raw one.
func PingWith(tb testing.TB, ns *netns.NS, dst netip.Addr, opt Echo) error {
	tb.Helper()
	if opt.Wait == 0 {
		opt.Wait = patience
	}
	// Not the test's own context, which is done before the test's cleanups run.
	return icmp.Ping(context.Background(), ns, dst, opt)
}
