package nft

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/golden"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/internal/ruleset"
)

// rulesets are option combinations, each with a golden file.
var rulesets = []struct {
	name     string
	mark     uint32
	networks []Network
	eps      []Endpoint
}{
	{name: "plain", networks: []Network{{Name: "podnet", Prefixes: nstest.Prefixes("10.22.0.0/16")}}},
	{name: "mark", mark: 0x40000000, networks: []Network{{Name: "podnet"}}},
	{name: "masquerade", networks: []Network{podnet()}},
	{name: "masquerade without prefixes", networks: []Network{{Name: "podnet", Masquerade: true}}},
	{name: "non-masquerade", networks: []Network{{
		Name: "podnet", Masquerade: true, Prefixes: nstest.Prefixes("10.22.3.4/16", "10.0.0.0/8"),
		NonMasquerade: nstest.Prefixes("192.168.0.0/19", "203.0.113.7/32", "172.16.0.0/12", "fd00::/61", "2001:db8::1/128", "10.22.0.0/16"),
	}}},
	{name: "never IPv4", networks: []Network{{
		Name: "podnet", Masquerade: true, Prefixes: nstest.Prefixes("10.22.0.0/16"), NonMasquerade: nstest.Prefixes("0.0.0.0/0"),
	}}},
	{name: "never IPv6", networks: []Network{{
		Name: "podnet", Masquerade: true, Prefixes: nstest.Prefixes("10.22.0.0/16", "fd00:22::/64"), NonMasquerade: nstest.Prefixes("::/0"),
	}}},
	{name: "two networks", networks: []Network{podnet(), {Name: "other.net_2", Masquerade: true, Prefixes: nstest.Prefixes("10.23.0.0/16")}}},
	{name: "long name", networks: []Network{{Name: longName, Masquerade: true}}, eps: []Endpoint{
		{Owner: "0123456789abcdef", Network: longName, Bridge: "cbr0", Addrs: nstest.Addrs("10.22.0.5"), Masquerade: true},
	}},
	{name: "ports", networks: []Network{podnet()}, eps: []Endpoint{
		publisher(1, Port{Protocol: 6, HostPort: 8080, PodPort: 80}, Port{Protocol: 17, HostPort: 53, PodPort: 53}),
		publisher(2, Port{Protocol: 132, HostAddr: nstest.Addr("192.0.2.1"), HostPort: 9, PodPort: 65535},
			Port{Protocol: 6, HostAddr: nstest.Addr("2001:db8::1"), HostPort: 8081, PodPort: 80}),
	}},
	{name: "port snat", networks: []Network{{Name: "podnet", Masquerade: true, PortSNAT: true}}, eps: []Endpoint{
		snatted(publisher(1, Port{Protocol: 6, HostPort: 8080, PodPort: 80}, Port{Protocol: 6, HostPort: 8081, PodPort: 80}), SNATAll),
		snatted(publisher(2, Port{Protocol: 17, HostPort: 53, PodPort: 53}), SNATAll),
		snatted(publisher(3, Port{Protocol: 132, HostPort: 9, PodPort: 9}), SNATNone),
	}},
	{name: "bridges", networks: []Network{
		{Name: "podnet", Bridge: "cbr0"}, {Name: "lan", Bridge: "br0", NFCall: true, Policy: SameBridge},
		{Name: "other", Bridge: "a-long-name-15b", NFCall: true, Policy: Isolated}, {Name: "inner", Bridge: "br2", Internal: true},
	}},
	{name: "closed", networks: []Network{{Name: "podnet", Bridge: "cbr0", Gateway: true, Closed: []Closed{{Routers: []string{"wg0", "eth1"}}, {IPv6: true}}}}},
	{name: "pods", networks: []Network{podnet()}, eps: []Endpoint{
		pod("00000000001", "10.22.0.5", "fd00:22::5"),
		pod("00000000002", "10.22.255.254"),
		{Owner: "00000000003", Network: "podnet", Bridge: "a-long-name-15b", Addrs: nstest.Addrs("10.22.0.5")},
		{Owner: "00000000004", Network: "lan", Bridge: "br0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}},
	}},
	{name: "guard", networks: []Network{guardNet()}, eps: []Endpoint{
		guardedPod("00000000001", "veth1", podMAC, pod4, pod6),
		guardedPod("00000000002", "veth2", otherMAC, other4),
		guardedPod("00000000003", "veth3", "02:00:00:00:00:07"),
	}},
	{name: "lan", networks: []Network{
		{Name: "podnet", Bridge: "br0", NFCall: true, LAN: true, Guard: true}, {Name: "other", Bridge: "br1", LAN: true},
	}, eps: []Endpoint{
		lanPod("00000000001", "veth1", podMAC, pod4, pod6),
		lanPod("00000000002", "veth2", otherMAC),
		lanPod("00000000003", "veth3", "02:00:00:00:00:07", "fd00:22::7"),
	}},
	{name: "share", networks: []Network{{
		Name: "podnet", Bridge: "br0", LAN: true, Groups: true, Share: &Share{NIC: "eth0", MAC: mustMAC("02:00:00:00:00:01"), Outer: 5, Port: "vethin"},
	}}, eps: []Endpoint{
		{Owner: "00000000001", Network: "podnet", Bridge: "br0", NIC: "eth0", MAC: mustMAC("02:00:00:00:00:07"), Addrs: nstest.Addrs("10.22.0.5")},
		{Owner: "00000000002", Network: "podnet", Bridge: "br0", NIC: "eth0", MAC: mustMAC("02:00:00:00:00:08")},
	}},
	{name: "egress", networks: []Network{
		{Name: "podnet", Bridge: "cbr0", NFCall: true, Masquerade: true, Guard: true, PodEgress: true, Egress: "public, 10.22.0.0/16 tcp 80-90, 10.22.0.7, fd00::/8 udp 53"},
	}, eps: []Endpoint{limited(guardedPod("00000000001", "veth1", podMAC, pod4, pod6), "192.0.2.0/24 icmp, fd00::53 udp 53")}},
	{name: "callers", networks: []Network{podnet()}, eps: []Endpoint{
		openTo(publisher(1, Port{Protocol: 6, HostPort: 8000, PodPort: 80, Count: 11}, Port{Protocol: 17, HostAddr: nstest.Addr("192.0.2.1"), HostPort: 53, PodPort: 53}),
			"10.0.0.0/8, 10.9.0.0/16, wg0 tcp 8005-9000, fd00::1, wg0 tcp 8000-8006", "0.0.0.0/1, ::/0, eth1.7"),
		openTo(publisher(2, Port{Protocol: 132, HostPort: 9, PodPort: 9}), "lo"),
	}},
	{name: "groups", networks: []Network{{Name: "podnet", Groups: true}}},
	{name: "quiet", networks: []Network{{Name: "podnet", DropReports: true}, {Name: "other", DropReports: true}}},
	{name: "dedup", networks: []Network{dedupNet(dedups()...), {Name: "other", Dedup: []Dedup{
		{mustMAC("02:00:00:00:00:02"), nstest.Addr("10.23.0.5"), nstest.Prefix("10.23.3.4/19")},
		{mustMAC("02:00:00:00:00:02"), nstest.Addr("fe80::1"), nstest.Prefix("fd00:23::7/61")},
	}}}},
}

// openTo returns an endpoint whose ports are open to some callers, and left to the host's firewall.
func openTo(ep Endpoint, from ...string) Endpoint {
	ep.PublishFrom, ep.Unadmitted = from, true
	return ep
}

func limited(ep Endpoint, egress Egress) Endpoint {
	ep.Egress = egress
	return ep
}

// newWithLinks returns a namespace with the links of the share: those of family netdev have to exist.
func newWithLinks(t *testing.T) *netns.NS {
	t.Helper()
	ns := nstest.New(t)
	nstest.Run(t, ns, "sh", "-ec", `ip link add eth0 index 2 type veth peer name wire index 20
		ip link add br0 index 3 type bridge
		ip link add vethout index 5 type veth peer name vethin index 6`)
	return ns
}

const longName = "n.2345678901234567890123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890"

func TestRulesetIsAsNFTPrintsIt(t *testing.T) {
	t.Parallel()
	for _, tc := range rulesets {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ns := newWithLinks(t)
			c := dialMark(t, ns, tc.mark)
			for _, n := range tc.networks {
				expect.That(t, mustEnsure(t, c, n).Changed, "Ensure says that nothing changed")
			}
			mustAdd(t, c, tc.eps...)
			for _, n := range tc.networks {
				wantReady(t, c, n)
			}
			got := normal(nft(t, ns, "list", "ruleset"))
			golden.Compare(t, filepath.Join("rulesets", strings.ReplaceAll(tc.name, " ", "-")+".nft"), []byte(got))
		})
	}
}

// What nft makes of the golden files has to be the same to the kernel, and to us.
func TestRulesetIsWhatNFTWouldMake(t *testing.T) {
	t.Parallel()
	for _, tc := range rulesets {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			theirs, ours := newWithLinks(t), newWithLinks(t)
			nft(t, theirs, "-f", filepath.Join("testdata", "rulesets", strings.ReplaceAll(tc.name, " ", "-")+".nft"))
			onTheirs, onOurs := dialMark(t, theirs, tc.mark), dialMark(t, ours, tc.mark)
			for _, n := range tc.networks {
				mustEnsure(t, onOurs, n)
				diffs := must.Of(onTheirs.Check(context.Background(), n)).Get(t)
				others := func(d tombolo.Difference) bool { return !strings.Contains(d.Text, "loaded elements from a save") }
				expect.That(t, !slices.ContainsFunc(diffs, others), "Check: %v", diffs)
				mustEnsure(t, onTheirs, n) // its sentinels, which the next network may share
				wantReady(t, onTheirs, n)
			}
			mustAdd(t, onOurs, tc.eps...)
			for _, ep := range tc.eps {
				err := onTheirs.Add(context.Background(), ep)
				var conflict *ConflictError
				expect.That(t, errors.As(err, &conflict) && conflict.Owner == ep.Owner,
					"adding %s over what nft made of it: %v", ep.Owner, err)
			}
			want := normal(nft(t, theirs, "--debug=netlink", "list", "ruleset"))
			got := normal(nft(t, ours, "--debug=netlink", "list", "ruleset"))
			must.That(t, strings.Contains(want, "[ meta load mark => reg 1 ]"), "no expressions in:\n%s", want)
			diff := cmp.Diff(want, got)
			expect.That(t, diff == "", "the kernel's view (-nft +ours):\n%s", diff)
		})
	}
}

func TestNumberOfRulesDoesNotDependOnPods(t *testing.T) {
	t.Parallel()
	c, ns := dialNew(t)
	mustEnsure(t, c, podnet())
	count := func() map[string]int {
		counts := map[string]int{}
		for kind, objects := range listing(t, ns) {
			counts[kind] = len(objects)
		}
		return counts
	}
	want := count()
	must.That(t, want["rule"] != 0 && want["set"] == 25 && want["map"] == 4 && want["chain"] == 8,
		"at no pods: %v", want)
	for i := range 500 {
		mustAdd(t, c, pod(Owner(fmt.Sprintf("%011x", i)), fmt.Sprintf("10.22.%d.%d", i>>8, i&255), fmt.Sprintf("fd00:22::%x", i)))
		if i != 0 && i != 499 {
			continue
		}
		diff := cmp.Diff(want, count())
		expect.That(t, diff == "", "at %d pods (-none +now):\n%s", i+1, diff)
	}
	elements := 0
	for _, set := range listing(t, ns)["set"] {
		list, _ := set["elem"].([]any)
		elements += len(list) - 1 // the sentinel
	}
	expect.Equal(t, elements, 500*4, "500 dual-stack pods with masquerade have %d elements, want 2000", elements)
}

func TestSettingsOfChainsTellNetworksApart(t *testing.T) {
	t.Parallel()
	same := []Network{
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("10.0.0.0/8", "fd00::/64")},
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("fd00::/64", "10.0.0.0/8")},
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("10.1.2.3/8", "fd00::/64", "10.0.0.0/8")},
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("fd00::/64"), NonMasquerade: nstest.Prefixes("10.0.0.0/8")},
	}
	others := []Network{
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("10.0.0.0/8")},
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("10.0.0.0/9", "fd00::/64")},
		{Name: "a", Masquerade: true, Prefixes: nstest.Prefixes("10.0.0.0/8", "fd00::/63")},
	}
	comment := func(n Network) string {
		rs := must.Of(On(nil, nil).ruleset(&n)).Get(t)
		i := slices.IndexFunc(rs.Chains, func(ch ruleset.Chain) bool { return ch.Name == "masq-a" })
		return rs.Chains[i].Comment(1)
	}
	for _, n := range same {
		expect.Equal(t, comment(n), comment(same[0]), "%v", n)
	}
	for _, n := range others {
		if got := comment(n); got == comment(same[0]) {
			t.Errorf("%v: %q, the comment of %v", n, got, same[0])
		}
	}
}

// withoutSentinels leaves them out of a listing of nft's.
func withoutSentinels(listing string) string {
	elements := regexp.MustCompile(`(?s)\t+elements = \{ (.*?) \}\n`)
	return elements.ReplaceAllStringFunc(listing, func(s string) string {
		m := elements.FindStringSubmatch(s)
		list := regexp.MustCompile(`,\s+`).Split(m[1], -1)
		list = slices.DeleteFunc(list, func(el string) bool { return strings.Contains(el, ruleset.SentinelComment) })
		if len(list) == 0 {
			return ""
		}
		return "\t\telements = { " + strings.Join(list, ",\n\t\t\t     ") + " }\n"
	})
}

// The documentation shows what nft prints, but for sentinels, comments and blank lines.
func TestDocumentationShowsTheRuleset(t *testing.T) {
	t.Parallel()
	source := must.Of(os.ReadFile("../docs/ruleset.nft")).Get(t)
	var documented []string
	for line := range strings.Lines(string(source)) {
		documented = append(documented, strings.TrimRight(regexp.MustCompile(` # .*`).ReplaceAllString(line, ""), "\n"))
	}
	c, ns := dialNew(t)
	mustEnsure(t, c, Network{Name: "podnet", Masquerade: true, Prefixes: nstest.Prefixes("10.22.0.0/16"), Bridge: "cbr0", NFCall: true,
		Gateway: true, Closed: []Closed{{}, {IPv6: true}}})
	ep := pod("0123456789a", "10.22.0.5")
	ep.Ports = []Port{tcpPort("", 8080)}
	mustAdd(t, c, ep)
	var printed []string
	for line := range strings.Lines(withoutSentinels(nft(t, ns, "list", "ruleset"))) {
		line = strings.TrimRight(line, "\n")
		if !strings.HasPrefix(strings.TrimSpace(line), "elements =") && !strings.HasPrefix(strings.TrimSpace(line), "comment") {
			line = regexp.MustCompile(` comment ".*"$`).ReplaceAllString(line, "")
		}
		if line != "" {
			printed = append(printed, line)
		}
	}
	diff := cmp.Diff(printed, documented)
	expect.That(t, diff == "", "docs/ruleset.nft (-nft +documented):\n%s", diff)
}
