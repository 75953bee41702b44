#!/bin/sh
# forget-gone-pods.sh [DIRECTORY]: deletes what bridge, portmap and firewall left of pods
# that have no reservation in any network below DIRECTORY.
set -eu
directory=${1:-/var/lib/cni/networks}
# Without reservations all pods would count as gone.
if [ $# -gt 1 ] || [ ! -d "$directory" ]; then
	echo "usage: $0 [DIRECTORY]: $directory is no directory; name the dataDir of the networks" >&2
	exit 2
fi
containers=" " addresses=" "
for file in "$directory"/*/*[.:]*; do
	[ -f "$file" ] || continue
	container=$(head -n 1 "$file" | tr -d '\r')
	grep -qrs "\"containerID\":\"$container\"" /run/tombolo/attachments && continue
	containers="$containers$container " addresses="$addresses${file##*/} "
done

for iptables in iptables ip6tables; do
	command -v $iptables-save >/dev/null || continue
	$iptables-save -t nat | awk -v containers="$containers" '
		$2 !~ /^(POSTROUTING|CNI-HOSTPORT-DNAT)$/ || $NF !~ /^CNI-/ || !/ id: \\"/ { next }
		{ id = $0; sub(/.* id: \\"/, "", id); sub(/\\".*/, "", id) }
		index(containers, " " id " ") { next }
		!gone { print "*nat" }
		{ gone = 1; chains[$NF]; sub(/^-A/, "-D"); print }
		END { if (gone) { for (c in chains) print "-F " c "\n-X " c; print "COMMIT" } }
	' | $iptables-restore --noflush
	$iptables-save -t filter | awk -v addresses="$addresses" '
		$2 != "CNI-FORWARD" || $3 !~ /^-[sd]$/ { next }
		{ address = $4; sub("/.*", "", address) }
		index(addresses, " " address " ") { next }
		!gone { print "*filter" }
		{ gone = 1; sub(/^-A/, "-D"); print }
		END { if (gone) print "COMMIT" }
	' | $iptables-restore --noflush
done

command -v nft >/dev/null || exit 0
for table in "inet cni_plugins_masquerade" "ip cni_hostport" "ip6 cni_hostport"; do
	nft -a list table $table 2>/dev/null | awk -v containers="$containers" -v table="$table" '
		$1 == "chain" { chain = $2 }
		!/ comment ".*" # handle / { next }
		{ id = $0; sub(/.* comment "/, "", id); sub(/".*/, "", id); sub(/.* id: /, "", id) }
		!index(containers, " " id " ") { print "delete rule", table, chain, "handle", $NF }
	' | nft -f -
done
