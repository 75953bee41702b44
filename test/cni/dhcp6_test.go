package cni

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// lan6 is a home LAN whose router gives addresses by DHCPv6 alone, and says so in its advertisements.
type lan6 struct {
	*lan
	server *nstest.Dnsmasq
}

const router6, pool6 = "fd00:50::1", "fd00:50::100,fd00:50::1ff"

func newLAN6(t *testing.T) *lan6 { t.Helper(); return newLAN6Of(t, homeLAN(t)) }

func newLAN6Of(t *testing.T, home *lan) *lan6 {
	t.Helper()
	l := &lan6{lan: home}
	// These links form no link-local addresses by themselves.
	l.ip("address add fe80::10/64 dev eth0 nodad")
	nstest.Run(t, l.router, "ip", "address", "add", "fe80::1/64", "dev", "eth0", "nodad")
	nstest.Run(t, l.router, "ip", "address", "add", router6+"/64", "dev", "eth0", "nodad")
	return l
}

// serve6 starts the server; no test outlives its leases.
func (l *lan6) serve6(t *testing.T, link string) {
	t.Helper()
	l.server = nstest.NewDnsmasq(t, l.router, link, "--dhcp-range="+pool6+",64,1h", "--enable-ra", "--ra-param="+link+",10",
		"--dhcp-option=option6:dns-server,[fd00:50::53]", "--dhcp-option=option6:domain-search,pod.lan")
}

func (l *lan6) leasing(fields conf) *network {
	all := conf{"mode": "lan", "uplink": "eth0", "bridge": "br0", "ipv6": "dhcp", "leaseDir": l.state + "-leases", "ipam": conf{"type": "dhcp"}}
	for k, v := range fields {
		all[k] = v
	}
	return l.node.network("home", all)
}

// six gives a result's address of IPv6.
func six(t *testing.T, r *current.Result) netip.Addr {
	t.Helper()
	var found []netip.Addr
	for _, ip := range r.IPs {
		if a, _ := netip.AddrFromSlice(ip.Address.IP); a.Is6() && !a.Is4In6() {
			ones, _ := ip.Address.Mask.Size()
			expect.That(t, ones == 128, "%s has a prefix of %d bits", a, ones)
			found = append(found, a)
		}
	}
	must.That(t, len(found) == 1, "the result has the IPv6 addresses %v: %+v", found, r.IPs)
	return found[0]
}

func (l *lan6) holds(a netip.Addr) bool {
	return strings.Contains(l.server.Leased(), " "+a.String()+" ")
}

func TestPodsLeaseByDHCPv6(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"host", "router"} {
		t.Run("default route by the "+by, func(t *testing.T) {
			t.Parallel()
			l := newLAN6(t)
			l.serve6(t, "eth0")
			k := l.keep(t)
			w := l.leasing(conf{"defaultRoute": by})
			p, other := l.pod("a"), l.pod("b")
			r := w.add(p)
			own := six(t, r)
			if !netip.MustParsePrefix("fd00:50::/64").Contains(own) || !l.holds(own) {
				t.Errorf("the pod has %s, the server:\n%s", own, l.server.Leased())
			}
			if !slices.Contains(r.DNS.Nameservers, "fd00:50::53") || !slices.Contains(r.DNS.Search, "pod.lan") {
				t.Errorf("DNS %+v", r.DNS)
			}
			expect.That(t, six(t, w.add(other)) != own, "both pods have %s", own)
			// The way there is in an advertisement.
			l.eventually(t, func() bool { return len(routes(t, p.NS, "-6", "fd00:50::/64")) > 0 })
			wantPing(t, p.NS, router6)
			wantPing(t, l.router, own.String())
			expect.Success(t, w.check(p))
			// A keeper that is killed changes nothing.
			k.kill()
			l.keep(t)
			wantPing(t, l.router, own.String())
			expect.Success(t, w.check(p))
			w.del(p)
			l.eventually(t, func() bool { return !l.holds(own) }, "DEL gives the address back")
			// One whose link has gone is released from the bridge.
			gone := six(t, mustResult(t, w, l.pod("c")))
			l.eventually(t, func() bool { return l.holds(gone) })
			w.gc(other)
			l.eventually(t, func() bool { return !l.holds(gone) }, "GC gives the address back")
			w.del(other)
			l.wantNoLeaseRecords()
		})
	}
}

func mustResult(t *testing.T, w *network, p *pod) *current.Result {
	t.Helper()
	r := w.add(p)
	w.ip("link del " + w.port(p))
	return r
}

func TestWithoutAnAnswerByDHCPv6ADDSaysSoAndLeavesNothing(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	l.keep(t)
	w := l.leasing(conf{"ipam": conf{"type": "dhcp", "timeout": "8s"}})
	wantError(t, expect.Err(w.tryAdd(l.pod("a"))), 11, `ipv6 "dhcp"`)
	l.wantNoLeaseRecords()
	expect.Equal(t, l.leased(), "", "the server holds")
	// By the same LAN, later.
	l.serve6(t, "eth0")
	six(t, w.with(conf{"ipam": conf{"type": "dhcp"}}).add(l.pod("b")))
}

// The keeper asks for longer than such an ADD waits.
func TestAnADDThatDoesNotWaitLongSaysWhyDHCPv6GaveNoAddress(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	l.server = nstest.NewDnsmasq(t, l.router, "eth0", "--dhcp-range=fd00:50::100,fd00:50::100,64,1h", "--enable-ra", "--ra-param=eth0,10")
	l.keep(t)
	w := l.leasing(conf{"ipam": conf{"type": "dhcp", "timeout": "6s"}})
	six(t, w.add(l.pod("a")))
	_, err := w.tryAdd(l.pod("b"))
	wantError(t, err, 11, "NoAddrsAvail")
	wantError(t, err, 11, "no addresses available")
	l.server.Stop()
	wantError(t, expect.Err(w.tryAdd(l.pod("c"))), 11, "no answer to ")
}

// An address that another machine of the LAN has is declined, and the pod gets the next.
func TestAnAddressOfAnotherMachineIsDeclinedByDHCPv6(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	l.serve6(t, "eth0")
	l.keep(t)
	w := l.leasing(nil)
	p := l.pod("a")
	taken := six(t, w.add(p))
	w.del(p)
	l.eventually(t, func() bool { return !l.holds(taken) })
	nstest.Run(t, l.router, "ip", "address", "add", taken.String()+"/128", "dev", "eth0", "nodad")
	got := six(t, w.add(p))
	expect.That(t, got != taken, "the pod has %s, as another machine", got)
}

func TestDHCPv6NeedsTheKeeperAndDHCP(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	for _, ipam := range []conf{{"type": "dhcp", "keeper": "optional"}, hostLocal("192.168.50.0/24")} {
		wantError(t, expect.Err(l.leasing(conf{"ipam": ipam}).tryAdd(l.pod("a"))), 7, `ipv6 "dhcp"`)
	}
}

// A router that gives addresses itself, and by DHCPv6 nothing but DNS (flags M=0, O=1).
func TestPodsThatFormTheirAddressesAskForDNSByDHCPv6(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	// That tag keeps the server out of router advertisements.
	l.server = nstest.NewDnsmasq(t, l.router, "eth0", "--dhcp-range=fd00:50::,ra-stateless", "--enable-ra", "--ra-param=eth0,10",
		"--dhcp-option=tag:dhcpv6,option6:dns-server,[fd00:50::53],[fe80::53]", "--dhcp-option=tag:dhcpv6,option6:domain-search,pod.lan")
	k := l.keep(t)
	w := l.leasing(conf{"ipv6": "slaac"})
	p := l.pod("a")
	r := w.add(p)
	// A link-local address is of no use without the interface.
	if !slices.Contains(r.DNS.Nameservers, "fe80::53%eth0") {
		t.Errorf("DNS %+v, want fe80::53%%eth0", r.DNS)
	}
	if !slices.Contains(r.DNS.Nameservers, "fd00:50::53") || !slices.Contains(r.DNS.Search, "pod.lan") {
		t.Errorf("DNS %+v", r.DNS)
	}
	expect.Success(t, w.check(p))
	listed := func() string { return l.operate("leases", "--json", "--leases", l.state+"-leases").stdout }
	expect.Contains(t, listed(), `"fd00:50::53"`, "tombolo leases")
	asked := func() int { return strings.Count(l.server.Logged(), "DHCPINFORMATION-REQUEST(") }
	if asked() != 1 {
		t.Errorf("asked %d times", asked())
	}
	// Whoever has an answer does not ask before its time is up.
	k.kill()
	k = l.keep(t)
	w.add(l.pod("b"))
	if asked() != 2 {
		t.Errorf("asked %d times, for two pods", asked())
	}
	w.del(p)
	// Without an answer there is the pod without that DNS.
	k.freeze(t)
	r = w.add(l.pod("c"))
	expect.That(t, !slices.Contains(r.DNS.Nameservers, "fd00:50::53"), "DNS %+v", r.DNS)
	k.thaw(t)
}

// On a bridge that leads to a LAN, and that Tombolo has not made one by a takeover.
func TestPodsOfModeL2LeaseByDHCPv6(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"dhcp", "slaac", "slaac, without an ipam"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			l := &lan6{lan: newLAN(t)}
			nstest.Run(t, l.router, "ip", "address", "add", "fe80::1/64", "dev", "eth0", "nodad")
			nstest.Run(t, l.router, "ip", "address", "add", router6+"/64", "dev", "eth0", "nodad")
			kind, only, _ := strings.Cut(by, ", ")
			fields := conf{"mode": "l2", "ipv6": kind, "guard": true, "ipam": conf{"type": "dhcp"}}
			if only != "" {
				delete(fields, "guard")
				fields["ipam"] = conf{}
			}
			if kind == "dhcp" {
				l.serve6(t, "eth0")
			} else {
				l.server = nstest.NewDnsmasq(t, l.router, "eth0", "--dhcp-range=fd00:50::,ra-stateless", "--enable-ra", "--ra-param=eth0,10", "--dhcp-option=option6:dns-server,[fd00:50::53]")
			}
			l.keep(t)
			w := l.network(fields)
			if only != "" {
				delete(w.plugin, "ipam")
			}
			p := l.pod("a")
			r := w.add(p)
			var own string
			for _, ip := range r.IPs {
				if ip.Address.IP.To4() == nil {
					own = ip.Address.IP.String()
				}
			}
			expect.That(t, strings.HasPrefix(own, "fd00:50::") && slices.Contains(r.DNS.Nameservers, "fd00:50::53"),
				"result %+v", r)
			l.eventually(t, func() bool { return len(routes(t, p.NS, "-6", "fd00:50::/64")) > 0 })
			wantPing(t, p.NS, router6)
			wantPing(t, l.router, own)
			got := routes(t, p.NS, "-6", "default")
			expect.That(t, len(got) == 1 && strings.Contains(got[0], "via fe80::1 "), "default routes %q", got)
			expect.Success(t, w.check(p))
			w.del(p)
			if kind == "dhcp" {
				l.eventually(t, func() bool { return !l.holds(netip.MustParseAddr(own)) })
			}
			l.wantNoLeaseRecords()
		})
	}
}
