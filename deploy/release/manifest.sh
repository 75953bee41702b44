#!/usr/bin/env bash
# Writes tombolo.yaml and tombolo-uninstall.yaml, the manifests of an image by its digest, to a directory.
#
# usage: deploy/release/manifest.sh IMAGE@sha256:DIGEST [DIRECTORY], which is dist unless it is given
set -euo pipefail
cd "$(dirname "$0")/../.."
image=$1 dir=${2:-dist}
[[ $image =~ ^[a-z0-9][a-z0-9.:/_-]*@sha256:[0-9a-f]{64}$ ]] || {
	echo "$image names no image by its digest: want IMAGE@sha256:DIGEST" >&2
	exit 2
}
mkdir -p "$dir"
sed "s|image: tombolo:dev$|image: $image|" deploy/kubernetes/tombolo.yaml >"$dir/tombolo.yaml"
sed "s|image: tombolo:dev$|image: $image|" deploy/kubernetes/uninstall.yaml >"$dir/tombolo-uninstall.yaml"
