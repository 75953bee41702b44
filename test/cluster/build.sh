#!/usr/bin/env bash
# Builds Kubernetes' programs, etcd, CoreDNS and containerd 2 from the Go module proxy into $CLUSTER_DIR, with a go.mod that
# is written there, and the cluster's images: no registry is asked. What is built stays, except the image of Tombolo.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
DIR=${CLUSTER_DIR:-$repo/.cache/cluster}
KUBERNETES=${KUBERNETES:-v1.34.4} # k8s.io/kubernetes; its staging modules are v0.34.4
CONTAINERD2=${CONTAINERD2:-v2.2.3}
COREDNS=${COREDNS:-v1.14.3}
OLD=${OLD:-HEAD~20} # the other version of Tombolo
export GOCACHE=$DIR/gocache GOMODCACHE=$DIR/gomod GOFLAGS=-buildvcs=false GOTOOLCHAIN=local CGO_ENABLED=0
minor=${KUBERNETES#v1.} source=$GOMODCACHE/k8s.io/kubernetes@$KUBERNETES
stamp="-s -w -X k8s.io/client-go/pkg/version.gitVersion=$KUBERNETES -X k8s.io/component-base/version.gitVersion=$KUBERNETES"
stamp+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${minor%.*}"
mkdir -p "$DIR"/{bin,bin2,build,logs,images/other,debs,root}

# Kubernetes' go.mod replaces its staging modules by directories that the proxy's archive lacks: here their tags do so.
cd "$DIR/build"
if [ ! -e go.sum ]; then
	go mod download "k8s.io/kubernetes@$KUBERNETES"
	printf 'module cluster\n\ngo 1.25.0\n\ngodebug default=go1.24\n\n' >go.mod
	printf 'require k8s.io/kubernetes %s\n\nrequire go.etcd.io/etcd/server/v3 v3.6.4\n\n' "$KUBERNETES" >>go.mod
	sed -n "s|^\t\(k8s.io/[a-z-]*\) => ./staging.*|replace \1 => \1 v0.$minor|p" "$source/go.mod" >>go.mod
	printf '//go:build tools\n\npackage tools\n\nimport _ "go.etcd.io/etcd/server/v3/etcdmain"\n' >tools.go
	cp "$source/go.sum" go.sum
fi

program() {
	local at=github.com/containerd/containerd/v2 how=(build -mod=mod -trimpath -o "$DIR/$1" -ldflags "$stamp")
	case $1 in
	bin/coredns) GOBIN=$DIR/bin go install -trimpath -ldflags "-s -w" "github.com/coredns/coredns@$COREDNS" ;;
	bin2/*) GOBIN=$DIR/bin2 go install -trimpath -ldflags "-s -w -X $at/version.Version=$CONTAINERD2" "$at/cmd/${1#*/}@$CONTAINERD2" ;;
	bin/etcd) go "${how[@]}" go.etcd.io/etcd/server/v3 ;;
	bin/ginkgo) go "${how[@]}" github.com/onsi/ginkgo/v2/ginkgo ;;
	bin/agnhost) go "${how[@]}" k8s.io/kubernetes/test/images/agnhost ;;
	bin/e2e.test) go test -c "${how[@]:1}" k8s.io/kubernetes/test/e2e ;;
	*) go "${how[@]}" "k8s.io/kubernetes/cmd/${1#*/}" ;;
	esac
}

for name in bin/{etcd,kubelet,kube-proxy,kube-apiserver,kube-controller-manager,kube-scheduler,kubectl,coredns,agnhost} \
	bin2/{containerd,containerd-shim-runc-v2,ctr} bin/{ginkgo,e2e.test}; do
	[ ! -x "$DIR/$name" ] || continue
	begin=$SECONDS
	program "$name"
	echo "$name $((SECONDS - begin)) s $(stat -c %s "$DIR/$name") bytes" | tee -a "$DIR/logs/build-times"
done

# image OUT DIRECTORY [CONFIG NAME]... packs a directory as images of one layer, as `docker save` does. CONFIG is the JSON of
# an image's configuration.
image() {
	local out=$1 work=$DIR/root/work manifest=
	rm -rf "$work"
	mkdir "$work"
	tar -C "$2" --owner 0 --group 0 -cf "$work/layer.tar" .
	for ((i = 3; i < $#; i += 2)); do
		printf '{"architecture": "amd64", "os": "linux", "config": %s, "rootfs": {"type": "layers", "diff_ids": ["sha256:%s"]}}' \
			"${@:i:1}" "$(sha256sum <"$work/layer.tar" | cut -d ' ' -f 1)" >"$work/$i.json"
		manifest+=$(printf ', {"Config": "%s.json", "RepoTags": ["%s"], "Layers": ["layer.tar"]}' $i "${@:i+1:1}")
	done
	echo "[${manifest#,}]" >"$work/manifest.json"
	tar -C "$work" -cf "$out" .
}

# applets DIRECTORY puts there all of busybox's programs that are not there.
applets() {
	mkdir -p "$1"/{bin,etc,tmp,root,www}
	cp "$(command -v busybox)" "$1/bin/busybox"
	for a in $(busybox --list); do
		[ -e "$1/bin/$a" ] || [ -e "$1/usr/bin/$a" ] || [ -e "$1/sbin/$a" ] || ln -s busybox "$1/bin/$a"
	done
	printf 'root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n' >"$1/etc/passwd"
}

# tombolo FILE TREE makes tombolo:dev of a tree's programs.
tombolo() {
	rm -rf "$DIR/root/tombolo"
	applets "$DIR/root/tombolo"
	mkdir -p "$DIR/root/tombolo/opt/tombolo"
	cp "$2"/bin/{tombolo,tombolo-cni,tombolod} "$2"/deploy/{kubernetes/install,names}.sh "$DIR/root/tombolo/opt/tombolo/"
	image "$1" "$DIR/root/tombolo" '{"Entrypoint": ["/opt/tombolo/tombolod"],
		"Env": ["PATH=/opt/tombolo:/usr/sbin:/usr/bin:/sbin:/bin"]}' docker.io/library/tombolo:dev
}

tombolo "$DIR/images/tombolo.tar" "$repo" # as deploy/kubernetes/Dockerfile does
commit=$(git -C "$repo" rev-parse --short "$OLD")
if [ ! -e "$DIR/old/$commit" ]; then
	rm -rf "$DIR/old"
	mkdir -p "$DIR/old"
	git -C "$repo" archive "$OLD" | tar -x -C "$DIR/old"
	(cd "$DIR/old" && GOMODCACHE='' GOCACHE='' go build -o bin/ ./cmd/... && touch "$commit")
fi
tombolo "$DIR/images/other/tombolo.tar" "$DIR/old"
[ ! -e "$DIR/images/all.tar" ] || exit 0

# The packages are unpacked, not installed. GNU's wget is there since upstream's tests do not know busybox's.
cd "$DIR/debs"
depends=$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances \
	curl wget bind9-dnsutils netcat-openbsd iproute2 iperf bash coreutils procps iputils-ping conntrack libc-bin)
apt-get download -qq $(grep '^[a-z]' <<<"$depends" | sort -u | grep -v -e debconf -e perl -e '^dpkg')
root=$DIR/root/all e2e=registry.k8s.io/e2e-test-images
rm -rf "$root"
mkdir -p "$root/uploads"
for deb in *.deb; do dpkg-deb --extract "$deb" "$root"; done
rm -rf "$root"/usr/share/{doc,man,locale,info,i18n,zoneinfo} "$root"/usr/lib/*-linux-gnu/gconv
applets "$root"
chmod 1777 "$root/tmp"
ln -sf bash "$root/bin/sh"
ln -sf nc.openbsd "$root/bin/nc"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
ldconfig -r "$root" 2>/dev/null || true
gcc -Os -static -DVERSION=v3.10.1 -o "$root/pause" "$source/build/pause/linux/pause.c"
cp "$DIR"/bin/{agnhost,coredns} "$source"/test/images/agnhost/porter/localhost.{crt,key} "$root/"
printf '.:53 {\nready\nerrors\nkubernetes cluster.local in-addr.arpa ip6.arpa {\npods insecure\n}\ncache 30\n}\n' >"$root/Corefile"
image "$DIR/images/all.tar" "$root" \
	'{"Entrypoint": ["/pause"]}' registry.k8s.io/pause:3.10.1 \
	'{"Entrypoint": ["/coredns", "-conf", "/Corefile"]}' registry.k8s.io/coredns/coredns:v1 \
	'{"Entrypoint": ["/agnhost"], "Cmd": ["pause"]}' $e2e/agnhost:"$(cat "$source/test/images/agnhost/VERSION")" \
	'{"Entrypoint": ["/bin/sh"]}' $e2e/busybox:1.37.0-1 '{"Entrypoint": ["/bin/sh"]}' $e2e/jessie-dnsutils:1.7
