#!/usr/bin/env bash
# Makes for each ARCH dist/tombolo-VERSION-linux-ARCH.tar.gz, and tombolo-VERSION-image-ARCH.tar.gz for docker load. The
# same commit gives the same bytes, whoever builds it, and where: the times of files are the commit's (SOURCE_DATE_EPOCH).
#
# usage: deploy/release/tarballs.sh VERSION ARCH...
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$1
shift
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
umask 022
mkdir -p dist

for arch in "$@"; do
	name=tombolo-$version-linux-$arch
	mkdir "$stage/$name"
	GOARCH=$arch make -s build BIN="$stage/$name"
	deploy/release/archive.sh "tombolo:$version" "$arch" "$stage/$name" | gzip -9n >"dist/tombolo-$version-image-$arch.tar.gz"
	cp -R LICENSE Makefile README.md CHANGELOG.md docs deploy "$stage/$name/"
	tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar \
		-C "$stage" -cf - "$name" | gzip -9n >"dist/$name.tar.gz"
done
