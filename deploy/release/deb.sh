#!/usr/bin/env bash
# Makes dist/tombolo_VERSION_ARCH.deb, with what make install installs, where Debian has it:
# plugins in /usr/lib/cni and, for podman 5, in /usr/lib/netavark. The same commit gives the same bytes.
#
# usage: deploy/release/deb.sh VERSION ARCH
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${1#v} arch=$2
# A version begins with a digit; a commit that no tag names is before every release.
case $version in [0-9]*.*) ;; *) version=0~git.$version ;; esac
# v1.0.0-rc.1 is before v1.0.0, and v1.0.0-7-gabc after it.
version=$(sed -E 's/-(alpha|beta|rc)/~\1/; s/-/+/g' <<<"$version")
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
umask 022
root=$stage/root

GOARCH=$arch make -s build BIN="$stage/bin"
make -s -o build install BIN="$stage/bin" DESTDIR="$root" PREFIX=/usr CNI_BIN=/usr/lib/cni SYSTEMD=/usr/lib/systemd/system \
	MODULES=/usr/lib/modules-load.d NETWORKD=/usr/lib/systemd/network NM_CONF=/usr/lib/NetworkManager/conf.d \
	CNI_CONF=/usr/share/doc/tombolo/examples ZSH=/usr/share/zsh/vendor-completions >/dev/null
# containernetworking-plugins has a file of this name: postinst makes the link where it is not.
rm "$root/usr/lib/cni/loopback"
ln -sfn ../tombolo/tombolo-cni "$root/usr/lib/cni/tombolo"
install -m 0644 deploy/release/copyright "$root/usr/share/doc/tombolo/copyright"
install -D -m 0644 deploy/release/overrides "$root/usr/share/lintian/overrides/tombolo"
gzip -9nc CHANGELOG.md >"$root/usr/share/doc/tombolo/CHANGELOG.md.gz"
maintainer="the authors of Tombolo <tombolo@example.invalid>"
gzip -9nc >"$root/usr/share/doc/tombolo/changelog.gz" <<EOF
tombolo ($version) unstable; urgency=medium

  * CHANGELOG.md.gz has what is new.

 -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
EOF
gzip -9n "$root"/usr/share/man/man8/*

mkdir "$root/DEBIAN"
install -m 0755 deploy/release/debian/* "$root/DEBIAN/"
(cd "$root" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
cat >"$root/DEBIAN/control" <<EOF
Package: tombolo
Version: $version
Architecture: $arch
Maintainer: $maintainer
Section: net
Priority: optional
Homepage: https://github.com/tombolo-cni/tombolo
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f 1)
Description: pods on a Linux bridge, in pure netlink
 A CNI plugin, and tombolod, which keeps the DHCP leases of pods and repairs
 what other programs change of their networks.
EOF
mkdir -p dist
# A file's name has no "~": a release's page would change it.
dpkg-deb --root-owner-group -Zgzip --build "$root" "dist/tombolo_${version//\~/-}_$arch.deb"
