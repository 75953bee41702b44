package cni

import (
	"slices"
	"strings"
	"testing"

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
