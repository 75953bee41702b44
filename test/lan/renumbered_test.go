package lan

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// renumber gives the host other addresses on the bridge, as an administrator does.
func (l *lan) renumber(ip4, ip6 string) {
	l.Helper()
	// The kernel would take the new one along with the old one, and does not where
	// systemd has set it up.
	nstest.Sysctl(l, l.host.ns, "net/ipv4/conf/"+bridge+"/promote_secondaries", "1")
	ip(l, l.host.ns, "address add "+ip4+"/24 brd + dev "+bridge, "address add "+ip6+"/64 dev "+bridge+" nodad",
		"address del "+l.host.ip4.String()+"/24 dev "+bridge, "address del "+l.host.ip6.String()+"/64 dev "+bridge,
		"route replace default via "+routerIP4)
	l.host.ip4, l.host.ip6 = nstest.Addr(ip4), nstest.Addr(ip6)
}

// goesThroughHost says whether a pod's default route leads to the host's address.
func (l *lan) goesThroughHost(p *pod) bool {
	l.Helper()
	return strings.HasPrefix(nstest.Run(l, p.ns, "ip", "route", "show", "default"), "default via "+l.host.ip4.String()+" ")
}

// follow waits until pods go out through the host's present address, and has them call.
func (l *lan) follow(pods ...*pod) {
	l.Helper()
	for _, p := range pods {
		must.Until(l, p.id+"'s default route follows the host", func() bool { return l.goesThroughHost(p) })
		l.ask(p.place, l.internet.ip4, servicePort, p.ip4)
		l.wantVia(p.place, l.internet.ip4, l.host.ip4)
	}
}

// isCutOff fails the test if a pod gets out. For as long as it remembers the host's MAC by
// the old address, it would.
func (l *lan) isCutOff(p *pod) {
	l.Helper()
	ip(l, p.ns, "neighbour flush dev "+nic)
	seen, err := l.tryAsk(p.place, "tcp", l.internet.ip4, servicePort, aMoment)
	expect.That(l, err != nil, "%s reaches the internet, as %s: the test shows nothing", p.id, seen)
}

// The kernel takes others of a subnet along with the address that was there first, unless promote_secondaries is on.
func TestTheHostsOtherAddressesStayWhereItsLeaseMoves(t *testing.T) {
	t.Parallel()
	n, d, k := takenWithLease(t)
	for _, link := range []string{"all", bridge} {
		nstest.Sysctl(t, n.host.ns, "net/ipv4/conf/"+link+"/promote_secondaries", "0")
	}
	const administrators = "192.168.50.99/24"
	ip(t, n.host.ns, "address add "+administrators+" dev "+bridge)
	k.kill()
	d.Stop()
	d.start("--dhcp-host=" + macOf(t, n.host, nic) + ",192.168.50.66")
	n.makeDue(lease.HostHash(nic))
	n.keeper()
	has := func() string { return n.hostRun("ip", "-4", "-o", "address", "show", "dev", bridge) }
	must.Until(t, "the host has another address", func() bool {
		return strings.Contains(has(), " 192.168.50.66/24 ") && !strings.Contains(has(), " "+n.host.ip4.String()+"/24 ")
	})
	if list := has(); !strings.Contains(list, " "+administrators+" ") {
		t.Errorf("the host's lease has moved, and %s, which an administrator gave it, is gone:\n%s", administrators, list)
	}
}

// The router gives the host another address, as it does after its own was reset, while a
// pod runs that nobody adds anew.
func TestPodsFollowTheHostsLeaseToAnotherAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	d := l.dnsmasq()
	l.plug(l.host.ns)
	l.udhcpc().cmd.Process.Kill() // on a port it would receive nothing
	for _, p := range []place{l.other, l.internet} {
		l.serve(p, servicePort, 4)
	}
	mac := macOf(t, l.host, nic)
	n := l.network(kept(nil))
	k := n.keeper()
	a, b := n.add(l.newPod("a")), n.add(l.newPod("b"))
	must.Until(l, "the keeper has the host's lease", n.hostIsKept)
	l.follow(a, b)

	k.kill()
	d.Stop()
	old, next := l.host.ip4, nstest.Addr("192.168.50.66")
	d.start("--dhcp-host=" + mac + "," + next.String())
	n.makeDue(lease.HostHash(nic))
	n.keeper()
	must.Until(l, "the host has another address", func() bool {
		out := l.hostRun("ip", "-4", "-o", "address", "show", "dev", bridge)
		return strings.Contains(out, " "+next.String()+"/24 ") && !strings.Contains(out, " "+old.String()+"/24 ")
	})
	l.host.ip4 = next
	l.follow(a, b)
	must.Until(l, "all is well", func() bool {
		out, fine := n.uplinkStatus()
		return fine && strings.Contains(out, nic+" on "+bridge+": taken")
	})
	n.check(a)
	n.check(b)
	n.wantStatus("")

	// A renewal of the pod's own lease does not bring the old way back.
	hash := n.leaseOf(a).Hash
	must.Until(l, "the lease's record says so", func() bool { return n.gatewayOf(hash) == next })
	n.del(b)
	n.check(a)
}

// gatewayOf is where a pod's default route leads, by the record of its lease.
func (n *network) gatewayOf(hash string) netip.Addr {
	n.Helper()
	dir := must.Of(lease.Open(n.leases)).Get(n)
	r := must.Of(dir.Load(hash)).Get(n)
	return r.Policy.Gateway
}

// Neither has anything to do with a lease: the pods' addresses are written down, and the
// host's were set by hand.
func TestPodsFollowTheAddressThatAnAdministratorSets(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		ipam func(dir string) object
	}{
		{"pods that lease", func(string) object { return object{"type": "dhcp", "timeout": "2m"} }},
		{"pods with addresses of their own", func(dir string) object {
			return object{"type": "host-local", "dataDir": dir, "ranges": []any{[]any{
				object{"subnet": subnet4, "rangeStart": "192.168.50.200", "rangeEnd": "192.168.50.210"},
			}}}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			l, _ := newLab(t)
			n := l.network(nil)
			n.conf["ipam"] = tt.ipam(filepath.Join(t.TempDir(), "data"))
			k := n.keeper()
			a := n.add(l.newPod("a", published()...))
			l.serve(a.place, servicePort, 4)
			l.follow(a)

			// Without a keeper the pod stays cut off: it is the keeper that helps.
			k.kill()
			l.renumber("192.168.50.77", "fd50::77")
			l.isCutOff(a)
			k = n.keeper()
			l.follow(a)

			// And at once, where one runs.
			l.renumber("192.168.50.78", "fd50::78")
			l.follow(a)
			l.publishedPortIsReached(4, a.place, l.other)
			// The pod's route is there before its record, and the record is what CHECK goes by.
			must.Until(l, "CHECK passes", func() bool { _, err := n.verb("CHECK", a); return err == nil })
			must.Until(l, "the record follows", func() bool {
				return strings.Contains(nstest.ReadIf(t, filepath.Join(n.state, "uplinks", nic+".json")), "192.168.50.78/24")
			})

			// What a network manager undoes now is mended to what there was last.
			ip(t, l.host.ns, "link delete "+bridge)
			must.Until(l, "the keeper mends it", func() bool {
				out, fine := n.uplinkStatus()
				return strings.Contains(nstest.ReadIf(t, k.log), "uplink mended") && fine && strings.Contains(out, nic+" on "+bridge+": taken")
			})
			if out := l.hostRun("ip", "-4", "-o", "address"); strings.Contains(out, hostIP4+"/24") || strings.Contains(out, "192.168.50.77/24") || !strings.Contains(out, "192.168.50.78/24") {
				t.Errorf("the host's addresses after the mend:\n%s", out)
			}
			must.Until(l, "the pod has its port back", func() bool {
				return strings.Contains(l.hostRun("ip", "-o", "link", "show", "master", bridge), "veth")
			})
			l.follow(a)
			n.del(a)
			n.operate("uplink restore", nic, bridge)
			if out := l.hostRun("ip", "-4", "-o", "address", "show", "dev", nic); !strings.Contains(out, "192.168.50.78/24") || strings.Contains(out, hostIP4+"/24") {
				t.Errorf("what the NIC has got back:\n%s", out)
			}
			expect.Failure(t, expect.Err(os.Stat(filepath.Join(n.state, "uplinks", nic+".json"))),
				"the record is there still")
		})
	}
}
