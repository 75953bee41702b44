package uplink_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// Routes of a routing engine move with the NIC. What the engine withdraws afterwards stays away.
func TestWhatARoutingEngineWithdrawsIsNotPutBack(t *testing.T) {
	t.Parallel()
	l := newLAN(t, append(plainHost(),
		"route add 172.20.0.0/16 via 10.0.0.1 proto bird metric 32", "-6 route add fd55::/32 via fd00::1 proto bird metric 32",
		"route add 172.21.0.0/16 via 10.0.0.1 proto bgp metric 20",
		"route add 172.22.0.0/16 via 10.0.0.1 proto static")...)
	engines := func() []string {
		t.Helper()
		var list []string
		for line := range strings.Lines(nstest.Run(t, l.host, "sh", "-ec", "ip route; ip -6 route")) {
			if slices.ContainsFunc([]string{"bird", "bgp"}, func(p string) bool { return strings.Contains(line, " proto "+p) }) {
				list = append(list, strings.TrimSpace(line))
			}
		}
		return list
	}
	before := engines()
	rec, j := take(t, l, toBridge())
	moved := engines()
	must.That(t, len(before) == 3 && len(moved) == 3 && strings.Count(strings.Join(moved, "\n"), " dev br0 ") == 3,
		"of the engine there were %q, and are %q", before, moved)
	run(t, l.host, "route del 172.20.0.0/16 dev br0", "-6 route del fd55::/32 dev br0", "route del 172.21.0.0/16")
	l.mustBeTaken(t, "withdrawn", rec)
	expect.Of(l.conn.Mend(t.Context(), rec, j)).Is(t, false, "mend after the engine withdrew its routes")
	// Others' routes are put back, and the engine's are not with them.
	run(t, l.host, "route del 172.22.0.0/16")
	expect.Of(l.conn.Mend(t.Context(), rec, j)).Is(t, true, "mend after a static route went")
	now := engines()
	expect.That(t, len(now) == 0, "a repair put back %q", now)
	// What the engine announces by the bridge comes along to the NIC.
	run(t, l.host, "route add 172.20.0.0/16 via 10.0.0.1 dev br0 proto bird metric 32")
	must.Succeed(t, l.conn.Restore(t.Context(), rec, j))
	if now := engines(); len(now) != 1 || !strings.Contains(now[0], "172.20.0.0/16 via 10.0.0.1 dev eth0 proto bird") {
		t.Errorf("after the NIC was given back there are %q", now)
	}
}
