#!/usr/bin/env bash
# Makes the cluster's images in $CLUSTER_DIR/images, of programs that build.sh built, of busybox and Debian's packages, and
# of this tree's build of Tombolo, as deploy/kubernetes/Dockerfile does. No registry is asked.
#
# usage: images.sh [tombolo]
set -euo pipefail
. "$(dirname "$0")/env.sh"
source=$DIR/gomod/k8s.io/kubernetes@$KUBERNETES
e2e=registry.k8s.io/e2e-test-images
mkdir -p "$DIR/images" "$DIR/roots"
cd "$DIR/roots"

# image FILE DIRECTORY CONFIG NAME...
image() { python3 "$here/image.py" "$DIR/images/$1.tar" "${@:2}"; }

# applets DIRECTORY links busybox's programs that are not there.
applets() {
	mkdir -p "$1"/{bin,etc,tmp,root,www}
	chmod 1777 "$1/tmp"
	cp "$(command -v busybox)" "$1/bin/busybox"
	for a in $(busybox --list); do
		[ -e "$1/bin/$a" ] || [ -e "$1/usr/bin/$a" ] || [ -e "$1/sbin/$a" ] || ln -s busybox "$1/bin/$a"
	done
	printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n' >"$1/etc/passwd"
	printf 'root:x:0:\n' >"$1/etc/group"
}

# tombolo FILE TREE makes tombolo:dev of the programs of that tree.
tombolo() {
	rm -rf tombolo
	applets tombolo
	mkdir -p tombolo/opt/tombolo
	cp "$2"/bin/{tombolo,tombolo-cni,tombolod} "$2"/deploy/kubernetes/install.sh "$2/deploy/names.sh" tombolo/opt/tombolo/
	image "$1" tombolo '{"Entrypoint": ["/opt/tombolo/tombolod"],
		"Env": ["PATH=/opt/tombolo:/usr/sbin:/usr/bin:/sbin:/bin"]}' docker.io/library/tombolo:dev
}

tombolo tombolo "$repo"
[ "${1:-}" != tombolo ] || exit 0

# The other version, of whose tree only what is built is needed.
commit=$(git -C "$repo" rev-parse --short "$OLD")
if [ ! -e "$DIR/old/$commit" ]; then
	rm -rf "$DIR/old"
	mkdir -p "$DIR/old"
	git -C "$repo" archive "$OLD" | tar -x -C "$DIR/old"
	(cd "$DIR/old" && CGO_ENABLED=0 go build -buildvcs=false -o bin/ ./cmd/...)
	touch "$DIR/old/$commit"
fi
mkdir -p "$DIR/images/other"
tombolo other/tombolo "$DIR/old"

mkdir -p pause regression coredns
gcc -Os -static -DVERSION=v3.10.1 -o pause/pause "$source/build/pause/linux/pause.c"
image pause pause '{"Entrypoint": ["/pause"]}' registry.k8s.io/pause:3.10.1 registry.k8s.io/pause:3.6
cp "$DIR/bin/regression-issue-74839" regression/
image regression regression '{"Entrypoint": ["/regression-issue-74839"]}' $e2e/regression-issue-74839:1.2
cp "$DIR/bin/coredns" coredns/
image coredns coredns '{"Entrypoint": ["/coredns"]}' registry.k8s.io/coredns/coredns:v1
rm -rf busybox
applets busybox
image busybox busybox '{"Entrypoint": ["/bin/sh"]}' $e2e/busybox:1.37.0-1 $e2e/busybox:1.36.1-1

# agnhost has beside it what upstream's tests start in its image, with GNU's wget. The packages are unpacked, not installed.
if [ ! -e "$DIR/debs/done" ]; then
	mkdir -p "$DIR/debs"
	cd "$DIR/debs"
	list=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
		curl wget bind9-dnsutils netcat-openbsd iproute2 iperf bash coreutils procps iputils-ping conntrack libc-bin |
		grep '^[a-z]' | sort -u | grep -v -e debconf -e '^perl' -e '^dpkg')
	for package in $list; do apt-get download -qq "$package" >/dev/null 2>&1 || true; done # some names are virtual
	touch done
	cd - >/dev/null
fi
rm -rf agnhost
mkdir agnhost
for deb in "$DIR"/debs/*.deb; do dpkg-deb --extract "$deb" agnhost; done
rm -rf agnhost/usr/share/{doc,man,locale,info,i18n,zoneinfo} agnhost/usr/lib/*-linux-gnu/{perl*,gconv}
applets agnhost
ln -sf dash agnhost/bin/sh
[ -e agnhost/bin/dash ] || ln -sf bash agnhost/bin/sh
ln -sf nc.openbsd agnhost/bin/nc
echo 'hosts: files dns' >agnhost/etc/nsswitch.conf
ldconfig -r agnhost 2>/dev/null || true
mkdir -p agnhost/uploads
cp "$DIR/bin/agnhost" "$source"/test/images/agnhost/porter/localhost.{crt,key} agnhost/
ln -f agnhost/agnhost agnhost/agnhost-2
image agnhost agnhost '{"Entrypoint": ["/agnhost"], "Cmd": ["pause"]}' $e2e/agnhost:"$(cat "$source/test/images/agnhost/VERSION")"
image jessie agnhost '{"Entrypoint": ["/bin/sh"]}' $e2e/jessie-dnsutils:1.7
