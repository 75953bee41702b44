package nft

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// iptables runs iptables (or, with "ip6tables", that) over nf_tables.
func iptables(tb testing.TB, ns *netns.NS, program string, args ...string) string {
	tb.Helper()
	return nstest.Run(tb, ns, program+"-nft", args...)
}

// script runs lines of "iptables …" for both families.
func script(tb testing.TB, ns *netns.NS, lines ...string) {
	tb.Helper()
	for _, program := range programs() {
		for _, line := range lines {
			nstest.Run(tb, ns, "sh", "-ec", strings.ReplaceAll(line, "iptables", program+"-nft"))
		}
	}
}

func programs() []string { return []string{"iptables", "ip6tables"} }

const (
	// ourRule is how iptables prints and takes our rule.
	ourRule     = `-m mark --mark 0x1000/0x1000 -m comment --comment "tombolo: admit what table inet tombolo marks" -j ACCEPT`
	saveRestore = "iptables-save >/tmp/saved.$$; iptables-restore </tmp/saved.$$; rm /tmp/saved.$$"
)

func mustAdmit(tb testing.TB, c *Conn, wantChanged bool) []Admission {
	tb.Helper()
	list, changed, err := c.Admit(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	if changed != wantChanged {
		tb.Errorf("changed is %v", changed)
	}
	wantAdmitted(tb, c, list, true)
	if diffs, err := c.CheckAdmission(context.Background()); err != nil || len(diffs) > 0 {
		tb.Errorf("after Admit: %v, %v", diffs, err)
	}
	return list
}

func wantAdmitted(tb testing.TB, c *Conn, list []Admission, want bool) {
	tb.Helper()
	if got, err := c.Admitted(context.Background(), list); err != nil || got != want {
		tb.Errorf("Admitted: %v, %v", got, err)
	}
}

// wantDifferences compares what CheckAdmission says.
func wantDifferences(tb testing.TB, c *Conn, want ...string) {
	tb.Helper()
	diffs, err := c.CheckAdmission(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	var got []string
	for _, d := range diffs {
		got = append(got, regexp.MustCompile(`handle \d+`).ReplaceAllString(d.String(), "handle N"))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		tb.Errorf("differences (-want +got):\n%s", diff)
	}
}

// wantRules compares what iptables prints of a chain.
func wantRules(tb testing.TB, ns *netns.NS, chain string, want ...string) {
	tb.Helper()
	for _, program := range programs() {
		var got []string
		for _, line := range strings.Split(strings.TrimSpace(iptables(tb, ns, program, "-S", chain)), "\n") {
			if rule, ok := strings.CutPrefix(line, "-A "+chain+" "); ok {
				got = append(got, rule)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			tb.Errorf("%s -S %s (-want +got):\n%s", program, chain, diff)
		}
	}
}

func TestAdmissionIsARuleThatIptablesCanWorkWith(t *testing.T) {
	t.Parallel()
	for _, program := range programs() {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			run := func(args ...string) string { t.Helper(); return iptables(t, ns, program, args...) }
			nstest.Run(t, ns, program+"-nft", "-P", "FORWARD", "DROP")
			run("-A", "FORWARD", "-i", "eth7", "-j", "ACCEPT")
			mustAdmit(t, c, true)

			printed := "-P INPUT ACCEPT\n-P FORWARD DROP\n-P OUTPUT ACCEPT\n-A FORWARD " + ourRule + "\n-A FORWARD -i eth7 -j ACCEPT\n"
			if diff := cmp.Diff(printed, run("-S")); diff != "" {
				t.Errorf("-S (-want +got):\n%s", diff)
			}
			if listing := run("-L", "FORWARD", "-n"); !strings.Contains(listing, "mark match 0x1000/0x1000 /* tombolo: admit what table inet tombolo marks */") {
				t.Errorf("-L:\n%s", listing)
			}
			rule := []string{"FORWARD", "-m", "mark", "--mark", "0x1000/0x1000", "-m", "comment", "--comment", admissionComment, "-j", "ACCEPT"}
			run(append([]string{"-C"}, rule...)...)

			// Saved and restored, twice, it is printed the same, and still is the one rule.
			for range 2 {
				nstest.Run(t, ns, "sh", "-ec", strings.ReplaceAll(saveRestore, "iptables", program+"-nft"))
				if diff := cmp.Diff(printed, run("-S")); diff != "" {
					t.Errorf("restored (-want +got):\n%s", diff)
				}
				run(append([]string{"-C"}, rule...)...)
				mustAdmit(t, c, false)
			}
			run(append([]string{"-D"}, rule...)...) // in iptables' form
			mustAdmit(t, c, true)
			run(append([]string{"-D"}, rule...)...) // in ours
			if left := run("-S", "FORWARD"); strings.Contains(left, "tombolo") {
				t.Errorf("deleted:\n%s", left)
			}
		})
	}
}

func TestAdmitMakesNoTableAndNoChain(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ name, ruleset string }{
		{"nothing", ""},
		{"a table without chains", "table ip filter {\n}\n"},
		{"a chain FORWARD that is not called", "table ip6 filter {\n\tchain FORWARD {\n\t}\n}\n"},
		{"a chain of another name", "table ip filter {\n\tchain forward {\n\t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n"},
		{"a chain FORWARD of another hook", "table ip filter {\n\tchain FORWARD {\n\t\ttype filter hook input priority filter; policy drop;\n\t}\n}\n"},
		{"a table of another name", "table ip mangle {\n\tchain FORWARD {\n\t\ttype filter hook forward priority mangle; policy accept;\n\t}\n}\n"},
		{"a table of another family", "table inet filter {\n\tchain FORWARD {\n\t\ttype filter hook forward priority filter; policy drop;\n\t}\n}\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			nft(t, ns, tc.ruleset)
			list := mustAdmit(t, c, false)
			if diff := cmp.Diff([]Admission{{}, {IPv6: true}}, list); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if err := c.Withdraw(context.Background()); err != nil {
				t.Error(err)
			}
			if got := nft(t, ns, "list", "ruleset"); got != tc.ruleset {
				t.Errorf("became:\n%s", got)
			}
		})
	}
}

func TestAdmittedNoticesAChainThatAppears(t *testing.T) {
	t.Parallel()
	for i, program := range programs() {
		c, ns := dialNew(t)
		list := mustAdmit(t, c, false)
		iptables(t, ns, program, "-P", "FORWARD", "DROP")
		wantAdmitted(t, c, list, false)
		list = mustAdmit(t, c, true)
		if list[i].Chain != "FORWARD" || list[1-i].Chain != "" {
			t.Errorf("%s: %+v", program, list)
		}
		nft(t, ns, "flush", "ruleset")
		wantAdmitted(t, c, list, false)
		mustAdmit(t, c, false)
	}
}

func TestAdmittedIsFalseForWhatAdmitDidNotGive(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	script(t, ns, "iptables -P FORWARD DROP", "iptables -A FORWARD -j ACCEPT", "iptables -A FORWARD -i eth7 -j ACCEPT")
	list := mustAdmit(t, c, true)
	change := func(do func(*Admission)) []Admission {
		changed := append([]Admission(nil), list...)
		do(&changed[1])
		return changed
	}
	for name, wrong := range map[string][]Admission{
		"none":                     nil,
		"one family":               list[:1],
		"one family twice":         {list[0], list[0]},
		"another rule's handle":    change(func(a *Admission) { a.Handle -= 2 }),
		"no rule's handle":         change(func(a *Admission) { a.Handle += 100 }),
		"another chain":            change(func(a *Admission) { a.Chain = "INPUT" }),
		"no chain":                 change(func(a *Admission) { a.Chain = "NONE" }),
		"a jump that is none":      change(func(a *Admission) { a.Jump = a.Handle }),
		"a jump that is not there": change(func(a *Admission) { a.Jump = 99 }),
		"no chain to put one into": change(func(a *Admission) { *a = Admission{IPv6: true} }),
	} {
		if got, err := c.Admitted(context.Background(), wrong); err != nil || got {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	wantAdmitted(t, dialMark(t, ns, 0x2000), list, false)
	wantAdmitted(t, c, list, true)
}

func TestAdmissionsAreKeptAsJSON(t *testing.T) {
	t.Parallel()
	list := []Admission{{Chain: "FORWARD", Handle: 7}, {IPv6: true, Chain: "DOCKER-USER", Handle: 1 << 60, Jump: 3}}
	b, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	want := `[{"chain":"FORWARD","handle":7},{"ipv6":true,"chain":"DOCKER-USER","handle":1152921504606846976,"jump":3}]`
	if string(b) != want {
		t.Errorf("got %s", b)
	}
	var again []Admission
	if err := json.Unmarshal(b, &again); err != nil || !cmp.Equal(list, again) {
		t.Errorf("read back: %v, %v", again, err)
	}
}

// docker is what Docker makes: the call of DOCKER-USER at the head, and in it the
// return that versions before 28 put there.
func docker() []string {
	return []string{
		"iptables -P FORWARD DROP", "iptables -N DOCKER-USER", "iptables -A DOCKER-USER -j RETURN",
		"iptables -A FORWARD -j DOCKER-USER", "iptables -A FORWARD -o docker0 -j DROP",
	}
}

func TestAdmissionGoesWherePacketsAreSureToMeetIt(t *testing.T) {
	t.Parallel()
	forward := "FORWARD"
	for _, tc := range []struct {
		name  string
		lines []string
		chain string
	}{
		{"an empty chain", []string{"iptables -P FORWARD DROP"}, forward},
		{"a chain that drops all", []string{"iptables -A FORWARD -j DROP"}, forward},
		{"a policy that accepts", []string{"iptables -P FORWARD ACCEPT"}, forward},
		{"Docker", docker(), dockerUser},
		{"a DOCKER-USER that nobody calls", []string{"iptables -P FORWARD DROP", "iptables -N DOCKER-USER"}, forward},
		{"a DOCKER-USER that is called for some", []string{"iptables -N DOCKER-USER", "iptables -A FORWARD -i eth0 -j DOCKER-USER"}, forward},
		{"a DOCKER-USER that is called from elsewhere", []string{"iptables -P FORWARD DROP", "iptables -N DOCKER-USER", "iptables -A INPUT -j DOCKER-USER"}, forward},
		{"a DOCKER-USER behind a drop", []string{"iptables -N DOCKER-USER", "iptables -A FORWARD -j DROP", "iptables -A FORWARD -j DOCKER-USER"}, forward},
		{"a DOCKER-USER behind a chain that rejects", []string{
			"iptables -N DOCKER-USER", "iptables -N no", "iptables -A no -j REJECT", "iptables -A FORWARD -j no", "iptables -A FORWARD -j DOCKER-USER",
		}, forward},
		{"a DOCKER-USER behind others' chains", []string{
			"iptables -N DOCKER-USER", "iptables -N other", "iptables -A other -i eth0 -j DROP", "iptables -A other -j RETURN",
			"iptables -A FORWARD -j other", "iptables -A FORWARD -m mark --mark 0x4000/0x4000 -j DROP", "iptables -A FORWARD -j LOG",
			"iptables -A FORWARD -j DOCKER-USER",
		}, dockerUser},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			script(t, ns, tc.lines...)
			list := mustAdmit(t, c, true)
			for i, program := range programs() {
				if list[i].Chain != tc.chain || (list[i].Jump != 0) != (tc.chain == dockerUser) {
					t.Errorf("%s: %+v", program, list[i])
				}
				lines := strings.Split(iptables(t, ns, program, "-S", tc.chain), "\n")
				if lines[1] != "-A "+tc.chain+" "+ourRule {
					t.Errorf("%s: at the head of %s is: %s", program, tc.chain, lines[1])
				}
			}
			mustAdmit(t, c, false)
		})
	}
}

func TestWhatBecomesOfTheAdmission(t *testing.T) {
	t.Parallel()
	const (
		rule    = `rule "tombolo: admit what table inet tombolo marks" for mark 0x1000`
		missing = ": " + rule + " is missing"
		hidden  = ": place of " + rule + " is where no packet gets to it, should be before what every packet is dropped or returned by"
		forward = "chain FORWARD of table "
	)
	both := func(what, text string) []string {
		return []string{what + "ip filter" + text, what + "ip6 filter" + text}
	}
	for _, tc := range []struct {
		name    string
		before  []string
		after   []string
		noticed bool     // by Admitted
		diffs   []string // none: nothing is wrong
		chain   string
		rules   []string // of that chain, in the end
	}{
		{
			name: "flushed", after: []string{"iptables -F"},
			noticed: true, diffs: both(forward, missing), chain: "FORWARD", rules: []string{ourRule},
		}, {
			name: "deleted", after: []string{"iptables -D FORWARD 1"},
			noticed: true, diffs: both(forward, missing), chain: "FORWARD", rules: []string{ourRule},
		}, {
			name: "restored from a file without it", after: []string{`printf '*filter\n:FORWARD DROP\n-A FORWARD -i eth0 -j ACCEPT\nCOMMIT\n' | iptables-restore`},
			noticed: true, diffs: both(forward, missing), chain: "FORWARD", rules: []string{ourRule, "-i eth0 -j ACCEPT"},
		}, {
			name: "restored from a file with it", after: []string{saveRestore},
			noticed: true, chain: "FORWARD", rules: []string{ourRule},
		}, {
			name: "restored from a file with it, on top", after: []string{strings.ReplaceAll(saveRestore, "-restore", "-restore -n")},
			diffs: both(forward, ": rule \"tombolo: admit what table inet tombolo marks\" with handle N does not belong there"),
			chain: "FORWARD", rules: []string{ourRule},
		}, {
			name: "others insert before it, and stop nobody", after: []string{
				"iptables -N KUBE-ROUTER-FORWARD", "iptables -A KUBE-ROUTER-FORWARD -d 0/0 -i kube -j REJECT",
				"iptables -I FORWARD -j KUBE-ROUTER-FORWARD", "iptables -I FORWARD -m conntrack --ctstate INVALID -j DROP",
			},
			chain: "FORWARD", rules: []string{"-m conntrack --ctstate INVALID -j DROP", "-j KUBE-ROUTER-FORWARD", ourRule},
		}, {
			name: "others insert a drop before it", after: []string{"iptables -I FORWARD -j DROP"},
			diffs: both(forward, hidden), chain: "FORWARD", rules: []string{ourRule, "-j DROP"},
		}, {
			name: "others insert a return before it", after: []string{"iptables -I FORWARD -j RETURN"},
			diffs: both(forward, hidden), chain: "FORWARD", rules: []string{ourRule, "-j RETURN"},
		}, {
			name: "others insert a chain that drops before it", after: []string{"iptables -N no", "iptables -A no -j REJECT", "iptables -I FORWARD -j no"},
			diffs: both(forward, hidden), chain: "FORWARD", rules: []string{ourRule, "-j no"},
		}, {
			name: "others accept all before it", after: []string{"iptables -I FORWARD -j ACCEPT"},
			chain: "FORWARD", rules: []string{"-j ACCEPT", ourRule},
		}, {
			name: "others accept the mark before it", after: []string{"iptables -I FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT"},
			chain: "FORWARD", rules: []string{"-m mark --mark 0x1000/0x1000 -j ACCEPT", ourRule},
		}, {
			name: "changed to something else", after: []string{"iptables -R FORWARD 1 " + strings.Replace(ourRule, "0x1000/0x1000", "0x1/0x1", 1)},
			noticed: true, diffs: []string{
				forward + `ip filter: rule "tombolo: admit what table inet tombolo marks" with handle N does not belong there`,
				forward + "ip filter" + missing,
				forward + `ip6 filter: rule "tombolo: admit what table inet tombolo marks" with handle N does not belong there`,
				forward + "ip6 filter" + missing,
			}, chain: "FORWARD", rules: []string{ourRule},
		}, {
			name: "Docker comes", after: docker()[1:],
			chain: "FORWARD", rules: []string{ourRule, "-j DOCKER-USER", "-o docker0 -j DROP"},
		}, {
			name: "Docker moves its call to the head again", before: docker(),
			after:   []string{"iptables -D FORWARD -j DOCKER-USER", "iptables -I FORWARD -j DOCKER-USER"},
			noticed: true, chain: dockerUser, rules: []string{ourRule, "-j RETURN"},
		}, {
			name: "Docker's call is gone", before: docker(), after: []string{"iptables -F FORWARD"},
			noticed: true, diffs: both("chain DOCKER-USER of table ", hidden), chain: "FORWARD", rules: []string{ourRule},
		}, {
			name: "Docker is gone", before: docker(), after: []string{"iptables -F", "iptables -X DOCKER-USER"},
			noticed: true, diffs: both(forward, missing), chain: "FORWARD", rules: []string{ourRule},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c, ns := dialNew(t)
			if tc.before == nil {
				tc.before = []string{"iptables -P FORWARD DROP"}
			}
			script(t, ns, tc.before...)
			list := mustAdmit(t, c, true)
			script(t, ns, tc.after...)
			wantAdmitted(t, c, list, !tc.noticed)
			wantDifferences(t, c, tc.diffs...)
			mustAdmit(t, c, len(tc.diffs) > 0)
			wantRules(t, ns, tc.chain, tc.rules...)
			if got := strings.Count(iptables(t, ns, "iptables", "-S"), admissionComment); got != 1 {
				t.Errorf("our rule is there %d times", got)
			}
		})
	}
}

func TestAdmissionFollowsTheMark(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	script(t, ns, "iptables -P FORWARD DROP")
	old := mustAdmit(t, c, true)
	other := dialMark(t, ns, 0x30000)
	wantAdmitted(t, other, old, false)
	mustAdmit(t, other, true)
	wantRules(t, ns, "FORWARD", strings.ReplaceAll(ourRule, "0x1000", "0x30000"))
	wantAdmitted(t, c, old, false)
}

func TestWithdrawTakesOurRulesOutEverywhere(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	ctx := context.Background()
	script(t, ns, docker()...)
	mustAdmit(t, c, true) // in DOCKER-USER, in our form
	script(t, ns,
		"iptables -I FORWARD "+ourRule, // in iptables' form
		"iptables -A INPUT "+strings.ReplaceAll(ourRule, "0x1000", "0x2000"),
		"iptables -A FORWARD -m mark --mark 0x1000/0x1000 -j ACCEPT",
		"iptables -A FORWARD -m comment --comment tombolo -j ACCEPT",
		"iptables -t mangle -A FORWARD "+ourRule)
	if err := c.Withdraw(ctx); err != nil {
		t.Fatal(err)
	}
	wantRules(t, ns, "FORWARD", "-j DOCKER-USER", "-o docker0 -j DROP", "-m mark --mark 0x1000/0x1000 -j ACCEPT", "-m comment --comment tombolo -j ACCEPT")
	wantRules(t, ns, dockerUser, "-j RETURN")
	wantRules(t, ns, "INPUT")
	before := nft(t, ns, "-a", "list", "ruleset")
	if err := c.Withdraw(ctx); err != nil {
		t.Fatal(err)
	}
	if after := nft(t, ns, "-a", "list", "ruleset"); after != before || !strings.Contains(after, "mangle") {
		t.Errorf("a second time (-before +after):\n%s", cmp.Diff(before, after))
	}
}

// iptables before 1.8.8 restores the mark as a match of its own too.
func TestAdmissionIsKnownWithTheMarkAsAMatch(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	script(t, ns, "iptables -P FORWARD DROP")
	for _, f := range families() {
		tr := begin(nil)
		chain := foreignChain{f.proto, iptablesTable, iptablesForward}
		tr.add("add rule to", chain, f.proto, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, func(e *nl.Encoder) {
			e.String(unix.NFTA_RULE_TABLE, chain.table)
			e.String(unix.NFTA_RULE_CHAIN, chain.name)
			e.Nest(unix.NFTA_RULE_EXPRESSIONS, func(e *nl.Encoder) {
				x := expressions{e}
				// struct xt_mark_mtinfo1, padded as x_tables has it
				mark := binary.NativeEndian.AppendUint32(nil, 0x1000)
				x.xtMatch("mark", 1, append(append(mark, mark...), make([]byte, 8)...))
				x.xtMatch("comment", 0, append([]byte(admissionComment), make([]byte, 256-len(admissionComment))...))
				x.add("immediate", func(e *nl.Encoder) {
					e.Uint32BE(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
					e.Nest(unix.NFTA_IMMEDIATE_DATA, func(e *nl.Encoder) {
						e.Nest(unix.NFTA_DATA_VERDICT, func(e *nl.Encoder) { e.Uint32BE(unix.NFTA_VERDICT_CODE, policyAccept) })
					})
				})
			})
		})
		if err := c.commit(tr); err != nil {
			t.Fatal(err)
		}
	}
	wantRules(t, ns, "FORWARD", ourRule) // so iptables takes it for the same
	mustAdmit(t, c, false)
}

func (x expressions) xtMatch(name string, revision uint32, info []byte) {
	x.add("match", func(e *nl.Encoder) {
		e.String(unix.NFTA_MATCH_NAME, name)
		e.Uint32BE(unix.NFTA_MATCH_REV, revision)
		e.Bytes(unix.NFTA_MATCH_INFO, info)
	})
}

func TestAdmitOf32AtOnceMakesOneRule(t *testing.T) {
	t.Parallel()
	conns := many(t, 32)
	ns := nstest.New(t)
	for i := range conns {
		conns[i] = dial(t, ns)
	}
	script(t, ns, docker()...)
	ctx := context.Background()
	noErrors(t, "admits", atOnce(t, conns, func(i int, c *Conn) error {
		for range 5 {
			list, _, err := c.Admit(ctx)
			if err != nil {
				return err
			}
			if ok, err := c.Admitted(ctx, list); err != nil || !ok {
				return fmt.Errorf("admitted: %v, %w", ok, err)
			}
		}
		return nil
	}))
	wantRules(t, ns, dockerUser, ourRule, "-j RETURN")
	noErrors(t, "withdrawals", atOnce(t, conns, func(_ int, c *Conn) error { return c.Withdraw(ctx) }))
	wantRules(t, ns, dockerUser, "-j RETURN")
}

// While iptables inserts, deletes, flushes and restores.
func TestAdmitBesideIptables(t *testing.T) {
	t.Parallel()
	conns := many(t, 9)
	ns := nstest.New(t)
	for i := range conns {
		conns[i] = dial(t, ns)
	}
	script(t, ns, "iptables -P FORWARD DROP")
	ctx := context.Background()
	noErrors(t, "changes", atOnce(t, conns, func(i int, c *Conn) error {
		for range 8 {
			if i > 0 {
				if _, _, err := c.Admit(ctx); err != nil {
					return err
				}
				continue
			}
			for _, program := range programs() {
				lines := "iptables -w -I FORWARD -i eth0 -j ACCEPT; iptables -w -D FORWARD -i eth0 -j ACCEPT; iptables -w -F FORWARD; " +
					"iptables-save -t filter | iptables-restore -w"
				if _, err := nstest.Try(ns, "sh", "-ec", strings.ReplaceAll(lines, "iptables", program+"-nft")); err != nil {
					return err
				}
			}
		}
		return nil
	}))
	if _, _, err := conns[0].Admit(ctx); err != nil {
		t.Fatal(err)
	}
	mustAdmit(t, conns[0], false)
	wantRules(t, ns, "FORWARD", ourRule)
}

// The kernel refuses such tables; whoever changes them while they are read might
// show one.
func TestWalkEndsWhereJumpsGoInCircles(t *testing.T) {
	t.Parallel()
	call := func(from, to string) foreignRule { return foreignRule{chain: from, verdict: jumps, target: to} }
	chains := map[string][]foreignRule{
		"a": {call("a", "b"), call("a", "gone")}, "b": {call("b", "b"), call("b", "a"), {chain: "b", verdict: drops}},
	}
	f := newWalk(&podPacket{}, chains).chain("a")
	if f.how != dropped || f.by != &chains["b"][2] || f.via != &chains["a"][0] {
		t.Errorf("%+v", f)
	}
}
