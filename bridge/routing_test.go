package bridge_test

import (
	"cmp"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// guest is a host whose eth0 is on the link of a router that advertises itself.
type guest struct{ host, router *netns.NS }

func newGuest(t *testing.T, options ...string) *guest {
	t.Helper()
	g := &guest{nstest.New(t), nstest.New(t)}
	nstest.Veth(t, g.host, "eth0", g.router, "eth0")
	nstest.Sysctl(t, g.host, "net/ipv6/conf/eth0/accept_dad", "0")
	for _, a := range []string{lanRouter, routerLink} {
		nstest.Run(t, g.router, "ip", "address", "add", a+"/64", "dev", "eth0", "nodad")
	}
	nstest.Run(t, g.host, "ip", "address", "add", "fe80::a/64", "dev", "eth0", "nodad")
	nstest.WaitForAddresses(t, g.router, g.host)
	advertising(t, g.router, append([]string{"--dhcp-range=2001:db8:7::,ra-only,64,2h"}, options...)...)
	g.solicit(t)
	must.Until(t, "the host forms an address", func() bool {
		return strings.Contains(nstest.Run(t, g.host, "ip", "-6", "address", "show", "dev", "eth0", "scope", "global"), "2001:db8:7::")
	})
	return g
}

func (g *guest) solicit(t *testing.T) {
	t.Helper()
	nstest.Run(t, g.host, "ip", "token", "set", "::a", "dev", "eth0")
}

func (g *guest) defaultRoute(t *testing.T) string {
	t.Helper()
	return nstest.Run(t, g.host, "ip", "-6", "route", "show", "default")
}

func routing(t *testing.T, host *netns.NS, r bridge.Routing) (changed bool, _ error) {
	t.Helper()
	err := host.Do(func() error {
		conn, err := bridge.Dial(nil)
		if err != nil {
			return err
		}
		defer conn.Close()
		changed, err = conn.EnsureRouting(t.Context(), r)
		return err
	})
	return changed, err
}

// hasForceForwarding reports whether the kernel can forward IPv6 for single links (Linux 6.17).
func hasForceForwarding() bool {
	_, err := os.Stat("/proc/sys/net/ipv6/conf/lo/force_forwarding")
	return err == nil
}

// oldRouting is routing on a kernel that has no force_forwarding (Linux 6.16).
func oldRouting(t *testing.T, host *netns.NS, r bridge.Routing) (changed bool, err error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // until the thread ends with its mounts
		done <- cmp.Or(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), host.Do(func() error {
			return unix.Mount("none", "/proc/sys/net/ipv6/conf/lo", "tmpfs", 0, "")
		}), host.Do(func() error {
			conn, err := bridge.Dial(nil)
			if err != nil {
				return err
			}
			defer conn.Close()
			changed, err = conn.EnsureRouting(t.Context(), r)
			return err
		}))
	}()
	return changed, <-done
}

func TestHostThatBeginsToForwardKeepsItsAdvertisedRoute(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	out := g.defaultRoute(t)
	must.That(t, strings.Contains(out, "via "+routerLink+" dev eth0 proto ra"), "the host did not learn its default route:\n%s", out)
	changed, err := oldRouting(t, g.host, bridge.Routing{IPv6: true})
	must.That(t, changed && err == nil, "changed %t, %v", changed, err)
	expect.Equal(t, nstest.Sysctl(t, g.host, "net/ipv6/conf/eth0/forwarding"), "1", "forwarding is")
	expect.Contains(t, g.defaultRoute(t), "via "+routerLink+" dev eth0 proto ra", "the default route is gone")
	// The next advertisement is heard as well.
	nstest.Run(t, g.host, "ip", "-6", "route", "del", "default")
	g.solicit(t)
	must.Until(t, "the default route is learnt again", func() bool { return strings.Contains(g.defaultRoute(t), routerLink) })
	expect.Of(oldRouting(t, g.host, bridge.Routing{IPv6: true})).Is(t, false, "the second time")
}

func TestForwardingAloneLosesTheAdvertisedRoute(t *testing.T) {
	t.Parallel()
	g := newGuest(t)
	nstest.Sysctl(t, g.host, "net/ipv6/conf/all/forwarding", "1")
	expect.Equal(t, g.defaultRoute(t), "", "nothing has to be done against it here, the host has")
}

func TestHostThatBeginsToForwardKeepsItsAdvertisedAddress(t *testing.T) {
	t.Parallel()
	g := newGuest(t, "--ra-param=eth0,60,0") // a router, but no way to everywhere
	out := g.defaultRoute(t)
	must.That(t, out == "", "the host has:\n%s", out)
	must.Succeed(t, expect.Err(oldRouting(t, g.host, bridge.Routing{IPv6: true})))
	expect.Equal(t, nstest.Sysctl(t, g.host, "net/ipv6/conf/eth0/accept_ra"), "2", "accept_ra is")
}

func TestEveryLinkThatHearsRoutersGoesOnHearingThem(t *testing.T) {
	t.Parallel()
	host := nstest.New(t)
	nstest.Veth(t, host, "eth0", host, "eth1")
	// As systemd-networkd does, which reads the advertisements itself.
	nstest.Sysctl(t, host, "net/ipv6/conf/eth0/accept_ra", "0")
	nstest.Run(t, host, "ip", "-6", "route", "add", "default", "via", "fe80::1", "dev", "eth0", "proto", "ra", "expires", "1800")
	must.Succeed(t, expect.Err(oldRouting(t, host, bridge.Routing{IPv6: true})))
	for link, want := range map[string]string{"eth0": "0", "eth1": "2", "default": "2"} {
		expect.Equal(t, nstest.Sysctl(t, host, "net/ipv6/conf/"+link+"/accept_ra"), want, "accept_ra of %s is", link)
	}
	expect.Contains(t, nstest.Run(t, host, "ip", "-6", "route", "show", "default"), "fe80::1", "the route is gone")
}

func TestRoutingIsComparedAndMade(t *testing.T) {
	t.Parallel()
	host := nstest.New(t)
	nstest.Veth(t, host, "br0", host, "eth1")
	for path, value := range map[string]string{"ip_forward": "0", "conf/br0/route_localnet": "0"} {
		nstest.Sysctl(t, host, "net/ipv4/"+path, value)
	}
	all := bridge.Routing{IPv4: true, IPv6: true, RouteLocalnet: "br0"}
	conn := must.Of(bridge.Dial(host)).Get(t)
	defer conn.Close()
	check := func(r bridge.Routing) []tombolo.Difference { // from another namespace
		return must.Of(conn.CheckRouting(t.Context(), r)).Get(t)
	}
	const object = "kernel parameters"
	six := []string{"net/ipv6/conf/all/forwarding"}
	if hasForceForwarding() {
		six = []string{"net/ipv6/conf/default/force_forwarding", "net/ipv6/conf/lo/force_forwarding"}
	}
	want := []tombolo.Difference{
		{Object: object, What: "net/ipv4/conf/default/forwarding", Want: "116", Have: "0"},
		{Object: object, What: "net/ipv4/conf/lo/forwarding", Want: "116", Have: "0"},
	}
	for _, parameter := range append(six, "net/ipv4/conf/br0/route_localnet") {
		want = append(want, tombolo.Difference{Object: object, What: parameter, Want: "1", Have: "0"})
	}
	expect.NoDiff(t, gocmp.Diff(want, check(all)), "before")
	for _, changed := range []bool{true, false} {
		expect.Of(routing(t, host, all)).Is(t, changed)
	}
	got := check(all)
	expect.That(t, len(got) == 0, "after: %v", got)
	got = check(bridge.Routing{})
	expect.That(t, len(got) == 0, "nothing was asked for: %v", got)
	expect.Equal(t, nstest.Sysctl(t, host, "net/ipv4/conf/eth1/route_localnet"), "0", "route_localnet of another link is")
	for _, gone := range []bridge.Routing{{RouteLocalnet: "br1"}} {
		expect.Is(t, expect.Err(routing(t, host, gone)), fs.ErrNotExist, "a bridge that is not there")
	}
	expect.Is(t, host.Do(func() error {
		_, err := conn.CheckRouting(t.Context(), bridge.Routing{RouteLocalnet: "br1"})
		return err
	}), fs.ErrNotExist, "a bridge that is not there")
}

// detour is a pod whose gateway is the node, on the same link as the router that the
// node itself goes through to the internet.
type detour struct {
	*lan
	pod      *netns.NS
	internet map[string]string // an address of each family
}

func newDetour(t *testing.T, p bridge.Port, nobodys bool) *detour {
	t.Helper()
	const node6 = "fe80::44:1"
	d := &detour{lan: newLAN(t), internet: map[string]string{"-4": "198.51.100.1", "-6": "2001:db8:99::1"}}
	internet := nstest.New(t)
	nstest.Veth(t, d.router, "eth1", internet, "eth0")
	// A pod follows redirects from the very address of its gateway: that is to be the only
	// one that the node can send them from. The kernel's own is usable after a second.
	nstest.Run(t, d.ns, "ip", "link", "set", "br0", "addrgenmode", "none")
	nstest.Run(t, d.ns, "ip", "-6", "address", "flush", "dev", "br0", "scope", "link")
	type addresses struct {
		ns   *netns.NS
		link string
		list []string
	}
	for _, a := range []addresses{
		{d.ns, "br0", []string{node6 + "/64"}},
		{d.router, "eth0", []string{"10.44.0.254/24", "fd44::254/64"}},
		// Routers ask for their neighbours from link-local addresses only.
		{d.router, "eth1", []string{"198.51.100.254/24", "2001:db8:99::254/64", "fe80::99:1/64"}},
		{internet, "eth0", []string{"198.51.100.1/24", "2001:db8:99::1/64"}},
	} {
		for _, one := range a.list {
			nodad := []string{}
			if strings.Contains(one, ":") {
				nodad = []string{"nodad"}
			}
			nstest.Run(t, a.ns, "ip", append([]string{"address", "add", one, "dev", a.link}, nodad...)...)
		}
	}
	nstest.WaitForAddresses(t, d.router, internet)
	for _, ns := range []*netns.NS{d.ns, d.router} {
		nstest.Sysctl(t, ns, "net/ipv4/ip_forward", "1")
		nstest.Sysctl(t, ns, "net/ipv6/conf/all/forwarding", "1")
		for _, link := range []string{"all", "default"} {
			nstest.Sysctl(t, ns, "net/ipv4/conf/"+link+"/rp_filter", "0")
		}
	}
	nstest.Run(t, d.ns, "ip", "route", "add", "default", "via", "10.44.0.254")
	nstest.Run(t, d.ns, "ip", "-6", "route", "add", "default", "via", routerLink, "dev", "br0")
	nstest.Run(t, internet, "ip", "route", "add", "10.44.0.0/24", "via", "198.51.100.254")
	nstest.Run(t, internet, "ip", "-6", "route", "add", "fd44::/64", "via", "2001:db8:99::254")
	p.Routes = []route.Route{{Gateway: nstest.Addr("10.44.0.1")}, {Gateway: nstest.Addr(node6)}}
	if nobodys {
		four, six, mac := nstest.Addr("169.254.1.1"), nstest.Addr("fe80::746f:6d62:6f6c:6f"), d.link.MAC
		p.Routes = []route.Route{{Gateway: four, OnLink: true}, {Gateway: six}}
		p.Neighbours = []bridge.Neighbour{{Addr: four, MAC: mac}, {Addr: six, MAC: mac}}
	}
	d.pod = nstest.New(t)
	nstest.Sysctl(t, d.pod, "net/ipv4/conf/all/accept_redirects", "1")
	nstest.Sysctl(t, d.pod, "net/ipv4/conf/default/accept_redirects", "1")
	must.Succeed(t, expect.Err(d.conn.Attach(t.Context(), d.pod, p)))
	nstest.WaitForAddresses(t, d.ns) // its bridge has a carrier now
	// No redirect is to wait until the node has found the pod.
	meet(t, d.ns, addrs(p)...)
	return d
}

// goesPast has the pod send by way of the node, and says whether it is told to go past
// it, and whether it does. IPv6 follows the first redirect, while IPv4 looks for the router
// at first and follows a later one.
func (d *detour) goesPast(t *testing.T, family string) (told, past bool) {
	t.Helper()
	router, counter, enough := "10.44.0.254", "IcmpInRedirects", 5
	if family == "-6" {
		// The kernel counts one before it follows it.
		router, counter, enough = routerLink, "Icmp6InRedirects", 2
	}
	heard := 0
	must.Until(t, "the pod goes past the node, or is told to often enough", func() bool {
		must.Succeed(t, nstest.Ping(t, d.pod, nstest.Addr(d.internet[family])))
		heard = redirects(t, d.pod, counter)
		past = strings.Contains(nstest.Run(t, d.pod, "ip", family, "route", "get", d.internet[family]), "via "+router+" ")
		// The first packet is worth a redirect, which leaves before the packet does.
		return past || heard == 0 || heard >= enough
	})
	return heard > 0, past
}

// redirects reads one of the namespace's counters.
func redirects(t *testing.T, ns *netns.NS, counter string) int {
	t.Helper()
	fields := strings.Fields(nstest.Run(t, ns, "nstat", "--ignore", "--zeros", "--noupdate", counter))
	i := slices.Index(fields, counter)
	must.That(t, i >= 0 && i+1 < len(fields), "no counter %s in %q", counter, fields)
	return must.Of(strconv.Atoi(fields[i+1])).Get(t)
}

// The kernel heeds a redirect only if its sender is the next hop, and nobody can send from an address that nobody has.
func TestPodGoesPastAGatewayUnlessItsAddressIsNobodys(t *testing.T) {
	t.Parallel()
	for name, nobodys := range map[string]bool{"the node's address": false, "nobody's": true} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			d := newDetour(t, port(0), nobodys)
			for _, link := range []string{"all", "br0"} {
				nstest.Sysctl(t, d.ns, "net/ipv4/conf/"+link+"/send_redirects", "1")
			}
			for _, family := range []string{"-4", "-6"} {
				told, past := d.goesPast(t, family)
				expect.That(t, told && past != nobodys, "%s: the pod is told to go past the node (%t), and does so (%t)", family, told, past)
			}
		})
	}
}

func TestParametersOfNoLinkStayAsTheyAre(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, name := range []string{"all", "default", "..", "../all", "a/b", n.link.Name + "\x00", "%d"} {
		for _, r := range []bridge.Routing{{RouteLocalnet: name}, {Input: name, IPv4: true}} {
			expect.Is(t, n.ns.Do(func() error {
				expect.Is(t, expect.Err(n.conn.CheckRouting(t.Context(), r)), tombolo.ErrInvalid, "CheckRouting(%+v)", r)
				_, err := n.conn.EnsureRouting(t.Context(), r)
				return err
			}), tombolo.ErrInvalid, "EnsureRouting(%+v)", r)
		}
	}
	for path, want := range map[string]string{
		"net/ipv4/conf/all/route_localnet": "0", "net/ipv4/conf/default/route_localnet": "0",
		"net/ipv4/conf/all/arp_notify": "0", "net/ipv4/ip_forward": "0",
	} {
		expect.Equal(t, nstest.Sysctl(t, n.ns, path), want, "%s is", path)
	}
}

func TestHostForwardsForPodsOrForAll(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	both := bridge.Routing{IPv4: true, IPv6: true}
	forwards := func(what string, wantPods, wantRouter bridge.Routing) {
		t.Helper()
		pods, router, err := n.conn.Forwards(t.Context())
		must.Succeed(t, err)
		expect.Equal(t, [...]bridge.Routing{pods, router}, [...]bridge.Routing{wantPods, wantRouter}, "%s: Forwards", what)
	}
	nstest.Run(t, n.ns, "ip", "link", "add", "wg0", "type", "bridge")
	nstest.Sysctl(t, n.ns, "net/ipv4/conf/wg0/forwarding", "1")
	nstest.Sysctl(t, n.ns, "net/ipv6/conf/br0/accept_ra", "0")
	forwards("a host that forwards nothing", bridge.Routing{}, bridge.Routing{})
	for _, changed := range []bool{true, false} {
		expect.Of(routing(t, n.ns, both)).Is(t, changed)
	}
	parameters := map[string]string{
		"ipv4/ip_forward": "0", "ipv4/conf/late/forwarding": "116",
		"ipv4/conf/wg0/forwarding": "1", "ipv4/conf/br0/forwarding": "116", "ipv6/conf/br0/accept_ra": "0",
	}
	if hasForceForwarding() {
		forwards("a host that EnsureRouting was called for", both, bridge.Routing{})
		maps.Copy(parameters, map[string]string{
			"ipv6/conf/all/forwarding": "0", "ipv6/conf/late/force_forwarding": "1",
			"ipv6/conf/br0/force_forwarding": "1", "ipv6/conf/late/accept_ra": "1",
		})
	} else {
		forwards("a host that EnsureRouting was called for", both, bridge.Routing{IPv6: true})
		maps.Copy(parameters, map[string]string{"ipv6/conf/all/forwarding": "1", "ipv6/conf/late/accept_ra": "2"})
	}
	nstest.Run(t, n.ns, "ip", "link", "add", "late", "type", "bridge")
	for path, want := range parameters {
		expect.Equal(t, nstest.Sysctl(t, n.ns, "net/"+path), want, "%s is", path)
	}
	for _, router := range []bridge.Routing{{IPv4: true}, both, {IPv6: true}, {}} {
		nstest.Sysctl(t, n.ns, "net/ipv4/ip_forward", digit(router.IPv4))
		nstest.Sysctl(t, n.ns, "net/ipv6/conf/all/forwarding", digit(router.IPv6))
		expect.Of(routing(t, n.ns, router)).Is(t, false, "EnsureRouting on a router")
		forwards(fmt.Sprintf("a router: %+v", router), router, router) // what turns IPv6 off turns all links off
	}
}

func digit(on bool) string {
	if on {
		return "1"
	}
	return "0"
}

func TestLinkSaysWhetherTheKernelRoutesLocalnetOnIt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for _, on := range []bool{true, false} {
		nstest.Sysctl(t, n.ns, fmt.Sprintf("net/ipv4/conf/%s/route_localnet", n.link.Name), digit(on))
		l := must.Of(n.conn.Link(t.Context(), n.link.Name)).Get(t)
		if l.RouteLocalnet != on {
			t.Errorf("RouteLocalnet is %t where the parameter is %s", l.RouteLocalnet, digit(on))
		}
	}
}
