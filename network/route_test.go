package network_test

import (
	"strings"
	"testing"
)

func TestABrokenWayToThePodIsNamedAndMended(t *testing.T) {
	const said = "the host does not send packets for 10.61.0.2 to cbr0: see ip route get 10.61.0.2, and ip rule [configuration]"
	table{faults: map[string]fault{
		"a better route": {on: "ip route add blackhole 10.61.0.2", undo: "ip route del blackhole 10.61.0.2", says: said, stays: "ip route add blackhole 10.61.0.2"},
		"a rule":         {on: "ip rule add to 10.61.0.0/24 prohibit", undo: "ip rule del to 10.61.0.0/24 prohibit", says: said, stays: "ip rule add to 10.61.0.0/24 prohibit"},
		"an IPv6 rule":   {on: "ip -6 rule add to fd61::/64 prohibit", undo: "ip -6 rule del to fd61::/64 prohibit", says: strings.ReplaceAll(said, "10.61.0.2", "fd61::2"), stays: "ip -6 rule add to fd61::/64 prohibit"},
	}}.run(t)
}
