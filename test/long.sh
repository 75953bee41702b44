#!/usr/bin/env bash
# Runs what takes long, for as long as it is given (90s, 10m): every fuzz target,
# the race detector, kills and churn over and over, ADD and DEL with many pods there,
# and the virtual machine with an older kernel. A run that has less
# time than all of it takes begins where the commit's number points, so that
# successive commits go through everything.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin

budget=${1:-55m}
case $budget in
*m) seconds=$((${budget%m} * 60)) ;;
*s) seconds=${budget%s} ;;
*) echo "budget $budget: use 90s or 10m" >&2; exit 2 ;;
esac
end=$((SECONDS + seconds))
fuzz_time=${FUZZTIME:-20}

jobs=()
for file in $(git ls-files '*_test.go'); do
	for target in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file"); do
		jobs+=("fuzz $(dirname "$file") $target")
	done
done
for package in . ./netns ./addr ./route ./bridge ./nft ./dhcpc/... ./internal/... ./cmd/...; do jobs+=("race $package"); done
jobs+=("churn test/cni")
for pods in 50 200 500 900; do jobs+=("growth . $pods"); done
for part in libraries leases plugin; do jobs+=("vm test/vm $part"); done

offset=$(($(git rev-list --count HEAD 2>/dev/null || echo 0) * 7 % ${#jobs[@]}))
passed=0 failed=0
for i in "${!jobs[@]}"; do
	left=$((end - SECONDS))
	[ $left -gt $((fuzz_time + 20)) ] || { echo "the budget of $budget is used up; ${#jobs[@]} jobs in all"; break; }
	read -r kind where what <<<"${jobs[$(((i + offset) % ${#jobs[@]}))]}"
	if [ "$kind" = vm ] && [ $left -lt 600 ]; then
		echo "== vm $what: left out, it takes up to ten minutes"
		continue
	fi
	echo "== $kind $where $what"
	case $kind in
	fuzz) (cd "$where" && timeout $((fuzz_time + 120)) go test -run '^$' -fuzz "^$what\$" -fuzztime "${fuzz_time}s" .) ;;
	race) go test -race -short -timeout "${left}s" "$where" ;;
	vm) test/vm/run.sh "$what" ;;
	churn) (cd "$where" && TOMBOLO_PODS=100 go test -count 5 -run 'Kill|Churn|AtOnce|Beside|Deleted' -timeout "${left}s" ./...) ;;
	growth) go run ./bench -n 10 -scenarios "pods=$what" -contenders floor,tombolo -peers "$TOMBOLO_PEERS" -tombolo "$TOMBOLO_BIN" ;;
	esac && passed=$((passed + 1)) || { failed=$((failed + 1)); echo "FAILED: $kind $where $what" >&2; }
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
