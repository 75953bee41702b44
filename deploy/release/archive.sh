#!/usr/bin/env bash
# Prints an image for docker load: programs alone, which are in DIRECTORY, with tombolod as what it runs. It needs no
# Docker, and the same programs give the same bytes.
#
# usage: deploy/release/archive.sh IMAGE:TAG ARCH DIRECTORY
set -euo pipefail
image=$1 arch=$2 from=$3 epoch=${SOURCE_DATE_EPOCH:-0}
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
pack() { # pack DIRECTORY NAME...
	tar --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=ustar -C "$1" -cf - "${@:2}"
}
mkdir -p "$stage/root/opt/tombolo"
cp "$from"/{tombolo,tombolod,tombolo-cni} "$stage/root/opt/tombolo/"
pack "$stage/root" opt >"$stage/layer.tar"
cat >"$stage/config.json" <<END
{"architecture":"$arch","os":"linux","created":"$(date -u -d "@$epoch" +%FT%TZ)",
"config":{"Env":["PATH=/opt/tombolo"],"Entrypoint":["tombolod"],"Cmd":["--docker","/run/docker/plugins/tombolo.sock"]},
"rootfs":{"type":"layers","diff_ids":["sha256:$(sha256sum <"$stage/layer.tar" | cut -d ' ' -f 1)"]}}
END
echo "[{\"Config\":\"config.json\",\"RepoTags\":[\"$image\"],\"Layers\":[\"layer.tar\"]}]" >"$stage/manifest.json"
pack "$stage" config.json layer.tar manifest.json
