package foreign

import (
	"context"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/nstest"
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
// them, beside layouts that would stop pods. First it shows that the rule at the head, which
// earlier versions made, overrides each.
func TestWhatOthersDropStaysDropped(t *testing.T) {
	t.Parallel()
	drop := "iptables -P FORWARD DROP"
	for _, tc := range []struct {
		name   string
		lines  []string
		layout string
		drop   []string
		undrop []string
		head   string // the chain at whose head the rule was
	}{
		{name: "in FORWARD", lines: []string{drop}, drop: []string{"iptables -A FORWARD -d FAR -j DROP"}, undrop: []string{"iptables -D FORWARD -d FAR -j DROP"}, head: "FORWARD"},
		{name: "in FORWARD, before a closing reject", layout: "rhel-7", drop: []string{"iptables -I FORWARD -d FAR -j REJECT"}, undrop: []string{"iptables -D FORWARD -d FAR -j REJECT"}, head: "FORWARD"},
		{name: "in CNI-ADMIN", lines: []string{drop, "iptables -N CNI-FORWARD", "iptables -N CNI-ADMIN", "iptables -A CNI-FORWARD -j CNI-ADMIN", "iptables -A FORWARD -j CNI-FORWARD"},
			drop: []string{"iptables -A CNI-ADMIN -d FAR -j DROP"}, undrop: []string{"iptables -F CNI-ADMIN"}, head: "FORWARD"},
		{name: "in DOCKER-USER of Docker 20.10", layout: "docker-20.10", drop: []string{"iptables -I DOCKER-USER -d FAR -j DROP"}, undrop: []string{"iptables -D DOCKER-USER 1"}, head: "FORWARD"},
		{name: "at the end of DOCKER-USER of Docker 28", layout: "docker-28", drop: []string{"iptables -A DOCKER-USER -d FAR -j DROP"}, undrop: []string{"iptables -F DOCKER-USER"}, head: "DOCKER-USER"},
		{name: "behind Docker's", layout: "docker-26", drop: []string{"iptables -A FORWARD -d FAR -j DROP"}, undrop: []string{"iptables -D FORWARD -d FAR -j DROP"}, head: "DOCKER-USER"},
		{name: "in a chain that rejects the rest", lines: []string{"iptables -N last", "iptables -A last -j REJECT", "iptables -A FORWARD -j last"},
			drop: []string{"iptables -I last -d FAR -j DROP"}, undrop: []string{"iptables -D last 1"}, head: "FORWARD"},
		{name: "by a policy of the reference plugin firewall", lines: []string{drop, "iptables -N CNI-ISOLATION-STAGE-1", "iptables -N CNI-ISOLATION-STAGE-2", "iptables -A FORWARD -j CNI-ISOLATION-STAGE-1", "iptables -A CNI-ISOLATION-STAGE-1 -i cbr0 ! -o cbr0 -j CNI-ISOLATION-STAGE-2"},
			drop: []string{"iptables -A CNI-ISOLATION-STAGE-2 -d FAR -j DROP"}, undrop: []string{"iptables -F CNI-ISOLATION-STAGE-2"}, head: "FORWARD"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			if tc.layout != "" {
				restore(t, s.host, tc.layout)
			}
			nstest.Script(t, s.host, tc.lines...)
			s.podsReach(t, false)
			s.farScript(t, tc.drop...)
			nstest.Script(t, s.host, "iptables -I "+tc.head+" "+ourRule)
			s.podsReach(t, true) // so the drop is void

			if changed, err := s.c.Ensure(context.Background()); err != nil || !changed {
				t.Fatalf("Ensure: %v, %v", changed, err)
			}
			s.podsReach(t, false)
			s.farScript(t, tc.undrop...)
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
	if _, err := c.Ensure(context.Background()); err != nil {
		tb.Fatal(err)
	}
	mustPlace(tb, c, false)
}

func TestLayoutsOfOthersLetPodsPass(t *testing.T) {
	t.Parallel()
	for _, layout := range []string{"docker-20.10", "docker-26", "docker-28", "rhel-7", "rhel-5"} {
		t.Run(layout, func(t *testing.T) {
			t.Parallel()
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

// A drop of what pods send is its owner's: named, and left alone.
func TestDropsOfPodsAheadAreNamed(t *testing.T) {
	t.Parallel()
	const byRule = ` drops or rejects, by its rule number 1, which is left to its owner, what pods send; this helps: iptables -D `
	for _, tc := range []struct {
		name  string
		lines []string
		want  string // for IPv4
	}{
		{name: "by the bridge", lines: []string{"iptables -I FORWARD -i cbr0 -j DROP"}, want: "chain FORWARD of table ip filter" + byRule + "FORWARD 1"},
		{name: "in a chain", lines: []string{"iptables -N mine", "iptables -A mine -i cbr0 -j REJECT", "iptables -I FORWARD -j mine"}, want: "chain mine of table ip filter" + byRule + "mine 1"},
		{name: "under a policy of drop", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cbr0 -j DROP"}, want: "chain FORWARD of table ip filter" + byRule + "FORWARD 1"},
		{name: "in a chain that others call, which drops some before", lines: []string{
			"iptables -N no", "iptables -A no -p udp -j DROP", "iptables -A no -j DROP", "iptables -A FORWARD -i eth9 -j no", "iptables -A FORWARD -j no",
		}, want: "chain no of table ip filter drops or rejects, where an accept would count for all rules that call the chain, or spare packets what it drops before, what pods send; " +
			"this helps: iptables -I FORWARD 2 -m mark --mark 0x1000/0x1000 -j ACCEPT"},
		{name: "by a return to the policy", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cbr0 -j RETURN"},
			want: "chain FORWARD of table ip filter drops, by its policy, what pods send; this helps: iptables -I FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT"},
		{name: "of some of what they send", lines: []string{"iptables -A FORWARD -i cbr0 -p tcp -j DROP", "iptables -A FORWARD -i eth9 -j DROP"}},
		{name: "of others", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i docker0 -j DROP"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			nstest.Script(t, s.host, tc.lines...)
			var want []string
			if tc.want != "" {
				want = []string{tc.want, strings.NewReplacer("iptables", "ip6tables", "table ip ", "table ip6 ").Replace(tc.want)}
			}
			// Before Admit, as after it: STATUS asks on a node without pods too.
			path := Path{Bridge: "cbr0", Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
			found, err := Obstacles(context.Background(), &Config{NetNS: s.host}, path)
			if err != nil {
				t.Fatal(err)
			}
			mustPlaceAnyhow(t, s.c)
			again := wantObstacles(t, s.host, path, want...)
			if diff := cmp.Diff(found, again); diff != "" {
				t.Errorf("before and after Admit (-before +after):\n%s", diff)
			}
			if strings.Contains(tc.name, "some of") {
				return
			}
			s.podsReach(t, len(want) == 0)
			for _, o := range found {
				if o.Kind != IPTables {
					t.Errorf("%s is of kind %s", o, o.Kind)
				}
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
	ns := nstest.New(t)
	nstest.Run(t, ns, "ip", "link", "add", "cbr0", "type", "bridge")
	iptables(t, ns, "ip6tables", "-A", "FORWARD", "-i", "cbr0", "-j", "DROP")
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
		name    string
		lines   []string
		layout  string
		old     string // the chain at whose head an earlier version put it
		stop    []string
		by      string // for IPv4: what stops pods, and what helps
		forPods bool   // what stops is for pods alone, and nothing is put ahead of it
	}{
		{name: "drop", lines: policy, stop: []string{"iptables -I FORWARD -j DROP"}, by: "FORWARD 1 FORWARD 1"},
		{name: "reject, with a comment", lines: policy, stop: []string{"iptables -I FORWARD -m comment --comment panic -j REJECT"}, by: "FORWARD 1 FORWARD 1"},
		{name: "drop behind a log", lines: policy, stop: []string{"iptables -I FORWARD -j DROP", "iptables -I FORWARD -j LOG"}, by: "FORWARD 2 FORWARD 2"},
		{name: "a chain that drops", lines: policy, stop: []string{"iptables -N no", "iptables -A no -j DROP", "iptables -I FORWARD -j no"}, by: "no 1 no 1"},
		{name: "a chain that drops, which INPUT calls too", lines: policy, stop: shared, by: "lock 2 FORWARD 1"},
		{name: "return to the policy", lines: policy, stop: []string{"iptables -I FORWARD -j RETURN"}},
		{name: "drop of what the bridge sends", lines: policy, stop: []string{"iptables -I FORWARD -i cbr0 -j DROP"}, by: "FORWARD 1 FORWARD 1", forPods: true},
		{name: "drop, under a closing reject", layout: "rhel-7", stop: []string{"iptables -I FORWARD -j DROP"}, by: "FORWARD 1 FORWARD 1"},
		{name: "the closing reject, moved ahead", layout: "rhel-7", lines: policy, stop: []string{"iptables -D FORWARD -j REJECT", "iptables -I FORWARD -j REJECT"}, by: "FORWARD 1 FORWARD 1"},
		{name: "drop at the head of DOCKER-USER", layout: "docker-26", stop: []string{"iptables -I DOCKER-USER -j DROP"}, by: "DOCKER-USER 1 DOCKER-USER 1"},
		{name: "drop ahead of an earlier version's", layout: "rhel-7", old: "FORWARD", stop: []string{"iptables -I FORWARD -j DROP"}, by: "FORWARD 1 FORWARD 1"},
		{name: "drop ahead of an earlier version's in DOCKER-USER", layout: "docker-26", old: "DOCKER-USER", stop: []string{"iptables -I FORWARD -j DROP"}, by: "FORWARD 1 FORWARD 1"},
		{name: "drop in DOCKER-USER ahead of an earlier version's", layout: "docker-28", old: "DOCKER-USER", stop: []string{"iptables -I DOCKER-USER -j DROP"}, by: "DOCKER-USER 1 DOCKER-USER 1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			if tc.layout != "" {
				restore(t, s.host, tc.layout)
			}
			nstest.Script(t, s.host, tc.lines...)
			if tc.old != "" {
				nstest.Script(t, s.host, "iptables -I "+tc.old+" "+ourRule)
			} else {
				mustPlace(t, s.c, true)
			}
			s.podsReach(t, true)

			nstest.Script(t, s.host, tc.stop...)
			path := Path{Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
			var want []string
			for _, program := range nstest.Programs() {
				table := strings.ReplaceAll(program, "tables", "")
				line := "chain FORWARD of table " + table + " filter drops, by its policy, what pods send; this helps: " + program + " -I FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT"
				if by := strings.Fields(tc.by); len(by) > 0 {
					line = "chain " + by[0] + " of table " + table + " filter drops or rejects, by its rule number " + by[1] +
						", which is left to its owner, what pods send; this helps: " + program + " -D " + by[2] + " " + by[3]
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
			s.podsReach(t, !tc.forPods)
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

// What ufw's user denies is deleted by ufw, which undoes what iptables does to it.
func TestUfwDeletesWhatItsUserDenies(t *testing.T) {
	t.Parallel()
	known := Path{Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
	for _, tc := range []struct{ chain, rule, want4, want6 string }{
		{chain: "user", rule: "-i cbr0 -j DROP", want4: "ufw route deny in on cbr0 from any && ufw route delete deny in on cbr0 from any"},
		{chain: "user", rule: "-i cb+ -j DROP", want4: "iptables -D ufw-user-forward 1", want6: "ip6tables -D ufw6-user-forward 1"},
		{chain: "user", rule: "! -i eth0 -j DROP", want4: "iptables -D ufw-user-forward 1", want6: "ip6tables -D ufw6-user-forward 1"},
		{chain: "before", rule: "-i cbr0 -j DROP", want4: "iptables -D ufw-before-forward 1", want6: "ip6tables -D ufw6-before-forward 1"},
	} {
		t.Run(tc.chain+" "+tc.rule, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			for program, chain := range map[string]string{"iptables": "ufw-" + tc.chain + "-forward", "ip6tables": "ufw6-" + tc.chain + "-forward"} {
				nstest.Run(t, ns, "sh", "-ec", strings.NewReplacer("PROGRAM", program+"-nft", "CHAIN", chain).Replace(
					"PROGRAM -N CHAIN; PROGRAM -A FORWARD -j CHAIN; PROGRAM -A CHAIN "+tc.rule))
			}
			want := []string{"chain ufw-" + tc.chain + "-forward of table ip filter"}
			if tc.want6 != "" {
				want = append(want, "chain ufw6-"+tc.chain+"-forward of table ip6 filter")
			}
			for i, o := range wantObstacles(t, ns, known, want...) {
				if want := []string{tc.want4, tc.want6}[i]; o.Remedy != want {
					t.Errorf("advised is %s, want %s", o.Remedy, want)
				}
			}
		})
	}
}
