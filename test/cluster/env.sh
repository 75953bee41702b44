# Sourced by the scripts: versions, directories, addresses, and how to get into the cluster's namespaces.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
export PATH=$PATH:/usr/sbin:/sbin
export CLUSTER_DIR=${CLUSTER_DIR:-$repo/.cache/cluster}
DIR=$CLUSTER_DIR
KUBERNETES=${KUBERNETES:-v1.34.4} # k8s.io/kubernetes; its staging modules are v0.34.4
CONTAINERD2=${CONTAINERD2:-v2.2.3}
COREDNS=${COREDNS:-v1.14.3}
OLD=${OLD:-HEAD~20} # the other version of Tombolo

CONTAINERD=${CONTAINERD:-1} # of the nodes: 1, the distribution's, or 2
ROUTES=${ROUTES:-static}    # between the nodes: static, or bird
PROXY=${PROXY:-nftables}    # kube-proxy's mode: nftables, iptables or legacy
[ ! -e "$DIR/run/settings" ] || . "$DIR/run/settings" # those of the cluster that is up

# All of these are in namespaces of the cluster's own, so that they collide with nothing of the machine.
NODES="1 2 3"
CONTROL4=192.0.2.10 CONTROL6=2001:db8:1::10    # the control plane
OUTSIDE4=192.0.2.100 OUTSIDE6=2001:db8:1::100 # a client that is no node, and the nodes' default route
node4() { echo "192.0.2.1$1"; }
node6() { echo "2001:db8:1::1$1"; }
PODS=10.244.0.0/16,fd24::/48 SERVICES=10.96.0.0/16,fd96::/112 DNS=10.96.0.10

# in_node N COMMAND... runs it in the namespaces of node N; k is kubectl.
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

# join GROUP puts the calling shell into tombolo-cluster/GROUP of each hierarchy of control groups.
join() {
	local h top
	for h in $(cat "$DIR/run/hierarchies"); do
		top=/sys/fs/cgroup/$h/tombolo-cluster
		if [ ! -e "$top" ]; then
			mkdir "$top"
			case $h in cpuset*)
				for f in cpuset.cpus cpuset.mems; do cat "$top/../$f" >"$top/$f"; done
				echo 1 >"$top/cgroup.clone_children"
				;;
			esac
		fi
		mkdir -p "$top/$1"
		echo $BASHPID >"$top/$1/cgroup.procs"
	done
}

# on_lan NAME IPV4 IPV6 makes a namespace with an eth0 on the LAN.
on_lan() {
	ip netns add "tcluster-$1"
	ip -n "tcluster-$1" link set lo up
	ip -n tcluster-lan link add "$1" type veth peer name eth0 netns "tcluster-$1"
	ip -n tcluster-lan link set "$1" master lan0 up
	ip -n "tcluster-$1" addr add "$2/24" dev eth0
	ip -n "tcluster-$1" addr add "$3/64" dev eth0 nodad
	ip -n "tcluster-$1" link set eth0 up
	[ "$1" = outside ] && return
	ip -n "tcluster-$1" route add default via $OUTSIDE4
	ip -n "tcluster-$1" -6 route add default via $OUTSIDE6
}

# routes NAME enters the pod CIDRs of all other nodes into the tables of a namespace: n1, n2, n3 or control.
routes() {
	local m cidr
	for m in $NODES; do
		[ "n$m" != "$1" ] || continue
		for cidr in $(k get node "n$m" -o 'jsonpath={.spec.podCIDRs[*]}'); do
			case $cidr in
			*:*) ip -n "tcluster-$1" -6 route replace "$cidr" via "$(node6 "$m")" ;;
			*) ip -n "tcluster-$1" route replace "$cidr" via "$(node4 "$m")" ;;
			esac
		done
	done
}
