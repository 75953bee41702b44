package foreign

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// docker is the gist of what Docker makes: the call of DOCKER-USER at the head, and in it
// the return that versions before 28 put there.
func docker() []string {
	return []string{
		"iptables -P FORWARD DROP", "iptables -N DOCKER-USER", "iptables -A DOCKER-USER -j RETURN",
		"iptables -A FORWARD -j DOCKER-USER", "iptables -A FORWARD -o docker0 -j DROP",
	}
}

// restore loads a recorded layout for both families.
func restore(tb testing.TB, ns *netns.NS, layout string) {
	tb.Helper()
	path := "testdata/layouts/" + layout + ".rules"
	must.Succeed(tb, expect.Err(os.Stat(path)))
	nstest.Script(tb, ns, "iptables-restore <"+path)
}

func TestAdmissionStandsRightBeforeWhatDropsAll(t *testing.T) {
	t.Parallel()
	const policy = "iptables -P FORWARD DROP"
	const block = "iptables -A FORWARD -p udp --dport 4444 -j DROP"
	const blocked = "-p udp -m udp --dport 4444 -j DROP"
	chain := func(name string, rules ...string) []string {
		lines := []string{"iptables -N " + name}
		for _, r := range rules {
			lines = append(lines, "iptables -A "+name+" "+r)
		}
		return lines
	}
	join := func(lists ...[]string) (all []string) {
		for _, l := range lists {
			all = append(all, l...)
		}
		return all
	}
	for _, tc := range []struct {
		name  string
		lines []string
		want  []string
	}{
		{name: "an empty chain with a policy of drop", lines: []string{policy}, want: []string{ourRule}},
		{name: "behind a drop of some, and the policy", lines: []string{policy, block}, want: []string{blocked, ourRule}},
		{name: "before a drop of all", lines: []string{block, "iptables -A FORWARD -j DROP"}, want: []string{blocked, ourRule, "-j DROP"}},
		{name: "before the log of what is dropped", lines: []string{block, "iptables -A FORWARD -m limit --limit 1/s -j LOG", "iptables -A FORWARD -j LOG", "iptables -A FORWARD -j DROP"},
			want: []string{blocked, ourRule, "-m limit --limit 1/sec -j LOG", "-j LOG", "-j DROP"}},
		{name: "before the log of what the policy drops", lines: []string{policy, block, "iptables -A FORWARD -j LOG"}, want: []string{blocked, ourRule, "-j LOG"}},
		{name: "behind what changes packets", lines: []string{policy, "iptables -A FORWARD -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"},
			want: []string{"-p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu", ourRule}},
		{name: "before a chain that rejects all", lines: join(chain("no", "-j LOG", "-j DROP"), []string{block, "iptables -A FORWARD -j no"}),
			want: []string{blocked, ourRule, "-j no"}},
		{name: "before a chain that others call, and that accepts some and drops the rest",
			lines: join(chain("all", "-i lo -j ACCEPT", "-j DROP"), []string{"iptables -A INPUT -p udp -j all", "iptables -A FORWARD -j all"}),
			want:  []string{ourRule, "-j all"}},
		{name: "behind a chain that returns", lines: join(chain("some", "-p udp -m udp --dport 4444 -j DROP", "-j RETURN", "-j DROP"), []string{policy, "iptables -A FORWARD -j some"}),
			want: []string{"-j some", ourRule}},

		{name: "none under a policy of accept", lines: []string{block}, want: []string{blocked}},
		{name: "none where all is accepted", lines: []string{policy, block, "iptables -A FORWARD -j ACCEPT"}, want: []string{blocked, "-j ACCEPT"}},
		{name: "none where a chain accepts all", lines: join(chain("yes", "-j ACCEPT"), []string{policy, "iptables -A FORWARD -j yes"}), want: []string{"-j yes"}},
		{name: "none where a chain drops some, then all", lines: join(chain("no", "-p udp -m udp --dport 4444 -j DROP", "-j DROP"), []string{"iptables -A FORWARD -j no"}), want: []string{"-j no"}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			c, ns := dialNew(t)
			nstest.Script(t, ns, tc.lines...)
			mustPlace(t, c, strings.Contains(strings.Join(tc.want, "\n"), "tombolo"))
			wantRules(t, ns, "FORWARD", tc.want...)
			mustPlace(t, c, false)

			// From the head it goes there, too, if it would spare packets anything.
			must.Succeed(t, c.Remove(context.Background()))
			insertOurs(t, ns)
			must.Succeed(t, expect.Err(c.Ensure(context.Background())))
			mustPlace(t, c, false)
			if len(tc.want) > 1 && tc.want[0] != ourRule && tc.want[0] != "-j mine" {
				wantRules(t, ns, "FORWARD", tc.want...)
			}
		})
	}
}

// What real ufw made: our rule goes behind what its user denies, and before what it logs as blocked.
func TestWhereTheAdmissionGoesInUfw(t *testing.T) {
	t.Parallel()
	for layout, behind := range map[string]string{"ufw-drop": "", "ufw-reject": "-A FORWARD -j ufw-after-logging-forward\n"} {
		c, ns := dialNew(t)
		nstest.Run(t, ns, "sh", "-ec", "iptables-nft-restore <testdata/layouts/"+layout+".rules")
		mustPlace(t, c, true)
		before, after, _ := strings.Cut(iptables(t, ns, "iptables", "-S", "FORWARD"), "-A FORWARD "+ourRule+"\n-A FORWARD "+ourSecond+"\n")
		if !strings.Contains(before, "-A FORWARD -j ufw-before-forward\n-A FORWARD -j ufw-after-forward\n") || !strings.HasPrefix(after, behind) || behind == "" && after != "" {
			t.Errorf("%s: before it:\n%s\nbehind it:\n%s", layout, before, after)
		}
		mustPlace(t, c, false)
	}
}

func TestWhatWasSeenSparesTheLookAtTheAdmission(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	c.verified.Use("")
	nstest.Script(t, ns, docker()...)
	wantReady(t, c, false)
	mustPlace(t, c, true)
	generation := *c.verified.Generation()
	_, sum, _ := strings.Cut(c.verified.Text(), " ")
	must.That(t, sum != "" && !strings.Contains(sum, " "), "seen: %s", sum)
	seen := func(c *Conn, generation uint32) *Conn {
		c.verified.Use(fmt.Sprintf("%d %s", generation, sum))
		return c
	}
	wantReady(t, seen(watched(t, ns, unix.NFT_MSG_GETCHAIN, func() { t.Error("it looks") }), generation), true)
	nstest.Script(t, ns, "iptables -A FORWARD -p udp --dport 4444 -j DROP")
	wantReady(t, seen(dial(t, ns), generation), false)
	wantReady(t, seen(dialMark(t, ns, 0x2000), generation+2), false) // another mark's
}

func TestWhereTheAdmissionGoesInRecordedLayouts(t *testing.T) {
	t.Parallel()
	for layout, before := range map[string]string{ // what follows our rule
		"docker-20.10": "", "docker-26": "", "docker-28": "",
		"rhel-7": "-j REJECT", "rhel-5": "-j RH-Firewall-1-INPUT",
	} {
		nstest.RunParallel(t, layout, func(t *testing.T) {
			c, ns := dialNew(t)
			restore(t, ns, layout)
			mustPlace(t, c, true)
			for _, program := range nstest.Programs() {
				_, after, _ := strings.Cut(iptables(t, ns, program, "-S", "FORWARD"), "-A FORWARD "+ourRule+"\n-A FORWARD "+ourSecond+"\n")
				if got := strings.TrimSpace(after); got != before && !strings.HasPrefix(got, "-A FORWARD "+before+" ") && got != "-A FORWARD "+before {
					t.Errorf("%s: behind our rule: %q, want %q", program, got, before)
				}
			}
			// Docker makes its rules anew at the head when it starts.
			nstest.Script(t, ns, "iptables-save -t filter >/tmp/layout.$$; iptables-restore </tmp/layout.$$; rm /tmp/layout.$$")
			mustPlace(t, c, false)
		})
	}
}

func TestWhatBecomesOfTheAdmission(t *testing.T) {
	t.Parallel()
	const (
		rule    = `rule "tombolo: admit what table inet tombolo marks from cbr0"`
		second  = `rule "tombolo: admit what table inet tombolo marks to cbr0"`
		missing = " for mark 0x10 is missing"
		surplus = ": " + rule + " with handle N does not belong there"
		forward = "chain FORWARD of table "
	)
	both := func(text string) (list []string) {
		for _, family := range []string{"ip", "ip6"} {
			if text == missing {
				list = append(list, forward+family+" filter: "+rule+text, forward+family+" filter: "+second+text)
			} else {
				list = append(list, forward+family+" filter"+text)
			}
		}
		return list
	}
	misplaced := func(rules ...string) (list []string) {
		for _, family := range []string{"ip", "ip6"} {
			for _, rule := range rules {
				list = append(list, forward+family+" filter: place of "+rule+" for mark 0x10 is where it spares packets other rules, should be right before what every packet is dropped by")
			}
		}
		return list
	}
	const drop = "-p udp -m udp --dport 4444 -j DROP"
	for _, tc := range []struct {
		name   string
		before []string
		after  []string
		diffs  []string // none: nothing is wrong
		none   bool     // no rule is needed, in the end
		rules  []string // of FORWARD, in the end
	}{
		{name: "flushed", after: []string{"iptables -F"}, diffs: both(missing), rules: []string{ourRule}},
		{name: "restored from a file with it", after: []string{saveRestore}, rules: []string{ourRule}},
		{
			name: "restored from a file with it, on top", after: []string{strings.ReplaceAll(saveRestore, "-restore", "-restore -n")},
			diffs: both(surplus), rules: []string{ourRule},
		},
		{
			name: "others insert before it, and stop some", after: []string{
				"iptables -N KUBE-ROUTER-FORWARD", "iptables -A KUBE-ROUTER-FORWARD -d 0/0 -i kube -j REJECT",
				"iptables -I FORWARD -j KUBE-ROUTER-FORWARD", "iptables -I FORWARD -m conntrack --ctstate INVALID -j DROP",
			}, rules: []string{"-m conntrack --ctstate INVALID -j DROP", "-j KUBE-ROUTER-FORWARD", ourRule},
		},
		{name: "others append an accept", after: []string{"iptables -A FORWARD -i eth0 -j ACCEPT"}, rules: []string{ourRule, "-i eth0 -j ACCEPT"}},
		{name: "others append a drop", after: []string{"iptables -A FORWARD " + drop}, diffs: misplaced(rule, second), rules: []string{drop, ourRule}},
		{name: "others append what asks a program", after: []string{"iptables -A FORWARD -p udp -j NFQUEUE --queue-num 7"}, diffs: misplaced(rule, second), rules: []string{"-p udp -j NFQUEUE --queue-num 7", ourRule}},
		{name: "others append what logs", after: []string{"iptables -A FORWARD -j LOG"}, rules: []string{ourRule, "-j LOG"}},
		{name: "others append a drop of all", after: []string{"iptables -A FORWARD -j DROP"}, rules: []string{ourRule, "-j DROP"}},
		{name: "others insert a drop of all before it", after: []string{"iptables -I FORWARD -j DROP"}, rules: []string{"-j DROP", ourRule}},
		{
			name: "others insert a chain that drops before it", after: []string{"iptables -N no", "iptables -A no -j REJECT", "iptables -I FORWARD -j no"},
			rules: []string{"-j no", ourRule},
		},
		{
			name: "others insert a drop of all before it, and append a drop", after: []string{"iptables -I FORWARD -j DROP", "iptables -A FORWARD " + drop},
			diffs: misplaced(rule, second), rules: []string{"-j DROP", drop, ourRule},
		},
		{name: "others insert a drop of all before it, and nothing else drops", after: []string{"iptables -I FORWARD -j DROP", "iptables -P FORWARD ACCEPT"}, rules: []string{"-j DROP", ourRule}},
		{
			name: "one that was there twice has a drop between", after: []string{"iptables -A FORWARD -j DROP", "iptables -A FORWARD " + ourRule},
			diffs: both(surplus), rules: []string{ourRule, "-j DROP"},
		},
		{name: "others accept all before it", after: []string{"iptables -I FORWARD -j ACCEPT"}, diffs: both(surplus), none: true, rules: []string{"-j ACCEPT"}},
		{name: "the policy turns to accept", after: []string{"iptables -P FORWARD ACCEPT"}, diffs: both(surplus), none: true},
		{
			name: "changed to something else", after: []string{"iptables -R FORWARD 1 " + strings.Replace(ourRule, "0x10/0x10", "0x1/0x1", 1)},
			diffs: misplaced(rule),
			rules: []string{ourRule},
		},
		{name: "Docker comes", after: docker()[1:], diffs: misplaced(rule, second), rules: []string{"-j DOCKER-USER", "-o docker0 -j DROP", ourRule}},
		{
			name: "Docker moves its call to the head again", before: docker(),
			after: []string{"iptables -D FORWARD -j DOCKER-USER", "iptables -I FORWARD -j DOCKER-USER"},
			rules: []string{"-j DOCKER-USER", "-o docker0 -j DROP", ourRule},
		},
		{name: "Docker is gone", before: docker(), after: []string{"iptables -F", "iptables -X DOCKER-USER"}, diffs: both(missing), rules: []string{ourRule}},
	} {
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			c, ns := dialNew(t)
			c.verified.Use("")
			if tc.before == nil {
				tc.before = []string{"iptables -P FORWARD DROP"}
			}
			nstest.Script(t, ns, tc.before...)
			mustPlace(t, c, !strings.Contains(tc.before[0], "ACCEPT"))
			nstest.Script(t, ns, tc.after...)
			wantReady(t, c, len(tc.diffs) == 0)
			wantDifferences(t, c, tc.diffs...)
			mustPlace(t, c, len(tc.diffs) > 0)
			wantRules(t, ns, "FORWARD", tc.rules...)
			want := 2
			if tc.none {
				want = 0
			}
			expect.Equal(t, strings.Count(iptables(t, ns, "iptables", "-S"), admissionComment), want, "our rules are there")
		})
	}
}

// Between the old rule and the new one there is no moment without either.
func TestAdmissionIsMovedInOneTransaction(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	nstest.Script(t, ns, docker()...)
	nstest.Script(t, ns, "iptables -I FORWARD "+ourRule)
	before := must.Of(nftnl.Generation(c.nl)).Get(t)
	mustPlace(t, c, true)
	after, err := nftnl.Generation(c.nl)
	expect.That(t, err == nil && after == nftnl.Next(before), "generation %d became %d (%v): want one transaction", before, after, err)
	wantRules(t, ns, "DOCKER-USER", "-j RETURN")
}

// What is not known may drop: it is never spared, and never relied on either.
func TestAdmissionGoesBehindWhatIsNotKnown(t *testing.T) {
	t.Parallel()
	for name, rule := range map[string]string{
		"a map of verdicts":     `udp dport vmap { 4444 : drop }`,
		"a set that is changed": `update @seen { ip saddr }`,
		"a mark that is set":    `meta mark set meta mark | 0x4`,
		"a changed header":      `ip ttl set 7`,
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			c, ns := dialNew(t)
			nftables(t, ns, `table ip filter { set seen { type ipv4_addr; size 8; flags dynamic; }; chain elsewhere { drop; };
				chain FORWARD { type filter hook forward priority filter; policy drop; `+rule+`; }; }`)
			mustPlace(t, c, true)
			list := nftables(t, ns, "list", "chain", "ip", "filter", "FORWARD")
			lines := strings.Split(strings.TrimSpace(list), "\n")
			expect.That(t, strings.Contains(lines[len(lines)-4], "tombolo"), "our rule is not the last one:\n%s", list)
			// Nor is one that stands before it left there.
			must.Succeed(t, c.Remove(context.Background()))
			nftables(t, ns, `insert rule ip filter FORWARD meta mark & 0x10 == 0x10 counter accept comment "`+admissionComment+`"`)
			wantReady(t, c, false)
			mustPlace(t, c, true)
			expect.NoDiff(t, cmp.Diff(list, nftables(t, ns, "list", "chain", "ip", "filter", "FORWARD")))
		})
	}
}

// Where a chain that is called for all begins to drop some first, no place is left that overrides nothing; and where
// it ends, there is one again.
func TestAdmissionLeavesNoDropOfAChainVoid(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	nstest.Script(t, ns, "iptables -N no", "iptables -A no -j DROP", "iptables -A FORWARD -j no")
	mustPlace(t, c, true)
	wantRules(t, ns, "FORWARD", ourRule, "-j no")
	nstest.Script(t, ns, "iptables -I no -p udp --dport 4444 -j DROP")
	wantReady(t, c, false)
	mustPlace(t, c, true)
	wantRules(t, ns, "FORWARD", "-j no")
	nstest.Script(t, ns, "iptables -D no 1")
	mustPlace(t, c, true)
	wantRules(t, ns, "FORWARD", ourRule, "-j no")
	// Behind a drop of all it stays, whatever comes later.
	nstest.Script(t, ns, "iptables -I no -p udp --dport 4444 -j DROP", "iptables -I FORWARD -j DROP")
	mustPlace(t, c, false)
	wantRules(t, ns, "FORWARD", "-j DROP", ourRule, "-j no")
}
