# The machine on which the commands of README.md and docs are run: a network, a mount and a
# process namespace, whose /run and /var/lib are empty, and where what is written to /etc, /opt,
# /usr/local and the repository goes when it ends. What would reach the real machine, or a
# registry, is a function below; all else is as a reader types it.
set -eu
mount -t tmpfs none /run
mount -t tmpfs none /var/lib
mkdir -p /run/lab
for dir in /etc /opt /usr/local "$REPOSITORY"; do
	mkdir -p "/run/lab/upper$dir" "/run/lab/work$dir"
	mount -t overlay -o "lowerdir=$dir,upperdir=/run/lab/upper$dir,workdir=/run/lab/work$dir" overlay "$dir"
done
cd "$REPOSITORY"
mkdir /run/lab/bin
ln -s "$(command -v busybox)" /run/lab/bin/ping
PATH=/run/lab/bin:$PATH

# The tests are what runs this.
make() {
	case "$*" in
	test) command make --dry-run test >/dev/null ;;
	*) command make BIN=/run/lab/built "$@" ;;
	esac
}

apt-get() { test "$1" = install; }
modprobe() { test "$1" = br_netfilter; }

systemctl() {
	test "$*" = "enable --now tombolod"
	grep -q ExecStart=/usr/local/bin/tombolod /etc/systemd/system/tombolod.service
	tombolod >/run/lab/tombolod.log 2>&1 &
	until test -S /run/tombolo/tombolod.sock; do sleep 0.05; done
}

# image makes an archive of busybox, under the names of the images that the pages pull.
image() {
	test -e /run/lab/image.tar && return
	mkdir -p /run/lab/root/bin /run/lab/image
	cp "$(command -v busybox)" /run/lab/root/bin/
	for name in sh ip ping sleep mkdir httpd; do ln -s busybox "/run/lab/root/bin/$name"; done
	tar -C /run/lab/root -cf /run/lab/image/layer.tar .
	local sum
	sum=$(sha256sum /run/lab/image/layer.tar | cut -d ' ' -f 1)
	echo '{"architecture":"'"$(go env GOARCH)"'","os":"linux","config":{"Cmd":["sleep","1000"]},"rootfs":{"type":"layers","diff_ids":["sha256:'"$sum"'"]}}' >/run/lab/image/config.json
	echo '[{"Config":"config.json","RepoTags":["docker.io/library/busybox:latest","docker.io/library/nginx:alpine"],"Layers":["layer.tar"]}]' >/run/lab/image/manifest.json
	tar -C /run/lab/image -cf /run/lab/image.tar config.json layer.tar manifest.json
}

# The control groups of this machine are as its init left them; crun refuses some such.
podman() {
	image
	mkdir -p /etc/containers
	printf '[engine]\ncgroup_manager = "cgroupfs"\nruntime = "runc"\nevents_logger = "none"\n' >/etc/containers/containers.conf
	command podman load -q -i /run/lab/image.tar >/dev/null
	command podman "$@"
}

ctr() {
	export CONTAINERD_NAMESPACE=lab$$ # control groups are below one of that name, and labs run side by side
	if ! test -S /run/containerd/containerd.sock; then
		image
		printf 'version = 2\nroot = "/run/lab/containerd"\n[plugins."io.containerd.internal.v1.opt"]\n  path = "/run/lab/opt"\n' >/run/lab/containerd.toml
		containerd --config /run/lab/containerd.toml >/run/lab/containerd.log 2>&1 &
		until command ctr version >/dev/null 2>&1; do sleep 0.05; done
		command ctr image import /run/lab/image.tar >/dev/null
	fi
	case "$1 $2" in
	"image pull") command ctr image ls -q | grep -qx "$3" ;;
	"container delete") # what follows finds the container's port gone, as a while later
		command ctr "$@"
		while { ip -oneline link show group 29806; ip -oneline link show group 29807; } | grep -q ': veth'; do sleep 0.05; done ;;
	*) command ctr "$@" ;;
	esac
}
