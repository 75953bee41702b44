#!/usr/bin/env bash
# Installs and purges the package in a clean root of a Debian, which mmdebstrap makes once
# below .cache: make test-long has it in turn.
#
# usage: test/deb.sh bookworm|trixie
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 root=$PWD/.cache/root-$1
test/deps.sh mmdebstrap mmdebstrap
test/deps.sh dpkg-deb dpkg
if [ ! -e "$root/made" ]; then
	rm -rf "$root"
	mkdir -p .cache
	mmdebstrap --quiet --variant=minbase "$suite" "$root"
	touch "$root/made"
fi
arch=$(dpkg --print-architecture)
for version in 0.0.1-rc.1 0.0.1; do
	make -s deb ARCHES="$arch" VERSION="v$version"
	cp "dist/tombolo_${version}_$arch.deb" "$root/tmp/tombolo-$version.deb"
done
trap 'rm -f "$root"/tmp/tombolo-*.deb' EXIT

# A namespace for mounts, processes and the network: what runs in the root touches nothing else.
unshare --mount --pid --fork --net --kill-child chroot "$root" /bin/bash -euo pipefail <<'EOF'
mount -t proc proc /proc
files() { find / -xdev \( -path /proc -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /tmp \) -prune -o -print | sort; }
version() { dpkg-deb --field "/tmp/tombolo-$1.deb" Version; }
dpkg --compare-versions "$(version 0.0.1-rc.1)" lt "$(version 0.0.1)"
# A systemd that writes down what it is asked for.
mkdir -p /run/systemd/system /tmp/bin
printf '#!/bin/sh\necho "$@" >>/tmp/asked\n' >/tmp/bin/systemctl
chmod +x /tmp/bin/systemctl
export PATH=/tmp/bin:$PATH
dpkg --purge tombolo # what a run left that failed
files >/tmp/before
dpkg -i /tmp/tombolo-0.0.1-rc.1.deb
test "$(head -n 1 /usr/lib/cni/loopback)" = "#!/usr/lib/cni/tombolo as"
CNI_COMMAND=VERSION /usr/lib/cni/loopback </dev/null | grep -q supportedVersions
tombolo version | grep -q '^tombolo '
tombolod --help >/dev/null
tombolod --version | grep -q '^tombolod '
test "$(readlink /usr/lib/cni/tombolo)" = ../tombolo/tombolo-cni
CNI_COMMAND=VERSION /usr/lib/cni/tombolo </dev/null | grep -q supportedVersions
/usr/lib/netavark/tombolo info | grep -q '"api_version":"1.0.0"'
grep -q /usr/share/common-licenses/Apache-2.0 /usr/share/doc/tombolo/copyright
mkdir -p /run/tombolo /var/lib/tombolo/leases
tombolo check
rm /tmp/asked
dpkg -i /tmp/tombolo-0.0.1.deb # an upgrade
printf 'daemon-reload\ntry-restart tombolod.service\n' | diff - <(tail -n 2 /tmp/asked)
tombolo check
dpkg --remove tombolo
test ! -e /usr/lib/cni/loopback
dpkg --purge tombolo
files >/tmp/after
diff /tmp/before /tmp/after
test -z "$(dpkg-query -W -f '${Status}' tombolo 2>/dev/null | grep -v unknown)"
EOF
echo "tombolo.deb installs in $suite, and purges clean"
