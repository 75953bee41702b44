package lan

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// The next hop of default routes by the host.
const hop4, hop6 = "169.254.1.1", "fe80::746f:6d62:6f6c:6f"

// forwards lists the parameters by which the host forwards, and those by which it sends redirects.
func (l *lan) forwards() string {
	l.Helper()
	return l.hostRun("bash", "-c", "cd /proc/sys/net; grep -H . ipv4/ip_forward ipv4/conf/{all,default,lo,"+nic+"}/{forwarding,send_redirects} "+
		"ipv6/conf/{all,default,lo,"+nic+"}/*forwarding bridge/*")
}

// By default a pod is a machine of the LAN, and the host has no part in what it sends, unless the pod publishes ports.
func TestDefaultRouteToTheRouter(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	n := l.network(dualStack(nil))
	before := l.forwards()
	b := n.add(l.newPod("b"))
	l.wantVia(b.place, l.internet.ip4, l.router.ip4)
	for _, family := range both() {
		l.ask(b.place, l.internet.at(family), servicePort, b.at(family))
	}
	expect.Equal(t, l.forwards(), before, "parameters of the host after a pod without ports")
	expect.Contains(t, l.hostRun("ip", "-details", "link", "show", bridge), "nf_call_iptables 0 nf_call_ip6tables 0", "br_netfilter")
	a := l.newPod("a", published()...)
	n.add(a)
	for _, p := range []*pod{a, b} {
		l.serve(p.place, servicePort, both()...)
		l.wantVia(p.place, l.internet.ip4, l.router.ip4)
	}
	for _, family := range both() {
		l.everybodyTalks(family, a.place, b.place)
		l.publishedPortIsReached(family, a.place, b.place)
	}
	n.check(a)
}

// goesByHost fails the test unless the pod reaches the internet by the host, which forwards its packets.
func (l *lan) goesByHost(p *pod) {
	l.Helper()
	l.wantVia(p.place, l.internet.ip4, nstest.Addr(hop4))
	l.wantVia(p.place, l.internet.ip6, nstest.Addr(hop6))
	l.nft("table inet passing { chain forward { type filter hook forward priority -200; ip ttl 63 counter; ip6 hoplimit 63 counter; }; }")
	defer l.nft("delete table inet passing")
	for _, family := range both() {
		l.ask(p.place, l.internet.at(family), servicePort, p.at(family))
	}
	rules := l.hostRun("nft", "list", "table", "inet", "passing")
	expect.That(l, !strings.Contains(rules, "packets 0 "), "what the pod sends does not pass the host:\n%s", rules)
}

// byHost is what a network has whose pods' default routes lead to the host.
func byHost() object { return dualStack(object{"defaultRoute": "host"}) }

// The pods' connections go on while the host's address changes, and without any.
func TestPodsGoByAHostWhoseAddressesChange(t *testing.T) {
	t.Parallel()
	for name, bridged := range map[string]bool{"by its bridge": true, "by its NIC": false} {
		for name, own := range map[string]bool{name + ", pods that lease": false, name + ", pods with addresses of their own": true} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				l, _ := newLab(t)
				n := l.network(byHost())
				if bridged {
					ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
					l.moveToBridge()
				}
				if own {
					n.conf["ipam"] = ownAddresses(t)
				}
				n.goesOnWithoutTheHostsAddresses(n.add(l.newPod("a")), bridged)
			})
		}
	}
}

// ownAddresses is the ipam of pods that lease none.
func ownAddresses(t testing.TB) object {
	pool := object{"subnet": subnet4, "rangeStart": "192.168.50.200", "rangeEnd": "192.168.50.210"}
	return object{"type": "host-local", "dataDir": filepath.Join(t.TempDir(), "data"), "ranges": []any{[]any{pool}}}
}

// goesOnWithoutTheHostsAddresses changes the host's addresses under a pod's traffic, and then deletes them. Of a bridge
// of ours, CHECK would miss the addresses.
func (n *network) goesOnWithoutTheHostsAddresses(a *pod, check bool) {
	n.Helper()
	n.goesByHost(a)
	at := strings.Fields(n.hostRun("ip", "-4", "-o", "address", "show", "to", hostIP4))[1]
	m := n.measure(both(), between{a.place, n.internet})
	byRouter := "route replace default via " + routerIP4 + " dev " + at + " onlink"
	// Without its first address the kernel has no route to the subnet for a moment.
	nstest.Sysctl(n, n.host.ns, "net/ipv4/conf/"+at+"/promote_secondaries", "1")
	wantWithin(n, "another address", limit{lost: 1, retransmitted: 1}, m.during(func() {
		ip(n, n.host.ns, "address add 192.168.50.77/24 brd + dev "+at, "address add fd50::77/64 nodad dev "+at, byRouter,
			"address del "+hostIP4+"/24 dev "+at, "address del "+hostIP6+"/64 dev "+at, byRouter)
	}))
	n.goesByHost(a)
	ip(n, n.host.ns, "-4 address flush dev "+at, "-6 address flush dev "+at+" scope global", "-6 route flush default", byRouter,
		"route add default via "+n.linkLocal(n.router)+" dev "+at, "route add "+a.ip4.String()+" dev "+at, "route add fd50::/64 dev "+at)
	n.goesByHost(a)
	if check {
		n.check(a)
	}
	n.del(a)
}

// An unpinned bridge would take the MAC of the first pod's port here.
func TestPodsFollowTheMACOfTheSystemsBridge(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	ip(t, l.host.ns, "link set "+nic+" address fe:ff:ff:ff:ff:01", "link add "+bridge+" type bridge forward_delay 0")
	l.moveToBridge()
	before := l.forwards()
	n := l.network(byHost())
	n.conf["ipam"] = ownAddresses(t)
	mac := macOf(t, l.host, bridge)
	a, b := n.add(l.newPod("a")), n.add(l.newPod("b"))
	expect.Equal(t, macOf(t, l.host, bridge), mac, "the bridge's MAC")
	l.goesByHost(a)
	n.operate("doctor", "--dns", "none", a.id)
	for _, line := range strings.Split(before, "\n") {
		if strings.Contains(line, "send_redirects") {
			expect.Contains(t, l.forwards(), line, "redirects of the host")
		}
	}

	// The owner of b has another one answer.
	entry := func(p *pod) string { return nstest.Run(t, p.ns, "ip", "neighbour", "show", "nud", "permanent") }
	ip(t, b.ns, "neighbour replace "+hop4+" dev "+nic+" lladdr 02:00:00:00:00:77 nud permanent")
	expect.Contains(t, n.operate("check"), "neighbour "+hop4+" is 02:00:00:00:00:77, should be "+mac, "notes")
	ip(t, b.ns, "neighbour del "+hop6+" dev "+nic)
	for i, repair := range []func(){
		func() { n.operate("repair") },
		func() { n.del(n.add(l.newPod("c"))) },
		func() { n.keeper() },
	} {
		mac = fmt.Sprintf("02:00:00:00:01:%02x", i)
		ip(t, l.host.ns, "link set "+bridge+" address "+mac)
		repair()
		must.Until(t, "the pod has the MAC "+mac, func() bool { return strings.Count(entry(a), "lladdr "+mac+" ") == 2 })
		l.goesByHost(a)
		expect.That(t, !strings.Contains(entry(b), mac) && strings.Contains(entry(b), "02:00:00:00:00:77"), "the entries that b's owner has changed:\n%s", entry(b))
	}
}

// A host that forwards a packet to where it came from tells the sender of the shorter way.
func TestHostTellsNoPodToPassItBy(t *testing.T) {
	t.Parallel()
	l, _ := newLab(t)
	ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
	l.moveToBridge()
	ip(t, l.host.ns, "-6 route del default", "route add default via "+l.linkLocal(l.router)+" dev "+bridge) // else IPv6 sends none
	n := l.network(byHost())
	a, b := n.add(l.newPod("a")), n.add(l.newPod("b"))
	heard := func(p *pod) (count [2]string) {
		for i, name := range []string{"IcmpInRedirects", "Icmp6InRedirects"} {
			count[i] = strings.Fields(nstest.Run(t, p.ns, "nstat", "--ignore", "--zeros", "--noupdate", name))[2]
		}
		return count
	}
	// Connections that go on: a redirect that belongs to the first packet of one does not leave a host that tracks them.
	m := l.measure(both(), between{a.place, l.internet})
	m.pass(m.position())
	m.end()
	expect.Equal(t, heard(a), [2]string{"0", "0"}, "redirects that the pod has heard")

	// Without our rules a pod hears of the shorter way, and does not take it. It is another pod, since the host is silent
	// after nine redirects.
	l.nft("flush chain inet tombolo unmark")
	m = l.measure(both(), between{b.place, l.internet})
	must.Until(t, "redirects", func() bool { now := heard(b); return now[0] != "0" && now[1] != "0" })
	m.end()
	l.goesByHost(b)
}

// linkLocal is a place's link-local address.
func (l *lan) linkLocal(p place) string {
	l.Helper()
	out := strings.Fields(nstest.Run(l, p.ns, "ip", "-6", "-o", "address", "show", "dev", nic, "scope", "link"))
	return strings.Split(out[3], "/")[0]
}

// The host forwards what pods send and receive, and nothing of others between the LAN and its other links, until the
// network goes.
func TestHostForwardsOnALANForPodsAlone(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fields  object
		bridged bool
		ports   []string
	}{
		"by its NIC, for published ports":    {dualStack(nil), false, published()},
		"by its bridge, for published ports": {dualStack(nil), true, published()},
		"by its NIC, for default routes":     {byHost(), false, nil},
		"by its bridge, for default routes":  {byHost(), true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			vpn := place{ns: quiet(t), name: "vpn", ip4: nstest.Addr("10.66.0.2"), ip6: nstest.Addr("fd66::2")}
			ip(t, l.host.ns, "link add vpn0 type veth peer name eth0 netns "+fd(vpn.ns), "link set vpn0 up",
				"address add 10.66.0.1/24 dev vpn0", "address add fd66::1/64 dev vpn0 nodad")
			ip(t, vpn.ns, "link set eth0 up", "address add 10.66.0.2/24 dev eth0", "address add fd66::2/64 dev eth0 nodad",
				"route add default via 10.66.0.1", "route add default via fd66::1")
			for _, p := range []place{l.other, l.router} {
				ip(t, p.ns, "route replace 10.66.0.0/24 via "+hostIP4, "route replace fd66::/64 via "+hostIP6)
			}
			if c.bridged {
				ip(t, l.host.ns, "link add "+bridge+" type bridge forward_delay 0")
				l.moveToBridge()
			}
			before := l.forwards()
			n := l.network(c.fields)
			a := n.add(l.newPod("a", c.ports...))
			l.serve(a.place, servicePort, both()...)
			l.serve(vpn, servicePort, both()...)
			for _, family := range both() {
				l.wantNoAnswer(l.other, vpn.at(family), servicePort)
				l.wantNoAnswer(vpn, l.internet.at(family), servicePort)
				if c.ports == nil {
					l.ask(a.place, vpn.at(family), servicePort)
				} else {
					l.ask(vpn, l.host.at(family), hostPort)
				}
			}
			n.del(a)
			l.wantNoAnswer(l.other, vpn.ip4, servicePort)
			n.operate("remove", "home")
			expect.Equal(t, l.forwards(), before, "parameters of the host after the network")

			for _, sysctl := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
				nstest.Sysctl(t, l.host.ns, sysctl, "1")
			}
			for _, family := range both() {
				l.ask(l.other, vpn.at(family), servicePort)
			}
		})
	}
}
