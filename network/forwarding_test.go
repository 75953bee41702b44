package network_test

import "testing"

func TestBrokenForwardingIsNamedAndMended(t *testing.T) {
	const four, six, own = "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding", "net/ipv4/conf/cbr0/forwarding"
	table{keeper: lackingLinks, faults: map[string]fault{
		"of IPv4": {on: "echo 0 >" + four, left: "echo 0 >" + four,
			says: "the host does not forward IPv4 (net.ipv4.ip_forward) [repair]\nkernel parameters: " + own + " is 0, should be 1 [repair]"},
		"of IPv6":        {on: "echo 0 >" + six, left: "echo 0 >" + six, says: "the host does not forward IPv6 (net.ipv6.conf.all.forwarding) [repair]"},
		"by the gateway": {on: "echo 0 >/proc/sys/" + own, says: "kernel parameters: " + own + " is 0, should be 1 [repair]"},
	}}.run(t)
}
