#!/usr/bin/env bash
# Short, and all of it enforced. The tools are pinned in tools/go.mod.
set -euo pipefail
cd "$(dirname "$0")/.."

unformatted=$(gofmt -l $(git ls-files '*.go'))
[ -z "$unformatted" ] || { echo "gofmt would change:" "$unformatted" >&2; exit 1; }

bin=$(pwd)/.cache/tools
mkdir -p "$bin"
(cd tools && CGO_ENABLED=0 go build -o "$bin/" tool)
for module in . bench/peers bench/report docs/dev/upstream test/cni test/containerd test/embed tools; do
	[ -n "$(cd $module && go list ./... 2>/dev/null)" ] || continue
	(cd "$module" && go vet ./... && "$bin/staticcheck" ./... && "$bin/ineffassign" ./... && "$bin/unparam" ./...)
	(cd "$module" && go mod tidy -diff)
done
(cd bench/peers/kindnet && go mod tidy -diff) # to vet it is to compile SQLite
git ls-files -z '*.go' '*.md' '*.sh' Makefile | xargs -0 "$bin/misspell" -error

# Turns of phrase that a Go programmer stumbles over, in comments of production code: name the thing, and the doer.
riddles='(says? (whether|that|why|what|how)|(is|are|does|do) (that|those|the same|the one|both|it|so)\b(?! (is|are|was|there|it))'
riddles+='|(what|whatever) (there|it|they|is|are|was|were|has|have|had|must|may|can|an?|the) |but for'
riddles+='|(has|have|had) (the|a|an|its|it|them|others|\w+s?) (do|done|be|look|make|made|take|taken|mend|mended|repeat|repeated|wait'
riddles+='|ask|deleted?|written?|repaired|read|checked|called|closed|opened|sent)|(by|of|from|at|with) (which|whom|what)'
riddles+='|thereby|thereupon|wherever|whereupon|thither|lest)\b'
if git grep -nP "(^|\s)//.*\b$riddles" -- '*.go' ':!*_test.go' ':!bench' ':!test' ':!tools' ':!internal/testutil' >&2; then
	echo "say these comments in plain words (CONTRIBUTING.md, Style)" >&2
	exit 1
fi
# The programs of units need not be installed here.
if command -v systemd-analyze >/dev/null; then
	units=$(mktemp -d)
	trap 'rm -rf "$units"' EXIT
	for unit in deploy/systemd/*; do
		sed 's#^ExecStart=[^ ]*#ExecStart=/bin/true#' "$unit" >"$units/$(basename "$unit")"
	done
	systemd-analyze verify "$units"/*
fi
for script in test/*.sh test/cluster/*.sh test/podman/*.sh bench/*.sh deploy/*.sh deploy/*/*.sh .ci/run; do bash -n "$script"; done
go test ./internal/repotest -run TestNames # that hide a builtin or a package

# A test that is gone makes every run of its folder in the VM fail.
grep -v '^\(#\|$\)' test/vm/skips.txt | while read -r folder name _; do
	name=${name%%[:/]*}
	grep -qs "^func $name(" "$folder"/*_test.go || { echo "test/vm/skips.txt: $folder has no $name" >&2; exit 1; }
done

built=$(git grep -laP '^\x7fELF' || true)
[ -z "$built" ] || { echo "a program is committed:" "$built" >&2; exit 1; }
echo "lint: clean"
