# Makes the links that v0.1.0 leaves, of the records in $state and $results, in the pods $web, $plain and $leased.
at() { ns=$1; shift; nsenter --net="$ns" "$@"; }
field() { tail -n 1 "$1" | sed "s/.*\"$2\":\"\([^\"]*\)\".*/\1/"; }

set_all() { for setting in "$@"; do sysctl -qw "net.$setting"; done; }

shape() { # LINK
	tc qdisc add dev "$1" root handle 746f: tbf rate 8mbit burst 50000 limit 50000
}

for link in default lo eth0; do set_all "ipv4.conf.$link.forwarding=116" "ipv6.conf.$link.force_forwarding=1"; done

bridge() { # NAME MAC CALLS
	ip link add "$1" address "$2" type bridge nf_call_iptables "$3" nf_call_ip6tables "$3"
	ip link set "$1" alias tombolo:1:bridge addrgenmode none

	ip link set "$1" up
}

port() { # RECORD POD
	hash=$(basename "$1" .json) network=$(basename "$(dirname "$1")")
	addresses=$(tail -n 1 "$1" | grep -o '"prefix":"[^/]*' | cut -d '"' -f 4 | paste -sd ,)
	ip link add "veth$hash" address "$(field "$1" hostMAC)" type veth peer name eth0 address "$(field "$1" mac)" netns "$2"
	group=29806
	[ "$network" = podnet ] || group=29807
	ip link set "veth$hash" alias "tombolo:1:$hash:$network:$addresses" group $group addrgenmode none master "$(field "$1" bridge)"
	hairpin=on
	[ "$network" = podnet ] || hairpin=off
	ip link set "veth$hash" type bridge_slave hairpin $hairpin group_fwd_mask 0x4001
	set_all "ipv4.conf.veth$hash.rp_filter=1" "ipv6.conf.veth$hash.accept_ra=0" "ipv6.conf.veth$hash.drop_unicast_in_l2_multicast=1"
	ip link set "veth$hash" up
	at "$2" ip link set lo up
	at "$2" ip link set eth0 addrgenmode none
}

linklocal() { # LINK
	IFS=: read -r a b c d e f <<MAC
$(ip -br link show "$1" | grep -oE '([0-9a-f]{2}:){5}[0-9a-f]{2}')
MAC
	printf 'fe80::%x%s:%sff:fe%s:%s%s' $((0x$a ^ 2)) "$b" "$c" "$d" "$e" "$f"
}

dualstack() { # POD HOST
	at "$1" sysctl -qw net.ipv6.conf.eth0.accept_ra=0 net.ipv6.conf.eth0.keep_addr_on_down=1
	at "$1" ip link set eth0 up
	at "$1" ip address add "10.77.0.$2/24" broadcast + dev eth0
	at "$1" ip address add "fd77::$2/64" dev eth0 nodad
	at "$1" ip address add "fe80::858:aff:fe4d:$2/64" dev eth0 nodad
	at "$1" ip route add default via 10.77.0.1 proto 116
	at "$1" ip route add default via fd77::1 proto 116
}

bridge cbr0 "$(grep -o '"mac":"[^"]*' "$results/podnet-web-eth0" | head -n 1 | cut -d '"' -f 4)" 1
tc qdisc add dev cbr0 clsact
set_all ipv4.conf.cbr0.route_localnet=1 ipv6.conf.cbr0.accept_ra=0
tc filter add dev cbr0 ingress pref 29807 protocol all handle 0x746f0101 bpf da bytecode '18,32 0 0 4294963200,21 8 0 2048,21 1 0 33024,21 0 12 34984,32 0 0 4294963244,84 0 0 4095,21 0 9 0,40 0 0 4293918720,84 0 0 4095,21 7 6 0,48 0 0 4293918732,21 5 0 127,48 0 0 4293918736,21 0 2 127,32 0 0 4294963220,69 0 1 16,6 0 0 4294967295,6 0 0 2'
ip address add 10.77.0.1/24 broadcast + dev cbr0
ip address add fd77::1/64 dev cbr0 nodad
ip address add "$(linklocal cbr0)/64" dev cbr0 nodad
port "$state/attachments/podnet/d14d20b2d09.json" "$web"
ip link add ifbd14d20b2d09 mtu 1279 type ifb
ip link set ifbd14d20b2d09 alias tombolo:1:d14d20b2d09:podnet: up
shape ifbd14d20b2d09
shape vethd14d20b2d09
tc qdisc add dev vethd14d20b2d09 clsact
tc filter add dev vethd14d20b2d09 ingress pref 29807 protocol all u32 match u32 0 0 action mirred egress redirect dev ifbd14d20b2d09
dualstack "$web" 2
port "$state/attachments/podnet/2541f782573.json" "$plain"
dualstack "$plain" 3
bridge br0 "$(grep -o '"mac":"[^"]*' "$results/lan-leased-eth0" | head -n 1 | cut -d '"' -f 4)" 0
ip link add veth6d56852c328 type veth peer name vethd70b2d42750
ip link set veth6d56852c328 alias "tombolo:1:share share $(ip -o link show eth0 | cut -d: -f1) $(ip -br link show eth0 | grep -oE '([0-9a-f]{2}:){5}[0-9a-f]{2}')"
ip address add 192.168.50.2/24 dev eth0
ip route add default via 192.168.50.1
port "$state/attachments/lan/625c3dcd518.json" "$leased"
at "$leased" sysctl -qw net.ipv4.conf.eth0.arp_notify=1 net.ipv6.conf.eth0.accept_ra=0
at "$leased" ip link set eth0 up
at "$leased" ip address add 192.168.50.100/24 broadcast + dev eth0 valid_lft 3000 preferred_lft 3000
at "$leased" ip route add default via 192.168.50.1 dev eth0 proto 116 onlink
set_all ipv6.conf.br0.disable_ipv6=1
