# The commands of docs/lan.md, docs/getting-started.md, docs/coming-from.md and README.md, with what systemd does, and an
# image under the name of that which is pulled.
router; dockerd
modprobe() { same br_netfilter "$*"; }
systemctl() {
	case "$*" in
	"enable --now tombolod") SOCKET='' tombolod ;;
	"stop tombolod") stop $TOMBOLOD ;;
	"enable --now tombolo-docker.socket tombolod")
		[ -S $SOCKET ] && return
		"$PROXY" activate $SOCKET "$BIN/tombolod" >>/run/tombolod.log 2>&1 &
		MANAGER=$!
		eventually [ -S $SOCKET ] ;;
	*) fail "systemctl $*" ;;
	esac
}
# block PAGE TITLE [LINE] is the first block of commands below it that begins so.
block() { sed -n "/^##* $2\$/,\${/^\`\`\`sh/,/^\`\`\`\$/{/^${3:-[^\`]}/,/^\`\`\`\$/{/^\`\`\`\$/q;/^\`/!p}}}" "$BIN/$1.md"; }
tar -C /run/image -c . | docker import --change 'CMD ["sh", "-c", "echo docs >/tmp/index.html; httpd -f -h /tmp"]' - nginx:alpine >/dev/null
. <(block lan "From nothing to a container")
. <(block lan Docker) >/run/said
web=$(ip_of web home)
same docs "$(page "$web")"
holds grep -qE "^home +web +$(docker inspect -f '{{.NetworkSettings.Networks.home.EndpointID}}' web | cut -c 1-12) .* $web " /run/said
clean
same "no NIC is shared or taken over" "$(tombolo uplink status)"
docker tag nginx:alpine busybox
. <(block getting-started Docker) >/run/said
holds grep -q 'inet 10\.9\.0\.' /run/said
clean
for title in docker-net-dhcp/my-dhcp-net "Docker's macvlan, with or without a shim/lan" pipework/wire; do
	. <(block coming-from "${title%/*}") >/dev/null
	web=$(ip_of web "${title#*/}")
	same docs "$(page "$web")"
	same docs "$(get "$web" 80)"
	docker restart -t 0 web >/dev/null
	same "$web" "$(ip_of web "${title#*/}")"
	eventually reaches "$web"
	[ "${title#*/}" != lan ] || same 192.168.50.200 "$web"
	clean
done
# What ufw does with the rule, and what was so before it.
ufw() {
	same "route allow proto tcp from any to 10.80.0.2 port 80" "$*"
	same "" "$(laptop timeout 2 bash -c "$(declare -f get); get 192.168.50.2 8080" || true)"
	iptables -A FORWARD -p tcp -d 10.80.0.2 --dport 80 -j ACCEPT
}
. <(block coming-from ufw-docker) >/dev/null
same docs "$(page 192.168.50.2 8080)"
clean
# tombolod in a container of Docker's, which serves Docker.
stop $MANAGER
stop "$(cat /run/tombolod.pid)"
rm $SOCKET
curl() { bash "$BIN/archive.sh" tombolo:v0.1.0 "$(docker version -f '{{.Server.Arch}}')" "$BIN"; }
docker() { # docker grants --privileged only what tombolod needs of it: a machine of tests may lack the rest
	local some="--cap-add=SYS_ADMIN --cap-add=NET_ADMIN --cap-add=SYS_PTRACE --security-opt=seccomp=unconfined --security-opt=systempaths=unconfined"
	local args="${*@Q}"
	eval "command docker ${args/\'--privileged\'/$some}"
}
. <(block README "First pod" "curl -fL ") >/run/said
holds grep -q 'inet 10\.9\.0\.' /run/said
lan home
run web --network name=home,driver-opt=tombolo.name=web --restart always
run db --network pods --restart always -p 8081:80
tombolo() { docker exec tombolod tombolo "$@"; }
stop -9 $DOCKERD_PID
dockerd
eventually within '2 attachments'
same web "$(page "$(ip_of web home)")"
same db "$(page 192.168.50.2 8081)"
docker rm -f web db >/dev/null
docker network rm pods home >/dev/null
same "no pod is on record" "$(tombolo ls)"
