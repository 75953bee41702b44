#!/usr/bin/env bash
# One node: namespaces with a containerd, a kubelet, kube-proxy, and BIRD if the cluster has it.
#
# usage: node.sh boot N            with the disk that the node has
#        node.sh cut N             ends all of it at once, and its network, as a power cut does
#        node.sh start N PROGRAM   containerd, kubelet, kube-proxy or bird
#        node.sh kill N PROGRAM
#        node.sh proxy N MODE      kube-proxy cleans up, and starts in that mode: nftables, iptables or legacy
set -euo pipefail
. "$(dirname "$0")/env.sh"
verb=$1 n=$2 disk=$DIR/nodes/n$2
log=$DIR/logs/n$n

boot() {
	mkdir -p "$disk"/etc/{containerd,bird} "$disk/own/opt/cni/bin" "$DIR/run"
	on_lan "n$n" "$(node4 "$n")" "$(node6 "$n")"
	settings
	(
		join "n$n"
		exec setsid nsenter --net="/run/netns/tcluster-n$n" unshare --mount --uts --ipc --cgroup --pid --fork --kill-child=SIGKILL \
			"$here/init.sh" "$n" >"$log.init" 2>&1 </dev/null
	) &
	until_true 10 first_process $!
	# What the machine's kubelet and kube-proxy rely on, which distributions set.
	in_node "$n" sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
	start containerd
	until_true 30 in_node "$n" ctr version
	if [ ! -e "$disk/imported" ]; then
		for i in "$DIR"/images/*.tar; do in_node "$n" ctr -n k8s.io images import "$i" >>"$log.import"; done
		touch "$disk/imported"
	fi
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

settings() {
	printf '127.0.0.1 localhost\n::1 localhost\n%s n%s\n' "$(node4 "$n")" "$n" >"$disk/etc/hosts"
	echo "nameserver $OUTSIDE4" >"$disk/etc/resolv.conf"
	printf 'c1a5%028d\n' "$n" >"$disk/etc/machine-id"
	cp "$repo"/deploy/cluster/10-tombolo.conflist.template "$disk/etc/containerd/"
	cp "$repo"/deploy/cluster/{bird,nodes}.conf "$disk/etc/bird/"
	"containerd$CONTAINERD" >"$disk/etc/containerd/config.toml"
	cat >"$disk/etc/kubelet.yaml" <<-END
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
		authorization: {mode: AlwaysAllow}
		containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
		cgroupDriver: cgroupfs
		failSwapOn: false
		failCgroupV1: false
		clusterDNS: [$DNS]
		clusterDomain: cluster.local
		evictionHard: {memory.available: 100Mi}
		imageGCHighThresholdPercent: 100
		serializeImagePulls: false
		enforceNodeAllocatable: [pods]
		nodeStatusUpdateFrequency: 5s
	END
}

# docs: deploy/containerd/README.md has what stands in these below cni.
containerd1() {
	cat <<-END
		version = 2
		[plugins."io.containerd.grpc.v1.cri"]
		  sandbox_image = "registry.k8s.io/pause:3.10.1"
		  disable_apparmor = true
		  restrict_oom_score_adj = true
		[plugins."io.containerd.grpc.v1.cri".cni]
		  conf_template = "/etc/containerd/10-tombolo.conflist.template"
	END
}
containerd2() {
	cat <<-END
		version = 3
		[plugins."io.containerd.cri.v1.images".pinned_images]
		  sandbox = "registry.k8s.io/pause:3.10.1"
		[plugins."io.containerd.cri.v1.runtime"]
		  disable_apparmor = true
		  restrict_oom_score_adj = true
		[plugins."io.containerd.cri.v1.runtime".cni]
		  conf_template = "/etc/containerd/10-tombolo.conflist.template"
		  use_internal_loopback = true
	END
}

# spawn NAME COMMAND... runs it in the node, with its log in $CLUSTER_DIR/logs.
spawn() {
	(
		join "n$n/system"
		exec setsid nsenter -t "$(cat "$DIR/run/n$n.pid")" -a -- "${@:2}" >>"$log.$1" 2>&1 </dev/null
	) &
}

start() {
	local kubeconfig=$DIR/run/admin.conf path=$PATH
	[ "$CONTAINERD" != 2 ] || path=$DIR/bin2:$PATH
	case $1 in
	containerd) spawn containerd env PATH="$path" containerd -c /etc/containerd/config.toml ;;
	kubelet) spawn kubelet "$DIR/bin/kubelet" --config /etc/kubelet.yaml --kubeconfig "$kubeconfig" \
		--hostname-override "n$n" --node-ip "$(node4 "$n"),$(node6 "$n")" --cert-dir /var/lib/kubelet/pki --v 2 ;;
	kube-proxy) spawn kube-proxy "$DIR/bin/kube-proxy" --config /etc/kube-proxy.yaml --v 2 ;;
	bird) spawn bird bird -f ;;
	esac
}

# pids PROGRAM
pids() {
	local h p
	h=$(grep '^pids' "$DIR/run/hierarchies")
	for p in $(cat "/sys/fs/cgroup/$h/tombolo-cluster/n$n/system/cgroup.procs"); do
		[ "$(cat "/proc/$p/comm" 2>/dev/null)" != "$1" ] || echo "$p"
	done
}
gone() { [ -z "$(pids "$1")" ]; }

stop() {
	local p
	p=$(pids "$1")
	[ -z "$p" ] || kill -KILL $p
	until_true 10 gone "$1"
}

proxy() {
	local nft=/usr/sbin/xtables-nft-multi mode=$1
	stop kube-proxy
	in_node "$n" "$DIR/bin/kube-proxy" --cleanup >>"$log.kube-proxy" 2>&1
	in_node "$n" umount $nft 2>/dev/null || true
	if [ "$1" = legacy ]; then
		mode=iptables
		in_node "$n" mount --bind /usr/sbin/xtables-legacy-multi $nft
	fi
	in_node "$n" tee /etc/kube-proxy.yaml >/dev/null <<-END
		apiVersion: kubeproxy.config.k8s.io/v1alpha1
		kind: KubeProxyConfiguration
		mode: $mode
		clientConnection: {kubeconfig: $DIR/run/admin.conf}
		hostnameOverride: n$n
		clusterCIDR: $PODS
		conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
	END
	echo "PROXY=$1" >>"$DIR/run/settings"
	start kube-proxy
	until_true 20 in_node "$n" curl -fsS http://127.0.0.1:10249/proxyMode
}

cut() {
	local p
	p=$(cat "$DIR/run/n$n.pid")
	kill -KILL "$p"
	until_true 20 test ! -e "/proc/$p"
	ip netns del "tcluster-n$n"
}

case $verb in
boot | cut) $verb ;;
start | proxy) $verb "$3" ;;
kill) stop "$3" ;;
esac
