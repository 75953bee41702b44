package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// leasing is a node of a scenario of DHCP, which has nothing but its paths.
func leasing(t *testing.T, contender, name string) *node {
	t.Helper()
	s, err := parseScenario(name)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	return &node{contender: contender, scenario: s, state: "/state", binaries: binaries{tombolod: "/dev/null"},
		lan: &lan{records: "/records", socket: "/dhcp.sock", leased: filepath.Join(dir, "leases"), log: filepath.Join(dir, "log")}}
}

func TestLeasesOfTheServerAreRead(t *testing.T) {
	t.Parallel()
	n := leasing(t, tombolo, "dhcp")
	if got, err := n.lan.leases(); err != nil || len(got) != 0 {
		t.Errorf("no file: %v, %v", got, err)
	}
	write(t, n.lan.leased, "1790000000 0a:1b:2c:3d:4e:5f 10.88.1.7 web-0 00:61\n1790000000 0a:1b:2c:3d:4e:60 10.88.1.8 * *\nduid 00\n")
	want := map[netip.Addr]bool{netip.MustParseAddr("10.88.1.7"): true, netip.MustParseAddr("10.88.1.8"): true}
	got, err := n.lan.leases()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	write(t, n.lan.leased, "1 2 three 4\n")
	if _, err := n.lan.leases(); err == nil {
		t.Error("a lease of no address was taken")
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestLeaseOfAPodIsThatOfItsResult(t *testing.T) {
	t.Parallel()
	got, err := leaseOf(&pod{result: []byte(`{"ips":[{"address":"10.88.1.7/16"}]}`)})
	if want := netip.MustParseAddr("10.88.1.7"); err != nil || got != want {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	for _, result := range []string{"", "{}", `{"ips":[]}`, `{"ips":[{"address":"x"}]}`} {
		if got, err := leaseOf(&pod{result: []byte(result)}); err == nil {
			t.Errorf("%q has %v", result, got)
		}
	}
}

// TestReferenceIsNotHeldToItsRelease shows who has to have given a lease back.
func TestReferenceIsNotHeldToItsRelease(t *testing.T) {
	t.Parallel()
	p := &pod{result: []byte(`{"ips":[{"address":"10.88.1.7/16"}]}`)}
	for _, contender := range []string{tombolo, tomboloUDP, reference} {
		n := leasing(t, contender, "dhcp")
		write(t, n.lan.leased, "1790000000 0a:1b:2c:3d:4e:5f 10.88.1.7 * *\n")
		if err := n.proveLease(p, true); err != nil {
			t.Errorf("%s: %v", contender, err)
		}
		if contender != reference {
			write(t, n.lan.leased, "")
		}
		if err := n.proveLease(p, false); err != nil {
			t.Errorf("%s: %v", contender, err)
		}
	}
}

func TestScenarioWithoutAServerIsLeftOutAndItIsSaid(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	r := &runner{contenders: contenders(), rounds: 1}
	for _, name := range []string{"dhcp", "dhcp-rapid", "leases=3"} {
		s, err := parseScenario(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.measure(s); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if len(r.report.skipped) != 3 || !strings.Contains(r.report.skipped[0], "dhcp: dnsmasq is missing") {
		t.Errorf("skipped: %q", r.report.skipped)
	}
	if len(r.report.series) != 0 {
		t.Errorf("something was measured: %v", r.report.series)
	}
}

func TestWithoutAKeeperTomboloIsToldSo(t *testing.T) {
	t.Parallel()
	n := leasing(t, tombolo, "dhcp")
	if c := n.plugins(0)[0]; c.IPAM.Keeper != "" {
		t.Errorf("with a keeper, ipam is %+v", c.IPAM)
	}
	n.binaries.tombolod = filepath.Join(t.TempDir(), "missing")
	if c := n.plugins(0)[0]; c.IPAM.Keeper != "optional" {
		t.Errorf("without a keeper, ipam is %+v", c.IPAM)
	}
}

func TestReferenceIsHurriedWhereRoundsAreFewOrItsADDIsNotMeasured(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		scenario string
		rounds   int
		want     bool
	}{
		{"dhcp", quickRounds, true}, {"dhcp", 80, false}, {"dhcp-rapid", 80, false}, {"leases=9", 80, true}, {"ipv4", 1, false},
	} {
		n := leasing(t, reference, test.scenario)
		n.scenario = n.scenario.hurried(test.rounds)
		command := strings.Join(n.referenceDaemon(), " ")
		if got := strings.HasSuffix(command, " -timeout 1s"); got != test.want || !strings.Contains(command, "dhcp daemon -socketpath ") {
			t.Errorf("%s, %d rounds: the daemon is started by %q, want hurried %t", test.scenario, test.rounds, command, test.want)
		}
	}
}

// ack is what dnsmasq logs.
func ack(i int) string {
	return fmt.Sprintf("Nov 21 09:30:%02d dnsmasq-dhcp[7]: DHCPACK(eth0) 10.88.1.%d 0a:00:00:00:00:%02x\n", i%60, i, i)
}

const discover = "Nov 21 09:30:00 dnsmasq-dhcp[7]: DHCPDISCOVER(eth0) 0a:00:00:00:00:01\n"

func TestOffersAreNoRapidCommit(t *testing.T) {
	t.Parallel()
	n := leasing(t, tombolo, "dhcp-rapid")
	for _, test := range []struct {
		log  string
		fine bool
	}{
		{discover + ack(1), true},
		{discover, false},
		{discover + strings.ReplaceAll(ack(1), "ACK", "OFFER") + ack(1), false},
	} {
		write(t, n.lan.log, test.log)
		if err := n.lan.proveRapid(); (err == nil) != test.fine {
			t.Errorf("%v of the log\n%s", err, test.log)
		}
	}
}

// testTomboloLeases goes through the scenarios of DHCP with the plugin and its keeper,
// which the test builds.
func testTomboloLeases(t *testing.T, dir string) {
	if why := serverMissing(scenario{name: "dhcp", dhcp: true}); why != "" {
		t.Skip(why)
	}
	out, said, status := runBench(t, dir, "-json", "-n", "2", "-contenders", "tombolo,tombolo-udp",
		"-tombolo", buildOurs(t, dir, "tombolo"), "-tombolod", buildOurs(t, dir, "tombolod"), "-disk", t.TempDir(),
		"-scenarios", "dhcp,dhcp-rapid", "-gate", "dhcp:tombolo-udp:add<=10000")
	if status != 0 {
		t.Fatalf("exit status %d: %s", status, said)
	}
	var document struct{ Figures []summary }
	if err := json.Unmarshal([]byte(out), &document); err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, f := range document.Figures {
		found[f.Scenario+" "+f.Metric+" "+f.Contender] = f.Median > 0
	}
	for _, scenario := range []string{"dhcp", "dhcp-rapid"} {
		for _, metric := range []string{"add", "del", "add tail", "keeper cpu", "peak"} {
			for _, contender := range []string{tombolo, tomboloUDP} {
				if want := scenario + " " + metric + " " + contender; !found[want] {
					t.Errorf("no figure %q in %s", want, out)
				}
			}
		}
	}
}
