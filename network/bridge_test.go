package network_test

import "testing"

// calls is that the firewall's sets say what a bridge is of which the firewall sees nothing.
const calls = "\nset bridges of table inet tombolo: element cbr0 . cbr0 does not belong there [repair]" +
	"\nset bridges of table inet tombolo: element cbr0 . cbr0 is missing [repair]\nset bypass of table inet tombolo: element cbr0 is missing [repair]" +
	"\nset ours of table inet tombolo: element cbr0 does not belong there [repair]\nset ours of table inet tombolo: element cbr0 is missing [repair]"

// gatewaysSet is the same of the set that only a bridge with gateways is in.
const gatewaysSet = "\nset gateways of table inet tombolo: element cbr0 does not belong there [repair]\nset gateways of table inet tombolo: element cbr0 is missing [repair]"

func TestABrokenBridgeIsNamedAndMended(t *testing.T) {
	const (
		dedup = "\ntable bridge tombolo: chain dedup-pods does not belong there [repair]" // without a promiscuous bridge
		off   = "\n#: nf_call_iptables is off, should be on [repair]\n#: nf_call_ip6tables is off, should be on [repair]\n#: promiscuous mode is off, should be on [repair]" +
			gateways + "\n" + advertises + dedup + calls + gatewaysSet
	)
	table{keeper: lackingLinks, with: func(n *node) { n.nw.Promiscuous, n.nw.NFCall = new(true), new(true) }, faults: map[string]fault{
		"deleted":         {on: "ip link del cbr0", says: "#: link cbr0 is missing [repair]\nport $P: # is missing [repair]" + dedup + calls + gatewaysSet},
		"down":            {on: "ip link set cbr0 down", says: "#: link is down, should be up [repair]\n#: the gateway fd61::1/64 is missing [repair]"},
		"MTU":             {on: "ip link set cbr0 mtu 1400", says: "#: MTU is 1400, should be 1500 [repair]"},
		"promiscuous":     {on: "ip link set cbr0 promisc off", says: "#: promiscuous mode is off, should be on [repair]" + dedup},
		"nf_call":         {on: "ip link set cbr0 type bridge nf_call_iptables 0", says: "#: nf_call_iptables is off, should be on [repair]" + calls + gatewaysSet},
		"nf_call of IPv6": {on: "ip link set cbr0 type bridge nf_call_ip6tables 0", says: "#: nf_call_ip6tables is off, should be on [repair]" + calls + gatewaysSet},
		"made anew": {on: "ip link del cbr0; ip link add cbr0 type bridge; ip link set cbr0 alias tombolo:1:bridge up; ip link set $P master cbr0",
			says: "#: fdb_max_learned is 0, should be 16384 [repair]\nport $P: forwarding of link-local groups is off, should be on [repair]" + off},
		"the name is another link's": {on: "ip link del cbr0; ip link add cbr0 type veth peer name cbr1; ip link set cbr0 promisc on up", undo: "ip link del cbr0",
			refuse: `cbr0 is no longer a bridge but of kind "veth": it is left alone`,
			says:   "#: link is of kind veth, should be of kind bridge [configuration]\nport $P: membership in bridge cbr0 is missing [repair]" + gateways + dedup + calls + gatewaysSet},
	}}.run(t)
}
