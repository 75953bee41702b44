#!/bin/sh
# Builds what the benchmark compares with into a directory: the floor program, the
# memory gauge, and the reference plugins and cnitool at the versions that
# bench/peers/go.mod pins. Tests find them by TOMBOLO_PEERS=DIRECTORY.
#
# usage: bench/build.sh DIRECTORY
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)

for program in floor peak; do
	"${CC:-cc}" -O2 -Wall -Wextra -static -o "$out/$program" "$here/$program/$program.c"
done

# Static and stripped, as tombolo itself is: a dynamic or larger program takes longer
# to start, and that would flatter us.
CGO_ENABLED=0 go build -C "$here/peers" -trimpath -ldflags "-s -w" -o "$out/" tool
