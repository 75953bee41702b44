#!/usr/bin/env bash
# Runs what takes long, for as long as it is given (90s, 10m): every fuzz target,
# the race detector, kills and churn over and over, many calls at once
# that are killed or of two versions, a fault at every system call, ADD and
# DEL with many pods there, takeovers of a NIC, the package in clean Debians, podman 5,
# and the virtual machine with an older kernel.
#
# A run that has less time than all of it takes begins where TURN points, which is the
# number of commits unless it is set, so that successive commits go through
# everything. Jobs of all kinds are mixed, so that each run has some of each; but a
# part of the machine takes half of ten minutes or more: one comes first in every
# third turn, and those that are missing come last.
#
# No job begins with less time left than it usually takes. One that the budget's end
# stops has neither passed nor failed. One that reaches a limit of its own hangs: it
# has failed. AGAIN=N has up to N jobs that failed run once more, as in test/all.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PATH:/usr/sbin:/sbin GOFLAGS="${GOFLAGS:-} -tags=lockorder"

budget=${1:-55m}
case $budget in
*m) seconds=$((${budget%m} * 60)) ;;
*s) seconds=${budget%s} ;;
*) echo "budget $budget: use 90s or 10m" >&2; exit 2 ;;
esac
end=$((SECONDS + seconds))
fuzz_time=${FUZZTIME:-20}
turn=${TURN:-$(git rev-list --count HEAD 2>/dev/null || echo 0)}
again=${AGAIN:-0}

# --- the jobs: NEED LIMIT KIND WHERE WHAT, the first two in seconds ---

jobs=()
for file in $(git ls-files -co --exclude-standard '*_test.go'); do
	[ -e "$file" ] || continue # deleted, and not committed
	for target in $(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' "$file"); do
		jobs+=("$((fuzz_time + 20)) $((fuzz_time + 120)) fuzz $(dirname "$file") $target")
	done
done
# What measures, what reads the sources, and what runs programs gains nothing from the
# race detector.
for package in $(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | grep -v -e /bench -e /internal/repotest -e /test/lan -e /test/docker); do
	jobs+=("90 400 race $package")
done
jobs+=("180 900 churn test/cni")
for pods in 100 400 900; do jobs+=("30 300 growth bench $pods"); done
jobs+=("300 900 takeovers test/lan" "150 400 deb test bookworm" "150 400 deb test trixie" "240 600 managers test bookworm" "240 600 managers test trixie" "240 600 docker test trixie")
for what in TestDockerdAndTombolodAreKilledAtEachCall TestAContainerFollowsItsLease TestFiftyContainersAtOnce; do
	jobs+=("200 600 many test/docker $what")
done
for part in "docs lan commands" "refused published" "kills rootless" "crowd leases"; do jobs+=("150 400 podman test/podman $part"); done
jobs+=("200 600 many test/cni TestTombolodTakesNoPodsForAnotherProgram" "200 600 many test/containerd TestTombolodTakesNoPodsForAnotherProgram")
jobs+=("200 600 many test/cni TestEightAtOnceUnderRandomKills" "200 600 many test/cni TestDocumentedLists[A-Za-z]*")
# A part of all system calls of what a test sweeps, another one in each turn; make test
# has a sample of them. A takeover makes thousands.
for dir in test/cni test/lan; do
	[ $dir = test/cni ] && of=3 || of=16
	for sweep in $(sed -n 's/^func \(Test[A-Za-z]*MayMeetAFaultAtAnyCall\)(.*/\1/p' "$dir"/*_test.go); do
		jobs+=("120 900 sweep $dir $sweep/$of")
	done
done
for dir in network/internal/uplink internal/keeper; do jobs+=("120 900 sweep $dir Test.*Kill.*/1"); done
# The order is by a hash of each line: more jobs leave that of the others as it is.
mapfile -t jobs < <(printf '%s\n' "${jobs[@]}" | LC_ALL=C sort -R --random-source=<(yes))

parts=(libraries leases plugin firewall pods lan noipv6)
vm=()
for i in "${!parts[@]}"; do vm+=("420 900 vm test/vm ${parts[(turn / 3 + i) % ${#parts[@]}]}"); done
from=$((turn * 7 % ${#jobs[@]}))
jobs=("${jobs[@]:from}" "${jobs[@]:0:from}")
if [ $((turn % 3)) = 0 ]; then jobs=("${vm[0]}" "${jobs[@]}" "${vm[@]:1}"); else jobs+=("${vm[@]}"); fi

# --- the run ---

said=$(mktemp)
trap 'rm -f "$said"' EXIT

# A job is in a process group of its own, which an interrupt does not reach.
running=
trap '[ -z "$running" ] || kill "$running" 2>/dev/null; exit 130' INT TERM

# within runs a command, and its children, for some seconds at most.
within() {
	timeout -k 10 "$@" &
	running=$!
	wait "$running"
}

# fuzz runs a target. Before 1.27, Go may take the end of -fuzztime for a failure, and
# then says nothing but that (https://go.dev/issue/75804).
fuzz() {
	local status=0
	within "$@" >"$said" 2>&1 || status=$?
	cat "$said"
	[ $status = 1 ] && grep -A 2 '^--- FAIL: ' "$said" | tr '\n' ' ' | grep -q '^--- FAIL: [^ ]* ([0-9.]*s)     context deadline exceeded FAIL' && return
	return $status
}

# run_job runs one for some seconds at most. Its status is 124, 137 or, the machine's,
# 75 if that was not enough. Before its limit go test says where it hangs.
run_job() {
	local limit=$1 kind=$2 where=$3 what=$4 most=$5 hangs=$(($1 - 20))s
	case $kind in
	fuzz) fuzz "$most" go test -C "$where" -run '^$' -fuzz "^$what\$" -fuzztime "${fuzz_time}s" . ;;
	race) within "$most" go test -race -short -timeout "$hangs" "$where" ;;
	churn) TOMBOLO_PODS=100 within "$most" go test -C "$where" -count 5 -run 'Kill|Churn|AtOnce|Beside|Deleted' -skip 'UnderRandomKills|TwoVersions' -timeout "$hangs" ./... ;;
	many) TOMBOLO_LONG=1 within "$most" go test -C "$where" -count 1 -v -run "^$what\$" -timeout "$hangs" . ;;
	growth) within "$most" go test "./$where" -run '^$' -bench "^BenchmarkPods\$/^pods=$what\$" -benchtime 10x -timeout "$hangs" ;;
	sweep) TOMBOLO_SWEEP=$((turn % ${what#*/} + 1))/${what#*/} within "$most" go test -C "$where" -count 1 -run "^${what%/*}\$" -timeout "$hangs" . ;;
	takeovers) TOMBOLO_TAKEOVERS=20 within "$most" go test -count 1 -timeout "$hangs" "./$where" ;;
	deb) within "$most" test/deb.sh "$what" ;;
	managers) within "$most" test/managers.sh "$what" ;;
	docker) within "$most" test/docker.sh "$what" ;;
	podman) within "$most" test/podman/run.sh $what ;;
	vm) VM_LIMIT=$most test/vm/run.sh "$what" ;;
	esac
}

# try runs a job in the time that is left, and sets its outcome.
try() {
	local left=$((end - SECONDS)) most begin=$SECONDS status=0
	most=$((left < limit ? left : limit))
	run_job "$limit" "$kind" "$where" "$what" "$most" || status=$?
	took=$((SECONDS - begin))
	if [ $status = 0 ]; then
		outcome=passed
	elif [[ $status =~ ^(75|124|137)$ && $most -lt $limit ]]; then
		outcome=stopped
	else
		outcome=failed
	fi
}

passed=0 flaky=0 failed=0 stopped=0 no_time=0
for job in "${jobs[@]}"; do
	read -r need limit kind where what <<<"$job"
	[ $((end - SECONDS)) -ge "$need" ] || { no_time=$((no_time + 1)); continue; }
	echo "== $kind $where $what"
	try
	if [ $outcome = failed ] && [ "$again" -gt 0 ] && [ $((end - SECONDS)) -ge "$need" ]; then
		again=$((again - 1))
		echo "== once more, after it failed in $took s: $kind $where $what"
		try
		[ $outcome != passed ] || { flaky=$((flaky + 1)); echo "FLAKY $kind $where $what" >&2; }
		[ $outcome != stopped ] || outcome=failed # the first time
	fi
	case $outcome in
	passed) passed=$((passed + 1)) ;;
	stopped)
		stopped=$((stopped + 1))
		echo "STOPPED after $took s, since the budget is used up: $kind $where $what"
		;;
	failed)
		failed=$((failed + 1))
		echo "FAILED after $took s: $kind $where $what" >&2
		;;
	esac
done
echo "turn $turn, $SECONDS s of $budget: $passed passed ($flaky of them the second time), $failed failed, $stopped stopped, no time for $no_time"
[ $failed = 0 ]
