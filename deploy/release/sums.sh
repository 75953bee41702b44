#!/usr/bin/env bash
# Writes dist/SHA256SUMS, of all else that is in dist.
set -euo pipefail
cd "$(dirname "$0")/../../dist"
rm -f SHA256SUMS
sha256sum -- * >.sums
mv .sums SHA256SUMS
cat SHA256SUMS
