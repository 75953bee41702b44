package foreign

import (
	"context"
	"encoding/binary"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// iptables runs iptables (or, with "ip6tables", that) over nf_tables.
func iptables(tb testing.TB, ns *netns.NS, program string, args ...string) string {
	tb.Helper()
	return nstest.Run(tb, ns, program+"-nft", args...)
}

const (
	admissionComment = "tombolo: admit what table inet tombolo marks"
	// ourRule is how iptables prints and takes the first of our rules. The second always follows it.
	ourRule     = `-i cbr0 -m mark --mark 0x10/0x10 -m comment --comment "tombolo: admit what table inet tombolo marks from cbr0" -j ACCEPT`
	ourSecond   = `-o cbr0 -m mark --mark 0x10/0x10 -m comment --comment "tombolo: admit what table inet tombolo marks to cbr0" -j ACCEPT`
	saveRestore = "iptables-save >/tmp/saved.$$; iptables-restore </tmp/saved.$$; rm /tmp/saved.$$"
)

func mustPlace(tb testing.TB, c *Conn, wantChanged bool) {
	tb.Helper()
	changed := must.Of(c.Ensure(context.Background())).Get(tb)
	expect.Equal(tb, changed, wantChanged, "changed")
	wantReady(tb, c, true)
	expect.Of(c.Check(context.Background())).Len(tb, 0, "after Admit")
}

func wantReady(tb testing.TB, c *Conn, want bool) {
	tb.Helper()
	expect.Of(c.Ready(context.Background())).Is(tb, want, "Ready")
}

// wantDifferences compares what CheckAdmission says.
func wantDifferences(tb testing.TB, c *Conn, want ...string) {
	tb.Helper()
	diffs := must.Of(c.Check(context.Background())).Get(tb)
	var got []string
	for _, d := range diffs {
		got = append(got, regexp.MustCompile(`handle \d+`).ReplaceAllString(d.String(), "handle N"))
	}
	expect.NoDiff(tb, cmp.Diff(want, got), "differences")
}

// insertOurs puts both of our rules at the head of FORWARD.
func insertOurs(tb testing.TB, ns *netns.NS) {
	tb.Helper()
	nstest.Script(tb, ns, "iptables -I FORWARD "+ourSecond, "iptables -I FORWARD "+ourRule)
}

// wantRules compares what iptables prints of a chain. The second of our rules is expected behind the first.
func wantRules(tb testing.TB, ns *netns.NS, chain string, rules ...string) {
	tb.Helper()
	var want []string
	for _, r := range rules {
		want = append(want, r)
		if second := strings.NewReplacer("-i cbr0", "-o cbr0", "from", "to").Replace(r); strings.Contains(r, "marks from cbr0") {
			want = append(want, second)
		}
	}
	for _, program := range nstest.Programs() {
		var got []string
		for _, line := range strings.Split(strings.TrimSpace(iptables(tb, ns, program, "-S", chain)), "\n") {
			if rule, ok := strings.CutPrefix(line, "-A "+chain+" "); ok {
				got = append(got, rule)
			}
		}
		expect.NoDiff(tb, cmp.Diff(want, got), "%s -S %s", program, chain)
	}
}

func TestAdmissionIsARuleThatIptablesCanWorkWith(t *testing.T) {
	t.Parallel()
	for _, program := range nstest.Programs() {
		nstest.RunParallel(t, program, func(t *testing.T) {
			c, ns := dialNew(t)
			run := func(args ...string) string { t.Helper(); return iptables(t, ns, program, args...) }
			nstest.Run(t, ns, program+"-nft", "-P", "FORWARD", "DROP")
			run("-A", "FORWARD", "-i", "eth7", "-j", "ACCEPT")
			mustPlace(t, c, true)

			printed := "-P INPUT ACCEPT\n-P FORWARD DROP\n-P OUTPUT ACCEPT\n-A FORWARD -i eth7 -j ACCEPT\n-A FORWARD " + ourRule + "\n-A FORWARD " + ourSecond + "\n"
			expect.NoDiff(t, cmp.Diff(printed, run("-S")), "-S")
			if listing := run("-L", "FORWARD", "-n"); !strings.Contains(listing, "mark match 0x10/0x10 /* tombolo: admit what table inet tombolo marks from cbr0 */") {
				t.Errorf("-L:\n%s", listing)
			}
			rule := []string{"FORWARD", "-i", "cbr0", "-m", "mark", "--mark", "0x10/0x10", "-m", "comment", "--comment", admissionComment + " from cbr0", "-j", "ACCEPT"}
			run(append([]string{"-C"}, rule...)...)

			// Saved and restored, twice, it is printed the same, and still is the one rule.
			for range 2 {
				nstest.Run(t, ns, "sh", "-ec", strings.ReplaceAll(saveRestore, "iptables", program+"-nft"))
				expect.NoDiff(t, cmp.Diff(printed, run("-S")), "restored")
				run(append([]string{"-C"}, rule...)...)
				mustPlace(t, c, false)
			}
			run(append([]string{"-D"}, rule...)...) // in iptables' form
			mustPlace(t, c, true)
			run(append([]string{"-D"}, rule...)...) // in ours
			left := run("-S", "FORWARD")
			expect.That(t, !strings.Contains(left, "from cbr0"), "deleted:\n%s", left)
		})
	}
}

func TestEnsureMakesNoTableAndNoChain(t *testing.T) {
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
		nstest.RunParallel(t, tc.name, func(t *testing.T) {
			c, ns := dialNew(t)
			before := nftables(t, ns, "list", "ruleset")
			nftables(t, ns, tc.ruleset)
			mustPlace(t, c, false)
			expect.Success(t, c.Remove(context.Background()))
			expect.Equal(t, nftables(t, ns, "list", "ruleset"), before+tc.ruleset, "became")
		})
	}
}

func TestReadyNoticesAChainThatAppears(t *testing.T) {
	t.Parallel()
	for _, program := range nstest.Programs() {
		c, ns := dialNew(t)
		c.verified.Use("")
		mustPlace(t, c, false)
		// One that drops nothing is no difference.
		iptables(t, ns, program, "-P", "FORWARD", "ACCEPT")
		iptables(t, ns, program, "-A", "FORWARD", "-s", map[string]string{"iptables": "10.22.0.2", "ip6tables": "fd00::2"}[program], "-j", "ACCEPT")
		wantReady(t, c, true)
		mustPlace(t, c, false)
		iptables(t, ns, program, "-P", "FORWARD", "DROP")
		wantReady(t, c, false)
		mustPlace(t, c, true)
		rules := iptables(t, ns, program, "-S", "FORWARD")
		expect.That(t, strings.HasSuffix(rules, "-A FORWARD "+ourSecond+"\n"), "%s: %s", program, rules)
		nftables(t, ns, "delete table "+map[string]string{"iptables": "ip", "ip6tables": "ip6"}[program]+" filter")
		wantReady(t, c, true)
		mustPlace(t, c, false)
	}
}

func TestAdmissionFollowsTheMark(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	nstest.Script(t, ns, "iptables -P FORWARD DROP")
	mustPlace(t, c, true)
	other := dialMark(t, ns, 0x30000)
	wantReady(t, other, false)
	mustPlace(t, other, true)
	wantRules(t, ns, "FORWARD", strings.ReplaceAll(ourRule, "0x10", "0x30000"))
	wantReady(t, c, false)
}

// Where the reference's plugin has made its chains, CNI-FORWARD calls CNI-ADMIN.
func TestAnOperatorsChainIsCalledOnce(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	c = On(c.nl, &Config{AdminChain: "CNI-ADMIN"})
	nstest.Script(t, ns, "iptables -N CNI-FORWARD", "iptables -N CNI-ADMIN", "iptables -A INPUT -j CNI-ADMIN", "iptables -A FORWARD -j CNI-FORWARD")
	mustPlace(t, c, true)
	wantRules(t, ns, "FORWARD", `-m comment --comment "tombolo: the operator\'s rules first" -j CNI-ADMIN`, "-j CNI-FORWARD")
	nstest.Script(t, ns, "iptables -D FORWARD 1", "iptables -A CNI-FORWARD -j CNI-ADMIN")
	mustPlace(t, c, false)
}

func TestRemoveTakesOurRulesOut(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	ctx := context.Background()
	nstest.Script(t, ns, docker()...)
	mustPlace(t, c, true) // in our form
	nstest.Script(t, ns,
		"iptables -I FORWARD "+ourRule, // in iptables' form
		"iptables -A FORWARD "+strings.ReplaceAll(ourRule, "0x10", "0x2000"),
		"iptables -A FORWARD -m mark --mark 0x10/0x10 -j ACCEPT",
		"iptables -A FORWARD -m comment --comment tombolo -j ACCEPT",
		"iptables -t mangle -A FORWARD "+ourRule)
	must.Succeed(t, c.Remove(ctx))
	wantRules(t, ns, "FORWARD", "-j DOCKER-USER", "-o docker0 -j DROP", "-m mark --mark 0x10/0x10 -j ACCEPT", "-m comment --comment tombolo -j ACCEPT")
	before := nftables(t, ns, "-a", "list", "ruleset")
	must.Succeed(t, c.Remove(ctx))
	if after := nftables(t, ns, "-a", "list", "ruleset"); after != before || !strings.Contains(after, "mangle") {
		t.Errorf("a second time (-before +after):\n%s", cmp.Diff(before, after))
	}
}

// iptables before 1.8.8 restores the mark as a match of its own too.
func TestAdmissionIsKnownWithTheMarkAsAMatch(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	nstest.Script(t, ns, "iptables -P FORWARD DROP")
	for _, family := range []uint8{unix.NFPROTO_IPV4, unix.NFPROTO_IPV6} {
		tr := nftnl.Begin(nil)
		chain := chain{family, iptablesTable, iptablesForward}
		tr.AddRule("add rule to", chain, family, netlink.Append, "", nftnl.Collect(func(x *nftnl.Expressions) {
			mark := xt.Unknown(append(binary.NativeEndian.AppendUint32(binary.NativeEndian.AppendUint32(nil, 0x10), 0x10), make([]byte, 8)...))
			x.Meta(expr.MetaKeyIIFNAME, nftnl.First)
			x.Compare(expr.CmpOpEq, []byte("cbr0\x00"))
			x.Add(&expr.Match{Name: "mark", Rev: 1, Info: &mark}) // struct xt_mark_mtinfo1, padded as x_tables has it
			comment := xt.Comment(admissionComment + " from cbr0")
			x.Add(&expr.Match{Name: "comment", Info: &comment})
			x.Add(&expr.Verdict{Kind: expr.VerdictAccept})
		}), chain.named(unix.NFTA_RULE_CHAIN)...)
		must.Succeed(t, tr.Commit(c.nl))
	}
	expect.Contains(t, iptables(t, ns, "iptables", "-S", "FORWARD"), ourRule, "iptables takes it for another")
	mustPlace(t, c, true) // the second is missing
	rules := iptables(t, ns, "iptables", "-S", "FORWARD")
	expect.That(t, strings.HasSuffix(rules, ourSecond+"\n-A FORWARD "+ourRule+"\n"), "%s", rules)
}

func TestEnsureOf32AtOnceMakesOneRule(t *testing.T) {
	t.Parallel()
	conns := many(t, 32)
	_, ns := dialNew(t)
	for i := range conns {
		conns[i] = dial(t, ns)
	}
	nstest.Script(t, ns, docker()...)
	ctx := context.Background()
	nstest.NoErrors(t, "Ensure", nstest.AtOnce(conns, func(i int, c *Conn) error {
		for range 5 {
			if _, err := c.Ensure(ctx); err != nil {
				return err
			}
			if ok, err := c.Ready(ctx); err != nil || !ok {
				return fmt.Errorf("ready: %v, %w", ok, err)
			}
		}
		return nil
	}))
	wantRules(t, ns, "FORWARD", "-j DOCKER-USER", "-o docker0 -j DROP", ourRule)
	nstest.NoErrors(t, "withdrawals", nstest.AtOnce(conns, func(_ int, c *Conn) error { return c.Remove(ctx) }))
	wantRules(t, ns, "FORWARD", "-j DOCKER-USER", "-o docker0 -j DROP")
}

// While iptables inserts, deletes, flushes and restores.
func TestEnsureBesideIptables(t *testing.T) {
	t.Parallel()
	conns := many(t, 9)
	_, ns := dialNew(t)
	for i := range conns {
		conns[i] = dial(t, ns)
	}
	nstest.Script(t, ns, "iptables -P FORWARD DROP")
	ctx := context.Background()
	nstest.NoErrors(t, "changes", nstest.AtOnce(conns, func(i int, c *Conn) error {
		for range 8 {
			if i > 0 {
				if _, err := c.Ensure(ctx); err != nil {
					return err
				}
				continue
			}
			for _, program := range nstest.Programs() {
				lines := "iptables -w -I FORWARD -i eth0 -j ACCEPT; iptables -w -D FORWARD -i eth0 -j ACCEPT; iptables -w -F FORWARD; " +
					"iptables-save -t filter | iptables-restore -w"
				if _, err := nstest.Try(ns, "sh", "-ec", strings.ReplaceAll(lines, "iptables", program+"-nft")); err != nil {
					return err
				}
			}
		}
		return nil
	}))
	must.Succeed(t, expect.Err(conns[0].Ensure(ctx)))
	mustPlace(t, conns[0], false)
	wantRules(t, ns, "FORWARD", ourRule)
}
