package lan

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// The machines of the LAN, and their addresses.
const (
	routerIP4, routerIP6     = "192.168.50.1", "fd50::1"
	otherIP4, otherIP6       = "192.168.50.9", "fd50::9"
	hostIP4, hostIP6         = "192.168.50.10", "fd50::10"
	wanIP4, wanIP6           = "198.51.100.1", "2001:db8:51::1" // of the router
	internetIP4, internetIP6 = "198.51.100.2", "2001:db8:51::2"

	subnet4, subnet6 = "192.168.50.0/24", "fd50::/64"
)

// The NIC, and the bridge that it becomes a port of.
const nic, bridge = "eth0", "br0"

// place is where a flow begins or ends.
type place struct {
	name     string
	ns       *netns.NS
	ip4, ip6 netip.Addr
}

// at gives a place's address of a family: 4 or 6.
func (p place) at(family int) netip.Addr {
	if family == 4 {
		return p.ip4
	}
	return p.ip6
}

// lan is a LAN, with an internet behind its router.
type lan struct {
	testing.TB
	wire                          *netns.NS // the switch
	router, other, internet, host place
	pod                           place // of the host's, where a test makes one
	pods                          []*pod
	ports                         int
}

// namespaces are all of the LAN's.
func (l *lan) namespaces() []*netns.NS {
	list := []*netns.NS{l.wire, l.router.ns, l.other.ns, l.internet.ns, l.host.ns}
	if l.pod.ns != nil {
		list = append(list, l.pod.ns)
	}
	for _, p := range l.pods {
		list = append(list, p.ns)
	}
	return list
}

// newLAN makes the LAN with all but the host, which has no NIC yet.
func newLAN(t testing.TB) *lan {
	t.Helper()
	l := &lan{TB: t, wire: l2(t)}
	l.router = l.machine("router", routerIP4, routerIP6)
	l.other = l.machine("other", otherIP4, otherIP6)
	l.internet = l.machine("internet", internetIP4, internetIP6)
	l.host = l.machine("host", hostIP4, hostIP6)

	for _, p := range []place{l.router, l.other} {
		l.plug(p.ns)
		l.static(p)
	}
	for _, family := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		nstest.Sysctl(t, l.router.ns, "net/"+family, "1")
	}
	ip(t, l.router.ns, "link add wan0 type veth peer name eth0 netns "+fd(l.internet.ns),
		"link set wan0 up", "address add "+wanIP4+"/24 dev wan0", "address add "+wanIP6+"/64 dev wan0")
	ip(t, l.internet.ns, "link set eth0 up", "address add "+internetIP4+"/24 dev eth0", "address add "+internetIP6+"/64 dev eth0",
		"route add "+subnet4+" via "+wanIP4, "route add "+subnet6+" via "+wanIP6)
	l.ready(l.router.ns)
	l.ready(l.internet.ns)
	defaultRoutes(t, l.other.ns)
	return l
}

// newHost is newLAN with a host that has static addresses and routes.
func newHost(t testing.TB) *lan {
	t.Helper()
	l := newLAN(t)
	l.plug(l.host.ns)
	l.static(l.host)
	defaultRoutes(t, l.host.ns)
	return l
}

// l2 is a namespace with a switch: a bridge that forwards at once and floods what it
// does not know, as a cheap one does.
func l2(t testing.TB) *netns.NS {
	t.Helper()
	ns := quiet(t)
	ip(t, ns, "link add switch type bridge forward_delay 0 mcast_snooping 0", "link set switch up")
	return ns
}

// quiet makes a namespace whose IPv6 addresses are there at once, and whose streams
// send nothing again unless something was lost.
func quiet(t testing.TB) *netns.NS {
	t.Helper()
	ns := nstest.New(t)
	// Both: DAD is off where neither asks for it.
	for _, conf := range []string{"all", "default"} {
		nstest.Sysctl(t, ns, "net/ipv6/conf/"+conf+"/accept_dad", "0")
	}
	// A segment that is not acknowledged within some 8 ms is sent again, to be sure (a
	// tail loss probe): on a busy machine that happens by itself. What is lost in truth
	// shows by selective acknowledgements all the same.
	nstest.Sysctl(t, ns, "net/ipv4/tcp_early_retrans", "0")
	ip(t, ns, "link set lo up")
	return ns
}

func (l *lan) machine(name, ip4, ip6 string) place {
	l.Helper()
	return place{name, quiet(l), nstest.Addr(ip4), nstest.Addr(ip6)}
}

// plug gives a namespace the NIC, on the switch.
func (l *lan) plug(ns *netns.NS) { l.Helper(); l.plugAs(nic, ns) }

// plugAs gives a namespace a link of that name, on the switch.
func (l *lan) plugAs(nic string, ns *netns.NS) {
	l.Helper()
	l.ports++
	port := fmt.Sprintf("port%d", l.ports)
	ip(l, l.wire, "link add "+port+" type veth peer name "+nic+" netns "+fd(ns), "link set "+port+" master switch up")
	ip(l, ns, "link set "+nic+" up")
	l.ready(ns)
}

// static gives a machine of the LAN its addresses.
func (l *lan) static(p place) {
	l.Helper()
	// No addresses besides, or datagrams would be answered from those.
	nstest.Sysctl(l, p.ns, "net/ipv6/conf/"+nic+"/accept_ra", "0")
	ip(l, p.ns, "address add "+p.ip4.String()+"/24 brd + dev "+nic, "address add "+p.ip6.String()+"/64 dev "+nic)
	l.ready(p.ns)
}

// ready waits until the kernel is done with a namespace's IPv6 addresses: its workers
// give each link that has a carrier its link-local one, unless it is to have none, check
// each address, and add the local route of each, all in their own time.
func (l *lan) ready(ns *netns.NS) {
	l.Helper()
	must.Until(l, "all IPv6 addresses are there, and received at", func() bool {
		local := nstest.Run(l, ns, "ip", "-6", "-o", "route", "show", "table", "local")
		has := map[string]bool{}
		for line := range strings.Lines(nstest.Run(l, ns, "ip", "-6", "-o", "address", "show", "up")) {
			f := strings.Fields(line)
			link, address := f[1], strings.Split(f[3], "/")[0]
			if slices.Contains(f, "tentative") || !strings.Contains(local, "local "+address+" dev "+link+" ") {
				return false
			}
			has[link] = has[link] || strings.HasPrefix(address, "fe80:")
		}
		// Ports of pods are to have none.
		for line := range strings.Lines(nstest.Run(l, ns, "ip", "-details", "-o", "link", "show", "up")) {
			link, _, _ := strings.Cut(strings.TrimSuffix(strings.Fields(line)[1], ":"), "@")
			if !has[link] && link != "lo" && strings.Contains(line, "LOWER_UP") && strings.Contains(line, "addrgenmode eui64") {
				return false
			}
		}
		return true
	})
}

func defaultRoutes(t testing.TB, ns *netns.NS) {
	t.Helper()
	ip(t, ns, "route add default via "+routerIP4, "route add default via "+routerIP6)
}

// hostRun runs a command on the host.
func (l *lan) hostRun(name string, args ...string) string {
	l.Helper()
	return nstest.Run(l, l.host.ns, name, args...)
}

// meet has each of some places reach another, over the given families, so that all
// of them know their neighbours.
func (l *lan) meet(families []int, pairs ...[2]place) {
	l.Helper()
	for _, pair := range pairs {
		for _, family := range families {
			if err := nstest.Ping(l, pair[0].ns, pair[1].at(family)); err != nil {
				l.Fatalf("%s does not reach %s over IPv%d: %v", pair[0].name, pair[1].name, family, err)
			}
		}
	}
}

// ip runs lines of ip's language in a namespace, as few processes as may be: one for
// each line that begins with an option, one for all between those.
func ip(t testing.TB, ns *netns.NS, lines ...string) {
	t.Helper()
	for len(lines) > 0 {
		if strings.HasPrefix(lines[0], "-") {
			nstest.Run(t, ns, "ip", strings.Fields(lines[0])...)
			lines = lines[1:]
			continue
		}
		n := 1
		for n < len(lines) && !strings.HasPrefix(lines[n], "-") {
			n++
		}
		path := filepath.Join(t.TempDir(), "batch")
		must.Succeed(t, os.WriteFile(path, []byte(strings.Join(lines[:n], "\n")+"\n"), 0o600))
		nstest.Run(t, ns, "ip", "-batch", path)
		lines = lines[n:]
	}
}

// fd is a name of a namespace for ip.
func fd(ns *netns.NS) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.FD()) }
