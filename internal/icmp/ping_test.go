package icmp_test

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/icmp"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestPingReachesTheOtherEnd(t *testing.T) {
	t.Parallel()
	a, _ := nstest.Pair(t)
	for _, tt := range []struct {
		name string
		dst  string
		opt  icmp.Echo
		want error
	}{
		{name: "IPv4", dst: "10.9.0.2"},
		{name: "IPv6", dst: "fd09::2"},
		{name: "IPv4 from an address", dst: "10.9.0.2", opt: icmp.Echo{From: nstest.Addr("10.9.0.1")}},
		{name: "IPv6 from an address", dst: "fd09::2", opt: icmp.Echo{From: nstest.Addr("fd09::1")}},
		{name: "as long as the path takes", dst: "10.9.0.2", opt: icmp.Echo{Size: 1472, DontFragment: true}},
		{name: "too long for the path", dst: "10.9.0.2", opt: icmp.Echo{Size: 1473, DontFragment: true}, want: unix.EMSGSIZE},
		{name: "too long for the path, IPv6", dst: "fd09::2", opt: icmp.Echo{Size: 1453, DontFragment: true}, want: unix.EMSGSIZE},
		{name: "in fragments, of odd length", dst: "10.9.0.2", opt: icmp.Echo{Size: 2001}},
		{name: "in fragments, IPv6", dst: "fd09::2", opt: icmp.Echo{Size: 2001}},
		{name: "no route", dst: "192.0.2.1", want: unix.ENETUNREACH},
		{name: "no route, IPv6", dst: "2001:db8::1", want: unix.ENETUNREACH},
		{name: "from an address that is not there", dst: "10.9.0.2", opt: icmp.Echo{From: nstest.Addr("10.9.0.7")}, want: unix.EADDRNOTAVAIL},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.opt.Wait = patience
			err := icmp.Ping(t.Context(), a, nstest.Addr(tt.dst), tt.opt)
			must.That(t, errors.Is(err, tt.want), "ping: %v, want %v", err, tt.want)
			expect.That(t, err == nil || strings.HasPrefix(err.Error(), "ping "+tt.dst+": "),
				"the error does not say what was pinged: %v", err)
		})
	}
}

func TestSilenceIsAnError(t *testing.T) {
	t.Parallel()
	a, b := nstest.Pair(t)
	for _, dst := range []string{"10.9.0.2", "fd09::2"} {
		// So that a neighbour that is not found yet is not the reason.
		must.Succeed(t, icmp.Ping(t.Context(), a, nstest.Addr(dst), icmp.Echo{Wait: patience}))
	}
	nstest.Sysctl(t, b, "net/ipv4/icmp_echo_ignore_all", "1")
	nstest.Sysctl(t, b, "net/ipv6/icmp/echo_ignore_all", "1")
	for _, dst := range []string{"10.9.0.2", "fd09::2"} {
		err := icmp.Ping(t.Context(), a, nstest.Addr(dst), icmp.Echo{Wait: 100 * time.Millisecond})
		expect.That(t, errors.Is(err, icmp.ErrNoReply) && strings.Contains(err.Error(), dst) && strings.Contains(err.Error(), "100ms"),
			"ping %s: %v, want %v", dst, err, icmp.ErrNoReply)
	}
}

// patience is far longer than any machine needs, however busy.
const patience = time.Minute

// TestRequestsAreRepeated lets the host answer only once a second request has been
// heard.
func TestRequestsAreRepeated(t *testing.T) {
	t.Parallel()
	a, b := nstest.Pair(t)
	nstest.Sysctl(t, b, "net/ipv4/icmp_echo_ignore_all", "1")
	pinged := make(chan error)
	go func() {
		err := icmp.Ping(context.Background(), a, nstest.Addr("10.9.0.2"), icmp.Echo{Wait: 2 * patience})
		pinged <- err
	}()
	heard := func() string { return nstest.Run(t, b, "nstat", "-asz", "IcmpInEchos") }
	requests := regexp.MustCompile(`IcmpInEchos +([2-9]|\d\d+) `)
	for deadline := time.Now().Add(patience); !requests.MatchString(heard()) && time.Now().Before(deadline); {
	}
	nstest.Sysctl(t, b, "net/ipv4/icmp_echo_ignore_all", "0")
	if err := <-pinged; err != nil || !requests.MatchString(heard()) {
		t.Errorf("after %s: %v", heard(), err)
	}
}

func TestPingEndsWithItsContext(t *testing.T) {
	t.Parallel()
	a, b := nstest.Pair(t)
	nstest.Sysctl(t, b, "net/ipv4/icmp_echo_ignore_all", "1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := icmp.Ping(ctx, a, nstest.Addr("10.9.0.2"), icmp.Echo{Wait: time.Hour})
	expect.Is(t, err, context.Canceled, "done before")
	ctx, cancel = context.WithCancel(t.Context())
	pinged := make(chan error)
	go func() {
		err := icmp.Ping(ctx, a, nstest.Addr("10.9.0.2"), icmp.Echo{Wait: time.Hour})
		pinged <- err
	}()
	cancel()
	expect.Is(t, <-pinged, context.Canceled, "done meanwhile")
}

func TestClosedNamespaceIsAnError(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	ns.Close()
	expect.Is(t, icmp.Ping(t.Context(), ns, nstest.Addr("10.9.0.2"), icmp.Echo{}), unix.EBADF, "ping")
}
