#!/bin/sh
# forget-tombolo.sh: deletes the rules and the state of tombolo, which has no pods.
set -eu
[ $# -eq 0 ] || { echo "usage: $0, without arguments" >&2; exit 2; }
for iptables in iptables ip6tables; do
	command -v $iptables-save >/dev/null || continue
	$iptables-save -t filter | awk '
		BEGIN { print "*filter" }
		/ --comment "tombolo: / { sub(/^-A/, "-D"); print }
		END { print "COMMIT" }
	' | $iptables-restore --noflush
done
for family in inet bridge; do
	nft delete table $family tombolo 2>/dev/null || :
done
rm -rf /run/tombolo
