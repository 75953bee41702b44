#!/usr/bin/env bash
# Starts the cluster: a LAN, on it the control plane, a client outside and three nodes, each in namespaces of its own.
# down.sh ends it. What is not built yet is built.
#
# usage: [CONTAINERD=1|2] [ROUTES=static|bird] [PROXY=nftables|iptables|legacy] up.sh
set -euo pipefail
. "$(dirname "$0")/env.sh"
[ ! -e "$DIR/run" ] || { echo "there is a cluster: $here/down.sh ends it" >&2; exit 1; }
"$here/build.sh"
mkdir -p "$DIR/images"
if [ -e "$DIR/images/jessie.tar" ]; then "$here/images.sh" tombolo; else "$here/images.sh"; fi
mkdir -p "$DIR"/{run,logs,keys}
rm -f "$DIR"/logs/n?.* "$DIR"/logs/{etcd,kube}*
awk -F: '$2 != "" {sub("name=", "", $2); print $2 ($3 == "/" ? "" : $3)}' /proc/self/cgroup >"$DIR/run/hierarchies"
printf 'CONTAINERD=%s\nROUTES=%s\n' "$CONTAINERD" "$ROUTES" >"$DIR/run/settings"

lan() {
	ip netns add tcluster-lan
	ip -n tcluster-lan link add lan0 type bridge
	ip -n tcluster-lan link set lan0 up
	on_lan control $CONTROL4 $CONTROL6
	on_lan outside $OUTSIDE4 $OUTSIDE6
}

# certificate NAME EXTENSION makes a key, and a certificate by the cluster's authority.
certificate() {
	openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -subj "/CN=$1" 2>/dev/null |
		openssl x509 -req -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile <(echo "$2") -out "$1.crt" 2>/dev/null
}

keys() {
	cd "$DIR/keys"
	[ ! -e tokens ] || return 0
	local names=DNS:kubernetes.default.svc,DNS:kubernetes.default,DNS:kubernetes,DNS:kubernetes.default.svc.cluster.local
	openssl genrsa -out accounts.key 2048 2>/dev/null
	openssl rsa -in accounts.key -pubout -out accounts.pub 2>/dev/null
	openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 365 -subj /CN=cluster \
		-addext keyUsage=critical,keyCertSign,cRLSign 2>/dev/null
	certificate api "subjectAltName=$names,IP:$CONTROL4,IP:$CONTROL6,IP:10.96.0.1,IP:fd96::1"
	certificate front-proxy extendedKeyUsage=clientAuth
	echo 'cluster-admin-token,admin,1,system:masters' >tokens
}

# serve PROGRAM ARGUMENT... runs it in the control plane's namespace.
serve() {
	(
		join control
		exec setsid ip netns exec tcluster-control "$DIR/bin/$1" "${@:2}" >"$DIR/logs/$1" 2>&1 </dev/null
	) &
}

control_plane() {
	local keys=$DIR/keys etcd=http://127.0.0.1:2379
	cat >"$DIR/run/admin.conf" <<-END
		apiVersion: v1
		kind: Config
		clusters: [{name: c, cluster: {server: "https://$CONTROL4:6443", certificate-authority: $keys/ca.crt}}]
		users: [{name: u, user: {token: cluster-admin-token}}]
		contexts: [{name: x, context: {cluster: c, user: u}}]
		current-context: x
	END
	serve etcd --data-dir "$DIR/etcd" --listen-client-urls $etcd --advertise-client-urls $etcd \
		--listen-peer-urls http://127.0.0.1:2380 --unsafe-no-fsync
	serve kube-apiserver --etcd-servers $etcd --bind-address $CONTROL4 --advertise-address $CONTROL4 --allow-privileged \
		--tls-cert-file "$keys/api.crt" --tls-private-key-file "$keys/api.key" --token-auth-file "$keys/tokens" \
		--authorization-mode RBAC --service-cluster-ip-range $SERVICES --kubelet-preferred-address-types InternalIP \
		--service-account-issuer https://kubernetes.default.svc.cluster.local \
		--service-account-key-file "$keys/accounts.pub" --service-account-signing-key-file "$keys/accounts.key" \
		--requestheader-client-ca-file "$keys/ca.crt" --requestheader-allowed-names front-proxy \
		--requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group \
		--requestheader-extra-headers-prefix X-Remote-Extra- --enable-aggregator-routing \
		--proxy-client-cert-file "$keys/front-proxy.crt" --proxy-client-key-file "$keys/front-proxy.key"
	until_true 60 k get --raw /readyz
	serve kube-controller-manager --kubeconfig "$DIR/run/admin.conf" --leader-elect=false --bind-address 127.0.0.1 \
		--allocate-node-cidrs --cluster-cidr $PODS --node-cidr-mask-size-ipv4 24 --node-cidr-mask-size-ipv6 64 \
		--service-cluster-ip-range $SERVICES --configure-cloud-routes=false --use-service-account-credentials \
		--service-account-private-key-file "$keys/accounts.key" --root-ca-file "$keys/ca.crt" \
		--cluster-signing-cert-file "$keys/ca.crt" --cluster-signing-key-file "$keys/ca.key"
	serve kube-scheduler --kubeconfig "$DIR/run/admin.conf" --leader-elect=false --bind-address 127.0.0.1
}

has_cidrs() { [ -n "$(k get node "n$1" -o 'jsonpath={.spec.podCIDRs[1]}')" ]; }

(join control) # makes the groups, before programs join at once
lan
keys
control_plane
for n in $NODES; do "$here/node.sh" boot "$n"; done
for n in $NODES; do until_true 60 has_cidrs "$n"; done
# The control plane is no node, so that BIRD tells it nothing.
routes control
[ "$ROUTES" != static ] || for n in $NODES; do routes "n$n"; done
k apply -f "$repo/deploy/kubernetes/tombolo.yaml" -f "$here/coredns.yaml" >/dev/null
k -n kube-system rollout status daemonset/tombolo --timeout=180s >/dev/null
k wait --for=condition=Ready node --all --timeout=120s >/dev/null
k -n kube-system rollout status deployment/coredns --timeout=120s >/dev/null
k get nodes -o wide
cat <<END
$here/kubectl get pods -A    speaks with the cluster
nsenter -t \$(cat $DIR/run/n1.pid) -a bash    is a shell on node n1
$here/down.sh    ends it; logs are in $DIR/logs
END
