tombolod; router; dockerd
docker network create -d tombolo --subnet 10.9.0.0/24 pods >/dev/null
# Docker chooses the network by which a container goes out, and gives it the ports, by the order of names.
for lan in alan zlan; do docker network create -d tombolo --ipam-driver null -o mode=lan -o uplink=eth0 -o name=$lan $lan >/dev/null; done
ip -n router route add 192.168.50.2 dev eth0 src 198.51.100.1
beyond() { ip netns exec router timeout 5 bash -c "$(declare -f get); get 192.168.50.2 8080"; }
for order in "pods alan" "pods zlan" "alan pods" "zlan pods"; do
	run web --network "${order% *}" -p 8080:80
	docker network connect "${order#* }" web
	same "$order: web" "$order: $(page 192.168.50.2 8080)"
	same "$order: web" "$order: $(get 192.168.50.2 8080)"
	same "$order: web" "$order: $(beyond)"
	[[ $order != *zlan* ]] || same "$order: web" "$order: $(get 127.0.0.1 8080)" # the node's network has the port
	eventually within '2 attachments'
	tombolo repair >/dev/null
	same "$order: web" "$order: $(page 192.168.50.2 8080)"
	# The ports follow when a network is left.
	docker network disconnect "${order#* }" web
	same "$order: web" "$order: $(page 192.168.50.2 8080)"
	docker rm -f web >/dev/null
done
# A container's address is nobody else's.
docker network create -d tombolo --subnet 192.168.50.0/24 --gateway 192.168.50.1 --ip-range 192.168.50.192/27 -o mode=lan -o uplink=eth0 -o name=given given >/dev/null
refused 'answers for it' docker run --rm --network given --ip 192.168.50.9 box true
refused "it is the host's own address" docker run --rm --network given --ip 192.168.50.2 box true
run own --network given --ip 192.168.50.200
holds reaches 192.168.50.200
clean
