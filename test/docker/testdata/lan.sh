router --dhcp-range=192.168.50.100,192.168.50.200,2m --dhcp-option=option:classless-static-route,0.0.0.0/0,192.168.50.1,10.77.0.0/16,192.168.50.9
tombolod; dockerd; lan
# A machine of the LAN.
run web --cap-add NET_ADMIN --network lan -p 8080:80 -p 0.0.0.0:8081:80 -p '[::]:8081:80'
holds within '1 attachment' # also while Docker sets it up
web=$(ip_of web)
same "$web" "$(leased)"
same web "$(page "$web")"
for port in 8080 8081; do same web "$(page 192.168.50.2 $port)"; done
holds docker exec web ping -c 1 -W 2 198.51.100.1
# What the lease comes to is in the container, as the keeper makes it, and so it is when tombolod has been away.
eventually eval "docker exec web ip addr show dev eth0 | grep -q 'valid_lft 1[0-9]*sec'"
holds eval "docker exec web ip route | grep -q 'default via 192.168.50.1 dev eth0'"
holds eval "docker exec web ip route | grep -q '10.77.0.0/16 via 192.168.50.9 dev eth0'"
eventually within '1 attachment'
same "$web" "$(tombolo ls | sed -n 2p | grep -oE '192[0-9.]+')"
stop -9 $TOMBOLOD; tombolod
eventually within '1 attachment'
docker exec web ip link set eth0 down
docker exec web ip link set eth0 up
tombolo repair
eventually within '1 attachment'
same web "$(page "$web")"
# By the host there is a way to a next hop that nobody has.
docker network create -d tombolo -o mode=lan -o uplink=eth0 -o name=routed -o defaultRoute=host --ipam-driver null routed >/dev/null
run other --network routed
eventually eval "docker exec other ip route | grep -q 'default via 169.254.1.1 dev eth0'"
eventually docker exec other ping -c 1 -W 2 198.51.100.1
docker rm -f web other >/dev/null
# A virtual machine on the bridge keeps it, and its LAN.
docker network rm routed >/dev/null
ip tuntap add vnet0 mode tap
ip link set vnet0 master br0
docker network prune -f >/dev/null # Docker takes no refusal
holds grep -q 'ip link set vnet0 nomaster' /run/tombolod.log
holds eval "ip link show master br0 | grep veth6d56852c328 >/dev/null"
refused 'ip link set vnet0 nomaster' tombolo remove lan
ip link del vnet0
refused 'remove it by `tombolo remove lan`' lan
tombolo remove lan
same "" "$(leased)" # it was given back
nothing_left
never grep -E 'panic|DATA RACE' /run/tombolod.log
