tombolod; dockerd
docker network create -d tombolo --subnet 10.9.0.0/24 --subnet fd09::/64 --ipv6 -o ingressRate=100000000 net1 >/dev/null
docker network create -d tombolo --subnet 10.8.0.0/24 --subnet fd08::/64 --ipv6 net2 >/dev/null
docker network create -d tombolo --subnet 10.7.0.0/24 --internal alone >/dev/null
ip -n router route add 10.0.0.0/8 via 192.168.50.2 # nobody of the LAN goes there: it is masqueraded
# As compose makes them: two networks, and the ports of one container.
run web --network net1 -p 8080:80 -p 127.0.0.1:8083:80
run db --network net2
docker network connect net2 web
run shut --network alone
same web "$(page 192.168.50.2 8080)"
same web "$(get 127.0.0.1 8083)"
holds docker exec web ping -c 1 -W 2 "$(ip_of db net2)"
holds docker exec web ping -c 1 -W 2 198.51.100.1
holds docker exec db ping -c 1 -W 2 fd08::1
never docker exec shut ping -c 1 -W 1 198.51.100.1
eventually within '4 attachments'
tombolo repair
same "default via 10.9.0.1 dev eth0" "$(docker exec web ip route | grep default | xargs)"
# The ports follow the network by which the container goes out.
docker network disconnect net1 web
same "default via 10.8.0.1 dev eth1" "$(docker exec web ip route | grep default | xargs)"
same web "$(page 192.168.50.2 8080)"
docker network connect net1 web
same web "$(page 192.168.50.2 8080)"
eventually within '4 attachments'
# Docker's own networks stay as closed for ours as for each other, and what they publish stays open; the reverse too.
docker network create --subnet 10.3.0.0/24 own >/dev/null
docker network create --subnet 10.2.0.0/24 --internal secret >/dev/null
run theirs --network own -p 8085:80
run closed --network own
run kept --network secret
run stranger
# seen CONTAINER HOST PORT is the page there; nothing if there is no way.
seen() { { docker exec -i "$1" sh -c "printf 'GET / HTTP/1.0\\r\\n\\r\\n' | busybox nc -w 1 $2 $3" || true; } | tail -n 1; }
eventually get 192.168.50.2 8085
for from in web stranger; do
	same "" "$(seen $from "$(ip_of closed own)" 80)"
	same "" "$(seen $from "$(ip_of kept secret)" 80)"
	same theirs "$(seen $from 192.168.50.2 8085)"
done
for from in web theirs stranger; do same "" "$(seen $from "$(ip_of shut alone)" 80)"; done # ours is closed both ways, too
run open --network alone
same open "$(seen shut "$(ip_of open alone)" 80)"
same shut "$(get "$(ip_of shut alone)" 80)" # by the host
# A container may have a policy of its own: it answers, and calls nobody.
run agent --network name=net1,driver-opt=tombolo.egressPolicy=replies,driver-opt=tombolo.publishFrom=10.0.0.0/8 -p 8086:80
same agent "$(seen web 192.168.50.2 8086)"
same agent "$(get 192.168.50.2 8086)" # by the host
same "" "$(page 192.168.50.2 8086)"
same agent "$(seen web "$(ip_of agent net1)" 80)"
same "" "$(seen agent "$(ip_of web net1)" 80)"
never docker exec agent ping -c 1 -W 1 198.51.100.1
refused 'no prefix and no address' docker run --rm --network name=net1,driver-opt=tombolo.egressPolicy=here box true
for from in theirs stranger; do same web "$(seen $from 192.168.50.2 8080)"; done
same "" "$(seen kept "$(ip_of db net2)" 80)"
# A port that Docker's own bridge publishes too is told of, whichever comes first.
refused '0.0.0.0:8085/tcp is in use by docker-proxy' docker run --rm --network net1 -p 8085:80 box true
docker run -d --name second -p 8080:80 box sleep 1000 >/dev/null
for command in status check; do holds eval "{ tombolo $command || true; } | grep -F '0.0.0.0:8080/tcp is in use by docker-proxy'"; done
docker rm -f second >/dev/null
# Options of Docker's bridge driver, and of a container alone.
docker network create -d tombolo --subnet 10.1.0.0/24 -o name=carried -o com.docker.network.bridge.name=carried0 -o com.docker.network.driver.mtu=1400 \
	-o com.docker.network.container_iface_prefix=net -o com.docker.network.bridge.enable_icc=false carried >/dev/null
run one --network carried
run two --network name=carried,driver-opt=tombolo.egressRate=8000000,driver-opt=tombolo.guard=true
holds eval "docker exec one ip link show dev net0 | grep 'mtu 1400'"
holds ip -d link show dev carried0
holds docker exec one ping -c 1 -W 2 198.51.100.1
never docker exec one ping -c 1 -W 1 "$(ip_of two carried)"
has() { tombolo ls --json --network carried | grep -oE "$1" | wc -l; }
same 1 "$(has '"rate": ?8000000')"
same 1 "$(has '"guard": ?"addresses"')"
run three --network carried # without a guard, after one that has
eventually within '9 attachments'
docker rm -f one two three >/dev/null
refused 'name the address with each port' docker network create -d tombolo -o com.docker.network.bridge.host_binding_ipv4=127.0.0.1 --subnet 10.0.0.0/24 x
# What cannot be is said.
docker network create -d tombolo --subnet 10.4.0.0/24 four >/dev/null
refused 'name the one port of the host' docker run --rm --network net1 -p 80 box true
for ip in :: fd09::1; do refused 'the pod has no address of that family' docker run --rm --network four -p "[$ip]:8084:80" box true; done
refused 'has no subnet' docker network create -d tombolo --ipam-driver null x
refused 'option "colour" is not known' docker network create -d tombolo -o colour=red --subnet 10.6.0.0/24 x
docker network create -d tombolo -o name=same --subnet 10.6.0.0/24 same1 >/dev/null
refused 'has that name' docker network create -d tombolo -o name=same --subnet 10.5.0.0/24 same2
refused 'name --ipam-driver null' docker network create -d tombolo -o mode=lan -o uplink=eth0 x
refused 'internal is not for mode' docker network create -d tombolo -o mode=lan -o uplink=eth0 --ipam-driver null --internal x
refused 'eth7' docker network create -d tombolo -o mode=lan -o uplink=eth7 --ipam-driver null x
# A network that was deleted without tombolod keeps its name, until what the error advises is done.
run last --network same1
docker rm -f last >/dev/null
stop $TOMBOLOD
docker network rm same1 >/dev/null
tombolod
said=$(docker network create -d tombolo -o name=same --subnet 10.5.0.0/24 same2 2>&1 || true)
rm "$(grep -oE '/[^ ]+\.json' <<<"$said")"
eval "$(grep -oE 'tombolo remove [a-z]+' <<<"$said")"
docker network create -d tombolo -o name=same --subnet 10.5.0.0/24 same2 >/dev/null
run last --network same2
clean
