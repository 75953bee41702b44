package cni

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// What happens to one network while another shares a bridge, the table or a container with it.

func TestAGatewayThatAnotherNetworkOfTheBridgeHasStaysWhereOneGetsAnotherSubnet(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(conf{"ipam": hostLocal(subnet4)})
	other := n.network("othernet", conf{"ipam": conf{"type": "host-local", "ranges": []any{[]any{conf{"subnet": subnet4, "rangeStart": "10.77.0.128"}}}}})
	stays, goes := n.pod("stays"), n.pod("goes")
	other.add(stays)
	w.add(goes)
	w.del(goes)
	n.ip("route add 198.51.100.0/24 dev cbr0 src " + gateway4) // which would go with the address
	w.with(conf{"ipam": hostLocal("10.79.0.0/24")}).add(n.pod("next"))
	if got := globals(t, n.ns, "cbr0"); !slices.Contains(got, gateway4+"/24") {
		t.Errorf("the gateway of network othernet went from the bridge with the subnet that network podnet had: %v", got)
	}
	expect.That(t, n.run("ip", "route", "show", "198.51.100.0/24") != "",
		"the gateway of network othernet went and came back: an operator's route from it is gone")
	wantPing(t, stays.NS, gateway4, outside4)
}

func TestANetworkThatCannotBeMendedStopsNoADDOfAnother(t *testing.T) {
	t.Parallel()
	n, w, pods, _, _ := twoNetworks(t, "cbr1")
	n.ip("link del cbr1")
	n.ip("link add cbr1 type veth peer name cbr1-peer")
	n.nft("flush ruleset")
	next := n.pod("next")
	must.Succeed(t, expect.Err(w.tryAdd(next)),
		"network othernet cannot have its bridge, and an ADD on network podnet fails")
	for _, p := range append(pods, next) {
		wantPing(t, p.NS, outside4, outside6)
	}
}

func TestTheRepairOfOneNetworkMendsTheTableForAll(t *testing.T) {
	t.Parallel()
	n, _, _, _, stranger := twoNetworks(t, "cbr1")
	before := n.sets()
	n.nft("flush ruleset")
	n.lookAtLinks(nil, "podnet")
	if diff := cmp.Diff(before, n.sets()); diff != "" {
		t.Errorf("repair of network podnet made the table anew, and not all that network othernet has in it (-before +after):\n%s", diff)
	}
	wantPing(t, stranger.NS, outside4, outside6)
}

// A repair ends at the limits of a network's first pod, and tells the sets that networks share to be whole.
func TestTheNextADDMendsANetworkWhoseRepairFailedHalfWay(t *testing.T) {
	n := parallelNode(t)
	w := n.portnet(conf{"ipMasq": false}) // so that it has no set of its own
	var ifbs []string
	for _, p := range n.pods(3) {
		w.add(p, limited(1e8, 1e8))
		ifbs = append(ifbs, bandwidth.IFBName(strings.TrimPrefix(w.port(p), "veth")))
	}
	n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24")}).add(n.pod("stranger"))
	before := n.sets()
	n.nft("flush ruleset")
	for _, ifb := range ifbs {
		n.ip("link del " + ifb)
		n.ip("link add " + ifb + " type veth peer name " + "x" + ifb[1:])
	}
	o := n.operate("repair", "--state", n.state)
	must.That(t, o.status != 0, "the repair did not fail: %s", o.stdout)
	for _, ifb := range ifbs {
		n.ip("link del " + ifb)
	}
	next := w.addPod("next")
	n.wantWell("after an ADD to a network whose repair had failed")
	diff := cmp.Diff(before, n.sets(strings.TrimPrefix(w.port(next), "veth")))
	expect.That(t, diff == "", "the repair failed half-way, and the network's next ADD left (-before +after):\n%s", diff)
}

func TestAHostPortThatAKilledDELWasToPassOnIsPassedOnByRepair(t *testing.T) {
	n := parallelNode(t)
	out := n.outside()
	w := n.portnet(nil)
	other := n.network("othernet", conf{"bridge": "cbr1", "ipam": hostLocal("10.78.0.0/24"), "capabilities": conf{"portMappings": true}})
	p, port := n.pod("web"), publish(t, "8080:80/tcp")
	w.add(p, port)
	other.add(p, port, as("eth1"))
	p.serve(t, "tcp", 80)
	del := n.halt(w.asks("DEL", p, portOf80(8080)), func() bool { return !w.hasElements(p, "eth0") })
	del.arrive("taken the port away")
	del.dies()
	nstest.Run(t, p.NS, "ip", "link", "del", "eth0")
	o := n.operate("repair", "--state", n.state)
	expect.That(t, o.status != 1, "repair: %+v", o)
	expect.Success(t, expect.Err(askPort(t, out, "tcp", uplink4, 8080)),
		"a DEL was killed before it passed the host port on, and repair has it lead nowhere")
}

// onTwo is a container on two networks, as podman connects one: each call brings its ports, to whichever network.
type onTwo struct {
	*node
	nets    [2]*network
	results [2][]netip.Addr
	p       *pod
}

func (o *onTwo) options(t *testing.T, i int) []option {
	return []option{as(fmt.Sprintf("eth%d", i)), publish(t, "8080:80/tcp", "8080:80/udp")}
}

func (o *onTwo) connect(t *testing.T, i int) {
	t.Helper()
	o.results[i] = nil
	for _, ip := range o.nets[i].add(o.p, o.options(t, i)...).IPs {
		a, _ := netip.AddrFromSlice(ip.Address.IP)
		o.results[i] = append(o.results[i], a.Unmap())
	}
}

// callsItself asks the pod's port at the host's address on each of its networks, from its interface there.
func (o *onTwo) callsItself(t *testing.T, when string) {
	t.Helper()
	for i, w := range o.nets {
		for _, at := range []string{fmt.Sprintf("10.3%d.0.1", i+1), fmt.Sprintf("fd3%d::1", i+1)} {
			for _, protocol := range []string{"tcp", "udp"} {
				_, err := nstest.AskWithin(t, o.p.NS, protocol, netip.AddrPortFrom(nstest.Addr(at), 8080), 5*time.Second)
				expect.That(t, err == nil, "%s: the pod cannot reach its port at %s, by eth%d: %v", when, at, i, err)
			}
		}
		expect.Success(t, w.check(o.p, o.options(t, i)...), "%s", when)
	}
}

func TestAPodOnTwoNetworksReachesItsPortByBoth(t *testing.T) {
	t.Parallel()
	o := &onTwo{node: newNode(t)}
	for i := range o.nets {
		o.nets[i] = o.network(fmt.Sprintf("net%d", i), conf{
			"bridge": fmt.Sprintf("br3%d", i+1), "capabilities": conf{"portMappings": true},
			"ipam": hostLocal(fmt.Sprintf("10.3%d.0.0/24", i+1), fmt.Sprintf("fd3%d::/64", i+1)),
		})
	}
	outside := o.outside()
	o.p = o.pod("web")
	o.connect(t, 0)
	o.connect(t, 1)
	o.p.serve(t, "tcp", 80)
	o.p.serve(t, "udp", 80)
	o.callsItself(t, "connected")

	// The address of a network that it leaves may be another pod's then.
	left := o.results[1]
	o.nets[1].del(o.p, o.options(t, 1)...)
	for _, a := range left {
		selves := o.nft("list set inet tombolo selves4") + o.nft("list set inet tombolo selves6")
		expect.That(t, !strings.Contains(selves, " "+a.String()+" "), "the pod has left with %s, and there is\n%s", a, selves)
	}
	o.connect(t, 1)
	o.callsItself(t, "connected again")

	// Exchanged: the ports pass to the network that is left, and the pod comes back to the other.
	o.nets[0].del(o.p, o.options(t, 0)...)
	o.connect(t, 0)
	o.callsItself(t, "exchanged")

	// Whom it calls as any other pod's, sees it.
	other := o.pod("other")
	o.nets[0].add(other, publish(t, "9090:80/tcp"))
	other.serve(t, "tcp", 80)
	for i, at := range []string{"10.31.0.1", "10.32.0.1"} {
		if seen, err := askPort(t, o.p.NS, "tcp", at, 9090); err != nil || !slices.Contains(o.results[i], seen) {
			t.Errorf("at %s the pod is seen as %s (%v), want one of %s", at, seen, err, o.results[i])
		}
	}
	expect.Success(t, expect.Err(askPort(t, outside, "tcp", uplink4, 8080)))

	o.nft("flush ruleset")
	repairs := o.pod("repairs")
	o.nets[1].add(repairs)
	o.callsItself(t, "after a flush")
	for i, w := range o.nets {
		w.del(o.p, o.options(t, i)...)
	}
	o.nets[0].del(other)
	o.nets[1].del(repairs)
	for _, set := range []string{"selves4", "selves6"} {
		if left := o.nft("list set inet tombolo " + set); strings.Count(left, "tombolo:1:") != 1 || !strings.Contains(left, "tombolo:1:sentinel") {
			t.Errorf("the pods have gone, and there is\n%s", left)
		}
	}
}
