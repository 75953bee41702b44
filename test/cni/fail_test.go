package cni

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// TestADDThatFailsLeavesNothing has a pod beside the one whose ADD fails, which must
// not notice.
func TestADDThatFailsLeavesNothing(t *testing.T) {
	t.Parallel()
	routed := func(routes ...conf) conf {
		ipam := dualStack()
		ipam["routes"] = routes
		return conf{"ipam": ipam}
	}
	for _, tt := range []struct {
		name string
		// prepare breaks something, and gives the network that the pod is then added to.
		prepare func(t *testing.T, w *network, p *pod) *network
		fields  conf // other ones that the pod's network then has, where prepare is nil
		options []option
		code    uint
		says    string
	}{
		{
			name: "the interface's name is taken in the pod",
			prepare: func(t *testing.T, w *network, p *pod) *network {
				nstest.Run(t, p.NS, "ip", "link", "add", "eth0", "type", "bridge")
				return w
			},
			code: 111, says: "add link eth0: the pod has an interface of this name already",
		},
		{
			name: "the attachment is there already",
			prepare: func(t *testing.T, w *network, p *pod) *network {
				w.add(p)
				return w
			},
			code: 111, says: `container fails has an attachment eth0 to network "podnet" already: DEL it first`,
		},
		{name: "there is no such namespace", options: []option{netnsPath("/run/netns/none")}, code: 8, says: "/run/netns/none"},
		{name: "the path is no namespace", options: []option{netnsPath("/dev/null")}, code: 8, says: "not a network namespace"},
		{name: "the path is another namespace", options: []option{netnsPath("/proc/self/ns/mnt")}, code: 8, says: "not a network namespace"},
		{
			name: "the pool is full",
			fields: conf{"ipam": conf{"type": "host-local", "ranges": []any{
				[]any{conf{"subnet": subnet6}}, []any{conf{"subnet": subnet4, "rangeStart": "10.77.0.2", "rangeEnd": "10.77.0.2"}},
			}}},
			code: 100, says: `network "podnet": range 10.77.0.2-10.77.0.2 of 10.77.0.0/24 is full: 1 of 1 addresses reserved (in `,
		},
		{name: "the address that was asked for is taken", options: []option{arg("IP", "10.77.0.2")}, code: 101, says: "the requested address 10.77.0.2 is taken by container stays"},
		{
			name: "the bridge has an address that overlaps with the gateway",
			prepare: func(t *testing.T, w *network, p *pod) *network {
				w.ip("address add 10.99.0.254/16 dev cbr0")
				return w.with(conf{"ipam": hostLocal("10.99.0.0/24")})
			},
			code: 112, says: `bridge cbr0 has the address 10.99.0.254/16, which overlaps with the gateway 10.99.0.1/24 of network "podnet": set forceAddress to replace it`,
		},
		{
			name: "the bridge's name is that of a veth",
			prepare: func(t *testing.T, w *network, p *pod) *network {
				nstest.Veth(t, w.ns, "taken0", w.ns, "taken1")
				return w.with(conf{"bridge": "taken0"})
			},
			code: 116, says: "taken0",
		},
		{
			name: "the new bridge's name is that of a veth",
			prepare: func(t *testing.T, w *network, p *pod) *network {
				nstest.Veth(t, w.ns, "taken0", w.ns, "taken1")
				return w.network("othernet", conf{"bridge": "taken0", "ipam": hostLocal("10.78.0.0/24")})
			},
			code: 116, says: "ensure bridge taken0: the link is not a bridge: it is of kind veth; choose another name for the bridge, or delete the link",
		},
		{
			name: "a route that the kernel refuses", fields: routed(conf{"dst": "10.1.0.0/16", "gw": "10.77.0.1", "scope": 254}),
			code: 110, says: "(kernel: Route with host scope can not have a gateway): correct this route in ipam.routes",
		},
		{
			name: "the pod has such a route already", fields: routed(conf{"dst": "fd99::/16", "mtu": 1400}, conf{"dst": "fd99::/16", "mtu": 1300}),
			code: 112, says: "the pod has this route already: change its priority in ipam.routes",
		},
		{
			name: "the version cannot say the result",
			prepare: func(t *testing.T, w *network, p *pod) *network {
				wire := w.network("wire", conf{"mode": "l2", "bridge": "cbr0", "ipam": nil})
				wire.version = "0.2.0"
				return wire
			},
			code: 1, says: "write the result as CNI 0.2.0: cannot convert: no valid IP addresses",
		},
		{name: "the state directory cannot be made", fields: conf{"stateDir": "/dev/null/state"}, code: 5, says: "/dev/null/state"},
		{
			name: "the address has an element of another owner, who lives", fields: conf{"ipam": fixed(conf{"address": "10.77.0.2/24", "gateway": gateway4})},
			code: 112, says: "10.77.0.2",
		},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			stays, p := n.pod("stays"), n.pod("fails")
			w.add(stays)
			broken := w.with(tt.fields)
			if tt.prepare != nil {
				broken = tt.prepare(t, w, p)
			}
			before, inPod := n.traces(), linkNames(t, p)
			wantError(t, expect.Err(broken.tryAdd(p, tt.options...)), tt.code, tt.says)
			n.wantTraces(before)
			expect.NoDiff(t, cmp.Diff(inPod, linkNames(t, p)), "links of the pod")
			wantPing(t, stays.NS, gateway4, gateway6, outside4, outside6)
		})
	}
}

func linkNames(t *testing.T, p *pod) []string {
	t.Helper()
	return slices.Sorted(maps.Keys(links(t, p.NS)))
}

// netnsPath has the runtime name another file for the namespace.
func netnsPath(path string) option { return func(rt *libcni.RuntimeConf) { rt.NetNS = path } }

func TestDelegatedIPAMThatFailsIsUndone(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		fake fakeConf
		code uint
		says string
	}{
		{"it refuses", fakeConf{Fail: map[string]json.RawMessage{"ADD": json.RawMessage(`{"code":142,"msg":"no more of these"}`)}}, 142, "no more of these"},
		{"its answer is no result", fakeConf{Answer: json.RawMessage(`["what?"]`)}, 6, "fake-ipam"},
		{"its answer has no address", fakeConf{Answer: json.RawMessage(`{"cniVersion":"1.0.0"}`)}, 7, "gave no address"},
		{"it hangs until the deadline", fakeConf{Hang: "ADD"}, 11, "deadline"},
		{
			"it refuses, and its DEL too",
			fakeConf{Fail: map[string]json.RawMessage{"ADD": json.RawMessage(`{"code":142,"msg":"no more of these"}`), "DEL": json.RawMessage(`{"code":143,"msg":"nor less"}`)}},
			142, "nor less",
		},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			ipam, calls := fake(t, tt.fake)
			w := n.podnet(conf{"ipam": ipam})
			var got []string
			ends := func(w *network) {
				before := len(calls())
				wantError(t, expect.Err(w.tryAdd(n.pod("fails"))), tt.code, tt.says)
				got = calls()[before:]
				n.wantNothing()
			}
			if tt.fake.Hang == "" {
				ends(w)
			} else {
				ever(t, func(deadline string) bool {
					ends(w.with(conf{"deadline": deadline}))
					return slices.Contains(got, "ADD fails eth0")
				})
			}
			expect.NoDiff(t, cmp.Diff([]string{"ADD fails eth0", "DEL fails eth0"}, got), "calls of the ipam")
		})
	}
}

// ever tries ADDs with deadlines that grow until one got as far as it should: of a short
// one nobody knows what a busy machine will have done by then.
func ever(t *testing.T, reached func(deadline string) bool) {
	t.Helper()
	for d := 300 * time.Millisecond; d < patience; d *= 2 {
		if reached(d.String()) {
			return
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	t.Fatal("no ADD got there before its deadline")
}

// TestFailureAfterTheIPAMGivesTheAddressBack is for what a plugin of its own gave.
func TestFailureAfterTheIPAMGivesTheAddressBack(t *testing.T) {
	n := parallelNode(t)
	ipam, calls := fake(t, fakeConf{})
	p := n.pod("fails")
	nstest.Run(t, p.NS, "ip", "link", "add", "eth0", "type", "bridge")
	wantError(t, expect.Err(n.podnet(conf{"ipam": ipam}).tryAdd(p)), 111, "already")
	expect.NoDiff(t, cmp.Diff([]string{"ADD fails eth0", "DEL fails eth0"}, calls()), "calls of the ipam")
	n.wantNothing()
}

func TestDelegatedIPAMGetsEveryVerb(t *testing.T) {
	n := parallelNode(t)
	ipam, calls := fake(t, fakeConf{})
	w := n.podnet(conf{"ipam": ipam})
	p := n.pod("a")
	expect.Success(t, w.status())
	named := arg("K8S_POD_NAME", "web")
	w.add(p, named)
	wantPing(t, p.NS, gateway4)
	expect.Success(t, w.check(p, named))
	w.gc(p)
	w.del(p, named)
	const args = "K8S_POD_NAME=web"
	diff := cmp.Diff([]string{"STATUS", "ADD a eth0 " + args, "CHECK a eth0 " + args, "GC", "DEL a eth0 " + args}, calls())
	expect.That(t, diff == "", "calls of the ipam (-want +got):\n%s", diff)
	n.wantNothing()
}

func TestDelegatedIPAMMayBeHostLocalOfTheReference(t *testing.T) {
	n := parallelNode(t)
	// By another name, so that it is run and not served in process.
	dir := filepath.Join(t.TempDir(), "bin")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	must.Succeed(t, os.Symlink(filepath.Join(cniPath, "host-local"), filepath.Join(dir, "their-ipam")))
	n.searchAlso(dir)
	ipam := dualStack()
	ipam["type"], ipam["dataDir"] = "their-ipam", t.TempDir()
	w := n.podnet(conf{"ipam": ipam})
	p := w.addPod("a")
	wantPing(t, p.NS, gateway4, gateway6)
	expect.Success(t, w.check(p))
	expect.Success(t, w.status())
	w.del(p)
	n.wantNothing()
	left := n.reservations(fmt.Sprint(ipam["dataDir"], "/podnet"))
	expect.That(t, len(left) == 0, "the ipam still has %v", left)
}

func TestADDGivesUpOnALockAtItsDeadline(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	w.add(n.pod("stays"))
	before := n.traces()
	for _, file := range []string{n.state + "/lock", n.state + "/ipam/podnet/lock"} {
		lock := must.Of(os.Open(file)).Get(t)
		must.Succeed(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
		ever(t, func(deadline string) bool {
			_, err := w.with(conf{"deadline": deadline}).tryAdd(n.pod("late"))
			wantError(t, err, 11, "deadline")
			n.wantTraces(before)
			return err != nil && strings.Contains(err.Error(), file)
		})
		lock.Close()
	}
	w.add(n.pod("late"))
}

// TestADDMayRunOutOfTimeAnywhere has deadlines from too short for anything to long
// enough.
func TestADDMayRunOutOfTimeAnywhere(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	add := func(p *pod) call {
		return call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(nil)}
	}
	first, second := n.pod("first"), n.pod("second")
	w.add(first)
	whole := n.duration(add(second))
	w.del(first)
	w.del(second)
	late, done := 0, 0
	const rounds = 30
	for i := range rounds {
		p := n.pod(fmt.Sprintf("pod-%d", i))
		limited := w.with(conf{"deadline": fmt.Sprintf("%dus", 1+whole.Microseconds()*int64(i)/rounds)})
		if _, err := limited.tryAdd(p); err != nil {
			late++
			wantError(t, err, 11, "deadline")
		} else {
			done++
			w.del(p)
		}
		n.wantNothing()
	}
	expect.That(t, late != 0, "no ADD ran out of time")
	t.Logf("%d ADDs ran out of time, %d did not", late, done)
}

// The first network's default route stays the one that the pod uses; when it goes, the second's
// is left. A route that the pod has from somebody else counts as well.
func TestSecondDefaultRouteTakesALargerMetric(t *testing.T) {
	n := parallelNode(t)
	first := n.podnet(nil)
	second := n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24", "fd78::/64")})
	a := first.addPod("a")
	r := second.add(a, as("net1"))
	for _, want := range []string{"0.0.0.0/0 10.78.0.1 100", "::/0 fd78::1 1124"} {
		if !slices.ContainsFunc(r.Routes, func(r *types.Route) bool {
			return fmt.Sprint(r.Dst.String(), " ", r.GW, " ", r.Priority) == want
		}) {
			t.Errorf("the result lacks %s: %v", want, r.Routes)
		}
	}
	for family, want := range map[string]string{"-4": "10.77.0.1", "-6": "fd77::1"} {
		target := map[string]string{"-4": "192.0.2.1", "-6": "2001:db8::1"}[family]
		got := nstest.Run(t, a.NS, "ip", family, "route", "get", target)
		expect.That(t, strings.Contains(got, "via "+want), "the pod goes by %s, not by the first network", got)
	}
	expect.Success(t, second.check(a, as("net1")))
	expect.Success(t, n.operate("repair", "--state", n.state).err(), "repair")
	expect.Success(t, second.check(a, as("net1")), "after a repair")
	first.del(a)
	if got := nstest.Run(t, a.NS, "ip", "route", "show", "default"); !strings.Contains(got, "via 10.78.0.1 dev net1") || !strings.Contains(got, "metric 100") {
		t.Errorf("default route after the first network's DEL: %s", got)
	}
	b := n.pod("b")
	nstest.Veth(t, b.NS, "other0", b.NS, "other1")
	nstest.Run(t, b.NS, "ip", "route", "add", "default", "dev", "other0", "metric", "7")
	nstest.Run(t, b.NS, "ip", "route", "add", "default", "dev", "other0")
	if got := second.add(b).Routes; !slices.ContainsFunc(got, func(r *types.Route) bool { return r.Priority == 107 }) {
		t.Errorf("routes beside somebody else's: %v", got)
	}
}

// fakeIPAM is the name by which this program is an IPAM plugin of a third party. What
// it does is in the ipam section of its configuration.
const fakeIPAM = "fake-ipam"

// fakeConf is that section.
type fakeConf struct {
	Type string `json:"type"`
	// Log gets a line for each verb: the verb, the container, the interface and the arguments.
	Log string `json:"log"`
	// Answer is the result of an ADD.
	Answer json.RawMessage `json:"answer,omitempty"`
	// Fail has a verb fail with an error object.
	Fail map[string]json.RawMessage `json:"fail,omitempty"`
	// Hang has a verb never end.
	Hang string `json:"hang,omitempty"`
}

// fake is an ipam section for a conf. Other verbs than those that are to fail or hang
// succeed.
func fake(t testing.TB, f fakeConf) (ipam fakeConf, calls func() []string) {
	f.Type = fakeIPAM
	f.Log = t.TempDir() + "/log"
	if f.Answer == nil {
		f.Answer = json.RawMessage(`{"cniVersion":"1.0.0","ips":[{"address":"10.77.0.9/24","gateway":"10.77.0.1"}]}`)
	}
	return f, func() []string {
		data, err := os.ReadFile(f.Log)
		must.That(t, err == nil || os.IsNotExist(err), "%v", err)
		return strings.FieldsFunc(string(data), func(r rune) bool { return r == '\n' })
	}
}

func runFakeIPAM() int {
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		panic(err)
	}
	var conf struct {
		IPAM fakeConf `json:"ipam"`
	}
	if err := json.Unmarshal(stdin, &conf); err != nil {
		panic(err)
	}
	verb := os.Getenv("CNI_COMMAND")
	log, err := os.OpenFile(conf.IPAM.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	fmt.Fprintln(log, strings.TrimSpace(verb+" "+os.Getenv("CNI_CONTAINERID")+" "+os.Getenv("CNI_IFNAME")+" "+os.Getenv("CNI_ARGS")))
	if conf.IPAM.Hang == verb {
		// Until the plugin is killed.
		for parent := os.Getppid(); os.Getppid() == parent; {
			time.Sleep(50 * time.Millisecond)
		}
		return 1
	}
	if failure, ok := conf.IPAM.Fail[verb]; ok {
		fmt.Printf("%s\n", failure)
		return 1
	}
	if verb == "ADD" {
		fmt.Printf("%s\n", conf.IPAM.Answer)
	}
	return 0
}
