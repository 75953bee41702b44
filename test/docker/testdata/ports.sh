# The time of docker run with so many published ports, with Tombolo's driver and with Docker's, in turns: lines for
# bench/report. Docker's starts no proxies here, of which it needs one for each port. It had 2,850 of 10,000 after five minutes.
tombolod; dockerd --userland-proxy=false
docker network create -d tombolo --subnet 10.9.0.0/24 tombolo >/dev/null
docker network create docker >/dev/null
# once CONTENDER PORTS sets ns.
once() {
	local begin=${EPOCHREALTIME/./} range=20001-$((20000 + $2))
	run web --network $1 -p $range:$range/udp -p 8080:80
	ns=$(((${EPOCHREALTIME/./} - begin) * 1000))
	same web "$(page 192.168.50.2 8080)"
	docker rm -f web >/dev/null
}
for ports in $(for round in 1 2 3 4 5; do echo 1 200 10000; done); do
	line=BenchmarkExec/scenario=docker-ports-$ports/contender over=
	if [ $ports != 10000 ]; then
		once docker $ports && theirs=$ns
		echo "$line=docker 1 $theirs ns/op"
	fi
	once tombolo $ports
	[ $ports = 10000 ] || over="$(awk "BEGIN { print $ns / $theirs }") ADD/docker"
	echo "$line=tombolo 1 $ns ns/op $over"
done
clean
