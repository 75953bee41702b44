package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What kubenet did for a node, besides addresses and host ports.

func TestForwardPolicyOfDropDoesNotStopPods(t *testing.T) {
	t.Parallel()
	for _, chain := range []string{"FORWARD", "DOCKER-USER"} {
		nstest.RunParallel(t, chain, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			routeBack(t, out)
			for _, command := range []string{"iptables", "ip6tables"} {
				if chain != "FORWARD" {
					n.run(command, "-N", chain)
					n.run(command, "-A", "FORWARD", "-j", chain)
				}
				n.run(command, "-P", "FORWARD", "DROP")
			}
			w := n.portnet(nil)
			a, b := n.pod("a"), n.pod("b")
			ra, rb := w.add(a, publish(t, "8080:80/tcp")), w.add(b)
			a.serve(t, "tcp", 80)
			wantPing(t, a.NS, outside4, outside6, ip4(rb).String(), ip6(rb).String())
			for _, at := range []string{uplink4, uplink6} {
				expect.Success(t, expect.Err(askPort(t, out, "tcp", at, 8080)), "the host port at %s", at)
			}
			// What nobody asked for stays under the policy.
			wantNoPing(t, out, ip4(ra).String(), ip6(ra).String())
			expect.Failure(t, dial(out, addrPort(ip4(ra).String(), 80), 500*time.Millisecond), "the outside reaches the pod's port past the host port")
			n.wantIPTablesWork("FORWARD")
			// What others drop stays dropped, beside Docker too.
			n.run("iptables", "-A", chain, "-d", outside4, "-j", "DROP")
			w.add(n.pod("later"))
			wantNoPing(t, a.NS, outside4)
			n.run("iptables", "-D", chain, "-d", outside4, "-j", "DROP")
			wantPing(t, a.NS, outside4)
			// Flushed, CHECK says so, and the next ADD mends it.
			expect.Success(t, w.check(a))
			n.run("iptables", "-F", "FORWARD")
			wantNoPing(t, a.NS, outside4)
			wantError(t, w.check(a), 113, "FORWARD")
			if chain != "FORWARD" {
				n.run("iptables", "-A", "FORWARD", "-j", chain)
			}
			w.add(n.pod("c"))
			wantPing(t, a.NS, outside4, outside6)
			expect.Success(t, w.check(a))
			// The last network takes its rules along.
			for _, id := range []string{"a", "b", "c", "later"} {
				n.callOK(call{verb: "DEL", id: id, ifName: "eth0", stdin: w.stdin(nil)})
			}
			expect.Success(t, n.remove(w.name).err())
			for _, command := range []string{"iptables", "ip6tables"} {
				rules := n.run(command, "-S")
				expect.That(t, !strings.Contains(rules, "0x10"), "left over:\n%s", rules)
			}
		})
	}
}

// wantIPTablesWork fails the test unless iptables can work with its chains as if
// our rules were its own.
func (n *node) wantIPTablesWork(chain string) {
	n.Helper()
	for _, command := range []string{"iptables", "ip6tables"} {
		before := n.run(command, "-S", chain)
		expect.That(n, strings.Contains(before, "-m mark --mark 0x10/0x10 -j ACCEPT") || strings.Contains(before, "mark match 0x10/0x10") || strings.Contains(before, "--mark 0x10/0x10"),
			"%s -S shows no rule of ours:\n%s", command, before)
		saved := n.run(command + "-save")
		expect.Success(n, expect.Err(nstest.Try(n.ns, "sh", "-c", fmt.Sprintf("%s-save | %s-restore", command, command))))
		if after := n.run(command, "-S", chain); strings.Count(after, "0x10/0x10") != strings.Count(before, "0x10/0x10") {
			n.Errorf("after save and restore:\n%s\nbefore:\n%s\nsaved:\n%s", after, before, saved)
		}
	}
}

func TestFlushedRulesetIsRepairedForEveryPod(t *testing.T) {
	t.Parallel()
	mend := map[string]func(*node, *network){
		"by the next ADD": func(n *node, w *network) { w.add(n.pod("next")) },
		"by tombolo repair": func(n *node, w *network) {
			expect.Success(n, n.operate("repair", "--state", n.state).err())
		},
	}
	for name, mend := range mend {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			w := n.portnet(conf{"guard": true})
			other := n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24"), "ingressPolicy": "same-bridge",
				"capabilities": conf{"portMappings": true}})
			a, b, c := n.pod("a"), n.pod("b"), n.pod("c")
			w.add(a, publish(t, "8080:80/tcp"))
			w.add(b)
			rc := other.add(c, publish(t, "9090:80/tcp"))
			a.serve(t, "tcp", 80)
			c.serve(t, "tcp", 80)
			o := n.operate("check", "--state", n.state)
			must.That(t, o.status == 0, "check before: status %d: %s%s", o.status, o.stdout, o.stderr)
			n.nft("flush ruleset")
			if o := n.operate("check", "--state", n.state); o.status != 4 || !strings.Contains(o.stdout, "3 of them differ") {
				t.Errorf("check after the flush: status %d: %s%s", o.status, o.stdout, o.stderr)
			}
			mend(n, w)
			o = n.operate("check", "--state", n.state)
			expect.That(t, o.status == 0, "check after repair: status %d: %s%s", o.status, o.stdout, o.stderr)
			for _, p := range []*pod{a, b} {
				expect.Success(t, w.check(p))
			}
			expect.Success(t, other.check(c))
			for _, port := range []int{8080, 9090} {
				expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, port)), "host port %d", port)
			}
			got := seenAs(t, c.NS, out, outside4)
			expect.That(t, got == uplink4, "the outside sees %s of %s, want the node's %s", got, ip4(rc), uplink4)
		})
	}
}

func TestRepairBringsBackBridgePortsAndLimits(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.portnet(nil)
	p := w.addPod("a", limited(1e7, 2e7))
	n.ip("link del cbr0")
	n.run("tc", "qdisc", "del", "dev", w.port(p), "root")
	o := n.operate("check", "--state", n.state)
	expect.That(t, o.status == 4, "check: status %d: %s", o.status, o.stdout)
	must.Succeed(t, n.operate("repair", "--state", n.state).err())
	o = n.operate("check", "--state", n.state)
	expect.That(t, o.status == 0, "check: status %d: %s%s", o.status, o.stdout, o.stderr)
	wantPing(t, p.NS, outside4, outside6)
	expect.Success(t, w.check(p))
}

// limited is the capability bandwidth, in bits a second.
func limited(ingress, egress uint64) option {
	return func(rt *libcni.RuntimeConf) {
		if rt.CapabilityArgs == nil {
			rt.CapabilityArgs = map[string]any{}
		}
		rt.CapabilityArgs["bandwidth"] = map[string]uint64{
			"ingressRate": ingress, "ingressBurst": ingress, "egressRate": egress, "egressBurst": egress,
		}
	}
}

// rates are those of the tbf qdiscs in the node's namespace by link, in bytes a second.
func (n *node) rates() map[string]uint64 {
	n.Helper()
	var list []struct {
		Kind, Dev string
		Options   struct{ Rate uint64 }
	}
	unmarshal(n, n.run("tc", "-json", "qdisc", "show"), &list)
	found := map[string]uint64{}
	for _, q := range list {
		if q.Kind == "tbf" {
			found[q.Dev] = q.Options.Rate
		}
	}
	return found
}

func TestBandwidthIsThatOfTheRuntimeOrOfTheConfiguration(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	// Two attachments of one container do not collide.
	p := w.addPod("a", limited(1e7, 2e7))
	second := w.with(conf{"isDefaultGateway": false})
	r := second.add(p, limited(3e7, 4e7), as("net1"))
	if len(n.rates()) != 4 {
		t.Errorf("rates %v, want four", n.rates())
	}
	expect.That(t, len(r.Interfaces) == 4 && strings.HasPrefix(r.Interfaces[3].Name, "ifb"),
		"result %v, want the ifb as its fourth interface", r)
	if got := n.rates()[w.port(p)]; got != 1e7/8 {
		t.Errorf("ingress is %d bytes a second, want %d", got, int(1e7/8))
	}
	for _, ifName := range []string{"eth0", "net1"} {
		w.del(p, as(ifName))
	}
	n.wantNothing()
	got := n.rates()
	expect.That(t, len(got) == 0, "left over: %v", got)
	// The operator's goes before the runtime's.
	q := n.pod("b")
	w.with(conf{"ingressRate": 5e6, "ingressBurst": 1e6}).add(q, limited(1e7, 2e7))
	if got := n.rates(); len(got) != 1 || got[w.port(q)] != 5e6/8 {
		t.Errorf("rates %v, want one of %d", got, int(5e6/8))
	}
}

func TestBurstThatDefeatsTheRateIsCappedAndSaidSo(t *testing.T) {
	n := parallelNode(t)
	log := t.TempDir() + "/log"
	w := n.portnet(conf{"logFile": log})
	w.add(n.pod("a"), func(rt *libcni.RuntimeConf) {
		// What containerd passes for a pod's annotation.
		rt.CapabilityArgs = map[string]any{"bandwidth": map[string]uint64{"ingressRate": 1e7, "ingressBurst": 4294967295}}
	})
	text := readFile(t, log)
	expect.That(t, strings.Contains(text, "bandwidth: ") && strings.Contains(text, `"WARN"`), "the log says nothing of it:\n%s", text)
	var list []struct {
		State     string
		Bandwidth struct{ Ingress struct{ Burst uint64 } }
	}
	err := json.Unmarshal([]byte(n.operate("ls", "--json", "--state", n.state).stdout), &list)
	must.That(t, err == nil && len(list) == 1, "%v, %v", list, err)
	got := list[0].Bandwidth.Ingress.Burst
	expect.That(t, got != 0 && got <= 1e7, "ls tells of a burst of %d bits", got)
}

func TestChangedCIDRsMoveTheGatewayAndKeepOldPodsGoing(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	old := n.podnet(nil)
	changed := n.podnet(conf{"ipam": hostLocal("10.79.0.0/24", "fd79::/64")})
	a, b, c := n.pod("a"), n.pod("b"), n.pod("c")
	ra := old.add(a)
	rb := changed.add(b)
	if got := len(globals(t, n.ns, "cbr0")); got != 4 {
		t.Errorf("the bridge has %v, want old and new gateways", globals(t, n.ns, "cbr0"))
	}
	wantPing(t, a.NS, gateway4, gateway6, outside4, outside6, ip4(rb).String())
	wantPing(t, b.NS, "10.79.0.1", "fd79::1", outside4, outside6, ip6(ra).String())
	expect.Success(t, changed.check(b))
	old.del(a)
	changed.add(c)
	got := globals(t, n.ns, "cbr0")
	expect.That(t, len(got) == 2 && !strings.Contains(strings.Join(got, " "), gateway4+"/"), "the bridge has %v, want the new gateways alone", got)
	wantPing(t, b.NS, outside4, outside6)
}

// With the address that was there first, the kernel takes others of its subnet, unless promote_secondaries is on.
func TestAGatewayThatMovesWithinItsSubnetIsThere(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	at := func(gateway string) *network {
		return n.podnet(conf{"ipam": conf{"type": "host-local", "ranges": []any{[]any{conf{"subnet": subnet4, "gateway": gateway}}}}})
	}
	a, b := n.pod("a"), n.pod("b")
	at("10.77.0.1").add(a)
	at("10.77.0.1").del(a)
	nstest.Sysctl(t, n.ns, "net/ipv4/conf/all/promote_secondaries", "0")
	nstest.Sysctl(t, n.ns, "net/ipv4/conf/cbr0/promote_secondaries", "0")
	at("10.77.0.254").add(b)
	got := globals(t, n.ns, "cbr0")
	expect.That(t, slices.Equal(got, []string{"10.77.0.254/24"}), "the bridge has %v, want the new gateway alone", got)
	wantPing(t, b.NS, outside4)
}

func TestNonMasqueradeCIDRs(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		list   []string
		masked bool
	}{
		{"the outside is not among them", []string{"10.0.0.0/8", "fd00::/8"}, true},
		{"the outside is among them", []string{"192.0.2.0/25", "2001:db8::/32"}, false},
		{"switched off", []string{"0.0.0.0/0", "::/0"}, false},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			out := n.outside()
			routeBack(t, out)
			p := n.pod("a")
			r := n.podnet(conf{"nonMasqueradeCIDRs": tt.list}).add(p)
			for at, want := range map[string][2]string{outside4: {ip4(r).String(), uplink4}, outside6: {ip6(r).String(), uplink6}} {
				want := map[bool]string{false: want[0], true: want[1]}[tt.masked]
				expect.Equal(t, seenAs(t, p.NS, out, at), want, "the outside at %s sees", at)
				// A local destination never.
			}
			expect.Equal(t, seenAs(t, p.NS, n.ns, uplink4), ip4(r).String(), "the node sees")
		})
	}
}

func TestIngressPolicies(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		policy             string
		sameBridge, across bool
	}{
		{"open", true, true},
		{"same-bridge", true, false},
		{"isolated", false, false},
	} {
		nstest.RunParallel(t, tt.policy, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(conf{"ingressPolicy": tt.policy})
			other := n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24"), "ingressPolicy": tt.policy})
			a, b, c := n.pod("a"), n.pod("b"), n.pod("c")
			w.add(a)
			rb, rc := w.add(b), other.add(c)
			want := func(reached bool, to string) {
				t.Helper()
				if reached {
					wantPing(t, a.NS, to)
				} else {
					wantNoPing(t, a.NS, to)
				}
			}
			want(tt.sameBridge, ip4(rb).String())
			want(tt.sameBridge, ip6(rb).String())
			want(tt.across, ip4(rc).String())
			wantPing(t, a.NS, gateway4, outside4, outside6)
			wantPing(t, n.ns, ip4(rb).String(), ip4(rc).String())
			expect.Success(t, w.check(a))
		})
	}
}

func TestSpoofGuardHoldsAPodToItsAddresses(t *testing.T) {
	t.Parallel()
	for _, guarded := range []bool{false, true} {
		nstest.RunParallel(t, fmt.Sprintf("guard %t", guarded), func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(conf{"guard": guarded})
			a, b := n.pod("a"), n.pod("b")
			w.add(a)
			rb := w.add(b)
			wantPing(t, a.NS, gateway4, gateway6, ip4(rb).String(), ip6(rb).String())
			// Frames to the groups of STP and LLDP would pass all rules by.
			expect.Contains(t, n.run("ip", "-d", "link", "show", w.port(a)), "group_fwd_mask 0x4001", "these link-local groups are not shown to the firewall")
			// Now it takes an address that is not its own.
			nstest.Run(t, a.NS, "ip", "address", "add", "10.77.0.200/24", "dev", "eth0")
			nstest.Run(t, a.NS, "ip", "route", "replace", gateway4, "dev", "eth0", "src", "10.77.0.200")
			if guarded {
				wantNoPing(t, a.NS, gateway4)
			} else {
				wantPing(t, a.NS, gateway4)
			}
			expect.Success(t, w.check(b))
			w.del(a)
			w.del(b)
			n.wantNothing()
		})
	}
}

func TestPromiscuousBridgeDeduplicatesOnlyWhereThereAreTwo(t *testing.T) {
	n := parallelNode(t)
	nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-iptables", "0")
	nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-ip6tables", "0")
	w := n.podnet(conf{"promiscMode": true, "bridgeNFCall": false})
	dedups := func() int {
		out, _ := nstest.Try(n.ns, "nft", "list", "chain", "bridge", "tombolo", "dedup-podnet")
		return strings.Count(out, " drop")
	}
	p := w.addPod("a")
	expect.Equal(t, dedups(), 0, "there are dedup rules, and nothing is there twice")
	// Somebody sets the parameter for all bridges.
	nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-iptables", "1")
	wantError(t, w.check(p), 113, "bridge tombolo")
	for i := range 3 {
		w.add(n.pod(fmt.Sprint("more", i)))
		got := dedups()
		expect.That(t, got == 1, "%d drop rules after ADD %d, want that of IPv4", got, i)
	}
	expect.Success(t, w.check(p))
	nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-iptables", "0")
	wantError(t, w.check(p), 113, "dedup")
	w.add(n.pod("b"))
	expect.Equal(t, dedups(), 0, "drop rules are left")
	n.ip("link set cbr0 promisc off")
	wantError(t, w.check(p), 113, "promiscuous")
	w.add(n.pod("c"))
	expect.Success(t, w.check(p))
}

func TestNetworksOfANodeShareOneMark(t *testing.T) {
	n := parallelNode(t)
	n.podnet(nil).add(n.pod("a"))
	_, err := n.network("othernet", conf{"bridge": "cbr1", "forwardMark": "0x2000", "ipam": hostLocal("10.78.0.0/24")}).tryAdd(n.pod("b"))
	wantError(t, err, 112, `network "podnet", which has pods, uses 0x10`)
}

func TestTheForwardMarkIsClearedBehindTheFirewall(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	p := n.pod("a")
	n.podnet(nil).add(p)
	n.nft("add table inet seen; add chain inet seen last { type filter hook postrouting priority 310; }; " +
		"add rule inet seen last icmp type echo-request meta mark and 0x10 == 0x10 counter; " +
		"add rule inet seen last icmpv6 type echo-request meta mark and 0x10 == 0x10 counter; " +
		"add rule inet seen last icmp type echo-request counter; add rule inet seen last icmpv6 type echo-request counter")
	wantPing(t, p.NS, outside4, outside6)
	list := n.nft("list chain inet seen last")
	expect.That(t, strings.Count(list, "counter packets 0 ") == 2 && strings.Count(list, "0x00000010 counter packets 0 ") == 2,
		"what pods send has the mark still where it leaves:\n%s", list)
}

func TestLegacyIPTablesInTheWayIsNamed(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	nstest.Need(t, "iptables-legacy")
	n.run("iptables-legacy", "-P", "FORWARD", "DROP")
	w := n.podnet(nil)
	p := n.pod("a")
	wantError(t, expect.Err(w.tryAdd(p)), 117, "iptables-legacy -A FORWARD")
	wantError(t, w.status(), 50, "iptables-legacy -A FORWARD")
	n.wantNothing()
	n.run("iptables-legacy", "-A", "FORWARD", "-m", "mark", "--mark", "0x10/0x10", "-j", "ACCEPT")
	expect.Success(t, w.status())
	w.add(p)
	wantPing(t, p.NS, outside4)
}

func TestLsShowsWhatPodsHaveAndWhatDiffers(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.portnet(nil)
	p := n.pod("0123456789abcdef")
	w.add(p, limited(1e7, 2e7), publish(t, "8080:80/tcp", uplink4+":5300:53/udp"),
		arg("K8S_POD_NAMESPACE", "default"), arg("K8S_POD_NAME", "web"), arg("IgnoreUnknown", "1"))
	ls := func() string {
		t.Helper()
		o := n.operate("ls", "--state", n.state)
		expect.That(t, o.status == 0 && o.stderr == "", "status %d: %s", o.status, o.stderr)
		return o.stdout
	}
	for _, want := range []string{"default/web", "0123456789ab ", "10.77.0.2,fd77::2", "8080->80/tcp,192.0.2.1:5300->53/udp", "10Mbit/20Mbit", "ready"} {
		expect.Contains(t, ls(), want)
	}
	// Each thing of the host that is taken away shows. What is gone in the pod is the pod's matter.
	nstest.Run(t, p.NS, "ip", "address", "del", "10.77.0.2/24", "dev", "eth0")
	n.nft("delete element inet tombolo hostports4 { tcp . 8080 }")
	n.run("tc", "qdisc", "del", "dev", w.port(p), "root")
	n.ip("link set " + w.port(p) + " type bridge_slave hairpin off")
	got := ls()
	for _, want := range []string{"differs", "8080", "tbf", "hairpin"} {
		expect.Contains(t, got, want)
	}
	expect.That(t, !strings.Contains(got, "10.77.0.2/24 is missing"), "a change inside the pod:\n%s", got)
	expect.Success(t, n.operate("repair", "--state", n.state).err())
	got = ls()
	expect.That(t, !strings.Contains(got, "8080/tcp is") && !strings.Contains(got, "hairpin"), "after repair:\n%s", got)
}

// The capabilities that the unit in deploy/systemd leaves.
func TestRepairNeedsNoMoreThanItsUnitGives(t *testing.T) {
	t.Parallel()
	nstest.Need(t, "setpriv")
	n := newNode(t)
	w := n.portnet(conf{"guard": true})
	p := w.addPod("a", limited(1e7, 2e7), publish(t, "8080:80/tcp"))
	n.nft("flush ruleset")
	n.ip("link del cbr0")
	unit := readFile(t, "../../deploy/systemd/tombolo-repair.service")
	_, allowed, _ := strings.Cut(unit, "\nCapabilityBoundingSet=")
	allowed, _, _ = strings.Cut(allowed, "\n")
	must.That(t, allowed == "CAP_SYS_ADMIN CAP_NET_ADMIN CAP_NET_RAW CAP_NET_BIND_SERVICE CAP_SYS_PTRACE",
		"the unit allows %q", allowed)
	set := strings.ToLower(strings.ReplaceAll(strings.ReplaceAll(" "+allowed, " CAP_", ",+"), " ", ""))
	n.run("setpriv", "--bounding-set=-all"+set, "--inh-caps=-all", "--ambient-caps=-all", command(), "repair", "--state", n.state)
	expect.Success(t, w.check(p))
}

func TestGCFindsAnIFBThatNothingElseTellsOf(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	p := w.addPod("a", limited(1e7, 2e7))
	n.ip("link del " + w.port(p))
	n.nft("flush ruleset")
	must.Succeed(t, os.RemoveAll(n.state+"/attachments"))
	got := links(t, n.ns)
	must.That(t, len(got) > 0 && strings.Contains(fmt.Sprint(got), "ifb"), "no ifb is left to be found: %v", got)
	w.gc()
	n.wantNothing()
}

// Receivers go by the source, and answer it.
func TestMulticastOfAPodKeepsItsSource(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	a, b := n.pod("a"), n.pod("b")
	r := w.add(a)
	w.add(b)
	link := &net.Interface{Index: nstest.Index(t, b.NS, "eth0"), Name: "eth0"}
	for group, want := range map[string]netip.Addr{"239.1.1.1:53": ip4(r), "[ff05::1:1]:53": ip6(r)} {
		to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(group))
		var receiver *net.UDPConn
		var sender net.Conn
		err := errors.Join(
			b.NS.Do(func() (err error) { receiver, err = net.ListenMulticastUDP("udp", link, to); return err }),
			a.NS.Do(func() (err error) { sender, err = net.Dial("udp", group); return err }),
		)
		must.Succeed(t, err)
		defer receiver.Close()
		defer sender.Close()
		var from netip.AddrPort
		for end := time.Now().Add(patience / 5); !from.IsValid() && time.Now().Before(end); {
			_, err := sender.Write([]byte("?"))
			receiver.SetReadDeadline(time.Now().Add(time.Second))
			if err == nil {
				_, from, _ = receiver.ReadFromUDPAddrPort(make([]byte, 8))
			}
		}
		expect.That(t, from.Addr().Unmap() == want, "what the pod sends to %s comes from %s, want %s", group, from.Addr(), want)
	}
}
