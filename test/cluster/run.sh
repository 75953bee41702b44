#!/usr/bin/env bash
# All checks, on two clusters: containerd 1.6 with static routes, and containerd 2 with BIRD, against which Kubernetes' own
# tests of networking run too: conformance, and each kind of Service in each family (E2E=0 leaves them out, FOCUS chooses
# others). It prints the results as a table, and ends what it started, however it goes.
set -uo pipefail
cd "$(dirname "$0")"
DIR=${CLUSTER_DIR:-../../.cache/cluster}
[ ! -e "$DIR/run" ] || { echo "there is a cluster: $PWD/cluster.sh down ends it" >&2; exit 1; }
trap './cluster.sh down' EXIT
rm -f "$DIR/results"
status=0
check() { ./check.py "$@" || status=1; }
mode() { for n in 1 2 3; do ./cluster.sh proxy $n "$1" || status=1; done; }
node_checks="kubelet_killed containerd_killed churn nothing_left"

CONTAINERD=1 ROUTES=static PROXY=nftables ./cluster.sh up || exit
check nftables
mode iptables
check iptables
mode legacy
check legacy
mode nftables
check nftables $node_checks
check nftables power_cut
check nftables pods_and_nodes host_ports nothing_left
check "two versions" two_versions
./cluster.sh down

CONTAINERD=2 ROUTES=bird PROXY=nftables ./cluster.sh up || exit
check "containerd 2, BIRD"
check "containerd 2, BIRD" $node_checks
check "containerd 2, BIRD" power_cut status
check "containerd 2, BIRD" pods_and_nodes host_ports nothing_left
if [ "${E2E:-1}" != 0 ]; then
	ip netns exec tcluster-control "$DIR/bin/ginkgo" --procs 4 --no-color --timeout 3h --skip SCTP \
		--focus "${FOCUS:-\[sig-network\].*(Conformance|Granular Checks)}" "$DIR/bin/e2e.test" -- \
		--kubeconfig "$(realpath "$DIR")/run/admin.conf" --provider local --num-nodes 3 >"$DIR/logs/e2e" 2>&1 || status=1
	grep -E '^ *(\[FAIL\]|Ran [0-9]|(SUCCESS|FAIL)!)' "$DIR/logs/e2e" | sort -u
fi
./check.py table
exit $status
