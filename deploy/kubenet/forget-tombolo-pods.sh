#!/bin/sh
# forget-tombolo-pods.sh: has tombolo DEL the pods that the reference plugins deleted.
set -eu
[ $# -eq 0 ] || { echo "usage: $0, without arguments" >&2; exit 2; }
network=kubenet
tombolo=/opt/cni/bin/tombolo
cd /run/tombolo/attachments/$network 2>/dev/null || exit 0 # none is on record
for record in *.json; do
	[ -f "$record" ] || continue
	ip link show "veth${record%.json}" >/dev/null 2>&1 && continue
	field() { grep -o "\"$1\":\"[^\"]*\"" "$record" | head -n 1 | cut -d '"' -f 4; }
	CNI_COMMAND=DEL CNI_CONTAINERID=$(field containerID) CNI_IFNAME=$(field ifName) $tombolo <<-END
		{ "cniVersion": "1.0.0", "name": "$network", "type": "tombolo", "stateDir": "/run/tombolo" }
	END
done
