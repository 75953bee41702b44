#!/usr/bin/env bash
# Runs podman 5 with its netavark, as Debian 13 has them, on networks of Tombolo: in a root that
# mmdebstrap makes once below .cache, as machines of a LAN with a router. Parts are functions of
# inside.sh; each has a copy of the root, and namespaces of its own.
#
# usage: test/podman/run.sh [PART...]
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD/.cache/root-podman bin=${TOMBOLO_BIN:-$PWD/bin}
test/deps.sh mmdebstrap mmdebstrap
if [ ! -e "$root/made" ]; then
	rm -rf "$root"
	mkdir -p .cache
	mmdebstrap --quiet --variant=minbase \
		--include=podman,netavark,aardvark-dns,crun,dnsmasq-base,iproute2,nftables,busybox-static,uidmap trixie "$root"
	touch "$root/made"
fi
sandbox() { # sandbox PART
	export root bin part=$1
	unshare --mount --pid --fork --net --kill-child bash -euc '
		mount -t tmpfs none "$root/../mnt" && cd "$root/../mnt"
		mkdir up work root
		mount -t overlay -o lowerdir="$root",upperdir=up,workdir=work overlay root
		cp "$OLDPWD"/test/podman/inside.sh root/inside.sh
		for page in lan getting-started coming-from; do
			sed -n "/^podman network create -d tombolo/,/^\`\`\`/{/\`/!p}" "$OLDPWD/docs/$page.md" >root/$page.sh
		done
		mkdir -p root/usr/lib/tombolo root/usr/lib/netavark root/.old
		cp "$bin/tombolo-cni" root/usr/lib/tombolo/
		ln -s ../tombolo/tombolo-cni root/usr/lib/netavark/tombolo
		cp "$bin/tombolo" "$bin/tombolod" root/usr/bin/
		cd root
		mount -t proc proc proc
		mount -t sysfs sysfs sys
		mount -t cgroup2 cgroup2 sys/fs/cgroup
		mount --rbind /dev dev
		for dir in run tmp var/tmp var/lib/containers; do mkdir -p $dir && mount -t tmpfs none $dir; done
		# crun leaves by pivot_root, which would lead out of a mere chroot.
		mount --make-rprivate /
		pivot_root . .old
		exec chroot . /bin/bash -euc "umount -l /.old && exec /inside.sh $part"'
}

mkdir -p .cache/mnt
[ $# -gt 0 ] || set -- docs lan refused published others several commands kills crowd leases six rootless
for part in "$@"; do
	begin=$SECONDS
	sandbox "$part"
	echo "podman: $part passed in $((SECONDS - begin)) s"
done
