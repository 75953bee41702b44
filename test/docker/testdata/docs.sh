# The commands of docs/lan.md and docs/getting-started.md, with what systemd does, and an image under the name of that which is pulled.
router; dockerd
make() { same install "$*"; }
modprobe() { same br_netfilter "$*"; }
systemctl() {
	case "$*" in
	"enable --now tombolod") SOCKET='' tombolod ;;
	"stop tombolod") stop $TOMBOLOD ;;
	"enable --now tombolo-docker.socket tombolod")
		[ -S $SOCKET ] && return
		"$PROXY" activate $SOCKET "$BIN/tombolod" >>/run/tombolod.log 2>&1 &
		eventually [ -S $SOCKET ] ;;
	*) fail "systemctl $*" ;;
	esac
}
# block PAGE TITLE is the first block of commands below it.
block() { sed -n "/^##* $2\$/,\${/^\`\`\`sh/,/^\`\`\`\$/{/^\`\`\`\$/q;/^\`/!p}}" "$BIN/$1.md"; }
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
