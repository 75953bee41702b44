package cni

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func TestPodsReachEachOtherTheGatewayAndTheOutside(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	rb := w.add(b)
	wantPing(t, a.NS, ip4(rb).String(), ip6(rb).String(), gateway4, gateway6, outside4, outside6)
	// The node reaches pods, and a pod itself.
	wantPing(t, n.ns, ip4(rb).String(), ip6(rb).String())
	wantPing(t, b.NS, ip4(rb).String(), ip6(rb).String(), "127.0.0.1", "::1")
}

func TestTheOutsideSeesTheNodeWhereMasqueraded(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	w := n.podnet(nil)
	a, b := n.pod("a"), n.pod("b")
	ra, rb := w.add(a), w.add(b)
	for _, tt := range []struct{ at, want string }{{outside4, uplink4}, {outside6, uplink6}} {
		expect.Equal(t, seenAs(t, a.NS, out, tt.at), tt.want, "the outside at %s sees", tt.at)
	}
	// Among pods, nothing is translated.
	for _, tt := range []struct{ at, want string }{{ip4(rb).String(), ip4(ra).String()}, {ip6(rb).String(), ip6(ra).String()}} {
		expect.Equal(t, seenAs(t, a.NS, b.NS, tt.at), tt.want, "the pod at %s sees", tt.at)
	}
}

func TestTheOutsideSeesThePodWithoutMasquerade(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	routeBack(t, out)
	p := n.pod("a")
	r := n.podnet(conf{"ipMasq": false}).add(p)
	for at, want := range map[string]string{outside4: ip4(r).String(), outside6: ip6(r).String()} {
		expect.Equal(t, seenAs(t, p.NS, out, at), want, "the outside at %s sees", at)
	}
	wantPing(t, out, ip4(r).String(), ip6(r).String())
}

func TestMasqueradeOfOneNetworkLeavesAnotherAlone(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	nstest.Run(t, out, "ip", "route", "add", "10.78.0.0/24", "via", uplink4)
	masked, plain := n.pod("masked"), n.pod("plain")
	n.podnet(nil).add(masked)
	r := n.network("plainnet", conf{"bridge": "cbr1", "ipMasq": false, "ipam": hostLocal("10.78.0.0/24")}).add(plain)
	got := seenAs(t, masked.NS, out, outside4)
	expect.That(t, got == uplink4, "the outside sees %s, want the node's %s", got, uplink4)
	got = seenAs(t, plain.NS, out, outside4)
	expect.That(t, got == ip4(r).String(), "the outside sees %s, want the pod's %s", got, ip4(r))
}

func TestSecondInterfaceOnAnotherNetwork(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	first := n.podnet(nil)
	second := n.network("backnet", conf{"mode": "l2", "bridge": "br1", "ipam": hostLocal("10.88.0.0/24")})
	a, b := n.pod("a"), n.pod("b")
	first.add(a)
	second.add(a, as("net1"))
	rb := second.add(b)
	wantPing(t, a.NS, outside4, outside6, ip4(rb).String())
	got := globals(t, a.NS, "net1")
	expect.That(t, len(got) == 1, "net1 has the addresses %v, want one", got)
	// Either goes by itself.
	second.del(a, as("net1"))
	_, ok := links(t, a.NS)["net1"]
	expect.That(t, !ok, "net1 is there after its DEL")
	wantPing(t, a.NS, outside4, outside6)
	first.del(a)
	second.del(b)
	n.wantNothing()
}

func TestLayer2WithoutIPAM(t *testing.T) {
	n := parallelNode(t)
	w := n.network("wire", conf{"mode": "l2", "ipam": nil})
	a, b := n.pod("a"), n.pod("b")
	ra := w.add(a)
	w.add(b)
	expect.That(t, len(ra.IPs) == 0 && len(ra.Interfaces) == 3 && ra.Interfaces[0].Name == "br0",
		"result %v, want three interfaces, the first of them br0, and no addresses", ra)
	got := globals(t, n.ns, "br0")
	expect.That(t, len(got) == 0, "the bridge has %v, want no address", got)
	for address, p := range map[string]*pod{"10.1.1.1/24": a, "10.1.1.2/24": b} {
		nstest.Run(t, p.NS, "ip", "address", "add", address, "dev", "eth0")
	}
	wantPing(t, a.NS, "10.1.1.2")
	for _, p := range []*pod{a, b} {
		expect.Success(t, w.check(p))
		w.del(p)
	}
	n.wantNothing()
}

func TestLayer2WithIPAM(t *testing.T) {
	n := parallelNode(t)
	w := n.network("wire", conf{"mode": "l2"})
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	rb := w.add(b)
	wantPing(t, a.NS, ip4(rb).String(), ip6(rb).String())
	got := globals(t, n.ns, "br0")
	expect.That(t, len(got) == 0, "the bridge has %v, want no address", got)
	for _, family := range []string{"-4", "-6"} {
		got := routes(t, a.NS, family, "default")
		expect.That(t, len(got) == 0, "the pod has %v, want no default route", got)
	}
	expect.Equal(t, nstest.Sysctl(t, n.ns, "net/ipv4/ip_forward"), "0",
		"the node forwards, for a network without a gateway")
}

func TestPortFlags(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name              string
		fields            conf
		hairpin, isolated bool
	}{
		{"gateway mode has hairpin", nil, true, false},
		{"hairpin may be switched off", conf{"hairpinMode": false}, false, false},
		{"l2 mode has none", conf{"mode": "l2"}, false, false},
		{"l2 mode with hairpin", conf{"mode": "l2", "hairpinMode": true}, true, false},
		{"isolation", conf{"portIsolation": true}, true, true},
	} {
		nstest.RunParallel(t, tt.name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(tt.fields)
			p := w.addPod("a")
			port := links(t, n.ns)[w.port(p)].Info.Port
			expect.Equal(t, port.Hairpin, tt.hairpin, "hairpin")
			expect.Equal(t, port.Isolated, tt.isolated, "isolated")
		})
	}
}

func TestHairpinGivesAPodItsOwnFrames(t *testing.T) {
	t.Parallel()
	for name, hairpin := range map[string]bool{"on": true, "off": false} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(conf{"hairpinMode": hairpin})
			a, b := n.pod("a"), n.pod("b")
			ra := w.add(a)
			rb := w.add(b)
			// Until something got there and back, a frame may be lost on the way.
			wantPing(t, a.NS, gateway4)
			seen := capture(t, a.NS, "eth0")
			mac := must.Of(net.ParseMAC(ra.Interfaces[2].Mac)).Get(t)
			seen.send(mac, "a frame to everybody")
			// An answer from the other pod comes after it.
			wantPing(t, a.NS, ip4(rb).String())
			got := false
			for _, f := range seen.until(func(f frame) bool { return f.from == rb.Interfaces[2].Mac && f.protocol == 0x0800 }) {
				got = got || f.protocol == testProtocol && f.incoming
			}
			expect.Equal(t, got, hairpin, "the pod's own frame came back")
		})
	}
}

func TestIsolatedPodsReachTheGatewayOnly(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(conf{"portIsolation": true})
	a, b := n.pod("a"), n.pod("b")
	w.add(a)
	rb := w.add(b)
	wantPing(t, a.NS, gateway4, gateway6, outside4, outside6)
	wantNoPing(t, a.NS, ip4(rb).String(), ip6(rb).String())
}

func TestDisabledContainerInterfaceStaysDown(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"disableContainerInterface": true, "ipam": nil})
	p := n.pod("a")
	r := w.add(p)
	eth0 := links(t, p.NS)["eth0"]
	if eth0.up() || len(addresses(t, p.NS, "eth0")) != 0 {
		t.Errorf("eth0 is %v with %v, want it down and without addresses", eth0.Flags, addresses(t, p.NS, "eth0"))
	}
	port := links(t, n.ns)[w.port(p)]
	expect.That(t, port.up() && port.Master == "cbr0", "the port is %+v, want it up on cbr0", port)
	expect.Equal(t, len(r.IPs), 0, "the result has addresses: %v", r.IPs)
	expect.Success(t, w.check(p))
	w.del(p)
	n.wantNothing()
}

func TestNoLinkLocalAddressesWhereTheyAreNotNeeded(t *testing.T) {
	n := parallelNode(t)
	w := n.podnet(conf{"ipam": hostLocal(subnet4)})
	p := w.addPod("a")
	for where, got := range map[string][]address{
		"the pod": addresses(t, p.NS, "eth0"), "the port": addresses(t, n.ns, w.port(p)), "the bridge": addresses(t, n.ns, "cbr0"),
	} {
		for _, a := range got {
			expect.That(t, !a.Local.Is6(), "%s has %s", where, a.Local)
		}
	}
}

func TestIPv6IsReadyAtOnce(t *testing.T) {
	n := parallelNode(t)
	p := n.pod("a")
	r := n.podnet(nil).add(p)
	var got []string
	ofPod := addresses(t, p.NS, "eth0")
	for _, a := range ofPod {
		got = append(got, a.Local.String())
	}
	// The bridge's too: the node asks for pods from its link-local address.
	for _, a := range append(ofPod, addresses(t, n.ns, "cbr0")...) {
		expect.That(t, !a.Local.Is6() || !a.Tentative && a.NoDAD,
			"%s: tentative %t, nodad %t", a.Local, a.Tentative, a.NoDAD)
	}
	want := []string{ip4(r).String(), ip6(r).String(), "fe80::858:aff:fe4d:2"}
	expect.NoDiff(t, cmp.Diff(want, got), "addresses of the pod")
	for name, want := range map[string]string{"accept_ra": "0", "disable_ipv6": "0"} {
		expect.Equal(t, nstest.Sysctl(t, p.NS, "net/ipv6/conf/eth0/"+name), want, "%s is", name)
	}
	nstest.Run(t, p.NS, "sh", "-ec", "ip link set eth0 down; ip link set eth0 up")
	if got := globals(t, p.NS, "eth0"); len(got) != 2 {
		t.Errorf("set down and up, the pod's interface has the addresses %v alone", got)
	}
}

// Some runtimes make namespaces with IPv6 switched off.
func TestPodWithIPv6HasItsLoopbackToo(t *testing.T) {
	n := parallelNode(t)
	p := n.pod("a")
	nstest.Sysctl(t, p.NS, "net/ipv6/conf/all/disable_ipv6", "1")
	nstest.Sysctl(t, p.NS, "net/ipv6/conf/default/disable_ipv6", "1")
	n.podnet(nil).add(p)
	wantPing(t, p.NS, gateway6, "::1")
}

func TestBridgeThatBeganWithoutIPv6RoutesItLater(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	routeBack(t, out)
	plain, dual := n.podnet(conf{"ipMasq": false, "ipam": hostLocal(subnet4)}), n.podnet(conf{"ipMasq": false})
	plain.add(n.pod("a"))
	b := n.pod("b")
	r := dual.add(b)
	// The node asks for the pod's MAC first: nothing else has told it.
	n.ip("-6 neigh flush dev cbr0")
	wantPing(t, out, ip4(r).String(), ip6(r).String())
}

// As the reference plugins have it. A network of two addresses has no broadcast address.
func TestIPv4AddressesHaveTheirBroadcastAddress(t *testing.T) {
	n := parallelNode(t)
	brd := func(ns *netns.NS, link string) string {
		t.Helper()
		out := nstest.Run(t, ns, "ip", "-4", "-o", "address", "show", "dev", link)
		_, after, found := strings.Cut(out, " brd ")
		if !found {
			return "none in " + out
		}
		return strings.Fields(after)[0]
	}
	w := n.podnet(nil)
	p := w.addPod("a")
	pod, gateway := brd(p.NS, "eth0"), brd(n.ns, "cbr0")
	expect.That(t, pod == "10.77.0.255" && gateway == "10.77.0.255", "the pod's broadcast address is %s, the gateway's %s", pod, gateway)
	// Those of an earlier version have none, which nobody takes for a difference.
	for link, ns := range map[string]*netns.NS{"eth0": p.NS, "cbr0": n.ns} {
		for _, a := range addresses(t, ns, link) {
			if a.Local.Is4() {
				own := netip.PrefixFrom(a.Local, a.Bits).String()
				nstest.Run(t, ns, "ip", "address", "del", own, "dev", link)
				nstest.Run(t, ns, "ip", "address", "add", own, "dev", link)
			}
		}
	}
	nstest.Run(t, p.NS, "ip", "route", "add", "default", "via", gateway4)
	expect.Success(t, w.check(p), "CHECK of a pod without one")
	w.add(n.pod("b"))
	expect.Success(t, w.check(p))
	reference := n.pod("reference")
	conf := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "theirs", "type": "bridge", "bridge": "theirs0", "isGateway": true,
		"ipam": {"type": "host-local", "dataDir": %q, "subnet": "10.76.0.0/24"}}`, t.TempDir())
	c := call{verb: "ADD", id: reference.id, netns: reference.path, ifName: "eth0", stdin: []byte(conf)}
	peers := os.Getenv("TOMBOLO_PEERS")
	must.That(t, peers != "", "TOMBOLO_PEERS is not set: make peers builds what this compares with")
	o, err := n.exec(context.Background(), filepath.Join(peers, "bridge"), c.stdin, append(c.environ(), "CNI_PATH="+peers))
	must.That(t, err == nil && o.status == 0, "the reference's ADD: %v, %s", err, o.stdout)
	if pod, gateway := brd(reference.NS, "eth0"), brd(n.ns, "theirs0"); pod != "10.76.0.255" || gateway != "10.76.0.255" {
		t.Errorf("the reference's pod has the broadcast address %s, its gateway %s: then ours need none", pod, gateway)
	}
}

// TestLayer2WithoutIPAMLeavesIPv6ToThePod has a real router on the bridge: a pod that nobody gives
// addresses forms its own, as with the reference's bridge.
func TestLayer2WithoutIPAMLeavesIPv6ToThePod(t *testing.T) {
	t.Parallel()
	reference := referenceDir(t)
	const bridge, prefix = "br0", "2001:db8:5::"
	for name, tt := range map[string]struct {
		fields conf
		off    bool // the runtime switches IPv6 off
		forms  bool
	}{
		"the reference":                   {fields: conf{"type": "bridge"}, forms: true},
		"the reference, IPv6 off":         {fields: conf{"type": "bridge"}, off: true},
		"mode l2":                         {fields: conf{"mode": "l2"}, forms: true},
		"mode l2, guarded":                {fields: conf{"mode": "l2", "guard": true}, forms: true},
		"mode l2, IPv6 off":               {fields: conf{"mode": "l2"}, off: true},
		"mode l2 with addresses of IPv4":  {fields: conf{"mode": "l2", "ipam": hostLocal(subnet4)}},
		"mode l2 with addresses of both":  {fields: conf{"mode": "l2", "ipam": dualStack()}},
		"mode gateway, which is a router": {fields: conf{"ipam": hostLocal(subnet4)}},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.network("wire", conf{"bridge": bridge, "ipam": nil})
			maps.Copy(w.plugin, tt.fields) // with would put back the ipam that tests have by default
			if w.plugin["type"] == "bridge" {
				n.searchAlso(reference)
				delete(w.plugin, "stateDir")
				delete(w.plugin, "deadline")
			}
			first := n.pod("first")
			w.add(first) // so that the bridge is there

			router := nstest.New(t)
			nstest.Veth(t, n.ns, "wall", router, "eth0")
			n.ip("link set wall master " + bridge + " up")
			nstest.Run(t, router, "sh", "-ec", "ip address add 192.0.2.1/24 dev eth0; ip address add "+prefix+"1/64 dev eth0 nodad; ip address add fe80::1/64 dev eth0 nodad; ip link set eth0 up")
			nstest.WaitForAddresses(t, router)
			advertise := func() {
				nstest.NewDnsmasq(t, router, "eth0", "--dhcp-range=192.0.2.100,192.0.2.200,1h", "--enable-ra", "--dhcp-range="+prefix+",ra-only,64,1h", "--ra-param=eth0,4,600")
			}

			p := n.pod("a")
			nstest.Sysctl(t, p.NS, "net/ipv6/conf/default/router_solicitation_delay", "0")
			nstest.Sysctl(t, p.NS, "net/ipv6/conf/default/dad_transmits", "0")
			if tt.off {
				nstest.Sysctl(t, p.NS, "net/ipv6/conf/default/disable_ipv6", "1")
			}
			if tt.forms {
				advertise()
				w.add(p)
				formed := func() bool {
					return slices.ContainsFunc(globals(t, p.NS, "eth0"), func(a string) bool { return strings.HasPrefix(a, "2001:db8:5:") })
				}
				for end := time.Now().Add(patience); !formed(); time.Sleep(10 * time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("the pod formed no address: %s", nstest.Run(t, p.NS, "ip", "address"))
					}
				}
				wantPing(t, p.NS, prefix+"1")
				got := routes(t, p.NS, "-6", "default")
				expect.That(t, len(got) == 1, "default routes %v, want the router's", got)
				err := w.check(p) // the reference's wants an IPAM
				expect.That(t, err == nil || w.plugin["type"] == "bridge", "%v", err)
				w.del(p)
				return
			}
			// What the router says to all comes by, and the pod does nothing with it.
			result := w.add(p)
			heard := capture(t, n.ns, "br0")
			if w.plugin["type"] != "bridge" {
				heard = capture(t, n.ns, w.port(p))
			}
			advertise()
			heard.until(func(f frame) bool { return f.icmp6 == 134 && f.to == "33:33:00:00:00:01" })
			if !tt.off {
				wantPing(t, first.NS, ip4(result).String()) // whose answer comes after all of it has been dealt with
			}
			if got := nstest.Run(t, p.NS, "ip", "-6", "address", "show", "dev", "eth0"); strings.Contains(got, "2001:db8:5:") || tt.off && got != "" {
				t.Errorf("the pod formed an address:\n%s", got)
			}
			w.del(p)
		})
	}
}
