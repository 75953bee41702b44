package cni

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// advertise sends a router advertisement (RFC 4861, section 4.2) to all nodes on a
// link: be my default router for half an hour.
func advertise(t testing.TB, ns *netns.NS, link string) {
	t.Helper()
	const (
		routerAdvertisement = 134
		hopLimit            = 64
		lifetime            = 1800 // seconds
	)
	message := []byte{routerAdvertisement, 0, 0, 0, hopLimit, 0, lifetime >> 8, lifetime & 0xff, 0, 0, 0, 0, 0, 0, 0, 0}
	index := nstest.Index(t, ns, link)
	must.Succeed(t, ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		// Receivers drop what may have come from another link.
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255); err != nil {
			return err
		}
		all := netip.MustParseAddr("ff02::1").As16()
		return unix.Sendto(fd, message, 0, &unix.SockaddrInet6{ZoneId: uint32(index), Addr: all})
	}))
}

// advertised has a router advertise itself until a node has a default route by it. One
// advertisement may be lost: links take a moment until they carry something.
func advertised(t testing.TB, ns, router *netns.NS) {
	t.Helper()
	for deadline := time.Now().Add(patience); !hasAdvertised(t, ns); {
		if time.Now().After(deadline) {
			t.Fatalf("the router's advertisement gave no route; there are %q", routes(t, ns, "-6", "default"))
		}
		advertise(t, router, "eth0")
	}
}

func hasAdvertised(t testing.TB, ns *netns.NS) bool {
	t.Helper()
	return strings.Contains(strings.Join(routes(t, ns, "-6", "default"), "\n"), "proto ra")
}

// behindRouter is a node whose default route comes from a router.
func behindRouter(t *testing.T) (n *node, router *netns.NS) {
	t.Helper()
	n, router = newNode(t), nstest.New(t)
	nstest.Veth(t, n.ns, "eth0", router, "eth0")
	n.ip("address add fe80::2/64 dev eth0 nodad")
	n.ip("address add " + uplink6 + "/64 dev eth0 nodad")
	nstest.Run(t, router, "ip", "address", "add", "fe80::1/64", "dev", "eth0", "nodad")
	nstest.Run(t, router, "ip", "address", "add", outside6+"/64", "dev", "eth0", "nodad")
	nstest.Run(t, router, "ip", "address", "add", "2001:db8:9::9/128", "dev", "lo")
	// Else its neighbour advertisements would say that it is none.
	nstest.Sysctl(t, router, "net/ipv6/conf/all/forwarding", "1")
	nstest.Sysctl(t, n.ns, "net/ipv6/conf/eth0/accept_ra", "1")
	advertised(t, n.ns, router)
	return n, router
}

func TestIPv6ForwardingKeepsTheNodesAdvertisedRoute(t *testing.T) {
	t.Parallel()
	// What happens without care: the fault is real.
	careless, _ := behindRouter(t)
	nstest.Sysctl(t, careless.ns, "net/ipv6/conf/all/forwarding", "1")
	must.That(t, !hasAdvertised(t, careless.ns), "this kernel keeps the route by itself: nothing is tested")

	for name, tt := range map[string]struct {
		by                   []string
		forwarding, acceptRA string
	}{
		"by links alone":             {nil, "0", "1"},
		"for all, before Linux 6.17": {beforeForceForwarding(), "1", "2"},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			if !forwardsIPv6ByLink() {
				tt.forwarding, tt.acceptRA = "1", "2"
			}
			n, router := behindRouter(t)
			n.by = tt.by
			// One has heard no router yet, and another's program reads what routers say.
			silent, unread, late := nstest.New(t), nstest.New(t), nstest.New(t)
			nstest.Veth(t, n.ns, "silent", silent, "eth0")
			nstest.Veth(t, n.ns, "unread", unread, "eth0")
			nstest.Sysctl(t, n.ns, "net/ipv6/conf/unread/accept_ra", "0")
			w := n.podnet(nil)
			p := w.addPod("a")
			if !hasAdvertised(t, n.ns) {
				t.Errorf("the node lost its default route; it has %q", routes(t, n.ns, "-6", "default"))
			}
			nstest.Veth(t, n.ns, "late", late, "eth0")
			for path, want := range map[string]string{
				"all/forwarding": tt.forwarding, "eth0/accept_ra": tt.acceptRA, "silent/accept_ra": tt.acceptRA, "late/accept_ra": tt.acceptRA,
				"default/accept_ra": tt.acceptRA, "unread/accept_ra": "0", "cbr0/accept_ra": "0", w.port(p) + "/accept_ra": "0",
			} {
				expect.Equal(t, nstest.Sysctl(t, n.ns, "net/ipv6/conf/"+path), want, "%s is", path)
			}
			expect.Equal(t, strings.Contains(n.ruleset(), "the host is no router of IPv6"), tt.forwarding == "0", "a rule closes IPv6")
			wantPing(t, n.ns, "2001:db8:9::9")
			wantPing(t, p.NS, "2001:db8:9::9")
			// Later advertisements count too.
			for link, ns := range map[string]*netns.NS{"eth0": router, "silent": silent, "late": late} {
				nstest.Run(t, n.ns, "ip", "-6", "route", "flush", "proto", "ra")
				n.ip("address replace fe80::3/64 dev " + link + " nodad")
				nstest.Run(t, ns, "ip", "address", "replace", "fe80::1/64", "dev", "eth0", "nodad")
				advertised(t, n.ns, ns)
			}
		})
	}
}

// forwardsIPv6ByLink reports whether the kernel has force_forwarding (Linux 6.17).
func forwardsIPv6ByLink() bool {
	_, err := os.Stat("/proc/sys/net/ipv6/conf/lo/force_forwarding")
	return err == nil
}

// beforeForceForwarding runs a command as on a kernel before Linux 6.17, which forwards IPv6 for all links or for none.
func beforeForceForwarding() []string {
	return []string{"unshare", "--mount", "--propagation", "private", "sh", "-ec", `mount -t tmpfs none /proc/sys/net/ipv6/conf/lo; exec "$@"`, "sh"}
}

func TestIPv4OnlyNetworkLeavesIPv6OfTheNodeAlone(t *testing.T) {
	t.Parallel()
	n, _ := behindRouter(t)
	w := n.podnet(conf{"ipam": hostLocal(subnet4)})
	w.add(n.pod("a"))
	for name, want := range map[string]string{"all/forwarding": "0", "eth0/accept_ra": "1", "eth0/forwarding": "0"} {
		expect.Equal(t, nstest.Sysctl(t, n.ns, "net/ipv6/conf/"+name), want, "%s is", name)
	}
}

func TestPodsDoNotListenToRouters(t *testing.T) {
	n := parallelNode(t)
	n.outside()
	w := n.podnet(nil)
	a, rogue := n.pod("a"), n.pod("rogue")
	ra := w.add(a)
	w.add(rogue)
	wantPing(t, rogue.NS, ip6(ra).String()) // so nothing is lost on the way
	seen := capture(t, a.NS, "eth0")
	advertise(t, rogue.NS, "eth0")
	seen.until(func(f frame) bool { return f.icmp6 == 134 })
	// An answer comes after all of it has been dealt with.
	wantPing(t, rogue.NS, ip6(ra).String())
	for where, ns := range map[string]*netns.NS{"the pod": a.NS, "the node": n.ns} {
		if hasAdvertised(t, ns) {
			t.Errorf("%s took a pod for a router: %q", where, routes(t, ns, "-6", "default"))
		}
	}
	wantPing(t, a.NS, outside6)
}

// Types of ICMPv6 messages (RFC 4861, 3810).
const (
	routerSolicitation   = 133
	neighborSolicitation = 135
	listenerReport       = 143
)

// chatter attaches a pod while a neighbour listens, and gives all frames that came
// from it until a control's had all come: an interface that is made right after it
// as people make them, and is as talkative as the kernel would have it.
func chatter(t *testing.T, ipam conf) (ofPod []frame) {
	t.Helper()
	n := newNode(t)
	w := n.podnet(conf{"ipam": ipam})
	listener, p, control := n.pod("listener"), n.pod("a"), n.pod("control")
	w.add(listener)
	n.ip("link set " + w.port(listener) + " group 0") // or it would be spared reports
	seen := capture(t, listener.NS, "eth0")
	for _, ns := range []*netns.NS{n.ns, p.NS, control.NS} {
		// What the kernel says at random times, it says at once.
		nstest.Sysctl(t, ns, "net/ipv6/conf/default/router_solicitation_delay", "0")
		nstest.Sysctl(t, ns, "net/ipv6/conf/default/mldv2_unsolicited_report_interval", "1")
	}
	// The control's port may not forward yet when it asks for the first time.
	nstest.Sysctl(t, control.NS, "net/ipv6/conf/default/dad_transmits", "5")
	r := w.add(p)
	n.ip("link add control master cbr0 type veth peer name eth0 netns " + control.netnsName())
	n.ip("link set control up")
	nstest.Run(t, control.NS, "ip", "link", "set", "eth0", "up")
	mac := links(t, control.NS)["eth0"].MAC
	want := map[uint8]bool{routerSolicitation: true, neighborSolicitation: true, listenerReport: true}
	frames := seen.until(func(f frame) bool {
		if f.from == mac {
			delete(want, f.icmp6)
		}
		return len(want) == 0
	})
	port := links(t, n.ns)[w.port(p)].MAC
	for _, f := range frames {
		if f.from == r.Interfaces[2].Mac || f.from == port {
			ofPod = append(ofPod, f)
		}
	}
	return ofPod
}

func TestPodWithoutIPv6IsSilentInIt(t *testing.T) {
	t.Parallel()
	for _, f := range chatter(t, hostLocal(subnet4)) {
		expect.That(t, f.protocol != unix.ETH_P_IPV6, "it sent %+v", f)
	}
}

func TestDualStackPodAsksNobodyAtItsStart(t *testing.T) {
	t.Parallel()
	reported := false
	for _, f := range chatter(t, dualStack()) {
		expect.That(t, f.icmp6 != routerSolicitation && f.icmp6 != neighborSolicitation, "it sent %+v", f)
		reported = reported || f.icmp6 == listenerReport
	}
	// It does tell which multicast groups it is in, so the listener heard it.
	expect.That(t, reported, "nothing of the pod was heard at all")
}
