#!/usr/bin/env bash
# The cluster that README.md describes.
#
# usage: cluster.sh up | down               down leaves what is built
#        cluster.sh kubectl ...
#        cluster.sh in N COMMAND...         runs it in the namespaces of node N
#        cluster.sh cut N | boot N          as a power cut does; a node's disk stays
#        cluster.sh kill | start N PROGRAM  containerd, kubelet, kube-proxy or policies (kube-network-policies)
#        cluster.sh proxy N MODE            kube-proxy cleans up, and starts in that mode
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
repo=$(cd "$(dirname "$0")/../.." && pwd)
here=$repo/test/cluster
DIR=${CLUSTER_DIR:-$repo/.cache/cluster}
CONTAINERD=${CONTAINERD:-1} # of the nodes: 1, the distribution's, or 2
ROUTES=${ROUTES:-static}    # between the nodes: static, or bird
PROXY=${PROXY:-nftables}    # kube-proxy's mode: nftables, iptables or legacy
FAMILIES=${FAMILIES:-46}    # of pods, Services and nodes: 46, or 6 alone
MODE=${MODE:-gateway}       # of the pods' network: gateway, lan with eth0 as uplink, or port: lan with eth0 on the bridge
[ ! -e "$DIR/run/settings" ] || . "$DIR/run/settings" # those of the cluster that is up
[ "$CONTAINERD" != 2 ] || PATH=$DIR/bin2:$PATH

# All of these are in namespaces of the cluster's own, so that they collide with nothing of the machine.
CONTROL4=192.0.2.10 CONTROL6=2001:db8:1::10   # the control plane
OUTSIDE4=192.0.2.100 OUTSIDE6=2001:db8:1::100 # the client outside, and the nodes' default route
CIDRS=10.244.0.0/16,fd24::/48 SERVICES=10.96.0.0/16,fd96::/112
DNS=10.96.0.10 CONTROL=$CONTROL4 SERVER=https://$CONTROL4:6443
if [ "$FAMILIES" = 6 ]; then
	CIDRS=fd24::/48 SERVICES=fd96::/112 DNS=fd96::a CONTROL=$CONTROL6 SERVER=https://[$CONTROL6]:6443
fi
PODS=$CIDRS
[ "$MODE" = gateway ] || PODS=192.0.2.128/25,2001:db8:1::1:0:0/96 # where each node has 30 addresses, and 65,535
PODFILES=/var/run/secrets/kubernetes.io/serviceaccount

# of_families IPV4 IPV6 prints the addresses of the families that the cluster has, with a comma between.
of_families() { [ "$FAMILIES" = 6 ] && echo "$2" || echo "$1,$2"; }
in_node() { nsenter -t "$(cat "$DIR/run/n$1.pid")" -a -- "${@:2}"; }
k() { ip netns exec tcluster-control "$DIR/bin/kubectl" --kubeconfig "$DIR/run/admin.conf" "$@"; }

# until_true SECONDS COMMAND... waits for its success.
until_true() {
	local end=$((SECONDS + $1))
	until "${@:2}" >/dev/null 2>&1; do
		[ $SECONDS -lt $end ] || { echo "after $1 s there is still no success of: ${*:2}" >&2; return 1; }
		sleep .2
	done
}

# spawn GROUP NAME COMMAND... runs it in the control groups tombolo-cluster/GROUP, by which it is found in the end.
spawn() (
	for top in $(cat "$DIR/run/groups"); do
		mkdir -p "$top/$1"
		echo $BASHPID >"$top/$1/cgroup.procs"
	done
	exec setsid "${@:3}" >>"$DIR/logs/$2" 2>&1 </dev/null &
)

# on_lan NAME IPV4 IPV6 makes a namespace with an eth0 on the LAN, whose MAC is the same after a boot.
on_lan() {
	local at=eth0 ip="ip -n tcluster-$1" mac=$(printf '02:00:%02x:%02x:%02x:%02x' ${2//./ })
	ip netns add "tcluster-$1"
	$ip link set lo up
	ip -n tcluster-lan link add "$1" up master lan0 type veth peer name eth0 address "$mac" netns "tcluster-$1"
	if [[ $MODE$1 = portn? ]]; then
		at=br0
		$ip link add br0 up address "$mac" type bridge forward_delay 0
		$ip link set eth0 up master br0
	fi
	$ip addr add "$3/64" dev $at nodad
	[ "$FAMILIES" = 6 ] || $ip addr add "$2/24" dev $at
	$ip link set $at up
	[ "$1" != outside ] || return 0
	$ip route add default via $OUTSIDE6
	[ "$FAMILIES" = 6 ] || $ip route add default via $OUTSIDE4
}

# routes NAME enters the pod CIDRs of all other nodes into the tables of a namespace: n1, n2, n3, control or outside.
routes() {
	local m cidr via
	[ "$MODE" = gateway ] || return 0
	for m in 1 2 3; do
		[ "n$m" != "$1" ] || continue
		for cidr in $(k get node "n$m" --ignore-not-found -o 'jsonpath={.spec.podCIDRs[*]}'); do
			case $cidr in *:*) via=2001:db8:1::1$m ;; *) via=192.0.2.1$m ;; esac
			ip -n "tcluster-$1" route replace "$cidr" via $via
		done
	done
}

# boot and what follows is about node $n.
boot() {
	mkdir -p "$disk"/{work,etc/containerd,etc/bird}
	on_lan "n$n" 192.0.2.1$n 2001:db8:1::1$n
	echo "nameserver $OUTSIDE6" >"$disk/etc/resolv.conf"
	conflist
	cp "$repo"/deploy/cluster/{bird,nodes}.conf "$disk/etc/bird/"
	# The documentation's lines for this version; runc may not set oom_score_adj here.
	sed -n "/^version = $((CONTAINERD + 1))/,/^\`/{/^\`/!p}" "$repo/deploy/containerd/README.md" |
		sed 's/^\(.*"\).cni]$/\1]\nrestrict_oom_score_adj = true\n&/' >"$disk/etc/containerd/config.toml"
	spawn "n$n" "n$n.init" nsenter --net="/run/netns/tcluster-n$n" \
		unshare --mount --uts --ipc --cgroup --pid --fork --kill-child=SIGKILL "$here/cluster.sh" init "$n"
	until_true 60 test -s "$DIR/run/n$n.pid"
	in_node "$n" sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 # as distributions do
	start containerd
	until_true 60 in_node "$n" ctr version
	if [ "$ROUTES" = bird ]; then start bird; else routes "n$n"; fi
	start kubelet
	proxy "$PROXY"
}

# conflist gives the node its network: a template, or in mode lan docs/cluster.md's example with this node's part of the LAN.
conflist() {
	local range4 range6 bridge= at=$disk/own/etc/cni/net.d
	cp "$repo"/deploy/cluster/10-tombolo.conflist.template "$disk/etc/containerd/"
	[ "$MODE" != gateway ] || return 0
	[ "$MODE" = lan ] || bridge='s/"uplink"/"bridge": "br0",\n    &/;'
	range4=$(printf '{ "subnet": "192.0.2.0/24", "rangeStart": "192.0.2.%s", "rangeEnd": "192.0.2.%s", "gateway": "%s" }' \
		$((97 + 32 * n)) $((126 + 32 * n)) $OUTSIDE4)
	range6=$(printf '{ "subnet": "2001:db8:1::/64", "rangeStart": "2001:db8:1::1:%s:1", "rangeEnd": "2001:db8:1::1:%s:ffff", "gateway": "%s" }' \
		"$n" "$n" $OUTSIDE6)
	mkdir -p "$at"
	sed -n '/^```json/,/^```/{/^```/!p}' "$repo/docs/cluster.md" |
		sed "$bridge s|\\[{ \"subnet\": .* }\\]|$(of_families "[$range4]" "[$range6]")|; s|\"ipam\": {|\"capabilities\": { \"portMappings\": true, \"bandwidth\": true },\n    &|" \
			>"$at/10-lan.conflist"
}

# init is the node's first process, in its namespaces: it mounts what the node has of its own, and then waits. What is in
# $CLUSTER_DIR/nodes is the node's disk, which a power cut leaves; /run is not.
init() {
	read -r pid _ </proc/self/stat # this is still the machine's /proc
	mount --make-rprivate /
	hostname "n$n"
	# Copies of this machine's mounts would keep namespaces of others.
	for m in $(awk '$9 == "nsfs" || $8 == "nsfs" {print $5}' /proc/self/mountinfo); do umount -l "$m" || true; done
	mount -t proc proc /proc
	mount -t sysfs sysfs /sys
	mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
	for c in $(cut -d / -f 5 "$DIR/run/groups"); do
		mkdir "/sys/fs/cgroup/$c"
		mount -t cgroup -o "${c/systemd/none,name=systemd}" cgroup "/sys/fs/cgroup/$c"
	done
	mount -t overlay -o "lowerdir=/etc,upperdir=$disk/etc,workdir=$disk/work" overlay /etc
	for d in etc/cni opt var/lib var/log; do
		mkdir -p "$disk/own/$d" "/$d"
		mount --bind "$disk/own/$d" "/$d"
	done
	mount -t tmpfs -o mode=755 tmpfs /run
	mkdir -p /run/{lock,netns,bird,sysctl} /etc/cni/net.d
	# The kubelet sets these, but they are the machine's: it gets files of the same values.
	for f in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_max{keys,bytes}; do
		cat "/proc/sys/$f" >"/run/sysctl/${f##*/}"
		mount --bind "/run/sysctl/${f##*/}" "/proc/sys/$f"
	done
	mount --make-rshared /
	echo "$pid" >"$DIR/run/n$n.pid"
	while :; do sleep 3600 & wait $! || true; done
}

start() {
	local run=(spawn "n$n/system" "n$n.$1" nsenter -t "$(cat "$DIR/run/n$n.pid")" -a --)
	case $1 in
	bird) "${run[@]}" bird -f ;;
	containerd) "${run[@]}" containerd ;;
	kubelet) "${run[@]}" "$DIR/bin/kubelet" --kubeconfig "$DIR/run/admin.conf" --node-ip "$(of_families 192.0.2.1$n 2001:db8:1::1$n)" \
		--cluster-dns $DNS --cluster-domain cluster.local --fail-swap-on=false \
		--eviction-hard 'memory.available<100Mi' --image-gc-high-threshold 100 ;;
	kube-proxy) "${run[@]}" "$DIR/bin/kube-proxy" --kubeconfig "$DIR/run/admin.conf" --cluster-cidr $PODS \
		--proxy-mode "${PROXY/legacy/iptables}" --conntrack-max-per-core 0 ;;
	policies) # It takes the API server's address and its token as pods do.
		in_node "$n" sh -ec "mkdir -p $PODFILES; cp $DIR/run/apiserver.crt $PODFILES/ca.crt; printf cluster-admin-token >$PODFILES/token"
		KUBERNETES_SERVICE_HOST=$CONTROL KUBERNETES_SERVICE_PORT=6443 "${run[@]}" "$DIR/bin/policies" \
			--hostname-override "n$n" --disable-nri --nfqueue-id 98 --metrics-bind-address 127.0.0.1:9081
		until_true 20 in_node "$n" nft list table inet kube-network-policies ;;
	esac
}

kill_program() {
	in_node "$n" pkill -KILL -x "$1"
	until_true 10 in_node "$n" sh -c "! pgrep -x $1"
}

proxy() {
	local nft=/usr/sbin/xtables-nft-multi
	PROXY=$1
	echo "PROXY=$1" >>"$DIR/run/settings"
	kill_program kube-proxy || true
	in_node "$n" "$DIR/bin/kube-proxy" --cleanup >>"$DIR/logs/n$n.kube-proxy" 2>&1
	in_node "$n" umount $nft 2>/dev/null || true
	[ "$1" != legacy ] || in_node "$n" mount --bind /usr/sbin/xtables-legacy-multi $nft
	start kube-proxy
	until_true 60 in_node "$n" curl -fsS http://127.0.0.1:10249/proxyMode
}

cut_power() {
	kill -KILL "$(cat "$DIR/run/n$n.pid")"
	until_true 20 find /sys/fs/cgroup -depth -path "*/tombolo-cluster/n$n*" -type d -exec rmdir {} +
	rm "$DIR/run/n$n.pid"
	ip -n tcluster-lan link del "n$n"
	ip netns del "tcluster-n$n"
}

serve() { spawn control "$2" ip netns exec "tcluster-$1" "$DIR/bin/$2" "${@:3}"; } # NAMESPACE PROGRAM ARGUMENT...

control_plane() {
	local run=$DIR/run
	echo 'cluster-admin-token,admin,1,system:masters' >"$run/tokens"
	cat >"$run/admin.conf" <<-END
		{apiVersion: v1, kind: Config, users: [{name: u, user: {token: cluster-admin-token}}], current-context: x,
		clusters: [{name: c, cluster: {server: "$SERVER", certificate-authority: $run/apiserver.crt}}],
		contexts: [{name: x, context: {cluster: c, user: u}}]}
	END
	serve control etcd --data-dir "$DIR/etcd" --unsafe-no-fsync
	serve control kube-apiserver --etcd-servers http://127.0.0.1:2379 --advertise-address $CONTROL --cert-dir "$run" --token-auth-file "$run/tokens" \
		--authorization-mode RBAC --allow-privileged --service-cluster-ip-range $SERVICES \
		--service-account-issuer https://kubernetes.default.svc.cluster.local --kubelet-preferred-address-types InternalIP \
		--service-account-key-file "$run/apiserver.key" --service-account-signing-key-file "$run/apiserver.key"
	until_true 60 k get --raw /readyz
	serve control kube-controller-manager --kubeconfig "$run/admin.conf" --allocate-node-cidrs --cluster-cidr $CIDRS \
		--service-cluster-ip-range $SERVICES \
		--service-account-private-key-file "$run/apiserver.key" --root-ca-file "$run/apiserver.crt"
	serve control kube-scheduler --kubeconfig "$run/admin.conf"
}

# owners lists the directories of the clusters on this machine, whose names are the machine's. It lists "unknown" if
# only namespaces or groups are left.
owners() {
	local left
	left=$(ip netns list | grep ^tcluster- || true; find /sys/fs/cgroup -path '*/tombolo-cluster' -type d 2>/dev/null || true)
	[ -z "$left" ] || cat /run/tombolo-cluster 2>/dev/null || echo unknown
}

up() {
	local other=$(owners)
	[ -z "$other" ] || {
		[ "$other" != unknown ] || other=$DIR # whose down removes what no process uses
		echo "there is a cluster on this machine, of $other; this ends it: CLUSTER_DIR=$other $here/cluster.sh down" >&2
		exit 1
	}
	[ ! -e "$DIR/run" ] || { echo "a cluster ended uncleanly; this removes what it left: $here/cluster.sh down" >&2; exit 1; }
	grep -q ':pids:' /proc/self/cgroup || { echo "there are no control groups of version 1" >&2; exit 1; }
	echo "cluster: building, which takes 10 to 15 minutes the first time"
	CLUSTER_DIR=$DIR "$here/build.sh"
	echo "cluster: starting the control plane"
	rm -rf "$DIR/logs"
	mkdir "$DIR"/{run,logs}
	echo "$DIR" >/run/tombolo-cluster
	awk -F: '$2 {sub("name=", "", $2); print "/sys/fs/cgroup/" $2 $3 "/tombolo-cluster"}' /proc/self/cgroup >"$DIR/run/groups"
	mkdir $(cat "$DIR/run/groups")
	cpuset=$(grep /cpuset/ "$DIR/run/groups")
	for f in cpuset.cpus cpuset.mems; do cat "$cpuset/../$f" >"$cpuset/$f"; done
	echo 1 >"$cpuset/cgroup.clone_children"
	printf '%s\n' "CONTAINERD=$CONTAINERD" "ROUTES=$ROUTES" "PROXY=$PROXY" "FAMILIES=$FAMILIES" "MODE=$MODE" >"$DIR/run/settings"
	ip netns add tcluster-lan
	ip -n tcluster-lan link add lan0 up type bridge
	on_lan control $CONTROL4 $CONTROL6
	on_lan outside $OUTSIDE4 $OUTSIDE6
	control_plane
	serve outside agnhost netexec --http-port=9999 # tells whose address it sees
	for n in 1 2 3; do
		echo "cluster: starting node n$n"
		"$here/cluster.sh" boot $n
		for i in "$DIR"/images/*.tar; do in_node $n ctr -n k8s.io images import "$i" >>"$DIR/logs/n$n.import" 2>&1; done
	done
	until_true 60 k wait --for 'jsonpath={.spec.podCIDR}' --timeout=1s node n1 n2 n3
	for n in control outside; do routes $n; done # which are no nodes, so that BIRD tells them nothing
	[ "$ROUTES" != static ] || for n in 1 2 3; do routes n$n; done
	echo "cluster: waiting for its pods"
	k create clusterrolebinding coredns --clusterrole cluster-admin --serviceaccount kube-system:default >/dev/null
	sed "s/DNS/$DNS/" "$here/coredns.yaml" | k apply -f "$repo/deploy/kubernetes/tombolo.yaml" -f - >/dev/null
	k -n kube-system rollout status daemonset,deployment --timeout=180s >/dev/null
	k wait --for=condition=Ready node --all --timeout=120s >/dev/null
	k get nodes -o wide
}

down() {
	local other=$(owners)
	[ "$other" != unknown ] || [ -e "$DIR/run" ] ||
		[ -n "$(find /sys/fs/cgroup -path '*/tombolo-cluster*' -name cgroup.procs -exec cat {} + 2>/dev/null)" ] || other=
	case $other in "$DIR" | "") ;; unknown) [ -e "$DIR/run" ] || { echo "another clone's cluster runs: end it there" >&2; exit 1; } ;; *)
		echo "the cluster on this machine is of $other; this ends it: CLUSTER_DIR=$other $here/cluster.sh down" >&2
		exit 1
	esac
	local groups=(find /sys/fs/cgroup -depth -path '*/tombolo-cluster*') list
	while list=$("${groups[@]}" -name cgroup.procs -exec cat {} + 2>/dev/null || true) && [ -n "$list" ]; do
		kill -KILL $list 2>/dev/null || true
		sleep .1
	done
	for name in $(ip netns list | awk '/^tcluster-/ {print $1}'); do ip netns del "$name"; done
	"${groups[@]}" -type d -exec rmdir {} \;
	rm -rf "$DIR/nodes" "$DIR/etcd" "$DIR/run" /run/tombolo-cluster
}

verb=${1:-} n=${2:-}
disk=$DIR/nodes/n$n
case $verb in
kubectl) k "${@:2}" ;;
in) in_node "${@:2}" ;;
up | down | boot | init | start | proxy) $verb "${@:3}" ;;
kill) kill_program "$3" ;;
cut) cut_power ;;
*) sed -n '/^# usage/,/^[^#]/s/^# //p' "$0" >&2 && exit 2 ;;
esac
