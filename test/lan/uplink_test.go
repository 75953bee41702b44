package lan

import (
	"errors"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// A router that does not answer through the bridge, as behind a switch that allows one
// MAC for each port, has the takeover undone.
func TestADDUndoesATakeoverByWhichTheRouterDoesNotAnswer(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	l.meet(both(), [2]place{l.host, l.internet})
	n := l.network(object{"uplinkTimeout": "3s", "ipam": staticAddresses(t.TempDir())})
	before := l.moved(nic)
	l.nft("add table bridge drops; add chain bridge drops in { type filter hook prerouting priority 0; policy drop; }")
	_, err := n.verb("ADD", l.newPod("a"))
	if err == nil || !strings.Contains(err.Error(), `"code":11,`) || !strings.Contains(err.Error(), "no answer through the bridge") || !strings.Contains(err.Error(), " within 3s") {
		t.Errorf("ADD: %v, want code 11: no answer through the bridge within the uplinkTimeout of 3s", err)
	}
	l.nft("delete table bridge drops")
	l.wantNoLink(bridge)
	wantSame(t, "the host after the ADD", before, l.moved(nic))
	n.wantNoFile("uplinks/" + nic + ".json")
	l.meet(both(), [2]place{l.host, l.internet}, [2]place{l.internet, l.host})
}

// What the NIC had of filters and of routers holds on the bridge. The first ADD turns
// forwarding of single links on, by which a link with accept_ra 1 goes on hearing routers.
func TestParametersOfTheNICHoldOnTheBridge(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	advertised(l)
	nstest.Sysctl(t, l.host.ns, "net/ipv4/conf/"+nic+"/rp_filter", "1")
	nstest.Sysctl(t, l.host.ns, "net/ipv6/conf/"+nic+"/accept_ra", "1")
	n := l.network(dualStack(nil))
	a := n.add(l.newPod("a"))
	for path, want := range map[string]string{"ipv6/conf/all/forwarding": "0", "ipv4/conf/" + bridge + "/rp_filter": "1", "ipv6/conf/" + bridge + "/accept_ra": "1"} {
		expect.Equal(t, nstest.Sysctl(t, l.host.ns, "net/"+path), want, "%s", path)
	}
	l.hearsRouters(bridge)
	n.del(a)
	n.operate("uplink restore", nic)
	got := nstest.Sysctl(t, l.host.ns, "net/ipv6/conf/"+nic+"/accept_ra")
	expect.That(t, got == "1", "accept_ra of %s is %s, want 1, as before", nic, got)
	l.hearsRouters(nic)
}

// hearsRouters ends the router's lifetime, and waits until it has advertised itself by a link.
func (l *lan) hearsRouters(link string) {
	l.Helper()
	ip(l, l.host.ns, "-6 route flush default proto ra")
	must.Until(l, "a default route by advertisement on "+link, func() bool {
		l.solicit(link)
		return strings.Contains(l.hostRun("ip", "-6", "route", "show", "default", "proto", "ra"), "dev "+link)
	})
}

// The kernel forgets masqueraded flows with the NIC's address, as Docker's and those of pods
// in another network. The plan says so, and the host's own go on.
func TestPlanNamesMasqueradedFlowsAndTheHostsGoOn(t *testing.T) {
	l := newHost(t)
	masquerading(l)
	n := l.network(nil)
	out := n.operate("uplink plan", nic, bridge)
	expect.That(t, !strings.Contains(out, "masqueraded"), "without such flows:\n%s", out)
	m := l.usualFlows(both()...)
	for _, family := range both() {
		out, in, err := stream(l.pod, l.internet, family)
		must.Succeed(t, err)
		defer out.Close()
		defer in.Close()
	}
	n.wantPlan("2 masqueraded connections of " + podIP4 + ", " + podIP6 + " go out by " + nic)
	wantWithin(t, "take", duringTake(), m.during(func() { n.operate("uplink take", nic, bridge) }))
	// New ones go out by the bridge.
	for _, family := range both() {
		out, in, err := stream(l.pod, l.internet, family)
		if err != nil {
			t.Errorf("a new connection over IPv%d: %v", family, err)
			continue
		}
		defer out.Close()
		defer in.Close()
	}
	wantWithin(t, "restore", duringRestore(), m.during(func() { n.operate("uplink restore", nic) }))
}

// What cannot move is named before, and what would cut the host off is refused.
func TestPlanNamesWhatStaysOnTheNIC(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(nil)
	before := l.moved(nic)
	ip(t, l.host.ns, "nexthop add id 9 via "+otherIP4+" dev "+nic, "route add 203.0.113.0/24 nhid 9")
	n.wantPlan("the route to 203.0.113.0/24 goes by nexthop object 9, which stays on " + nic)
	ip(t, l.host.ns, "nexthop add id 10 via "+routerIP4+" dev "+nic, "route replace default nhid 10")
	n.wantRefused("the default route goes by nexthop object 10")
	ip(t, l.host.ns, "route replace default via "+routerIP4, "nexthop flush",
		"link add flannel.1 type vxlan id 1 local "+hostIP4+" dev "+nic+" dstport 8472 nolearning")
	n.wantRefused("flannel.1")
	ip(t, l.host.ns, "link delete flannel.1")
	wantSame(t, "the host", before, l.moved(nic))
}

// wantPlan fails the test unless the plan warns of something.
func (n *network) wantPlan(warns string) {
	n.Helper()
	expect.Contains(n, n.operate("uplink plan", nic, bridge), warns, "the plan has no")
}

// wantRefused fails the test unless plan and take refuse, with such words.
func (n *network) wantRefused(says ...string) {
	n.Helper()
	for _, command := range []string{"plan", "take"} {
		_, err := n.exec("tombolo", nil, nil, "uplink", command, "--state", n.state, nic, bridge)
		for _, text := range says {
			expect.That(n, err != nil && strings.Contains(err.Error(), text),
				"uplink %s: %v, want it refused, with %q", command, err, text)
		}
	}
	n.wantNoLink(bridge)
}

func TestRestoreNamesTheAddressThatTheBridgeHasNoMore(t *testing.T) {
	t.Parallel()
	l := newHost(t)
	n := l.network(nil)
	n.operate("uplink take", nic, bridge)
	ip(t, l.host.ns, "address del "+hostIP4+"/24 dev "+bridge)
	_, err := n.exec("tombolo", nil, nil, "uplink", "restore", "--state", n.state, "--leases", n.leases, nic)
	want := "ip address add " + hostIP4 + "/24 dev " + nic
	expect.That(t, err != nil && strings.Contains(err.Error(), want), "restore: %v, want an error with %q", err, want)
	l.wantNoLink(bridge)
	expect.Success(t, nstest.Ping(t, l.other.ns, l.host.ip6), "the host's other address")
}

// Before anything is changed, a server confirms the host's lease to the identity that the
// keeper will renew it with.
func TestTakeProvesWhoLeasedTheHostsAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	d := l.dnsmasq()
	l.plug(l.host.ns)
	l.followsRouter()
	l.udhcpc()
	mac := macOf(t, l.host, nic)
	n := l.network(kept(nil))
	before, heard := l.moved(nic), len(d.messages(mac))
	try := func(command, id string) error {
		_, err := n.exec("tombolo", nil, nil, "uplink", command, "--state", n.state, "--leases", n.leases, "--client-id", id, nic, bridge)
		return err
	}
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "--client-id mac|none|HEX") || !strings.Contains(err.Error(), l.host.ip4.String()) {
			t.Errorf("%s: %v, want a refusal that names the address and the option", what, err)
		}
		l.wantNoLink(bridge)
		wantSame(t, "the host, "+what, before, l.moved(nic))
		n.wantNoFile("uplinks/" + nic + ".json")
	}
	for _, command := range []string{"plan", "take"} {
		refused(command+" by another identifier", try(command, "00:0b:ad:1d"))
	}
	for _, m := range d.messages(mac)[heard:] {
		expect.That(t, m == "DHCPREQUEST" || m == "DHCPNAK", "the server has heard or sent %s", m)
	}
	wantError(t, "an identifier that is none", try("take", "eth0"), "exit status 2", "--client-id", "want mac, none, or 2 to 255 bytes")
	n.keeper()
	d.Stop()
	_, err := n.verb("ADD", l.newPod("a"))
	refused("the server is silent", err)
	d.start()
	must.Succeed(t, errors.Join(try("plan", "mac"), try("take", "mac")))
	must.Until(l, "the keeper knows", n.hostIsKept)
	l.leasedOn(bridge)
	n.wantStatus("")
}

// As long as the NIC cannot be given back, the host's lease is renewed on the bridge.
func TestLeaseIsRenewedWhileTheNICCannotBeGivenBack(t *testing.T) {
	t.Parallel()
	n, d, k := takenWithLease(t)
	l, mac := n.lan, macOf(t, n.host, nic)
	// The kernel refuses IPv6 addresses of such a link.
	nstest.Sysctl(t, l.host.ns, "net/ipv6/conf/"+nic+"/disable_ipv6", "1")
	restore := func() error {
		_, err := n.exec("tombolo", nil, nil, "uplink", "restore", "--state", n.state, "--leases", n.leases, nic)
		return err
	}
	if err := restore(); err == nil || !strings.Contains(err.Error(), "step addresses") {
		t.Fatalf("restore: %v, want an error of the step addresses", err)
	}
	must.Until(l, "the keeper cannot finish it", func() bool {
		return strings.Contains(nstest.ReadIf(t, k.log), "cannot finish the work on an uplink")
	})
	k.kill()
	heard := len(d.messages(mac))
	n.makeDue(lease.HostHash(nic))
	k = n.keeper()
	d.renewed(mac, heard)
	l.leasedOn(bridge)
	k.kill()
	nstest.Sysctl(t, l.host.ns, "net/ipv6/conf/"+nic+"/disable_ipv6", "0")
	expect.Success(t, restore())
	l.wantNoLink(bridge)
	l.leasedOn(nic)
	e, ok := n.lease(lease.HostHash(nic))
	expect.That(t, !ok, "given back, and the keeper has the lease still: %+v", e)
}
