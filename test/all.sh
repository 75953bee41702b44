#!/usr/bin/env bash
# Runs the tests of the module and of those nested in it. A test that is skipped
# fails the run unless test/skips.txt gives the reason.
#
#   test/all.sh [quick]
#
# quick is for each pull request: the unit tests, and those of the programs that are
# broad and soon done.
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
mkdir "$report/first" "$report/again"

# tests WHERE DIRECTORY ARGUMENT... runs tests, reports on them, and leaves the events and lines of DIRECTORY PACKAGE
# TEST for failures WHERE it is told.
tests() {
	local out dir=$2
	out=$(mktemp "$report/$1/XXXXXX")
	shift 2
	(cd "$dir" && go test -json "$@") >"$out.events" 2>"$out.stderr" || true
	"$report/report" -skips test/skips.txt -failed "$out" <"$out.events" && return
	cat "$out.stderr" >&2
	[ -s "$out" ] || touch "$report/broken"
	sed -i "s|^|$dir |" "$out"
	mv "$out" "$out.failed"
	return 1
}

run() { # run DIRECTORY ARGUMENT...
	echo "== $1: go test ${*:2}"
	tests first "$@" || true
}

# Tests wait more than they compute: for grace periods, locks and timers of the kernel. So more run at once than there
# are CPUs, and both large modules at the same time. The packages that take longest begin first, so that none of them
# is left to run alone.
cpus=$(nproc)
quick_cni='^Test(ADD|DEL|CHECK|GC|STATUS|Result|Routes|Gateway|HostPort|IPv|Pod|NextADD|Ingress|Spoof|Each|Bad|Log|Remove|Layer2|Leased|Docs|Messages)'
quick_lan='^Test(FirstADDSh|HostPods|HostKeeps|Default|Services|TheHosts|TwoNetworks|Jumbo|ADDWithALease)'
many=(-timeout 20m -parallel $((2 * cpus)))
units=$(go list ./... | grep -v -e /test/ -e /bench)
case ${1:-all} in
all)
	run test/cni -count=1 -timeout 20m -parallel $((3 * cpus)) ./... &
	run . "${many[@]}" ./test/lan ./internal/keeper ./network/internal/uplink ./internal/repotest ./nft/... ./...
	wait
	for module in bench/report test/containerd test/embed; do run "$module" -count=1 -timeout 20m ./...; done
	;;
quick)
	run test/cni -count=1 "${many[@]}" -run "$quick_cni" -skip 'AnyCall|Kill|Podman|OutOfTime' . &
	# shellcheck disable=SC2086 # packages are words
	run . "${many[@]}" $units
	wait
	run . "${many[@]}" -run "$quick_lan" ./test/lan
	;;
*) echo "usage: test/all.sh [quick]" >&2; exit 2 ;;
esac

status=0
[ ! -e "$report/broken" ] || status=1
mapfile -t failed < <(cat "$report"/first/*.failed 2>/dev/null)
[ ${#failed[@]} -le "$again" ] || { status=1; failed=(); }
for line in "${failed[@]}"; do
	read -r dir package test <<<"$line"
	echo "== once more, alone: $package $test"
	tests again "$dir" -count=1 -timeout 20m -parallel 1 -run "^${test:-.*}\$" "$package" || status=1
done
echo
{ cat "$report"/first/*.events "$report"/again/*.events 2>/dev/null || true; } | "$report/report" -summary -skips test/skips.txt || status=1
exit $status
