package cni

import (
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestResultSaysWhatIsThere(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"mtu": 1400})
	p := n.pod("a")
	got := w.add(p)

	host, inPod := links(t, n.ns), links(t, p.NS)
	port := w.port(p)
	three := 2
	want := &current.Result{
		CNIVersion: "1.1.0",
		Interfaces: []*current.Interface{
			{Name: "cbr0", Mac: host["cbr0"].MAC, Mtu: 1400},
			{Name: port, Mac: host[port].MAC, Mtu: 1400},
			{Name: "eth0", Mac: inPod["eth0"].MAC, Mtu: 1400, Sandbox: p.path},
		},
		IPs: []*current.IPConfig{
			{Interface: &three, Address: ipNet(t, "10.77.0.2/24"), Gateway: nstest.Addr(gateway4).AsSlice()},
			{Interface: &three, Address: ipNet(t, "fd77::2/64"), Gateway: nstest.Addr(gateway6).AsSlice()},
		},
		Routes: []*types.Route{
			{Dst: ipNet(t, "0.0.0.0/0"), GW: nstest.Addr(gateway4).AsSlice()},
			{Dst: ipNet(t, "::/0"), GW: nstest.Addr(gateway6).AsSlice()},
		},
	}
	expect.NoDiff(t, cmp.Diff(want, got, cmpopts.EquateEmpty(), cmp.Comparer(sameJSON)), "result")
	for name, l := range map[string]link{"cbr0": host["cbr0"], port: host[port], "eth0": inPod["eth0"]} {
		expect.That(t, l.MTU == 1400 && l.up(), "%s: MTU %d, flags %v; want 1400 and up", name, l.MTU, l.Flags)
	}
	expect.NoDiff(t, cmp.Diff([]string{"10.77.0.2/24", "fd77::2/64"}, globals(t, p.NS, "eth0")), "addresses of the pod")
	expect.NoDiff(t, cmp.Diff([]string{"10.77.0.1/24", "fd77::1/64"}, globals(t, n.ns, "cbr0")), "addresses of the bridge")
	expect.That(t, inPod["lo"].up(), "the pod's loopback interface is down")
	expect.Equal(t, inPod["eth0"].MAC, "0a:58:0a:4d:00:02", "the pod's MAC is")
	expect.That(t, host[port].Alias != "" && host[port].Master == "cbr0",
		"the port is %+v, want it on cbr0 and with an alias", host[port])
}

// sameJSON compares what a runtime gets to see: addresses have several forms in memory.
func sameJSON(a, b *current.Result) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && string(x) == string(y)
}

func ipNet(t testing.TB, text string) net.IPNet {
	t.Helper()
	_, n, err := net.ParseCIDR(text)
	must.Succeed(t, err)
	n.IP = nstest.Prefix(text).Addr().AsSlice()
	return *n
}

func TestIPv4ComesFirstInTheResult(t *testing.T) {
	n := parallelNode(t)
	p := n.pod("a")
	r := n.podnet(conf{"ipam": hostLocal(subnet6, subnet4)}).add(p)
	expect.NoDiff(t, cmp.Diff([]netip.Addr{nstest.Addr("10.77.0.2"), nstest.Addr("fd77::2")}, ips(r), cmpopts.EquateComparable(netip.Addr{})), "addresses")
}

func TestMACIsTheOneAskedFor(t *testing.T) {
	t.Parallel()
	const byRuntime, byArgs, byEnv = "02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"
	can := conf{"capabilities": conf{"mac": true}}
	args := conf{"args": conf{"cni": conf{"mac": byArgs}}}
	both := conf{"capabilities": conf{"mac": true}, "args": conf{"cni": conf{"mac": byArgs}}}
	for _, tt := range []struct {
		name    string
		fields  conf
		options []option
		want    string
	}{
		{"capability", can, []option{capability("mac", byRuntime)}, byRuntime},
		{"args.cni", args, nil, byArgs},
		{"CNI_ARGS", nil, []option{arg("MAC", byEnv)}, byEnv},
		{"capability before all", both, []option{capability("mac", byRuntime), arg("MAC", byEnv)}, byRuntime},
		{"args.cni before CNI_ARGS", args, []option{arg("MAC", byEnv)}, byArgs},
		{"capability that was not declared", nil, []option{capability("mac", byRuntime)}, "0a:58:0a:4d:00:02"},
		{"IPv6 alone", conf{"ipam": hostLocal(subnet6)}, nil, "0a:34:ab:60:56:7b"},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			p := n.pod("a")
			r := n.podnet(tt.fields).add(p, tt.options...)
			if got := links(t, p.NS)["eth0"].MAC; got != tt.want || r.Interfaces[2].Mac != tt.want {
				t.Errorf("MAC %s, in the result %s; want %s", got, r.Interfaces[2].Mac, tt.want)
			}
		})
	}
}

func TestMTUIsThatOfTheDefaultRoute(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name       string
		mtu4, mtu6 string // of the links with the default routes; empty: no such route
		fields     conf
		want       int
	}{
		{"IPv4", "1450", "", nil, 1450},
		{"IPv6", "", "1380", nil, 1380},
		{"the smaller, of IPv6", "9000", "1380", nil, 1380},
		{"the smaller, of IPv4", "1300", "1380", nil, 1300},
		{"none", "", "", nil, 1500},
		{"jumbo", "9000", "9000", nil, 9000},
		{"given", "1450", "1380", conf{"mtu": 1420}, 1420},
		{"layer 2", "1450", "", conf{"mode": "l2"}, 1450},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			out := nstest.New(t)
			for name, mtu := range map[string]string{"up4": tt.mtu4, "up6": tt.mtu6} {
				if mtu == "" {
					continue
				}
				nstest.Veth(t, n.ns, name, out, name)
				n.ip("link set " + name + " mtu " + mtu)
				family := "-4"
				if name == "up6" {
					family = "-6"
				}
				n.ip(family + " route add default dev " + name)
			}
			w := n.podnet(tt.fields)
			p := n.pod("a")
			r := w.add(p)
			for i, l := range []link{links(t, n.ns)[r.Interfaces[0].Name], links(t, n.ns)[w.port(p)], links(t, p.NS)["eth0"]} {
				if l.MTU != tt.want || r.Interfaces[i].Mtu != tt.want {
					t.Errorf("%s: MTU %d, in the result %d; want %d", l.Name, l.MTU, r.Interfaces[i].Mtu, tt.want)
				}
			}
		})
	}
}

func TestMTUBelowIPv6sLeastIsForIPv4(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(conf{"mtu": 576, "ipam": hostLocal(subnet4)})
	p := w.addPod("a")
	wantPing(t, p.NS, gateway4, outside4)
	expect.Success(t, w.check(p))
	w.del(p)
	n.wantNothing()
	wantError(t, expect.Err(w.with(conf{"ipam": dualStack()}).tryAdd(p)), 7, "1280")
	n.wantNothing()
}

func TestBridgeKeepsItsMACAndMTU(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"capabilities": conf{"mac": true}})
	first := w.add(n.pod("a")).Interfaces[0]
	w.with(conf{"mtu": 1400}).add(n.pod("b"), capability("mac", "02:00:00:00:00:00"))
	l := links(t, n.ns)["cbr0"]
	expect.Equal(t, l.MAC, first.Mac, "the bridge's MAC went from %s to", first.Mac)
	expect.Equal(t, l.MTU, 1400, "the bridge's MTU is %d, want the configuration's new one", l.MTU)
}

func TestDADIsWaitedForWhereAskedFor(t *testing.T) {
	n := parallelNode(t)
	p := n.pod("a")
	n.podnet(conf{"enabledad": true}).add(p)
	for _, a := range addresses(t, p.NS, "eth0") {
		expect.That(t, !a.Local.Is6() || !a.Tentative && !a.DADFailed && !a.NoDAD,
			"%s: tentative %t, failed %t, nodad %t", a.Local, a.Tentative, a.DADFailed, a.NoDAD)
	}
	wantPing(t, p.NS, gateway6)
}

// A machine that is none of ours has the address.
func TestDADFindsAMachineOnTheBridge(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"enabledad": true, "ipam": fixed(conf{"address": "fd77::5/64", "gateway": gateway6})})
	n.podnet(nil).add(n.pod("first")) // so that there is a bridge
	machine := nstest.New(t)
	nstest.Veth(t, n.ns, "machine", machine, "eth0")
	n.ip("link set machine master cbr0")
	nstest.Run(t, machine, "ip", "address", "add", "fd77::5/64", "dev", "eth0", "nodad")
	before := n.traces()
	_, err := w.tryAdd(n.pod("second"))
	wantError(t, err, 112, "fd77::5")
	n.wantTraces(before)
}

func TestDADFindsADuplicate(t *testing.T) {
	n := parallelNode(t)
	taken := fixed(conf{"address": "fd77::5/64", "gateway": gateway6})
	w := n.podnet(conf{"enabledad": true, "ipam": taken})
	// Another network on the bridge, whose pods nobody keeps from having the address.
	n.network("other", conf{"mode": "l2", "bridge": "cbr0", "ipam": fixed(conf{"address": "fd77::5/64"})}).add(n.pod("first"))
	before := n.traces()
	wantError(t, expect.Err(w.tryAdd(n.pod("second"))), 112, "fd77::5")
	n.wantTraces(before)
}

func TestDNSOfTheResult(t *testing.T) {
	t.Parallel()
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	must.Succeed(t, os.WriteFile(resolvConf, []byte("nameserver 9.9.9.9\nsearch ipam.example\n"), 0o644))
	ofIPAM := dualStack()
	ofIPAM["resolvConf"] = resolvConf
	ofConf := conf{"nameservers": []string{"10.0.0.10"}, "domain": "cluster.local"}
	byRuntime := capability("dns", conf{"servers": []string{"10.0.0.53"}, "searches": []string{"runtime.example"}, "options": []string{"ndots:2"}})
	for _, tt := range []struct {
		name    string
		fields  conf
		options []option
		want    types.DNS
	}{
		{"none", nil, nil, types.DNS{}},
		{"of the ipam", conf{"ipam": ofIPAM}, nil, types.DNS{Nameservers: []string{"9.9.9.9"}, Search: []string{"ipam.example"}}},
		{"of the configuration, all of it", conf{"ipam": ofIPAM, "dns": ofConf}, nil, types.DNS{Nameservers: []string{"10.0.0.10"}, Domain: "cluster.local"}},
		{
			"of the runtime", conf{"ipam": ofIPAM, "dns": ofConf, "capabilities": conf{"dns": true}},
			[]option{byRuntime},
			types.DNS{Nameservers: []string{"10.0.0.53"}, Domain: "cluster.local", Search: []string{"runtime.example"}, Options: []string{"ndots:2"}},
		},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			got := n.podnet(tt.fields).add(n.pod("a"), tt.options...).DNS
			expect.NoDiff(t, cmp.Diff(tt.want, got, cmpopts.EquateEmpty()), "dns")
		})
	}
}

func TestRoutesCarryEveryAttribute(t *testing.T) {
	n := parallelNode(t)
	ipam := dualStack()
	ipam["routes"] = []conf{
		{"dst": "10.1.0.0/16", "gw": "10.77.0.7", "mtu": 1300, "advmss": 1200, "priority": 50},
		{"dst": "10.2.0.0/16", "table": 100},
		{"dst": "10.3.0.0/16", "scope": 253},
		{"dst": "fd99::/32", "gw": "fd77::7", "mtu": 1290, "priority": 7},
		{"dst": "0.0.0.0/0", "gw": gateway4, "priority": 9},
	}
	w := n.podnet(conf{"ipam": ipam})
	p := n.pod("a")
	r := w.add(p)
	for _, tt := range []struct{ family, dst, want string }{
		{"-4", "10.1.0.0/16", "10.1.0.0/16 via 10.77.0.7 dev eth0 proto 116 metric 50 mtu 1300 advmss 1200"},
		{"-4", "10.2.0.0/16", "10.2.0.0/16 via 10.77.0.1 dev eth0 table 100 proto 116"},
		{"-4", "10.3.0.0/16", "10.3.0.0/16 dev eth0 proto 116 scope link"},
		{"-6", "fd99::/32", "fd99::/32 via fd77::7 dev eth0 proto 116 metric 7 mtu 1290 pref medium"},
		// One that is there already is not added again.
		{"-4", "default", "default via 10.77.0.1 dev eth0 proto 116 metric 9"},
		{"-6", "default", "default via fd77::1 dev eth0 proto 116 metric 1024 pref medium"},
	} {
		expect.NoDiff(t, cmp.Diff([]string{tt.want}, routes(t, p.NS, tt.family, tt.dst)), "routes to %s", tt.dst)
	}
	// The result passes on what the ipam said.
	got := must.Of(json.Marshal(r.Routes)).Get(t)
	for _, part := range []string{`"advmss":1200`, `"mtu":1300`, `"priority":50`, `"table":100`, `"scope":253`} {
		expect.Contains(t, string(got), part, "the result's routes")
	}
	expect.Success(t, w.check(p))
}

func TestGatewayMayBeOffTheLink(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": fixed(conf{"address": "10.5.0.2/32", "gateway": "169.254.1.1"}, conf{"address": "fd05::2/128", "gateway": "fd05:1::1"})})
	p := w.addPod("a")
	for _, tt := range []struct{ family, want string }{
		{"-4", "default via 169.254.1.1 dev eth0 proto 116 onlink"},
		{"-6", "default via fd05:1::1 dev eth0 proto 116 metric 1024 onlink pref medium"},
	} {
		expect.NoDiff(t, cmp.Diff([]string{tt.want}, routes(t, p.NS, tt.family, "default")), "default route")
	}
	// The way to such pods is the operator's to choose.
	n.ip("route add 10.5.0.2 dev cbr0")
	n.ip("-6 route add fd05::2 dev cbr0")
	wantPing(t, p.NS, "169.254.1.1", "fd05:1::1")
	expect.Success(t, w.check(p))
}

func TestForceAddressReplacesWhatIsOnTheBridge(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, have string
		force      bool
		want       []string // addresses of the bridge; nil: it fails
	}{
		{"conflict", "10.77.0.254/16", false, nil},
		{"forced", "10.77.0.254/16", true, []string{"10.77.0.1/24", "fd77::1/64"}},
		{"the same address with another prefix length", "10.77.0.1/16", false, nil},
		{"the same, forced", "10.77.0.1/16", true, []string{"10.77.0.1/24", "fd77::1/64"}},
		{"no overlap", "10.99.0.1/24", false, []string{"10.99.0.1/24", "10.77.0.1/24", "fd77::1/64"}},
		{"there already", "10.77.0.1/24", false, []string{"10.77.0.1/24", "fd77::1/64"}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			n.ip("link add cbr0 type bridge")
			n.ip("address add " + tt.have + " dev cbr0")
			p := n.pod("a")
			_, err := n.podnet(conf{"forceAddress": tt.force}).tryAdd(p)
			if tt.want == nil {
				wantError(t, err, 112, tt.have)
				n.wantNothing()
				return
			}
			must.Succeed(t, err)
			expect.NoDiff(t, cmp.Diff(tt.want, globals(t, n.ns, "cbr0"), cmpopts.SortSlices(strings.Compare)), "addresses of the bridge")
			wantPing(t, p.NS, gateway4)
		})
	}
}

func TestGatewayIsThatOfTheIPAM(t *testing.T) {
	n := parallelNode(t)
	ipam := conf{"type": "host-local", "ranges": []any{[]any{conf{"subnet": subnet4, "gateway": "10.77.0.254"}}}}
	p := n.pod("a")
	n.podnet(conf{"ipam": ipam}).add(p)
	expect.NoDiff(t, cmp.Diff([]string{"10.77.0.254/24"}, globals(t, n.ns, "cbr0")), "addresses of the bridge")
	wantPing(t, p.NS, "10.77.0.254")
}

func TestAskedForAddressesAreGiven(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		fields  conf
		options []option
	}{
		{"capability ips", conf{"capabilities": conf{"ips": true}}, []option{capability("ips", []string{"10.77.0.42", "fd77::42"})}},
		{"args.cni.ips", conf{"args": conf{"cni": conf{"ips": []string{"10.77.0.42/24", "fd77::42"}}}}, nil},
		{"CNI_ARGS", nil, []option{arg("IP", "10.77.0.42,fd77::42")}},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(tt.fields)
			r := w.add(n.pod("a"), tt.options...)
			diff := cmp.Diff([]netip.Addr{nstest.Addr("10.77.0.42"), nstest.Addr("fd77::42")}, ips(r), cmpopts.EquateComparable(netip.Addr{}))
			expect.That(t, diff == "", "addresses (-want +got):\n%s", diff)
			before := n.traces()
			wantError(t, expect.Err(w.tryAdd(n.pod("b"), tt.options...)), 101, "10.77.0.42")
			n.wantTraces(before)
		})
	}
}

func TestRangesMayComeFromTheRuntime(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": conf{"type": "host-local"}, "capabilities": conf{"ipRanges": true}})
	r := w.add(n.pod("a"), capability("ipRanges", []any{[]any{conf{"subnet": "10.42.3.0/24"}}, []any{conf{"subnet": "fd42:0:0:3::/64"}}}))
	diff := cmp.Diff([]netip.Addr{nstest.Addr("10.42.3.2"), nstest.Addr("fd42:0:0:3::2")}, ips(r), cmpopts.EquateComparable(netip.Addr{}))
	expect.That(t, diff == "", "addresses (-want +got):\n%s", diff)
	// libcni hands nothing over with STATUS.
	n.callOK(call{verb: "STATUS", stdin: w.stdin(nil)})
	before := n.traces()
	wantError(t, expect.Err(w.tryAdd(n.pod("b"))), 7, "host-local has no addresses to give")
	n.wantTraces(before)
}

func TestADDPassesOnWhatComesBeforeIt(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(nil)
	p := n.pod("a")
	prev := conf{"cniVersion": "1.1.0", "interfaces": []conf{{"name": "dummy0", "mac": "02:00:00:00:00:09"}}, "dns": conf{"nameservers": []string{"1.1.1.1"}}}
	out := n.callOK(call{verb: "ADD", id: p.id, netns: p.path, ifName: "eth0", stdin: w.stdin(conf{"prevResult": prev})})
	var r current.Result
	unmarshal(t, out, &r)
	expect.That(t, len(r.Interfaces) == 4 && r.Interfaces[0].Name == "dummy0" && *r.IPs[0].Interface == 3 && len(r.DNS.Nameservers) == 1,
		"result %s, want what came before it first", out)
}

func TestPodInTheNodesOwnNamespaceIsRefusedUnlessOverridden(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"mode": "l2"})
	c := call{verb: "ADD", id: "a", netns: nstest.Path(t, n.ns), ifName: "eth0", stdin: w.stdin(nil)}
	o := n.call(c)
	says := "CNI_NETNS=" + c.netns + " is the namespace that the plugin itself runs in: a pod needs one of its own"
	expect.That(t, o.status != 0 && strings.Contains(o.stdout, `"code":8,"msg":"`+says), "exit status %d: %s", o.status, o.stdout)
	n.wantNothing()
	for _, override := range []string{"1", "true", "TRUE"} {
		o, err := n.exec(t.Context(), plugin(), c.stdin, append(c.environ(), "CNI_NETNS_OVERRIDE="+override))
		must.That(t, err == nil && o.status == 0, "with CNI_NETNS_OVERRIDE=%s: %v, %s", override, err, o.stdout)
		got := globals(t, n.ns, "eth0")
		expect.That(t, len(got) == 2, "eth0 has %v, want an address of each family", got)
		del := c
		del.verb = "DEL"
		n.callOK(del)
		n.wantNothing()
	}
}
