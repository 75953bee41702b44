# dockerd and tombolod are killed at each call of the driver: before it is carried out, amid, and after, by a proxy between.
# Docker 29 keeps the namespace of a container that it was killed at starting or stopping for a while, and then its host
# port is refused to others.
SOCKET=/run/tombolo-docker.sock
router; tombolod
"$PROXY" /run/docker/plugins/tombolo.sock $SOCKET &
dockerd; lan
kills() { # kills WHO WHEN METHOD COMMAND...
	echo "$2 $3 /run/$1.pid" >/run/kill
	"${@:4}" >/dev/null 2>&1 &
	local command=$!
	eventually [ ! -e /run/kill ]
	case $1 in dockerd) stop -9 $DOCKERD_PID; dockerd ;; tombolod) stop -9 $TOMBOLOD; tombolod ;; esac
	wait $command || true
}
rest() { # The next dockerd has what is in no container taken down, and so has tombolod after a while.
	local all
	all=$(docker ps -aq)
	[ -z "$all" ] || docker rm -f $all >/dev/null 2>&1 || docker rm -f $all >/dev/null
	stop -9 $DOCKERD_PID; dockerd
	docker run --rm --network lan box true
	tombolo gc >/dev/null
	eventually within '0 attachments'
	same "" "$(leased)"
	same "" "$(ip -o link show group 29807 | grep -oE ' (veth[0-9a-f]{11}|ts-[0-9a-f]+)' || true)"
}
for who in dockerd tombolod; do
	for when in before amid after; do
		for method in CreateEndpoint Join ProgramExternalConnectivity; do
			kills $who $when $method run web --network lan -p 8080:80
			docker rm -f web >/dev/null 2>&1 || true
			run again --network lan -p 8080:80
			same again "$(page 192.168.50.2 8080)"
			rest
		done
		for method in Leave DeleteEndpoint; do
			run web --network lan -p 8080:80
			kills $who $when $method docker rm -f web
			run again --network lan -p 8080:80
			same again "$(page 192.168.50.2 8080)"
			rest
		done
		kills $who $when DeleteNetwork docker network rm lan
		docker network rm lan >/dev/null 2>&1 || true
		kills $who $when CreateNetwork lan
		if ! docker network inspect lan >/dev/null 2>&1; then
			rm -f /var/lib/tombolo/docker/*.json # as the errors of the next advise, where Docker forgot it
			tombolo remove lan >/dev/null 2>&1 || true
			lan
		fi
	done
done
clean
