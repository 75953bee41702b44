package bridge_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// lan is a node on whose bridge there is a router too, of which pods form addresses.
type lan struct {
	*node
	router *netns.NS
}

const (
	lanPrefix  = "2001:db8:7::/64"
	lanRouter  = "2001:db8:7::1"
	routerLink = "fe80::7:1"
)

// newLAN has a router without anything that advertises it.
func newLAN(tb testing.TB) *lan {
	tb.Helper()
	l := &lan{node: newNode(tb), router: nstest.New(tb)}
	nstest.Veth(tb, l.ns, "lan0", l.router, "eth0")
	nstest.Run(tb, l.ns, "ip", "link", "set", "lan0", "master", "br0")
	for _, a := range []string{lanRouter, routerLink} {
		nstest.Run(tb, l.router, "ip", "address", "add", a+"/64", "dev", "eth0", "nodad")
	}
	nstest.WaitForAddresses(tb, l.router)
	return l
}

// advertises starts what advertises the router and its prefix, and answers solicitations.
func (l *lan) advertises(tb testing.TB, options ...string) {
	tb.Helper()
	advertising(tb, l.router, append([]string{"--dhcp-range=2001:db8:7::,ra-only,64,2h", "--dhcp-option=option6:dns-server,[2001:db8:7::53],[fe80::]",
		"--dhcp-option=option6:domain-search,home.example"}, options...)...)
}

// advertising starts dnsmasq, and waits until it is there.
func advertising(tb testing.TB, ns *netns.NS, options ...string) {
	tb.Helper()
	must.Succeed(tb, expect.Err(exec.LookPath("dnsmasq")), "needs dnsmasq (Debian: apt-get install dnsmasq-base)")
	nstest.Sysctl(tb, ns, "net/ipv6/conf/all/forwarding", "1")
	log := filepath.Join(tb.TempDir(), "log")
	cmd := exec.Command("dnsmasq", append([]string{
		"--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--port=0", "--bind-interfaces", "--interface=eth0",
		"--except-interface=lo", "--pid-file=", "--user=root", "--leasefile-ro", "--enable-ra", "--log-dhcp", "--log-facility=" + log,
	}, options...)...)
	must.Succeed(tb, ns.Do(cmd.Start))
	tb.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	must.Until(tb, "dnsmasq advertises", func() bool {
		text, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(text), "RTR-ADVERT")
	})
}

// patience is far longer than any machine needs, however busy.
const patience = time.Minute

// autoconfigured is a port whose pod has nothing but what routers give it.
func autoconfigured(i byte) bridge.Port {
	p := port(i)
	p.Addresses, p.Routes = nil, nil
	p.PeerMAC = mac("0a:58:0a:2c:00:0" + string('a'+rune(i)))
	p.Autoconf = &bridge.Autoconf{}
	return p
}

// formed is the address that a port's pod forms of the LAN's prefix.
func formed(p bridge.Port) netip.Addr {
	a := addr.LinkLocal(p.PeerMAC).As16()
	prefix := nstest.Prefix(lanPrefix).Addr().As16()
	copy(a[:8], prefix[:8])
	return netip.AddrFrom16(a)
}

// autoconfigure solicits and waits, and not for ever.
func autoconfigure(tb testing.TB, conn *bridge.Conn, pod *netns.NS, p bridge.Port) (*bridge.Autoconfigured, error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	s, err := conn.Solicit(ctx, pod, p)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return s.Wait(ctx)
}

func mustAutoconfigure(tb testing.TB, conn *bridge.Conn, pod *netns.NS, p bridge.Port) *bridge.Autoconfigured {
	tb.Helper()
	return must.Of(autoconfigure(tb, conn, pod, p)).Get(tb)
}

func TestPodIsConfiguredByItsRouter(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.advertises(t)
	for i, name := range []string{"addresses alone", "the default route too", "with duplicate detection", "beside static addresses"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := autoconfigured(byte(i))
			p.Autoconf.DefaultRoute, p.DAD = i == 1, i == 2
			if i == 3 {
				p.Addresses, p.Routes = port(byte(i)).Addresses, port(byte(i)).Routes
			}
			pod, _ := attach(t, l.node, p)
			got := mustAutoconfigure(t, l.conn, pod, p)
			if len(got.Addresses) != 1 || got.Addresses[0].Prefix != netip.PrefixFrom(formed(p), 64) || got.Addresses[0].Valid == nil {
				t.Errorf("addresses %v, want %s", got.Addresses, formed(p))
			}
			// dnsmasq's name for its own link-local address.
			servers := []string{"2001:db8:7::53", routerLink + "%eth0"}
			var have []string
			for _, s := range got.Servers {
				have = append(have, s.String())
			}
			expect.That(t, slices.Equal(have, servers) && slices.Equal(got.Search, []string{"home.example"}),
				"servers %v and domains %v, want %v and home.example", have, got.Search, servers)
			var gateways []netip.Addr
			if p.Autoconf.DefaultRoute {
				gateways = []netip.Addr{nstest.Addr(routerLink)}
			}
			expect.That(t, slices.Equal(got.Gateways, gateways), "gateways %v, want %v", got.Gateways, gateways)
			routes := nstest.Run(t, pod, "ip", "-6", "route", "show", "default", "proto", "ra")
			expect.Equal(t, strings.Contains(routes, routerLink), p.Autoconf.DefaultRoute, "default routes:\n%s", routes)
			// It works at once, both ways.
			meet(t, pod, nstest.Addr(lanRouter))
			meet(t, l.router, formed(p))
			expect.Of(l.conn.Check(t.Context(), p)).Len(t, 0)
		})
	}
}

// The first solicitation must not get lost in a port that does not forward yet, or in
// a guard: the kernel sends the next one seconds later.
func TestPodAsksRoutersOnlyWhenItIsTold(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.advertises(t)
	heard := listenToIPv6(t, l.router, nstest.Index(t, l.router, "eth0"))
	p := autoconfigured(0)
	p.Addresses = port(0).Addresses[:1]
	pod, _ := attach(t, l.node, p)
	// A frame of the pod's own that comes after all that Attach made it send.
	meet(t, l.ns, addrs(p)...)
	count := func() (n int) {
		for _, frame := range heard() {
			if isSolicitation(frame, addr.LinkLocal(p.PeerMAC)) {
				n++
			}
		}
		return n
	}
	expect.Equal(t, count(), 0, "solicitations before it is told")
	expect.Equal(t, nstest.Run(t, pod, "ip", "-6", "addr", "show", "dev", "eth0", "dynamic"), "", "the pod has")
	// The kernel is to solicit once, however long the router takes to answer.
	nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/router_solicitation_interval", "3600")
	s := must.Of(l.conn.Solicit(t.Context(), pod, p)).Get(t)
	defer s.Close()
	must.Succeed(t, expect.Err(s.Wait(t.Context())))
	expect.Equal(t, count(), 1, "solicitations")
	// To be told again changes nothing.
	again := mustAutoconfigure(t, l.conn, pod, p)
	expect.That(t, len(again.Addresses) == 1 && again.Addresses[0].Prefix.Addr() == formed(p),
		"told again: %v", again.Addresses)
}

// isSolicitation says whether a packet is a router solicitation (RFC 4861, section
// 4.1) from an address.
func isSolicitation(packet []byte, from netip.Addr) bool {
	const header, solicitation = 40, 133
	if len(packet) < header+8 || packet[6] != unix.IPPROTO_ICMPV6 || packet[header] != solicitation {
		return false
	}
	source, _ := netip.AddrFromSlice(packet[8:24])
	return source == from
}

// Parameters that are not the kernel's are the choice of the pod's owner. IPv6 itself is on where it is asked for.
func TestParametersOfThePodStand(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.advertises(t)
	for i, tt := range []struct {
		name   string
		chosen map[string]string
		want   map[string]string // others that Solicit sets
		forms  bool
	}{
		{"others", map[string]string{"use_tempaddr": "2", "accept_dad": "2", "accept_ra_rt_info_max_plen": "32", "router_solicitations": "5"},
			map[string]string{"accept_ra": "2", "accept_ra_defrtr": "0", "autoconf": "1", "accept_ra_rt_info_min_plen": "48"}, true},
		{"the pod forwards", map[string]string{"forwarding": "1"}, map[string]string{"accept_ra": "2", "accept_ra_rt_info_max_plen": "64"}, true},
		{"no advertisements", map[string]string{"accept_ra": "0"}, map[string]string{"autoconf": "1"}, false},
		{"no prefixes", map[string]string{"accept_ra_pinfo": "0"}, map[string]string{"accept_ra": "2"}, false},
		{"no addresses", map[string]string{"autoconf": "0"}, map[string]string{"accept_ra": "2"}, false},
		{"no solicitations", map[string]string{"router_solicitations": "0"}, map[string]string{"accept_ra": "2"}, false},
	} {
		for _, moved := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, moved %t", tt.name, moved), func(t *testing.T) {
				t.Parallel()
				pod := nstest.New(t)
				p := autoconfigured(byte(i))
				if moved {
					p.Name, p.PeerMAC[4] = p.Name[:14]+"m", 1
				}
				nstest.Sysctl(t, pod, "net/ipv6/conf/default/disable_ipv6", "1")
				if !moved {
					for name, value := range tt.chosen {
						nstest.Sysctl(t, pod, "net/ipv6/conf/default/"+name, value)
					}
				}
				must.Succeed(t, expect.Err(l.conn.Attach(t.Context(), pod, p)))
				if p.LeaveIPv6 = moved; moved {
					nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/accept_ra", "1")
					for name, value := range tt.chosen {
						nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/"+name, value)
					}
				}
				got := mustAutoconfigure(t, l.conn, pod, p)
				expect.Equal(t, len(got.Addresses) == 1, tt.forms, "it has formed %v", got.Addresses)
				for _, values := range []map[string]string{tt.chosen, tt.want} {
					for name, value := range values {
						expect.Equal(t, nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/"+name), value, "%s", name)
					}
				}
			})
		}
	}
}

// The default route that the kernel learnt before another program's interface was looked at goes.
func TestDefaultRoutesOfRoutersGoWhereThePodHasItsOwn(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.advertises(t)
	p := autoconfigured(0)
	p.Autoconf.DefaultRoute = true
	pod, _ := attach(t, l.node, p)
	mustAutoconfigure(t, l.conn, pod, p)
	p.Autoconf.DefaultRoute, p.LeaveIPv6 = false, true
	nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/accept_ra_defrtr", "1")
	mustAutoconfigure(t, l.conn, pod, p)
	expect.Equal(t, nstest.Run(t, pod, "ip", "-6", "route", "show", "default"), "")
}

func TestWaitForARouterSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	p := autoconfigured(0)
	pod, _ := attach(t, l.node, p)
	s := must.Of(l.conn.Solicit(t.Context(), pod, p)).Get(t)
	defer s.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Wait(ctx)
	var opErr *tombolo.OpError
	if !errors.Is(err, addr.ErrNoRouter) || !errors.Is(err, context.Canceled) || !errors.As(err, &opErr) || opErr.Object != "eth0" {
		t.Errorf("error is %v, want %v of eth0", err, addr.ErrNoRouter)
	}
	expect.Is(t, expect.Err(l.conn.Solicit(ctx, pod, p)), context.Canceled)
	// It may come later all the same.
	l.advertises(t)
	got, err := s.Wait(t.Context())
	expect.That(t, err == nil && len(got.Addresses) == 1, "got %+v, %v", got, err)
}

func TestDuplicateOfAFormedAddressIsAnError(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.advertises(t)
	p := autoconfigured(0)
	p.DAD = true
	nstest.Run(t, l.router, "ip", "address", "add", formed(p).String()+"/64", "dev", "eth0", "nodad")
	nstest.WaitForAddresses(t, l.router)
	pod, _ := attach(t, l.node, p)
	if _, err := autoconfigure(t, l.conn, pod, p); !errors.Is(err, addr.ErrDuplicate) || !strings.Contains(err.Error(), formed(p).String()) {
		t.Errorf("error is %v, want %v of %s", err, addr.ErrDuplicate, formed(p))
	}
}

func TestAutoconfThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	down, small, static := autoconfigured(0), autoconfigured(0), port(0)
	down.Down, small.MTU = true, 1279
	for name, p := range map[string]bridge.Port{"an interface that stays down": down, "an MTU that IPv6 has not": small} {
		expect.Is(t, expect.Err(n.conn.Attach(t.Context(), nstest.New(t), p)), tombolo.ErrInvalid, "%s", name)
	}
	// The kernel has no IPv6, and so no parameters of it, on a link that is too small.
	nstest.Run(t, n.ns, "ip", "link", "set", "br0", "mtu", "1000")
	inherited := autoconfigured(0)
	expect.Is(t, expect.Err(n.conn.Attach(t.Context(), nstest.New(t), inherited)), os.ErrNotExist, "an MTU that IPv6 has not, the bridge's")
	expect.Is(t, expect.Err(n.conn.Link(t.Context(), inherited.Name)), os.ErrNotExist, "the port is left")
	nstest.Run(t, n.ns, "ip", "link", "set", "br0", "mtu", "1400")
	pod, _ := attach(t, n, static)
	expect.Is(t, expect.Err(n.conn.Solicit(t.Context(), pod, static)), tombolo.ErrInvalid, "a port without Autoconf")
	static.Autoconf, static.Peer = &bridge.Autoconf{}, "eth7"
	expect.Is(t, expect.Err(n.conn.Solicit(t.Context(), pod, static)), os.ErrNotExist, "an interface that is not there")
}

func TestSolicitSaysWhatTheKernelRefuses(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := autoconfigured(0)
	pod, _ := attach(t, n, p)
	for name, fault := range map[string]*nltest.Fault{
		"the look at the interface": {Type: unix.RTM_GETLINK, Errno: unix.ENOBUFS},
		"the solicitation":          {Type: unix.RTM_NEWLINK, Errno: unix.ENOBUFS},
	} {
		_, err := faultyConn(t, n, nil, []*nltest.Fault{fault}).Solicit(t.Context(), pod, p)
		nltest.MustHaveFired(t, fault)
		expect.Is(t, err, unix.ENOBUFS, "%s", name)
	}
	list := &nltest.Fault{Type: unix.RTM_GETADDR, Errno: unix.ENOBUFS}
	s := must.Of(faultyConn(t, n, nil, []*nltest.Fault{list}).Solicit(t.Context(), pod, p)).Get(t)
	defer s.Close()
	expect.Is(t, expect.Err(s.Wait(t.Context())), unix.ENOBUFS)
}

// A pod without IPv6 gets no address of it by the way.
func TestAttachAloneGivesAPodWithAutoconfALinkLocalAddressOnly(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := autoconfigured(0)
	pod, _ := attach(t, n, p)
	out := nstest.Run(t, pod, "ip", "-6", "-o", "address", "show", "dev", "eth0")
	if strings.Count(out, "inet6") != 1 || !strings.Contains(out, addr.LinkLocal(p.PeerMAC).String()+"/64 scope link nodad") {
		t.Errorf("the pod has:\n%s", out)
	}
}
