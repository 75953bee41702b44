#!/bin/sh
# Builds what the benchmarks compare with into a directory: the floor program, the
# memory gauge, an empty plugin, and the reference plugins and cnitool at the versions
# that bench/peers/go.mod pins; with the second argument also a plugin in kindnet's way,
# which takes a minute, as SQLite is compiled for it, and with a clone of
# kubernetes-sigs/kindnet kindnet's own plugin, of the commit that is checked out.
# Tests find them by TOMBOLO_PEERS=DIRECTORY.
#
# usage: bench/build.sh DIRECTORY [kindnet [CLONE]]
set -eu

[ $# -ge 1 ] && [ "${2:-kindnet}" = kindnet ] || { echo "usage: $0 DIRECTORY [kindnet [CLONE]]" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)

for program in floor peak; do
	"${CC:-cc}" -O2 -Wall -Wextra -static -o "$out/$program" "$here/$program/$program.c"
done

# Static and stripped, as tombolo itself is: a dynamic or larger program takes longer
# to start, and that would flatter us. The empty plugin has Tombolo's garbage collector
# too, since it is the limit of a plugin built like it; the reference has Go's default.
CGO_ENABLED=0 go build -C "$here/peers" -trimpath -ldflags "-s -w" -o "$out/" tool
CGO_ENABLED=0 GOEXPERIMENT=${GOEXPERIMENT-nogreenteagc} go build -C "$here/peers" -trimpath -ldflags "-s -w" -o "$out/" ./empty
if [ "${2:-}" = kindnet ]; then
	CGO_ENABLED=1 go build -C "$here/peers/kindnet" -trimpath -tags sqlite_omit_load_extension,osusergo,netgo \
		-ldflags "-s -w -extldflags=-static" -o "$out/"
fi
if [ -n "${3:-}" ]; then
	CGO_ENABLED=1 go build -C "$3/cmd/cni-kindnet" -trimpath -tags sqlite_omit_load_extension,osusergo,netgo \
		-ldflags "-s -w -extldflags=-static -X main.dbDir=/run/tombolo-bench-kindnet" -o "$out/cni-kindnet" .
	git -C "$3" rev-parse HEAD >"$out/cni-kindnet.commit"
fi
