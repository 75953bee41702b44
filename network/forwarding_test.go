package network_test

import "testing"

func TestBrokenForwardingIsNamedAndMended(t *testing.T) {
	const four, six, own = "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding", "net/ipv4/conf/cbr0/forwarding"
	const chain = "table inet tombolo: chain pods-only is missing [repair]"
	table{keeper: lackingLinks, faults: map[string]fault{
		"of IPv4": {on: "echo 0 >" + four, left: "echo 0 >" + four, stays: "echo 0 >" + four,
			says: "the host does not forward IPv4 (net.ipv4.conf.*.forwarding) [repair]\n" + chain},
		"of IPv6": {on: "echo 0 >" + six, left: "echo 0 >" + six, stays: "echo 0 >" + six,
			says: "the host does not forward IPv6 (net.ipv6.conf.*.force_forwarding) [repair]\n" + chain},
		"by the gateway": {on: "echo 0 >/proc/sys/" + own, says: "kernel parameters: " + own + " is 0, should be 1 [repair]"},
	}}.run(t)
}

func TestBrokenForwardingForPodsOnlyIsNamedAndMended(t *testing.T) {
	const object, sys, later, six = "kernel parameters: ", "/proc/sys/", "net/ipv4/conf/default/forwarding", "net/ipv6/conf/cbr0/force_forwarding"
	table{keeper: lackingLinks, before: "echo 0 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv6/conf/all/forwarding", faults: map[string]fault{
		"by later links":         {on: "echo 0 >" + sys + later, says: object + later + " is 0, should be 116 [repair]"},
		"of IPv6 by the gateway": {on: "echo 0 >" + sys + six, says: object + six + " is 0, should be 1 [repair]"},
		"of IPv6 by all links": {on: "echo 0 >/proc/sys/net/ipv6/conf/all/forwarding",
			says: "the host does not forward IPv6 (net.ipv6.conf.*.force_forwarding) [repair]"},
	}}.run(t)
}
