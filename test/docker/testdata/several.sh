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
# The gateway priority of Docker 28 chooses instead, and may change it when a network is joined.
way() { docker exec web ip route | awk '/^default/ { print $3 }'; }
if [ "$(docker version -f '{{.Server.Version}}' | cut -d . -f 1)" -ge 28 ]; then
	for order in "name=pods,gw-priority=1 alan 10.9.0.1" "pods name=zlan,gw-priority=1 192.168.50.1" "name=zlan,gw-priority=2 name=pods,gw-priority=1 192.168.50.1"; do
		read -r first second want <<<"$order"
		run web --network $first --network $second -p 8080:80
		same "$order: $want" "$order: $(way)"
		same "$order: web" "$order: $(page 192.168.50.2 8080)"
		same "$order: web" "$order: $(beyond)"
		[ $want = 192.168.50.1 ] || same "$order: web" "$order: $(get 127.0.0.1 8080)"
		eventually within '2 attachments'
		docker rm -f web >/dev/null
	done
	run web --network zlan -p 8080:80
	docker network connect --gw-priority 1 pods web
	same "10.9.0.1 web" "$(way) $(page 192.168.50.2 8080)"
	docker network disconnect pods web
	same "192.168.50.1 web" "$(way) $(page 192.168.50.2 8080)"
	docker rm -f web >/dev/null
fi
# A container's address is nobody else's.
docker network create -d tombolo --subnet 192.168.50.0/24 --gateway 192.168.50.1 --ip-range 192.168.50.192/27 -o mode=lan -o uplink=eth0 -o name=given given >/dev/null
refused 'answers for it' docker run --rm --network given --ip 192.168.50.9 box true
refused "it is the host's own address" docker run --rm --network given --ip 192.168.50.2 box true
run own --network given --ip 192.168.50.200
holds reaches 192.168.50.200
clean
