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
	(cd "$module" && go vet ./... && "$bin/staticcheck" ./...)
	(cd "$module" && go mod tidy -diff)
done
(cd bench/peers/kindnet && go mod tidy -diff) # to vet it is to compile SQLite
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
built=$(git grep -laP '^\x7fELF' || true)
[ -z "$built" ] || { echo "a program is committed:" "$built" >&2; exit 1; }
echo "lint: clean"
