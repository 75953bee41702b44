#!/usr/bin/env bash
# Makes dist/tombolo-VERSION-linux-ARCH.tar.gz for each ARCH. The same commit gives the same bytes, whoever builds it,
# and where: the times of files are the commit's (SOURCE_DATE_EPOCH).
#
# usage: deploy/release/tarballs.sh VERSION ARCH...
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$1
shift
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
umask 022
mkdir -p dist

for arch in "$@"; do
	name=tombolo-$version-linux-$arch
	mkdir "$stage/$name"
	GOARCH=$arch make -s build BIN="$stage/$name"
	cp -R LICENSE README.md CHANGELOG.md docs deploy "$stage/$name/"
	tar --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar \
		-C "$stage" -cf - "$name" | gzip -9n >"dist/$name.tar.gz"
done
