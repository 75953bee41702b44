router; tombolod; dockerd; lan
docker run -d --name any --restart always --network lan -p 8080:80 box sleep 10000 >/dev/null
docker run -d --name named --restart always --network name=lan,driver-opt=tombolo.name=named box sleep 10000 >/dev/null
named=$(ip_of named)
both() {
	eventually eval '[ "$(docker ps -q | wc -l)" = 2 ]'
	same "$named" "$(ip_of named)"
	eventually reaches "$named"
	eventually reaches "$(ip_of any)"
	tombolo gc >/dev/null
	eventually within '2 attachments'
}
both
stop $DOCKERD_PID; same "" "$(ip -o link show group 29807 | grep -oE 'veth[0-9a-f]{11}' || true)"; dockerd; both
# What was in a container may hold its namespace for a while, and a container with a MAC of its own waits for it.
pid=$(docker inspect -f '{{.State.Pid}}' named)
nsenter -t "$pid" -n sleep 5 &
stop -9 $DOCKERD_PID; dockerd; both
# tombolod comes later than dockerd, which waits.
stop $DOCKERD_PID; stop $TOMBOLOD
(sleep 2; exec setsid bash -c "$BIN/tombolod --docker $SOCKET >>/run/tombolod.log 2>&1 & echo \$! >/run/tombolod.pid") &
dockerd; TOMBOLOD=$(cat /run/tombolod.pid); both
# With live-restore containers go on.
stop $DOCKERD_PID; dockerd --live-restore; both
any=$(ip_of any)
for how in -15 -9; do
	stop $how $DOCKERD_PID
	holds reaches "$any"
	dockerd --live-restore; both
	same "$any" "$(ip_of any)"
	docker restart -t 0 any >/dev/null; both
	any=$(ip_of any)
done
# A reboot: what Docker keeps is there, and nothing of what the kernel and /run had.
reboot() { # reboot ID
	kill -9 $DOCKERD_PID $CONTAINERD $(cat /run/tombolod.pid)
	pkill -9 -f '^sleep 10000' || true
	pkill -9 containerd-shim || true
	eventually eval '! pgrep containerd-shim'
	for mount in $(grep -oE '/run/docker/[^ ]+' /proc/mounts); do umount -l "$mount" || true; done
	ip link del br0; ip link del docker0; ip link del veth6d56852c328
	ip link set eth0 promisc off; ip addr flush dev eth0
	nft flush ruleset
	address
	mv /run/leases /run/dnsmasq.log / ; rm -rf /run/tombolo /run/docker /run/containerd; mv /leases /dnsmasq.log /run/
	mkdir -p /run/docker/plugins /run/containerd
	umount /proc/sys/kernel/random/boot_id 2>/dev/null || true
	echo "$1" >/run/boot
	mount --bind /run/boot /proc/sys/kernel/random/boot_id
}
reboot 00000000-0000-0000-0000-000000000000
tombolod; dockerd; both
eventually eval '[ "$(grep -c . /run/leases)" = 2 ]' # that of the earlier boot was given back
# A power cut: the router is silent for longer than dockerd waits.
stop $DNSMASQ
reboot 00000000-0000-0000-0000-000000000001
tombolod; dockerd
same "$named" "$(ip_of named)"
same exited "$(docker inspect -f '{{.State.Status}}' any)"
unconfirmed() { tombolo leases | grep -E 'which no server has confirmed yet|not renewed yet'; }
holds unconfirmed
router
eval "$(sed -n 's/^ExecStart=\(.*docker start\) web$/\1 any/p' "$BIN/lan.md")"
both
for _ in 1 2 3 4; do unconfirmed >/dev/null || break; sleep 10; done
never unconfirmed
clean
