#!/usr/bin/env bash
# Builds Kubernetes' programs, etcd, CoreDNS, containerd 2 and kube-network-policies from the Go module proxy into
# $CLUSTER_DIR, with a go.mod that is written there, and the cluster's images: no registry is asked. What is built stays,
# except the image of Tombolo.
set -euo pipefail
repo=$(cd "$(dirname "$0")/../.." && pwd)
DIR=${CLUSTER_DIR:-$repo/.cache/cluster}
kubernetes=v1.34.4 # its staging modules are v0.34.4
containerd=v2.2.3
coredns=v1.14.3
policies=v0.8.0 # of kube-network-policies
old=${OLD:-HEAD~100} # the other version of Tombolo
source=$DIR/gomod/k8s.io/kubernetes@$kubernetes
mkdir -p "$DIR"/{bin,bin2,build,images/other,debs/partial,root}

settings() { export GOCACHE=$DIR/gocache GOMODCACHE=$DIR/gomod GOFLAGS='-buildvcs=false -trimpath -mod=mod' CGO_ENABLED=0; }

programs() (
	settings
	local at=github.com/containerd/containerd/v2 stamp="-s -w -X k8s.io/component-base/version.gitVersion=$kubernetes"
	# Kubernetes' go.mod replaces its staging modules by directories that the proxy's archive lacks: here their tags do so.
	cd "$DIR/build"
	go mod download "k8s.io/kubernetes@$kubernetes"
	printf 'module cluster\n\ngo 1.25.0\n\ngodebug default=go1.24\n\n' >go.mod
	printf 'require k8s.io/kubernetes %s\n\nrequire go.etcd.io/etcd/server/v3 v3.6.4\n\n' "$kubernetes" >>go.mod
	sed -n "s|^\t\(k8s.io/[a-z-]*\) => ./staging.*|replace \1 => \1 v0.${kubernetes#v1.}|p" "$source/go.mod" >>go.mod
	cp "$source/go.sum" go.sum
	go build -o "$DIR/bin/" -ldflags "$stamp" github.com/onsi/ginkgo/v2/ginkgo k8s.io/kubernetes/test/images/agnhost \
		k8s.io/kubernetes/cmd/{kubelet,kube-proxy,kube-apiserver,kube-controller-manager,kube-scheduler,kubectl}
	go build -o "$DIR/bin/etcd" -ldflags "$stamp" go.etcd.io/etcd/server/v3
	go test -c -o "$DIR/bin/e2e.test" -ldflags "$stamp" k8s.io/kubernetes/test/e2e
	GOBIN=$DIR/bin2 go install -ldflags "-s -w -X $at/version.Version=$containerd" \
		$at/cmd/{containerd,containerd-shim-runc-v2,ctr}@$containerd
)

# dns builds CoreDNS without the plugins for clouds, which take longer to compile than all the rest.
dns() (
	local at=github.com/coredns/coredns plugins=(bind ready errors cache kubernetes forward)
	settings
	mkdir -p "$DIR/build/dns"
	cd "$DIR/build/dns"
	printf 'module dns\n\ngo 1.25.0\n\nrequire %s %s\n' $at $coredns >go.mod
	printf 'package main\n\nimport (\n"%s/core/dnsserver"\n"%s/coremain"\n' $at $at >main.go
	printf "_ \"$at/plugin/%s\"\n" "${plugins[@]}" >>main.go
	printf ')\n\nfunc main() {\ndnsserver.Directives = []string{' >>main.go
	printf '"%s", ' "${plugins[@]}" >>main.go
	printf '}\ncoremain.Run()\n}\n' >>main.go
	go build -o "$DIR/bin/coredns" -ldflags "-s -w" .
)

# policies builds kube-network-policies, with a patch for kernels without NFT_QUEUE and runtimes without NRI.
policies() (
	settings
	rm -rf "$DIR/build/policies"
	go mod download "sigs.k8s.io/kube-network-policies@$policies"
	cp -r "$DIR/gomod/sigs.k8s.io/kube-network-policies@$policies" "$DIR/build/policies"
	cd "$DIR/build/policies"
	chmod -R u+w .
	patch --quiet -p1 <"$repo/test/cluster/policies.patch"
	go build -o "$DIR/bin/policies" -ldflags "-s -w" ./cmd
)

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
	chroot "$1" /bin/busybox --install -s /bin
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

# kubernetes_images makes all other images, of one layer. GNU's wget is there since upstream's tests do not know busybox's.
kubernetes_images() {
	local root=$DIR/root/all e2e=registry.k8s.io/e2e-test-images
	apt-get install -qq --download-only --no-install-recommends -o Dir::State::status=/dev/null -o Dir::Cache::archives="$DIR/debs" \
		curl wget bind9-dnsutils netcat-openbsd iproute2 iperf bash coreutils procps iputils-ping conntrack libc-bin perl-
	rm -rf "$root"
	mkdir -p "$root/uploads"
	for deb in "$DIR"/debs/*.deb; do dpkg-deb --extract "$deb" "$root"; done
	rm -rf "$root"/usr/share "$root"/usr/lib/*-linux-gnu/gconv
	applets "$root"
	chmod 1777 "$root/tmp"
	ln -sf bash "$root/bin/sh"
	ln -sf nc.openbsd "$root/bin/nc"
	echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
	gcc -Os -static -DVERSION=v3.10.1 -o "$root/pause" "$source/build/pause/linux/pause.c"
	cp "$DIR"/bin/{agnhost,coredns} "$source"/test/images/agnhost/porter/localhost.{crt,key} "$root/"
	printf '.:53 {\nready\nerrors\nkubernetes cluster.local in-addr.arpa ip6.arpa {\npods insecure\n}\ncache 30\n}\n' >"$root/Corefile"
	image "$DIR/images/all.tar" "$root" \
		'{"Entrypoint": ["/pause"]}' registry.k8s.io/pause:3.10.1 \
		'{"Entrypoint": ["/pause"]}' registry.k8s.io/pause:3.6 \
		'{"Entrypoint": ["/coredns", "-conf", "/Corefile"]}' registry.k8s.io/coredns/coredns:v1 \
		'{"Entrypoint": ["/agnhost"], "Cmd": ["pause"]}' $e2e/agnhost:"$(cat "$source/test/images/agnhost/VERSION")" \
		'{"Entrypoint": ["/bin/sh"]}' $e2e/busybox:1.37.0-1 '{"Entrypoint": ["/bin/sh"]}' $e2e/jessie-dnsutils:1.7
}

if [ ! -e "$DIR/images/all.tar" ]; then
	echo "building Kubernetes in $DIR: this takes a quarter of an hour, once"
	programs
	dns
	kubernetes_images
fi
[ -e "$DIR/bin/policies" ] || policies
tombolo "$DIR/images/tombolo.tar" "$repo" # as deploy/kubernetes/Dockerfile does
rm -rf "$DIR/old"
mkdir "$DIR/old"
git -C "$repo" archive "$old" | tar -x -C "$DIR/old"
make -s -C "$DIR/old" build
tombolo "$DIR/images/other/tombolo.tar" "$DIR/old"
