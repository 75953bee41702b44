package bridge_test

import (
	"errors"
	"io/fs"
	"net/netip"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// test/vm/run.sh noipv6 has a kernel that is like this in truth.

// port4 is port without what it has of IPv6.
func port4(i byte) bridge.Port {
	p := port(i)
	p.Addresses, p.Routes = p.Addresses[:1], p.Routes[:1]
	return p
}

func TestKernelWithoutIPv6GetsAllElse(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	refusal, inPod := nltest.NoIPv6(), nltest.NoIPv6()
	conn := faultyConn(t, n, []*nltest.Fault{refusal}, []*nltest.Fault{inPod})
	mustRefuse := func(what string, times int) {
		t.Helper()
		expect.Equal(t, refusal.Fired(), times, "after %s the kernel has refused", what)
	}

	l, created, err := ensure(t, conn, bridge.Bridge{Name: "br1", Alias: "ours", NoIPv6: true})
	must.That(t, err == nil && created && l.Up && l.Alias == "ours", "Ensure: %+v, %t, %v", l, created, err)
	mustRefuse("Ensure", 1)

	p := port4(5)
	p.Isolated = true
	pod := nstest.New(t)
	must.Succeed(t, expect.Err(conn.Attach(t.Context(), pod, p)))
	mustRefuse("Attach", 2)
	expect.That(t, inPod.Fired() <= 0, "the pod's side was asked for what the host's had refused")
	expect.Success(t, nstest.Ping(t, pod, nstest.Addr("10.44.0.1")))
	for _, want := range []string{"alias " + p.Alias, "isolated on"} {
		expect.Contains(t, nstest.Run(t, n.ns, "ip", "-d", "link", "show", p.Name), want, "the port")
	}

	p.Alias, p.Isolated = "another", false
	must.Succeed(t, conn.Enslave(t.Context(), p))
	mustRefuse("Enslave", 3)
	out := nstest.Run(t, n.ns, "ip", "-d", "link", "show", p.Name)
	expect.That(t, strings.Contains(out, "alias another") &&
		strings.Contains(out, "isolated off"), "the port is not as it is to be:\n%s", out)
}

func TestKernelWithoutIPv6RefusesPortsThatNeedIt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	autoconf, addressed := port4(6), port4(7)
	autoconf.Autoconf = &bridge.Autoconf{}
	addressed.Addresses = []netip.Prefix{nstest.Prefix("fd44::7/64")}
	addressed.Routes = nil
	for name, p := range map[string]bridge.Port{"autoconf": autoconf, "an address": addressed} {
		t.Run(name, func(t *testing.T) {
			refusal := nltest.NoIPv6()
			nltest.MustHaveFired(t, refusal)
			conn := faultyConn(t, n, []*nltest.Fault{refusal}, nil)
			if _, err := conn.Attach(t.Context(), nstest.New(t), p); !errors.Is(err, bridge.ErrNoIPv6) || !strings.Contains(err.Error(), "ipv6.disable=1") {
				t.Errorf("error is %v, want ErrNoIPv6 with the cause", err)
			}
			expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
		})
	}
}
