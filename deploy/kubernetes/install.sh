#!/bin/sh
# Puts the plugin onto a node, and takes it away. A file is replaced whole, by a rename, so
# that a runtime finds the old one or the new one at any moment; the network comes last and goes
# first, so that it never names a plugin that is not there.
#
# usage: install.sh install|keep|uninstall
#   keep installs, and does so again when a file is missing or another one
#
# The node's directories are mounted at $HOST, below which CNI_BIN and CNI_CONF are. The programs
# are in $FROM; the network, if there is one, is in $NETWORK; $NAMES is deploy/names.sh.
set -eu
HOST=${HOST:-/host} FROM=${FROM:-/opt/tombolo} NETWORK=${NETWORK:-/etc/tombolo/10-tombolo.conflist}
bin=$HOST${CNI_BIN:-/opt/cni/bin} conf=$HOST${CNI_CONF:-/etc/cni/net.d}
names=${NAMES:-${0%/*}/names.sh}
network=$conf/${NETWORK##*/}

put() { # put FROM TO MODE
	if [ -e "$2" ] && cmp -s "$1" "$2"; then return; fi
	rm -f "$2".new.*
	cp "$1" "$2.new.$$"
	chmod "$3" "$2.new.$$"
	mv -f "$2.new.$$" "$2"
	echo "installed $2"
}

install() {
	mkdir -p "$bin" "$conf"
	put "$FROM/tombolo-cni" "$bin/tombolo" 0755
	# containerd up to 1.7 looks for it; that of others stays.
	"$names" loopback "${bin#"$HOST"}" "$HOST"
	if [ -e "$NETWORK" ]; then put "$NETWORK" "$network" 0644; fi
}

case ${1:-} in
install) install ;;
keep)
	trap 'exit 0' TERM INT
	while :; do
		install
		sleep "${EVERY:-10}" &
		wait $!
	done
	;;
uninstall)
	# A network that somebody else wrote stays.
	if [ -e "$network" ] && grep -q '"type" *: *"tombolo"' "$network"; then rm -f "$network"; fi
	# First the names, which cannot be started without the program.
	"$names" --undo "${bin#"$HOST"}" "$HOST"
	rm -f "$bin/tombolo" "$bin/tombolo".new.* "$network".new.*
	echo "uninstalled"
	;;
*)
	echo "usage: $0 install|keep|uninstall" >&2
	exit 2
	;;
esac
