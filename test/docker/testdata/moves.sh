# A server that no longer has the address has a lease move, and what goes by the address.
router; tombolod; dockerd; lan
run web --network lan -p 8080:80
was=$(ip_of web)
eventually within '1 attachment'
stop $DNSMASQ
: >/run/leases; : >/run/dnsmasq.log
router --dhcp-range=192.168.50.30,192.168.50.40,2m
for _ in $(seq 900); do grep -q '192.168.50.[34]' /run/leases && break; sleep 0.1; done # half of the lease is a minute
now=$(leased)
eventually eval "docker exec web ip addr show dev eth0 | grep -q $now/24"
never eval "docker exec web ip addr show dev eth0 | grep -q $was/24"
eventually within '1 attachment'
same web "$(page "$now")"
same web "$(page 192.168.50.2 8080)"
holds docker exec web ping -c 1 -W 2 198.51.100.1
same 1 "$(docker exec web ip route | grep -c default)"
clean
