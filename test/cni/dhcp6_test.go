package cni

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/fault"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// lan6 is a home LAN whose router gives addresses by DHCPv6 alone, and says so in its advertisements.
type lan6 struct {
	*lan
	server *nstest.Dnsmasq
}

const router6, pool6 = "fd00:50::1", "fd00:50::100,fd00:50::1ff"

func newLAN6(t *testing.T) *lan6 {
	t.Helper()
	l := &lan6{lan: homeLAN(t)}
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
		nstest.RunParallel(t, "default route by the "+by, func(t *testing.T) {
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
			expect.That(t, slices.Contains(r.DNS.Nameservers, "fd00:50::53") && slices.Contains(r.DNS.Search, "pod.lan"),
				"DNS %+v", r.DNS)
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
	expect.That(t, slices.Contains(r.DNS.Nameservers, "fe80::53%eth0"), "DNS %+v, want fe80::53%%eth0", r.DNS)
	expect.That(t, slices.Contains(r.DNS.Nameservers, "fd00:50::53") && slices.Contains(r.DNS.Search, "pod.lan"),
		"DNS %+v", r.DNS)
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
		nstest.RunParallel(t, by, func(t *testing.T) {
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

// heardFrom has a pod send a datagram to the router from each of some addresses, and then from its own until that
// one arrives: they take one way, so what has not come before was dropped. It gives those that came.
func (l *lan6) heardFrom(t *testing.T, p *pod, own netip.Addr, sources ...netip.Addr) []netip.Addr {
	t.Helper()
	var in *net.UDPConn
	err := l.router.Do(func() error {
		var err error
		in, err = net.ListenUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(nstest.Addr(router6), 0)))
		return err
	})
	must.Succeed(t, err)
	defer in.Close()
	to := in.LocalAddr().(*net.UDPAddr)
	say := func(from netip.Addr) {
		t.Helper()
		if err := p.NS.Do(func() error {
			out, err := net.DialUDP("udp6", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), to)
			if err != nil {
				return err
			}
			defer out.Close()
			_, err = out.Write([]byte("?"))
			return err
		}); err != nil {
			t.Fatalf("from %s: %v", from, err)
		}
	}
	for _, a := range sources {
		nstest.Run(t, p.NS, "ip", "address", "replace", a.String()+"/128", "dev", "lo", "nodad")
	}
	nstest.WaitForAddresses(t, p.NS)
	wantPing(t, p.NS, router6) // so that the pod knows the router's MAC
	for _, a := range sources {
		say(a)
	}
	var heard []netip.Addr
	for end := time.Now().Add(patience); time.Now().Before(end); {
		say(own)
		must.Succeed(t, in.SetReadDeadline(time.Now().Add(time.Second)))
		for {
			_, from, err := in.ReadFromUDPAddrPort(make([]byte, 16))
			if err != nil {
				break
			}
			if from.Addr() == own {
				return heard
			}
			heard = append(heard, from.Addr())
		}
	}
	t.Fatalf("nothing came from %s", own)
	return nil
}

func TestAGuardedPodSendsFromItsDHCPv6AddressAlone(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := l.newKea6(t)
	server.start(conf{})
	l.keep(t)
	w := l.leasing(conf{})
	free := w.with(conf{"lanGuard": false})
	free.name = "free"
	a, b, unguarded := l.pod("a"), l.pod("b"), l.pod("u")
	own := map[*pod]netip.Addr{a: six(t, w.add(a)), b: six(t, w.add(b)), unguarded: six(t, free.add(unguarded))}
	for p := range own {
		nstest.Run(t, p.NS, "ip", "route", "add", "fd00:50::/64", "dev", "eth0") // no router advertises it here
	}
	tried := []netip.Addr{own[b], nstest.Addr("fd00:50::77"), nstest.Addr("2001:db8::7")}
	got := l.heardFrom(t, unguarded, own[unguarded], tried...)
	must.That(t, slices.Equal(got, tried), "of an unguarded pod's %v there came %v: this tests nothing", tried, got)
	got = l.heardFrom(t, a, own[a], tried...)
	expect.That(t, len(got) == 0, "a guarded pod sent from %v", got)
}

// kea6 is a DHCPv6 server on the router whose leases are renewed after 2 s.
type kea6 struct{ *kea }

func (l *lan6) newKea6(t *testing.T) *kea6 {
	t.Helper()
	nstest.Need(t, "kea-dhcp6")
	dir := t.TempDir()
	return &kea6{&kea{TB: t, ns: l.router, dir: dir, leases: filepath.Join(dir, "leases.csv")}}
}

// start runs the server, with other fields than these in its subnet.
func (k *kea6) start(fields conf) {
	k.Helper()
	subnet := conf{
		"id": 1, "subnet": "fd00:50::/64", "interface": "eth0", "pools": []conf{{"pool": "fd00:50::100 - fd00:50::1ff"}},
		"valid-lifetime": 150, "preferred-lifetime": 100, "renew-timer": 2, "rebind-timer": 20, "rapid-commit": true,
	}
	maps.Copy(subnet, fields)
	k.launch("kea-dhcp6", conf{"Dhcp6": conf{
		"interfaces-config": conf{"interfaces": []string{"eth0"}}, "server-id": conf{"type": "LL", "persist": false}, "subnet6": []conf{subnet},
	}})
}

func (k *kea6) heard(what string) int { k.Helper(); return k.count("DHCP6_PACKET_RECEIVED ", what) }

func TestTheKeeperRenewsByDHCPv6AndFollowsTheServer(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	server := l.newKea6(t)
	server.start(nil)
	k := l.keep(t)
	w := l.leasing(nil)
	p := l.pod("a")
	before := six(t, w.add(p))
	l.eventually(t, func() bool { return server.heard("RENEW") >= 2 })
	k.kill() // and the next goes on
	k = l.keep(t)
	renewals := server.heard("RENEW")
	l.eventually(t, func() bool { return server.heard("RENEW") > renewals })
	solicits := server.heard("SOLICIT")
	expect.That(t, solicits == 1, "%d SOLICITs, want that of the ADD", solicits)
	expect.Success(t, w.check(p))
	// The server moves its pool, and gives the old address no more time.
	k.freeze(t)
	server.stop()
	server.start(conf{"pools": []conf{{"pool": "fd00:50::200 - fd00:50::2ff"}}})
	k.thaw(t)
	l.eventually(t, func() bool {
		shown := nstest.Run(t, p.NS, "ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "global")
		return strings.Contains(shown, "fd00:50::2") && !strings.Contains(shown, before.String()+"/") && w.check(p) == nil
	})
	w.del(p)
	l.eventually(t, func() bool { return server.heard("RELEASE") >= 1 })
	l.wantNoLeaseRecords()
}

// dying is a keeper that is killed before one of the system calls that it makes after it was armed.
type dying struct {
	run   *fault.Run
	armed atomic.Bool
	calls atomic.Int64
	last  atomic.Value
	ended chan struct{}
}

// keepUntil starts one; at 0 it is not killed.
func (l *lan) keepUntil(t *testing.T, at int) *dying {
	t.Helper()
	d := &dying{ended: make(chan struct{})}
	cmd := exec.Command(keeperPath(), "--leases", l.state+"-leases", "--state", l.state, "--metrics", "none")
	run, err := fault.Start(l.ns, cmd, fault.Fault{Before: func(call string) {
		if d.armed.Load() && d.calls.Add(1) == int64(at) {
			d.last.Store(call)
			d.run.Kill()
		}
	}})
	must.Succeed(t, err)
	d.run = run
	go func() { run.Wait(); close(d.ended) }()
	t.Cleanup(func() { run.Kill(); <-d.ended })
	l.eventually(t, func() bool { return l.network(conf{"ipam": conf{"type": "dhcp"}}).status() == nil })
	return d
}

// addedBeside adds a pod while a keeper dies, and the next one begins.
func (l *lan6) addedBeside(t *testing.T, w *network, p *pod, d *dying) (*current.Result, error) {
	t.Helper()
	var r *current.Result
	var err error
	done := make(chan struct{})
	d.armed.Store(true)
	go func() { defer close(done); r, err = w.tryAdd(p) }()
	select {
	case <-d.ended:
		l.keep(t)
		<-done
	case <-done:
	}
	d.armed.Store(false)
	return r, err
}

// The point of the records: a keeper that is killed between any two of its calls, from the SOLICIT to the
// pod's address, costs no lease and leaves none behind.
func TestKilledKeepersLoseAndDoubleNoDHCPv6Lease(t *testing.T) {
	t.Parallel()
	l := newLAN6(t)
	l.serve6(t, "eth0")
	whole := l.keepUntil(t, 0)
	w := l.leasing(nil)
	p := l.pod("whole")
	own := six(t, mustAdd(t, l, w, p, whole))
	calls := int(whole.calls.Load())
	w.del(p)
	l.eventually(t, func() bool { return !l.holds(own) })
	const sample = 2
	points := must.Of(fault.Points(calls, sample)).Get(t)
	killed := make(chan bool, len(points))
	t.Run("points", func(t *testing.T) {
		for _, at := range points {
			nstest.RunParallel(t, fmt.Sprint(at), func(t *testing.T) {
				killed <- l.addedThoughKilled(t, at)
			})
		}
	})
	close(killed)
	n := 0
	for was := range killed {
		if was {
			n++
		}
	}
	expect.That(t, n >= len(points)/2, "%d of %d keepers were killed, of %d calls", n, len(points), calls)
}

func mustAdd(t *testing.T, l *lan6, w *network, p *pod, d *dying) *current.Result {
	t.Helper()
	return must.Of(l.addedBeside(t, w, p, d)).Get(t)
}

// addedThoughKilled is one kill, on a LAN of its own.
func (l *lan6) addedThoughKilled(t *testing.T, at int) bool {
	t.Helper()
	l = newLAN6(t)
	l.serve6(t, "eth0")
	d := l.keepUntil(t, at)
	w := l.leasing(nil)
	p := l.pod("a")
	r, err := l.addedBeside(t, w, p, d)
	call, fired := d.last.Load().(string)
	leased := func() int { return strings.Count(l.server.Leased(), " fd00:50::") }
	if err != nil {
		// No keeper ran when the ADD looked for one.
		wantError(t, err, 11, "tombolod")
		l.eventually(t, func() bool { return leased() == 0 })
	} else {
		own := six(t, r)
		if !l.holds(own) || leased() != 1 {
			t.Errorf("the pod has %s, the server:\n%s", own, l.server.Leased())
		}
		shown := nstest.Run(t, p.NS, "ip", "-6", "-o", "address", "show", "dev", "eth0", "scope", "global")
		expect.That(t, strings.Count(shown, "/128 ") == 1 && strings.Contains(shown, " "+own.String()+"/128 "),
			"want %s alone of DHCPv6:\n%s", own, shown)
		expect.Success(t, w.check(p))
		w.del(p)
		l.eventually(t, func() bool { return leased() == 0 })
	}
	l.wantNoLeaseRecords()
	expect.That(t, !t.Failed(), "killed before %s; %s=%d repeats it, or nearly so", call, fault.Variable, at)
	return fired
}
