package network_test

import (
	"net"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/nft"
)

// onLAN has the pod on the LAN of a NIC of the host's, with its default route through the host.
func onLAN(n *node) { n.lan() }

func (n *node) lan() *netns.NS {
	lan := nstest.New(n)
	nstest.Veth(n, n.ns, "nic0", lan, "eth0")
	nstest.Run(n, lan, "ip", "address", "add", "10.61.0.1/24", "dev", "eth0")
	nstest.Run(n, n.ns, "sh", "-ec", "ip link set nic0 address 02:00:00:00:00:01; echo 2 >/proc/sys/net/ipv6/conf/nic0/accept_ra; ip address add 10.61.0.9/24 dev nic0; ip route add default via 10.61.0.1")
	n.nw.Gateway, n.nw.DefaultGateway = false, false
	n.nw.Uplink, n.nw.Exit, n.nw.Guard, n.nw.Routed = uplink.Uplink{NIC: "nic0"}, network.ExitHost, nft.GuardUntrusted, true
	n.pod.Addresses = []ipam.Address{{Prefix: nstest.Prefix("10.61.0.2/24"), Gateway: nstest.Addr("10.61.0.1")}}
	return lan
}

func TestABrokenUplinkIsNamedAndMended(t *testing.T) {
	const (
		lans  = "\nset lans of table inet tombolo: element cbr0 does not belong there [repair]\nset lans of table inet tombolo: element cbr0 is missing [repair]"
		route = "#: route default via 10.61.0.1 dev cbr0 is missing [repair]"
		br9   = "ip link add br9 address 02:00:00:00:00:09 type bridge"
	)
	table{with: onLAN, faults: map[string]fault{
		"off its bridge":     {on: "ip link set nic0 nomaster", says: "link nic0: master cbr0 is missing [repair]"},
		"on another bridge":  {on: br9 + "; ip link set nic0 master br9", undo: "ip link del br9", left: br9 + "; ip link set nic0 master br9", says: "link nic0: master is br9, should be cbr0 [configuration]"},
		"down":               {on: "ip link set nic0 down", undo: "ip link set nic0 up; until ip link show nic0 | grep -q 'state UP'; do sleep .01; done", refuse: "give back nic0: step routes", says: "link nic0: state is down, should be up [configuration]"},
		"the bridge's MAC":   {on: "ip link set cbr0 address 02:00:00:00:00:07", says: "#: MAC is 02:00:00:00:00:07, should be 02:00:00:00:00:01 [repair]\npods send to the host's MAC 02:00:00:00:00:01, and it is 02:00:00:00:00:07 [repair]"},
		"the host's address": {on: "ip address del 10.61.0.9/24 dev cbr0", says: "#: address 10.61.0.9/24 is missing [repair]\n#: route 10.61.0.0/24 dev cbr0 is missing [repair]\n" + route, left: "ip address del 10.61.0.9/24 dev nic0"},
		"the host's route":   {on: "ip route del default", says: route, left: "ip route del default"},
		"the bridge":         {on: "ip link del cbr0", says: "#: link cbr0 is missing [repair]\nport $P: # is missing [repair]" + lans + calls},
	}}.run(t)
}

func TestBrokenRoutingOfALANIsNamedAndMended(t *testing.T) {
	const of = "/proc/sys/net/ipv4/"
	table{with: onLAN, faults: map[string]fault{
		"forwarding": {on: "echo 0 >" + of + "ip_forward", left: "echo 0 >" + of + "ip_forward", stays: "echo 0 >" + of + "ip_forward",
			says: "the host does not forward IPv4 (net.ipv4.conf.*.forwarding) [repair]\ntable inet tombolo: chain pods-only is missing [repair]"},
	}}.run(t)
}

// The kernel deletes a pod's neighbours when its interface gets another MAC.
func TestAPodWithAnotherMACStillSendsToTheHost(t *testing.T) {
	t.Parallel()
	n := table{with: func(n *node) { onLAN(n); n.nw.Guard = nft.GuardMAC }}.host(t)
	n.add()
	entries := func() string { return nstest.Run(t, n.pod.NetNS, "ip", "neighbour", "show", "nud", "permanent") }
	before := entries()
	expect.Contains(t, before, "169.254.1.1 dev eth0 lladdr 02:00:00:00:00:01", "the pod's neighbours")
	const mac = "02:00:00:00:00:77"
	nstest.Run(t, n.pod.NetNS, "ip", "link", "set", "eth0", "address", mac)
	expect.Equal(t, entries(), "", "the kernel keeps neighbours: the test shows nothing")
	n.do(func() error { return n.Change(n.made.Key).Tuned(t.Context(), must.Of(net.ParseMAC(mac)).Get(t), 0) })
	expect.Equal(t, entries(), before, "the pod's neighbours")
}
