package uplink_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// interrupted is a mend that is killed: what happened to the host since the takeover, and
// what has to be so when somebody has finished it.
type interrupted struct {
	name  string
	since func(testing.TB, *lan)
	wants map[string]string // commands, and what they print among other things
}

func interruptions() []interrupted {
	return []interrupted{
		{
			// The bridge's parameters are their owner's matter by now.
			name: "the bridge is there",
			since: func(tb testing.TB, l *lan) {
				for path, value := range map[string]string{
					"ipv4/conf/br0/send_redirects": "0", "ipv4/conf/br0/rp_filter": "1", "ipv4/conf/br0/accept_local": "1",
					"ipv4/neigh/br0/mcast_solicit": "5", "ipv4/conf/eth0/send_redirects": "1", "ipv4/conf/eth0/rp_filter": "0",
				} {
					nstest.Sysctl(tb, l.host, "net/"+path, value)
				}
				run(tb, l.host, "link set br0 mtu 1400", "link set eth0 nomaster")
			},
			wants: map[string]string{
				"sysctl -n net.ipv4.conf.br0.send_redirects": "0",
				"sysctl -n net.ipv4.conf.br0.rp_filter":      "1",
				"sysctl -n net.ipv4.conf.br0.accept_local":   "1",
				"sysctl -n net.ipv4.neigh.br0.mcast_solicit": "5",
				"ip -o link show dev br0":                    " mtu 1400 ",
			},
		},
		{
			// What it had is nowhere but on record, and the NIC is another by now.
			name: "the bridge is gone",
			since: func(tb testing.TB, l *lan) {
				run(tb, l.host, "link del br0", "link set eth0 mtu 1400", "link set eth0 address 02:00:0a:00:00:55")
				nstest.Sysctl(tb, l.host, "net/ipv4/conf/eth0/forwarding", "1")
			},
			wants: map[string]string{
				"sysctl -n net.ipv4.conf.br0.forwarding": "1",
				"ip -o link show dev br0":                " mtu 1400 ",
				"ip -br link show dev br0":               " 02:00:0a:00:00:55 ",
			},
		},
	}
}

func TestAMendThatIsKilledIsFinishedAsItWasBegun(t *testing.T) {
	t.Parallel()
	for _, in := range interruptions() {
		t.Run(in.name, func(t *testing.T) {
			t.Parallel()
			n, step := strides(t)
			for in.dies(t, n) && step > 0 {
				n += step
			}
			// Each step, and the end of it.
			expect.That(t, n >= 9 || step <= 0, "it came to its end at %d", n)
		})
	}
}

// dies kills the mend at the n-th call of its journal, and has somebody finish it; it is
// false if it came to its end before. Either way all is as it has to be.
func (in *interrupted) dies(t *testing.T, n int) bool {
	t.Helper()
	// One of its addresses is leased: nobody but the one who sees that the bridge has gone
	// knows that it is to come back.
	l := newLAN(t, append(plainHost(), "addr add 10.0.0.8/24 dev eth0 valid_lft 3600 preferred_lft 3600")...)
	journal := filepath.Join(t.TempDir(), "journal")
	must.That(t, !l.killAt(t, "take", 0, journal), "killed too early")
	in.since(t, l)
	killed := l.killAt(t, "mend", n, journal)
	rec := loadRecord(t, journal)
	when := fmt.Sprintf("killed at %d, %s, step %q", n, rec.State, rec.Step)
	rec, err := l.conn.Recover(t.Context(), rec, &mortal{path: journal})
	must.Succeed(t, err, "%s: recover", when)
	l.mustReach(t, when+", recovered")
	l.mustBeTaken(t, when, rec)
	expect.That(t, !loadRecord(t, journal).Mending, "%s: finished, and still mending", when)
	for command, want := range in.wants {
		args := strings.Fields(command)
		expect.Contains(t, nstest.Run(t, l.host, args[0], args[1:]...), want, "%s: %s", when, command)
	}
	if out := nstest.Run(t, l.host, "ip", "-4", "addr", "show", "dev", "br0"); !strings.Contains(out, "10.0.0.5/24") || !strings.Contains(out, "10.0.0.8/24") {
		t.Errorf("%s: not all addresses are back:\n%s", when, out)
	}
	return killed
}
