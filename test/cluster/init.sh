#!/usr/bin/env bash
# The first process of node N, in its namespaces: it mounts what the node has of its own, and then waits. What is in
# $CLUSTER_DIR/nodes/nN is the node's disk, which a power cut leaves; /run is not.
set -euo pipefail
. "$(dirname "$0")/env.sh"
n=$1
disk=$DIR/nodes/n$n
mount --make-rprivate /
hostname "n$n"
# Copies of this machine's mounts would keep namespaces of others.
awk '$9 == "nsfs" || $8 == "nsfs" {print $5}' /proc/self/mountinfo | while read -r m; do umount -l "$m" || true; done

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
for c in $(cut -d / -f 1 "$DIR/run/hierarchies"); do
	mkdir "/sys/fs/cgroup/$c"
	case $c in systemd) options=none,name=systemd ;; *) options=$c ;; esac
	mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$c"
done
for d in etc opt var/lib var/log; do
	mkdir -p "$disk/$d" "$disk/work/$d"
	mount -t overlay -o "lowerdir=/$d,upperdir=$disk/$d,workdir=$disk/work/$d" overlay "/$d"
done
# What must not be an overlay, and what must not be this machine's.
for d in /var/lib/containerd /var/lib/kubelet /var/lib/cni /var/lib/tombolo /etc/cni /opt/cni /var/log/pods; do
	mkdir -p "$disk/own$d" "$d"
	mount --bind "$disk/own$d" "$d"
done
mkdir -p /etc/cni/net.d
for f in hosts resolv.conf; do mount --bind "$disk/etc/$f" "/etc/$f"; done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/netns /run/bird

# The kubelet sets these, but they are the machine's.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
	kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
	file=/run/sysctl/${setting%=*}
	mkdir -p "$(dirname "$file")"
	echo "${setting#*=}" >"$file"
	mount --bind "$file" "/proc/sys/${setting%=*}"
done
mount --make-rshared /
touch /run/up
while :; do sleep 3600 & wait $! || true; done
