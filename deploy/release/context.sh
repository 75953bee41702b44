#!/usr/bin/env bash
# Puts into a directory what an image is built of: deploy/kubernetes/Dockerfile, scripts, and programs of each ARCH.
#
# usage: deploy/release/context.sh DIRECTORY ARCH...
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=$1
shift
for arch in "$@"; do GOARCH=$arch make -s build BIN="$stage/$arch"; done
cp deploy/kubernetes/Dockerfile deploy/kubernetes/install.sh deploy/names.sh "$stage/"
