package uplink_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A journal that fails at its n-th save, and a context that ends there, have the steps so far undone.
func TestWhatCannotGoOnIsUndone(t *testing.T) {
	t.Parallel()
	full := errors.New("no space left")
	for n := 1; n <= 7; n++ {
		for _, want := range []error{full, context.Canceled} {
			if want == context.Canceled && n > 5 {
				continue
			}
			t.Run(fmt.Sprintf("%v at save %d", want, n), func(t *testing.T) {
				t.Parallel()
				l := newLAN(t)
				before := state(t, l.host)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				j := memory{onSave: func(i int) error {
					switch {
					case i == n && want == full:
						return full
					case i == n:
						cancel()
					}
					return nil
				}}
				rec, err := l.conn.Take(ctx, toBridge(), &j)
				must.That(t, errors.Is(err, want) && rec == nil, "take: %v, %v, want %v", rec, err, want)
				l.mustReach(t, "afterwards")
				expect.NoDiff(t, cmp.Diff(before, state(t, l.host)), "the host in the end")
			})
		}
	}
}

func TestABridgeWithOtherPortsStays(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	rec, j := take(t, l, toBridge())
	run(t, l.host, "link add port0 type veth peer name port1", "link set port0 master br0 up")
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	l.mustReach(t, "given back")
	shown := nstest.Run(t, l.host, "ip", "-4", "addr", "show", "dev", "br0")
	expect.That(t, !strings.Contains(shown, "inet"), "the bridge still has addresses:\n%s", shown)
	expect.Contains(t, nstest.Run(t, l.host, "ip", "link", "show", "master", "br0"), "port0", "the other port is gone")
}

func TestParametersComeAlong(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	want := map[string]string{
		"ipv4/conf/%s/rp_filter": "1", "ipv4/conf/%s/arp_filter": "1", "ipv4/conf/%s/arp_announce": "2", "ipv4/conf/%s/promote_secondaries": "1",
		"ipv6/conf/%s/accept_ra": "0", "ipv6/conf/%s/hop_limit": "33", "ipv4/neigh/%s/base_reachable_time_ms": "12000", "ipv6/neigh/%s/gc_stale_time": "77",
	}
	for path, value := range want {
		nstest.Sysctl(t, l.host, "net/"+fmt.Sprintf(path, "eth0"), value)
	}
	rec, j := take(t, l, toBridge())
	l.mustReach(t, "with strict parameters")
	for path, value := range want {
		if got := nstest.Sysctl(t, l.host, "net/"+fmt.Sprintf(path, "br0")); got != value {
			t.Errorf("%s is %s, want %s", fmt.Sprintf(path, "br0"), got, value)
		}
	}
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	l.mustReach(t, "given back")
	for path, value := range want {
		if got := nstest.Sysctl(t, l.host, "net/"+fmt.Sprintf(path, "eth0")); got != value {
			t.Errorf("%s is %s after it was given back, want %s", fmt.Sprintf(path, "eth0"), got, value)
		}
	}
}

func TestANICThatIsGoneIsNoReasonToKeepTheBridge(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	rec, j := take(t, l, toBridge())
	run(t, l.host, "link del eth0")
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	expect.Failure(t, expect.Err(nstest.Try(l.host, "ip", "link", "show", "br0")), "the bridge is still there")
	expect.Failure(t, expect.Err(j.load()), "the journal is still there")
}
