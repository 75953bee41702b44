# A server that no longer has the address has a lease move, and what goes by the address.
router; tombolod; dockerd; lan
run web --network lan -p 8080:80
# Of another container Docker has the default route lead by another network, whatever its lease says.
docker network create -d tombolo --subnet 10.9.0.0/24 first >/dev/null
run both --network first
docker network connect lan both
# A route of the keeper's has the flag onlink, and Docker's has not: both lead to the router.
default() { docker exec "$1" ip route | grep default | sed 's/ onlink//' | xargs; }
same "default via 10.9.0.1 dev eth0" "$(default both)"
was=$(ip_of web)
eventually within '3 attachments'
stop $DNSMASQ
: >/run/leases; : >/run/dnsmasq.log
router --dhcp-range=192.168.50.30,192.168.50.40,2m
for _ in $(seq 900); do [ "$(grep -c '192.168.50.[34]' /run/leases)" = 2 ] && break; sleep 0.1; done # half of the lease is a minute
eventually [ "$(ip_of web)" = "$was" ] # Docker does not hear of it
now=$(tombolo ls | grep '8080->' | grep -oE '192[0-9.]+')
eventually eval "docker exec web ip addr show dev eth0 | grep -q $now/24"
never eval "docker exec web ip addr show dev eth0 | grep -q $was/24"
eventually within '3 attachments'
same web "$(page "$now")"
same web "$(page 192.168.50.2 8080)"
holds docker exec web ping -c 1 -W 2 198.51.100.1
same "default via 192.168.50.1 dev eth0" "$(default web)"
same "default via 10.9.0.1 dev eth0" "$(default both)"
eventually eval "docker exec both ip addr show dev eth1 | grep -q '192.168.50.[34].*/24'"
# The other network goes, and the lease's way out is taken.
docker network disconnect first both
same "default via 192.168.50.1 dev eth1" "$(default both)"
clean
