package lan

import (
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// said gives the time of the keeper's last line with some words, by its own clock.
func (k *keeper) said(words string) (time.Time, bool) {
	k.Helper()
	all := regexp.MustCompile(`(?m)^time=(\S+) .*`+words).FindAllStringSubmatch(nstest.ReadIf(k, k.log), -1)
	if len(all) == 0 {
		return time.Time{}, false
	}
	at := must.Of(time.Parse(time.RFC3339, all[len(all)-1][1])).Get(k)
	return at, true
}

// wantAhead fails the test unless the keeper said something by a clock that is so far ahead of the machine's.
func (k *keeper) wantAhead(words string, by time.Duration) {
	k.Helper()
	at, ok := k.said(words)
	if is := time.Until(at); !ok || (is-by).Abs() > by.Abs()/2 {
		k.Fatalf("the keeper's clock is %v ahead as it says %q (%t), want %v: it was not set", is, words, ok, by)
	}
}

func TestNoLeaseFollowsAClockThatIsSet(t *testing.T) {
	t.Parallel()
	const t1 = 20 * time.Second // dnsmasq makes it up to 2 s less
	for name, by := range map[string]time.Duration{"an hour forward": time.Hour, "an hour back": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, d := newLab(t)
			d.Stop()
			d.start(fmt.Sprintf("--dhcp-option=option:T1,%d", t1/time.Second))
			s := &leasing{network: l.network(kept(nil)), d: d}
			var clock *nstest.WallClock
			k := s.keeperBy(func(cmd *exec.Cmd) { clock = nstest.StartWithClock(t, l.host.ns, cmd) })
			p := s.add(l.newPod("a", published()...))
			entries, mac := s.trace(p.ip4), macOf(t, p.place, nic)
			must.That(t, entries != "", "the host's rules do not name the pod")
			keeps := func(when string) leaseEntry {
				t.Helper()
				e := s.leaseOf(p)
				expect.That(t, e.State == lease.Bound && e.Error == "" && e.Left > 0 && e.Left <= 3600,
					"%s, the lease is %+v", when, e)
				expect.Contains(t, nstest.Run(t, p.ns, "ip", "-4", "-o", "address", "show", "dev", nic), p.ip4.String(),
					"%s, the pod has", when)
				expect.Equal(t, s.trace(p.ip4), entries, "%s, the host's rules that name the pod", when)
				s.check(p)
				return e
			}

			clock.Set(by)
			was, heard := keeps("when the clock was set"), len(d.messages(mac))
			d.renewed(mac, heard)
			must.Until(l, "the keeper knows", func() bool { _, ok := k.said("lease renewed"); return ok })
			k.wantAhead("lease renewed", by)
			if is := keeps("renewed"); is.Expire.Sub(was.Expire) < t1/2 {
				t.Errorf("renewed before its time: it ended at %s, and now ends at %s", was.Expire, is.Expire)
			}

			d.Stop()
			must.Until(l, "the keeper finds no server", func() bool { _, ok := k.said("no server renews the lease yet"); return ok })
			k.wantAhead("no server renews the lease yet", by)
			keeps("without a server")
		})
	}
}

// repair runs tombolo repair, which leaves nothing of what it says that it repairs. Without a
// keeper, and with pods that are half made, other differences are left.
func (n *network) repair() {
	n.Helper()
	n.repairBut(nil)
}

// repairBut is repair that may leave what one pod lacks.
func (n *network) repairBut(p *pod) {
	n.Helper()
	out, err := n.exec("tombolo", nil, nil, "repair", "--state", n.state)
	var exit *exec.ExitError
	if err == nil || errors.As(err, &exit) && exit.ExitCode() == 4 && !leavesMore(out, p) {
		return
	}
	n.Fatalf("tombolo repair: %v", err)
}

// leavesMore says whether something is left that a repair would mend, but for a pod's.
func leavesMore(out string, p *pod) bool {
	for line := range strings.Lines(out) {
		if strings.Contains(line, "[repair]") && (p == nil || !strings.Contains(line, "container "+p.id+",")) {
			return true
		}
	}
	return false
}
