#!/usr/bin/env bash
# Runs the network managers of a Debian beside a shared NIC (TestManagersNoticeNothingOfAShare), and its firewalld, in a
# root that mmdebstrap makes once below .cache: make test-long has it in turn.
#
# usage: test/managers.sh bookworm|trixie [RUN], where RUN is a part of the test, such as dhcpcd/NIC, or firewalld
set -euo pipefail
cd "$(dirname "$0")/.."
suite=$1 root=$PWD/.cache/managers-$1
test/deps.sh mmdebstrap mmdebstrap
if [ ! -e "$root/made" ]; then
	rm -rf "$root"
	mkdir -p .cache
	packages=systemd,udev,systemd-resolved,network-manager,dhcpcd-base,isc-dhcp-client,ifupdown,firewalld,dbus
	mmdebstrap --quiet --variant=minbase --include=$packages,ufw,avahi-daemon,samba,iptables,iproute2,nftables,procps "$suite" "$root"
	touch "$root/made"
fi
export TOMBOLO_MANAGERS_ROOT=$root
case ${2:-} in
"" | firewalld) go test -C test/cni -count=1 -timeout 570s -run TestTheHostsFirewallAdmitsCallsOfHostPorts/firewalld . ;;
esac
[ "${2:-}" = firewalld ] || go test -C test/lan -count=1 -timeout 570s -parallel 6 -run "TestManagersNoticeNothingOfAShare/${2:-}" .
