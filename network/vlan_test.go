package network_test

import (
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

func TestABrokenVLANIsNamedAndMended(t *testing.T) {
	if _, err := nstest.Try(nstest.New(t), "ip", "link", "add", "br0", "type", "bridge", "vlan_filtering", "1"); err != nil {
		t.Skip("this kernel's bridges know no VLANs: test/vm/run.sh boots one whose do")
	}
	with := func(n *node) { n.nw.VLAN = vlan.Membership{ID: 100, Trunk: []vlan.Range{{First: 7, Last: 7}}} }
	const own, should = "link cbr0.100: ", ", should be 7, 100 pvid untagged [repair]"
	table{with: with, keeper: lackingLinks, faults: map[string]fault{
		"the port's VLAN":   {on: "bridge vlan del vid 100 dev $P", says: "port $P: VLANs is 7" + should},
		"the port's trunk":  {on: "bridge vlan del vid 7 dev $P", says: "port $P: VLANs is 100 pvid untagged" + should},
		"one VLAN more":     {on: "bridge vlan add vid 5 dev $P", says: "port $P: VLANs is 5, 7, 100 pvid untagged" + should},
		"the bridge's VLAN": {on: "bridge vlan del vid 100 dev cbr0 self", says: own + "the bridge's membership in VLAN 100 is missing [repair]"},
		"filtering":         {on: "ip link set cbr0 type bridge vlan_filtering 0", says: "#: vlan_filtering is off, should be on [repair]"},
		"the host's link":   {on: "ip link del cbr0.100", says: own + "link cbr0.100 is missing [repair]"},
		"its MTU":           {on: "ip link set cbr0.100 mtu 1400", says: own + "MTU is 1400, should be 1500 [repair]"},
		"it is down":        {on: "ip link set cbr0.100 down", says: own + "link is down, should be up [repair]\n#.100: the gateway fd61::1/64 is missing [repair]"},
	}}.run(t)
}
