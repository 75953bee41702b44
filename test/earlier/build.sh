#!/usr/bin/env bash
# Builds the plugin and the keeper of each version in test/earlier/versions into a
# directory of its name below a directory, from the history of this clone. One that is
# there already stays. Where there is no history at all, as in an archive of the sources,
# it builds nothing: the tests of upgrades are skipped then. Where a version is not in the
# history, as in a shallow clone, it fails.
#
# usage: test/earlier/build.sh DIRECTORY
set -euo pipefail

[ $# -eq 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."

if [ ! -e .git ]; then
	echo "no clone but sources alone: no earlier version is built, and upgrades from them are not tested"
	exit 0
fi
while read -r commit name; do
	[ -e "$out/$name/tombolod" ] && [ "$(cat "$out/$name/commit" 2>/dev/null)" = "$commit" ] && continue
	if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
		echo "version $name ($commit) is not in this clone's history; get it by: git fetch --unshallow" >&2
		exit 1
	fi
	sources=$(mktemp -d)
	trap 'rm -rf "$sources"' EXIT
	git archive "$commit" | tar -x -C "$sources"
	mkdir -p "$out/$name"
	CGO_ENABLED=0 go build -C "$sources" -buildvcs=false -trimpath -ldflags "-s -w" -o "$out/$name/" ./cmd/tombolo ./cmd/tombolod
	echo "$commit" >"$out/$name/commit"
	rm -rf "$sources"
done < <(grep -v '^#' test/earlier/versions)
