#!/usr/bin/env bash
# Installs and purges the package, and a release's tarball, in a clean root of a Debian, which mmdebstrap makes once below
# .cache, as README.md and docs/getting-started.md say: make test-long has it in turn.
#
# usage: test/deb.sh bookworm|trixie
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 root=$PWD/.cache/root-$1
test/deps.sh mmdebstrap mmdebstrap
test/deps.sh dpkg-deb dpkg
if [ ! -e "$root/made" ] || [ ! -e "$root/usr/bin/lintian" ]; then
	rm -rf "$root"
	mkdir -p .cache
	mmdebstrap --quiet --variant=minbase --include=make,lintian "$suite" "$root"
	touch "$root/made"
fi
arch=$(dpkg --print-architecture)
for version in 0.0.1-rc.1 0.0.1; do
	make -s deb ARCHES="$arch" VERSION="v$version"
	cp "dist/tombolo_${version}_$arch.deb" "$root/tmp/tombolo-$version.deb"
done
make -s release ARCHES="$arch" VERSION=v0.1.0
cp "dist/tombolo-v0.1.0-linux-$arch.tar.gz" "$root/tmp/tombolo.tar.gz"
cp README.md docs/getting-started.md deploy/release/lintian.sh "$root/tmp/"
trap 'rm -f "$root"/tmp/{tombolo-*.deb,tombolo.tar.gz,*.md,lintian.sh}' EXIT

# A namespace for mounts, processes and the network: what runs in the root touches nothing else.
unshare --mount --pid --fork --net --kill-child chroot "$root" /bin/bash -euo pipefail <<'EOF'
mount -t proc proc /proc
files() { find / -xdev \( -path /proc -o -path /var/log -o -path /var/cache -o -path /var/lib/dpkg -o -path /var/lib/apt -o -path /tmp \) -prune -o "${@:--true}" -print | sort; }
version() { dpkg-deb --field "/tmp/tombolo-$1.deb" Version; }
/tmp/lintian.sh /tmp/tombolo-0.0.1.deb
dpkg --compare-versions "$(version 0.0.1-rc.1)" lt "$(version 0.0.1)"
# A systemd that writes down what it is asked for.
mkdir -p /run/systemd/system /tmp/bin
printf '#!/bin/sh\necho "$@" >>/tmp/asked\n' >/usr/bin/systemctl
chmod +x /usr/bin/systemctl
dpkg --purge tombolo # what a run left that failed
[ ! -e /usr/local/bin/tombolo ] || make -s -C /tmp/bin/tombolo-v0.1.0-linux-* uninstall
files >/tmp/before
# block PAGE LINE is the block of commands that begins so; what it downloads is here.
block() { sed -n "\\|^$2|,/^\`\`\`\$/{/^\`/!p}" "/tmp/$1.md"; }
curl() { case "$1 ${2##*/}" in -fLO\ *.deb) cp /tmp/tombolo-0.0.1-rc.1.deb "${2##*/}" ;; *.tar.gz) cat /tmp/tombolo.tar.gz ;; esac; }
arch=$(dpkg --print-architecture)
cd /tmp/bin
sed "s/amd64/$arch/" <(block README 'curl -fLO') >blocks
. ./blocks >said
grep -q 'other runtimes that speak CNI: the file /etc/cni/net.d/10-pods.conflist' said
cd /
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
hash -r
files ! -type d >/tmp/before
cd /tmp/bin
sed "s/amd64/$arch/g" <(block getting-started 'curl -fL ') >blocks
. ./blocks >said
tombolo version
CNI_COMMAND=VERSION /opt/cni/bin/loopback </dev/null | grep -q supportedVersions
make -C tombolo-v0.1.0-linux-* uninstall >said
files ! -type d | diff /tmp/before -
test -z "$(dpkg-query -W -f '${Status}' tombolo 2>/dev/null | grep -v unknown)"
EOF
echo "lintian of $suite likes the package; it and the tarball install there, and are gone again"
