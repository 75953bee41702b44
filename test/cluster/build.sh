#!/usr/bin/env bash
# Builds Kubernetes' programs, etcd, CoreDNS and containerd 2 from the Go module proxy into $CLUSTER_DIR, with a go.mod that
# is written there. What is built stays.
set -euo pipefail
. "$(dirname "$0")/env.sh"
export GOCACHE=$DIR/gocache GOMODCACHE=$DIR/gomod GOFLAGS=-buildvcs=false GOTOOLCHAIN=local CGO_ENABLED=0
minor=${KUBERNETES#v1.}
stamp="-s -w -X k8s.io/client-go/pkg/version.gitVersion=$KUBERNETES -X k8s.io/component-base/version.gitVersion=$KUBERNETES"
stamp+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${minor%.*}"
mkdir -p "$DIR"/{bin,bin2,build,dns,logs}

# Kubernetes' go.mod replaces its staging modules by directories that the proxy's archive lacks: here their tags do so.
kubernetes_module() {
	cd "$DIR/build"
	[ ! -e go.sum ] || return 0
	local source
	source=$(go mod download -json "k8s.io/kubernetes@$KUBERNETES" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
	printf 'module cluster\n\ngo 1.25.0\n\ngodebug default=go1.24\n\n' >go.mod
	printf 'require k8s.io/kubernetes %s\n\nrequire go.etcd.io/etcd/server/v3 v3.6.4\n\n' "$KUBERNETES" >>go.mod
	sed -n "s|^\t\(k8s.io/[a-z-]*\) => ./staging.*|replace \1 => \1 v0.$minor|p" "$source/go.mod" >>go.mod
	printf '//go:build tools\n\npackage tools\n\nimport _ "go.etcd.io/etcd/server/v3/etcdmain"\n' >tools.go
	cp "$source/go.sum" go.sum
}

# CoreDNS with what a cluster needs, and without the clouds' libraries.
coredns_module() {
	cd "$DIR/dns"
	[ ! -e go.sum ] || return 0
	local plugins="health ready errors cache loadbalance kubernetes" at=github.com/coredns/coredns
	printf 'module dns\n\ngo 1.25.0\n' >go.mod
	cat >main.go <<-END
		package main
		import ("$at/core/dnsserver"; "$at/coremain"; $(printf "_ \"$at/plugin/%s\"; " $plugins))
		func main() { dnsserver.Directives = []string{$(printf '"%s",' $plugins)}; coremain.Run() }
	END
	go get "$at@$COREDNS"
	go mod tidy
}

# compile FLAGS PACKAGE builds $name in the present directory.
compile() { go "${how:-build}" ${how:+-c} -mod=mod -trimpath -ldflags "$1" -o "$DIR/$name" "$2"; }

program() {
	local how= at=github.com/containerd/containerd/v2
	case $name in
	bin2/*) GOBIN=$DIR/bin2 go install -trimpath -ldflags "-s -w -X $at/version.Version=$CONTAINERD2" "$at/cmd/${name#*/}@$CONTAINERD2" ;;
	bin/coredns) coredns_module && compile "-s -w" . ;;
	bin/etcd) kubernetes_module && compile "$stamp" go.etcd.io/etcd/server/v3 ;;
	bin/ginkgo) kubernetes_module && compile "$stamp" github.com/onsi/ginkgo/v2/ginkgo ;;
	bin/agnhost) kubernetes_module && compile "$stamp" k8s.io/kubernetes/test/images/agnhost ;;
	bin/e2e.test) kubernetes_module && how=test compile "$stamp" k8s.io/kubernetes/test/e2e ;;
	*) kubernetes_module && compile "$stamp" "k8s.io/kubernetes/cmd/${name#*/}" ;;
	esac
}

for name in bin/{etcd,kubelet,kube-proxy,kube-apiserver,kube-controller-manager,kube-scheduler,kubectl,coredns,agnhost} \
	bin2/{containerd,containerd-shim-runc-v2,ctr} bin/{ginkgo,e2e.test}; do
	[ ! -x "$DIR/$name" ] || continue
	begin=$SECONDS
	program
	echo "$name $((SECONDS - begin)) s $(stat -c %s "$DIR/$name") bytes" | tee -a "$DIR/logs/build-times"
done
