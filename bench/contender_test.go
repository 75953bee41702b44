package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/nstest"
)

func TestConfigurationsAskForTheSame(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	for _, name := range []string{"ipv4", "dual", "full", "ports=2", "dhcp", "dhcp-rapid"} {
		s, err := parseScenario(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, contender := range contenders()[1:] {
			if !s.takes(contender) {
				continue
			}
			n := &node{contender: contender, scenario: s, state: "/state", binaries: binaries{tombolod: "/dev/null"}}
			n.lan = &lan{records: "/leases", socket: "/dhcp.sock"}
			b.WriteString(name + ", " + contender + ":\n")
			for _, c := range n.plugins(0) {
				config, err := json.MarshalIndent(c, "", "  ")
				if err != nil {
					t.Fatal(err)
				}
				b.WriteString(string(config) + "\n")
			}
		}
	}
	golden(t, "netconf.txt", b.String())
}

// calls executes a verb of a contender with a runner that only notes the commands:
// each call prints its number as a result.
func calls(t *testing.T, n *node, verb string, p *pod) []command {
	t.Helper()
	n.ns, n.binaries = namedNS{NS: nstest.New(t)}, binaries{peers: "/peers", tombolo: "/bin/tombolo"}
	var list []command
	o, err := n.execute(verb, p, func(c command) (outcome, error) {
		list = append(list, c)
		return outcome{stdout: fmt.Append(nil, len(list)), wall: 1, cpu: 10, peak: 7 - len(list)}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if count := time.Duration(len(list)); o.wall != count || o.cpu != 10*count || o.peak != 6 {
		t.Errorf("%d calls cost %+v", count, o)
	}
	return list
}

func TestCallIsThatOfARuntime(t *testing.T) {
	t.Parallel()
	list := calls(t, &node{contender: reference, state: "/state"}, "ADD", &pod{number: 7, path: "/run/netns/x"})
	if len(list) != 1 || !slices.Equal(list[0].argv, []string{"/peers/bridge"}) {
		t.Fatalf("calls %v, want one of bridge", list)
	}
	for _, want := range []string{
		"CNI_COMMAND=ADD", "CNI_NETNS=/run/netns/x", "CNI_IFNAME=eth0", "CNI_CONTAINERID=bench-reference-7", "CNI_PATH=/peers",
	} {
		if !slices.Contains(list[0].env, want) {
			t.Errorf("the environment %q lacks %s", list[0].env, want)
		}
	}
	if !json.Valid(list[0].stdin) {
		t.Errorf("standard input is %q", list[0].stdin)
	}
}

// TestChainIsCalledAsARuntimeDoes wants the plugins in their order, each with the
// result of the one before, and in reverse for DEL, each with the last.
func TestChainIsCalledAsARuntimeDoes(t *testing.T) {
	t.Parallel()
	full, err := parseScenario("full")
	if err != nil {
		t.Fatal(err)
	}
	n := &node{contender: chainNFTables, scenario: full, state: "/state"}
	p := &pod{number: 3, path: "/run/netns/x"}
	type step struct{ Plugin, PrevResult string }
	steps := func(verb string) []step {
		var list []step
		for _, c := range calls(t, n, verb, p) {
			var config netconf
			if err := json.Unmarshal(c.stdin, &config); err != nil {
				t.Fatal(err)
			}
			if c.argv[0] != "/peers/"+config.Type {
				t.Errorf("%s is called with the configuration of %s", c.argv[0], config.Type)
			}
			list = append(list, step{config.Type, string(config.PrevResult)})
		}
		return list
	}
	for _, test := range []struct {
		verb string
		want []step
	}{
		{"ADD", []step{{"bridge", ""}, {"portmap", "1"}, {"firewall", "2"}, {"bandwidth", "3"}}},
		{"DEL", []step{{"bandwidth", "4"}, {"firewall", "4"}, {"portmap", "4"}, {"bridge", "4"}}},
	} {
		if diff := cmp.Diff(test.want, steps(test.verb)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.verb, diff)
		}
	}
}

func TestFailureOfAPluginEndsTheVerb(t *testing.T) {
	t.Parallel()
	n := &node{contender: chainIPTables, scenario: scenario{full: true}, ns: namedNS{NS: nstest.New(t)}}
	count := 0
	failure := errors.New("refused")
	_, err := n.execute("ADD", &pod{}, func(command) (outcome, error) {
		if count++; count == 2 {
			return outcome{}, failure
		}
		return outcome{stdout: []byte("{}")}, nil
	})
	if !errors.Is(err, failure) || count != 2 {
		t.Errorf("after %d calls: %v", count, err)
	}
}

func TestFloorIsToldTheAddresses(t *testing.T) {
	t.Parallel()
	list := calls(t, &node{contender: floor, scenario: scenario{dual: true}}, "ADD", &pod{number: 300, path: "/run/netns/x"})
	want := []string{
		"/peers/floor",
		"-address", "10.88.1.46/16", "-gateway", "10.88.0.1",
		"-address6", "fd00:88::12e/64", "-gateway6", "fd00:88::1",
	}
	if diff := cmp.Diff(want, list[0].argv); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestPodAddressesAreDistinctAndNoGateway(t *testing.T) {
	t.Parallel()
	for _, subnet := range subnets(true) {
		seen := map[netip.Addr]bool{subnet.Addr(): true, gatewayOf(subnet): true}
		for pod := range 2 * maxPods {
			a := podAddress(subnet, pod)
			if seen[a.Addr()] || !subnet.Contains(a.Addr()) {
				t.Fatalf("pod %d of %s has %s", pod, subnet, a)
			}
			seen[a.Addr()] = true
		}
	}
}

func TestMissingProgramsAreNamed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "bridge"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	b := binaries{peers: dir, tombolo: filepath.Join(dir, "bridge"), tombolod: filepath.Join(dir, "tombolod")}
	in := func(names ...string) []string {
		for i := range names {
			names[i] = filepath.Join(dir, names[i])
		}
		return names
	}
	for _, test := range []struct {
		contender, scenario string
		want                []string
	}{
		{floor, "ipv4", in("floor")},
		{reference, "ipv4", in("host-local")},
		{tombolo, "ipv4", nil},
		{chainIPTables, "full", in("host-local", "portmap", "firewall", "bandwidth")},
		{chainNFTables, "ports=9", in("host-local", "portmap")},
		{reference, "dhcp", in("dhcp")},
		{tomboloUDP, "dhcp", nil}, // it can do without its keeper
		{tombolo, "leases=9", in("tombolod")},
	} {
		s, err := parseScenario(test.scenario)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(test.want, b.missing(test.contender, s)); diff != "" {
			t.Errorf("%s in %s (-want +got):\n%s", test.contender, test.scenario, diff)
		}
	}
}

func TestToolsThatAreRunMustBeThere(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	b := binaries{tombolo: "/dev/null", peers: "/peers"}
	for _, test := range []struct {
		contender, scenario string
		want                []string
	}{
		{tombolo, "dual", nil},
		{tombolo, "full", []string{"ip", "ip6tables", "iptables", "tc"}},
		{tombolo, "ports=9", []string{"ip"}},
		{reference, "dual", []string{"nft"}},
		{chainNFTables, "ports=9", []string{"ip", "nft"}},
		{chainIPTables, "ports=9", []string{"ip", "ip6tables", "iptables"}},
	} {
		s, err := parseScenario(test.scenario)
		if err != nil {
			t.Fatal(err)
		}
		missing := b.missing(test.contender, s)
		missing = slices.DeleteFunc(missing, filepath.IsAbs) // the plugins
		if diff := cmp.Diff(test.want, missing, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s in %s (-want +got):\n%s", test.contender, test.scenario, diff)
		}
	}
}

func TestScenariosAreNamed(t *testing.T) {
	t.Parallel()
	got, err := parseScenarios("ipv4,dual,attach,pods=200,full,full=200,ports=1000,dhcp,dhcp-rapid,leases=1000")
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 10 || !got[1].dual || !got[2].attach || got[3].pods != 200 || got[3].full ||
		!got[4].full || got[4].pods != 0 || !got[5].full || got[5].pods != 200 || got[6].ports != 1000 ||
		!got[7].dhcp || got[7].rapid || !got[8].dhcp || !got[8].rapid || !got[9].dhcp || !got[9].leases || got[9].pods != 1000 {
		t.Errorf("got %+v", got)
	}
	for _, bad := range []string{
		"", "ipv6", "pods", "pods=", "pods=0", "pods=1023", "full=", "full=0", "full=1023", "ports", "ports=0", "ports=10001", "leases", "leases=0", "leases=1023", "dhcp=1", "ipv4,,dual", "dual=3",
	} {
		if _, err := parseScenarios(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestSlowScenariosGetAShareOfTheRounds(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		scenario    string
		asked, want int
	}{
		{"ipv4", 80, 80}, {"ipv4", 1, 1},
		{"full", 80, 10}, {"full", quickRounds, 2}, {"full", 1, 1},
		{"dhcp", 80, 40}, {"dhcp", quickRounds, quickRounds}, {"dhcp", 1, 1},
		{"leases=9", 80, 8}, {"leases=9", quickRounds, 2}, {"leases=9", 800, 8}, {"leases=9", 1, 1},
	} {
		s, err := parseScenario(test.scenario)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.rounds(test.asked); got != test.want {
			t.Errorf("%s: %d of %d rounds, want %d", test.scenario, got, test.asked, test.want)
		}
	}
}

func TestEveryScenarioHasTomboloAndSomebodyToCompareWith(t *testing.T) {
	t.Parallel()
	for name, want := range map[string][]string{
		"ipv4":    {floor, tombolo, reference},
		"pods=9":  {floor, tombolo, reference},
		"full":    {floor, tombolo, chainIPTables, chainNFTables},
		"full=9":  {floor, tombolo, chainIPTables, chainNFTables},
		"ports=9": {tombolo, chainIPTables, chainNFTables},

		"dhcp":       {tombolo, tomboloUDP, reference},
		"dhcp-rapid": {tombolo, tomboloUDP, reference},
		"leases=9":   {tombolo, reference},
	} {
		s, err := parseScenario(name)
		if err != nil {
			t.Fatal(err)
		}
		got := slices.DeleteFunc(contenders(), func(c string) bool { return !s.takes(c) })
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestHostPortsAreDistinct(t *testing.T) {
	t.Parallel()
	n := &node{scenario: scenario{ports: 250}}
	seen := map[int]bool{}
	for pod, want := range []int{100, 100, 50} {
		list := n.portsOf(pod)
		if len(list) != want {
			t.Errorf("pod %d has %d ports, want %d", pod, len(list), want)
		}
		for _, m := range list {
			seen[m.HostPort] = true
		}
	}
	if len(seen) != 250 || !seen[firstPort] || !seen[firstPort+249] {
		t.Errorf("%d ports", len(seen))
	}
}
