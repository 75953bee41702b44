#!/usr/bin/env bash
# Runs test/docker with the Docker of another Debian, in a root that mmdebstrap makes once below .cache. TOMBOLO_DOCKERD
# is another dockerd to run there, by its path in that root.
#
# usage: test/docker.sh trixie|sid [TEST], where sid has Docker 28, and may be a stale mirror
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/.cache/root-docker-$1
test/deps.sh mmdebstrap mmdebstrap
if [ ! -e "$root/made" ] || [ ! -e "$root/usr/sbin/radvd" ]; then
	rm -rf "$root"
	mkdir -p .cache
	mmdebstrap --quiet --aptopt='Acquire::Check-Valid-Until "false"' --variant=minbase --include=docker.io,docker-cli,iptables,iproute2,busybox-static,dnsmasq-base,radvd,nftables,procps "$1" "$root"
	touch "$root/made"
fi
TOMBOLO_DOCKER_ROOT=$root go test -count=1 -timeout 15m -run "${2:-.}" ./test/docker
