#!/usr/bin/env bash
# All checks, on five clusters: containerd 1.6 with static routes; containerd 2 with BIRD, with NetworkPolicies, and against
# which Kubernetes' own tests of networking run too (E2E=0 leaves them out, FOCUS chooses others); IPv6 alone; mode lan with
# an uplink; and mode lan with the NIC on the bridge. CLUSTERS="3 4" runs two of them. It ends what it started, however it
# goes.
set -uo pipefail
cd "$(dirname "$0")"
DIR=${CLUSTER_DIR:-../../.cache/cluster}
[ ! -e "$DIR/run" ] || { echo "there is a cluster: $PWD/cluster.sh down ends it" >&2; exit 1; }
trap './cluster.sh down' EXIT
status=0
check() { ./check.py "$@" || status=1; }
mode() { for n in 1 2 3; do ./cluster.sh proxy $n "$1" || status=1; done; }
nodes() {
	check "$1" kubelet_killed pods_and_nodes containerd_killed pods_and_nodes churn nothing_left
	check "$1" power_cut
	check "$1" pods_and_nodes host_ports nothing_left
}
policies() {
	for n in 1 2 3; do ./cluster.sh start $n policies || status=1; done
	./policies.py "$1" || status=1
	check "$1" nothing_left
}

cluster1() {
	CONTAINERD=1 ROUTES=static PROXY=nftables ./cluster.sh up || return
	check nftables
	mode iptables
	check iptables
	mode legacy
	check legacy
	mode nftables
	nodes nftables
	check "two versions" two_versions pods_and_nodes services hairpin dns masquerade bandwidth
}

cluster2() {
	CONTAINERD=2 ROUTES=bird PROXY=nftables ./cluster.sh up || return
	check "containerd 2, BIRD"
	nodes "containerd 2, BIRD"
	check "containerd 2, BIRD" status
	policies "containerd 2, BIRD"
	[ "${E2E:-1}" != 0 ] || return 0
	ip netns exec tcluster-control "$DIR/bin/ginkgo" --procs 4 --no-color --timeout 3h --skip SCTPConnectivity \
		--focus "${FOCUS:-\[sig-network\].*(Conformance|Granular Checks)}" "$DIR/bin/e2e.test" -- \
		--kubeconfig "$(realpath "$DIR")/run/admin.conf" --provider local --num-nodes 3 >"$DIR/logs/e2e" 2>&1 || status=1
	grep -E '^ *(\[FAIL\]|Ran [0-9]|(SUCCESS|FAIL)!)' "$DIR/logs/e2e" | sort -u
}

cluster3() {
	CONTAINERD=2 FAMILIES=6 ./cluster.sh up || return
	check "IPv6 alone"
	policies "IPv6 alone"
}

cluster4() {
	CONTAINERD=2 MODE=lan ./cluster.sh up || return
	check "mode lan" pods_and_nodes services hairpin node_ports host_ports dns masquerade bandwidth nothing_left
}

cluster5() {
	CONTAINERD=2 MODE=port ./cluster.sh up || return
	check "NIC on the bridge" pods_and_nodes services dns masquerade
	policies "NIC on the bridge"
}

for i in ${CLUSTERS:-1 2 3 4 5}; do
	cluster$i || status=1
	./cluster.sh down
done
exit $status
