package network_test

import "testing"

func TestBrokenLimitsAreNamedAndMended(t *testing.T) {
	const (
		in, out     = "tbf rate 8 Mbit/s burst 5000b limit 15000b", "tbf rate 16 Mbit/s burst 10000b limit 30000b"
		slow        = "root handle 746f: tbf rate 1mbit burst 10k limit 30k"
		slowed      = "tbf rate 1 Mbit/s burst 10240b limit 30720b, should be "
		noFilter    = "port $P: filter to $I is missing [repair]"
		wrongFilter = "port $P: filter is another, should be to $I [repair]"
		other       = "ip link add ifb9 address 02:00:00:00:00:09 type ifb"
		another     = `delete link $I: the link belongs to another owner: its alias is "`
	)
	table{with: everything, faults: map[string]fault{
		"ingress shaper": {on: "tc qdisc del dev $P root", says: "port $P: ingress shaper " + in + " is missing [repair]"},
		"ingress rate":   {on: "tc qdisc replace dev $P " + slow, says: "port $P: ingress shaper is " + slowed + in + " [repair]"},
		"another qdisc":  {on: "tc qdisc replace dev $P root handle 5: pfifo", says: "port $P: ingress shaper is pfifo 5:, should be " + in + " [repair]"},
		"egress shaper":  {on: "tc qdisc del dev $I root", says: "link $I: egress shaper " + out + " is missing [repair]"},
		"egress rate":    {on: "tc qdisc replace dev $I " + slow, says: "link $I: egress shaper is " + slowed + out + " [repair]"},
		"filter":         {on: "tc filter del dev $P ingress", says: noFilter},
		"its place":      {on: "tc qdisc del dev $P clsact", says: noFilter},
		"filter leads elsewhere": {on: other + "; tc filter del dev $P ingress; tc filter add dev $P ingress prio 29807 protocol all u32 match u32 0 0 action mirred egress redirect dev ifb9",
			stays: other, says: wrongFilter},
		"ifb":      {on: "ip link del $I", says: "link $I: link $I is missing [repair]"},
		"ifb down": {on: "ip link set $I down", says: "link $I: link is down, should be up [repair]"},
		"alias of the ifb": {on: "ip link set $I alias else", undo: "ip link del $I", refuse: another + "else",
			says: `link $I: alias is "else", should be "tombolo:1:$H:pods:" [configuration]`},
		"ifb of another kind": {on: "ip link del $I; ip link add $I type veth peer name v1", undo: "ip link del $I", refuse: another + `"`,
			says: `link $I: kind is "veth", should be ifb [configuration]` + "\n" + wrongFilter},
	}}.run(t)
}
