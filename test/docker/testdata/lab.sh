# A machine with Docker, and its LAN: namespaces for mounts, processes and the network, in which the test runs this, and
# after it a case, which is the argument. In the environment: BIN, the directory of the programs; DATA, an empty one on
# a disk; PROXY, the program of the test.
#
#   host eth0 ---- switch ---- router: 192.168.50.1, dnsmasq; 198.51.100.1 is behind it
#   192.168.50.2      `------- laptop: 192.168.50.9
set -eEuo pipefail
export PATH=/usr/bin:/usr/sbin:/bin:/sbin

fail() {
	echo "FAILED in line ${BASH_LINENO[1]}: $*"
	for log in tombolod dockerd; do
		echo "--- $log" && grep -v level=info "/run/$log.log" | tail -n 12 | cut -c 1-500 || true
	done
	exit 1
}
trap 'fail "$BASH_COMMAND"' ERR
SOCKET=/run/docker/plugins/tombolo.sock # of tombolod

# same WANT GOT
same() { [ "$1" = "$2" ] || fail "got '$2', want '$1'"; }
differ() { [ "$1" != "$2" ] || fail "got '$2' twice"; }
# eventually COMMAND... waits until it succeeds, for 10 s.
eventually() { for _ in $(seq 100); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done; fail "not in 10 s: $*"; }
holds() { "$@" >/dev/null 2>&1 || fail "not so: $*"; }
never() { ! "$@" >/dev/null 2>&1 || fail "so: $*"; }

refused() { local said; said=$("${@:2}" 2>&1 || true); case $said in *"$1"*) ;; *) fail "got '$said', want '$1'" ;; esac; }

laptop() { ip netns exec laptop "$@"; }
reaches() { laptop busybox ping -c 1 -W 2 "$1"; }
# page HOST [PORT] has a moment for the program to listen; get is from here.
page() { for _ in 1 2 3 4 5 6 7 8; do laptop bash -c "$(declare -f get); get $1 ${2:-80}" 2>/dev/null && return; sleep 0.2; done; }
get() { exec 3<>"/dev/tcp/$1/$2" && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && timeout 3 tail -n 1 <&3; }
tombolo() { "$BIN/tombolo" "$@"; }
within() { tombolo check | grep -qx "$1: nothing differs"; }

machine() {
	mount -t tmpfs tmpfs /run
	mkdir -p /run/docker/plugins /run/containerd /var/lib/docker /var/lib/tombolo /etc/docker
	mount --make-shared /run
	mount -t tmpfs tmpfs /var/lib/docker
	mount -t tmpfs tmpfs /etc/docker
	mount --bind "$DATA" /var/lib/tombolo
	ip link set lo up
	for n in switch router laptop; do ip netns add $n; done
	ip -n switch link add br0 up type bridge forward_delay 0
	ip -n switch link add host0 up master br0 type veth peer name eth0 netns $$
	for n in router laptop; do
		ip -n switch link add ${n}0 up master br0 type veth peer name eth0 netns $n
		ip -n $n link set eth0 up
		ip -n $n link set lo up
	done
	ip -n router addr add 192.168.50.1/24 dev eth0
	ip -n router addr add 198.51.100.1/32 dev lo
	ip -n laptop addr add 192.168.50.9/24 dev eth0
	address
}
address() {
	ip link set eth0 up
	ip addr add 192.168.50.2/24 dev eth0
	ip route add default via 192.168.50.1
}

# router [OPTION...] serves leases of two minutes, the shortest that dnsmasq has.
router() {
	ip netns exec router dnsmasq --no-daemon --conf-file=/dev/null --port=0 --interface=eth0 --bind-interfaces --no-ping \
		--dhcp-authoritative --log-dhcp --dhcp-leasefile=/run/leases "${@:---dhcp-range=192.168.50.100,192.168.50.200,2m}" >>/run/dnsmasq.log 2>&1 &
	DNSMASQ=$!
	eventually grep -q 'DHCP, IP range' /run/dnsmasq.log
}

tombolod() {
	rm -f /run/tombolo/tombolod.sock
	"$BIN/tombolod" --docker "$SOCKET" >>/run/tombolod.log 2>&1 &
	TOMBOLOD=$!
	echo $TOMBOLOD >/run/tombolod.pid
	eventually [ -S /run/tombolo/tombolod.sock ]
}

dockerd() {
	if [ ! -S /run/containerd/containerd.sock ]; then
		containerd --config /dev/null --state /run/containerd --root /var/lib/docker/containerd0 >>/run/containerd.log 2>&1 &
		CONTAINERD=$!
		eventually [ -S /run/containerd/containerd.sock ]
	fi
	rm -f /run/docker.pid
	"${DOCKERD:-/usr/sbin/dockerd}" --storage-driver vfs --containerd /run/containerd/containerd.sock "$@" >>/run/dockerd.log 2>&1 &
	DOCKERD_PID=$!
	echo $DOCKERD_PID >/run/dockerd.pid
	for _ in $(seq 300); do docker version >/dev/null 2>&1 && break; sleep 0.1; done
	docker image inspect box >/dev/null 2>&1 || image
}

# stop [-9] PID
stop() { kill "$@" 2>/dev/null || true; wait "${@: -1}" 2>/dev/null || true; }

image() {
	mkdir -p /run/image/bin /run/image/tmp
	cp /bin/busybox /run/image/bin/
	for name in sh sleep ip httpd ping wget true; do ln -sf busybox /run/image/bin/$name; done
	tar -C /run/image -c . | docker import - box >/dev/null
}

lan() { docker network create -d tombolo -o mode=lan -o uplink=eth0 -o "name=${1:-lan}" --ipam-driver null "${1:-lan}" >/dev/null; }
# run NAME OPTION... is a container that says its name as a page.
run() { docker run -d --name "$@" box sh -c "echo $1 >/tmp/index.html; httpd -f -p 80 -h /tmp" >/dev/null; }
# ip_of CONTAINER [NETWORK]
ip_of() { docker inspect -f "{{with index .NetworkSettings.Networks \"${2:-lan}\"}}{{.IPAddress}}{{end}}" "$1"; }
leased() { cut -d ' ' -f 3 /run/leases | sort; }

# nothing_left is when containers and networks are gone; a lease by a name is remembered.
nothing_left() {
	same "" "$(ip -o link | grep -oE ' (veth[0-9a-f]{11}|t[sb]-[0-9a-f]+)' || true)"
	same "" "$(find /run/tombolo/attachments /run/tombolo/networks /var/lib/tombolo/docker -name '*.json*' 2>/dev/null)"
	same "" "$(grep -L '"sticky"' /var/lib/tombolo/leases/*.json 2>/dev/null || true)"
	never nft list table inet tombolo
	same 192.168.50.2/24 "$(ip -4 -o addr show dev eth0 | grep -oE '192[0-9./]+/24')"
}
clean() {
	local all
	all=$(docker ps -aq)
	[ -z "$all" ] || docker rm -f $all >/dev/null
	docker network rm $(docker network ls -q -f driver=tombolo) >/dev/null
	nothing_left
	never grep -E 'panic|DATA RACE' /run/tombolod.log
}

machine
. "$1"
