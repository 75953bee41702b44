package lan

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// servicePort is what servers on the LAN listen at; hostPort is published for one.
const servicePort, hostPort = 80, 8080

// newLab is a host on a LAN whose router leases and advertises, and servers on it and
// beyond.
func newLab(t testing.TB) (*lan, *dhcp) {
	t.Helper()
	l := newHost(t)
	d := l.dnsmasq()
	for _, p := range []place{l.other, l.internet} {
		l.serve(p, servicePort, both()...)
	}
	l.serve(l.host, servicePort+1, both()...)
	return l, d
}

func TestPodsOnTheLANFromTheFirstToTheLast(t *testing.T) {
	l, d := newLab(t)
	n := l.network(byHost())
	before := l.moved(nic)
	m := l.usualFlows(both()...)

	a := l.newPod("a", published()...)
	wantWithin(t, "the first ADD", limit{}, m.during(func() { n.add(a) }))
	b := n.add(l.newPod("b"))
	for _, p := range []*pod{a, b} {
		wantWithinSubnets(t, p.place, subnet4, subnet6)
		if !strings.Contains(d.Leased(), p.ip4.String()) {
			t.Errorf("the router knows of no lease of %s:\n%s", p.ip4, d.Leased())
		}
		l.serve(p.place, servicePort, both()...)
		n.check(p)
	}
	// Another network of the NIC's comes and goes.
	guests, c := n.another(object{"name": "guests", "publishFrom": l.other.ip4.String() + ", ::/0"}), l.newPod("c", "8090:80/tcp")
	guests.add(c)
	l.serve(c.place, servicePort, both()...)
	for _, from := range []place{l.other, l.internet, b.place, l.host} {
		for _, family := range both() {
			_, err := l.tryAsk(from, "tcp", l.host.at(family), 8090, aMinute)
			want := family == 6 || from.name == l.other.name || from.name == l.host.name
			expect.That(t, (err == nil) == want, "the port of guests from %s: %v, want an answer: %t", from.name, err, want)
		}
	}
	wantWithin(t, "removal of another network", limit{}, m.during(func() { guests.del(c); n.operate("remove", "guests") }))
	must.That(t, n.isShared(), "the share went with another network")

	for _, family := range both() {
		l.everybodyTalks(family, a.place, b.place)
		l.publishedPortIsReached(family, a.place, b.place)
	}
	all := l.measure(both(), between{a.place, l.other}, between{a.place, l.internet}, between{a.place, l.host}, between{a.place, b.place})
	wantWithin(t, "pods talk", limit{}, all.during(func() { all.pass(all.position()) }))
	for _, p := range []*pod{a, b} {
		l.wantVia(p.place, l.internet.ip4, nstest.Addr(hop4))
		n.check(p)
	}
	all.end()

	if _, err := n.exec("tombolo", nil, nil, "uplink", "take", "--state", n.state, nic, "br1"); err == nil || !strings.Contains(err.Error(), "is shared with bridge") {
		t.Errorf("take with pods there: %v, want a refusal", err)
	}
	wantWithin(t, "DEL", limit{}, m.during(func() { n.del(a); n.del(b) }))
	d.forgets(a.ip4.String())
	d.forgets(b.ip4.String())
	wantWithin(t, "remove", limit{}, m.during(func() { n.operate("remove", "home") }))
	l.wantNoLink(bridge)
	// Nothing needs the network any more, and repair makes no bridge for it.
	for command, want := range map[string]string{"check": "0 attachments: nothing differs\n", "repair": "nothing to repair\n"} {
		expect.Of(n.exec("tombolo", nil, nil, command, "--state", n.state)).Is(t, want, "%s after the restore", command)
	}
	l.wantNoLink(bridge)
	// It forwards now, and has anycast addresses for that.
	wantSame(t, "the host after the restore", before, l.moved(nic))
}

// published is a pod's servicePort as the host's hostPort.
func published() []string {
	return []string{fmt.Sprintf("%d:%d/tcp", hostPort, servicePort), fmt.Sprintf("%d:%d/udp", hostPort, servicePort)}
}

// everybodyTalks has two pods talk to everybody, and everybody to them, by their own
// addresses.
func (l *lan) everybodyTalks(family int, a, b place) {
	l.Helper()
	own := a.at(family)
	for _, to := range []place{l.other, l.internet, b} {
		l.ask(a, to.at(family), servicePort, own)
		l.ask(to, own, servicePort, to.at(family))
	}
	l.ask(a, l.host.at(family), servicePort+1, own)
	l.ask(l.host, own, servicePort)
	expect.Success(l, nstest.Ping(l, a.ns, l.router.at(family)), "%s to the router", a.name)
}

// publishedPortIsReached has everybody call a pod by the host's address.
func (l *lan) publishedPortIsReached(family int, a, b place) {
	l.Helper()
	for _, from := range []place{l.other, l.internet, l.host, b, a} {
		l.ask(from, l.host.at(family), hostPort)
	}
}

// Several first pods at once, as after a boot: the NIC is taken over once.
func TestFirstADDsAtOnceTakeTheNICOverOnce(t *testing.T) {
	l, _ := newLab(t)
	n := l.network(nil)
	m := l.usualFlows(both()...)
	pods := make([]*pod, 4)
	for i := range pods {
		pods[i] = l.newPod(fmt.Sprintf("pod-%d", i))
	}
	program(t, "tombolo-cni")
	wantWithin(t, "four ADDs at once", limit{}, m.during(func() {
		outputs, failed := make([]string, len(pods)), make([]error, len(pods))
		var all sync.WaitGroup
		for i, p := range pods {
			all.Go(func() { outputs[i], failed[i] = n.verb("ADD", p) })
		}
		all.Wait()
		must.Succeed(t, errors.Join(failed...))
		for i, p := range pods {
			p.learn(t, outputs[i])
		}
	}))
	for _, p := range pods {
		l.ask(p.place, l.internet.ip4, servicePort, p.ip4)
	}
}

// What comes back to a pod is bridged past the host. Unless the host's conntrack sees
// it, it has seen half of each connection, and kube-proxy's and ufw's rule kills it.
func TestAnswersPassTheHostsConntrack(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		fields object
		sysctl string
		works  bool
	}{
		{"by default, sysctl 0", nil, "0", true},
		{"by default, sysctl 1", nil, "1", true},
		{"by the router, sysctl 0", object{"defaultRoute": "router"}, "0", true},
		{"by the router, sysctl 1", object{"defaultRoute": "router"}, "1", true},
		{"bridgeNFCall false, sysctl 0", object{"bridgeNFCall": false}, "0", false},
		{"bridgeNFCall false, sysctl 1", object{"bridgeNFCall": false}, "1", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			l.callIPTables(tt.sysctl)
			l.dropInvalid()
			n := l.network(byHost())
			maps.Copy(n.conf, tt.fields)
			a, b := l.newPod("a", published()...), l.newPod("b")
			for _, p := range []*pod{a, b} {
				n.add(p)
				l.serve(p.place, servicePort, both()...)
			}
			for _, family := range both() {
				if !tt.works {
					l.wantNoAnswer(a.place, l.internet.at(family), servicePort)
					continue
				}
				l.everybodyTalks(family, a.place, b.place)
				l.publishedPortIsReached(family, a.place, b.place)
			}
		})
	}
}

// callIPTables sets for the whole host whether bridged packets pass the firewall.
func (l *lan) callIPTables(value string) {
	l.Helper()
	for _, name := range []string{"iptables", "ip6tables"} {
		nstest.Sysctl(l, l.host.ns, "net/bridge/bridge-nf-call-"+name, value)
	}
}

// dropInvalid has the host do what kube-proxy and ufw do.
func (l *lan) dropInvalid() {
	l.Helper()
	l.nft(`table inet kube { chain forward { type filter hook forward priority filter; ct state invalid drop; }; }`)
}

func (l *lan) nft(text string) { l.Helper(); l.hostRun("nft", text) }

func TestForwardPolicyOfDropStopsNoPod(t *testing.T) {
	t.Parallel()
	for _, sysctl := range []string{"0", "1"} {
		t.Run("sysctl "+sysctl, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			l.callIPTables(sysctl)
			for _, command := range []string{"iptables-nft", "ip6tables-nft"} {
				l.hostRun(command, "-P", "FORWARD", "DROP")
			}
			cut := sysctl == "1"
			vms := [2]*netns.NS{quiet(t), quiet(t)}
			for _, name := range []string{"vmbr0", "meant0"} {
				ip(t, l.host.ns, "link add "+name+" type bridge forward_delay 0", "link set "+name+" up")
				for i, vm := range vms {
					tap := fmt.Sprint(name, "-", i)
					ip(t, l.host.ns, "link add "+tap+" type veth peer name "+name+" netns "+fd(vm), "link set "+tap+" up master "+name)
				}
			}
			l.hostRun("iptables-nft", "-I", "FORWARD", "-i", "meant0", "-o", "meant0", "-j", "DROP") // as Docker does for icc=false
			for i, vm := range vms {
				ip(t, vm, "link set vmbr0 up", fmt.Sprintf("address add 10.99.0.%d/24 dev vmbr0", i+1))
			}
			reach := func() bool {
				return nstest.PingWith(t, vms[0], nstest.Addr("10.99.0.2"), nstest.Echo{Wait: aMoment}) == nil
			}
			expect.Equal(t, reach(), !cut, "one virtual machine reaches the other")
			n := l.network(byHost())
			said, err := n.exec("tombolo", nil, nil, "uplink", "plan", "--state", n.state, nic, bridge)
			expect.That(t, err == nil && strings.Contains(said, "bridge vmbr0 of another program") == cut, "the plan: %s %v", said, err)
			said, err = n.exec("tombolo", nil, nil, "uplink", "plan", "--state", n.state, nic, "vmbr0")
			expect.That(t, err == nil && !strings.Contains(said, "bridge vmbr0 of another"), "the plan of that bridge: %s %v", said, err)

			a := l.newPod("a", published()...)
			n.add(a)
			b := n.add(l.newPod("b"))
			for _, p := range []*pod{a, b} {
				l.serve(p.place, servicePort, both()...)
			}
			k := n.keeper() // else status has more to tell
			for _, command := range []string{"status", "check"} {
				_, said, found := strings.Cut(n.operate(command), "bridge vmbr0 of another program has the ports vmbr0-0, vmbr0-1")
				expect.Equal(t, found, cut, "%s names the bridge: %s", command, said)
				expect.That(t, !strings.Contains(said, "meant0"), "%s names what its owner closed: %s", command, said)
				if _, remedy, found := strings.Cut(said, "keep their own setting: "); found && command == "check" {
					l.hostRun("sh", "-ec", strings.Split(remedy, "\n")[0])
				}
			}
			expect.That(t, reach(), "after the remedy one virtual machine does not reach the other")
			expect.That(t, !strings.Contains(n.operate("check"), "vmbr0"), "check names the bridge after the remedy")
			k.kill()
			for _, family := range both() {
				l.everybodyTalks(family, a.place, b.place)
				l.publishedPortIsReached(family, a.place, b.place)
			}
			// It is our rule that lets them through, DHCP included.
			for _, command := range []string{"iptables-nft", "ip6tables-nft"} {
				l.hostRun(command, "-F", "FORWARD")
			}
			l.wantNoAnswer(a.place, l.internet.ip4, servicePort)
			l.wantNoAnswer(a.place, l.other.ip6, servicePort)
			c := n.add(l.newPod("c"))
			for _, family := range both() {
				l.ask(a.place, l.internet.at(family), servicePort, a.at(family))
				l.ask(c.place, l.other.at(family), servicePort, c.at(family))
			}
		})
	}
}

// A cluster address, as kube-proxy makes one: it is nobody's, and the host translates
// it to one of its backends. A pod that is its own backend is masqueraded.
const clusterIP4, clusterIP6 = "10.96.0.1", "fd96::1"

func TestClusterAddressLeadsToBackendsEverywhere(t *testing.T) {
	t.Parallel()
	for _, sysctl := range []string{"0", "1"} {
		t.Run("sysctl "+sysctl, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			l.callIPTables(sysctl)
			l.dropInvalid()
			n := l.network(byHost())
			a, b := n.add(l.newPod("a")), n.add(l.newPod("b"))
			for _, p := range []*pod{a, b} {
				l.serve(p.place, servicePort, both()...)
			}
			for _, backend := range []place{b.place, l.other, l.internet, a.place} {
				l.nft(fmt.Sprintf(`table inet cluster { chain prerouting { type nat hook prerouting priority dstnat;
					meta l4proto { tcp, udp } th dport 443 ip daddr %s dnat ip to %s:%d;
					meta l4proto { tcp, udp } th dport 443 ip6 daddr %s dnat ip6 to [%s]:%d; };
					chain postrouting { type nat hook postrouting priority srcnat;
					ct status dnat ip saddr %s ip daddr %s masquerade; ct status dnat ip6 saddr %s ip6 daddr %s masquerade; }; }`,
					clusterIP4, backend.ip4, servicePort, clusterIP6, backend.ip6, servicePort, a.ip4, a.ip4, a.ip6, a.ip6))
				for family, cluster := range map[int]string{4: clusterIP4, 6: clusterIP6} {
					var seenAs []netip.Addr // policies on another node go by the pod's own address
					if backend.name != a.name {
						seenAs = []netip.Addr{a.at(family)}
					}
					l.ask(a.place, nstest.Addr(cluster), 443, seenAs...)
				}
				if t.Failed() {
					t.Logf("the backend is %s", backend.name)
				}
				l.nft("delete table inet cluster")
			}
		})
	}
}

func TestPodsOfTheLANGetTheirAddressBackAndLeaveNothing(t *testing.T) {
	t.Parallel()
	l, d := newLab(t)
	n := l.network(nil)
	var addresses []netip.Addr
	for range 3 {
		p := n.add(l.newPod("a"))
		addresses = append(addresses, p.ip4)
		l.ask(p.place, l.internet.ip4, servicePort, p.ip4)
		n.del(p)
		d.forgets(p.ip4.String())
	}
	for _, address := range addresses {
		expect.That(t, nstest.Prefix(subnet4).Contains(address), "address %s is not of the LAN", address)
	}
	n.operate("remove", "home")
	l.wantNoLink(bridge)
}
