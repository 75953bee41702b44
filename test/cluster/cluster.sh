#!/usr/bin/env bash
# A Kubernetes cluster of three nodes, n1 to n3, each in namespaces of its own, with a containerd, a kubelet and kube-proxy;
# beside them, on one LAN, the control plane, and a client outside. README.md says more.
#
# usage: cluster.sh up              builds what is not built, and starts all of it; CONTAINERD, ROUTES and PROXY are below
#        cluster.sh down            ends all processes, control groups and namespaces; what was built stays
#        cluster.sh kubectl ...
#        cluster.sh in N COMMAND... runs a command in the namespaces of node N
#        cluster.sh boot N          a node, with the disk that it has
#        cluster.sh cut N           ends the node at once, and its network, as a power cut does
#        cluster.sh kill N PROGRAM  containerd, kubelet or kube-proxy
#        cluster.sh start N PROGRAM
#        cluster.sh proxy N MODE    kube-proxy cleans up, and starts in that mode
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
DIR=${CLUSTER_DIR:-$repo/.cache/cluster}
CONTAINERD=${CONTAINERD:-1} # of the nodes: 1, the distribution's, or 2
ROUTES=${ROUTES:-static}    # between the nodes: static, or bird
PROXY=${PROXY:-nftables}    # kube-proxy's mode: nftables, iptables or legacy
[ ! -e "$DIR/run/settings" ] || . "$DIR/run/settings" # those of the cluster that is up

# All of these are in namespaces of the cluster's own, so that they collide with nothing of the machine.
CONTROL4=192.0.2.10 CONTROL6=2001:db8:1::10   # the control plane
OUTSIDE4=192.0.2.100 OUTSIDE6=2001:db8:1::100 # the client outside, and the nodes' default route
PODS=10.244.0.0/16,fd24::/48 SERVICES=10.96.0.0/16,fd96::/112

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
spawn() {
	(join "$1" && exec setsid "${@:3}" >>"$DIR/logs/$2" 2>&1 </dev/null) &
	echo $! >"$DIR/run/$2.pid"
}

# join GROUP puts the calling shell there, in each hierarchy of control groups.
join() {
	local h top
	for h in $(cat "$DIR/run/hierarchies"); do
		top=/sys/fs/cgroup/$h/tombolo-cluster
		if [ ! -e "$top" ] && mkdir "$top" && [ -e "$top/cpuset.cpus" ]; then
			for f in cpuset.cpus cpuset.mems; do cat "$top/../$f" >"$top/$f"; done
			echo 1 >"$top/cgroup.clone_children"
		fi
		mkdir -p "$top/$1" && echo $BASHPID >"$top/$1/cgroup.procs"
	done
}

# on_lan NAME IPV4 IPV6 makes a namespace with an eth0 on the LAN, whose MAC is the same after a boot.
on_lan() {
	local ip="ip -n tcluster-$1" mac
	mac=$(printf '02:00:%02x:%02x:%02x:%02x' ${2//./ })
	ip netns add "tcluster-$1"
	$ip link set lo up
	ip -n tcluster-lan link add "$1" type veth peer name eth0 address "$mac" netns "tcluster-$1"
	ip -n tcluster-lan link set "$1" master lan0 up
	$ip addr add "$2/24" dev eth0
	$ip addr add "$3/64" dev eth0 nodad
	$ip link set eth0 up
	[ "$1" = outside ] || { $ip route add default via $OUTSIDE4; $ip -6 route add default via $OUTSIDE6; }
}

# routes NAME enters the pod CIDRs of all other nodes into the tables of a namespace: n1, n2, n3 or control.
routes() {
	local m cidr via
	for m in 1 2 3; do
		[ "n$m" != "$1" ] || continue
		for cidr in $(k get node "n$m" -o 'jsonpath={.spec.podCIDRs[*]}'); do
			case $cidr in *:*) via=2001:db8:1::1$m ;; *) via=192.0.2.1$m ;; esac
			ip -n "tcluster-$1" route replace "$cidr" via $via
		done
	done
}

# ---- a node, $n ----

boot() {
	local ips=192.0.2.1$n,2001:db8:1::1$n
	mkdir -p "$disk"/etc/{containerd,bird}
	on_lan "n$n" "${ips%,*}" "${ips#*,}"
	printf '127.0.0.1 localhost\n::1 localhost\n%s n%s\n' "${ips%,*}" "$n" >"$disk/etc/hosts"
	echo "nameserver $OUTSIDE4" >"$disk/etc/resolv.conf"
	printf 'c1a5%028d\n' "$n" >"$disk/etc/machine-id"
	cp "$repo"/deploy/cluster/10-tombolo.conflist.template "$disk/etc/containerd/"
	cp "$repo"/deploy/cluster/{bird,nodes}.conf "$disk/etc/bird/"
	containerd_config >"$disk/etc/containerd/config.toml"
	spawn "n$n" "n$n.init" nsenter --net="/run/netns/tcluster-n$n" \
		unshare --mount --uts --ipc --cgroup --pid --fork --kill-child=SIGKILL "$here/cluster.sh" init "$n"
	until_true 10 first_process $!
	in_node "$n" sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 # as distributions do
	start containerd
	until_true 30 in_node "$n" ctr version
	if [ ! -e "$disk/booted" ]; then
		for i in "$DIR"/images/*.tar; do in_node "$n" ctr -n k8s.io images import "$i" >>"$DIR/logs/n$n.import"; done
	elif [ "$ROUTES" = static ]; then
		routes "n$n" # at the first boot up makes them, when all are known
	fi
	touch "$disk/booted"
	[ "$ROUTES" != bird ] || start bird
	start kubelet
	proxy "$PROXY"
}

# first_process PARENT finds the node's, and tells whether it has mounted all.
first_process() {
	local p
	p=$(pgrep -P "$1" | head -1)
	[ -n "$p" ] && [ -e "/proc/$p/root/run/up" ] && echo "$p" >"$DIR/run/n$n.pid"
}

# init is the node's first process, in its namespaces: it mounts what the node has of its own, and then waits. What is in
# $CLUSTER_DIR/nodes is the node's disk, which a power cut leaves; /run is not.
init() {
	mount --make-rprivate /
	hostname "n$n"
	# Copies of this machine's mounts would keep namespaces of others.
	for m in $(awk '$9 == "nsfs" || $8 == "nsfs" {print $5}' /proc/self/mountinfo); do umount -l "$m" || true; done
	mount -t proc proc /proc
	mount -t sysfs sysfs /sys
	mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
	for c in $(cut -d / -f 1 "$DIR/run/hierarchies"); do
		mkdir "/sys/fs/cgroup/$c"
		mount -t cgroup -o "${c/systemd/none,name=systemd}" cgroup "/sys/fs/cgroup/$c"
	done
	for d in etc opt var/lib var/log; do
		mkdir -p "$disk/$d" "$disk/work/$d"
		mount -t overlay -o "lowerdir=/$d,upperdir=$disk/$d,workdir=$disk/work/$d" overlay "/$d"
	done
	# What must not be an overlay, and what must not be this machine's.
	for d in /var/lib/{containerd,kubelet,cni,tombolo} /etc/cni /opt/cni /var/log/pods; do
		mkdir -p "$disk/own$d" "$d"
		mount --bind "$disk/own$d" "$d"
	done
	for f in hosts resolv.conf; do mount --bind "$disk/etc/$f" "/etc/$f"; done # where these are mounts of this machine
	mount -t tmpfs -o mode=755 tmpfs /run
	mkdir -p /run/{lock,netns,bird,sysctl} /etc/cni/net.d
	# The kubelet sets these, but they are the machine's: it gets files of the same values.
	for f in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_max{keys,bytes}; do
		cat "/proc/sys/$f" >"/run/sysctl/${f##*/}"
		mount --bind "/run/sysctl/${f##*/}" "/proc/sys/$f"
	done
	mount --make-rshared /
	touch /run/up
	while :; do sleep 3600 & wait $! || true; done
}

# containerd_config is what deploy/containerd/README.md says, the pause image, and what a machine in namespaces lacks.
containerd_config() {
	local image='"registry.k8s.io/pause:3.10.1"' cri='plugins."io.containerd.grpc.v1.cri"'
	if [ "$CONTAINERD" = 2 ]; then
		cri='plugins."io.containerd.cri.v1.runtime"'
		printf 'version = 3\n[plugins."io.containerd.cri.v1.images".pinned_images]\nsandbox = %s\n[%s]\n' "$image" "$cri"
	else
		printf 'version = 2\n[%s]\nsandbox_image = %s\n' "$cri" "$image"
	fi
	printf 'disable_apparmor = true\nrestrict_oom_score_adj = true\n[%s.cni]\n' "$cri"
	echo 'conf_template = "/etc/containerd/10-tombolo.conflist.template"'
	[ "$CONTAINERD" != 2 ] || echo 'use_internal_loopback = true'
}

start() {
	local run=(spawn "n$n/system" "n$n.$1" nsenter -t "$(cat "$DIR/run/n$n.pid")" -a --) path=$PATH
	local node=(--kubeconfig "$DIR/run/admin.conf" --hostname-override "n$n" --v 2)
	[ "$CONTAINERD" != 2 ] || path=$DIR/bin2:$PATH
	case $1 in
	bird) "${run[@]}" bird -f ;;
	containerd) "${run[@]}" env PATH="$path" containerd ;;
	kubelet) "${run[@]}" "$DIR/bin/kubelet" "${node[@]}" --node-ip "192.0.2.1$n,2001:db8:1::1$n" --cluster-dns 10.96.0.10 \
		--cluster-domain cluster.local --container-runtime-endpoint unix:///run/containerd/containerd.sock \
		--cgroup-driver cgroupfs --fail-swap-on=false --anonymous-auth --authorization-mode AlwaysAllow \
		--eviction-hard 'memory.available<100Mi' --image-gc-high-threshold 100 ;;
	kube-proxy) "${run[@]}" "$DIR/bin/kube-proxy" "${node[@]}" --proxy-mode "${PROXY/legacy/iptables}" --cluster-cidr $PODS \
		--conntrack-max-per-core 0 --conntrack-min 0 --conntrack-tcp-timeout-established 0 --conntrack-tcp-timeout-close-wait 0 ;;
	esac
}

kill_program() {
	local nsenter
	nsenter=$(cat "$DIR/run/n$n.$1.pid")
	pkill -KILL -P "$nsenter"
	until_true 10 test ! -e "/proc/$nsenter"
}

proxy() {
	local nft=/usr/sbin/xtables-nft-multi
	PROXY=$1
	echo "PROXY=$1" >>"$DIR/run/settings"
	[ ! -e "$DIR/run/n$n.kube-proxy.pid" ] || kill_program kube-proxy
	in_node "$n" "$DIR/bin/kube-proxy" --cleanup >>"$DIR/logs/n$n.kube-proxy" 2>&1
	in_node "$n" umount $nft 2>/dev/null || true
	[ "$1" != legacy ] || in_node "$n" mount --bind /usr/sbin/xtables-legacy-multi $nft
	start kube-proxy
	until_true 20 in_node "$n" curl -fsS http://127.0.0.1:10249/proxyMode
}

cut_power() {
	local p
	p=$(cat "$DIR/run/n$n.pid")
	kill -KILL "$p"
	until_true 20 test ! -e "/proc/$p"
	rm "$DIR/run/n$n".*
	ip -n tcluster-lan link del "n$n"
	ip netns del "tcluster-n$n"
}

# ---- all of it ----

serve() { spawn control "$2" ip netns exec "tcluster-$1" "$DIR/bin/$2" "${@:3}"; } # NAMESPACE PROGRAM ARGUMENT...

control_plane() {
	local keys=$DIR/keys etcd=http://127.0.0.1:2379 own=(--kubeconfig "$DIR/run/admin.conf" --leader-elect=false --bind-address 127.0.0.1)
	[ -e "$keys/accounts.key" ] || openssl genrsa -out "$keys/accounts.key" 2048 2>/dev/null
	echo 'cluster-admin-token,admin,1,system:masters' >"$keys/tokens"
	cat >"$DIR/run/admin.conf" <<-END
		{apiVersion: v1, kind: Config, users: [{name: u, user: {token: cluster-admin-token}}], current-context: x,
		clusters: [{name: c, cluster: {server: "https://$CONTROL4:6443", certificate-authority: $keys/apiserver.crt}}],
		contexts: [{name: x, context: {cluster: c, user: u}}]}
	END
	serve control etcd --data-dir "$DIR/etcd" --listen-client-urls $etcd --advertise-client-urls $etcd --unsafe-no-fsync
	serve control kube-apiserver --etcd-servers $etcd --bind-address $CONTROL4 --advertise-address $CONTROL4 --cert-dir "$keys" \
		--token-auth-file "$keys/tokens" --authorization-mode RBAC --allow-privileged --service-cluster-ip-range $SERVICES \
		--service-account-issuer https://kubernetes.default.svc.cluster.local --kubelet-preferred-address-types InternalIP \
		--service-account-key-file "$keys/accounts.key" --service-account-signing-key-file "$keys/accounts.key"
	until_true 60 k get --raw /readyz
	serve control kube-controller-manager "${own[@]}" --allocate-node-cidrs --cluster-cidr $PODS --node-cidr-mask-size-ipv6 64 \
		--service-cluster-ip-range $SERVICES --configure-cloud-routes=false --use-service-account-credentials \
		--service-account-private-key-file "$keys/accounts.key" --root-ca-file "$keys/apiserver.crt"
	serve control kube-scheduler "${own[@]}"
}

up() {
	[ ! -e "$DIR/run" ] || { echo "there is a cluster: cluster.sh down ends it" >&2; exit 1; }
	grep -q ':pids:' /proc/self/cgroup || { echo "there are no control groups of version 1" >&2; exit 1; }
	CLUSTER_DIR=$DIR "$here/build.sh"
	mkdir -p "$DIR"/{run,logs,keys}
	rm -f "$DIR"/logs/n?.* "$DIR"/logs/{etcd,agnhost,kube*}
	awk -F: '$2 != "" {sub("name=", "", $2); print $2 ($3 == "/" ? "" : $3)}' /proc/self/cgroup >"$DIR/run/hierarchies"
	printf 'CONTAINERD=%s\nROUTES=%s\nPROXY=%s\n' "$CONTAINERD" "$ROUTES" "$PROXY" >"$DIR/run/settings"
	(join control) # makes the groups before programs join at once
	ip netns add tcluster-lan
	ip -n tcluster-lan link add lan0 type bridge
	ip -n tcluster-lan link set lan0 up
	on_lan control $CONTROL4 $CONTROL6
	on_lan outside $OUTSIDE4 $OUTSIDE6
	control_plane
	serve outside agnhost netexec --http-port=9999 # tells whose address it sees
	for n in 1 2 3; do "$here/cluster.sh" boot $n; done
	until_true 60 k wait --for 'jsonpath={.spec.podCIDRs[1]}' --timeout=1s node n1 n2 n3
	routes control # which is no node, so that BIRD tells it nothing
	[ "$ROUTES" != static ] || for n in 1 2 3; do routes n$n; done
	k apply -f "$repo/deploy/kubernetes/tombolo.yaml" -f "$here/coredns.yaml" >/dev/null
	k -n kube-system rollout status daemonset/tombolo --timeout=180s >/dev/null
	k wait --for=condition=Ready node --all --timeout=120s >/dev/null
	k -n kube-system rollout status deployment/coredns --timeout=120s >/dev/null
	k get nodes -o wide
}

down() {
	local groups list
	groups=$(find /sys/fs/cgroup -type d -name tombolo-cluster)
	for _ in $(seq 100); do
		list=$([ -z "$groups" ] || find $groups -name cgroup.procs -exec cat {} + 2>/dev/null || true)
		[ -n "$list" ] || break
		kill -KILL $list 2>/dev/null || true
		sleep .1
	done
	for name in $(ip netns list | awk '/^tcluster-/ {print $1}'); do ip netns del "$name"; done
	[ -z "$groups" ] || find $groups -depth -type d -exec rmdir {} \;
	rm -rf "$DIR/nodes" "$DIR/etcd" "$DIR/run"
}

verb=${1:-} n=${2:-}
disk=$DIR/nodes/n$n
case $verb in
up | down) $verb ;;
kubectl) k "${@:2}" ;;
in) in_node "${@:2}" ;;
boot | init | start | proxy) $verb "${@:3}" ;;
kill) kill_program "$3" ;;
cut) cut_power ;;
*) sed -n '/^# usage/,/^[^#]/s/^# *//p' "$0" >&2 && exit 2 ;;
esac
