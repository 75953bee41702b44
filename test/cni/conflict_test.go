package cni

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// wantRefused says that both STATUS and ADD refuse a network, in words, and that its pods stay.
func wantRefused(t *testing.T, w *network, says ...string) {
	t.Helper()
	before := w.traces()
	_, err := w.tryAdd(w.pod("refused-" + w.name))
	for _, text := range says {
		wantError(t, err, 112, text)
		wantError(t, w.status(), 112, text)
	}
	w.wantTraces(before)
}

func TestAConfigurationThatWouldStrandPodsIsRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		changed conf
		says    []string
	}{
		{"another bridge", conf{"bridge": "cbr1"}, []string{`"podnet" has 1 pod on bridge cbr0`, "bridge cbr1"}},
		{"layer 2", conf{"mode": "l2", "bridge": "cbr0"}, []string{`1 pod in mode "gateway"`, `mode "l2"`}},
		{"no gateway", conf{"isGateway": false}, []string{`1 pod in mode "gateway"`}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			n.outside()
			w := n.podnet(nil)
			p := w.addPod("stays")
			wantRefused(t, w.with(tt.changed), tt.says...)
			expect.Success(t, w.check(p))
			wantPing(t, p.NS, outside4)
			if tt.changed["bridge"] == "cbr1" { // as a second runtime's that has a network of this name
				second := w.with(conf{"bridge": "cbr2", "ipam": hostLocal("10.23.0.0/16")})
				wantRefused(t, second, "or give the new configuration a name of its own")
				second.name = "second"
				q := second.addPod("beside")
				for w, p := range map[*network]*pod{w: p, second: q} {
					wantPing(t, p.NS, outside4)
					expect.Success(t, w.check(p))
				}
				second.del(q)
			}
			// With the pod gone, it is followed, and of the old bridge nothing is left.
			w.del(p)
			next := n.pod("next")
			changed := w.with(tt.changed)
			expect.Success(t, changed.status())
			changed.add(next)
			expect.Success(t, changed.check(next))
			_, ok := links(t, n.ns)["cbr0"]
			expect.That(t, ok != (tt.changed["bridge"] == "cbr1"), "bridge cbr0 is there: %t", ok)
		})
	}
}

func TestASubnetThatIsInUseElsewhereIsRefused(t *testing.T) {
	n := parallelNode(t)
	n.run("ip", "link", "add", "vpn0", "type", "veth", "peer", "name", "vpn1")
	n.ip("addr add 10.79.3.1/16 dev vpn0")
	n.ip("addr add fd79::1/48 dev vpn0")
	n.ip("addr add 10.80.0.1/32 dev vpn0")
	w := n.podnet(nil)
	p := w.addPod("p")
	n.ip("link set vpn0 up")
	n.ip("route add 198.51.100.0/24 nexthop via 10.79.5.1 dev vpn0 nexthop via 10.79.6.1 dev vpn0")
	for name, ipam := range map[string]conf{
		"connected4": hostLocal("10.79.0.0/16"), "connected6": hostLocal("10.81.0.0/24", "fd79::/48"), "wider": hostLocal("10.78.0.0/15"),
		"own": hostLocal("10.79.3.0/24"), "router": hostLocal("10.79.6.0/24"),
	} {
		wantRefused(t, n.network(name, conf{"bridge": "cbr1", "ipam": ipam}), `"`+name+`" on bridge cbr1`, "link vpn0")
	}
	other := n.network("other", conf{"bridge": "cbr1", "ipam": hostLocal("10.77.0.0/16")})
	wantRefused(t, other, `"other" on bridge cbr1`, `network "podnet" on bridge cbr0`, "tombolo remove podnet")
	// A single address is no network, and on one bridge two networks may have one subnet.
	for name, fields := range map[string]conf{
		"single": {"bridge": "cbr2", "ipam": hostLocal("10.80.0.0/24")}, "shared": {"bridge": "cbr0", "ipam": hostLocal("10.77.0.0/24")},
		// A subnet cut out of a wider network of the host's goes before it.
		"carved": {"bridge": "cbr3", "ipam": hostLocal("10.79.64.0/24")},
		"layer2": {"bridge": "br2", "mode": "l2", "ipam": fixed(conf{"address": "10.79.0.9/24"})},
	} {
		t.Run(name, func(t *testing.T) {
			fields["ipam"].(conf)["dataDir"] = t.TempDir()
			if name == "layer2" {
				delete(fields["ipam"].(conf), "dataDir")
			}
			one := n.network(name, fields)
			expect.Success(t, one.status())
			if name != "shared" { // whose pool does not know of the other's pods
				one.add(n.pod(name))
			}
		})
	}
	// A network that runs goes on, whatever another does then.
	n.ip("addr add 10.77.9.1/16 dev vpn0")
	expect.Success(t, w.status())
	n.nft("flush ruleset")
	w.add(n.pod("again"))
	err := w.check(p)
	expect.That(t, err == nil || strings.Contains(err.Error(), "10.77.9.1"), "%v", err)
}

// nerdctl and podman delete the bridge with a network, tell the plugins nothing of it, and give its
// subnet to the next network that is made.
func TestASubnetOfANetworkWhoseBridgeIsDeletedIsGivenToTheNext(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	p := w.addPod("p")
	next := n.network("next", conf{"bridge": "cbr1", "ipam": hostLocal("10.77.0.0/16")})
	n.ip("link del cbr0")
	// A pod may be left, whose DEL is to come.
	wantRefused(t, next, `network "podnet" on bridge cbr0`, "tombolo remove podnet")
	w.del(p)
	if o := n.operate("check", "--state", n.state); o.status != 4 || !strings.Contains(o.stdout, "bridge cbr0 is gone") || !strings.Contains(o.stdout, "this helps: tombolo remove podnet [configuration]\n") {
		t.Errorf("check: %+v", o)
	}
	expect.Success(t, next.status())
	o := n.operate("ls", "networks", "--state", n.state)
	expect.That(t, strings.Contains(o.stdout, "podnet"), "STATUS has taken the network down: %s", o.stdout)
	q := next.addPod("q")
	expect.Success(t, next.check(q))
	wantPing(t, q.NS, outside4)
	o = n.operate("ls", "networks", "--state", n.state)
	expect.That(t, !strings.Contains(o.stdout, "podnet"), "the network is still there: %s", o.stdout)
	// Now it is the first that has to wait.
	wantRefused(t, w, `network "next" on bridge cbr1`)
	next.del(q)
	// With nothing attached, podman's own bridge goes too, unless another program uses it.
	n.run("ip", "link", "add", "vnet0", "type", "veth", "peer", "name", "vnet1")
	n.ip("link set vnet0 master cbr1")
	wantRefused(t, w, `network "next" on bridge cbr1`)
	n.ip("link del vnet0")
	expect.Success(t, w.status())
	q = n.pod("third")
	w.add(q)
	expect.Success(t, w.check(q))
	wantPing(t, q.NS, outside4)
	_, ok := links(t, n.ns)["cbr1"]
	expect.That(t, !ok, "the bridge of the other network is still there")
	w.del(q)
	expect.Success(t, n.remove("podnet").err())
	n.wantNothing()
}

// A takeback is a node that changed over, whose names an installer gave back to the reference,
// and a container that was restarted by that: its ID is the same.
type takeback struct {
	*side
	plugins []string
}

// newTakeback has the pod a attached by this program, which was deleted and attached again by the
// reference's. It gives what the node had before.
func newTakeback(t *testing.T, address string) (_ *takeback, before string) {
	t.Helper()
	_, s := sides(t)
	forwardByHand(t, s.ns) // as the reference does
	b := &takeback{side: s, plugins: []string{
		`{"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","dataDir":"DATA/n","subnet":"10.5.0.0/24"` + address + `}}`,
		`{"type":"portmap","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}`,
		`{"type":"firewall"}`,
		`{"type":"bandwidth","egressRate":100000000,"egressBurst":1000000}`,
	}}
	// What pods share stays when they go.
	for _, run := range []func(what, id string, plugins []string) string{b.chain, b.byReference} {
		run("ADD", "b", b.plugins)
		run("DEL", "b", b.plugins)
	}
	before = b.holds()
	b.chain("ADD", "a", b.plugins)
	b.byReference("DEL", "a", b.plugins)
	vanish(b, b.of("a").path)
	delete(b.pods, "a")
	b.byReference("ADD", "a", b.plugins)
	return b, before
}

func (b *takeback) byReference(what, id string, plugins []string) string {
	b.Helper()
	named := b.programs
	defer func() { b.programs = named }()
	b.programs = os.Getenv(peersVar)
	return b.chain(what, id, plugins)
}

// What the reference made for a container goes with it, also where a record of its life before is left.
func TestDELFindsWhatTheReferenceMadeForARestartedContainer(t *testing.T) {
	t.Parallel()
	b, before := newTakeback(t, "")
	b.chain("DEL", "a", b.plugins)
	b.end("a")
	expect.Equal(t, cmp.Diff(before, b.holds()), "", "left (+)")
}

// The address of a container that the reference restarted is not given away when the rest of its
// life before is reclaimed.
func TestReclaimingLeavesTheAddressOfARestartedContainer(t *testing.T) {
	t.Parallel()
	b, _ := newTakeback(t, `,"rangeStart":"10.5.0.9","rangeEnd":"10.5.0.9"`)
	o := b.operate("gc", "--state", b.state)
	must.That(t, o.status == 0 && strings.Contains(o.stdout, "reclaimed"), "nothing is reclaimed, so nothing is shown: %+v", o)
	if !strings.Contains(b.files(), "10.5.0.9") {
		t.Error("the reservation is gone: " + b.files())
	}
	b.chain("DEL", "a", b.plugins)
	if strings.Contains(b.files(), "10.5.0.9") {
		t.Error("the reservation stays after DEL: " + b.files())
	}
}

// TestAGatewayThatAnotherMachineHasIsNotTaken has a machine at the far end of a port that somebody put on the bridge. The
// gateway is asked for when it first comes to the bridge, and not while the bridge has it.
func TestAGatewayThatAnotherMachineHasIsNotTaken(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		has  string // address of the other machine
		ipam conf
	}{
		"IPv4":         {gateway4, dualStack()},
		"IPv6":         {gateway6, dualStack()},
		"others' only": {"10.77.0.200", dualStack()},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			n.ip("link add cbr0 type bridge")
			n.ip("link set cbr0 up")
			machine := nstest.New(t)
			nstest.Veth(t, n.ns, "foreign", machine, "eth0")
			n.ip("link set foreign master cbr0")
			bits := map[bool]string{true: "/64", false: "/24"}[strings.Contains(tt.has, ":")]
			address := func(do string) {
				nodad := map[bool]string{true: " nodad"}[do == "add" && bits == "/64"]
				nstest.Run(t, machine, "ip", strings.Fields("address "+do+" "+tt.has+bits+" dev eth0"+nodad)...)
			}
			address("add")
			(&lan{node: n}).eventually(t, func() bool {
				return strings.Contains(n.run("bridge", "link", "show", "dev", "foreign"), "state forwarding")
			})

			w := n.podnet(conf{"bridge": "cbr0", "ipam": tt.ipam})
			p := n.pod("a")
			if name == "others' only" {
				w.add(p)
				w.del(p)
			} else {
				_, err := w.tryAdd(p)
				for _, says := range []string{"another machine answers for the gateway " + tt.has + " of network \"podnet\"", "bridge link show master cbr0"} {
					wantError(t, err, 112, says)
				}
				n.wantNothing()
				got := n.run("ip", "address")
				expect.That(t, !strings.Contains(got, tt.has+bits), "the gateway was put on:\n%s", got)
				// With the port off, or that machine gone, it is the bridge's.
				address("del")
			}
			w.add(p)
			wantPing(t, p.NS, gateway4)
			// Somebody takes it later: what is there stays, and pods come.
			if name != "others' only" {
				address("add")
			}
			w.add(n.pod("b"))
		})
	}
}
