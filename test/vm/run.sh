#!/usr/bin/env bash
# Runs tests on another kernel than this machine's: Debian's, in a virtual machine.
# It is emulated, as KVM within a virtual machine may hang. Arguments are packages,
# as folders, where FOLDER:2/3 means the second third of its tests, and FOLDER@TEXT
# those whose names have the text; or the name of a part: together all that speak with
# the kernel take too long for one machine. Without any, there is a machine for each
# part; that of noipv6 has IPv6 switched off. Before the tests comes the demo, on a
# kernel that has no module loaded yet.
#
#   test/vm/run.sh [libraries | firewall | leases | plugin | pods | lan | noipv6 | FOLDER…]
#   VM_SUITE=trixie test/vm/run.sh bridge
#   test/vm/run.sh arm64
#
# VM_SUITE is the Debian whose kernel it is (bookworm), VM_LIMIT how many seconds a
# machine may take with all that is built for it, VM_FLAGS has more flags for the tests
# (-test.run=Attach -test.count=5), VM_BOOT more for the kernel (ipv6.disable=1). What
# is left out stands in skips.txt, with reasons. The machine of arm64 has the kernel and
# busybox alone: it runs the demo, and tests that need no other program. qemu-user would
# not do: it has no sockets of nf_tables, and no NS_GET_NSTYPE of ioctl_ns(2).
#
# The guest's init, beside this file, writes marks that begin with "@vm " to its
# second serial port, where the tests write too; the first is the kernel's alone. A
# run without the last mark has failed, whatever came before. If nothing failed but the
# time, the status is 75: a slow machine does that, and so does a test that hangs.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH=$PATH:/usr/sbin:/sbin

oldest=6.1
suite=${VM_SUITE:-bookworm}
arch=amd64
limit=${VM_LIMIT:-900}
per_package=$((limit > 900 ? limit - 60 : 840)) # seconds, after which tests hang
out_of_time=75                                  # the exit status
skips=test/vm/skips.txt
cache=$PWD/.cache/vm

# The modules of what the tests use, and of what nodes have loaded beside it. Those
# that a kernel has built in, or has not got, are passed over. The libraries are tested
# with all of them loaded; for the plugin the kernel has to fetch what it needs, all
# but br_netfilter, which kernels do not load by themselves.
modules=(bridge 8021q br_netfilter veth dummy tun ifb macvlan nf_tables nf_conntrack nf_conntrack_netlink
	nf_conntrack_bridge nf_nat nfnetlink_queue nft_chain_nat nft_compat nft_connlimit nft_ct nft_dup_netdev nft_fib nft_fib_inet
	nft_fib_ipv4 nft_fib_ipv6 nft_fwd_netdev nft_hash nft_limit nft_log nft_masq nft_meta_bridge nft_nat nft_numgen
	nft_objref nft_queue nft_quota nft_redir nft_reject nft_reject_bridge nft_reject_inet nft_reject_ipv4
	nft_reject_ipv6 nf_log_syslog ip_tables iptable_filter iptable_mangle iptable_nat ipt_REJECT ip6_tables
	ip6table_filter ip6table_mangle ip6table_nat ip6t_REJECT xt_LOG xt_MASQUERADE xt_NFQUEUE xt_REDIRECT xt_TCPMSS
	xt_addrtype xt_comment xt_connmark xt_conntrack xt_limit xt_mark xt_multiport xt_nat xt_physdev xt_statistic
	xt_tcpudp tcp_diag udp_diag raw_diag unix_diag netlink_diag sctp sctp_diag vxlan sch_htb sch_ingress sch_prio
	sch_sfq sch_tbf cls_bpf cls_u32 cls_matchall act_gact act_mirred vrf mpls_router mpls_iptunnel bonding
	team team_mode_roundrobin)

loaded=("${modules[@]}")
cmdline="console=ttyS0 panic=-1 oops=panic mitigations=off tsc=reliable ${VM_BOOT:-}"
case ${1:-all} in
all)
	for part in libraries firewall leases plugin pods lan noipv6; do test/vm/run.sh $part || exit; done
	exit
	;;
libraries) packages=(netns addr route bridge nft:1/2 internal/nl internal/sysctl internal/state ipam network@BrokenVLAN) ;;
firewall) packages=(nft:2/2 nft/foreign nft/internal/ruleset internal/icmp internal/testutil/nstest bridge/bandwidth internal/tc internal/localnet internal/conntrack hostport) ;;
leases) packages=(dhcpc dhcpc/transport internal/lease internal/keeper cmd/tombolod) ;;
lan) packages=(network/internal/uplink bridge/share) ;; # test/lan counts datagrams, which an emulated machine loses by itself
plugin)
	packages=(internal/cni cmd/tombolo test/cni:1/2)
	loaded=(br_netfilter)
	;;
pods)
	packages=(test/cni:2/2)
	loaded=(br_netfilter)
	;;
noipv6)
	packages=(test/cni@WithIPv4Alone)
	loaded=(br_netfilter)
	cmdline+=" ipv6.disable=1"
	;;
arm64)
	packages=({netns,addr,route,bridge{,/bandwidth},nft{,/foreign},hostport,network}@Example
		bridge/vlan ipam dhcpc internal/{dhcp6,ident,strict} internal/nl@Fuzz)
	cmdline+=" console=ttyAMA0 quiet loglevel=1 out=ttyAMA0"
	arch=arm64
	;;
*) packages=("$@") ;;
esac
# apt's options for packages of the suite and the architecture, whatever this machine runs
debian=$cache/$suite-$arch
of_suite=(-o Dir::Etc::SourceParts=- -o Dir::Etc::SourceList="$debian/sources.list" -o Dir::State::Lists="$debian/lists"
	-o Dir::Cache="$debian/cache" -o APT::Architecture=$arch -o APT::Architectures=$arch)

fail() { echo "vm: $*" >&2; exit 1; }

# --- this machine's tools ---

install_tools() {
	local missing=() keyring=/usr/share/keyrings/debian-archive-keyring.gpg
	need() { command -v "$1" >/dev/null || missing+=("$2"); }
	if [ $arch = arm64 ]; then need qemu-system-aarch64 qemu-system-arm; else need qemu-system-x86_64 qemu-system-x86; fi
	[ -e $keyring ] || missing+=(debian-archive-keyring)
	need busybox busybox-static
	need cpio cpio
	need modprobe kmod
	need ip iproute2
	need nft nftables
	need xtables-nft-multi iptables
	need conntrack conntrack
	need dnsmasq dnsmasq-base
	need kea-dhcp4 kea-dhcp4-server
	need kea-dhcp6 kea-dhcp6-server
	need strace strace
	# Debian has another busybox, which is linked dynamically.
	! ldd "$(command -v busybox || echo /none)" >/dev/null 2>&1 || missing+=(busybox-static)
	mkdir -p "$debian"/{lists,cache}
	echo "deb [signed-by=$keyring] http://deb.debian.org/debian $suite main" >"$debian/sources.list"
	[ ${#missing[@]} -gt 0 ] || return 0
	command -v apt-get >/dev/null || fail "please install ${missing[*]}"
	[ "$(id -u)" = 0 ] || fail "please install ${missing[*]}, or run this as root"
	echo "vm: installing ${missing[*]}"
	apt_quietly install -y --no-install-recommends "${missing[@]}"
}

# apt_quietly runs apt-get, and once more after an update of its lists.
apt_quietly() {
	local log=$cache/apt.log
	export DEBIAN_FRONTEND=noninteractive
	apt-get -qq "$@" >"$log" 2>&1 && return
	apt-get -qq update >>"$log" 2>&1 || true
	apt-get -qq "$@" >>"$log" 2>&1 || { cat "$log" >&2; fail "apt-get $* failed"; }
}

# --- the kernel ---

# unpack_kernel sets kernel_dir and release. Nothing of it is installed here.
unpack_kernel() {
	[ "$(dpkg --print-architecture)" = amd64 ] || fail "runs on amd64 only"
	local package lib
	package=$(kernel_image)
	kernel_dir=$cache/$package
	unpack "$package"
	# A package may have them in /usr/lib; the link to that is another package's.
	lib=$(dirname "$(find "$kernel_dir" -type d -path '*/lib/modules')")
	[ -e "$kernel_dir/lib" ] || ln -s "${lib#"$kernel_dir"/}" "$kernel_dir/lib"
	release=$(basename "$kernel_dir"/lib/modules/*)
	[ -e "$kernel_dir/lib/modules/$release/modules.dep" ] || depmod -b "$kernel_dir" "$release"
	! older_than "$oldest" || fail "$package has Linux $release, and Tombolo needs $oldest"
	echo "vm: Linux $release, of $package"
	[[ $release == "$oldest".* ]] || echo "vm: this is not $oldest, the oldest that Tombolo runs on"
}

# unpack downloads a package of the suite, and unpacks it below its name in the cache.
unpack() {
	local dir=$cache/$1
	[ ! -e "$dir/complete" ] || return 0
	echo "vm: downloading $1"
	rm -rf "$dir"
	mkdir -p "$dir"
	(cd "$dir" && apt_quietly "${of_suite[@]}" download "$1")
	dpkg-deb -x "$dir"/*.deb "$dir"
	rm "$dir"/*.deb
	touch "$dir/complete"
}

# kernel_image gives the package that has the kernel itself: Debian's names without a
# version depend on it.
kernel_image() {
	find_image || { apt_quietly "${of_suite[@]}" update; find_image; } || fail "apt knows no kernel of $suite"
}

find_image() {
	apt-cache "${of_suite[@]}" depends linux-image-cloud-$arch 2>/dev/null | awk '
		NR == 1 { image = $1 }
		$1 == "Depends:" && $2 ~ /^linux-image-/ { image = $2 }
		END { if (image == "") exit 1; print image }'
}

# older_than says whether the kernel is older than a version.
older_than() { [ "$(printf '%s\n' "$1" "$release" | sort -V | head -1)" != "$1" ]; }

# --- the guest's files ---

# make_root fills $root with busybox, the programs that tests ask, the kernel's
# modules, the tests, and all that is in the repository, as tests read files of it.
make_root() {
	mkdir -p "$root"/{bin,dev,etc,peers,proc,root,run,sbin,src,sys,tests,tmp,usr/sbin,var/lib}
	install test/vm/init "$root/init"
	local program path folder
	if [ $arch = arm64 ]; then
		unpack busybox-static:arm64
		install "$(find "$cache/busybox-static:arm64" -name busybox -type f -perm -1)" "$root/bin/busybox"
		ln -s ../bin/busybox "$root/sbin/modprobe"
		ln -s busybox "$root/bin/sh"
	else
		install "$(command -v busybox)" "$root/bin/busybox"
		add_programs
	fi
	for path in /etc/protocols /etc/iproute2 /usr/share/iproute2; do
		[ ! -e "$path" ] || { mkdir -p "$root${path%/*}" && cp -rL "$path" "$root$path"; }
	done
	printf '%s\n' root:x:0:0::/root:/bin/sh nobody:x:65534:65534::/:/bin/false >"$root/etc/passwd"
	: >"$root/etc/resolv.conf" # that a test looks whether it stays as it is
	printf '%s\n' root:x:0: nogroup:x:65534: >"$root/etc/group"
	add_modules
	git ls-files -co --exclude-standard | while read -r path; do
		[ ! -e "$path" ] || echo "$path" # one may have been deleted and not committed
	done | cpio --quiet -pdm "$root/src"
	GOARCH=$arch make -s build BIN="$root/bin"
	build build ./test/demo "$root/bin/tombolo-demo"
	build "build -C bench/peers" tool "$root/peers/"
	echo "-test.v=test2json -test.paniconexit0 -test.short -test.timeout=${per_package}s ${VM_FLAGS:-}" >"$root/tests/flags"
	for folder in "${packages[@]}"; do add_tests "$folder"; done
}

# add_programs copies this machine's programs that tests start.
add_programs() {
	local program
	for program in ip bridge tc ss nstat nft conntrack dnsmasq kea-dhcp4 kea-dhcp6 strace unshare setpriv bash; do
		add_program "$program" /usr/sbin
	done
	add_iptables
	# Debian's busybox has a shell that prefers applets, its ip among them, to programs.
	add_program sh /bin
	add_program modprobe /sbin
}

# build is go build, or go test -c, of something to somewhere.
build() {
	# shellcheck disable=SC2086 # the command is words
	CGO_ENABLED=0 GOARCH=$arch go $1 -trimpath -ldflags '-s -w' -o "$3" "$2"
}

# add_program copies a program to a folder of the guest's, and its libraries.
add_program() {
	local path
	path=$(command -v "$1")
	cp -L "$path" "$root$2/$1"
	add_libraries "$path"
}

# add_libraries copies what programs or libraries are linked with.
add_libraries() {
	local lib
	ldd "$@" | { grep -o '[[:space:]]/[^ ]*' || true; } | sort -u | while read -r lib; do
		install -D "$lib" "$root$lib"
	done
}

# add_iptables copies iptables of both kinds under all of its names, of which those
# without a kind mean nf_tables, and the extensions that it loads.
add_iptables() {
	local kind program action extensions
	for kind in nft legacy; do
		add_program "xtables-$kind-multi" /usr/sbin
		for program in iptables ip6tables; do
			for action in "" -save -restore; do
				ln -s "xtables-$kind-multi" "$root/usr/sbin/$program-$kind$action"
				ln -sf xtables-nft-multi "$root/usr/sbin/$program$action"
			done
		done
	done
	extensions=$(dirname "$(dpkg -L iptables | grep -m 1 '/libxt_')")
	mkdir -p "$root$extensions"
	cp -L "$extensions"/*.so "$root$extensions"
	add_libraries "$extensions"/*.so
}

# add_modules copies the modules and those that they depend on, to where modprobe
# finds them: the guest's init runs it, and the kernel where somebody needs one.
add_modules() {
	local module path known=/lib/modules/$release
	for module in "${modules[@]}"; do
		modprobe -d "$kernel_dir" -S "$release" --show-depends "$module" 2>/dev/null || true
	done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
		install -D -m 0644 "$path" "$root${path#"$kernel_dir"}"
	done
	[ -d "$root$known" ] || fail "none of the modules is in $kernel_dir"
	cp "$kernel_dir$known"/modules.{builtin,builtin.modinfo,order} "$root$known"
	depmod -b "$root" "$release"
	echo "${loaded[*]}" >"$root/etc/modules"
}

# add_tests builds a package's tests, or some of them, and tells init of them: FOLDER
# RUN SKIP.
add_tests() {
	local folder=${1%%[:@]*} share=1/1 run=. binary skip
	[[ $1 != *:* ]] || share=${1#*:}
	[[ $1 != *@* ]] || run=${1#*@}
	binary=$root/tests/${folder//\//-}
	build "test -C $folder -c" . "$binary"
	[ -e "$binary" ] || { echo "vm: $folder has no tests"; return; }
	skip=$(skip_pattern "$folder" "$share")
	echo "$folder $run $skip" >>"$root/tests/list"
}

# not_in_share names the tests of a folder that others run: 2/3 is each third test, from
# the second on.
not_in_share() {
	cat "$1"/*_test.go | sed -n 's/^func \(Test[A-Za-z0-9_]*\)(.*/\1/p' | grep -vx TestMain | LC_ALL=C sort |
		awk -v "i=${2%/*}" -v "n=${2#*/}" 'NR % n != i % n'
}

# skip_pattern makes a value of -test.skip of a folder's lines in skips.txt, and of what
# is not in the share.
skip_pattern() {
	local line patterns=() form='^([^ ]+) ([^ ]+)( <([0-9.]+))?: .+$'
	for line in $(not_in_share "$@"); do patterns+=("^$line\$"); done
	while read -r line; do
		[[ $line != "#"* && -n $line ]] || continue
		[[ $line =~ $form ]] || fail "$skips: ${line@Q} is not FOLDER TEST: REASON"
		local folder=${BASH_REMATCH[1]} test=${BASH_REMATCH[2]} before=${BASH_REMATCH[4]}
		[ "$folder" = "$1" ] || continue
		[ -z "$before" ] || older_than "$before" || continue
		grep -qs "^func ${test%%/*}(" "$folder"/*_test.go || fail "$skips: $folder has no ${test%%/*}"
		echo "vm: left out: $line" >&2
		# Each part of the name is an expression of its own.
		test=$(sed 's|[][().*+?{}^$\\|]|\\&|g; s|/|$/^|g' <<<"$test")
		patterns+=("^$test\$")
	done <"$skips"
	(IFS='|' && echo "${patterns[*]}")
}

# --- the run ---

# boot runs the machine for some seconds at most, and prints what comes from its second
# serial port. It ends with the machine or, with status 124, at the limit.
boot() {
	local machine=(qemu-system-x86_64 -cpu max -serial "file:$work/console")
	[ $arch = amd64 ] || machine=(qemu-system-aarch64 -machine virt -cpu cortex-a72) # it has one serial port
	timeout --foreground -k 5 "$1" nice -n 10 "${machine[@]}" \
		-accel tcg,thread=multi -smp 2 -m 2048 -nodefaults -no-user-config -display none -no-reboot \
		-kernel "$kernel_dir/boot/vmlinuz-$release" -initrd "$work/initramfs" \
		-append "$cmdline" \
		-serial stdio -monitor none </dev/null | tr -d '\r'
}

# follow puts the guest's output into files, one for each thing that it runs, and
# prints the marks.
follow() {
	local line name=boot
	while IFS= read -r line; do
		case $line in
		"@vm run "*) name=${line#@vm run } ;;
		"@vm "*) echo "${line#@}" ;;
		esac
		printf '%s\n' "$line" >>"$(output "$name")"
	done
}

output() { echo "$work/output/${1//\//-}"; }

# ended_well says whether init saw the exit status 0.
ended_well() { grep -qs "^@vm $1: exit 0 " "$(output "$1")"; }

# events gives the output of a package's tests as go test -json would.
events() { { grep -v '^@vm ' "$(output "$1")" || true; } | go tool test2json -p "github.com/tombolo-cni/tombolo/$1"; }

# judge prints what failed. Tests may have passed and the package not: it may leak.
judge() {
	local folder=$1 passed=0
	begun "$folder" || { missing "$folder" "did not run"; return; }
	events "$folder" >"$work/events"
	cat "$work/events" >>"$work/all"
	"$work/report" -skips test/skips.txt <"$work/events" >"$work/verdict" || passed=$?
	[ $passed != 0 ] || ! ended_well "$folder" || return 0
	if ! ended "$folder" && ! grep -q '^FAIL' "$work/verdict"; then
		missing "$folder" "did not get past $(unfinished)"
		return
	fi
	cat "$work/verdict"
	ended_well "$folder" || { tail -30 "$(output "$folder")"; echo "FAIL  $folder"; }
	return 1
}

begun() { [ -e "$(output "$1")" ]; }
ended() { grep -qs "^@vm $1: exit " "$(output "$1")"; }

# missing says what did not happen, and is the status for it.
missing() {
	if [ $in_time = yes ]; then echo "FAIL  $*"; return 1; fi
	echo "vm: $*"
	return $out_of_time
}

# unfinished names the tests that the last events leave without a verdict.
unfinished() {
	sed -n 's/.*"Action":"\(run\|pass\|fail\|skip\)".*"Test":"\([^"/]*\)".*/\1 \2/p' "$work/events" |
		awk '{ last[$2] = $1 } END { for (t in last) if (last[t] == "run") print t }' | sort | tr '\n' ' '
}

judge_all() {
	local status=0 folder how
	while read -r folder _; do
		how=0
		judge "$folder" || how=$?
		[ $how = 0 ] || [ $status = 1 ] || status=$how
	done <"$root/tests/list"
	cat "$(output demo)" || true
	ended_well demo || { ! ended demo && [ $in_time = no ]; } || { echo "FAIL  demo"; status=1; }
	if [ $in_time = yes ] && ! grep -qx "@vm end" "$work"/output/*; then
		echo "FAIL  the machine did not get to its end. The kernel's last words:"
		tail -40 "$work/console"
		status=1
	fi
	# Not ours to judge, but somebody should look.
	cp "$work/console" "$cache/console"
	grep -E 'WARNING: |BUG: |rcu.*stall' "$work/console" || true
	"$work/report" -summary -skips test/skips.txt <"$work/all" || [ $status != 0 ] || status=1
	return $status
}

mkdir -p "$cache"
install_tools
unpack_kernel

# What the kernel said is kept until the next run, and of a failed one all output.
rm -rf "$cache"/failed
work=$(mktemp -d "$cache/run.XXXXXX")
root=$work/root
trap 'rm -rf "$work"' EXIT
mkdir "$work/output"
touch "$work/all" "$work/console"
go build -o "$work/report" ./test/report
make_root
(cd "$root" && find . | cpio --quiet -o -H newc) >"$work/initramfs"

echo "vm: booting, with $(($(stat -c %s "$work/initramfs") >> 20)) MiB of files"
start=$SECONDS in_time=yes status=0
left=$((limit - SECONDS - 15)) # less what it takes to judge
[ $left -gt 0 ] || { echo "vm: to build all took longer than the limit of $limit s"; exit $out_of_time; }
boot $left | follow || {
	status=${PIPESTATUS[0]}
	echo "vm: the machine ended with status $status"
	[ "$status" != 124 ] && [ "$status" != 137 ] || in_time=no
}
echo "vm: it ran for $((SECONDS - start)) s"
status=0
judge_all || status=$?
[ $status != 0 ] || { echo "vm: all passed on Linux $release"; exit; }

rm -rf "$root" "$work/initramfs"
mv "$work" "$cache/failed"
[ $status != $out_of_time ] || {
	echo "vm: nothing failed on Linux $release, but the time of $limit s is up; .cache/vm/failed has the output"
	exit $out_of_time
}
fail "FAILED on Linux $release; .cache/vm/failed has the output, and the kernel's (console)"
