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
make -s deb ARCHES="$arch" VERSION=v0.0.1
cp dist/tombolo_0.0.1_"$arch".deb "$root/tmp/tombolo.deb"
trap 'rm -f "$root/tmp/tombolo.deb"' EXIT

# A namespace for mounts, processes and the network: what runs in the root touches nothing else.
unshare --mount --pid --fork --net --kill-child chroot "$root" /bin/bash -euo pipefail <<'EOF'
mount -t proc proc /proc
files() { find / -xdev \( -path /proc -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /tmp \) -prune -o -print | sort; }
files >/tmp/before
dpkg -i /tmp/tombolo.deb
test "$(head -n 1 /usr/lib/cni/loopback)" = "#!/usr/lib/cni/tombolo as"
CNI_COMMAND=VERSION /usr/lib/cni/loopback </dev/null | grep -q supportedVersions
tombolo version | grep -q '^tombolo '
tombolod --help >/dev/null
mkdir -p /run/tombolo /var/lib/tombolo/leases
tombolo check
dpkg -i /tmp/tombolo.deb # an upgrade
tombolo check
dpkg --remove tombolo
test ! -e /usr/lib/cni/loopback
dpkg --purge tombolo
files >/tmp/after
diff /tmp/before /tmp/after
test -z "$(dpkg-query -W -f '${Status}' tombolo 2>/dev/null | grep -v unknown)"
EOF
echo "tombolo.deb installs in $suite, and purges clean"
