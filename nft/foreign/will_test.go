package foreign

import (
	"context"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// farScript runs lines for both families, with FAR for where pods send to.
func (s *site) farScript(tb testing.TB, lines ...string) {
	tb.Helper()
	for program, far := range map[string]string{"iptables": far4, "ip6tables": far6} {
		for _, line := range lines {
			nstest.Run(tb, s.host, "sh", "-ec", strings.NewReplacer("iptables", program+"-nft", "FAR", far).Replace(line))
		}
	}
}

// TestWhatOthersDropStaysDropped has drops in the places where operators and programs put
// them, beside layouts that would stop pods. First it shows that the rule at the head
// overrides each.
func TestWhatOthersDropStaysDropped(t *testing.T) {
	t.Parallel()
	drop := "iptables -P FORWARD DROP"
	for _, tc := range []struct {
		name   string
		lines  []string
		layout string
		drop   []string
		undrop []string
		again  bool // once the drop is gone, the rule is put in its place again
	}{
		{name: "in FORWARD", lines: []string{drop}, drop: []string{"iptables -A FORWARD -d FAR -j DROP"}, undrop: []string{"iptables -D FORWARD -d FAR -j DROP"}},
		{name: "in FORWARD, before a closing reject", layout: "rhel-7", drop: []string{"iptables -I FORWARD -d FAR -j REJECT"}, undrop: []string{"iptables -D FORWARD -d FAR -j REJECT"}},
		{name: "in CNI-ADMIN", lines: []string{drop, "iptables -N CNI-FORWARD", "iptables -N CNI-ADMIN", "iptables -A CNI-FORWARD -j CNI-ADMIN", "iptables -A FORWARD -j CNI-FORWARD"},
			drop: []string{"iptables -A CNI-ADMIN -d FAR -j DROP"}, undrop: []string{"iptables -F CNI-ADMIN"}},
		{name: "in DOCKER-USER of Docker 20.10", layout: "docker-20.10", drop: []string{"iptables -I DOCKER-USER -d FAR -j DROP"}, undrop: []string{"iptables -D DOCKER-USER 1"}},
		{name: "at the end of DOCKER-USER of Docker 28", layout: "docker-28", drop: []string{"iptables -A DOCKER-USER -d FAR -j DROP"}, undrop: []string{"iptables -F DOCKER-USER"}},
		{name: "behind Docker's", layout: "docker-26", drop: []string{"iptables -A FORWARD -d FAR -j DROP"}, undrop: []string{"iptables -D FORWARD -d FAR -j DROP"}},
		{name: "in a chain that rejects the rest", lines: []string{"iptables -N last", "iptables -A last -j REJECT", "iptables -A FORWARD -j last"},
			drop: []string{"iptables -I last -d FAR -j DROP"}, undrop: []string{"iptables -D last 1"}, again: true},
		{name: "by a policy of the reference plugin firewall", lines: []string{drop, "iptables -N CNI-ISOLATION-STAGE-1", "iptables -N CNI-ISOLATION-STAGE-2", "iptables -A FORWARD -j CNI-ISOLATION-STAGE-1", "iptables -A CNI-ISOLATION-STAGE-1 -i cbr0 ! -o cbr0 -j CNI-ISOLATION-STAGE-2"},
			drop: []string{"iptables -A CNI-ISOLATION-STAGE-2 -d FAR -j DROP"}, undrop: []string{"iptables -F CNI-ISOLATION-STAGE-2"}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			s := newSite(t)
			if tc.layout != "" {
				restore(t, s.host, tc.layout)
			}
			nstest.Script(t, s.host, tc.lines...)
			s.podsReach(t, false)
			s.farScript(t, tc.drop...)
			insertOurs(t, s.host)
			s.podsReach(t, true) // so the drop is void

			changed, err := s.c.Ensure(context.Background())
			must.That(t, err == nil && changed, "Ensure: %v, %v", changed, err)
			s.podsReach(t, false)
			s.farScript(t, tc.undrop...)
			if tc.again {
				mustPlace(t, s.c, true)
			}
			s.podsReach(t, true)
			// And again behind ours, if it comes later.
			s.farScript(t, tc.drop...)
			mustPlaceAnyhow(t, s.c)
			s.podsReach(t, false)
			s.farScript(t, tc.undrop...)
			mustPlaceAnyhow(t, s.c)
			s.podsReach(t, true)
			wantObstacles(t, s.host, Path{Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")})
		})
	}
}

func mustPlaceAnyhow(tb testing.TB, c *Conn) {
	tb.Helper()
	must.Succeed(tb, expect.Err(c.Ensure(context.Background())))
	mustPlace(tb, c, false)
}

func TestLayoutsOfOthersLetPodsPass(t *testing.T) {
	t.Parallel()
	for _, layout := range []string{"docker-20.10", "docker-26", "docker-28", "rhel-7", "rhel-5"} {
		nstest.RunParallel(t, layout, func(t *testing.T) {
			s := newSite(t)
			restore(t, s.host, layout)
			s.podsReach(t, false)
			mustPlace(t, s.c, true)
			s.podsReach(t, true)
			if strings.HasPrefix(layout, "docker") {
				// dockerd takes its calls out and inserts them anew when it starts.
				for _, chain := range []string{"DOCKER-ISOLATION-STAGE-1", "DOCKER-FORWARD", "DOCKER-USER"} {
					nstest.Script(t, s.host, "! iptables -D FORWARD -j "+chain+" 2>/dev/null || iptables -I FORWARD -j "+chain)
				}
				mustPlace(t, s.c, false)
				s.podsReach(t, true)
			}
			wantObstacles(t, s.host, Path{Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")})
		})
	}
}

// A drop of everything that Ensure leaves to its owner is named, with a command that helps.
func TestDropsAheadAreNamed(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		lines []string
		want  string // for IPv4
	}{
		{name: "in a chain that drops some before", lines: []string{
			"iptables -N no", "iptables -A no -p udp -j DROP", "iptables -A no -j DROP", "iptables -A FORWARD -i eth9 -j no", "iptables -A FORWARD -j no",
		}, want: "chain FORWARD of table ip filter drops or rejects, by its rule number 2, which calls no and is left to its owner, what pods send; " +
			"this helps: iptables -I FORWARD 2 -m mark --mark 0x10/0x10 -j ACCEPT"},
		{name: "of some of what they send", lines: []string{"iptables -A FORWARD -i cbr0 -p tcp -j DROP", "iptables -A FORWARD -i eth9 -j DROP"}},
		{name: "of others", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i docker0 -j DROP"}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			s := newSite(t)
			nstest.Script(t, s.host, tc.lines...)
			var want []string
			if tc.want != "" {
				want = []string{tc.want, strings.NewReplacer("iptables", "ip6tables", "table ip ", "table ip6 ").Replace(tc.want)}
			}
			// Before Ensure, as after it: STATUS asks on a node without pods too.
			path := Path{Bridge: "cbr0", Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
			found := obstacles(t, s.host, path)
			mustPlaceAnyhow(t, s.c)
			again := wantObstacles(t, s.host, path, want...)
			expect.Equal(t, cmp.Diff(found, again), "", "before and after Ensure (-before +after)")
			if strings.Contains(tc.name, "some of") {
				return
			}
			s.podsReach(t, len(want) == 0)
			for _, o := range found {
				expect.That(t, !o.Firewalld && !o.Legacy, "it is another kind: %+v", o)
				nstest.Run(t, s.host, "sh", "-ec", strings.ReplaceAll(o.Remedy, "tables -", "tables-nft -"))
			}
			if len(found) > 0 {
				mustPlaceAnyhow(t, s.c)
				wantObstacles(t, s.host, path)
				for _, to := range []string{far4, far6} {
					nstest.Reaches(t, s.pod, to, true)
				}
			}
		})
	}
}

// A chain that drops nothing pods send is no obstacle in another family's table, nor for pods
// without that family.
func TestDropsAheadCountForTheirFamily(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	nstest.Run(t, ns, "ip", "link", "add", "cbr0", "type", "bridge")
	iptables(t, ns, "ip6tables", "-A", "FORWARD", "-j", "DROP")
	mustPlace(t, dial(t, ns), true)
	iptables(t, ns, "ip6tables", "-I", "FORWARD", "-j", "DROP")
	wantObstacles(t, ns, Path{Bridge: "cbr0", Prefixes: []netip.Prefix{nstest.Prefix("10.22.0.0/16")}})
	if len(wantObstacles(t, ns, Path{Bridge: "cbr0"},
		"chain FORWARD of table ip6 filter drops or rejects, by its rule number 1, which is left to its owner, what pods send; this helps: ip6tables -D FORWARD 1")) != 1 {
		t.Error("not named")
	}
}

// TestADropOfAllAheadOfOursStaysInForce has an operator stop everything at once, ahead of our
// rule. Without that rule, and so if it were made anew there, pods pass.
func TestADropOfAllAheadOfOursStaysInForce(t *testing.T) {
	t.Parallel()
	policy := []string{"iptables -P FORWARD DROP"}
	shared := []string{"iptables -N lock", "iptables -A lock -i mgmt -j ACCEPT", "iptables -A lock -j DROP", "iptables -I INPUT -i eth9 -j lock", "iptables -I FORWARD -j lock"}
	for _, tc := range []struct {
		name   string
		lines  []string
		layout string
		stop   []string
		by     int    // which rule of FORWARD stops pods; 0: the policy
		calls  string // the chain that it calls
	}{
		{name: "drop", lines: policy, stop: []string{"iptables -I FORWARD -j DROP"}, by: 1},
		{name: "reject, with a comment", lines: policy, stop: []string{"iptables -I FORWARD -m comment --comment panic -j REJECT"}, by: 1},
		{name: "drop behind a log", lines: policy, stop: []string{"iptables -I FORWARD -j DROP", "iptables -I FORWARD -j LOG"}, by: 2},
		{name: "a chain that drops", lines: policy, stop: []string{"iptables -N no", "iptables -A no -j DROP", "iptables -I FORWARD -j no"}, by: 1, calls: "no"},
		{name: "a chain that drops, which INPUT calls too", lines: policy, stop: shared, by: 1, calls: "lock"},
		{name: "drop, under a closing reject", layout: "rhel-7", stop: []string{"iptables -I FORWARD -j DROP"}, by: 1},
		{name: "the closing reject, moved ahead", layout: "rhel-7", lines: policy, stop: []string{"iptables -D FORWARD -j REJECT", "iptables -I FORWARD -j REJECT"}, by: 1},
		{name: "drop at the head of DOCKER-USER", layout: "docker-26", stop: []string{"iptables -I DOCKER-USER -j DROP"}, by: 1, calls: "DOCKER-USER"},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			s := newSite(t)
			if tc.layout != "" {
				restore(t, s.host, tc.layout)
			}
			nstest.Script(t, s.host, tc.lines...)
			mustPlace(t, s.c, true)
			s.podsReach(t, true)

			nstest.Script(t, s.host, tc.stop...)
			path := Path{Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
			var want []string
			for _, program := range nstest.Programs() {
				table := strings.ReplaceAll(program, "tables", "")
				number := strconv.Itoa(tc.by)
				accept := " -m mark --mark 0x10/0x10 -j ACCEPT"
				line := "chain FORWARD of table " + table + " filter drops or rejects, by its rule number " + number +
					", which calls " + tc.calls + " and is left to its owner, what pods send; this helps: " + program + " -I FORWARD " + number + accept
				if tc.calls == "" {
					line = "chain FORWARD of table " + table + " filter drops or rejects, by its rule number " + number +
						", which is left to its owner, what pods send; this helps: " + program + " -D FORWARD " + number
				}
				want = append(want, line)
			}
			for _, meanwhile := range []string{"", saveRestore} {
				if meanwhile != "" {
					nstest.Script(t, s.host, meanwhile)
				}
				mustPlaceAnyhow(t, s.c)
				s.podsReach(t, false)
				wantObstacles(t, s.host, path, want...)
			}
			// An operator that wants ours ahead of it deletes ours, and has it made anew. That is also what
			// a place that goes by the drop alone would come to.
			file := filepath.Join(t.TempDir(), "iptables")
			nstest.Script(t, s.host, "iptables-save -t filter >"+file, "grep -v tombolo "+file+" | iptables-restore")
			s.podsReach(t, false)
			mustPlace(t, s.c, true)
			s.podsReach(t, true)
			nstest.Script(t, s.host, "iptables-restore <"+file)
			s.podsReach(t, false)

			for _, o := range wantObstacles(t, s.host, path, want...) {
				nstest.Run(t, s.host, "sh", "-ec", strings.ReplaceAll(o.Remedy, "tables -", "tables-nft -"))
			}
			s.podsReach(t, true)
			mustPlaceAnyhow(t, s.c)
			wantObstacles(t, s.host, path)
			s.podsReach(t, true)
		})
	}
}
