package cni

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// TestNextADDHeals breaks a network in each way that cuts its pods off, and has the
// next ADD mend it: for the pods that were there as well.
func TestNextADDHeals(t *testing.T) {
	t.Parallel()
	ip := func(command string) func(*network) { return func(w *network) { w.Helper(); w.ip(command) } }
	nft := func(lines ...string) func(*network) {
		return func(w *network) {
			w.Helper()
			for _, line := range lines {
				w.nft(line)
			}
		}
	}
	sysctl := func(name string) func(*network) {
		return func(w *network) {
			w.Helper()
			nstest.Sysctl(w, w.ns, name, "1") // 0 again takes it from every link
			nstest.Sysctl(w, w.ns, name, "0")
		}
	}
	both, only4, only6 := []string{outside4, outside6}, []string{outside4}, []string{outside6}
	for _, tt := range []struct {
		name  string
		spoil func(*network)
		cut   []string // what pods no longer reach
	}{
		{"flushed table", nft("flush table inet tombolo"), both},
		{"deleted table", nft("delete table inet tombolo"), both},
		{"flushed ruleset", nft("flush ruleset"), both},
		{"deleted masquerade chain", nft("delete chain inet tombolo masq-podnet"), both},
		{"flushed masquerade chain", nft("flush chain inet tombolo masq-podnet"), both},
		{"deleted set", nft("flush chain inet tombolo masq-podnet", "delete set inet tombolo masq4-podnet"), both},
		{"dormant table", nft("add table inet tombolo { flags dormant; }"), both},
		{"removed IPv4 gateway", ip("address del 10.77.0.1/24 dev cbr0"), only4},
		{"removed IPv6 gateway", ip("address del fd77::1/64 dev cbr0"), only6},
		{"flushed addresses", ip("address flush dev cbr0"), both},
		{"deleted bridge", ip("link del cbr0"), both},
		{"bridge down", ip("link set cbr0 down"), both},
		{"bridge down and up, which takes its IPv6 addresses", func(w *network) {
			w.ip("link set cbr0 down")
			w.ip("link set cbr0 up")
		}, only6},
		{"IPv4 forwarding off", sysctl("net/ipv4/ip_forward"), only4},
		{"IPv6 forwarding off", sysctl("net/ipv6/conf/all/forwarding"), only6},
		{"everything", func(w *network) {
			w.ip("link del cbr0")
			w.nft("flush ruleset")
			sysctl("net/ipv4/ip_forward")(w)
			sysctl("net/ipv6/conf/all/forwarding")(w)
			must.Succeed(w, os.RemoveAll(w.state+"/networks"))
		}, both},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			old := n.pods(2)
			for _, p := range old {
				w.add(p)
			}
			rules := n.rules()
			wantPing(t, old[0].NS, both...)
			tt.spoil(w)
			wantNoPing(t, old[0].NS, tt.cut...)

			next := n.pod("next")
			r := w.add(next)
			for _, p := range append(old, next) {
				wantPing(t, p.NS, both...)
				expect.Success(t, w.check(p))
			}
			wantPing(t, old[1].NS, ip4(r).String(), ip6(r).String())
			got := n.rules()
			expect.That(t, got == rules, "%d rules, before it was broken there were %d", got, rules)
			for _, p := range append(old, next) {
				w.del(p)
			}
			n.wantNothing()
		})
	}
}

// TestNextADDHealsOtherNetworksRules is about what networks share: our table.
func TestNextADDHealsOtherNetworksRules(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"flush table inet tombolo", "delete table inet tombolo"} {
		nstest.RunParallel(t, command, func(t *testing.T) {
			n, w, pods, other, stranger := twoNetworks(t, "cbr1")
			n.nft(command)
			wantNoPing(t, stranger.NS, outside4)
			w.add(n.pod("next"))
			for _, p := range append(pods, stranger) {
				wantPing(t, p.NS, outside4, outside6)
			}
			expect.Success(t, other.check(stranger))
		})
	}
}

// TestNetworksOfOneBridgeAgreeOnIt is about settings of a bridge, which networks must not undo for each other.
func TestNetworksOfOneBridgeAgreeOnIt(t *testing.T) {
	n := parallelNode(t)
	first := n.podnet(conf{"mtu": 1400, "promiscMode": true, "hairpinMode": false})
	second := n.network("othernet", conf{"bridgeNFCall": false, "ipam": hostLocal("10.78.0.0/24")})
	a, b := n.pod("a"), n.pod("b")
	first.add(a)
	second.add(b)
	first.add(n.pod("c"))
	shown := n.run("ip", "-d", "link", "show", "cbr0")
	for _, want := range []string{"PROMISC", "mtu 1500", "nf_call_iptables 1"} {
		expect.Contains(t, shown, want, "the bridge")
	}
	expect.Contains(t, n.operate("check", "--state", n.state).stdout, "3 attachments: nothing differs", "check")
	wantPing(t, a.NS, "10.78.0.1")
}

// TestNextADDHealsOtherNetworksPorts is about what networks may share: a bridge.
func TestNextADDHealsOtherNetworksPorts(t *testing.T) {
	t.Parallel()
	for name, fields := range map[string]conf{
		"with a gateway": {"bridge": "cbr0", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")},
		"layer 2":        {"mode": "l2", "bridge": "cbr0", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w, other := n.podnet(nil), n.network("othernet", fields)
			a, b := n.pod("a"), n.pod("b")
			w.add(n.pod("first"))
			other.add(a)
			rb := other.add(b)
			wantPing(t, a.NS, ip4(rb).String())
			n.ip("link del cbr0")
			wantNoPing(t, a.NS, ip4(rb).String())
			w.add(n.pod("next"))
			other.add(n.pod("c"))
			wantPing(t, a.NS, ip4(rb).String(), ip6(rb).String())
		})
	}
}

func TestForeignTablesAreLeftAlone(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	n.nft("add table inet mine")
	n.nft("add chain inet mine forward { type filter hook forward priority 0; }")
	n.nft("add rule inet mine forward counter comment keep")
	n.nft("add table ip filter")
	foreign := func() string {
		return n.run("nft", "--stateless", "list", "table", "inet", "mine") + n.run("nft", "list", "table", "ip", "filter")
	}
	before := foreign()
	w := n.podnet(nil)
	w.add(n.pod("a"))
	n.nft("delete table inet tombolo")
	w.add(n.pod("b"))
	w.gc()
	expect.Success(t, n.remove("podnet").err())
	expect.NoDiff(t, cmp.Diff(before, foreign()), "others' tables")
}

func TestOtherPortsOfTheBridgeAreLeftAlone(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("a"))
	n.ip("link add mine type veth peer name mine-peer")
	n.ip("link set mine master cbr0 up")
	n.ip("address add 172.16.0.1/24 dev cbr0")
	n.nft("flush table inet tombolo")
	w.add(n.pod("b"))
	w.gc()
	expect.Equal(t, links(t, n.ns)["mine"].Master, "cbr0", "somebody's port is off the bridge")
	expect.Contains(t, strings.Join(globals(t, n.ns, "cbr0"), " "), "172.16.0.1/24",
		"somebody's address is off the bridge")
}

// TestNumberOfRulesDoesNotDependOnTheNumberOfPods compares what nft shows.
func TestNumberOfRulesDoesNotDependOnTheNumberOfPods(t *testing.T) {
	t.Parallel()
	const count = 60
	n := newNode(t)
	w := n.podnet(nil)
	pods := n.pods(count)
	w.add(pods[0])
	one, elements := n.rules(), len(n.owners())
	for _, p := range pods[1:] {
		w.add(p)
	}
	got := n.rules()
	expect.That(t, got == one && one != 0, "%d rules with %d pods, %d with one", got, count, one)
	if got := len(n.owners()); elements == 0 || got != count*elements {
		t.Errorf("%d elements with %d pods, %d with one", got, count, elements)
	}
	w.gc()
	got = n.rules()
	expect.That(t, got == one, "%d rules after GC, %d with one pod", got, one)
	n.wantNothing()
}

func TestChangedConfigurationKeepsRunningPods(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		fields conf
		reach  []string
	}{
		{"another MTU", conf{"mtu": 1400}, []string{outside4, outside6}},
		{"another subnet", conf{"ipam": hostLocal("10.79.0.0/24", "fd79::/64")}, []string{outside4, outside6}},
		{"IPv4 only", conf{"ipam": hostLocal(subnet4)}, []string{outside4, outside6}},
		{"another mark", conf{"forwardMark": "0x20000"}, []string{outside4, outside6}},
		{"no masquerade", conf{"ipMasq": false}, []string{gateway4, gateway6}},
		{"isolated", conf{"portIsolation": true}, []string{outside4, outside6}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			old, next := n.pod("old"), n.pod("next")
			w.add(old)
			changed := w.with(tt.fields)
			changed.add(next)
			wantPing(t, old.NS, tt.reach...)
			// Whatever is broken then, the changed network is mended, with both pods.
			n.nft("delete table inet tombolo")
			last := changed.addPod("last")
			wantPing(t, old.NS, tt.reach...)
			for _, p := range []*pod{next, last} {
				expect.Success(t, changed.check(p))
			}
			for _, p := range []*pod{old, next, last} {
				changed.del(p)
			}
			n.wantNothing()
		})
	}
}

// An installer's cp gives one name back to the reference while pods run, and the others stay Tombolo's: each pod of
// either keeps its host port, or gets one. Once the name is Tombolo's again, DEL leaves nothing of either.
func TestOneNameGoesBackWithPodsRunning(t *testing.T) {
	t.Parallel()
	list := func(port int) []string {
		return []string{
			`{"type":"bridge","isGateway":true,"ipMasq":true,"hairpinMode":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24","routes":[{"dst":"0.0.0.0/0"}]}}`,
			portmapping("", fmt.Sprintf(`{"hostPort":%d,"containerPort":80,"protocol":"tcp"}`, port)),
			`{"type":"firewall","ingressPolicy":"same-bridge"}`,
			`{"type":"bandwidth","ingressRate":80000000,"ingressBurst":800000,"egressRate":80000000,"egressBurst":800000}`,
		}
	}
	for _, name := range []string{"bridge", "host-local", "portmap", "firewall", "bandwidth"} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			peers := referenceDir(t)
			s := newSide(t, peers, nil)
			s.outside()
			ports := map[string]int{"a": 8080, "b": 8081, "c": 8082}
			add := func(id string) {
				t.Helper()
				s.chain("ADD", id, list(ports[id]))
				s.of(id).serve(t, "tcp", 80)
			}
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			add("a")
			must.Succeed(t, copyProgram(filepath.Join(peers, name), filepath.Join(s.programs, name)))
			add("b")
			s.chain("DEL", "a", list(ports["a"])) // by other plugins than its ADD was by
			add("c")
			for _, id := range []string{"b", "c"} {
				wantPing(t, s.of(id).NS, outside4)
				expect.Success(t, expect.Err(askPort(t, s.ns, "tcp", uplink4, ports[id])), "host port of %s", id)
			}
			must.Succeed(t, s.operate("install", "--names", "all", s.programs).err(), "install")
			s.chain("DEL", "b", list(ports["b"]))
			s.chain("DEL", "c", list(ports["c"]))
			all := s.run("iptables-save") + s.run("ip", "link", "show")
			if left := regexp.MustCompile(`(?m)^-A CNI-(DN-|FORWARD -[sd]).*|-j CNI-[0-9a-f]{24}|bwp.*`).FindAllString(all, -1); len(left) > 0 {
				t.Errorf("left of the reference's: %q", left)
			}
			for id := range ports {
				vanish(t, s.of(id).path)
			}
			expect.Success(t, s.operate("gc", "--state", s.state).err(), "gc")
			if left := s.owners(); slices.ContainsFunc(left, func(owner string) bool { return owner != "net" }) {
				t.Errorf("elements are left: %q", left)
			}
			left := s.reservations(filepath.Join(s.data, "n", "net"))
			expect.That(t, len(left) == 0, "addresses are left: %v", left)
		})
	}
}
