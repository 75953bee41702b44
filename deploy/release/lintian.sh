#!/usr/bin/env bash
# Has lintian look at packages, where it is there; what is deliberate is in deploy/release/overrides.
#
# usage: deploy/release/lintian.sh FILE.deb...
set -euo pipefail
if ! command -v lintian >/dev/null; then
	echo "no lintian here"
	exit
fi
lintian --allow-root --display-info --fail-on error,warning,info "$@"
