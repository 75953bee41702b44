#!/usr/bin/env bash
# Runs the tests of the module and of those nested in it. A test that is skipped
# fails the run unless test/skips.txt gives the reason.
#
# AGAIN=N has up to N tests that failed run once more, each alone: a machine that
# others use starves one now and then. Those that pass then are named in the end as
# flaky, and are to be mended all the same. With more failures, nothing runs again.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin GOFLAGS="${GOFLAGS:-} -tags=lockorder"
again=${AGAIN:-0}

report=$(mktemp -d)
trap 'rm -rf "$report"' EXIT
go build -o "$report/report" ./test/report

# tests DIRECTORY ARGUMENT... runs tests and reports on them.
tests() {
	local dir=$1
	shift
	(cd "$dir" && go test -json "$@") >"$report/events" 2>"$report/stderr" || true
	cat "$report/events" >>"$report/all"
	"$report/report" -skips test/skips.txt -failed "$report/failed" <"$report/events" || { cat "$report/stderr" >&2; return 1; }
}

status=0
run() { # run DIRECTORY ARGUMENT...
	local dir=$1 package test
	echo "== $dir: go test ${*:2}"
	tests "$@" && return
	mapfile -t failed <"$report/failed"
	if [ ${#failed[@]} = 0 ] || [ ${#failed[@]} -gt "$again" ]; then
		status=1
		return
	fi
	for line in "${failed[@]}"; do
		read -r package test <<<"$line"
		echo "== once more, alone: $package $test"
		tests "$dir" -count=1 -timeout 20m -parallel 1 -run "^${test:-.*}\$" "$package" || status=1
	done
}

# Tests wait more than they compute: for grace periods, locks and timers of the kernel. The
# packages that take longest begin first, so that none of them is left to run alone.
tests=$((2 * $(nproc)))
run . -timeout 20m -parallel "$tests" ./test/lan ./internal/keeper ./network/internal/uplink ./internal/repotest ./nft/... ./...
for module in bench/report test/cni test/containerd test/embed; do
	run "$module" -count=1 -timeout 20m -parallel $((tests + $(nproc))) ./...
done
echo
"$report/report" -summary -skips test/skips.txt <"$report/all" || status=1
exit $status
