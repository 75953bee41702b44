#!/usr/bin/env bash
# Runs the tests of the module and of those nested in it. A test that is skipped
# fails the run unless test/skips.txt gives the reason.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin

report=$(mktemp -d)
trap 'rm -rf "$report"' EXIT
go build -o "$report/report" ./test/report

status=0
run() { # run DIRECTORY ARGUMENT...
	local dir=$1
	shift
	echo "== $dir: go test $*"
	(cd "$dir" && go test -json "$@") >"$report/events" 2>"$report/stderr" || true
	cat "$report/events" >>"$report/all"
	"$report/report" -skips test/skips.txt <"$report/events" || { status=1; cat "$report/stderr" >&2; }
}

run . -timeout 10m ./...
for module in test/cni test/containerd test/embed; do
	run "$module" -count=1 -timeout 10m ./...
done
echo
"$report/report" -summary -skips test/skips.txt <"$report/all" || status=1
exit $status
