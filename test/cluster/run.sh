#!/usr/bin/env bash
# All checks, on two clusters: containerd 1.6 with static routes, and containerd 2 with BIRD, against which Kubernetes' own
# tests of networking run too: E2E=0 leaves them out, FOCUS chooses others. It ends what it started, however it goes.
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

CONTAINERD=1 ROUTES=static PROXY=nftables ./cluster.sh up || exit
check nftables
mode iptables
check iptables
mode legacy
check legacy
mode nftables
nodes nftables
check "two versions" two_versions pods_and_nodes services hairpin dns masquerade bandwidth
./cluster.sh down

CONTAINERD=2 ROUTES=bird PROXY=nftables ./cluster.sh up || exit
check "containerd 2, BIRD"
nodes "containerd 2, BIRD"
check "containerd 2, BIRD" status
if [ "${E2E:-1}" != 0 ]; then
	ip netns exec tcluster-control "$DIR/bin/ginkgo" --procs 4 --no-color --timeout 3h --skip SCTP \
		--focus "${FOCUS:-\[sig-network\].*(Conformance|Granular Checks)}" "$DIR/bin/e2e.test" -- \
		--kubeconfig "$(realpath "$DIR")/run/admin.conf" --provider local --num-nodes 3 >"$DIR/logs/e2e" 2>&1 || status=1
	grep -E '^ *(\[FAIL\]|Ran [0-9]|(SUCCESS|FAIL)!)' "$DIR/logs/e2e" | sort -u
fi
exit $status
