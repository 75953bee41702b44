#!/usr/bin/env bash
# Has lintian look at packages, where it is there; what is deliberate is in deploy/release/overrides.
#
# usage: deploy/release/lintian.sh FILE.deb...
set -euo pipefail
if ! command -v lintian >/dev/null; then
	echo "no lintian here"
	exit
fi
# systemd alone starts the units. Versions that no longer have this tag refuse it, also among the overrides.
tag=package-supports-alternative-init-but-no-init.d-script
if lintian-explain-tags $tag >/dev/null 2>&1; then set -- --suppress-tags $tag "$@"; fi
lintian --allow-root --display-info --fail-on error,warning,info "$@"
