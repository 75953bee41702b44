#!/usr/bin/env bash
# Builds the image of deploy/kubernetes for some architectures, whose programs are those of the tarballs, and
# pushes it. Its digest goes to a file. It needs docker's buildx, but no emulator: nothing of the image is run.
#
# usage: deploy/release/image.sh IMAGE DIGEST-FILE ARCH...
set -euo pipefail
cd "$(dirname "$0")/../.."
image=$1 digest=$2
shift 2
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
deploy/release/context.sh "$stage" "$@"
docker buildx build --platform "$(printf 'linux/%s\n' "$@" | paste -sd ,)" --provenance=false \
	--output "type=image,name=$image,push=true,rewrite-timestamp=true" --metadata-file "$stage/metadata" "$stage"
grep -oE 'sha256:[0-9a-f]{64}' <(grep '"containerimage.digest"' "$stage/metadata") >"$digest"
