#!/bin/sh
# Has the plugin be called by the name of a reference plugin too, where no plugin has that name,
# and takes all such names away. It does what "tombolo install" does, for a program that
# cannot run here, as one of another architecture.
#
# usage: names.sh NAME DIR [ROOT]
#        names.sh --undo DIR [ROOT]
#   DIR is the directory of plugins as the node sees it; it is below ROOT here
set -eu
name=$1 dir=$2 here=${3:-}$2

if [ "$name" != --undo ]; then
	[ ! -e "$here/$name" ] || exit 0 # it is others', or ours already
	new=$here/.tombolo-$$
	printf '#!%s/tombolo as\n# Tombolo, by the name of the reference plugin %s. To undo: tombolo install --undo %s\n' "$dir" "$name" "$dir" >"$new"
	chmod 0755 "$new"
	mv -f "$new" "$here/$name"
	exit 0
fi
for file in "$here"/*; do
	if [ -f "$file" ] && [ ! -L "$file" ] && head -n 1 "$file" | grep -qx '#!/.*/tombolo as'; then
		if [ -e "$file.reference" ]; then mv -f "$file.reference" "$file"; else rm -f "$file"; fi
	fi
done
