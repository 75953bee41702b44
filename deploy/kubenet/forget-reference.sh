#!/bin/sh
# forget-reference.sh: deletes the chains, tables and links of bridge, portmap, firewall
# and bandwidth.
set -eu
[ $# -eq 0 ] || { echo "usage: $0, without arguments" >&2; exit 2; }
for iptables in iptables ip6tables; do
	command -v $iptables-save >/dev/null || continue
	for table in nat filter; do
		$iptables-save -t $table | awk -v table=$table '
			/^:CNI-/ { chains[substr($1, 2)] }
			$1 == "-A" && $2 !~ /^CNI-/ && / -j CNI-/ { sub(/^-A/, "-D"); rules = rules $0 "\n" }
			END {
				printf "*%s\n%s", table, rules
				for (c in chains) print "-F " c
				for (c in chains) print "-X " c
				print "COMMIT"
			}
		' | $iptables-restore --noflush
	done
done
if command -v nft >/dev/null; then
	for table in "inet cni_plugins_masquerade" "ip cni_hostport" "ip6 cni_hostport"; do
		nft delete table $table 2>/dev/null || :
	done
fi
ip -brief link show type ifb | awk '{ sub(/@.*/, "", $1) } $1 ~ /^bwp/ { print "link delete", $1 }' | ip -batch -
