package network_test

import "testing"

func TestABrokenPortIsNamedAndMended(t *testing.T) {
	flag := func(set, said string) fault {
		return fault{on: "ip link set $P type bridge_slave " + set, says: "port $P: " + said + " [repair]"}
	}
	const (
		br9   = "ip link add br9 address 02:00:00:00:00:09 type bridge"
		alias = "tombolo:1:$H:pods:10.61.0.2,fd61::2"
		no    = "port $P: link $P is missing [recreate pod]"
	)
	table{with: everything, keeper: lackingLinks, faults: map[string]fault{
		"down":                 {on: "ip link set $P down", says: "port $P: link is down, should be up [repair]"},
		"off its bridge":       {on: "ip link set $P nomaster", says: "port $P: membership in # is missing [repair]"},
		"on another bridge":    {on: br9 + "; ip link set $P master br9", stays: br9, says: "port $P: membership in # is missing [repair]"},
		"hairpin":              flag("hairpin off", "hairpin is off, should be on"),
		"isolation":            flag("isolated on", "isolation is on, should be off"),
		"link-local groups":    flag("group_fwd_mask 0", "forwarding of link-local groups is off, should be on"),
		"learning":             flag("learning off", "learning is off, should be on"),
		"flood":                flag("flood off", "flood is off, should be on"),
		"multicast flood":      flag("mcast_flood off", "multicast flood is off, should be on"),
		"MTU":                  {on: "ip link set $P mtu 1400", says: "port $P: MTU is 1400, should be 1500 [repair]"},
		"MAC":                  {on: "ip link set $P address 02:00:00:00:00:99", says: "port $P: MAC is 02:00:00:00:00:99, should be $M [repair]"},
		"alias":                {on: "ip link set $P alias else", undo: "ip link set $P alias " + alias, refuse: "delete link $P: the link belongs to another owner", says: `port $P: alias is "else", should be "` + alias + `" [repair]`},
		"rp_filter":            {on: "echo 0 >/proc/sys/net/ipv4/conf/$P/rp_filter", says: "port $P: IPv4 rp_filter is 0, should be 1 [repair]"},
		"accept_ra":            {on: "echo 2 >/proc/sys/net/ipv6/conf/$P/accept_ra", says: "port $P: IPv6 accept_ra is 2, should be 0 [repair]"},
		"unicast in multicast": {on: "echo 0 >/proc/sys/net/ipv6/conf/$P/drop_unicast_in_l2_multicast", says: "port $P: IPv6 drop_unicast_in_l2_multicast is off, should be on [repair]"},
		"deleted":              {on: "ip link del $P", says: no, unseen: true},
		"renamed":              {on: "ip link set $P down; ip link set $P name veth9; ip link set veth9 up", undo: "ip link del veth9", refuse: `network "pods" has 1 attachment`, says: no, unseen: true},
		"dead":                 {on: "ip link del $P; umount $N", says: "it is dead: port $P is missing, and its namespace is gone: open network namespace $N: not a network namespace [gc]", hidden: true, more: no, unseen: true},
	}}.run(t)
}

// The inside of a pod is the pod's: what differs there is noted, and stays through a repair. CHECK finds what the
// reference's bridge would, too.
func TestWhatChangesInAPodIsNotedAndStays(t *testing.T) {
	const (
		net4, net6 = "@: route 10.61.0.0/24 is missing\n", "@: route fd61::/64 is missing\n"
		gw4, gw6   = "@: route default via 10.61.0.1 is missing\n", "@: route default via fd61::1 is missing\n"
	)
	table{faults: map[string]fault{
		"down":                    {in: "ip link set eth0 down", notes: "@: link is down, should be up\n" + gw4 + gw6 + net4 + net6, more: "@: link is down, should be up\n" + gw4 + gw6 + net4 + net6},
		"MTU":                     {in: "ip link set eth0 mtu 9000", notes: "@: MTU is 9000, should be 1500"},
		"a smaller MTU":           {in: "ip link set eth0 mtu 1400", notes: "@: MTU is 1400, should be 1500"},
		"MAC":                     {in: "ip link set eth0 address 02:00:00:00:00:98", notes: "@: MAC is 02:00:00:00:00:98, should be 0a:58:0a:3d:00:02", more: "@: MAC is 02:00:00:00:00:98, should be 0a:58:0a:3d:00:02"},
		"IPv4 address":            {in: "ip address del 10.61.0.2/24 dev eth0", notes: "@: address 10.61.0.2/24 is missing\n" + gw4 + net4, more: "@: address 10.61.0.2/24 is missing\n" + gw4 + net4},
		"IPv6 address":            {in: "ip address del fd61::2/64 dev eth0", notes: "@: address fd61::2/64 is missing\n" + net6, more: "@: address fd61::2/64 is missing\n" + net6},
		"more addresses":          {in: "ip address add 10.99.0.1/24 dev eth0"},
		"default route":           {in: "ip route del default", notes: gw4, more: gw4},
		"IPv6 default route":      {in: "ip -6 route del default", notes: gw6, more: gw6},
		"default route elsewhere": {in: "ip route replace default via 10.61.0.9", notes: "@: route is default via 10.61.0.9, should be default via 10.61.0.1"},
		"default route by a VPN":  {in: "ip link add wg0 index 9 up type veth; ip route replace default dev wg0", notes: "@: route is default on link 9, should be default via 10.61.0.1"},
		"unreachable default":     {in: "ip route replace unreachable default", notes: "@: route is unreachable default, should be default via 10.61.0.1"},
		"in another table":        {in: "ip route del default; ip route add default via 10.61.0.1 table 100"},
		"subnet's route":          {in: "ip route del 10.61.0.0/24", notes: net4, more: net4},
		"IPv6 subnet's route":     {in: "ip -6 route del fd61::/64", notes: net6, more: net6},
		"IPv6 off":                {in: "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6", notes: "@: address fd61::2/64 is missing\n" + gw6 + net6, more: "@: address fd61::2/64 is missing\n" + gw6 + net6},
		"renamed":                 {in: "ip link set eth0 name eth9", notes: "@: name is eth9, should be eth0", more: "@: name is eth9, should be eth0"},
		"KubeVirt": {
			in:    "ip address flush dev eth0; ip link set eth0 name eth0-nic; ip link add k6t-eth0 up type bridge; ip link set eth0-nic master k6t-eth0",
			notes: "@: name is eth0-nic, should be eth0\n@: address 10.61.0.2/24 is missing\n@: address fd61::2/64 is missing\n" + gw4 + net4 + net6,
			more:  "@: name is eth0-nic, should be eth0\n@: address 10.61.0.2/24 is missing\n@: address fd61::2/64 is missing\n" + gw4 + net4 + net6,
		},
		"deleted":          {in: "ip link del eth0", says: "port $P: link $P is missing [recreate pod]"},
		"namespace's path": {on: "umount $N", says: "its namespace is gone: open network namespace $N: not a network namespace [recreate pod]", hidden: true},
	}}.run(t)
}
