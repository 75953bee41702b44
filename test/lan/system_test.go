package lan

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// system is the host of a LAN as a system of its own: with its own files over those of a root, processes and links. It
// has a network manager, and the programs under test below /opt/tombolo.
type system struct {
	*lan
	m       manager
	nic     string // its name
	init    string // the process id of its init; empty: it is off
	port    string // the switch's, of the NIC
	subnet  string // in which the router leases
	before  string // what the host has without Tombolo
	lanPods []*pod

	dir    string
	server *exec.Cmd
}

// leaseTime is for how long the router leases. Leases are renewed after two seconds.
func (s *system) leaseTime() time.Duration { return max(10*time.Second, s.m.shortest) }

// newSystem makes a LAN with a host that the manager configures, and notes what the host has then. After a boot the NIC
// is shared while it is down and has no carrier, and the manager and the cable come then.
func newSystem(t *testing.T, m manager) *system {
	t.Helper()
	nstest.Need(t, "kea-dhcp4")
	s := &system{lan: newLAN(t), m: m, nic: nic, subnet: "192.168.50.", dir: t.TempDir()}
	ip(t, s.router.ns, "address add 192.168.60.1/24 dev "+nic)
	ip(t, s.other.ns, "address add 192.168.60.9/24 dev "+nic)
	nstest.NewDnsmasq(t, s.router.ns, nic, "--enable-ra", "--dhcp-range=fd50::100,fd50::1ff,slaac,64,1h", "--ra-param="+nic+",5,60")
	t.Cleanup(func() { s.off(); s.stopKea() })

	s.boot()
	s.sh(m.config)
	s.sh(m.start)
	s.cable("up")
	s.kea()
	s.settled()

	s.boot()
	s.cable("down")
	s.sh(startKeeper)
	s.addStatic()
	s.sh(m.start)
	time.Sleep(time.Second) // the manager has looked, and found no carrier
	s.cable("up")
	s.row(row{name: "share first, then the cable", do: (*system).addLeased})
	return s
}

// settled notes what the host has when nothing changes any more.
func (s *system) settled() {
	s.Helper()
	since := time.Now()
	must.Until(s, "the host is configured", func() bool {
		ip4, ip6 := addresses(s, s.host.ns, s.nic)
		if have := s.has(); have != s.before || !ip4.IsValid() || !ip6.IsValid() {
			s.before, since = have, time.Now()
		}
		return time.Since(since) > time.Second
	})
}

// boot ends all that runs on the host, with its links and what is below /run, and begins anew.
func (s *system) boot() {
	s.Helper()
	from := ""
	if s.init != "" {
		from = filepath.Join(s.dir, "from")
		must.Succeed(s, os.RemoveAll(from))
		must.Succeed(s, os.MkdirAll(from, 0o755))
		s.sh(`cd /; tar c $(ls -d etc/dhcpcd.conf etc/NetworkManager etc/network etc/systemd/network var/lib/dhcp var/lib/dhcpcd var/lib/NetworkManager var/lib/tombolo 2>/dev/null) >/run/kept.tar`)
		nstest.Run(s, nil, "tar", "xf", "/proc/"+s.init+"/root/run/kept.tar", "-C", from)
	}
	s.host.ns = quiet(s)
	for _, family := range []string{"ip", "ip6"} { // a host without br_netfilter
		nstest.Sysctl(s, s.host.ns, "net/bridge/bridge-nf-call-"+family+"tables", "0")
	}
	cmd := exec.Command("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", systemScript)
	deploy := must.Of(filepath.Abs("../../deploy")).Get(s)
	cmd.Env = append(os.Environ(), "LOWER="+root(), "FROM="+from, "RESOLVED="+s.m.resolved, "PROGRAMS="+filepath.Dir(program(s, "tombolo")), "DEPLOY="+deploy)
	said := must.Of(cmd.StdoutPipe()).Get(s)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	must.Succeed(s, s.host.ns.Do(cmd.Start))
	ready := make([]byte, 6)
	n, _ := said.Read(ready)
	must.That(s, n == 6, "the system does not start: %s", &errs)
	pid := cmd.Process.Pid
	children := strings.Fields(nstest.ReadIf(s, fmt.Sprintf("/proc/%d/task/%[1]d/children", pid)))
	must.That(s, len(children) == 1, "unshare has the children %q", children)
	s.off()
	if s.port != "" { // links of a host that is off go once nobody has its namespaces open, and its pods would answer until then
		ip(s, s.wire, "link delete "+s.port)
	}
	s.init = children[0]
	s.lanPods = nil
	go cmd.Wait()
	s.plugHost()
}

// off ends the system.
func (s *system) off() {
	if s.init == "" {
		return
	}
	if s.Failed() {
		s.Logf("%s", s.sh("tail -n 40 /run/*.log; ip address; nft list table netdev tombolo; tc filter show dev $(ip -o link | grep -o 'veth[0-9a-z]*' | tail -1) egress; cat /etc/resolv.conf; ip -6 route; ip route; /opt/tombolo/tombolo check; true"))
	}
	exec.Command("kill", "-9", s.init).Run()
}

// systemScript makes the files of a system, and is its init. networkd and NetworkManager believe that there is no udev
// where /sys is read-only.
const systemScript = `set -eu
up=/run/up ROOT=/run/root
mount -t tmpfs none /run && mkdir -p $up/u $up/w $ROOT
mount -t overlay -o lowerdir=$LOWER,upperdir=$up/u,workdir=$up/w none $ROOT
mkdir -p $ROOT/opt/tombolo $ROOT/deploy
mount --bind $PROGRAMS $ROOT/opt/tombolo
mount --bind $DEPLOY $ROOT/deploy
mount -t proc none $ROOT/proc
mount -t sysfs -o ro none $ROOT/sys
mount --rbind /dev $ROOT/dev
mount -t tmpfs none $ROOT/run
mount -t tmpfs none $ROOT/tmp
rm -rf $ROOT/var/lib/tombolo $ROOT/var/lib/dhcp/* $ROOT/var/lib/NetworkManager/* $ROOT/etc/NetworkManager/conf.d/* $ROOT/etc/resolv.conf
[ -z "$FROM" ] || cp -a $FROM/. $ROOT/
[ -s $ROOT/etc/machine-id ] || echo 0123456789abcdef0123456789abcdef >$ROOT/etc/machine-id
exec chroot $ROOT /bin/bash -c '
	export PATH=/usr/sbin:/usr/bin:/sbin:/bin
	mkdir -p /run/netns /run/dbus /run/dhcpcd /run/network /run/NetworkManager /run/systemd/netif/leases /run/systemd/netif/links /run/systemd/network
	mkdir -p /run/systemd/resolve /var/lib/dhcp /var/lib/dhcpcd /var/lib/NetworkManager /etc/NetworkManager/conf.d
	chown -R systemd-network: /run/systemd/netif
	dbus-daemon --system --nofork --nopidfile >/run/dbus.log 2>&1 &
	until [ -S /run/dbus/system_bus_socket ]; do sleep 0.02; done
	if [ -n "$RESOLVED" ] && [ -x /lib/systemd/systemd-resolved ]; then
		chown systemd-resolve: /run/systemd/resolve
		ln -s /run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
		/lib/systemd/systemd-resolved >/run/resolved.log 2>&1 &
	else
		>/etc/resolv.conf
	fi
	echo ready
	exec >/dev/null
	while :; do sleep 1000 & wait; done'
`

// Functions of the shell of a system.
const systemFunctions = `set -e
export PATH=/usr/sbin:/usr/bin:/sbin:/bin SYSTEMD_LOG_TARGET=console
begin() { "${@:2}" >>/run/$1.log 2>&1 </dev/null & echo $! >/run/$1.pid; }
end() {
	local p=$(cat /run/$1.pid)
	kill $p 2>/dev/null || return 0
	for i in $(seq 300); do kill -0 $p 2>/dev/null || return 0; sleep 0.02; done
	kill -9 $p
}
`

const startKeeper = `begin tombolod /opt/tombolo/tombolod --metrics none --log-level debug
until grep -q 'keeping leases' /run/tombolod.log; do sleep 0.02; done`

// sh runs a script on the host, for a minute at most.
func (s *system) sh(script string) string {
	s.Helper()
	cmd := exec.Command("timeout", "60", "nsenter", "--target", s.init, "--mount", "--uts", "--net", "--pid", "--root", "/bin/bash", "-c", systemFunctions+script)
	cmd.Env = append(os.Environ(), "NIC="+s.nic)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		s.Fatalf("%s\n%v: %s%s", script, err, &out, &errs)
	}
	return out.String()
}

// has is what the host has: addresses and routes, name servers, lease and zone, without times. A link-local address is
// another one with each start of NetworkManager's, dhcpcd's metric has the NIC's index, and a lease of DHCPv6 may go by
// the NIC's name.
func (s *system) has() string {
	s.Helper()
	return s.sh(`set +e
times() { sed -E 's/ (valid_lft|preferred_lft|expires) [^ ]+//g; s/ (hoplimit|mtu|pref) [^ ]+//g; s/ metric 100[0-9]//; s/ nhid [0-9]+//; s/^([^ ]+ inet6|local) fe80::[^ \/]+/\1 fe80::/; s/fd50::1[0-9a-f]{2}( |\/)/fd50::lease\1/; s/ +$//; s/\\//g'; }
ip -o address | sed 's/^[0-9]*: //' | tr -s ' ' | times | sort
ip -4 route show table all | times | sort
ip -6 route show table all | grep -vE ' dev lo |^multicast .* dev veth' | times | sort
grep -v '^#' /etc/resolv.conf
[ ! -e /run/resolved.log ] || resolvectl dns $NIC | sed 's/^Link[^:]*://'
` + s.m.lease + `
true`)
}

// cable plugs the host's NIC into the switch, or out.
func (s *system) cable(state string) { s.Helper(); ip(s, s.wire, "link set "+s.port+" "+state) }

// plugHost gives the host its NIC, which is down, and whose cable is out.
func (s *system) plugHost() {
	s.Helper()
	s.ports++
	s.port, s.nic = fmt.Sprintf("port%d", s.ports), nic
	ip(s, s.wire, "link add "+s.port+" type veth peer name "+nic+" address "+ownMAC+" netns "+fd(s.host.ns), "link set "+s.port+" master switch")
}

// addStatic adds a pod with addresses that nobody leases.
func (s *system) addStatic() {
	s.Helper()
	s.addPod("fixed", object{"type": "static", "addresses": []object{
		{"address": "192.168.50.201/24", "gateway": routerIP4}, {"address": "fd50::201/64", "gateway": routerIP6}}}, nil)
}

// addLeased adds a pod with a lease, and an address by router advertisement.
func (s *system) addLeased() {
	s.Helper()
	s.addPod("leased", object{"type": "dhcp"}, object{"ipv6": "slaac"})
}

func (s *system) addPod(name string, ipam, fields object) {
	s.Helper()
	conf := object{"cniVersion": "1.1.0", "name": name, "type": "tombolo", "mode": "lan", "uplink": nic, "defaultRoute": "router", "bridgeNFCall": false, "ipam": ipam}
	for k, v := range fields {
		conf[k] = v
	}
	stdin := must.Of(json.Marshal(conf)).Get(s)
	out := s.sh(`ip netns add ` + name + `
CNI_COMMAND=ADD CNI_CONTAINERID=` + name + ` CNI_NETNS=/run/netns/` + name + ` CNI_IFNAME=eth0 CNI_PATH=/opt/tombolo /opt/tombolo/tombolo-cni <<'EOF'
` + string(stdin) + "\nEOF\n")
	ns := must.Of(netns.Open("/proc/" + s.init + "/root/run/netns/" + name)).Get(s)
	s.Cleanup(func() { ns.Close() })
	p := &pod{place: place{name: name, ns: ns}, id: name}
	p.learn(s, out)
	s.lanPods = append(s.lanPods, p)
}

// kea runs the router's server, for the subnet, instead of one that runs.
func (s *system) kea() {
	s.Helper()
	s.stopKea()
	subnet := object{
		"id": 1, "subnet": s.subnet + "0/24", "interface": nic, "pools": []object{{"pool": s.subnet + "50 - " + s.subnet + "90"}},
		"reservations":   []object{{"hw-address": ownMAC, "ip-address": s.subnet + "50"}},
		"valid-lifetime": int(s.leaseTime().Seconds()), "renew-timer": 2, "rebind-timer": 4, "authoritative": true,
		"option-data": []object{{"name": "routers", "data": s.subnet + "1"}, {"name": "domain-name-servers", "data": s.subnet + "1"}, {"name": "domain-name", "data": "lan"}},
	}
	text := must.Of(json.Marshal(object{"Dhcp4": object{
		"interfaces-config": object{"interfaces": []string{nic + "/" + s.subnet + "1"}, "dhcp-socket-type": "raw"},
		"lease-database":    object{"type": "memfile", "name": filepath.Join(s.dir, "leases.csv"), "lfc-interval": 0},
		"subnet4":           []object{subnet},
		"loggers": []object{{"name": "kea-dhcp4", "severity": "DEBUG", "debuglevel": 50,
			"output_options": []object{{"output": filepath.Join(s.dir, "kea.log"), "maxsize": 0}}}},
	}})).Get(s)
	file := filepath.Join(s.dir, "kea.json")
	writeFile(s, file, string(text))
	s.server = exec.Command("kea-dhcp4", "-c", file)
	s.server.Env = append(os.Environ(), "KEA_LOCKFILE_DIR="+s.dir, "KEA_PIDFILE_DIR="+s.dir)
	before := strings.Count(s.keaLog(), "DHCP4_STARTED ")
	must.Succeed(s, s.router.ns.Do(s.server.Start))
	must.Until(s, "kea serves", func() bool { return strings.Count(s.keaLog(), "DHCP4_STARTED ") > before })
}

func (s *system) stopKea() {
	if s.server != nil {
		s.server.Process.Kill()
		s.server.Wait()
	}
}

func (s *system) keaLog() string {
	s.Helper()
	return nstest.ReadIf(s, filepath.Join(s.dir, "kea.log"))
}

// renewed waits until the host's lease was renewed.
func (s *system) renewed() {
	s.Helper()
	acks := func() (n int) {
		for line := range strings.Lines(s.keaLog()) {
			if strings.Contains(line, "DHCPACK") && strings.Contains(line, ownMAC) && strings.Contains(line, "DHCP4_PACKET_SEND") {
				n++
			}
		}
		return n
	}
	before := acks()
	must.Until(s, "a renewal", func() bool { return acks() > before })
}
