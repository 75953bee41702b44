#!/usr/bin/env bash
# Installs what tests and benchmarks need and this machine lacks, and says so. No
# service is started by it.
#
# usage: test/deps.sh [COMMAND PACKAGE], which is that alone
set -euo pipefail

[ "$(id -u)" = 0 ] || { echo "tests make network namespaces and links: run them as root" >&2; exit 1; }

missing=()
need() { # need COMMAND PACKAGE
	command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}
PATH=$PATH:/usr/sbin:/sbin
if [ $# = 2 ]; then
	need "$1" "$2"
else
	need gcc gcc
	need ip iproute2
	need ping iputils-ping
	need nft nftables
	need iptables iptables
	need strace strace
	need conntrack conntrack
	need iperf3 iperf3
	need containerd containerd
	need runc runc
	need podman podman
	need dockerd docker.io
	need dnsmasq dnsmasq-base
	need radvd radvd
	need kea-dhcp4 kea-dhcp4-server
	need bird bird2
	need vtysh frr
	need firewalld firewalld
	need ufw ufw
	need dbus-daemon dbus
	need dbus-send dbus-bin
	need NetworkManager network-manager
	need dhcpcd dhcpcd-base
	need dhclient isc-dhcp-client
	need ifup ifupdown
	need kea-dhcp6 kea-dhcp6-server
	need busybox busybox-static
	need nsenter util-linux
	need git git
	need zsh zsh
	[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
fi
[ ${#missing[@]} = 0 ] && exit 0

command -v apt-get >/dev/null || { echo "please install: ${missing[*]}" >&2; exit 1; }
echo "apt-get install ${missing[*]}"
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	# By this file packages ask whether they may start a service.
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod +x "$policy"
	trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
	apt-get update -qq >/dev/null
	apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
