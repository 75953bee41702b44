package lan

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// thread is a device behind a Thread border router; site is an address in a network that is too large for one.
const threadNet, thread, siteNet, site = "fd11:22:33:44::/64", "fd11:22:33:44::5", "fd12::/32", "fd12::5"

// TestTheSmartHome has pods do what Home Assistant does: they hear and send mDNS and SSDP behind a switch that snoops,
// wake machines by broadcasts, and reach Matter devices behind a Thread border router.
func TestTheSmartHome(t *testing.T) {
	t.Parallel()
	for _, uplink := range []string{"shared", "the system's bridge"} {
		for _, exit := range []string{"router", "host"} {
			t.Run(uplink+", by the "+exit, func(t *testing.T) {
				t.Parallel()
				l := newLAN(t)
				ip(t, l.wire, "link set switch type bridge mcast_snooping 1 mcast_querier 1 mcast_query_use_ifaddr 1 mcast_startup_query_interval 50 mcast_query_interval 300 mcast_query_response_interval 20",
					"address add 192.168.50.3/24 dev switch")
				// A port in hairpin mode, the default by the host on its bridge, gives a pod its own multicast back.
				n := l.network(object{"ipv6": "slaac", "defaultRoute": exit, "bridge": bridge, "hairpinMode": false})
				if uplink == "shared" {
					l.plug(l.host.ns)
				} else {
					l.plugAs("lan0", l.host.ns)
					ip(t, l.host.ns, "link add "+nic+" type bridge forward_delay 0", "link set lan0 master "+nic, "link set "+nic+" up")
					n.conf["uplink"], n.conf["bridge"] = "lan0", nic
				}
				l.static(l.host)
				defaultRoutes(t, l.host.ns)
				l.dnsmasq()
				// The border router has no default route to offer.
				ip(t, l.other.ns, "link set lo up", "address add "+thread+"/128 dev lo", "address add "+site+"/128 dev lo")
				nstest.Sysctl(t, l.other.ns, "net/ipv6/conf/all/forwarding", "1")

				a, b := n.add(l.newPod("a")), n.add(l.newPod("b"))
				ip(t, l.router.ns, "route add 255.255.255.255/32 dev "+nic)
				all := l.tapped(a, b)
				must.Until(t, "the switches have learnt who listens", func() bool {
					wire, own := nstest.Run(t, l.wire, "bridge", "mdb", "show"), l.hostRun("bridge", "mdb", "show")
					return !slices.ContainsFunc([]string{"239.255.255.250", "ff02::fb", "ff02::c"}, func(group string) bool {
						isUnknown := func(p *pod) bool {
							return !strings.Contains(own, "port veth"+ident.Hash("home", p.id, nic)+" grp "+group+" ")
						}
						return strings.Count(wire, " grp "+group+" ") < 3 || isUnknown(a) || isUnknown(b)
					})
				})
				all.announce()

				for _, p := range []*pod{a, b} {
					l.reachesThread(p, exit == "router")
					n.check(p)
				}
			})
		}
	}
}

func TestWithoutADefaultRouteAPodTakesNoneOfARouters(t *testing.T) {
	t.Parallel()
	for _, exit := range []string{"router", "host"} {
		t.Run("by the "+exit, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			n := l.network(object{"ipv6": "slaac", "defaultRoute": exit, "isDefaultGateway": false})
			l.plug(l.host.ns)
			l.static(l.host)
			l.dnsmasq()
			p := n.add(l.newPod("a"))
			expect.That(t, p.ip6.IsValid(), "no address of an advertisement")
			expect.Equal(t, nstest.Run(t, p.ns, "ip", "route", "show", "default")+nstest.Run(t, p.ns, "ip", "-6", "route", "show", "default"), "", "default routes")
			expect.Success(t, nstest.Ping(t, p.ns, nstest.Addr("192.168.50.1")), "the router")
			n.check(p)
		})
	}
}

// reachesThread has a border router advertise its networks to a pod.
func (l *lan) reachesThread(p *pod, takesSite bool) {
	l.Helper()
	routes := func() string { return nstest.Run(l, p.ns, "ip", "-6", "route", "show", "proto", "ra") }
	must.Until(l, "a route to the Thread network", func() bool {
		l.advertiseRoutes(l.other, threadNet, siteNet)
		return strings.Contains(routes(), threadNet)
	})
	expect.Success(l, nstest.Ping(l, p.ns, nstest.Addr(thread)), "the Thread device")
	expect.Success(l, nstest.Ping(l, l.other.ns, p.ip6), "from the border router")
	expect.Equal(l, strings.Contains(routes(), siteNet), takesSite, "the pod has:\n%s", routes())
	expect.That(l, !strings.Contains(nstest.Run(l, p.ns, "ip", "-6", "route", "show", "default"), l.linkLocal(l.other)), "a default route by the border router")
	expect.Success(l, nstest.Ping(l, p.ns, l.internet.ip6), "the internet")
}

// advertiseRoutes sends a router advertisement with routes (RFC 4191, section 2.3), by a router that is nobody's default.
func (l *lan) advertiseRoutes(from place, prefixes ...string) {
	l.Helper()
	const advertisement, hopLimit, information, lifetime = 134, 64, 24, 1800 // seconds
	message := []byte{advertisement, 0, 0, 0, hopLimit, 15: 0}
	for _, text := range prefixes {
		p := netip.MustParsePrefix(text)
		message = append(message, information, 3, byte(p.Bits()), 0, 0, 0, lifetime>>8, lifetime&0xff)
		message = append(message, p.Addr().AsSlice()...)
	}
	index := nstest.Index(l, from.ns, nic)
	must.Succeed(l, from.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
		if err != nil {
			return err
		}
		to := &unix.SockaddrInet6{Addr: nstest.Addr("ff02::1").As16(), ZoneId: uint32(index)}
		return errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255), unix.Sendto(fd, message, 0, to), unix.Close(fd))
	}))
}
