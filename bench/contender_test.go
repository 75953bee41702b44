package main

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestConfigurationsAskForTheSame(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	for _, name := range []string{"ipv4", "dual"} {
		s, err := parseScenario(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, contender := range []string{tombolo, reference} {
			n := &node{contender: contender, scenario: s, state: "/state"}
			config, err := json.MarshalIndent(n.config(), "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			b.WriteString(name + ", " + contender + ":\n" + string(config) + "\n")
		}
	}
	golden(t, "netconf.txt", b.String())
}

func TestCallIsThatOfARuntime(t *testing.T) {
	t.Parallel()
	n := &node{contender: reference, state: "/state", binaries: binaries{peers: "/peers"}}
	c, err := n.call("ADD", 7, "/run/netns/x")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/peers/bridge"}, c.argv); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	for _, want := range []string{
		"CNI_COMMAND=ADD", "CNI_NETNS=/run/netns/x", "CNI_IFNAME=eth0", "CNI_CONTAINERID=bench-reference-7", "CNI_PATH=/peers",
	} {
		if !slices.Contains(c.env, want) {
			t.Errorf("the environment %q lacks %s", c.env, want)
		}
	}
	if !json.Valid(c.stdin) {
		t.Errorf("standard input is %q", c.stdin)
	}
}

func TestFloorIsToldTheAddresses(t *testing.T) {
	t.Parallel()
	n := &node{contender: floor, binaries: binaries{peers: "/peers"}, scenario: scenario{dual: true}}
	c, err := n.call("ADD", 300, "/run/netns/x")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"/peers/floor",
		"-address", "10.88.1.46/16", "-gateway", "10.88.0.1",
		"-address6", "fd00:88::12e/64", "-gateway6", "fd00:88::1",
	}
	if diff := cmp.Diff(want, c.argv); diff != "" {
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
	b := binaries{peers: dir, tombolo: filepath.Join(dir, "bridge")}
	for contender, want := range map[string][]string{
		floor:     {filepath.Join(dir, "floor")},
		reference: {filepath.Join(dir, "host-local")},
		tombolo:   nil,
	} {
		if diff := cmp.Diff(want, b.missing(contender)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", contender, diff)
		}
	}
}

func TestScenariosAreNamed(t *testing.T) {
	t.Parallel()
	got, err := parseScenarios("ipv4,dual,attach,pods=200")
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 4 || !got[1].dual || !got[2].attach || got[3].pods != 200 {
		t.Errorf("got %+v", got)
	}
	for _, bad := range []string{"", "ipv6", "pods", "pods=", "pods=0", "pods=1023", "ipv4,,dual"} {
		if _, err := parseScenarios(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
