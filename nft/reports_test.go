package nft

import (
	"strconv"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// inGroup puts the other pod's port into a group of links.
func (s *guardSite) inGroup(tb testing.TB, group int) {
	tb.Helper()
	nstest.Run(tb, s.host, "ip", "link", "set", "veth2", "group", strconv.Itoa(group))
}

func TestReportsKeepAwayFromPodsThatDoNotReadThem(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	report, rest := namedFrame{}, decent()
	for i, f := range rest {
		if f.name == "multicast listener report" {
			report = f
		}
		if strings.HasPrefix(f.name, "multicast listener report") && !strings.Contains(f.name, "version 1") {
			rest[i].frame = nil
		}
	}
	s.inGroup(t, PodGroup)
	s.want(t, []namedFrame{report}, true)
	s.network.DropReports = true
	mustEnsure(t, s.c, s.network)
	wantReady(t, s.c, s.network)
	s.want(t, []namedFrame{report}, false)
	for _, f := range rest {
		if f.frame != nil {
			s.want(t, []namedFrame{f}, true)
		}
	}
	s.inGroup(t, 0)
	s.want(t, []namedFrame{report}, true)
	s.inGroup(t, PodGroup)
	s.network.DropReports = false
	mustEnsure(t, s.c, s.network)
	s.want(t, []namedFrame{report}, true)
}

func TestBridgeReadsReportsThatItKeepsFromPods(t *testing.T) {
	t.Parallel()
	s := newGuardSite(t)
	s.network.DropReports = true
	mustEnsure(t, s.c, s.network)
	s.inGroup(t, PodGroup)
	nstest.Run(t, s.host, "ip", "link", "set", "cbr0", "type", "bridge", "mcast_snooping", "1")
	nstest.Run(t, s.pod, "ip", "address", "add", "fd00:77::77/64", "dev", "eth0", "nodad")
	const group = "ff02::1:ff00:77"
	must.Until(t, "the bridge knows of a port with "+group, func() bool {
		return strings.Contains(nstest.Run(t, s.host, "bridge", "mdb", "show", "dev", "cbr0"), group)
	})
}

func TestNetworksAreQuietByThemselves(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	c := dial(t, ns)
	a, b := Network{Name: "a", Bridge: "cbr0", DropReports: true}, Network{Name: "b", Bridge: "br1", DropReports: true}
	mustEnsure(t, c, a)
	mustEnsure(t, c, b)
	wantReady(t, c, a)
	must.Succeed(t, c.RemoveNetwork(t.Context(), "a"))
	wantReady(t, c, b)
	out := nft(t, ns, "list", "ruleset")
	expect.That(t, !strings.Contains(out, "quiet-a"), "something of a network is left that was removed:\n%s", out)
	must.Succeed(t, c.RemoveNetwork(t.Context(), "b"))
	expect.Equal(t, nft(t, ns, "list", "ruleset"), "", "after both are removed")
}
