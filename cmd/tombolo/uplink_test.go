package main

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
)

// uplinkHost is a host with a NIC, and a machine that it is the gateway of.
func uplinkHost(t *testing.T) *netns.NS {
	t.Helper()
	host, gateway := nstest.New(t), nstest.New(t)
	for _, ns := range []*netns.NS{host, gateway} {
		nstest.Sysctl(t, ns, "net/ipv6/conf/all/disable_ipv6", "1")
		nstest.Sysctl(t, ns, "net/ipv6/conf/default/disable_ipv6", "1")
	}
	nstest.Run(t, host, "ip", "link", "add", "eth0", "address", "02:00:5e:10:00:01", "type", "veth", "peer", "name", "lan0", "netns", nstest.Path(t, gateway))
	for _, at := range []struct {
		ns         *netns.NS
		link, addr string
	}{{host, "eth0", "192.0.2.2/24"}, {gateway, "lan0", "192.0.2.1/24"}} {
		nstest.Run(t, at.ns, "ip", "address", "add", at.addr, "dev", at.link)
		nstest.Run(t, at.ns, "ip", "link", "set", at.link, "up")
	}
	nstest.Run(t, host, "ip", "route", "add", "default", "via", "192.0.2.1")
	must.Succeed(t, nstest.Ping(t, host, nstest.Addr("192.0.2.1")))
	return host
}

func TestUplinkIsPlannedTakenLookedAtAndGivenBack(t *testing.T) {
	t.Parallel()
	host := uplinkHost(t)
	dirs := []string{"--state", t.TempDir() + "/state", "--leases", t.TempDir() + "/leases"}
	call := func(verb string, args ...string) outcome {
		t.Helper()
		return run(t, host, nil, "", append(append([]string{"uplink", verb}, dirs...), args...)...)
	}
	addresses := func() string { return nstest.Run(t, host, "ip", "-4", "-br", "address", "show", "scope", "global") }

	before := addresses()
	shares := run(t, host, nil, "", "uplink", "plan", "eth0", "br0")
	want := "OK: eth0 stays the host's, and pods on br0 are its neighbours on the LAN\n1. make bridge br0"
	expect.That(t, shares.status == 0 && strings.HasPrefix(shares.stdout, want), "plan of a share: %+v", shares)
	nstest.Run(t, host, "sh", "-ec", "ip link add mv0 link eth0 type macvlan")
	expect.Contains(t, run(t, host, nil, "", "uplink", "plan", "eth0", "br0").stdout, "warning: macvlan mv0 rests on eth0", "plan beside a macvlan")
	nstest.Run(t, host, "sh", "-ec", "ip link del mv0")
	plan := run(t, host, nil, "", "uplink", "plan", "--take", "eth0", "br0")
	expect.That(t, plan.status == 0 && strings.Contains(plan.stdout, "make eth0 a port of br0") &&
		strings.Contains(plan.stdout, "add 192.0.2.2/24 dev br0"),
		"plan: %+v", plan)
	if want := "OK: 192.0.2.2 moves to br0, connections stay; undo: tombolo uplink restore eth0\n1. "; !strings.HasPrefix(plan.stdout, want) {
		t.Errorf("plan begins with %q, want %q", plan.stdout[:min(len(plan.stdout), len(want))], want)
	}
	bySSH := run(t, host, []string{"SSH_CONNECTION=192.0.2.1 50000 192.0.2.2 22"}, "", "uplink", "plan", "--take", "eth0", "br0")
	if want := "OK: 192.0.2.2 moves to br0, your SSH session stays; undo: tombolo uplink restore eth0\n"; !strings.HasPrefix(bySSH.stdout, want) {
		t.Errorf("plan by SSH: %+v, want %q", bySSH, want)
	}
	after := addresses()
	expect.That(t, after == before, "a plan changed the host: %s, before it %s", after, before)
	for _, step := range []struct {
		name string
		got  func() outcome
		want outcome
	}{
		{"status before", func() outcome { return call("status", "eth0") }, outcome{0, "eth0 is neither shared nor taken over\n", ""}},
		{"restore before", func() outcome { return call("restore", "eth0") },
			outcome{exitFailed, "", "tombolo: uplink eth0 has not been taken over: there is nothing to give back\n"}},
		{"take", func() outcome { return call("take", "eth0", "br0") },
			outcome{0, "eth0 is a port of br0, which has its addresses and routes\n", ""}},
		{"take again", func() outcome { return call("take", "eth0", "br0") },
			outcome{0, "eth0 is a port of br0, which has its addresses and routes\n", ""}},
		{"plan again", func() outcome { return call("plan", "--take", "eth0", "br0") },
			outcome{exitFailed, "", "tombolo: uplink eth0 was made a port of bridge br0 by `tombolo uplink take`: tombolo uplink restore eth0 gives the NIC its addresses and routes back\n"}},
		{"status", func() outcome { return call("status") }, outcome{0, "eth0 on br0: taken\n", ""}},
		{"restore from another bridge", func() outcome { return call("restore", "eth0", "br1") },
			outcome{exitFailed, "", "tombolo: uplink eth0 is a port of bridge br0, not of br1\n"}},
	} {
		diff := cmp.Diff(step.want, step.got(), cmp.AllowUnexported(outcome{}))
		must.That(t, diff == "", "%s (-want +got):\n%s", step.name, diff)
	}
	if got := addresses(); !strings.Contains(got, "br0") || strings.Contains(got, "eth0") {
		t.Errorf("taken, the host has %s", got)
	}

	// As a network manager might.
	nstest.Run(t, host, "ip", "link", "set", "eth0", "nomaster")
	differs := call("status", "--json")
	var reports []network.UplinkReport
	if err := json.Unmarshal([]byte(differs.stdout), &reports); err != nil || differs.status != exitFound || len(reports) != 1 || len(reports[0].Differences) == 0 {
		t.Errorf("status of a NIC that was taken off its bridge: %+v, %v", differs, err)
	}
	if got := run(t, host, nil, "", "check", dirs[0], dirs[1]); got.status != exitFound || !strings.Contains(got.stdout, "eth0") || !strings.Contains(got.stdout, "tombolo uplink restore eth0") {
		t.Errorf("check of a NIC that was taken off its bridge: %+v", got)
	}
	if got := call("restore", "eth0", "br0"); got.status != 0 || got.stdout != "eth0 has its addresses and routes back\n" {
		t.Errorf("restore: %+v", got)
	}
	after = addresses()
	expect.That(t, after == before, "given back: %s, before it %s", after, before)
	expect.Success(t, nstest.Ping(t, host, nstest.Addr("192.0.2.1")))

	// What is no longer there is not said to be back.
	must.Succeed(t, call("take", "eth0", "br0").err(), "take once more")
	nstest.Run(t, host, "sh", "-ec", "ip -4 address flush dev br0")
	got := call("restore", "eth0", "br0")
	_, command, ok := strings.Cut(got.stderr, "To add it again: ")
	must.That(t, got.status == exitFailed && ok, "restore without an address: %+v", got)
	nstest.Run(t, host, "sh", "-ec", command)
	after = addresses()
	expect.That(t, after == before, "after %q: %s, before it %s", command, after, before)
}

func TestUplinkCommandsThatAreWrong(t *testing.T) {
	t.Parallel()
	host := uplinkHost(t)
	for _, tt := range []struct {
		args   []string
		status int
		stderr string
	}{
		{[]string{"uplink", "give"}, exitUsage, "tombolo: unknown command \"give\" for \"tombolo uplink\"\nsee tombolo uplink --help\n"},
		{[]string{"uplink", "take", "eth0"}, exitUsage, "tombolo: tombolo uplink take takes NIC BRIDGE; given: eth0\nsee tombolo uplink take --help\n"},
		{[]string{"uplink", "restore"}, exitUsage, "tombolo: tombolo uplink restore takes NIC [BRIDGE]; given: none\nsee tombolo uplink restore --help\n"},
		{[]string{"uplink", "take", "--force", "eth0", "br0"}, exitUsage, "tombolo: unknown flag: --force\nsee tombolo uplink take --help\n"},
	} {
		want := outcome{tt.status, "", tt.stderr}
		expect.NoDiff(t, cmp.Diff(want, run(t, host, nil, "", tt.args...), cmp.AllowUnexported(outcome{})), "%v", tt.args)
	}
	// As in ADD.
	want := outcome{exitFailed, "", "tombolo: uplink lan7: the host has no such link (ip link lists its links)\n"}
	for _, verb := range []string{"plan", "take"} {
		got := run(t, host, nil, "", "uplink", verb, "--state", t.TempDir()+"/state", "lan7", "br0")
		expect.NoDiff(t, cmp.Diff(want, got, cmp.AllowUnexported(outcome{})), "%s of a NIC that is not there", verb)
	}
}

func TestVerdictOfAPlanIsOneLine(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, connection, want string
		moves                  []netip.Addr
		warnings               []string
	}{
		{"both families, and a warning", "192.0.2.1 1 2001:db8::2 22",
			"OK, but see the warnings (1): 192.0.2.2, 2001:db8::2 move to br0, your SSH session stays; undo: tombolo uplink restore eth0\n",
			[]netip.Addr{nstest.Addr("192.0.2.2"), nstest.Addr("2001:db8::2")}, []string{"x"}},
		{"an SSH session by another NIC", "192.0.2.1 1 198.51.100.2 22",
			"OK: 192.0.2.2 moves to br0, connections stay; undo: tombolo uplink restore eth0\n",
			[]netip.Addr{nstest.Addr("192.0.2.2")}, nil},
		{"no address", "", "OK: no address moves to br0, connections stay; undo: tombolo uplink restore eth0\n", nil, nil},
	} {
		expect.Equal(t, verdict(tt.moves, tt.warnings, "eth0", "br0", tt.connection), tt.want, "%s", tt.name)
	}
}
