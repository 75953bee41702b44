#!/usr/bin/env bash
# Has lintian look at packages, where it is there; what is deliberate is in deploy/release/overrides.
#
# usage: deploy/release/lintian.sh FILE.deb...
set -euo pipefail
if ! command -v lintian >/dev/null; then
	echo "no lintian here"
	exit
fi
# systemd alone starts the units. A version that does not know this tag any more refuses it among the overrides.
lintian --allow-root --display-info --suppress-tags package-supports-alternative-init-but-no-init.d-script \
	--fail-on error,warning,info "$@"
