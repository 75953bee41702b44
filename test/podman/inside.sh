#!/bin/bash
# What run.sh runs in the root of a Debian 13: a host with the NIC eth0, a router with dnsmasq, and
# a laptop, all in one LAN.
#
# usage: inside.sh PART
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root

fail() { echo "$*" >&2; exit 1; }
want() { # want TEXT COMMAND...: it prints that
	local got
	got=$("${@:2}") || fail "failed: ${*:2}"
	[ "$got" = "$1" ] || fail "${*:2}: $got, and not $1"
}
says() { # says TEXT COMMAND...: it fails, and says that
	local got
	! got=$("${@:2}" 2>&1) || fail "no failure: ${*:2}"
	[[ $got == *"$1"* ]] || fail "${*:2}: $got"
}
within() { # within SECONDS COMMAND...: it succeeds by then
	local end=$((SECONDS + $1)) said
	until said=$("${@:2}" 2>&1); do
		[ $SECONDS -lt $end ] || fail "not within $1 s: ${*:2}: $said"
		sleep 0.1
	done
}

container() { # container NAME OPTION...: it serves its name
	podman run -d --name "$1" "${@:2}" busybox sh -c 'mkdir -p /www; hostname >/www/name; exec httpd -f -p 80 -h /www' >/dev/null
	until podman exec "$1" test -e /www/name; do sleep 0.05; done
}
address() { podman inspect -f "{{(index .NetworkSettings.Networks \"${2:-lan}\").IPAddress}}" "$1"; }
now() { tombolo ls | awk -v name="$1" '$2 == name { print $6 }'; } # as tombolo has it
id() { podman inspect -f '{{.Id}}' "$1" | cut -c 1-12; }
ask() { # ask [NAMESPACE] ADDRESS
	local in=()
	[ $# = 1 ] || in=(ip netns exec "$1")
	"${in[@]}" busybox wget -T 2 -q -O - "http://${!#}/name"
}
lease() { awk -v address="$1" '$3 == address { print $4 }' /tmp/leases; } # the host name that came with it

dhcp() { # dhcp FIRST LAST OPTION...
	ip netns exec router dnsmasq --port=0 --no-ping --interface=lan --bind-interfaces --dhcp-authoritative \
		--dhcp-range="192.168.77.$1,192.168.77.$2,${LEASE:-1h}" --dhcp-leasefile=/tmp/leases --pid-file=/tmp/dnsmasq.pid \
		--dhcp-option=option:dns-server,192.168.77.1 --dhcp-option=option:domain-search,home.lan "${@:3}"
}
keeper() {
	tombolod >>/tmp/tombolod.log 2>&1 &
	keeper=$!
	sleep 0.2
	kill -0 $keeper || fail "tombolod has ended: $(cat /tmp/tombolod.log)"
	within 5 test -S /run/tombolo/tombolod.sock
}

prepare() {
	mkdir -p /etc/containers /run/netns
	printf '[engine]\nevents_logger = "none"\n[containers]\ncgroups = "disabled"\nlog_driver = "k8s-file"\n' >/etc/containers/containers.conf
	printf '[storage]\ndriver = "vfs"\nrunroot = "/run/containers/storage"\ngraphroot = "/var/lib/containers/storage"\n' >/etc/containers/storage.conf
	ip link set lo up
	for name in router laptop; do ip netns add $name; done
	ip -n router link add lan type bridge
	for name in host laptop; do
		ip -n router link add $name type veth peer name eth0 netns $([ $name = host ] && echo 1 || echo $name)
		ip -n router link set $name master lan up
	done
	ip -n router address add 192.168.77.1/24 dev lan
	ip -n router link set lan up
	ip -n laptop address add 192.168.77.9/24 dev eth0
	ip -n laptop link set eth0 up
	ip -n laptop route add default via 192.168.77.1
	ip address add 192.168.77.5/24 dev eth0
	ip link set eth0 up
	ip route add default via 192.168.77.1
	mkdir -p /tmp/image/bin
	cp /bin/busybox /tmp/image/bin/
	for name in sh ip sleep httpd cat test mkdir hostname; do ln -s busybox /tmp/image/bin/$name; done
	tar -C /tmp/image -c . | podman import -q - busybox >/dev/null
	dhcp 50 250
	keeper
	[ "$1" = docs ] || podman network create -d tombolo -o mode=lan -o uplink=eth0 lan >/dev/null
	[ "$1" = docs ] || podman network create -d tombolo pods >/dev/null
}

# The pages' commands, with images of the names that are pulled there.
docs() {
	for name in nginx:alpine busybox:latest; do
		tar -C /tmp/image -c . | podman import -q --change 'CMD ["sh", "-c", "echo web >/name; exec httpd -f -h /"]' - "docker.io/library/$name" >/dev/null
	done
	for page in lan/home coming-from/webnetwork; do
		source "/${page%/*}.sh" >/dev/null
		within 5 ask laptop "$(address web "${page#*/}")"
		want web ask "$(address web "${page#*/}")"
		podman rm -f -t 0 web >/dev/null
	done
	[[ $(source /getting-started.sh) == *"inet 10."* ]] || fail "the container has no address"
	clean
}

# Nothing is left of any container.
clean() {
	want "no pod is on record" tombolo ls
	want "0 attachments: nothing differs" tombolo check
	! ip -oneline link show group 29807 | grep -o 'veth[0-9a-f]*' || fail "a port is left" # the uplink's pair stays
	want "" find /run/tombolo -path '*/attachments/*.json'
}

# A container on the LAN: others and the host reach it, and the router knows its name.
lan() {
	container web --network lan
	local ip
	ip=$(address web)
	want "$(id web)" ask laptop "$ip"
	want "$(id web)" ask "$ip"
	want web lease "$ip"
	want "$ip" now web
	want "search home.lan
nameserver 192.168.77.1" podman exec web cat /etc/resolv.conf
	podman restart -t 0 web >/dev/null
	want "$ip" address web
	podman stop -t 0 web >/dev/null
	clean
	want "" lease "$ip"
	podman start web >/dev/null
	want "$ip" address web
	podman rm -f -t 0 web >/dev/null

	# By MAC, and by name, the next container has the address again.
	podman network create -d tombolo -o mode=lan -o uplink=eth0 -o ipam.clientID=pod named >/dev/null
	for options in "--network lan --mac-address 02:00:00:00:00:77" "--network named"; do
		container db_1.x $options
		ip=$(now db_1.x)
		podman rm -f -t 0 db_1.x >/dev/null
		container other --network lan
		container db_1.x $options
		want "$ip" now db_1.x
		podman rm -f -t 0 db_1.x other >/dev/null
	done

	# Addresses that podman gives.
	podman network create -d tombolo -o mode=lan -o uplink=eth0 --subnet 192.168.77.0/24 --gateway 192.168.77.1 \
		--ip-range 192.168.77.32-192.168.77.40 given >/dev/null
	container web --network given
	want 192.168.77.32 address web given
	want "$(id web)" ask laptop 192.168.77.32
	podman rm -f -t 0 web >/dev/null
	container web --network given --ip 192.168.77.20
	want "$(id web)" ask laptop 192.168.77.20
	podman rm -f -t 0 web >/dev/null
	clean
}

# What cannot be is refused by name.
refused() {
	create() { podman network create -d tombolo "$@" bad; }
	says 'option "parent" is not known' create -o parent=eth0
	says 'needs an uplink' create -o mode=lan
	says 'the host has no such link' create -o mode=lan -o uplink=eth9
	says '--ipv6 needs' create --ipv6
	says 'internal is not for mode' create --internal -o mode=lan -o uplink=eth0
	says '--route' create --route 10.9.0.0/16,10.89.0.1
	says '--ipam-driver dhcp' create --ipam-driver dhcp
	says 'cannot set NetworkDNSServers' create --dns 192.0.2.1
	says 'lease their addresses' podman run --name web --network lan --ip 192.168.77.99 busybox sleep 1
	podman rm -f web >/dev/null
	kill $keeper
	wait $keeper || true
	says 'systemctl start tombolod' podman run --network lan --name web busybox sleep 1
	podman rm -f web >/dev/null
	clean
}

published() {
	container web --network pods -p 8080:80 -p 127.0.0.1:9000-9002:9000-9002/udp
	local ip
	ip=$(address web pods)
	want "$(id web)" ask laptop 192.168.77.5:8080
	want "$(id web)" ask 127.0.0.1:8080
	want 1 grep -c '127.0.0.1:9000-9002->9000-9002/udp' <(tombolo ls)
	says "address already in use" podman run --name two --network pods -p 8080:80 busybox sleep 1
	podman rm -f two >/dev/null
	# A container's own options.
	container one --network pods:publishFrom=fd77::/64,egressRate=8000000 -p 8083:80
	says "timed out" ask laptop 192.168.77.5:8083 # podman keeps the port by a socket that answers nobody
	want "$(id one)" ask 127.0.0.1:8083
	podman rm -f -t 0 one >/dev/null
	says 'publish is not known' podman run --name one --network pods:publish=lo busybox sleep 1
	podman rm -f one >/dev/null
	# Without the keeper, a reload brings the firewall back.
	kill $keeper
	wait $keeper || true
	nft flush ruleset
	podman network reload web >/dev/null
	want "$(id web)" ask 127.0.0.1:8080
	want "$ip" address web pods
	podman rm -f -t 0 web >/dev/null
	# Two families, and a network without a way out.
	podman network create -d tombolo --subnet 10.44.0.0/24 --subnet fd44::/64 two >/dev/null
	container web --network two -p 8081:80
	want "$(id web)" ask 127.0.0.1:8081
	want "$(id web)" ask "[$(podman inspect -f '{{.NetworkSettings.Networks.two.GlobalIPv6Address}}' web)]:80"
	podman rm -f -t 0 web >/dev/null
	# The next network of a subnet takes the place of one that podman has removed.
	podman network rm two >/dev/null
	podman network create -d tombolo --subnet 10.44.0.0/24 -o com.docker.network.bridge.enable_icc=false third >/dev/null
	container web --network third -p 8081:80
	want "$(id web)" ask 127.0.0.1:8081
	! tombolo ls networks | grep -q '^two ' || fail "the removed network is still there"
	says 'the pod has no address of that family' podman run --name bad --network third -p '[::]:8082:80' busybox sleep 1
	podman rm -f bad web -t 0 >/dev/null
	podman network create -d tombolo --internal inner >/dev/null
	container web --network inner
	! podman exec web ip route | grep default || fail "there is a way out"
	podman rm -f -t 0 web >/dev/null
	container web --network pods --ip "$ip" --mac-address 02:00:00:00:00:88
	want "$ip" address web pods
	podman exec web cat /sys/class/net/eth0/address | grep -qx 02:00:00:00:00:88
	podman rm -f -t 0 web >/dev/null
	clean
}

# Networks of podman's own are as open to ours as to each other. Where FORWARD drops what nobody admits, as beside
# Docker, ours reach none of them, and are reached as before.
others() {
	podman network create --subnet 10.55.0.0/24 --subnet fd55::/64 own >/dev/null
	podman network create --internal --subnet 10.56.0.0/24 --subnet fd56::/64 inner >/dev/null
	podman network create -o isolate=true --subnet 10.57.0.0/24 --subnet fd57::/64 alone >/dev/null
	podman network create -d tombolo --subnet 10.44.0.0/24 --subnet fd44::/64 two >/dev/null
	podman network create -d tombolo --internal --subnet 10.58.0.0/24 --subnet fd58::/64 shut >/dev/null
	for network in inner alone shut; do container $network --network $network; done
	container own --network own -p 8081:80
	container web --network two -p 8080:80
	pages() { # pages CONTAINER NETWORK...: what it reaches there, in both families
		local ip ns network
		ns=$(podman inspect -f '{{.NetworkSettings.SandboxKey}}' "$1")
		for network in "${@:2}"; do
			for ip in "$(address $network $network)" "[$(podman inspect -f "{{.NetworkSettings.Networks.$network.GlobalIPv6Address}}" $network)]"; do
				nsenter --net="$ns" busybox wget -T 1 -q -O - "http://$ip/name" 2>/dev/null || true
			done
		done
	}
	seen() { # seen CONTAINER [NETWORK]
		pages "$1" inner alone ${2-}
		[ -z "${2-}" ] || nsenter --net="$(podman inspect -f '{{.NetworkSettings.SandboxKey}}' "$1")" busybox wget -T 1 -q -O - http://192.168.77.5:8081/name 2>/dev/null || true
	}
	local open
	open=$(seen own)
	[[ $open == *"$(id alone)"* ]] || fail "podman's own networks reach: $open"
	want "$open" seen web
	for from in own web; do want "" pages $from shut; done # ours is closed to both
	want "$(id shut)" ask "$(address shut shut)"
	want "$(id own)" nsenter --net="$(podman inspect -f '{{.NetworkSettings.SandboxKey}}' web)" busybox wget -q -O - http://192.168.77.5:8081/name
	for family in ip ip6; do nft "add table $family filter; add chain $family filter FORWARD { type filter hook forward priority 0; policy drop; }"; done
	within 3 ask laptop 192.168.77.5:8080
	want "" seen web own
	want "$(id web)" ask laptop 192.168.77.5:8080
	podman rm -f -t 0 -a >/dev/null
	clean
}

# A container in two networks keeps its published port through podman's commands.
commands() {
	container web --network pods -p 8080:80
	podman network connect lan web
	local ip
	ip=$(address web)
	want "$(id web)" ask laptop "$ip"
	podman network reload web >/dev/null
	want "$ip" address web
	want "$(id web)" ask 127.0.0.1:8080
	podman network disconnect pods web
	want "$(id web)" ask 127.0.0.1:8080
	want "$ip" now web
	podman network connect pods web
	podman restart -t 0 web >/dev/null
	want "$ip" address web
	within 2 ask 127.0.0.1:8080
	podman rm -f -t 0 web >/dev/null
	clean
	podman network rm lan pods >/dev/null
	tombolo remove lan >/dev/null
	tombolo remove pods >/dev/null
	[[ $(ip -oneline address show eth0) == *" 192.168.77.5/24 "* ]] || fail "the NIC has not been given back"
}

# A container on the LAN and on the node answers at its published port, whichever network comes first.
several() {
	ip -n router link set lo up
	ip -n router address add 198.51.100.1/32 dev lo
	ip -n router route add 192.168.77.5 dev lan src 198.51.100.1 # as one beyond the router asks
	for order in "lan pods" "pods lan"; do
		container web --network "${order% *}" --network "${order#* }" -p 8080:80
		for from in "laptop 192.168.77.5" "router 192.168.77.5" 192.168.77.5 127.0.0.1; do want "$(id web)" ask ${from}:8080; done
		want "$(id web)" ask laptop "$(address web)"
		within 5 tombolo check
		podman rm -f -t 0 web >/dev/null
	done
	clean
}

# A plugin that kills: itself after some time, or the program that called it, before or after its work.
killer() {
	rm /usr/lib/netavark/tombolo
	cat >/usr/lib/netavark/tombolo <<-'END'
	#!/bin/bash
	plugin=/usr/lib/tombolo/tombolo-cni
	read -r verb who when 2>/dev/null </tmp/kill && [ "$1" = "$verb" ] && rm /tmp/kill || exec $plugin "$@"
	case $who in
	plugin) exec timeout -s KILL "$when" $plugin "$@" ;;
	netavark) pid=$PPID ;;
	podman) pid=$(cut -d ' ' -f 4 /proc/$PPID/stat) ;;
	esac
	[ $when = after ] || kill -9 $pid
	$plugin "$@"
	kill -9 $pid 2>/dev/null
	END
	chmod +x /usr/lib/netavark/tombolo
}
killed() { # killed VERB WHO WHEN: what the command that is killed leaves goes
	echo "$*" >/tmp/kill
	podman run -d --name web --network lan --network pods -p 8080:80 busybox sleep 1000 >/tmp/said 2>&1 || true
	[ "$1" = setup ] || podman rm -f -t 0 web >/tmp/said 2>&1 || true
	! test -e /tmp/kill || fail "not killed: $*"
	within 10 podman rm -f -i -t 0 web
	# podman that is killed forgets the namespace that it has made, with each driver.
	for ns in $(ls /run/netns | grep netns- || true); do ip netns delete "$ns"; done
	within 10 eval 'tombolo gc && clean'
}
kills() {
	killer
	for verb in setup teardown; do
		for when in 0.001 0.002 0.003 0.005 0.007 0.01 0.015 0.02; do killed $verb plugin $when; done
		for who in netavark podman; do
			for when in before after; do killed $verb $who $when; done
		done
	done
}

crowd() {
	local pids=() ips
	for i in $(seq 50); do
		podman run -d --name "c$i" --network lan busybox sleep 1000 >/dev/null &
		pids+=($!)
	done
	for pid in "${pids[@]}"; do wait "$pid" || fail "a container has not started"; done
	ips=$(tombolo ls | awk '$1 == "lan" { print $6 }' | sort -u | wc -l)
	[ "$ips" = 50 ] || fail "$ips addresses"
	want "50 attachments: nothing differs" tombolo check
	for i in $(seq 50); do podman rm -f -t 0 "c$i" >/dev/null & pids[i]=$!; done
	for i in $(seq 50); do wait "${pids[i]}"; done
	clean
	[ ! -s /tmp/leases ] || fail "leases are left: $(cat /tmp/leases)"
}

# A lease is renewed, and one that the server does not renew moves, with the published port.
# IPv6 from the LAN; what a container's own parameters say stands.
six() {
	kill "$(cat /tmp/dnsmasq.pid)"
	ip -n router address add fd77::1/64 dev lan nodad
	dhcp 50 250 --enable-ra --dhcp-range=fd77::100,fd77::1ff,slaac,64,1h
	within 10 eval "ip netns exec laptop ip -6 address | grep -q fd77"
	local how own
	for how in slaac dhcp; do
		podman network create -d tombolo -o mode=lan -o uplink=eth0 -o ipv6=$how $how >/dev/null
		container "web-$how" --network $how
		within 10 eval "tombolo ls | grep web-$how | grep -q fd77::.*ff:fe"
		for own in $(tombolo ls | grep "web-$how" | grep -oE 'fd77::[0-9a-f:]+'); do
			within 10 ip netns exec laptop busybox ping -6 -c 1 -W 2 "$own"
		done
	done
	tombolo ls | grep web-dhcp | grep -qE 'fd77::1[0-9a-f]{2},' || fail "no address by DHCPv6: $(tombolo ls)"
	container off --network dhcp --sysctl net.ipv6.conf.all.disable_ipv6=1
	container deaf --network slaac --sysctl net.ipv6.conf.eth0.accept_ra=0 --sysctl net.ipv6.conf.eth0.use_tempaddr=2
	sleep 3 # the keeper has looked
	want "" podman exec off ip -6 address
	want "0
2" podman exec deaf cat /proc/sys/net/ipv6/conf/eth0/accept_ra /proc/sys/net/ipv6/conf/eth0/use_tempaddr
	want "$(id off)" ask laptop "$(now off | cut -d , -f 1)"
	want "4 attachments: nothing differs" eval "tombolo check | tail -n 1" # with a note about off
	podman rm -f -t 0 web-slaac web-dhcp off deaf >/dev/null
	clean
}

leases() {
	kill "$(cat /tmp/dnsmasq.pid)"
	LEASE=2m dhcp 50 99 --dhcp-option=option:T1,5
	container web --network lan -p 8080:80
	local ip first
	ip=$(now web)
	first=$(cut -d ' ' -f 1 /tmp/leases)
	within 30 eval '[ "$(cut -d " " -f 1 /tmp/leases)" -gt '"$first"' ]'
	want "$ip" now web
	kill "$(cat /tmp/dnsmasq.pid)"
	rm /tmp/leases
	LEASE=2m dhcp 100 149 --dhcp-option=option:T1,5
	within 60 eval '[[ $(now web) == 192.168.77.1[0-4]? ]]'
	want "$(id web)" ask laptop "$(now web)"
	want "$(id web)" ask laptop 192.168.77.5:8080
	# The container dies with its keeper and with podman: the next keeper gives its lease back.
	kill -9 $keeper "$(podman inspect -f '{{.State.ConmonPid}}' web)" "$(podman inspect -f '{{.State.Pid}}' web)"
	wait $keeper || true # it has the leases' lock until it is gone
	ip netns delete "$(ls /run/netns | grep netns-)"
	keeper
	within 90 clean
	want "" cat /tmp/leases
}

rootless() {
	useradd -m user
	mkdir -p /run/user/1000
	chown user /run/user/1000
	as() { su user -s /bin/bash -c "cd; XDG_RUNTIME_DIR=/run/user/1000 podman $*"; }
	says 'run podman as root' as network create -d tombolo mine
}

prepare "$1"
"$1"
kill "$(cat /tmp/dnsmasq.pid)" || true
