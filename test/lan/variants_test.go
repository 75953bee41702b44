package lan

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// variant is a host that a takeover must know how to handle.
type variant struct {
	name string
	// bare is a host whose NIC has no addresses and routes as yet.
	bare bool
	// families of the flows; none: both.
	families []int
	// set up the host, before its flows begin.
	setUp func(l *lan)
	// more flows than the usual ones.
	flows func(l *lan) []between
	// taken is what is checked while the NIC is a port.
	taken while
}

func variants() []variant {
	return []variant{
		{name: "FORWARD is DROP, and bridged packets pass it", setUp: dropping},
		{name: "strict rp_filter", setUp: strictly},
		{name: "five route tables and rules", setUp: fiveTables, flows: secondAddress},
		{name: "multipath", setUp: multipath},
		{name: "200 routes", setUp: manyRoutes},
		{name: "a second NIC on the LAN", setUp: secondNIC},
		{name: "masqueraded pods", setUp: masquerading},
		{name: "IPv6 only", bare: true, families: []int{6}, setUp: onlyIPv6},
	}
}

func TestTakeoverOfAllKindsOfHosts(t *testing.T) {
	for _, v := range variants() {
		t.Run(v.name, func(t *testing.T) {
			l := newLAN(t)
			if v.families == nil {
				v.families = both()
			}
			if v.bare {
				v.setUp(l)
			} else {
				l.plug(l.host.ns)
				l.static(l.host)
				defaultRoutes(t, l.host.ns)
				v.setUp(l)
			}
			l.ready(l.host.ns)
			pairs := l.usual()
			if v.flows != nil {
				pairs = append(pairs, v.flows(l)...)
			}
			for _, pair := range pairs {
				l.meet(v.families, pair)
			}
			m := l.measure(v.families, pairs...)
			n := l.network(nil)
			for range max(1, runs(t)/3) {
				n.takeAndRestore(m, v.taken)
			}
		})
	}
}

// dropping is what a host with Docker or ufw is like, and its own rules count what
// they would take for a stranger's.
func dropping(l *lan) {
	for _, f := range []struct{ command, sysctl string }{{"iptables-nft", "iptables"}, {"ip6tables-nft", "ip6tables"}} {
		nstest.Sysctl(l, l.host.ns, "net/bridge/bridge-nf-call-"+f.sysctl, "1")
		l.hostRun(f.command, "-P", "FORWARD", "DROP")
		l.hostRun(f.command, "-A", "INPUT", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP")
		l.hostRun(f.command, "-A", "INPUT", "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT")
	}
}

func strictly(l *lan) {
	// The new bridge is to be as strict as everything else, at last.
	for _, conf := range []string{"all", "default", nic} {
		nstest.Sysctl(l, l.host.ns, "net/ipv4/conf/"+conf+"/rp_filter", "1")
	}
}

// The host's second address, which a table of its own has the routes for.
const second4, second6 = "192.168.50.11", "fd50::11"

func fiveTables(l *lan) {
	lines := []string{
		"address add " + second4 + "/24 dev eth0 label eth0:second", "address add " + second6 + "/64 dev eth0",
	}
	for table := 101; table <= 105; table++ {
		t := fmt.Sprint(table)
		lines = append(lines,
			"route add "+subnet4+" dev eth0 src "+second4+" table "+t,
			"route add default via "+routerIP4+" dev eth0 src "+second4+" table "+t+" metric 50 mtu 1400",
			"-6 route add "+subnet6+" dev eth0 table "+t,
			"-6 route add default via "+routerIP6+" dev eth0 table "+t+" metric 50")
	}
	for i, of := range []string{"from " + second4, "from 192.168.50.12 fwmark 0x5", "to 203.0.113.0/24", "fwmark 9", "to 203.0.113.9"} {
		lines = append(lines, fmt.Sprintf("rule add %s lookup %d pref %d", of, 101+i, 1001+i))
	}
	for i, of := range []string{"from " + second6, "from fd50::12 fwmark 0x5", "to 2001:db8:113::/64", "fwmark 9", "to 2001:db8:113::9"} {
		lines = append(lines, fmt.Sprintf("-6 rule add %s lookup %d pref %d", of, 101+i, 1001+i))
	}
	ip(l, l.host.ns, lines...)
	l.ready(l.host.ns)
}

func secondAddress(l *lan) []between {
	p := place{"host's second address", l.host.ns, nstest.Addr(second4), nstest.Addr(second6)}
	return []between{{p, l.internet}}
}

func multipath(l *lan) {
	ip(l, l.host.ns,
		"route add 192.0.2.0/24 nexthop via "+routerIP4+" dev eth0 weight 2 nexthop via "+otherIP4+" dev eth0",
		"-6 route add 2001:db8:2::/64 nexthop via "+routerIP6+" dev eth0 weight 2 nexthop via "+otherIP6+" dev eth0",
	)
}

func manyRoutes(l *lan) {
	var lines []string
	for i := range 100 {
		lines = append(lines,
			fmt.Sprintf("route add 203.0.%d.0/24 via %s metric %d proto bird", i, []string{routerIP4, otherIP4}[i%2], i),
			fmt.Sprintf("route add 2001:db8:%x::/64 via %s metric %d proto bird", 0x1000+i, []string{routerIP6, otherIP6}[i%2], i+1))
	}
	ip(l, l.host.ns, lines...)
}

// secondNIC is one on the same LAN, as a laptop's Wi-Fi, that is tried after the first.
func secondNIC(l *lan) {
	l.plugAs("eth1", l.host.ns)
	ip(l, l.host.ns, "address add "+second4+"/24 brd + dev eth1 metric 600", "route add default via "+routerIP4+" dev eth1 metric 600",
		"address add "+second6+"/64 dev eth1 metric 600 nodad", "route add default via "+routerIP6+" dev eth1 metric 2048")
	l.ready(l.host.ns)
}

func onlyIPv6(l *lan) {
	l.plug(l.host.ns)
	ip(l, l.host.ns, "address add "+hostIP6+"/64 dev eth0", "route add default via "+routerIP6)
}

// advertised has the host make its IPv6 address and default route of what the router says.
func (l *lan) advertised() {
	l.Helper()
	l.dnsmasq()
	l.plug(l.host.ns)
	ip(l, l.host.ns, "address add "+hostIP4+"/24 brd + dev "+nic, "route add default via "+routerIP4)
	l.followsRouter()
	l.host.ip6 = nstest.Addr(l.autoconf(nic))
}

// followsRouter waits until the host has what its kernel makes of the router's
// advertisements.
func (l *lan) followsRouter() {
	l.Helper()
	must.Until(l, "a default route and an address by advertisement", func() bool {
		l.solicit(nic)
		return strings.Contains(l.hostRun("ip", "-6", "route", "show", "default", "proto", "ra"), "via fe80::") && l.autoconf(nic) != ""
	})
	l.ready(l.host.ns)
}

// autoconf is the address that a link has formed by itself; empty if there is none
// that is ready.
func (l *lan) autoconf(link string) string {
	l.Helper()
	fields := strings.Fields(l.hostRun("ip", "-6", "-o", "address", "show", "scope", "global", "dynamic", "-tentative", "dev", link))
	for _, f := range fields {
		if address, ok := strings.CutSuffix(f, "/64"); ok {
			return address
		}
	}
	return ""
}

// masquerading has a pod in a network that the host routes and hides.
func masquerading(l *lan) {
	pod := quiet(l)
	ip(l, l.host.ns, "link add pod0 type veth peer name eth0 netns "+fd(pod), "link set pod0 up",
		"address add 10.88.0.1/24 dev pod0", "address add fd88::1/64 dev pod0")
	ip(l, pod, "link set eth0 up", "address add "+podIP4+"/24 dev eth0", "address add "+podIP6+"/64 dev eth0",
		"route add default via 10.88.0.1", "route add default via fd88::1")
	l.ready(pod)
	for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		nstest.Sysctl(l, l.host.ns, "net/"+name, "1")
	}
	path := filepath.Join(l.TempDir(), "nft")
	writeFile(l, path, `
table inet hide {
	chain postrouting {
		type nat hook postrouting priority srcnat
		ip saddr 10.88.0.0/24 ip daddr != 10.88.0.0/24 masquerade
		ip6 saddr fd88::/64 ip6 daddr != fd88::/64 masquerade
	}
	chain forward {
		type filter hook forward priority filter
		ct state invalid drop
	}
}
`)
	l.hostRun("nft", "-f", path)
	l.pod = place{masqueraded, pod, nstest.Addr(podIP4), nstest.Addr(podIP6)}
}

const podIP4, podIP6 = "10.88.0.2", "fd88::2"
