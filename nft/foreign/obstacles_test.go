package foreign

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// obstacles looks for obstacles to pods on the bridge cbr0.
func obstacles(tb testing.TB, ns *netns.NS, path Path) (list []Obstacle) {
	tb.Helper()
	path.Bridge = "cbr0"
	c := dial(tb, ns)
	must.Succeed(tb, ns.Do(func() (err error) {
		list, err = c.Obstacles(context.Background(), path)
		return err
	}))
	return list
}

// wantObstacles compares them by the start of what they say.
func wantObstacles(tb testing.TB, ns *netns.NS, path Path, want ...string) []Obstacle {
	tb.Helper()
	list := obstacles(tb, ns, path)
	var got []string
	for i, o := range list {
		line := o.String()
		if strings.Contains(line, "\n") || !strings.Contains(line, o.Remedy) && !o.Maybe || !strings.Contains(line, o.Chain) {
			tb.Errorf("%q", line)
		}
		if i < len(want) && strings.HasPrefix(line, want[i]) {
			line = want[i]
		}
		got = append(got, line)
	}
	expect.NoDiff(tb, cmp.Diff(want, got), "obstacles")
	return list
}

func legacy(tb testing.TB, ns *netns.NS, lines ...string) {
	tb.Helper()
	for _, program := range nstest.Programs() {
		for _, line := range lines {
			nstest.Run(tb, ns, "sh", "-ec", strings.ReplaceAll(line, "iptables", program+"-legacy"))
		}
	}
}

const (
	policyLegacy = "chain FORWARD of iptables-legacy drops, by its policy, what pods send"
	ruleLegacy   = "chain FORWARD of iptables-legacy drops or rejects, by its rule number "
	mayLegacy    = "chain FORWARD of iptables-legacy may drop what pods send; if it does, this helps: iptables-legacy -"
)

func TestLegacyIPTablesInTheWay(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		lines []string
		want  string
	}{
		{name: "a policy of DROP", lines: []string{"iptables -P FORWARD DROP"}, want: policyLegacy},
		{name: "a policy of ACCEPT", lines: []string{"iptables -P FORWARD ACCEPT"}},
		{name: "a drop of all", lines: []string{"iptables -A FORWARD -j DROP"}, want: ruleLegacy},
		{name: "a reject of all", lines: []string{"iptables -A FORWARD -p tcp -j DROP", "iptables -A FORWARD -j REJECT"}, want: ruleLegacy},
		{name: "a reject of all, behind an accept of some", lines: []string{"iptables -A FORWARD -i eth0 -j ACCEPT", "iptables -A FORWARD -j REJECT"}, want: mayLegacy},
		{name: "a drop with a comment", lines: []string{"iptables -A FORWARD -m comment --comment all -j DROP"}, want: ruleLegacy},
		{name: "an accept before it", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -j ACCEPT"}},
		{name: "a chain", lines: []string{"iptables -P FORWARD DROP", "iptables -N none", "iptables -A FORWARD -j none"}, want: mayLegacy},
		{name: "Docker's own", lines: []string{
			"iptables -P FORWARD DROP", "iptables -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "iptables -A FORWARD -i docker0 ! -o docker0 -j ACCEPT",
		}, want: mayLegacy},

		{name: "the mark is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -m mark --mark 0x10/0x10 -j ACCEPT"}},
		{name: "what has not the mark is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -m mark ! --mark 0x10/0x10 -j ACCEPT"}, want: policyLegacy},
		{name: "the mark is accepted of one protocol", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -p tcp -m mark --mark 0x10/0x10 -j ACCEPT"}, want: mayLegacy},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			ns := nstest.New(t)
			legacy(t, ns, tc.lines...)
			var want []string
			if tc.want != "" {
				want = []string{tc.want, strings.ReplaceAll(tc.want, "iptables", "ip6tables")}
			}
			found := wantObstacles(t, ns, Path{}, want...)
			for _, o := range found {
				expect.That(t, o.Legacy, "it is another kind: %+v", o)
				nstest.Run(t, ns, "sh", "-ec", o.Remedy)
			}
			if len(found) > 0 {
				wantObstacles(t, ns, Path{})
			}
		})
	}
	ns := nstest.New(t)
	legacy(t, ns, "iptables -P FORWARD DROP")
	wantObstacles(t, ns, Path{Prefixes: nstest.Prefixes("fd00::/64")}, strings.Replace(policyLegacy, "iptables", "ip6tables", 1))
}

// Asking for a table that is not there would make it, and hook it in.
func TestObstaclesMakesNoLegacyTable(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "iptables-legacy", "-t", "nat", "-S")
	wantObstacles(t, ns, Path{})
	for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
		got := nstest.Run(t, ns, "cat", "/proc/net/"+name)
		expect.That(t, !strings.Contains(got, "filter"), "%s: %q", name, got)
	}
}

func TestChainsInTheWay(t *testing.T) {
	t.Parallel()
	const policy, rule = " drops, by its policy, what pods send", " drops or rejects, by its rule number 1, which "
	forward := func(rules string) string {
		return "table inet filter { chain forward { type filter hook forward priority filter; policy drop; " + rules + "; }; }"
	}
	const (
		inet = "chain forward of table inet filter"
		may  = inet + " may drop what pods send; this finds out: tombolo doctor POD --to ADDR:PORT"
	)
	for _, tc := range []struct {
		name    string
		path    Path
		ruleset string
		want    []string
	}{
		{name: "a policy of drop", ruleset: forward(""), want: []string{inet + policy}},
		{name: "a drop of all", ruleset: forward("drop"), want: []string{inet + rule}},
		{name: "a reject of all", ruleset: forward("counter log reject with icmpx admin-prohibited"), want: []string{inet + rule}},
		{name: "a drop of all, counted by name", ruleset: "table inet filter { counter seen { }; chain forward { type filter hook forward priority filter; counter name seen drop; }; }",
			want: []string{inet + rule}},
		{name: "a drop of what is too much", ruleset: "table inet filter { quota much { over 1 mbytes }; chain forward { type filter hook forward priority filter; quota name much drop; }; }"},
		{name: "a policy of accept", ruleset: "table inet filter { chain forward { type filter hook forward priority filter; }; }"},
		{name: "other families", ruleset: "table bridge filter { chain forward { type filter hook forward priority filter; policy drop; }; }"},
		{name: "each family", ruleset: "table ip a { chain f { type filter hook forward priority 5; policy drop; }; }; table ip6 b { chain g { type filter hook forward priority 5; policy drop; }; }",
			want: []string{"chain f of table ip a" + policy, "chain g of table ip6 b" + policy}},
		{name: "a family that pods do not have", path: Path{Prefixes: nstest.Prefixes("10.22.0.0/16")},
			ruleset: "table ip6 b { chain g { type filter hook forward priority 5; policy drop; }; }"},
		{name: "a chain of iptables that Admit sees to", ruleset: "table ip filter { chain FORWARD { type filter hook forward priority filter; policy drop; }; }"},
		{name: "our own", ruleset: "table inet tombolo { chain forward { type filter hook forward priority filter; policy drop; }; }"},

		{name: "the mark is accepted by a chain that is called for some", ruleset: "table inet filter { chain marks { meta mark & 0x10 == 0x10 accept; }; chain forward { type filter hook forward priority filter; policy drop; meta l4proto tcp jump marks; }; }",
			want: []string{may}},
		{name: "what has not the mark is accepted", ruleset: forward("meta mark & 0x10 == 0 accept"), want: []string{inet + policy}},
		{name: "answers are accepted", ruleset: forward("ct state established,related accept; ct status dnat accept; ct state invalid drop"), want: []string{inet + policy}},
		{name: "new connections are accepted", ruleset: forward("ct state established,new accept")},
		{name: "states are accepted by a map", ruleset: forward("ct state vmap { established : accept, related : accept, invalid : drop }"), want: []string{may}},

		{name: "the bridge is accepted", ruleset: forward(`iifname "cbr0" accept`)},
		{name: "bridges are accepted", ruleset: forward(`iifname "cbr*" accept`)},
		{name: "another link is accepted", ruleset: forward(`iifname "cbr01" accept; iifname "c*r0" accept; iifname "docker0" jump yes` + "; }; chain yes { accept"), want: []string{inet + policy}},
		{name: "the bridge is accepted in a set", ruleset: forward(`iifname { "eth0", "cbr0" } accept`), want: []string{may}},
		{name: "the bridge is accepted by a map", ruleset: forward(`iifname vmap { "eth0" : drop, "cbr0" : accept }`), want: []string{may}},
		{name: "the pods are accepted", ruleset: forward("ip saddr 10.22.0.0/16 accept; ip6 saddr fd00:22::/64 accept"), want: []string{may}},
		{name: "a chain that drops", ruleset: "table inet filter { chain no { tcp dport 25 drop; counter drop; }; chain forward { type filter hook forward priority filter; jump no; }; }", want: []string{inet + rule}},
		{name: "a goto of all before an accept of all", ruleset: "table inet filter { chain some { tcp dport 25 accept; }; chain forward { type filter hook forward priority filter; policy drop; goto some; accept; }; }", want: []string{may}},
		{name: "a goto of all where the policy accepts", ruleset: "table inet filter { chain some { tcp dport 25 accept; }; chain forward { type filter hook forward priority filter; goto some; drop; }; }"},

		// What drops some is no obstacle: doctor finds it.
		{name: "the bridge is dropped", ruleset: `table inet filter { chain forward { type filter hook forward priority filter; iifname "cbr0" tcp dport 25 drop; }; }`},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			ns := newHost(t)
			nstest.Run(t, ns, "ip", "link", "add", "cbr0", "type", "bridge")
			nftables(t, ns, tc.ruleset)
			mustPlace(t, dial(t, ns), strings.Contains(tc.ruleset, "FORWARD"))
			found := wantObstacles(t, ns, tc.path, tc.want...)
			for _, o := range found {
				expect.That(t, !o.Firewalld && !o.Legacy, "it is another kind: %+v", o)
				nstest.Run(t, ns, "sh", "-ec", o.Remedy) // of a chain that may drop, too
			}
			if len(found) > 0 {
				wantObstacles(t, ns, tc.path)
			}
		})
	}
}

// There the mark is not set yet.
func TestChainsInTheWayBeforeOurs(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nftables(t, ns, `table inet early { chain f { type filter hook forward priority -10; policy drop; meta mark & 0x10 == 0x10 accept; }; }`)
	found := wantObstacles(t, ns, Path{},
		"chain f of table inet early drops, by its policy, what pods send; this helps: nft add rule inet early f iifname cbr0 accept && nft add rule inet early f oifname cbr0 ct state established,related accept && nft add rule inet early f oifname cbr0 ct status dnat accept")
	for _, o := range found {
		nstest.Run(t, ns, "sh", "-ec", o.Remedy)
	}
	wantObstacles(t, ns, Path{})
}

func firewalldFixture(tb testing.TB) string {
	tb.Helper()
	b := must.Of(os.ReadFile("testdata/firewalld/public.nft")).Get(tb)
	return string(b)
}

func TestFirewalldInTheWay(t *testing.T) {
	t.Parallel()
	const want = "chain filter_FORWARD of table inet firewalld drops or rejects, by its rule number 7, which is left to its owner, what pods send; " +
		"this helps: firewall-cmd --permanent --zone=trusted --change-interface=cbr0 && firewall-cmd --reload"
	const may = "chain filter_FORWARD of table inet firewalld may drop what pods send; this finds out: tombolo doctor POD --to ADDR:PORT"
	for _, tc := range []struct {
		name  string
		path  Path
		rules []string // added to the fixture
		want  []string
	}{
		{name: "by default", want: []string{want}},
		{name: "the bridge is in a zone", rules: []string{
			`add chain inet firewalld filter_FWD_trusted { accept; }`, `insert rule inet firewalld filter_FORWARD_ZONES iifname "cbr0" goto filter_FWD_trusted`,
		}},
		{name: "the bridge is in a zone that rejects", rules: []string{
			`add chain inet firewalld filter_FWD_drop { drop; }`, `insert rule inet firewalld filter_FORWARD_ZONES iifname "cbr0" goto filter_FWD_drop`,
		}, want: []string{want}},
		{name: "the zone that the bridge is in rejects, and a policy of it accepts", rules: []string{
			`add chain inet firewalld filter_FWD_policy_x { accept; }`, `insert rule inet firewalld filter_FORWARD_POLICIES_pre iifname "cbr0" jump filter_FWD_policy_x`,
		}, want: []string{may}},
		{name: "the default zone accepts what stays in it", rules: []string{`add rule inet firewalld filter_FWD_public_allow oifname "cbr0" accept`}, want: []string{want}},
		{name: "an uplink's zone forwards", rules: []string{`add rule inet firewalld filter_FWD_public_allow oifname "up0" accept`}, want: []string{may}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			ns := nstest.New(t)
			nftables(t, ns, firewalldFixture(t))
			nftables(t, ns, strings.Join(tc.rules, "\n"))
			for _, o := range wantObstacles(t, ns, tc.path, tc.want...) {
				expect.That(t, o.Firewalld, "it is another kind: %+v", o)
			}
		})
	}
}

// The accept that is proposed goes to where it overrides nothing.
func TestRemediesOverrideNoDropAhead(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, legacy, ruleset, want string }{
		{name: "legacy, a policy", legacy: "iptables -P FORWARD DROP", want: "iptables-legacy -A FORWARD -m mark --mark 0x10/0x10 -j ACCEPT"},
		{name: "legacy, a closing reject", legacy: "iptables -A FORWARD -j REJECT", want: "iptables-legacy -I FORWARD 2 -m mark --mark 0x10/0x10 -j ACCEPT"},
		{name: "legacy, a return to the policy", legacy: "iptables -P FORWARD DROP; iptables -A FORWARD -j RETURN", want: "iptables-legacy -I FORWARD 2 -m mark --mark 0x10/0x10 -j ACCEPT"},
		{name: "a policy of iptables' mangle", ruleset: "table ip mangle { chain FORWARD { type filter hook forward priority mangle; policy drop; udp dport 4444 drop; }; }",
			want: "iptables -t mangle -A FORWARD -i cbr0 -j ACCEPT && iptables -t mangle -A FORWARD -o cbr0 -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT"},
		{name: "a policy", ruleset: "udp dport 4444 drop", want: "nft add rule inet filter forward 'meta mark & 0x10 == 0x10 counter accept'"},
		{name: "a closing drop", ruleset: "udp dport 4444 drop; counter drop", want: "nft insert rule inet filter forward handle 3 'meta mark & 0x10 == 0x10 counter accept'"},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			ns := nstest.New(t)
			switch {
			case strings.HasPrefix(tc.ruleset, "table"):
				nftables(t, ns, tc.ruleset)
			case tc.ruleset != "":
				nftables(t, ns, "table inet filter { chain forward { type filter hook forward priority filter; policy drop; "+tc.ruleset+"; }; }")
			default:
				legacy(t, ns, "iptables -A FORWARD -p udp --dport 4444 -j DROP", "sh -c '"+tc.legacy+"'")
			}
			path := Path{Prefixes: nstest.Prefixes("10.22.0.0/16")}
			list := obstacles(t, ns, path)
			must.That(t, len(list) == 1 && list[0].Remedy == tc.want, "%v; want %s", list, tc.want)
			nstest.Run(t, ns, "sh", "-ec", list[0].Remedy)
			wantObstacles(t, ns, path)
			if strings.Contains(tc.ruleset, "mangle") {
				iptables(t, ns, "iptables", "-t", "mangle", "-S") // it can still read its table
			}
		})
	}
}

func TestAReversePathRuleWithoutAVerdictDropsNothing(t *testing.T) {
	t.Parallel()
	for verdict, want := range map[string]int{"drop": 1, "log drop": 1, "log": 0, "counter": 0} {
		ns := newHost(t)
		nftables(t, ns, "table inet own { chain pre { type filter hook prerouting priority -300; fib saddr . iif oif missing "+verdict+"; }; }")
		got := must.Of(dial(t, ns).ReversePaths(t.Context(), "br0", unix.NFPROTO_IPV6)).Get(t)
		expect.Equal(t, len(got), want, "%s: %v", verdict, got)
	}
}
