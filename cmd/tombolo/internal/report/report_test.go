package report

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
)

// found is an inspection of networks of pods, each of which has differences.
func found(networks, pods int, ofNetwork, ofPod func(i int) []tombolo.Difference) *network.Inspection {
	in := &network.Inspection{}
	for n := range networks {
		name := fmt.Sprintf("net%d", n)
		in.Networks = append(in.Networks, network.NetworkReport{Network: name, Differences: ofNetwork(n)})
		for i := range pods {
			a := &network.Attachment{Key: network.Key{Network: name, ContainerID: fmt.Sprintf("c%d", i), IfName: "eth0"}, Pod: fmt.Sprintf("default/web-%d", i)}
			in.Attachments = append(in.Attachments, network.Report{Attachment: a, Differences: ofPod(i)})
		}
	}
	return in
}

func none(int) []tombolo.Difference { return nil }

func TestOneCauseIsOneLine(t *testing.T) {
	t.Parallel()
	const repair = tombolo.RemedyRepair
	element := func(set string) func(int) []tombolo.Difference {
		return func(i int) []tombolo.Difference {
			return []tombolo.Difference{{Object: "set " + set + " of table inet tombolo", What: "element", Want: fmt.Sprintf("10.0.0.%d", i), Remedy: repair}}
		}
	}
	table := func(int) []tombolo.Difference {
		return []tombolo.Difference{{Object: "nf_tables", What: "table", Want: "inet tombolo", Remedy: repair}}
	}
	for name, tt := range map[string]struct {
		in   *network.Inspection
		want []string
	}{
		"nothing": {found(1, 1, none, none), nil},
		"a table is missing": {found(2, 55, table, element("pods4")),
			[]string{"table inet tombolo is missing (affects default/web-0, default/web-1, default/web-10, default/web-11, default/web-12, default/web-13, default/web-14, default/web-15 and 47 more) [repair]"}},
		"the ruleset is flushed": {found(2, 2, func(int) []tombolo.Difference {
			return append(table(0), tombolo.Difference{Object: "nf_tables", What: "table", Want: "bridge tombolo", Remedy: repair})
		}, element("pods4")), []string{"table inet tombolo and table bridge tombolo are missing (affects default/web-0, default/web-1) [repair]"}},
		"a set is missing": {found(1, 3, func(int) []tombolo.Difference {
			return []tombolo.Difference{{Object: "table inet tombolo", What: "set", Want: "pods4", Remedy: repair}, {Object: "chain x of table inet tombolo", What: "rule", Want: `"r"`, Remedy: repair}}
		}, element("pods4")), []string{
			"table inet tombolo: set pods4 is missing (affects default/web-0, default/web-1, default/web-2) [repair]",
			`network net0: chain x of table inet tombolo: rule "r" is missing [repair]`,
		}},
		"a bridge is missing": {found(1, 2, func(int) []tombolo.Difference {
			return []tombolo.Difference{{Object: "bridge br0", What: "link", Want: "br0", Remedy: repair}, {Text: "bridge br0: the gateway 10.0.0.1/24 is missing", Remedy: repair},
				{Object: "set bypass of table inet tombolo", What: "element", Want: "br0", Remedy: repair}, {Object: "set bridges of table inet tombolo", What: "element", Have: "br0 . br0", Remedy: repair}}
		}, func(i int) []tombolo.Difference {
			return []tombolo.Difference{{Object: fmt.Sprintf("port veth%d", i), What: "bridge", Want: "br0", Remedy: repair}}
		}), []string{"bridge br0 is missing (affects default/web-0, default/web-1) [repair]"}},
		"what pods share": {found(1, 4, none, func(int) []tombolo.Difference {
			return []tombolo.Difference{{Text: "no keeper runs", Remedy: tombolo.RemedyKeeper}}
		}), []string{"no keeper runs (affects default/web-0, default/web-1, default/web-2, default/web-3) [start tombolod]"}},
		"a command behind what it affects": {found(1, 2, none, func(int) []tombolo.Difference {
			const text = "x drops; unless it is meant, this helps: nft y"
			return []tombolo.Difference{{Text: text, Remedy: tombolo.RemedyConfigure}}
		}), []string{"x drops (affects default/web-0, default/web-1); unless it is meant, this helps: nft y " +
			"[configuration]"}},
		"what is alike": {found(1, 3, none, element("pods4")),
			[]string{"set pods4 of table inet tombolo: element 10.0.0.0 is missing, and so on (affects default/web-0, default/web-1, default/web-2) [repair]"}},
		"what networks share": {found(3, 0, func(int) []tombolo.Difference {
			return []tombolo.Difference{{Object: "chain FORWARD of table ip filter", What: "rule", Want: `"r"`, Remedy: repair}}
		}, none), []string{`chain FORWARD of table ip filter: rule "r" is missing (affects network net0, network net1, network net2) [repair]`}},
		"a chain is flushed": {found(2, 0, func(int) []tombolo.Difference {
			const chain = "chain forward of table inet tombolo"
			return []tombolo.Difference{
				{Object: chain, What: "rule", Want: `"r"`, Remedy: repair}, {Object: chain, What: "rule", Want: `"s"`, Remedy: repair},
				{Object: chain, What: "rule", Have: `"t"`, Remedy: repair}, {Object: "chain x of table inet tombolo", What: "rule", Want: `"r"`, Remedy: repair},
			}
		}, none), []string{
			`chain forward of table inet tombolo: rule "r" is missing, and so on (affects network net0, network net1) [repair]`,
			`chain forward of table inet tombolo: rule "t" does not belong there (affects network net0, network net1) [repair]`,
			`chain x of table inet tombolo: rule "r" is missing (affects network net0, network net1) [repair]`,
		}},
		"one pod's": {found(1, 2, none, func(i int) []tombolo.Difference {
			if i == 0 {
				return nil
			}
			return []tombolo.Difference{{Object: "port veth1", What: "MTU", Want: "1500", Have: "1400", Remedy: repair}}
		}), []string{"default/web-1, eth0 of network net0: port veth1: MTU is 1400, should be 1500 [repair]"}},
		"with other remedies": {found(1, 2, none, func(i int) []tombolo.Difference {
			return []tombolo.Difference{{Text: "x", Remedy: []tombolo.Remedy{repair, tombolo.RemedyRecreate}[i]}}
		}), []string{"default/web-0, eth0 of network net0: x [repair]", "default/web-1, eth0 of network net0: x [recreate pod]"}},
		"of no network": {&network.Inspection{Stray: []tombolo.Difference{{Text: "link ifb0 has no record", Remedy: repair}}}, []string{"link ifb0 has no record [repair]"}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			var got []string
			for _, line := range Causes(tt.in) {
				got = append(got, line.String())
			}
			expect.NoDiff(t, cmp.Diff(tt.want, got))
			differences := 0
			for _, n := range tt.in.Networks {
				differences += len(n.Differences)
			}
			for _, r := range tt.in.Attachments {
				differences += len(r.Differences)
			}
			each := Each(tt.in)
			expect.That(t, len(each) == differences+len(tt.in.Stray), "%d lines for %d differences: %v", len(each), differences, each)
		})
	}
}

func TestAPodIsMeantByWhatAnOperatorTypes(t *testing.T) {
	t.Parallel()
	a := &network.Attachment{Key: network.Key{ContainerID: "0123456789ab", IfName: "tb-01"}, Pod: "default/web-0", Port: "veth01", Addresses: []ipam.Address{{Prefix: nstest.Prefix("fd61::2/64")}}}
	for text, want := range map[string]bool{"": true, "default/web-0": true, "web-0": true, "0123": true, "web": false, "eb-0": false, "123": false,
		"veth01": true, "veth0": false, "tb-01": true, "tb-0": false, "fd61::2": true, "fd61:0::2": true, "fd61::3": false} {
		expect.Equal(t, Meant(a, text), want, "%q: want %t", text, want)
	}
}

func TestAPatternIsOfTheWholeNameOrOfItsLastPart(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		pattern, pod string
		want         bool
	}{
		{"default/web-0", "default/web-0", true},
		{"web-0", "default/web-0", true},
		{"web-0", "web-0", true}, // podman's have no namespace
		{"web", "default/web-0", false},
		{"web-*", "default/web-0", true},
		{"default/*", "default/web-0", true},
		{"*/web-0", "kube-system/web-0", true},
		{"*", "default/web-0", true},
		{"default/*", "default-2/web-0", false},
		{"d*", "default/web-0", false},
		{"[a-w]eb-?", "default/web-0", true},
		{"web-0", "", false},
	} {
		expect.Equal(t, Meant(&network.Attachment{Key: network.Key{ContainerID: "id"}, Pod: tt.pod}, tt.pattern), tt.want, "%q matches %q", tt.pattern, tt.pod)
	}
}
