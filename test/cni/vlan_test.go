package cni

import (
	"fmt"
	"strings"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// hasVLANs says whether the kernel's bridges know VLANs, by the word of another program.
func hasVLANs(t testing.TB) bool {
	t.Helper()
	_, err := nstest.Try(nstest.New(t), "ip", "link", "add", "br0", "type", "bridge", "vlan_filtering", "1")
	return err == nil
}

func needVLANs(t testing.TB) {
	t.Helper()
	if !hasVLANs(t) {
		t.Skip("this kernel's bridges know no VLANs: test/vm/run.sh boots one whose do")
	}
}

// vlansOf are the VLANs of a port, as the command bridge prints them.
func (n *node) vlansOf(port string) string {
	n.Helper()
	var lines []string
	for line := range strings.Lines(n.run("bridge", "-compressvlans", "vlan", "show", "dev", port)) {
		if fields := strings.Fields(strings.TrimPrefix(line, port)); len(fields) > 0 && fields[0] != "port" {
			lines = append(lines, strings.ToLower(strings.Join(fields, " ")))
		}
	}
	return strings.Join(lines, ", ")
}

func TestKernelWithoutVLANsSaysSo(t *testing.T) {
	t.Parallel()
	if hasVLANs(t) {
		t.Skip("this kernel's bridges know VLANs")
	}
	n := newNode(t)
	for name, fields := range map[string]conf{"vlan": {"vlan": 100}, "trunk": {"vlanTrunk": []conf{{"id": 7}}, "mode": "l2"}} {
		t.Run(name, func(t *testing.T) {
			before := links(t, n.ns)
			w := n.podnet(fields)
			const says = "this kernel's bridges know no VLANs"
			wantError(t, w.status(), 50, says)
			p := n.pod("a")
			wantError(t, expect.Err(w.tryAdd(p)), 110, says)
			expect.NoDiff(t, cmp.Diff(before, links(t, n.ns)), "the ADD made links")
			n.wantNothing()
			w.del(p)
		})
	}
}

func TestVLANKeepsPodsApart(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	for _, call := range []string{"by the bridge", "by the host", "no"} {
		nstest.RunParallel(t, "packets pass the firewall: "+call, func(t *testing.T) {
			testVLANKeepsPodsApart(t, call)
		})
	}
}

func testVLANKeepsPodsApart(t *testing.T, call string) {
	n := newNode(t)
	for _, f := range []string{"", "6"} {
		nstest.Sysctl(t, n.ns, "net/bridge/bridge-nf-call-ip"+f+"tables", map[bool]string{true: "1", false: "0"}[call == "by the host"])
	}
	out := n.outside()
	n.nft("add table inet other")
	n.nft("add chain inet other f { type filter hook forward priority 0; policy accept; }")
	n.run("iptables", "-P", "FORWARD", "DROP")
	n.run("ip6tables", "-P", "FORWARD", "DROP")
	nfCall := conf{"bridgeNFCall": call == "by the bridge"}
	hundred := n.podnet(conf{"vlan": 100}).with(nfCall)
	// Limits come to a port while it is down, before it is in its VLAN.
	other := n.network("other", conf{"vlan": 200, "ingressRate": 80000000, "egressRate": 80000000, "ipam": hostLocal("10.78.0.0/24", "fd78::/64")}).with(nfCall)
	plain := n.network("plain", conf{"ipam": hostLocal("10.79.0.0/24", "fd79::/64")}).with(nfCall)
	must.Succeed(t, hundred.status())
	a, b, c, d := n.pod("a"), n.pod("b"), n.pod("c"), n.pod("d")
	ra, rb, rc, rd := hundred.add(a), hundred.add(b), other.add(c), plain.add(d)

	if last := ra.Interfaces[len(ra.Interfaces)-1]; len(ra.Interfaces) != 4 || last.Name != "cbr0.100" || last.Mac != links(t, n.ns)["cbr0.100"].MAC || last.Sandbox != "" {
		t.Errorf("interfaces %v, want cbr0.100 for the fourth", ra.Interfaces)
	}
	if got := globals(t, n.ns, "cbr0"); len(got) != 2 { // plain's
		t.Errorf("the bridge has %v", got)
	}
	for link, want := range map[string][]string{"cbr0.100": {"10.77.0.1/24", "fd77::1/64"}, "cbr0.200": {"10.78.0.1/24", "fd78::1/64"}} {
		expect.NoDiff(t, cmp.Diff(want, globals(t, n.ns, link)), "addresses of %s", link)
	}
	for port, want := range map[string]string{
		hundred.port(a): "100 pvid egress untagged", other.port(c): "200 pvid egress untagged", plain.port(d): "1 pvid egress untagged",
		"cbr0": "1 pvid egress untagged, 100, 200",
	} {
		expect.Equal(t, n.vlansOf(port), want, "%s is in the VLANs", port)
	}
	wantPing(t, a.NS, gateway4, gateway6, ip4(rb).String(), ip6(rb).String(), outside4, outside6)
	wantPing(t, n.ns, ip4(ra).String(), ip6(ra).String(), ip4(rc).String(), ip6(rc).String(), ip4(rd).String())
	// By the host, which routes between them.
	wantPing(t, a.NS, ip4(rc).String(), ip6(rc).String(), ip4(rd).String(), ip6(rd).String())
	if call == "no" {
		// Otherwise the kernel redirects a's answer to d on the bridge, and keeps it in a's VLAN.
		wantPing(t, d.NS, ip4(ra).String(), ip6(rc).String())
	}
	for at, want := range map[string]string{outside4: uplink4, outside6: uplink6} {
		expect.Equal(t, seenAs(t, a.NS, out, at), want, "the outside at %s sees", at)
	}
	for at, want := range map[string]string{ip4(rb).String(): ip4(ra).String(), ip6(rb).String(): ip6(ra).String()} {
		expect.Equal(t, seenAs(t, a.NS, b.NS, at), want, "the pod at %s sees", at)
	}
	// On the wire, each VLAN is one of its own.
	for from, to := range map[*pod]*pod{b: c, d: b} {
		nstest.Run(t, from.NS, "ip", "address", "add", "192.0.2.1/28", "dev", "eth0")
		nstest.Run(t, to.NS, "ip", "address", "add", "192.0.2.2/28", "dev", "eth0")
		wantNoPing(t, from.NS, "192.0.2.2")
		nstest.Run(t, from.NS, "ip", "address", "del", "192.0.2.1/28", "dev", "eth0")
		nstest.Run(t, to.NS, "ip", "address", "del", "192.0.2.2/28", "dev", "eth0")
	}
	for w, p := range map[*network]*pod{hundred: a, other: c, plain: d} {
		expect.Success(t, w.check(p), "%s", w.name)
	}
	expect.Success(t, n.operate("check", "--state", n.state).err(), "check")
	hundred.del(a)
	hundred.del(b)
	other.del(c)
	plain.del(d)
	n.wantNothing()
	_, ok := links(t, n.ns)["cbr0.100"]
	expect.That(t, ok, "cbr0.100 went with its last pod, and the bridge did not")
	expect.Success(t, n.remove("podnet").err(), "remove")
	if l := links(t, n.ns); l["cbr0.100"].Name != "" || l["cbr0.200"].Name == "" || n.vlansOf("cbr0") != "1 pvid egress untagged, 200" {
		t.Errorf("after remove: %v, and VLANs %q", l, n.vlansOf("cbr0"))
	}
	for _, name := range []string{"other", "plain"} {
		expect.Success(t, n.remove(name).err(), "remove")
	}
	_, ok = links(t, n.ns)["cbr0"]
	expect.That(t, !ok, "the bridge is there after its last network was removed")
}

func TestVLANHasHostPorts(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	wantHostPorts(t, conf{"vlan": 100})
}

func TestVLANTrunk(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	n := newNode(t)
	for _, tt := range []struct {
		name   string
		fields conf
		want   string
	}{
		{"a trunk alone has VLAN 1 for what has no tag", conf{"vlanTrunk": []conf{{"minID": 101, "maxID": 110}, {"id": 7}}}, "1 pvid egress untagged, 7, 101-110"},
		{"beside a native VLAN", conf{"vlan": 100, "vlanTrunk": []conf{{"minID": 101, "maxID": 110, "id": 7}}}, "7, 100 pvid egress untagged, 101-110"},
		{"the native VLAN among the others", conf{"vlan": 100, "vlanTrunk": []conf{{"minID": 99, "maxID": 101}}}, "99, 100 pvid egress untagged, 101"},
		{"the default VLAN is kept", conf{"vlan": 100, "preserveDefaultVlan": true}, "1 egress untagged, 100 pvid egress untagged"},
		{"no VLAN to be kept beside", conf{"preserveDefaultVlan": true}, "1 pvid egress untagged"},
		{"an empty trunk", conf{"vlanTrunk": []conf{}}, "1 pvid egress untagged"},
		{"all", conf{"vlanTrunk": []conf{{"minID": 2, "maxID": 4094}}}, "1 pvid egress untagged, 2-4094"},
	} {
		w := n.network("trunk", conf{"mode": "l2", "ipam": nil}).with(tt.fields)
		p := w.addPod("p")
		expect.Equal(t, n.vlansOf(w.port(p)), tt.want, "%s: the port is in the VLANs", tt.name)
		expect.Success(t, w.check(p), "%s", tt.name)
		w.del(p)
	}
	// A pod with a trunk has pods of VLANs behind its links there.
	router, a, b := n.pod("router"), n.pod("a"), n.pod("b")
	n.network("trunk", conf{"mode": "l2", "ipam": nil, "macspoofchk": true, "vlanTrunk": []conf{{"minID": 10, "maxID": 20}}}).add(router)
	n.network("ten", conf{"mode": "l2", "vlan": 10, "ipam": hostLocal("10.10.0.0/24")}).add(a)
	n.network("thirty", conf{"mode": "l2", "vlan": 30, "ipam": hostLocal("10.30.0.0/24")}).add(b)
	for id, reached := range map[int]bool{10: true, 30: false} {
		link := fmt.Sprintf("eth0.%d", id)
		nstest.Run(t, router.NS, "ip", "link", "add", "link", "eth0", "name", link, "type", "vlan", "id", fmt.Sprint(id))
		nstest.Run(t, router.NS, "ip", "address", "add", fmt.Sprintf("10.%d.0.99/24", id), "dev", link)
		nstest.Run(t, router.NS, "ip", "link", "set", link, "up")
		if reached {
			wantPing(t, router.NS, fmt.Sprintf("10.%d.0.2", id))
		} else {
			wantNoPing(t, router.NS, fmt.Sprintf("10.%d.0.2", id))
		}
	}
}

func TestVLANsAreCheckedAndRepaired(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	n := newNode(t)
	out := n.outside()
	w := n.portnet(conf{"vlan": 100, "vlanTrunk": []conf{{"id": 7}}})
	p := w.addPod("a", publish(t, "8080:80/tcp"))
	p.serve(t, "tcp", 80)
	port := w.port(p)
	works := func(when string) {
		t.Helper()
		expect.Success(t, n.operate("check", "--state", n.state).err(), "%s: check", when)
		expect.Success(t, w.check(p), "%s", when)
		wantPing(t, p.NS, gateway4, outside4, outside6)
		for _, at := range []struct {
			from *netns.NS
			to   string
		}{{out, uplink4}, {n.ns, "127.0.0.1"}} {
			expect.Success(t, expect.Err(askPort(t, at.from, "tcp", at.to, 8080)), "%s: %s", when, at.to)
		}
	}
	works("at first")
	for _, tt := range []struct{ name, command, says string }{
		{"VLAN of the port", "bridge vlan del vid 100 dev " + port, "VLANs"},
		{"VLAN of the trunk", "bridge vlan del vid 7 dev " + port, "VLANs"},
		{"another VLAN", "bridge vlan add vid 5 dev " + port, "VLANs"},
		{"another native VLAN", "bridge vlan add vid 5 pvid untagged dev " + port, "VLANs"},
		{"the bridge's VLAN", "bridge vlan del vid 100 dev cbr0 self", "membership in VLAN"},
		{"filtering", "ip link set cbr0 type bridge vlan_filtering 0", "vlan_filtering"},
		{"link down", "ip link set cbr0.100 down", "up"},
		{"link deleted", "ip link del cbr0.100", "cbr0.100"},
		{"gateway deleted", "ip address del 10.77.0.1/24 dev cbr0.100", "gateway 10.77.0.1/24 is missing"},
		{"port off the bridge", "ip link set " + port + " nomaster", "membership in bridge"},
		{"bridge deleted", "ip link del cbr0", "cbr0"},
	} {
		args := strings.Fields(tt.command)
		n.run(args[0], args[1:]...)
		wantError(t, w.check(p), 113, tt.says)
		o := n.operate("check", "--state", n.state)
		expect.That(t, o.status != 0 && strings.Contains(o.stdout, tt.says), "%s: check: %+v, want %q", tt.name, o, tt.says)
		expect.Success(t, n.operate("repair", "--state", n.state).err(), "%s: repair", tt.name)
		works(tt.name)
	}
	// An ADD mends as much for itself.
	n.ip("link del cbr0.100")
	b := w.addPod("b")
	wantPing(t, b.NS, gateway4, outside4)
	works("after another pod's ADD")
	// What runs off with its namespace is taken down without it.
	w.gc()
	n.wantNothing()
}

func TestVLANThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	n := newNode(t)
	w := n.podnet(conf{"vlan": 100})
	w.addPod("a")
	wantError(t, expect.Err(w.with(conf{"vlan": 200}).tryAdd(n.pod("b"))), 112, "on bridge cbr0.100")
	wantError(t, expect.Err(n.network("twice", conf{"vlan": 200}).tryAdd(n.pod("c"))), 112, "overlaps")
	n.ip("link add br9 type bridge")
	_, err := n.network("theirs", conf{"vlan": 200, "bridge": "br9", "ipam": hostLocal("10.99.0.0/24")}).tryAdd(n.pod("d"))
	wantError(t, err, 116, "vlan_filtering 1")
	n.ip("link set br9 type bridge vlan_filtering 1")
	n.network("theirs", conf{"vlan": 200, "bridge": "br9", "ipam": hostLocal("10.99.0.0/24")}).add(n.pod("d"))
	n.ip("link add link cbr0 name cbr0.300 type vlan id 301")
	_, err = n.network("taken", conf{"vlan": 300, "ipam": hostLocal("10.98.0.0/24")}).tryAdd(n.pod("e"))
	wantError(t, err, 110, "not in VLAN 300")
	// Two VLANs may have the same addresses where the host routes to neither.
	l2 := conf{"mode": "l2", "bridge": "br1", "ipam": hostLocal("10.97.0.0/24")}
	x, y := n.network("x", l2).with(conf{"vlan": 5}), n.network("y", l2).with(conf{"vlan": 6})
	rx, ry := x.add(n.pod("x")), y.add(n.pod("y"))
	expect.That(t, ip4(rx) == ip4(ry), "%s and %s: this tests nothing", ip4(rx), ip4(ry))
}

func TestVLANOfTheReferencesBridgeIsTakenOn(t *testing.T) {
	t.Parallel()
	needVLANs(t)
	n := newNode(t)
	reference := n.network("podnet", conf{"type": "bridge", "bridge": "cbr0", "vlan": 100, "isDefaultGateway": true, "ipam": conf{"type": "host-local", "ranges": dualStack()["ranges"], "dataDir": n.state + "/ipam"}})
	delete(reference.plugin, "stateDir")
	delete(reference.plugin, "deadline")
	ours := n.podnet(conf{"vlan": 100, "bridgeNFCall": false, "ipMasq": false, "ipam": reference.plugin["ipam"]})
	a, b := n.pod("a"), n.pod("b")
	ra := reference.add(a)
	kind := links(t, n.ns)["cbr0.100"].Info.Kind
	must.That(t, kind == "veth", "the reference made a link of kind %q: this tests nothing", kind)
	rb := ours.add(b)
	wantPing(t, b.NS, gateway4, gateway6, ip4(ra).String(), ip6(ra).String())
	wantPing(t, n.ns, ip4(ra).String(), ip4(rb).String())
	expect.Success(t, ours.check(b))
	expect.Success(t, n.operate("check", "--state", n.state).err(), "check")
	reference.del(a)
	wantPing(t, b.NS, gateway4, gateway6)
	ours.del(b)
	o := n.remove("podnet")
	expect.That(t, o.status == 0 && links(t, n.ns)["cbr0.100"].Name != "", "remove: %+v; the reference's link is to stay", o)
}

// bridgeOfTheSystem makes a bridge that keeps VLANs apart, of which the NIC is a port: a NIC that is shared leaves tagged
// frames to the host.
func (n *node) bridgeOfTheSystem() {
	for _, line := range []string{
		"link add br0 type bridge vlan_filtering 1", "link set br0 up", "link set eth0 master br0",
		"address add 192.168.1.2/24 dev br0", "route add default via 192.168.1.1",
	} {
		n.ip(line)
	}
}

// newTaggedLAN has a router that is in a VLAN of the NIC's, and a server to be started in it.
func newTaggedLAN(t *testing.T) *lan {
	t.Helper()
	needVLANs(t)
	nstest.Need(t, "dnsmasq")
	n := newNode(t)
	l := &lan{node: n, router: nstest.New(t)}
	nstest.Veth(t, n.ns, "eth0", l.router, "eth0")
	n.bridgeOfTheSystem()
	for _, line := range []string{
		"link set lo up", "address add 192.168.1.1/24 dev eth0", "link add link eth0 name eth0.20 type vlan id 20", "link set eth0.20 up",
		"address add " + router4 + "/24 dev eth0.20",
	} {
		nstest.Run(t, l.router, "ip", strings.Fields(line)...)
	}
	return l
}

// The host has no link in the VLAN, by which a dead pod's lease could go back: it runs out.
func TestVLANOfTheLANHasDHCPv6(t *testing.T) {
	t.Parallel()
	l := &lan6{lan: newTaggedLAN(t)}
	for _, address := range []string{"fe80::1", router6} {
		nstest.Run(t, l.router, "ip", "address", "add", address+"/64", "dev", "eth0.20", "nodad")
	}
	l.serve(t, "--interface=eth0.20")
	l.serve6(t, "eth0.20")
	k := l.keep(t)
	w := l.leasing(conf{"vlan": 20})
	a, b := l.pod("a"), l.pod("b")
	left, found := six(t, w.add(a)), six(t, w.add(b))
	wantPing(t, a.NS, router6, found.String())
	if !l.holds(left) || !l.holds(found) || links(t, l.ns)["br0.20"].Name != "" {
		t.Errorf("links %v, and the server's leases\n%s\nthis tests nothing", links(t, l.ns), l.server.Leased())
	}
	w.del(a)
	l.eventually(t, func() bool { return !l.holds(left) })
	k.kill()
	w.kills(t, b)
	w.del(b, withoutNetNS())
	l.wantNoLeaseRecords()
}

func TestVLANOfTheLANIsLeasedInAndRepaired(t *testing.T) {
	t.Parallel()
	l := newTaggedLAN(t)
	n := l.node
	l.serve(t, "--interface=eth0.20")
	w := l.network(conf{"mode": "lan", "uplink": "eth0", "vlan": 20})
	must.Succeed(t, w.status())
	a, b := n.pod("a"), n.pod("b")
	ra, rb := w.add(a), w.add(b)
	expect.That(t, len(ra.Interfaces) == 3 && ra.Interfaces[0].Name == "br0",
		"interfaces %v, want no link of the host's in the VLAN", ra.Interfaces)
	for _, r := range []*current.Result{ra, rb} {
		expect.Contains(t, l.leased(), " "+ip4(r).String()+" ", "the server knows of no lease of %s", ip4(r))
	}
	got := nstest.Run(t, a.NS, "ip", "-4", "route", "show", "default")
	expect.That(t, strings.Contains(got, "via "+router4+" "), "the pod's default route is %q, want one via %s", got, router4)
	expect.Equal(t, n.vlansOf("eth0")+"; "+n.vlansOf("br0"), "1 pvid egress untagged, 20; 1 pvid egress untagged",
		"uplink and bridge are in the VLANs")
	works := func(when string) {
		t.Helper()
		wantPing(t, a.NS, router4, ip4(rb).String())
		wantPing(t, n.ns, "192.168.1.1")
		expect.Success(t, w.check(a), "%s", when)
		if o := n.operate("check", "--state", n.state); !strings.HasPrefix(o.stdout, "no keeper runs") || strings.Count(o.stdout, "[") != 1 {
			t.Errorf("%s: check: %+v", when, o)
		}
	}
	works("at first")
	nstest.Run(t, a.NS, "ip", "address", "add", "192.168.1.7/24", "dev", "eth0")
	wantNoPing(t, a.NS, "192.168.1.2") // the guard would do as much
	nstest.Run(t, a.NS, "ip", "address", "del", "192.168.1.7/24", "dev", "eth0")
	for _, command := range []string{"bridge vlan del vid 20 dev eth0", "bridge vlan del vid 20 dev " + w.port(a)} {
		args := strings.Fields(command)
		n.run(args[0], args[1:]...)
		wantError(t, w.check(a), 113, "")
		o := n.operate("repair", "--state", n.state)
		expect.That(t, strings.HasPrefix(o.stdout, "repaired: "), "%s: repair: %+v", command, o)
		works(command)
	}
	w.del(a)
	l.wantReleased(t, ip4(ra).String())
	// The host is not in the VLAN: a dead pod's lease runs out.
	_, ok := links(t, n.ns)["br0.20"]
	expect.That(t, !ok, "the host is in the VLAN: this tests nothing")
	w.kills(t, b)
	w.del(b, withoutNetNS())
	l.wantNoLeaseRecords()
	expect.Success(t, n.remove("lan").err(), "remove")
	left := globals(t, n.ns, "br0")
	expect.That(t, len(left) == 1, "after remove, the bridge of the system has the addresses %v", left)
	wantPing(t, n.ns, "192.168.1.1")
}
