# IPv6 from the LAN. The laptop is a Thread border router: its advertisements have a route, and make it no default router.
router --dhcp-range=192.168.50.100,192.168.50.200,2m --dhcp-range=2001:db8:a::100,2001:db8:a::1ff,64,2m
tombolod; dockerd
network() { docker network create -d tombolo -o mode=lan -o uplink=eth0 -o "name=$1" --ipam-driver null "${@:2}" "$1" >/dev/null; }
six() { docker exec "$1" ping -6 -c 1 -W 2 "$2"; }
has() { docker exec "$1" ip -6 "${@:2}"; }
shown() { tombolo ls | grep " $(docker inspect -f '{{range .NetworkSettings.Networks}}{{printf "%.12s" .EndpointID}}{{end}}' "$1") "; }
# works CONTAINER: it reaches what is beyond both routers, and the laptop reaches each of its addresses.
works() {
	eventually six "$1" 2001:db8:ffff::1
	eventually six "$1" fd11:22:33:44::5
	eventually eval "shown $1 | grep -q 192.168.50.*,2001:db8:a:"
	for own in $(shown "$1" | grep -oE '2001:db8:a:[0-9a-f:]+'); do eventually laptop busybox ping -6 -c 1 -W 2 "$own"; done
}
for n in router laptop; do ip netns exec $n sysctl -qw net.ipv6.conf.all.forwarding=1; done
ip -n router addr add 2001:db8:a::1/64 dev eth0 nodad
ip -n router addr add 2001:db8:ffff::1/128 dev lo
ip -n laptop addr add 2001:db8:a::9/64 dev eth0 nodad
ip -n laptop addr add fd11:22:33:44::5/128 dev lo
network lan -o ipv6=slaac
run early --network lan
global="addr show dev eth0 scope global"
if [ "$(docker version -f '{{.Server.Version}}' | cut -d . -f 1)" -lt 28 ]; then
	run off --network lan --sysctl net.ipv6.conf.all.disable_ipv6=1
	run deaf --network lan --sysctl net.ipv6.conf.eth0.accept_ra=0
else
	for name in off deaf; do run $name --network name=lan,driver-opt=com.docker.network.endpoint.sysctls=net.ipv6.conf.IFNAME.accept_ra=0; done
	all=$global
fi
# The routers begin to advertise after the first containers have started.
advertise() {
	echo "interface eth0 { AdvSendAdvert on; MinRtrAdvInterval 3; MaxRtrAdvInterval 4; $2 };" >/run/$1.conf
	ip netns exec $1 radvd -n -C /run/$1.conf -p /run/$1.radvd -m none &
}
advertise router "AdvManagedFlag on; prefix 2001:db8:a::/64 { };"
advertise laptop "AdvDefaultLifetime 0; route fd11:22:33:44::/64 { };"
network leased -o ipv6=dhcp
run leased --network leased
# The host has it as without Tombolo.
eventually eval "ip -6 addr show dev eth0 | grep -q 'inet6 2001:db8:a:' && ip -6 route | grep -q 'default via fe80'"
works early
works leased
eventually eval "has leased addr show dev eth0 | grep -q '2001:db8:a::1../128'"
# What a container's own parameters say stands.
same "" "$(has off ${all:-addr})$(has deaf $global)$(has deaf route | grep -E 'default|fd11' || true)"
holds docker exec off ping -c 1 -W 2 198.51.100.1
eventually within '4 attachments'
docker restart -t 0 early >/dev/null
works early
docker rm -f leased >/dev/null
eventually eval "! grep -q '2001:db8:a::1..' /run/leases" # the server hears the RELEASE a little later
clean
# By the host there is one default route, and the border router's besides.
network routed -o ipv6=slaac -o defaultRoute=host
run routed --network routed
works routed
holds eval "has routed route | grep -q 'default via fe80::746f:6d62:6f6c:6f '"
same 1 "$(has routed route | grep -c default)"
eventually within '1 attachment'
clean
