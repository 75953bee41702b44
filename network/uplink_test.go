package network_test

import (
	"net"
	"testing"

	"github.com/tombolo-cni/tombolo/bridge/share"
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
	n.nw.Uplink, n.nw.Exit, n.nw.Guard, n.nw.Routed = "nic0", network.ExitHost, nft.GuardUntrusted, true
	n.pod.Addresses = []ipam.Address{{Prefix: nstest.Prefix("10.61.0.2/24"), Gateway: nstest.Addr("10.61.0.1")}}
	return lan
}

func TestABrokenUplinkIsNamedAndMended(t *testing.T) {
	const lans = "\nset lans of table inet tombolo: element cbr0 does not belong there [repair]\nset lans of table inet tombolo: element cbr0 is missing [repair]" +
		"\nset ours of table inet tombolo: element cbr0 does not belong there [repair]\nset ours of table inet tombolo: element cbr0 is missing [repair]"
	outer, port := share.Pair("cbr0")
	table{with: onLAN, faults: map[string]fault{
		"promiscuous": {on: "ip link set nic0 promisc off", says: "link nic0: promiscuous mode is off, should be on [repair]"},
		"the port":    {on: "ip link set " + port + " nomaster", says: "link " + port + ": bridge is 0, should be 3 [repair]"},
		"the program": {on: "tc qdisc del dev " + port + " clsact", says: "link " + port + ": program share 2 02:00:00:00:00:01 is missing [repair]"},
		"on another bridge": {on: "ip link add br9 type bridge; ip link set nic0 master br9", undo: "ip link set nic0 nomaster; ip link del br9",
			left: "ip link add br9 type bridge; ip link set nic0 master br9", says: "share nic0: the link cannot be shared: it is the port of a bridge already: use that bridge [configuration]"},
		"the pair":           {on: "ip link del " + outer, says: "share of nic0: veth pair " + outer + " and " + port + " is missing [repair]"},
		"the bridge":         {on: "ip link del cbr0", says: "#: link cbr0 is missing [repair]\nport $P: # is missing [repair]\nset bridges of table inet tombolo: element cbr0 . cbr0 does not belong there [repair]\nset bridges of table inet tombolo: element cbr0 . cbr0 is missing [repair]\nset bypass of table inet tombolo: element cbr0 is missing [repair]" + lans},
		"IPv6 of the bridge": {on: "echo 0 >/proc/sys/net/ipv6/conf/cbr0/disable_ipv6", says: "kernel parameters: net/ipv6/conf/cbr0/disable_ipv6 is 0, should be 1 [repair]"},
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
