# Typed on the machine of lab.sh. Each line that begins with "== " is a heading of what comes.
source test/cni/testdata/lab.sh
make install >/dev/null
mkdir -p /etc/cni/net.d
for i in 31 32; do
	cat >"/etc/cni/net.d/$i.conflist" <<-END
	{ "cniVersion": "1.0.0", "cniVersions": ["1.0.0", "1.1.0"], "name": "net$i", "plugins": [
	  { "type": "tombolo", "bridge": "br$i", "capabilities": { "portMappings": true, "bandwidth": true, "ips": true, "mac": true },
	    "ipam": { "type": "host-local", "ranges": [[{ "subnet": "10.$i.0.0/24" }], [{ "subnet": "fd$i::/64" }]] } } ] }
	END
done
ip link set lo up
PATH=$PATH:/opt/cni/bin
podman network ls >/dev/null
pod() { command podman --network-backend cni "$@"; }
ask() { (exec 3<>"/dev/tcp/$1" && printf 'GET /etc/greeting HTTP/1.0\r\n\r\n' >&3 && cat <&3); }
up() { until command podman exec web ip -4 route show >/dev/null && ask "$1" >/dev/null; do sleep 0.05; done 2>/dev/null; }
look() {
	echo "== $1"
	tombolo ls
	tombolo check
	command podman exec web ip -4 route show
	ask 127.0.0.1/8080
}
pod run -d --name web --network net31 -p 8080:80 docker.io/library/busybox \
	sh -c 'mkdir -p /etc; echo hello >/etc/greeting; exec httpd -f -p 80 -h /'
up 10.31.0.2/80
look run
pod network connect net32 web
look connect
pod network reload web
look reload
pod network disconnect net31 web
look disconnect
pod network connect net31 web
look again
pod restart -t 0 web
up 127.0.0.1/8080
look restart
pod rm -f -t 0 web
echo "== rm"
tombolo ls
tombolo check
tombolo remove net31
tombolo remove net32
# One of podman's own, whose bridge it deletes with the network.
dir=/opt/cni/bin
! test -d /usr/lib/cni || { dir=/usr/lib/cni; mount -t tmpfs none $dir; }
tombolo install --names all $dir >/dev/null
pod network create --subnet 10.33.0.0/24 made >/dev/null
pod run --rm --network made docker.io/library/busybox sleep 0
pod network rm made >/dev/null
echo "== network rm"
tombolo check >said || sed -n 's/.*this helps: \(.*\) \[configuration]$/\1/p' said >advised
cat said
bash -ec "$(cat advised)"
tombolo ls networks
tombolo check
echo "== end"
