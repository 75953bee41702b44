package network_test

import "testing"

const advertises = "kernel parameters: net/ipv6/conf/cbr0/accept_ra is 1, should be 0 [repair]"

// gateways is what a bridge lacks that others have made anew.
const gateways = "\n#: the gateway 10.61.0.1/24 is missing [repair]\n#: the gateway fd61::1/64 is missing [repair]"

func TestABrokenGatewayIsNamedAndMended(t *testing.T) {
	const route4, route6 = "#: the host's route to 10.61.0.0/24 ", "#: the host's route to fd61::/64 "
	table{keeper: lackingLinks, faults: map[string]fault{
		"IPv4 address":       {on: "ip address del 10.61.0.1/24 dev cbr0", says: "#: the gateway 10.61.0.1/24 is missing [repair]"},
		"IPv6 address":       {on: "ip address del fd61::1/64 dev cbr0", says: "#: the gateway fd61::1/64 is missing [repair]"},
		"link-local address": {on: "ip -6 address flush dev cbr0 scope link", says: "#: a link-local IPv6 address, from which the host asks for pods, is missing [repair]"},
		"IPv6 is off":        {on: "echo 1 >/proc/sys/net/ipv6/conf/cbr0/disable_ipv6", says: "#: the gateway fd61::1/64 is missing [repair]"},
		"advertisements":     {on: "echo 1 >/proc/sys/net/ipv6/conf/cbr0/accept_ra", says: advertises},
		"IPv4 route":         {on: "ip route del 10.61.0.0/24 dev cbr0", says: route4 + "is missing [repair]"},
		"IPv6 route":         {on: "ip -6 route del fd61::/64 dev cbr0", says: route6 + "is missing [repair]"},
		"the route leads elsewhere": {on: "ip route replace blackhole 10.61.0.0/24", left: "ip route add blackhole 10.61.0.0/24",
			says: route4 + "leads elsewhere: blackhole 10.61.0.0/24 [repair]"},
		"IPv6 address, beside an address that was added later": {on: "ip address add 10.61.0.53/32 dev cbr0; ip address del fd61::1/64 dev cbr0",
			left: "ip address add 10.61.0.53/32 dev cbr0", says: "#: the gateway fd61::1/64 is missing [repair]"},
		"another address overlaps": {on: "ip address del 10.61.0.1/24 dev cbr0; ip address add 10.61.0.1/16 dev cbr0", undo: "ip address del 10.61.0.1/16 dev cbr0",
			says: "#: the gateway 10.61.0.1/24 is missing, and in its place is 10.61.0.1/16 [configuration]"},
	}}.run(t)
}
