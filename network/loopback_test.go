package network_test

import "testing"

func TestABrokenWayFrom127001IsNamedAndMended(t *testing.T) {
	const parameter = "/proc/sys/net/ipv4/conf/cbr0/route_localnet"
	const closed = "#: route_localnet is off, so that 127.0.0.1 does not lead to the pods' ports [repair]"
	const open = "#: the filter is missing at its ingress that keeps others from the host's 127.0.0.1 should nf_tables be flushed [repair]"
	table{keeper: lackingLinks, with: everything, faults: map[string]fault{
		"route_localnet": {on: "echo 0 >" + parameter, says: closed},
		"the filter":     {on: "tc filter del dev cbr0 ingress", says: open},
		"its place":      {on: "tc qdisc del dev cbr0 clsact", says: open},
		"both":           {on: "tc qdisc del dev cbr0 clsact; echo 0 >" + parameter, says: closed},
	}}.run(t)
}
