package foreign

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// wantObstacles looks for obstacles to pods on the bridge cbr0, and compares them by
// the start of what they say.
func wantObstacles(tb testing.TB, ns *netns.NS, path Path, want ...string) []Obstacle {
	tb.Helper()
	path.Bridge = "cbr0"
	list, err := Obstacles(context.Background(), &Config{NetNS: ns}, path)
	if err != nil {
		tb.Fatal(err)
	}
	var got []string
	for i, o := range list {
		line := o.String()
		if strings.Contains(line, "\n") || !strings.Contains(line, o.Remedy) || !strings.Contains(line, o.Chain) {
			tb.Errorf("%q", line)
		}
		if i < len(want) && strings.HasPrefix(line, want[i]) {
			line = want[i]
		}
		got = append(got, line)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		tb.Errorf("obstacles (-want +got):\n%s", diff)
	}
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
	ruleLegacy   = "chain FORWARD of iptables-legacy drops or rejects, by a rule for all that it does not know, what pods send"
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
		{name: "policies of other chains", lines: []string{"iptables -P INPUT DROP", "iptables -P OUTPUT DROP"}},
		{name: "a drop of all", lines: []string{"iptables -A FORWARD -j DROP"}, want: ruleLegacy},
		{name: "a reject of all", lines: []string{"iptables -A FORWARD -i eth0 -j ACCEPT", "iptables -A FORWARD -j REJECT"}, want: ruleLegacy},
		{name: "a reject of some", lines: []string{"iptables -A FORWARD -p tcp -j REJECT", "iptables -A FORWARD -m conntrack --ctstate INVALID -j DROP"}},
		{name: "an accept before it", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -j ACCEPT"}},
		{name: "an accept behind it", lines: []string{"iptables -A FORWARD -j DROP", "iptables -A FORWARD -j ACCEPT"}, want: ruleLegacy},
		{name: "rules without a verdict", lines: []string{
			"iptables -P FORWARD DROP", "iptables -A FORWARD", "iptables -A FORWARD -j LOG", "iptables -N none", "iptables -A FORWARD -j none",
		}, want: policyLegacy},
		{name: "a chain that drops", lines: []string{"iptables -N no", "iptables -A no -j DROP", "iptables -A FORWARD -j no"}, want: ruleLegacy},
		{name: "a chain of a chain that rejects", lines: []string{
			"iptables -N outer", "iptables -N inner", "iptables -A inner", "iptables -A inner -p tcp -j ACCEPT", "iptables -A inner -j REJECT", "iptables -A outer -j LOG", "iptables -A outer -j inner",
			"iptables -A FORWARD -o up0 -j ACCEPT", "iptables -A FORWARD -j outer", "iptables -A FORWARD -j ACCEPT",
		}, want: ruleLegacy},
		{name: "a chain that drops some", lines: []string{"iptables -N no", "iptables -A no -p tcp -j DROP", "iptables -A FORWARD -j no"}},
		{name: "a chain that drops for some", lines: []string{"iptables -N no", "iptables -A no -j DROP", "iptables -A FORWARD -i eth7 -j no"}},
		{name: "a chain that drops what comes back", lines: []string{"iptables -P FORWARD DROP", "iptables -N none", "iptables -A none -j RETURN", "iptables -A none -j ACCEPT", "iptables -A FORWARD -j none"}, want: policyLegacy},
		{name: "a chain that returns first", lines: []string{"iptables -N no", "iptables -A no -j RETURN", "iptables -A no -j DROP", "iptables -A FORWARD -j no"}},
		{name: "a chain that accepts", lines: []string{"iptables -P FORWARD DROP", "iptables -N yes", "iptables -A yes -j ACCEPT", "iptables -A FORWARD -j yes"}},
		{name: "a goto that comes back to the policy", lines: []string{
			"iptables -P FORWARD DROP", "iptables -N other", "iptables -A FORWARD -g other", "iptables -A FORWARD -j ACCEPT",
		}},
		{name: "a goto within a chain", lines: []string{
			"iptables -P FORWARD DROP", "iptables -N outer", "iptables -N inner", "iptables -A outer -g inner", "iptables -A outer -j DROP",
			"iptables -A FORWARD -j outer", "iptables -A FORWARD -j ACCEPT",
		}},
		{name: "a return to the policy", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -j RETURN", "iptables -A FORWARD -j ACCEPT"}, want: policyLegacy},

		{name: "the mark is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT"}},
		{name: "the mark is accepted without a mask", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -m mark --mark 0x1000 -j ACCEPT"}},
		{name: "the mark is accepted behind a drop", lines: []string{"iptables -A FORWARD -j DROP", "iptables -A FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT"}, want: ruleLegacy},
		{name: "another mark is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT"}, want: policyLegacy},
		{name: "what has not the mark is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -m mark ! --mark 0x1000/0x1000 -j ACCEPT"}, want: policyLegacy},
		{name: "what has not the mark is dropped", lines: []string{"iptables -A FORWARD -m mark ! --mark 0x1000/0x1000 -j DROP"}},
		{name: "the mark is accepted of one protocol", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -p tcp -m mark --mark 0x1000/0x1000 -j ACCEPT"}},
		{name: "with a comment", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -m comment --comment pods -m mark --mark 0x1000/0x1000 -j ACCEPT"}},

		{name: "the bridge is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cbr0 -j ACCEPT"}},
		{name: "the bridge is accepted by a chain", lines: []string{"iptables -P FORWARD DROP", "iptables -N yes", "iptables -A yes -j ACCEPT", "iptables -A FORWARD -i cbr0 -j yes"}},
		{name: "bridges are accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cb+ -j ACCEPT"}},
		{name: "a longer name is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cbr01 -j ACCEPT"}, want: policyLegacy},
		{name: "a shorter name is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cbr -j ACCEPT"}, want: policyLegacy},
		{name: "all but the bridge is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD ! -i cbr0 -j ACCEPT"}, want: policyLegacy},
		{name: "all but another is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD ! -i docker0 -j ACCEPT"}},
		{name: "all but another is dropped", lines: []string{"iptables -A FORWARD ! -i docker0 -j DROP"}},
		{name: "the bridge is dropped", lines: []string{"iptables -A FORWARD -i cbr0 -j DROP"}},
		{name: "the bridge is accepted for some", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cbr0 -p tcp -j ACCEPT"}},
		{name: "the bridge is accepted for some, and dropped for others", lines: []string{"iptables -A FORWARD -i cbr0 -p tcp -j DROP"}},
		{name: "the bridge is accepted among its ports", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -i cbr0 -o cbr0 -j ACCEPT"}},
		{name: "Docker's own", lines: []string{
			"iptables -P FORWARD DROP", "iptables -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
			"iptables -A FORWARD -i docker0 ! -o docker0 -j ACCEPT", "iptables -A FORWARD -i docker0 -o docker0 -j ACCEPT",
		}, want: policyLegacy},

		{name: "an uplink is accepted", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD -o up1 -j ACCEPT"}, want: policyLegacy},
		{name: "all but the bridge is accepted to", lines: []string{"iptables -P FORWARD DROP", "iptables -A FORWARD ! -o cbr0 -j ACCEPT"}, want: policyLegacy},
		{name: "what is not for an unknown link is dropped", lines: []string{"iptables -A FORWARD ! -o up0 -j DROP"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			legacy(t, ns, tc.lines...)
			var want []string
			if tc.want != "" {
				want = []string{tc.want, strings.Replace(tc.want, "iptables", "ip6tables", 1)}
			}
			found := wantObstacles(t, ns, Path{}, want...)
			for _, o := range found {
				if o.Kind != LegacyIPTables {
					t.Errorf("%s is of kind %s", o, o.Kind)
				}
				nstest.Run(t, ns, "sh", "-ec", o.Remedy)
			}
			if len(found) > 0 {
				wantObstacles(t, ns, Path{})
			}
		})
	}
}

func TestLegacyIPTablesByAddress(t *testing.T) {
	t.Parallel()
	pods := Path{Prefixes: nstest.Prefixes("10.22.0.0/16")}
	for _, tc := range []struct {
		name, rule string
		path       Path
		inTheWay   bool
	}{
		{"the pods are accepted", "-s 10.22.0.0/16 -j ACCEPT", pods, false},
		{"more are accepted", "-s 10.0.0.0/9 -j ACCEPT", pods, false},
		{"some are accepted", "-s 10.22.0.0/24 -j ACCEPT", pods, false},
		{"others are accepted", "-s 10.23.0.0/16 -j ACCEPT", pods, true},
		{"all but the pods are accepted", "! -s 10.22.0.0/16 -j ACCEPT", pods, true},
		{"all but others are accepted", "! -s 10.23.0.0/16 -j ACCEPT", pods, false},
		{"a mask with holes", "-s 10.0.22.0/255.0.255.0 -j ACCEPT", pods, true},
		{"a destination is accepted", "-d 10.22.0.0/16 -j ACCEPT", pods, true},
		{"pods that are not known are accepted", "-s 10.22.0.0/16 -j ACCEPT", Path{}, true},
		{"it does not matter to pods with IPv6 only", "-j DROP", Path{Prefixes: nstest.Prefixes("fd00::/64")}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			nstest.Run(t, ns, "sh", "-ec", "iptables-legacy -P FORWARD DROP; iptables-legacy -A FORWARD "+tc.rule)
			var want []string
			if tc.inTheWay {
				want = []string{policyLegacy}
			}
			wantObstacles(t, ns, tc.path, want...)
		})
	}
}

// Asking for a table that is not there would make it, and hook it in.
func TestObstaclesMakesNoLegacyTable(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "iptables-legacy", "-t", "nat", "-S")
	wantObstacles(t, ns, Path{})
	for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
		if got := nstest.Run(t, ns, "cat", "/proc/net/"+name); strings.Contains(got, "filter") {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestObstaclesIsAboutTheNamespace(t *testing.T) {
	t.Parallel()
	here, there := nstest.New(t), nstest.New(t)
	legacy(t, there, "iptables -P FORWARD DROP")
	wantObstacles(t, here, Path{})
	err := there.Do(func() error {
		list, err := Obstacles(context.Background(), nil, Path{Bridge: "cbr0"})
		if len(list) != 2 {
			t.Errorf("without a Config: %v", list)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestChainsInTheWay(t *testing.T) {
	t.Parallel()
	const policy, rule = " drops, by its policy, what pods send", " drops or rejects, by a rule for all that it does not know, what pods send"
	forward := func(rules string) string {
		return "table inet filter { chain forward { type filter hook forward priority filter; policy drop; " + rules + "; }; }"
	}
	known := Path{Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
	const inet = "chain forward of table inet filter"
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
		{name: "other hooks", ruleset: "table inet filter { chain input { type filter hook input priority filter; policy drop; }; chain output { type filter hook output priority filter; policy drop; }; }"},
		{name: "other families", ruleset: "table bridge filter { chain forward { type filter hook forward priority filter; policy drop; }; }"},
		{name: "a dormant table", ruleset: "table inet filter { flags dormant; chain forward { type filter hook forward priority filter; policy drop; }; }"},
		{name: "each family", ruleset: "table ip a { chain f { type filter hook forward priority 5; policy drop; }; }; table ip6 b { chain g { type filter hook forward priority 5; policy drop; }; }",
			want: []string{"chain f of table ip a" + policy, "chain g of table ip6 b" + policy}},
		{name: "a family that pods do not have", path: Path{Prefixes: nstest.Prefixes("10.22.0.0/16")},
			ruleset: "table ip6 b { chain g { type filter hook forward priority 5; policy drop; }; }"},
		{name: "one family of two", ruleset: forward("meta nfproto ipv6 accept"), want: []string{inet + policy}},
		{name: "one family of two, which pods do not have", path: Path{Prefixes: nstest.Prefixes("fd00::/64")}, ruleset: forward("meta nfproto ipv6 accept")},
		{name: "a chain of iptables that Admit sees to", ruleset: "table ip filter { chain FORWARD { type filter hook forward priority filter; policy drop; }; }"},
		{name: "a chain next to it", ruleset: "table ip filter { chain FORWARD { type filter hook forward priority filter; policy drop; }; chain too { type filter hook forward priority 1; policy drop; }; }",
			want: []string{"chain too of table ip filter" + policy}},
		{name: "our own", ruleset: "table inet tombolo { chain forward { type filter hook forward priority filter; policy drop; }; }"},

		{name: "the mark is accepted", ruleset: forward("meta mark & 0x1000 == 0x1000 accept")},
		{name: "the bit is accepted", ruleset: forward("meta mark & 0x1000 != 0 accept")},
		{name: "the mark is accepted by a chain", ruleset: "table inet filter { chain marks { meta mark & 0x1000 == 0x1000 accept; }; chain forward { type filter hook forward priority filter; policy drop; ct state invalid drop; jump marks; }; }"},
		{name: "the mark is accepted by a chain that is called for some", ruleset: "table inet filter { chain marks { meta mark & 0x1000 == 0x1000 accept; }; chain forward { type filter hook forward priority filter; policy drop; meta l4proto tcp jump marks; }; }",
			want: []string{inet + policy}},
		{name: "another mark is accepted", ruleset: forward("meta mark & 0x2000 == 0x2000 accept; meta mark < 7 accept; meta mark | 0x1000 == 0x1000 accept"), want: []string{inet + policy}},
		{name: "states are accepted", ruleset: forward("ct state vmap { established : accept, related : accept, invalid : drop }; ct state established accept"), want: []string{inet + policy}},

		{name: "the bridge is accepted", ruleset: forward(`iifname "cbr0" accept`)},
		{name: "the bridge is accepted by its index", ruleset: forward(`iif "cbr0" accept`)},
		{name: "another is accepted by its index", ruleset: forward(`iif "lo" accept`), want: []string{inet + policy}},
		{name: "bridges are accepted", ruleset: forward(`iifname "cbr*" accept`)},
		{name: "bridges are accepted in a set", ruleset: forward(`iifname { "cbr*", "eth0" } accept`)},
		{name: "the bridge is accepted in a set", ruleset: forward(`iifname { "eth0", "cbr0" } accept`)},
		{name: "the bridge is accepted in a named set", ruleset: `table inet filter { set lan { type ifname; elements = { "eth0", "cbr0" }; }; chain forward { type filter hook forward priority filter; policy drop; iifname @lan accept; }; }`},
		{name: "the bridge is accepted in a set of pairs", ruleset: forward(`iifname . oifname { "cbr0" . "up0" } accept`)},
		{name: "the bridge is accepted in a map", ruleset: forward(`iifname vmap { "eth0" : drop, "cbr0" : accept }`)},
		{name: "others are accepted in sets", ruleset: forward(`iifname { "eth0", "cbr01" } accept; iifname vmap { "eth0" : accept }`), want: []string{inet + policy}},
		{name: "what is not the bridge is accepted in a set", ruleset: forward(`iifname != { "eth0", "cbr0" } accept`), want: []string{inet + policy}},
		{name: "the bridge is accepted elsewhere", ruleset: `table inet filter { chain input { type filter hook input priority filter; policy drop; iifname "cbr0" accept; }; chain forward { type filter hook forward priority filter; policy drop; }; }`,
			want: []string{inet + policy}},
		{name: "the bridge is accepted among its ports", ruleset: forward(`iifname "cbr0" oifname "cbr0" accept`), want: []string{inet + policy}},
		{name: "a chain for the bridge accepts some", ruleset: `table inet filter { chain pods { tcp dport 443 accept; drop; }; chain forward { type filter hook forward priority filter; iifname "cbr0" jump pods; }; }`},
		{name: "a chain for the bridge drops", ruleset: `table inet filter { chain pods { tcp dport 25 drop; drop; }; chain forward { type filter hook forward priority filter; iifname { "cbr0", "eth0" } jump pods; }; }`, want: []string{inet + rule}},
		{name: "the bridge is dropped", ruleset: `table inet filter { chain forward { type filter hook forward priority filter; iifname "cbr0" drop; }; }`, want: []string{inet + rule}},

		{name: "the pods are accepted", path: known, ruleset: forward("ip saddr 10.22.0.0/16 accept; ip6 saddr fd00:22::/64 accept")},
		{name: "more are accepted", path: known, ruleset: forward("ip saddr 10.0.0.0/9 accept; ip6 saddr fc00::/7 accept")},
		{name: "pods of one family are accepted", path: known, ruleset: forward("ip saddr 10.22.0.0/16 accept"), want: []string{inet + policy}},
		{name: "the pods are accepted towards others", path: known, ruleset: forward("ip saddr 10.0.0.0/8 ip daddr != 10.0.0.0/8 accept; ip6 saddr fd00:22::/64 tcp dport 443 accept")},
		{name: "anybody is accepted towards some", path: known, ruleset: forward("ip saddr 0.0.0.0/0 tcp dport 443 accept"), want: []string{inet + policy}},
		{name: "the pods are accepted in sets", path: known, ruleset: forward("ip saddr { 10.0.0.0/8, 172.16.0.0/12 } accept; ip6 saddr { fd00:21::-fd00:22::9, ff00::/8 } accept")},
		{name: "some pods are accepted in a named set", path: known, ruleset: "table inet filter { set pods { type ipv4_addr; elements = { 10.9.0.1, 10.22.0.9, 10.99.0.1 }; }; chain forward { type filter hook forward priority filter; policy drop; ip saddr @pods tcp dport 443 accept; meta nfproto ipv6 accept; }; }"},
		{name: "others are accepted in sets of addresses", path: known, ruleset: forward("ip saddr { 10.9.0.0/16, 10.21.0.0/16, 10.23.0.0/16 } accept; ip saddr { 10.9.0.1, 10.99.0.1 } accept; ip daddr { 10.0.0.0/8 } accept; meta nfproto ipv6 accept"), want: []string{inet + policy}},
		{name: "what is not in a set is dropped", path: known, ruleset: "table inet filter { chain forward { type filter hook forward priority filter; ip saddr != { 10.0.0.0/8, 172.16.0.0/12 } drop; }; }"},
		{name: "the pods are dropped", path: known, ruleset: "table inet filter { chain forward { type filter hook forward priority filter; ip saddr 10.22.0.0/16 drop; }; }", want: []string{inet + rule}},
		{name: "more are dropped", path: known, ruleset: "table inet filter { chain forward { type filter hook forward priority filter; ip saddr 10.0.0.0/9 drop; }; }", want: []string{inet + rule}},
		{name: "some pods are dropped", path: known, ruleset: "table inet filter { chain forward { type filter hook forward priority filter; ip saddr 10.22.3.0/24 drop; }; }"},
		{name: "others are accepted", path: known, ruleset: forward("ip saddr 10.23.0.0/16 accept; ip6 saddr fd00:23::/64 accept"), want: []string{inet + policy}},
		{name: "what is at the same place as an address", path: known, ruleset: "table ip filter { chain forward { type filter hook forward priority filter; ip ttl != 1 drop; }; }"},
		{name: "an uplink is accepted", ruleset: forward(`oifname "up0" accept`)},
		{name: "uplinks are accepted in a set", ruleset: forward(`oifname { "cbr0", "up0", "up1" } accept`)},
		{name: "some of what leaves by uplinks is accepted", ruleset: forward(`oifname { "up0", "up1" } tcp dport 443 accept`), want: []string{inet + policy}},
		{name: "the bridge is accepted in a set of pairs, by the way out first", ruleset: forward(`oifname . iifname { "up0" . "cbr0" } accept`)},
		{name: "another is accepted in a set of pairs, by the way out first", ruleset: forward(`oifname . iifname { "up0" . "cbr1" } accept`), want: []string{inet + policy}},
		{name: "the bridge is accepted to in a set", ruleset: forward(`oifname { "cbr0" } accept; oifname { "cbr0", "cbr*" } accept`), want: []string{inet + policy}},
		{name: "another bridge is accepted to", path: Path{Others: []string{"cbr1"}}, ruleset: forward(`oifname "cbr1" accept`)},
		{name: "the way out is accepted", path: Path{Out: "up0"}, ruleset: forward(`oifname "up0" accept`)},
		{name: "another way out is accepted", path: Path{Out: "up0"}, ruleset: forward(`oifname "up1" accept; oifname { "up1", "up2" } accept`), want: []string{inet + policy}},
		{name: "the way out is dropped", path: Path{Out: "up0"}, ruleset: forward(`oifname "up1" accept; oifname { "up0", "up2" } drop; accept`), want: []string{inet + rule}},
		{name: "another way out is dropped", path: Path{Out: "up0"}, ruleset: forward(`oifname "up1" drop; oifname { "up1", "up2" } drop; accept`)},
		{name: "all but the way out is dropped", path: Path{Out: "up0"}, ruleset: forward(`oifname != "up0" drop; accept`)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			nstest.Run(t, ns, "ip", "link", "add", "cbr0", "type", "bridge")
			nftables(t, ns, tc.ruleset)
			mustPlace(t, dial(t, ns), strings.Contains(tc.ruleset, "FORWARD"))
			found := wantObstacles(t, ns, tc.path, tc.want...)
			for _, o := range found {
				if o.Kind != OtherChain {
					t.Errorf("%s is of kind %s", o, o.Kind)
				}
				nstest.Run(t, ns, "sh", "-ec", o.Remedy)
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
	nftables(t, ns, `table inet early { chain f { type filter hook forward priority -10; policy drop; meta mark & 0x1000 == 0x1000 accept; }; }`)
	nstest.Script(t, ns, "iptables -t mangle -P FORWARD DROP", "iptables -t mangle -A FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT")
	found := wantObstacles(t, ns, Path{},
		"chain f of table inet early drops, by its policy, what pods send; this helps: nft add rule inet early f iifname cbr0 accept && nft add rule inet early f oifname cbr0 ct state established,related accept && nft add rule inet early f oifname cbr0 ct status dnat accept",
		"chain FORWARD of table ip mangle drops, by its policy, what pods send; this helps: iptables -t mangle -A FORWARD -i cbr0 -j ACCEPT && iptables -t mangle -A FORWARD -o cbr0 -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT",
		"chain FORWARD of table ip6 mangle drops, by its policy, what pods send; this helps: ip6tables -t mangle -A FORWARD -i cbr0 -j ACCEPT && ip6tables -t mangle -A FORWARD -o cbr0 -m conntrack --ctstate ESTABLISHED,RELATED,DNAT -j ACCEPT")
	for _, o := range found {
		nstest.Run(t, ns, "sh", "-ec", strings.ReplaceAll(o.Remedy, "tables -t", "tables-nft -t"))
	}
	wantObstacles(t, ns, Path{})
	nstest.Script(t, ns, "iptables -t mangle -S")
}

func TestRemediesAreSafeToPaste(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"filter_FORWARD": "filter_FORWARD", "a.b/c-d": "a.b/c-d", "": "''", "a b": "'a b'", "$(reboot)": "'$(reboot)'",
		"it's": `'it'\''s'`, "é": "'é'", "a;b": "'a;b'",
	} {
		got := shellWord(name)
		if got != want {
			t.Errorf("%q became %s", name, got)
		}
		if back := nstest.Run(t, nil, "sh", "-c", "printf %s "+got); back != name {
			t.Errorf("%q is read as %q", name, back)
		}
	}
}

func firewalldFixture(tb testing.TB) string {
	tb.Helper()
	b, err := os.ReadFile("testdata/firewalld/public.nft")
	if err != nil {
		tb.Fatal(err)
	}
	return string(b)
}

func TestFirewalldInTheWay(t *testing.T) {
	t.Parallel()
	const want = "chain filter_FORWARD of table inet firewalld drops or rejects, by a rule for all that it does not know, what pods send; " +
		"this helps: firewall-cmd --permanent --zone=trusted --change-interface=cbr0 && firewall-cmd --reload"
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
		{name: "another link is in a zone", rules: []string{
			`add chain inet firewalld filter_FWD_trusted { accept; }`, `insert rule inet firewalld filter_FORWARD_ZONES iifname "cbr01" goto filter_FWD_trusted`,
		}, want: []string{want}},
		{name: "the bridge is in a rule of a zone that it is not in", rules: []string{`add rule inet firewalld filter_FWD_public_deny iifname . oifname { "cbr0" . "up0" } drop`}, want: []string{want}},
		{name: "the bridge is in a zone for what comes in", rules: []string{`insert rule inet firewalld filter_INPUT_ZONES iifname "cbr0" accept`}, want: []string{want}},
		{name: "the mark is accepted", rules: []string{`add rule inet firewalld filter_FWD_public_allow meta mark & 0x1000 == 0x1000 accept`}},
		{name: "an uplink's zone forwards", rules: []string{`add rule inet firewalld filter_FWD_public_allow oifname "up0" accept`}},
		{name: "the default zone is trusted", rules: []string{`insert rule inet firewalld filter_FORWARD_ZONES accept`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			nftables(t, ns, firewalldFixture(t))
			nftables(t, ns, strings.Join(tc.rules, "\n"))
			for _, o := range wantObstacles(t, ns, tc.path, tc.want...) {
				if o.Kind != Firewalld {
					t.Errorf("%s is of kind %s", o, o.Kind)
				}
			}
		})
	}
}

// A rule there would go with the table, at the end of a reload.
func TestAFirewalldThatLoadsItsRulesInTheWay(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nftables(t, ns, "add table inet firewalld_policy_drop\nadd chain inet firewalld_policy_drop filter_forward { type filter hook forward priority 9; policy drop; }\n"+
		"add rule inet firewalld_policy_drop filter_forward ct state { established, related } accept")
	for _, o := range wantObstacles(t, ns, Path{}, "chain filter_forward of table inet firewalld_policy_drop drops, while firewalld loads its rules, what pods send; this helps: firewall-cmd --reload") {
		if o.Kind != Firewalld {
			t.Errorf("%s is of kind %s", o, o.Kind)
		}
	}
}

// Zones that have the pods' addresses come before the bridge's zone, so that another one does not help.
func TestZonesOfFirewalldThatPodsAreInByTheirAddresses(t *testing.T) {
	t.Parallel()
	const (
		path  = "10.22.0.0/16"
		zones = "add chain inet firewalld filter_FWD_trusted { accept; }\nadd chain inet firewalld filter_FWD_drop { drop; }\n" +
			`insert rule inet firewalld filter_FORWARD_ZONES iifname "cbr0" goto filter_FWD_trusted` + "\n"
		first = "insert rule inet firewalld filter_FORWARD_ZONES "
		of    = "firewall-cmd --permanent --policy=cbr0 --add-"
		rule4 = of + "rich-rule='rule family=ipv4 source address=10.22.0.0/16 accept'"
		to    = "firewall-cmd --permanent --new-policy=cbr0; " + of + "ingress-zone="
		end   = " && firewall-cmd --reload"
		drops = "chain filter_FORWARD of table inet firewalld drops or rejects, by the zone drop, whatever zone the bridge joins, what pods send; this helps: " + to +
			"drop && " + of + "egress-zone=ANY && " + rule4 + end
	)
	for name, tc := range map[string]struct{ rules, want string }{
		"a prefix":                  {zones + first + "ip saddr 10.0.0.0/8 goto filter_FWD_drop", drops},
		"the very prefix":           {zones + first + "ip saddr 10.22.0.0/16 goto filter_FWD_drop", drops},
		"some of the addresses":     {zones + first + "ip saddr 10.22.1.0/24 goto filter_FWD_drop", ""},
		"others":                    {zones + first + "ip saddr 10.23.0.0/16 goto filter_FWD_drop", ""},
		"a set":                     {"add set inet firewalld s { type ipv4_addr; flags interval; elements = { 10.1.0.0/16, 10.20.0.0/14, 10.77.0.1 }; }\n" + zones + first + "ip saddr @s goto filter_FWD_drop", drops},
		"a set, up to the last":     {"add set inet firewalld s { type ipv4_addr; flags interval; elements = { 10.22.0.0-10.22.255.255 }; }\n" + zones + first + "ip saddr @s goto filter_FWD_drop", drops},
		"a set without the last":    {"add set inet firewalld s { type ipv4_addr; flags interval; elements = { 10.22.0.0-10.22.255.254 }; }\n" + zones + first + "ip saddr @s goto filter_FWD_drop", ""},
		"a set without the first":   {"add set inet firewalld s { type ipv4_addr; flags interval; elements = { 10.22.0.1-10.23.255.255 }; }\n" + zones + first + "ip saddr @s goto filter_FWD_drop", ""},
		"a set of single ones":      {"add set inet firewalld s { type ipv4_addr; elements = { 10.22.0.0, 10.22.255.255 }; }\n" + zones + first + "ip saddr @s goto filter_FWD_drop", ""},
		"all but those":             {"add set inet firewalld s { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }\n" + zones + first + "ip saddr != @s goto filter_FWD_drop", ""},
		"trusted with a target":     {strings.Replace(zones, "accept", "drop", 1), strings.NewReplacer("the zone drop, whatever zone the bridge joins,", "the zone trusted, whose target is not ACCEPT,", "ingress-zone=drop", "ingress-zone=trusted").Replace(drops)},
		"one that a policy lets by": {zones + first + "ip saddr 10.0.0.0/8 goto filter_FWD_drop\nadd chain inet firewalld filter_FWD_policy_cbr0 { ip saddr 10.22.0.0/16 accept; }\ninsert rule inet firewalld filter_FWD_drop jump filter_FWD_policy_cbr0", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			nftables(t, ns, firewalldFixture(t))
			nftables(t, ns, tc.rules)
			var want []string
			if tc.want != "" {
				want = []string{tc.want}
			}
			for _, o := range wantObstacles(t, ns, Path{Prefixes: nstest.Prefixes(path)}, want...) {
				if o.Kind != FirewalldZone || o.String() != tc.want {
					t.Errorf("%s, of kind %s", o, o.Kind)
				}
			}
		})
	}
}

// A policy counts beside the zone that the bridge is in. One that drops all that pods send is named, and one by
// which some of it passes is as its owner wants it.
func TestPoliciesOfFirewalldInTheWay(t *testing.T) {
	t.Parallel()
	known := Path{Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64")}
	const (
		trusted = "add chain inet firewalld filter_FWD_trusted\n" + `insert rule inet firewalld filter_FORWARD_ZONES iifname "cbr0" goto filter_FWD_trusted` + "\n" +
			"add rule inet firewalld filter_FWD_trusted jump filter_FORWARD_POLICIES_pre\nadd chain inet firewalld filter_FORWARD_POLICIES_post\n" +
			"add rule inet firewalld filter_FWD_trusted jump filter_FORWARD_POLICIES_post\nadd rule inet firewalld filter_FWD_trusted accept\n"
		by    = " of table inet firewalld drops or rejects, by the policy shut_deny, which is left to its owner, what pods send; this helps: firewall-cmd --permanent --policy=shut_deny "
		rule4 = "--add-rich-rule='rule family=ipv4 source address=10.22.0.0/16 accept' "
		rule6 = "--add-rich-rule='rule family=ipv6 source address=fd00:22::/64 accept' "
		first = "--add-rich-rule='rule priority=-32768 "
		end   = "&& firewall-cmd --reload"
		shut  = "chain filter_FWD_policy_shut_deny" + by
	)
	for _, tc := range []struct {
		name       string
		path       Path
		call       string   // of the policy
		pre, allow []string // of its own rules
		target     string
		where      string // the chain that has the call, _pre but for this
		zone       string // what the zone accepts before
		want       string
	}{
		{name: "for all", path: known, call: "", target: "drop", want: shut + rule4 + rule6 + end},
		{name: "for the bridge", path: known, call: `iifname "cbr0"`, target: "reject with icmpx admin-prohibited", want: shut + rule4 + rule6 + end},
		{name: "for the bridge and others", path: known, call: `iifname { "cbr0", "cbr1" }`, target: "drop", want: shut + rule4 + rule6 + end},
		{name: "for others", path: known, call: `iifname { "cbr01", "cbr1" }`, target: "drop"},
		{name: "for all but others", path: known, call: `iifname != { "eth0", "cbr1" }`, target: "drop"},
		{name: "for the pods", path: known, call: "ip saddr 10.22.0.0/16", target: "drop", want: shut + rule4 + end},
		{name: "for one way out", path: known, call: `iifname "cbr0" oifname "up0"`, target: "drop"},
		{name: "for the way out", path: Path{Prefixes: known.Prefixes, Out: "up0"}, call: `iifname "cbr0" oifname "up0"`, target: "drop", want: shut + rule4 + rule6 + end},
		{name: "for the way out, in sets", path: Path{Prefixes: known.Prefixes, Out: "up0"}, call: `iifname { "cbr0", "cbr1" } oifname { "up0", "up1" }`, target: "drop", want: shut + rule4 + rule6 + end},
		{name: "for another way out", path: Path{Prefixes: known.Prefixes, Out: "up0"}, call: `iifname "cbr0" oifname "up1"`, target: "drop"},
		{name: "behind what lets packets pass to another bridge", path: Path{Prefixes: known.Prefixes, Others: []string{"cbr1"}}, call: `iifname "cbr0"`, zone: `oifname "cbr1" accept`, where: "_post",
			target: "drop", want: shut + rule4 + rule6 + end},
		{name: "behind what lets packets pass to a link that may be a way out", path: Path{Prefixes: known.Prefixes, Others: []string{"cbr1"}}, call: `iifname "cbr0"`, zone: `oifname "up0" accept`, where: "_post", target: "drop"},
		{name: "behind the zones' own rules", path: known, target: "drop", where: "_post", want: shut + rule4 + rule6 + end},
		{name: "by a rule of its own", path: known, pre: []string{"drop"}, want: "chain filter_FWD_policy_shut_deny_pre" + by +
			first + "family=ipv4 source address=10.22.0.0/16 accept' " + first + "family=ipv6 source address=fd00:22::/64 accept' " + end},
		{name: "of pods whose addresses are not known", target: "drop", want: shut + first + "accept' " + end},
		{name: "that accepts some of what the bridge sends", path: known, call: `iifname "cbr0"`, allow: []string{"tcp dport 443 accept"}, target: "drop"},
		{name: "that accepts some of what all send", path: known, allow: []string{"tcp dport 22 accept"}, target: "drop", want: shut + rule4 + rule6 + end},
		{name: "that drops some", path: known, pre: []string{"tcp dport 25 drop"}},
		{name: "that accepts", path: known, target: "accept"},
		{name: "that has accepted pods", path: known, allow: []string{"ip saddr 10.22.0.0/16 accept", "ip6 saddr fd00:22::/64 accept"}, target: "drop"},
		{name: "that has accepted pods of one family", path: known, allow: []string{"ip saddr 10.22.0.0/16 accept"}, target: "drop", want: shut + rule6 + end},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			nftables(t, ns, firewalldFixture(t))
			const chain = " inet firewalld filter_FWD_policy_shut_deny"
			where := "_pre"
			if tc.where != "" {
				where = tc.where
			}
			lines := []string{trusted + "add chain" + chain, "add chain" + chain + "_pre", "add chain" + chain + "_allow"}
			for _, r := range tc.pre {
				lines = append(lines, "add rule"+chain+"_pre "+r)
			}
			for _, r := range tc.allow {
				lines = append(lines, "add rule"+chain+"_allow "+r)
			}
			for _, part := range []string{"_pre", "_allow"} {
				lines = append(lines, "add rule"+chain+" jump filter_FWD_policy_shut_deny"+part)
			}
			if tc.target != "" {
				lines = append(lines, "add rule"+chain+" "+tc.target)
			}
			if tc.zone != "" {
				lines = append(lines, "insert rule inet firewalld filter_FWD_trusted "+tc.zone)
			}
			lines = append(lines, "insert rule inet firewalld filter_FORWARD_POLICIES"+where+" "+tc.call+" jump filter_FWD_policy_shut_deny")
			nftables(t, ns, strings.Join(lines, "\n"))
			var want []string
			if tc.want != "" {
				want = []string{tc.want}
			}
			for _, o := range wantObstacles(t, ns, tc.path, want...) {
				if o.Kind != FirewalldPolicy || o.String() != tc.want {
					t.Errorf("%s, of kind %s", o, o.Kind)
				}
			}
		})
	}
}

func TestObstaclesErrors(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	legacy(t, ns, "iptables -P FORWARD DROP")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if list, err := Obstacles(ctx, &Config{NetNS: ns}, Path{}); err == nil || list != nil {
		t.Errorf("with a context that is done: %v, %v", list, err)
	}
}

// The accept that is proposed goes to where it overrides nothing.
func TestRemediesOverrideNoDropAhead(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, legacy, ruleset, want string }{
		{name: "legacy, a policy", legacy: "iptables -P FORWARD DROP", want: "iptables-legacy -A FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT"},
		{name: "legacy, a closing reject", legacy: "iptables -A FORWARD -j REJECT", want: "iptables-legacy -I FORWARD 2 -m mark --mark 0x1000/0x1000 -j ACCEPT"},
		{name: "legacy, a return to the policy", legacy: "iptables -P FORWARD DROP; iptables -A FORWARD -j RETURN", want: "iptables-legacy -I FORWARD 2 -m mark --mark 0x1000/0x1000 -j ACCEPT"},
		{name: "a policy", ruleset: "udp dport 4444 drop", want: "nft add rule inet filter forward 'meta mark & 0x1000 == 0x1000 counter accept'"},
		{name: "a closing drop", ruleset: "udp dport 4444 drop; counter drop", want: "nft insert rule inet filter forward handle 3 'meta mark & 0x1000 == 0x1000 counter accept'"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			if tc.ruleset != "" {
				nftables(t, ns, "table inet filter { chain forward { type filter hook forward priority filter; policy drop; "+tc.ruleset+"; }; }")
			} else {
				legacy(t, ns, "iptables -A FORWARD -p udp --dport 4444 -j DROP", "sh -c '"+tc.legacy+"'")
			}
			list, err := Obstacles(context.Background(), &Config{NetNS: ns}, Path{Bridge: "cbr0", Prefixes: nstest.Prefixes("10.22.0.0/16")})
			if err != nil || len(list) != 1 || list[0].Remedy != tc.want {
				t.Fatalf("%v, %v; want %s", list, err, tc.want)
			}
			nstest.Run(t, ns, "sh", "-ec", list[0].Remedy)
			if list, err = Obstacles(context.Background(), &Config{NetNS: ns}, Path{Bridge: "cbr0", Prefixes: nstest.Prefixes("10.22.0.0/16")}); err != nil || len(list) > 0 {
				t.Errorf("it did not help: %v, %v", list, err)
			}
		})
	}
}
