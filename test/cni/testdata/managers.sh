# The machine of TestNetworkManagersLeavePodsAlone: $MANAGER configures every link, and pods are on $BRIDGE. The manager is
# through with the links that it found when up0 has its lease. The pod's server logs each answer to the host.
set -eu
for dir in /run /var/lib /etc/systemd/network /etc/NetworkManager; do
	[ ! -d $dir ] || mount -t tmpfs none $dir
done
mount -t sysfs -o ro none /sys
cp /etc/resolv.conf /run/resolv.conf && mount --bind /run/resolv.conf /etc/resolv.conf # the machine's own stays
mkdir -p /run/netns /run/dbus /run/dhcpcd /run/systemd/netif/leases /run/systemd/netif/links /run/systemd/network
mkdir -p /var/lib/NetworkManager /var/lib/dhcpcd /etc/NetworkManager/conf.d /etc/NetworkManager/system-connections
chown -R systemd-network: /run/systemd/netif
ip link set lo up
ip netns add world
ip link add up0 type veth peer name w0 netns world
ip -n world address add 192.0.2.1/24 dev w0
ip -n world link set w0 up
ip link set up0 up
serve() {
	ip netns exec $1 dnsmasq --no-daemon --conf-file=/dev/null --port=0 --bind-interfaces --dhcp-authoritative --user=root \
		--log-dhcp --log-facility=/run/$1.log --dhcp-leasefile=/run/$1.leases "${@:2}" >/dev/null 2>&1 &
}
serve world --interface=w0 --dhcp-range=192.0.2.100,192.0.2.150,1h --dhcp-option=3,192.0.2.1

printf '[Match]\nName=*\n[Network]\nDHCP=yes\n' >/etc/systemd/network/10-all.network
printf '[main]\nplugins=keyfile\ndns=none\nrc-manager=unmanaged\n[device-all]\nmatch-device=*\nmanaged=1\n' >/etc/NetworkManager/NetworkManager.conf
printf 'noarp\nnohook resolv.conf, hostname\n' >/run/dhcpcd.conf
eval "$KEEP_OFF"
export DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/dbus/system_bus_socket
if [ $MANAGER = nm ]; then
	dbus-daemon --system --nofork --nopidfile --address=$DBUS_SYSTEM_BUS_ADDRESS >/dev/null 2>&1 &
	until [ -S /run/dbus/system_bus_socket ]; do sleep 0.05; done
fi
begin() {
	case $MANAGER in
	networkd) "$NETWORKD" >/run/manager.log 2>&1 & ;;
	nm) NetworkManager -n >/run/manager.log 2>&1 & ;;
	dhcpcd) dhcpcd --nodev --nobackground --config /run/dhcpcd.conf >/run/manager.log 2>&1 & ;;
	esac
	manager=$!
	until ip -4 -o address show dev up0 | grep -q 192.0.2.1; do sleep 0.1; done
}
begin
conf='{"cniVersion":"1.0.0","name":"pods","type":"tombolo","bridge":"'$BRIDGE'","ipam":{"type":"host-local","ranges":[[{"subnet":"10.22.0.0/16"}],[{"subnet":"fd22::/64"}]]}}'
for pod in a b; do
	ip netns add $pod
	echo "$conf" | CNI_COMMAND=ADD CNI_CONTAINERID=$pod CNI_NETNS=/run/netns/$pod CNI_IFNAME=eth0 CNI_PATH=/nowhere "$PLUGIN" >/run/result || { cat /run/result; exit 1; }
done
ip netns exec a sh -c 'echo 1 >/proc/sys/net/ipv6/conf/all/forwarding'
serve a --interface=eth0 --dhcp-range=10.22.200.1,10.22.200.99,255.255.0.0,1h --dhcp-option=121,1.1.1.0/24,10.22.0.2,0.0.0.0/0,10.22.0.2 \
	--enable-ra --ra-param=eth0,4,1800 --dhcp-range=fd22::,ra-stateless
# A link that asks for a lease and for routers asks again after some seconds.
given() { ip route | grep "dev \($BRIDGE\|veth\).* proto dhcp" || ip -6 route | grep "dev \($BRIDGE\|veth\).* proto ra"; }
for i in $(seq 100); do ! given || break; sleep 0.1; done
check() { "$TOMBOLO" check || true; }
if given; then
	check | grep "gave veth.* default via 10.22.0.2"
	kill $manager
	wait $manager || true
	remedy=$(check | sed -n 's/.*and then: \(.*\) \[configuration\].*/\1/p' | head -n 1)
	eval "$remedy"
	! given
	echo told
	exit
fi
kill $manager
wait $manager || true
ip address flush dev up0
begin
sleep 2
for pod in a b; do
	ip netns exec $pod ping -c 1 -W 5 10.22.0.1
	ip netns exec $pod ping -c 1 -W 5 fd22::1
done
[ $(ip -o link show master $BRIDGE | wc -l) = 2 ]
! given
printf 'pods on their bridge'
if [ -n "$KEEP_OFF" ]; then
	[ $(ip -o address show dev $BRIDGE | wc -l) = 3 ]
	printf ', %s' "$(check | tail -n 1 | sed 's/.*: //')"
fi
echo
