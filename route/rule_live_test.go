package route_test

import (
	"errors"
	"io/fs"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

func itoa(n int) string { return strconv.Itoa(n) }

// shownRules gives the lines that ip-rule(8) prints, without the kernel's own rules.
func shownRules(tb testing.TB, ns *netns.NS, family string) []string {
	tb.Helper()
	var lines []string
	for line := range strings.Lines(nstest.Run(tb, ns, "ip", family, "-details", "rule", "show")) {
		if !strings.Contains(line, "proto kernel") {
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
	}
	return lines
}

// rules is every kind of rule that the package knows, with what ip-rule(8) is to
// print for it.
func rules() []struct {
	name  string
	rule  route.Rule
	shown string
} {
	p := nstest.Prefix
	return []struct {
		name  string
		rule  route.Rule
		shown string
	}{
		{"from", route.Rule{Priority: 100, From: p("10.1.0.0/16"), Table: 7},
			"100: from 10.1.0.0/16 lookup 7 proto 116"},
		{"to, with host bits", route.Rule{Priority: 100, To: p("10.1.2.3/16"), Table: 1000},
			"100: from all to 10.1.0.0/16 lookup 1000 proto 116"},
		{"table main", route.Rule{Priority: 100, From: p("10.1.0.0/16"), To: p("10.0.0.0/8")},
			"100: from 10.1.0.0/16 to 10.0.0.0/8 lookup main proto 116"},
		{"links", route.Rule{Priority: 100, Family: unix.AF_INET, IIF: "lo", OIF: "eth7", Table: 7},
			"100: from all iif lo oif eth7 [detached] lookup 7 proto 116"},
		{"mark", route.Rule{Priority: 100, Family: unix.AF_INET, Mark: 0x1000, Table: 7},
			"100: from all fwmark 0x1000 lookup 7 proto 116"},
		{"mark and mask", route.Rule{Priority: 100, Family: unix.AF_INET, Mark: 0x1000, Mask: 0xf000, Table: 7},
			"100: from all fwmark 0x1000/0xf000 lookup 7 proto 116"},
		{"bits of the mark that are clear", route.Rule{Priority: 100, Family: unix.AF_INET, Mask: 0xf000, Table: 7},
			"100: from all fwmark 0/0xf000 lookup 7 proto 116"},
		{"type of service", route.Rule{Priority: 100, Family: unix.AF_INET, TOS: 0x10, Table: 7},
			"100: from all tos 0x10 lookup 7 proto 116"},
		{"ports", route.Rule{Priority: 100, Family: unix.AF_INET, IPProto: unix.IPPROTO_TCP,
			SrcPorts: route.PortRange{First: 10, Last: 20}, DstPorts: route.PortRange{First: 80, Last: 80}, Table: 7},
			"100: from all ipproto tcp sport 10-20 dport 80 lookup 7 proto 116"},
		{"users", route.Rule{Priority: 100, Family: unix.AF_INET, UIDs: &route.UIDRange{First: 0, Last: 0}, Table: 7},
			"100: from all uidrange 0-0 lookup 7 proto 116"},
		{"inverted", route.Rule{Priority: 100, From: p("10.1.0.0/16"), Invert: true, Table: 7},
			"100: not from 10.1.0.0/16 lookup 7 proto 116"},
		{"suppressing default routes", route.Rule{Priority: 100, Family: unix.AF_INET, SuppressPrefixLength: ptr(uint32(0))},
			"100: from all lookup main suppress_prefixlength 0 proto 116"},
		{"suppressing a group", route.Rule{Priority: 100, Family: unix.AF_INET, SuppressGroup: ptr(uint32(0))},
			"100: from all lookup main suppress_ifgroup default proto 116"},
		{"goto", route.Rule{Priority: 100, Family: unix.AF_INET, Action: route.Goto, Goto: 32766},
			"100: from all goto 32766 proto 116"},
		{"nop", route.Rule{Priority: 100, Family: unix.AF_INET, Action: route.Nop},
			"100: from all nop proto 116"},
		{"blackhole", route.Rule{Priority: 100, From: p("10.1.0.0/16"), Action: route.RuleBlackhole},
			"100: from 10.1.0.0/16 blackhole proto 116"},
		{"unreachable", route.Rule{Priority: 100, From: p("10.1.0.0/16"), Action: route.RuleUnreachable},
			"100: from 10.1.0.0/16 unreachable proto 116"},
		{"prohibit", route.Rule{Priority: 100, From: p("10.1.0.0/16"), Action: route.RuleProhibit},
			"100: from 10.1.0.0/16 prohibit proto 116"},
		{"a protocol", route.Rule{Priority: 100, From: p("10.1.0.0/16"), Table: 7, Protocol: route.ProtocolStatic},
			"100: from 10.1.0.0/16 lookup 7 proto static"},
		{"IPv6", route.Rule{Priority: 100, From: p("fd00::/8"), To: p("fd01::77/64"), Mark: 1, Table: 1000},
			"100: from fd00::/8 to fd01::/64 fwmark 0x1 lookup 1000 proto 116"},
		{"IPv6 without a prefix", route.Rule{Priority: 100, Family: unix.AF_INET6, IIF: "eth7", Table: 7},
			"100: from all iif eth7 [detached] lookup 7 proto 116"},
		{"IPv6, everything", route.Rule{Priority: 100, From: p("::/0"), Table: 7},
			"100: from all lookup 7 proto 116"},
	}
}

// TestRuleIsWhatItWasAskedToBe takes each kind of rule through its life, with
// ip-rule(8) as the referee of what is there.
func TestRuleIsWhatItWasAskedToBe(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	c := dial(t, ns)
	for _, tt := range rules() {
		t.Run(tt.name, func(t *testing.T) {
			family, number := "-4", uint8(unix.AF_INET)
			if strings.HasPrefix(tt.name, "IPv6") {
				family, number = "-6", unix.AF_INET6
			}
			defer c.RemoveRule(tt.rule)
			if changed, err := c.EnsureRule(tt.rule); !changed || err != nil {
				t.Fatalf("EnsureRule: changed %t, %v, want a change", changed, err)
			}
			if diff := cmp.Diff([]string{tt.shown}, shownRules(t, ns, family)); diff != "" {
				t.Errorf("ip rule (-want +got):\n%s", diff)
			}
			if err := c.AddRule(tt.rule); !errors.Is(err, fs.ErrExist) {
				t.Errorf("adding it again: %v, want %v", err, fs.ErrExist)
			}
			if changed, err := c.EnsureRule(tt.rule); changed || err != nil {
				t.Errorf("EnsureRule again: changed %t, %v, want no change", changed, err)
			}
			// What is listed names the rule exactly, and makes it again.
			listed := oneRule(t, c, number)
			if err := c.DelRule(listed); err != nil {
				t.Fatal(err)
			}
			if err := c.AddRule(listed); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{tt.shown}, shownRules(t, ns, family)); diff != "" {
				t.Errorf("ip rule, after the listed rule was added (-want +got):\n%s", diff)
			}
			if err := c.DelRule(tt.rule); err != nil {
				t.Fatal(err)
			}
			if err := c.DelRule(tt.rule); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("deleting it again: %v, want %v", err, fs.ErrNotExist)
			}
			if err := c.RemoveRule(tt.rule); err != nil {
				t.Errorf("RemoveRule of what is not there: %v", err)
			}
			if left := shownRules(t, ns, family); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

// oneRule lists the only rule of a family that is not the kernel's.
func oneRule(t *testing.T, c *route.Conn, family uint8) route.Rule {
	t.Helper()
	list, err := c.Rules(family)
	if err != nil {
		t.Fatal(err)
	}
	var own []route.Rule
	for _, r := range list {
		if r.Family != family {
			t.Errorf("a rule of family %d in the list of family %d", r.Family, family)
		}
		if r.Protocol != route.ProtocolKernel {
			own = append(own, r)
		}
	}
	if len(own) != 1 {
		t.Fatalf("%d rules, want 1: %v", len(own), own)
	}
	if len(own[0].Other) > 0 {
		t.Errorf("attributes %v are unknown", own[0].Other)
	}
	return own[0]
}

func TestRuleWithoutPriorityIsAddedEachTime(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	c := dial(t, ns)
	r := route.Rule{From: nstest.Prefix("10.1.0.0/16"), Table: 7}
	for range 2 {
		if err := c.AddRule(r); err != nil {
			t.Fatal(err)
		}
	}
	want := []string{"32764: from 10.1.0.0/16 lookup 7 proto 116", "32765: from 10.1.0.0/16 lookup 7 proto 116"}
	if diff := cmp.Diff(want, shownRules(t, ns, "-4")); diff != "" {
		t.Errorf("ip rule (-want +got):\n%s", diff)
	}
	if changed, err := c.EnsureRule(r); changed || err == nil {
		t.Errorf("EnsureRule: changed %t, %v, want an error", changed, err)
	}
}

func TestRulesOfANewNamespaceAreTheKernels(t *testing.T) {
	t.Parallel()
	c := dial(t, nstest.New(t))
	list, err := c.Rules(0)
	if err != nil {
		t.Fatal(err)
	}
	kernel := func(family uint8, priority, table uint32) route.Rule {
		return route.Rule{Family: family, Priority: priority, Table: table, Action: route.ToTable, Protocol: route.ProtocolKernel}
	}
	want := []route.Rule{
		kernel(unix.AF_INET, 0, route.TableLocal), kernel(unix.AF_INET, 32766, route.TableMain), kernel(unix.AF_INET, 32767, route.TableDefault),
		kernel(unix.AF_INET6, 0, route.TableLocal), kernel(unix.AF_INET6, 32766, route.TableMain),
	}
	if diff := cmp.Diff(want, list, cmpopts.EquateComparable(want[0].From)); diff != "" {
		t.Errorf("rules (-want +got):\n%s", diff)
	}
}

func TestRefusedRuleSaysWhy(t *testing.T) {
	t.Parallel()
	p := nstest.Prefix
	ns := nstest.New(t)
	c := dial(t, ns)
	for _, tt := range []struct {
		name string
		do   func() error
		want string
	}{
		{"no family", func() error { return c.AddRule(route.Rule{Mark: 1}) },
			"add rule from all mark 0x1/0xffffffff table 254: a rule without From and To needs its family"},
		{"families mixed", func() error { return c.AddRule(route.Rule{From: p("10.0.0.0/8"), To: p("fd00::/8")}) },
			"add rule from 10.0.0.0/8 to fd00::/8 table 254: prefixes From and To are not of the rule's family"},
		{"would delete the kernel's", func() error { return c.DelRule(route.Rule{Family: unix.AF_INET, Table: 254}) },
			"delete rule from all table 254: a rule to be deleted needs its priority or a selector: the kernel would take the first that has the table"},
		{"a link's name with a NUL", func() error { return c.AddRule(route.Rule{Family: unix.AF_INET, IIF: "lo\x00x"}) },
			"add rule from all iif lo\x00x table 254: a link's name has a NUL in it, at which the kernel would end it"},
		{"goto backwards", func() error {
			return c.AddRule(route.Rule{Family: unix.AF_INET, Priority: 5, Action: route.Goto, Goto: 4})
		}, "add rule 5: from all: invalid argument (kernel: Backward goto not supported)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := tt.do(); err == nil || err.Error() != tt.want {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
	if left := shownRules(t, ns, "-4"); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}
