package cni

import (
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What no interpreter of rules would have understood, doctor finds by a probe: table, chain, number and handle are
// those of the rule, and the command that it advises helps.
func TestDoctorNamesTheRuleThatDropsAProbe(t *testing.T) {
	t.Parallel()
	const chain = "add table inet fw; add chain inet fw f { type filter hook forward priority 5; }; add rule inet fw f ct state established accept; "
	for name, tc := range map[string]struct{ rules, chain string }{
		"a set":             {chain + "add set inet fw bad { type ipv4_addr . inet_service; }; add element inet fw bad { " + outside4 + " . 80 }; add rule inet fw f ip daddr . tcp dport @bad drop", "f"},
		"a mark":            {chain + "add chain inet fw m { type filter hook prerouting priority -150; }; add rule inet fw m tcp dport 80 meta mark set meta mark | 0x40; add rule inet fw f meta mark & 0x40 != 0 drop", "f"},
		"a verdict map":     {chain + "add chain inet fw no; add rule inet fw no counter; add rule inet fw no drop; add rule inet fw f tcp dport vmap { 80 : goto no, 443 : accept }", "no"},
		"a reject":          {chain + "add rule inet fw f tcp dport { 80, 81 } reject with tcp reset", "f"},
		"iptables' REJECT":  {"", "FORWARD"},
		"a policy, by name": {"add table inet fw; add chain inet fw f { type filter hook forward priority 5; policy drop; }; add rule inet fw f meta l4proto { icmp, ipv6-icmp } accept; add rule inet fw f tcp dport != 80 accept", "f"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			out := n.outside()
			nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:80"))
			nstest.Serve(t, out, "tcp4", netip.MustParseAddrPort("0.0.0.0:443"))
			w := n.portnet(nil)
			a := n.pod("a")
			w.add(a)
			table, last := "inet fw", "drops or rejects, by its rule number "
			if tc.rules == "" {
				n.run("iptables", "-A", "FORWARD", "-p", "tcp", "-m", "multiport", "--dports", "80,81", "-j", "REJECT")
				table = "ip filter"
			} else {
				n.nft(tc.rules)
			}
			doctor := func(to string) outcome {
				t.Helper()
				return n.operate("doctor", "--dns", "none", "--to", to, "--state", n.state, "a")
			}
			before := n.run("nft", "list", "ruleset")
			o := doctor(outside4 + ":80")
			if strings.Contains(tc.rules, "policy drop") {
				last = "drops, by its policy,"
			} else {
				listed := strings.Split(strings.TrimSpace(n.run("sh", "-ec", "nft -a list chain "+table+" "+tc.chain+" | grep -v chain | grep handle")), "\n")
				handle := regexp.MustCompile(`# handle (\d+)$`).FindStringSubmatch(listed[len(listed)-1])
				last += strconv.Itoa(len(listed)) + " with handle " + handle[1]
				must.That(t, !strings.Contains(listed[0], "type filter hook"), "listed: %q", listed)
			}
			must.That(t, o.status == 4 && strings.Contains(o.stdout, "chain "+tc.chain+" of table "+table+" "+last),
				"no line that says %q: %+v", last, o)
			after := n.run("nft", "list", "ruleset")
			expect.That(t, stripped(after) == stripped(before), "doctor left something:\n%s", after)
			expect.Success(t, doctor(outside4+":443").err(), "what passes")
			_, remedy, _ := strings.Cut(o.stdout, "this helps: ")
			remedy, _, _ = strings.Cut(remedy, "\n")
			n.run("sh", "-ec", remedy)
			expect.Success(t, doctor(outside4+":80").err(), "after %s", remedy)
		})
	}
}

// Doctor's table is its own, and no change that tombolod has to look at.
func TestTombolodLeavesTheTableOfDoctorAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outside()
	n.portnet(nil).add(n.pod("a"))
	m := n.mind(t)
	looks := func() int { return m.metric("firewall_looks_total") }
	before := looks()
	n.nft("add table inet fw; add chain inet fw f { type filter hook forward priority 5; }; add rule inet fw f tcp dport 80 drop")
	must.Until(t, "it looks at what another has changed", func() bool { return looks() > before })
	looked := time.Now()
	before = looks()
	o := n.operate("doctor", "--dns", "none", "--to", outside4+":80", "--state", n.state, "a")
	must.That(t, strings.Contains(o.stdout, "chain f of table inet fw drops"), "no table was made: %+v", o)
	time.Sleep(3 * time.Second)
	// It looks every half minute by itself.
	got, most := looks()-before, int(time.Since(looked)/(30*time.Second))
	expect.That(t, got <= most, "it looked %d times, want %d", got, most)
}

// stripped is a ruleset without its counters.
func stripped(ruleset string) string {
	return regexp.MustCompile(`packets \d+ bytes \d+`).ReplaceAllString(ruleset, "")
}
