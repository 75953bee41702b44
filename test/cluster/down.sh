#!/usr/bin/env bash
# Ends the cluster: all processes in its control groups, then the groups and the namespaces. It leaves what was built.
set -uo pipefail
. "$(dirname "$0")/env.sh"
groups() { find /sys/fs/cgroup -type d -name tombolo-cluster 2>/dev/null; }
processes() { groups | while read -r g; do find "$g" -name cgroup.procs -exec cat {} +; done | sort -u; }
for _ in $(seq 100); do
	list=$(processes)
	[ -n "$list" ] || break
	kill -KILL $list 2>/dev/null
	sleep .1
done
[ -z "$list" ] || { echo "processes do not end: $list" >&2; exit 1; }
for name in $(ip netns list | awk '/^tcluster-/ {print $1}'); do ip netns del "$name"; done
groups | while read -r g; do find "$g" -depth -type d -exec rmdir {} \;; done
rm -rf "$DIR/nodes" "$DIR/etcd" "$DIR/run"
