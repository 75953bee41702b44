#!/usr/bin/env bash
# Prints what CHANGELOG.md says of a version; without a section of it there is no release.
#
# usage: deploy/release/notes.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/../.."
notes=$(sed -n "/^## $1\$/,/^## /{/^## /d;p}" CHANGELOG.md)
[ -n "$notes" ] || { echo "CHANGELOG.md has no section \"## $1\"" >&2; exit 1; }
echo "$notes"
