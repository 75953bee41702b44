package cni

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// twoNetworks has three pods on a network and one on another, which no GC of the
// first may touch. They share the bridge, or do not.
func twoNetworks(t *testing.T, otherBridge string) (n *node, w *network, pods []*pod, other *network, stranger *pod) {
	t.Helper()
	n = newNode(t)
	n.outside()
	w = n.podnet(nil)
	other = n.network("othernet", conf{"bridge": otherBridge, "ipam": hostLocal("10.78.0.0/24", "fd78::/64")})
	pods, stranger = n.pods(3), n.pod("stranger")
	other.add(stranger)
	for _, p := range pods {
		w.add(p)
	}
	return n, w, pods, other, stranger
}

func of(network string, traces []string) []string {
	list := []string{}
	for _, trace := range traces {
		if strings.Contains(trace, ":"+network) || strings.Contains(trace, "/"+network+"/") {
			list = append(list, trace)
		}
	}
	return list
}

func TestGCFreesWhatNobodyClaims(t *testing.T) {
	t.Parallel()
	for _, bridge := range []string{"cbr0", "cbr1"} {
		for _, tt := range []struct {
			name  string
			valid int // the first so many pods are; -1: there is no list
			lose  string
		}{
			{"no list", -1, ""},
			{"all are valid", 3, ""},
			{"some are", 1, ""},
			{"an empty list", 0, ""},
			{"some are, the records are lost", 1, "attachments"},
			{"an empty list, the records are lost", 0, "attachments"},
			{"an empty list, the state is lost", 0, "."},
			{"some are, the state is lost", 2, "."},
		} {
			nstest.RunParallel(t, "bridge "+bridge+", "+tt.name, func(t *testing.T) {
				n, w, pods, other, stranger := twoNetworks(t, bridge)
				others := of("othernet", n.traces())
				if tt.lose != "" {
					must.Succeed(t, os.RemoveAll(filepath.Join(n.state, tt.lose)))
					others = of("othernet", n.traces())
				}
				if tt.valid < 0 {
					before := n.traces()
					n.callOK(call{verb: "GC", stdin: w.stdin(nil)})
					n.callOK(call{verb: "GC", stdin: w.stdin(conf{"cni.dev/valid-attachments": nil})})
					n.wantTraces(before)
					return
				}
				valid := pods[:tt.valid]
				w.gc(valid...)
				left := of("podnet", n.traces())
				for i, p := range pods {
					hash := strings.TrimPrefix(w.port(p), "veth")
					if got := strings.Contains(strings.Join(left, "\n"), hash); got != (i < tt.valid) {
						t.Errorf("pod %d of %d valid ones: traces are left: %t\n%s", i, tt.valid, got, strings.Join(left, "\n"))
					}
				}
				expect.That(t, tt.lose != "" || tt.valid != 0 || len(left) == 0, "left: %q", left)
				expect.NoDiff(t, cmp.Diff(others, of("othernet", n.traces())), "what the other network has")
				_, ok := links(t, n.ns)["cbr0"]
				expect.That(t, ok, "the bridge is gone")
				expect.Contains(t, n.ruleset(), "chain masq-podnet", "the network's rules are gone")
				for _, p := range append(valid, stranger) {
					wantPing(t, p.NS, outside4, outside6)
				}
				// What was freed can be given again, and what was not, checked.
				err := other.check(stranger)
				expect.That(t, err == nil || tt.lose != "", "%v", err)
				w.add(n.pod("next"))
			})
		}
	}
}

func TestGCThroughTheRuntime(t *testing.T) {
	t.Parallel()
	n, w, pods, _, _ := twoNetworks(t, "cbr1")
	others := of("othernet", n.traces())
	// libcni DELs what it has in its cache, and then calls GC. Of one pod it knows, of
	// another it does not any more: that one is left to GC.
	forget(n, pods[1])
	err := n.cni.GCNetworkList(t.Context(), w.list(), &libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: pods[0].id, IfName: "eth0"}}})
	must.Succeed(t, err)
	expect.Success(t, w.check(pods[0]))
	for _, p := range pods[1:] {
		_, ok := links(t, n.ns)[w.port(p)]
		expect.That(t, !ok, "the port of %s is left", p.id)
	}
	must.Succeed(t, n.cni.GCNetworkList(t.Context(), w.list(), nil))
	n.wantTraces(others)
}

// forget has the runtime lose what it knows of a pod.
func forget(n *node, p *pod) {
	n.Helper()
	files, err := filepath.Glob(filepath.Join(n.cache, "results", "*"+p.id+"*"))
	must.That(n, err == nil && len(files) == 1, "the runtime's cache has %v of %s, %v", files, p.id, err)
	must.Succeed(n, os.RemoveAll(files[0]))
}

func TestGCIsOfOneInterfaceAtATime(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	before := n.traces()
	w.with(conf{"isDefaultGateway": false}).add(p, as("net1"))
	w.gc(p) // claims eth0 only
	n.wantTraces(before)
}

func TestGCTakesElementsWhosePortIsGone(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	stays, gone := n.pod("stays"), n.pod("gone")
	w.add(stays)
	before := n.traces()
	w.add(gone)
	must.Succeed(t, os.RemoveAll(n.state+"/attachments/podnet/"+strings.TrimPrefix(w.port(gone), "veth")+".json"))
	n.ip("link del " + w.port(gone))
	must.That(t, len(n.traces()) != len(before), "nothing is left that GC could take")
	w.gc(stays)
	n.wantTraces(before)
}

func TestGCWithAListThatCannotBeReadDeletesNothing(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("a"))
	before := n.traces()
	for _, list := range []any{"all", 5, []any{"a"}, []any{conf{"containerID": "a"}}, []any{conf{"container": "a", "ifname": "eth0"}}} {
		o := n.call(call{verb: "GC", stdin: w.stdin(conf{"cni.dev/valid-attachments": list})})
		expect.That(t, o.status != 0, "GC took the list %v", list)
		n.wantTraces(before)
	}
}

func TestGCTakesAnyConfiguration(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	for _, p := range n.pods(3) {
		w.add(p)
	}
	n.callOK(call{verb: "GC", stdin: w.stdin(conf{
		"cni.dev/valid-attachments": []any{}, "bridge": 7, "nosuch": 1, "mtu": -3, "ipam": conf{"type": "host-local", "ranges": "none"},
	})})
	n.wantNothing()
}

func TestRemoveTakesTheRest(t *testing.T) {
	t.Parallel()
	for _, bridge := range []string{"cbr0", "cbr1"} {
		nstest.RunParallel(t, "other network on "+bridge, func(t *testing.T) {
			n, w, pods, _, stranger := twoNetworks(t, bridge)
			others := of("othernet", n.traces())
			before := n.traces()
			o := n.remove("podnet")
			expect.That(t, o.status == 3 && strings.Contains(o.stderr, "3 attachments"),
				"exit status %d, stderr %q, while there are pods", o.status, o.stderr)
			n.wantTraces(before)
			for _, p := range pods {
				w.del(p)
			}
			if o := n.remove("podnet"); o.status != 0 || o.stdout != "network podnet is removed\n" || o.stderr != "" {
				t.Errorf("exit status %d, %q, %q", o.status, o.stdout, o.stderr)
			}
			// The second time there is nothing: the name may be mistyped.
			if o := n.remove("podnet"); o.status != 1 || o.stdout != "" || !strings.Contains(o.stderr, `no network "podnet": those on record are othernet`) {
				t.Errorf("again: exit status %d, %q, %q", o.status, o.stdout, o.stderr)
			}
			n.wantTraces(others)
			if strings.Contains(n.ruleset(), "podnet") {
				t.Errorf("rules are left: %s", n.ruleset())
			}
			for _, path := range n.files(n.state) {
				expect.That(t, !strings.Contains(path, "podnet"), "left: %s", path)
			}
			_, there := links(t, n.ns)["cbr0"]
			shared := bridge == "cbr0"
			expect.That(t, there == shared, "bridge cbr0 is there: %t, want %t", there, shared)
			for _, a := range globals(t, n.ns, bridge) {
				expect.That(t, !strings.HasPrefix(a, "10.77.") && !strings.HasPrefix(a, "fd77:"),
					"the gateway %s is left", a)
			}
			wantPing(t, stranger.NS, outside4, outside6)
			// And it can be made again.
			w.add(n.pod("next"))
		})
	}
}

func TestRemoveOfTheLastNetworkTakesTheTable(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	w.del(p)
	must.Succeed(t, n.remove("podnet").err())
	expect.Equal(t, n.ruleset(), "", "left")
	_, ok := links(t, n.ns)["cbr0"]
	expect.That(t, !ok, "the bridge is left")
}

func TestRemoveRefusesWhatOnlyTheKernelKnowsOf(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	must.Succeed(t, os.RemoveAll(n.state))
	if o := n.remove("podnet"); o.status != 1 || !strings.Contains(o.stderr, "no state directory") {
		t.Errorf("without a state directory: exit status %d, %q; want 1", o.status, o.stderr)
	}
	must.Succeed(t, os.Mkdir(n.state, 0o700))
	o := n.remove("podnet")
	expect.That(t, o.status == 3, "exit status %d, %q; want 3", o.status, o.stderr)
	w.del(p)
	// A mistyped name deletes nothing.
	before := n.ruleset()
	if o := n.remove("pdnet"); o.status != 1 || !strings.Contains(o.stderr, "none is on record") || n.ruleset() != before || before == "" {
		t.Errorf("mistyped: exit status %d, %q; rules before: %s; after: %s", o.status, o.stderr, before, n.ruleset())
	}
	// It is on record no more, but rules in its name are left.
	o = n.remove("podnet")
	expect.That(t, o.status == 0 && o.stderr == "", "exit status %d, %q", o.status, o.stderr)
	expect.Equal(t, n.ruleset(), "", "left")
	if o := n.remove("podnet"); o.status != 1 || !strings.Contains(o.stderr, "none is on record") {
		t.Errorf("again: exit status %d, %q", o.status, o.stderr)
	}
}

// A save is loaded that is older than the last pod, or the boot, and the network is not on record. Its host ports would
// take packets from programs of the host, and its chains would stop others' packets, for ever.
func TestRemoveTakesWhatAnOldSaveBroughtBack(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(nil)
	p := n.pod("a")
	w.add(p, publish(t, "8080:80"))
	save := "flush ruleset\n" + n.ruleset()
	n.nft(save)
	o := n.remove(w.name)
	expect.That(t, o.status == 3, "with a pod: %+v", o)
	w.del(p)
	must.Succeed(t, n.remove(w.name).err())
	n.nft(save)
	o = n.operate("check", "--state", n.state)
	_, advised, _ := strings.Cut(o.stdout, "this helps: ")
	advised, _, _ = strings.Cut(advised, "\n")
	expect.Equal(t, advised, "tombolo remove "+w.name, "check: %+v", o)
	must.Succeed(t, n.remove(w.name).err())
	expect.Equal(t, n.ruleset(), "", "left")
}

func TestRemoveLeavesABridgeThatSomebodyUses(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := w.addPod("a")
	w.del(p)
	n.ip("link add mine type veth peer name mine-peer")
	n.ip("link set mine master cbr0")
	must.Succeed(t, n.remove("podnet").err())
	expect.Equal(t, links(t, n.ns)["mine"].Master, "cbr0", "the bridge went from under somebody's port")
	got := globals(t, n.ns, "cbr0")
	expect.That(t, len(got) == 0, "the gateways %v are left", got)
}

func TestRemoveLeavesABridgeThatSomebodyMade(t *testing.T) {
	n := parallelNode(t)
	n.ip("link add cbr0 type bridge")
	n.ip("address add 172.16.0.1/24 dev cbr0")
	w := n.podnet(nil)
	p := w.addPod("a")
	w.del(p)
	must.Succeed(t, n.remove("podnet").err())
	expect.NoDiff(t, cmp.Diff([]string{"172.16.0.1/24"}, globals(t, n.ns, "cbr0")), "addresses of the bridge")
}

func TestRemoveOfABadName(t *testing.T) {
	n := parallelNode(t)
	for _, tt := range []struct {
		args   []string
		status int
	}{
		{[]string{"remove", "--state", n.state, "../x"}, 1},
		{[]string{"remove", "--state", n.state, "never-was"}, 1},
		{[]string{"remove", "--state", n.state}, 2},
		{[]string{"remove", "--nosuch", "x"}, 2},
		{[]string{"nosuch"}, 2},
	} {
		if o := n.operate(tt.args...); o.status != tt.status || tt.status != 0 && o.stderr == "" {
			t.Errorf("tombolo %q: exit status %d, stderr %q; want %d", tt.args, o.status, o.stderr, tt.status)
		}
	}
}
