package foreign

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// podsReach says whether the pod reaches elsewhere. Nobody reaches the pod unasked.
func (s *site) podsReach(tb testing.TB, want bool) {
	tb.Helper()
	var all sync.WaitGroup
	for _, to := range []string{far4, far6} {
		all.Go(func() { nstest.Reaches(tb, s.pod, to, want) })
	}
	for _, to := range []string{pod4, pod6} {
		all.Go(func() { nstest.Reaches(tb, s.outside, to, false) })
	}
	all.Wait()
}

func TestForwardPolicyOfDropDoesNotStopPods(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		lines []string
	}{
		{"a policy", []string{"iptables -P FORWARD DROP"}},
		{"a rule", []string{"iptables -A FORWARD -j REJECT"}},
		{"Docker", docker()},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			s := newSite(t)
			s.podsReachBefore(t)
			nstest.Script(t, s.host, tc.lines...)
			s.podsReach(t, false)
			mustPlace(t, s.c, true)
			s.podsReach(t, true)
			nstest.Script(t, s.host, saveRestore)
			s.podsReach(t, true)
			wantObstacles(t, s.host, Path{})

			nstest.Script(t, s.host, "iptables -F", "iptables -P FORWARD DROP")
			s.podsReach(t, false)
			wantReady(t, s.c, false)
			mustPlace(t, s.c, true)
			s.podsReach(t, true)
			must.Succeed(t, s.c.Remove(context.Background()))
			s.podsReach(t, false)
		})
	}
}

// podsReachBefore shows that without a firewall in the way everybody reaches
// everybody, so that what does not later on is the firewall's doing.
func (s *site) podsReachBefore(tb testing.TB) {
	tb.Helper()
	for _, to := range []string{pod4, pod6} {
		nstest.Reaches(tb, s.outside, to, true)
	}
}

func TestRemedyForLegacyIPTablesHelpsPods(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	legacy(t, s.host, "iptables -P FORWARD DROP")
	s.podsReach(t, false)
	mustPlace(t, s.c, false)
	s.podsReach(t, false)
	for _, o := range wantObstacles(t, s.host, Path{}, policyLegacy, strings.Replace(policyLegacy, "iptables", "ip6tables", 1)) {
		nstest.Run(t, s.host, "sh", "-ec", o.Remedy)
	}
	s.podsReach(t, true)
}

func TestRemediesForOtherChainsHelpPods(t *testing.T) {
	t.Parallel()
	for name, ruleset := range map[string]string{
		"behind ours":        "table inet x { chain f { type filter hook forward priority filter; policy drop; }; }",
		"before ours":        "table inet x { chain f { type filter hook forward priority -200; policy drop; }; }",
		"of ip, before ours": "table ip x { chain f { type filter hook forward priority raw; reject; }; }; table ip6 x { chain f { type filter hook forward priority raw; reject; }; }",
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			s := newSite(t)
			nftables(t, s.host, ruleset)
			s.podsReach(t, false)
			list := obstacles(t, s.host, Path{})
			must.That(t, len(list) > 0, "nothing is in the way")
			for _, o := range list {
				nstest.Run(t, s.host, "sh", "-ec", o.Remedy)
			}
			wantObstacles(t, s.host, Path{})
			s.podsReach(t, true)
		})
	}
}

// What firewalld makes does to packets what Obstacles says.
func TestFirewalldStopsPods(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	nftables(t, s.host, firewalldFixture(t))
	s.podsReach(t, false)
	// Neither does it help that the bridge is named where that counts for others, or for what comes in.
	nftables(t, s.host, `add rule inet firewalld filter_FWD_public_deny iifname . oifname { "cbr0" . "up1" } drop`+"\n"+`insert rule inet firewalld filter_INPUT_ZONES iifname "cbr0" accept`)
	s.podsReach(t, false)
	// The remedy, as firewalld carries it out.
	nftables(t, s.host, "add chain inet firewalld filter_FWD_trusted { accept; }\n"+
		`insert rule inet firewalld filter_FORWARD_ZONES iifname "cbr0" goto filter_FWD_trusted`)
	s.podsReach(t, true)
	wantObstacles(t, s.host, Path{Prefixes: []netip.Prefix{nstest.Prefix("10.22.0.0/16")}})
}
