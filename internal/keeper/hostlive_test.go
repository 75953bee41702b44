package keeper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nstest"
)

// nic is the host's, in the fixture of lan_test.go.
const nic = "lan0"

// hostLAN is a LAN whose host leased its address with a client of its own, on its NIC,
// before that became a port of the bridge.
type hostLAN struct {
	*lan
	mac   net.HardwareAddr
	lease *dhcpc.Lease
	known *dhcpc.Lease // as it was proven
}

// newAdoptedLAN is newHostLAN whose host has a lease of an hour, with the NIC taken over and
// the lease adopted.
func newAdoptedLAN(t *testing.T) (*hostLAN, *server) {
	t.Helper()
	l := newHostLAN(t)
	s := l.serve(time.Hour)
	l.leaseOnNIC()
	l.takeOver()
	l.adopt()
	return l, s
}

// newHostLAN begins with a NIC that is no port yet.
func newHostLAN(t *testing.T) *hostLAN {
	t.Helper()
	l := &hostLAN{lan: newLAN(t)}
	nstest.Run(t, l.host, "ip", "link", "set", nic, "nomaster")
	err := l.host.Do(func() error {
		link, err := net.InterfaceByName(nic)
		if err == nil {
			l.mac = link.HardwareAddr
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// client is the host's own, on its NIC.
func (l *hostLAN) client(cfg dhcpc.Config) *dhcpc.Client {
	l.Helper()
	cfg.MAC, cfg.ClientID = l.mac, hostID()
	cfg.Dial = transport.Dialer(&transport.Config{NetNS: l.host, Link: nstest.Index(l, l.host, nic)})
	client, err := dhcpc.New(&cfg)
	if err != nil {
		l.Fatal(err)
	}
	return client
}

// leaseOnNIC gets the lease.
func (l *hostLAN) leaseOnNIC() {
	l.Helper()
	var err error
	if l.lease, err = l.client(dhcpc.Config{Retransmit: 500 * time.Millisecond, Timeout: longEnough}).Acquire(l.Context()); err != nil {
		l.Fatal(err)
	}
	left := fmt.Sprint(max(int(time.Until(l.lease.Expire).Seconds()), 2))
	a := l.lease.Address
	nstest.Run(l, l.host, "ip", "address", "add", a.String(), "brd", "+", "dev", nic, "valid_lft", left, "preferred_lft", left)
	nstest.Run(l, l.host, "ip", "route", "add", "default", "via", "10.9.0.1", "dev", nic, "proto", "dhcp", "src", a.Addr().String(), "metric", "1024")
	known := *l.lease
	l.known = &known
}

// takeOver makes the NIC a port, and moves what it has to the bridge.
func (l *hostLAN) takeOver() {
	l.Helper()
	a := l.lease.Address
	left := fmt.Sprint(max(int(l.onLink(nic)[a].Seconds()), 1))
	nstest.Run(l, l.host, "ip", "link", "set", l.bridge, "address", l.mac.String())
	nstest.Run(l, l.host, "ip", "address", "add", a.String(), "brd", "+", "dev", l.bridge, "valid_lft", left, "preferred_lft", left, "noprefixroute")
	nstest.Run(l, l.host, "ip", "link", "set", nic, "master", l.bridge)
	nstest.Run(l, l.host, "ip", "route", "replace", a.Masked().String(), "dev", l.bridge, "proto", "kernel", "scope", "link", "src", a.Addr().String())
	nstest.Run(l, l.host, "ip", "route", "replace", "default", "via", "10.9.0.1", "dev", l.bridge, "proto", "dhcp", "src", a.Addr().String(), "metric", "1024")
	nstest.Run(l, l.host, "ip", "address", "del", a.String(), "dev", nic)
}

// adopt is what the plugin does after a takeover.
func (l *hostLAN) adopt() *lease.Record {
	l.Helper()
	r, err := lease.Adopt(l.Context(), l.dir, &lease.Adoption{
		NIC: nic, MAC: l.mac, ClientID: hostID().String(), Lease: l.known, Bridge: l.bridge, Addresses: l.list(l.bridge), NetNS: l.host,
	})
	if err != nil || r == nil {
		l.Fatalf("Adopt: %v, %v", r, err)
	}
	return r
}

func (l *hostLAN) list(link string) []addr.Address {
	l.Helper()
	conn, err := addr.Dial(&addr.Config{NetNS: l.host})
	if err != nil {
		l.Fatal(err)
	}
	defer conn.Close()
	list, err := conn.List(addr.Filter{Link: nstest.Index(l, l.host, link), Family: unix.AF_INET})
	if err != nil {
		l.Fatal(err)
	}
	return list
}

// onLink gives the addresses of a link of the host's, with the time left: -1 is for ever.
func (l *hostLAN) onLink(link string) map[netip.Prefix]time.Duration {
	l.Helper()
	got := map[netip.Prefix]time.Duration{}
	for _, a := range l.list(link) {
		got[a.Prefix] = -1
		if a.Valid != nil {
			got[a.Prefix] = *a.Valid
		}
	}
	return got
}

// record gives the host's as it is now, nil if it is gone.
func (l *hostLAN) record() *lease.Record {
	r, err := l.dir.Load(lease.HostHash(nic))
	if err != nil {
		return nil
	}
	return r
}

// state is that of the record; it is empty where there is none.
func (l *hostLAN) state() lease.State {
	if r := l.record(); r != nil {
		return r.State
	}
	return ""
}

// mainRoutes gives the host's routes as ip-route(8) shows them.
func (l *hostLAN) mainRoutes() []string {
	l.Helper()
	var list []string
	for line := range strings.Lines(nstest.Run(l, l.host, "ip", "-4", "route", "show")) {
		list = append(list, strings.TrimSpace(line))
	}
	slices.Sort(list)
	return list
}

// dnsmasqLog runs the real server, and gives its lease file and its log.
func (l *hostLAN) dnsmasqLog(args ...string) (leases func() string, log func() string) {
	l.Helper()
	bin, err := exec.LookPath("dnsmasq")
	if err != nil {
		if bin, err = exec.LookPath("/usr/sbin/dnsmasq"); err != nil {
			if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
				l.Skip("needs dnsmasq (package dnsmasq-base)")
			}
			l.Fatal("needs dnsmasq (package dnsmasq-base); TOMBOLO_ALLOW_SKIPS=1 skips such tests")
		}
	}
	file := l.TempDir() + "/leases"
	cmd := exec.Command(bin, append([]string{"--keep-in-foreground", "--port=0", "--no-ping", "--conf-file=/dev/null", "--user=root", "--pid-file=",
		"--log-facility=-", "--log-dhcp", "--interface=eth0", "--bind-interfaces", "--dhcp-leasefile=" + file}, args...)...)
	out := &nstest.Output{}
	cmd.Stdout, cmd.Stderr = out, out
	if err := l.remote.Do(cmd.Start); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return func() string {
		data, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			l.Error(err)
		}
		return string(data)
	}, out.String
}

// expiry waits until dnsmasq's lease of an address ends later than at a time, and gives
// when, and of which client it is. Its file is empty for a moment whenever it is written.
func expiry(t *testing.T, leases func() string, a netip.Addr, after int64) (end int64, id string) {
	t.Helper()
	until(t, fmt.Sprintf("the server's lease of %s that ends after %d", a, after), func() bool {
		for line := range strings.Lines(leases()) {
			if f := strings.Fields(line); len(f) == 5 && f[2] == a.String() {
				id = f[4]
				_, err := fmt.Sscan(f[0], &end)
				return err == nil && end > after
			}
		}
		return false
	})
	return end, id
}

// acks waits until the log, which comes by a pipe, has so many DHCPACKs: with each it has
// all that led to it.
func acks(t *testing.T, log func() string, n int) {
	t.Helper()
	until(t, fmt.Sprintf("%d DHCPACKs", n), func() bool { return strings.Count(log(), "DHCPACK") >= n })
}

func TestDnsmasqRenewsTheHostsLeaseOnTheBridge(t *testing.T) {
	t.Parallel()
	l := newHostLAN(t)
	leases, log := l.dnsmasqLog("--dhcp-range=10.9.1.1,10.9.1.50,255.255.0.0,3600")
	l.leaseOnNIC()
	a := l.lease.Address
	_, id := expiry(t, leases, a.Addr(), 0)
	if id != hostID().String() {
		t.Fatalf("the server's leases: %s", leases())
	}
	l.takeOver()
	routes := l.mainRoutes()

	// What all this is for: the client on the NIC asks, the server answers, and nobody hears.
	acks(t, log, 1)
	offers := strings.Count(log(), "DHCPOFFER")
	got, err := l.client(dhcpc.Config{Retransmit: 500 * time.Millisecond, Timeout: 3 * time.Second}).Acquire(t.Context())
	if !errors.Is(err, dhcpc.ErrTimeout) {
		t.Fatalf("on a port of a bridge a client is not deaf: %v, %v", got, err)
	}
	until(t, "an offer", func() bool { return strings.Count(log(), "DHCPOFFER") > offers })

	// A renewal within the same second would not show.
	granted, _ := expiry(t, leases, a.Addr(), 0)
	until(t, "a later second", func() bool { return time.Now().Unix() > granted-3600+1 })
	said := len(log())
	l.adopt()
	l.keeper()
	_, id = expiry(t, leases, a.Addr(), granted)
	until(t, "the record says so", func() bool { return l.state() == lease.Bound })
	if id != hostID().String() || strings.Count(leases(), "\n") > 1 {
		t.Errorf("the server's leases:\n%s", leases())
	}
	r := l.record()
	if r.Error != "" || r.Lease.Address != a || r.Client.ClientID.String() != hostID().String() || r.Lease.Server.String() != "10.9.0.1" {
		t.Errorf("the record is %+v, %+v", r, r.Lease)
	}
	if trouble, err := lease.HostTrouble(l.dir); len(trouble) > 0 || err != nil {
		t.Errorf("troubles: %v, %v", trouble, err)
	}
	if left := l.onLink(l.bridge)[a]; left <= 0 || len(l.onLink(nic)) != 0 {
		t.Errorf("the bridge has %v, the NIC %v", l.onLink(l.bridge), l.onLink(nic))
	}
	if got := l.mainRoutes(); !slices.Equal(got, routes) {
		t.Errorf("routes are %v, want %v", got, routes)
	}

	// Given back, the lease is the client's again.
	if err := lease.HandBack(t.Context(), l.dir, nic, func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if rest := log()[said:]; strings.Contains(rest, "DHCPRELEASE") || strings.Contains(rest, "DHCPDISCOVER") || strings.Contains(rest, "DHCPNAK") {
		t.Errorf("the server's log:\n%s", rest)
	}
	if _, id := expiry(t, leases, a.Addr(), granted); id != hostID().String() {
		t.Errorf("handed back, the server's leases:\n%s", leases())
	}
	if l.record() != nil || l.onLink(l.bridge)[a] <= 0 {
		t.Errorf("handed back: %v, the bridge has %v", l.record(), l.onLink(l.bridge))
	}
}

// udhcpc is somebody else's client, on the NIC: deaf as any.
func TestAnotherClientHearsNothingOnThePortEither(t *testing.T) {
	t.Parallel()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		if os.Getenv("TOMBOLO_ALLOW_SKIPS") == "1" {
			t.Skip("needs busybox")
		}
		t.Fatal("needs busybox; TOMBOLO_ALLOW_SKIPS=1 skips such tests")
	}
	l := newHostLAN(t)
	_, log := l.dnsmasqLog("--dhcp-range=10.9.1.1,10.9.1.50,255.255.0.0,3600")
	udhcpc := func(tries string) error {
		out, err := nstest.Try(l.host, busybox, "udhcpc", "-i", nic, "-f", "-q", "-n", "-t", tries, "-T", "1", "-s", "/bin/true")
		t.Log(out)
		return err
	}
	if err := udhcpc("60"); err != nil {
		t.Fatalf("on a NIC by itself: %v", err)
	}
	nstest.Run(t, l.host, "ip", "link", "set", nic, "master", l.bridge)
	offers := strings.Count(log(), "DHCPOFFER")
	if udhcpc("2") == nil {
		t.Error("on a port it got a lease")
	}
	until(t, "the server has answered it", func() bool { return strings.Count(log(), "DHCPOFFER") > offers })
}

func TestTheHostsLeaseOutlivesItsKeepers(t *testing.T) {
	t.Parallel()
	l, s := newAdoptedLAN(t)
	// The first as soon as it has begun.
	for i := range 4 {
		cmd := l.process()
		if i > 0 {
			was := l.record().Updated
			l.make(func(r *lease.Record) { due(r) })
			until(t, "a renewal", func() bool {
				r := l.record()
				return r.State == lease.Bound && r.Updated.After(was) && r.Lease.Renew.After(time.Now())
			})
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait() // says that it was killed
	}
	if early := s.tooEarly(); len(early) > 0 || s.count("sent NAK") != 0 || s.count("RELEASE") != 0 {
		t.Errorf("the server heard %v, and of clients whose lease was alive: %v", s.heard, early)
	}
	if left := l.onLink(l.bridge)[l.lease.Address]; left < 30*time.Minute {
		t.Errorf("the bridge has %v", l.onLink(l.bridge))
	}
}

// make writes the record anew, as a later keeper would find it.
func (l *hostLAN) make(change func(*lease.Record)) {
	l.Helper()
	h, err := l.dir.Lock(context.Background(), lease.HostHash(nic))
	if err != nil {
		l.Fatal(err)
	}
	r, err := h.Load()
	if err == nil {
		change(r)
		err = h.Create(r)
	}
	if err := errors.Join(err, h.Close()); err != nil {
		l.Fatal(err)
	}
}

func TestASilentServerIsToldOfByTheKernelsLAN(t *testing.T) {
	t.Parallel()
	l := newHostLAN(t)
	s := l.serve(time.Hour)
	l.leaseOnNIC()
	l.takeOver()
	s.set(func(s *server) { s.silence = true })
	l.adopt()
	l.keeper()
	until(t, "an operator is told", func() bool { trouble, err := lease.HostTrouble(l.dir); return err == nil && len(trouble) == 1 })
	trouble, _ := lease.HostTrouble(l.dir)
	for _, part := range []string{l.lease.Address.String(), "of " + nic, "on " + l.bridge, "time left: ", "asked 10.9.0.1 for " + l.lease.Address.Addr().String(), "tombolo uplink restore lan0 br0"} {
		if !strings.Contains(trouble[0], part) {
			t.Errorf("told: %s, without %q", trouble[0], part)
		}
	}
	if l.state() != lease.Adopting || l.onLink(l.bridge)[l.lease.Address] <= 0 {
		t.Errorf("it is %s, the bridge has %v", l.state(), l.onLink(l.bridge))
	}
	s.set(func(s *server) { s.silence = false })
	until(t, "it is well again", func() bool {
		trouble, err := lease.HostTrouble(l.dir)
		return err == nil && len(trouble) == 0 && l.state() == lease.Bound
	})
}

func TestTheHostMovesToTheAddressThatItsServerWants(t *testing.T) {
	t.Parallel()
	l := newHostLAN(t)
	s := l.serve(time.Hour)
	l.leaseOnNIC()
	l.takeOver()
	old := l.lease.Address
	// Nobody else's.
	nstest.Run(t, l.host, "ip", "address", "add", "10.9.7.7/16", "dev", l.bridge)
	nstest.Run(t, l.host, "ip", "route", "add", "203.0.113.0/24", "via", "10.9.0.9", "dev", l.bridge)
	s.set(func(s *server) { s.refuse, s.base = true, netip.MustParseAddr("10.9.2.1") })
	l.adopt()
	l.keeper()
	until(t, "the record says so", func() bool { r := l.record(); return r.State == lease.Bound && r.Lease.Address != old })
	if s.count("sent NAK") == 0 || s.count("RELEASE") != 0 {
		t.Errorf("the server heard %v", s.heard)
	}
	got := l.onLink(l.bridge)
	next := netip.MustParsePrefix("10.9.2.1/16")
	if left := got[next]; len(got) != 2 || left < 30*time.Minute || got[netip.MustParsePrefix("10.9.7.7/16")] != -1 {
		t.Errorf("the bridge has %v", got)
	}
	want := []string{"10.9.0.0/16 dev br0 proto kernel scope link src 10.9.2.1", "203.0.113.0/24 via 10.9.0.9 dev br0", "default via 10.9.0.1 dev br0 proto dhcp src 10.9.2.1 metric 1024"}
	routes := slices.DeleteFunc(l.mainRoutes(), func(r string) bool { return strings.Contains(r, "10.9.7.7") })
	if !slices.Equal(routes, want) {
		t.Errorf("routes are %q, want %q", routes, want)
	}
}

func TestAnAddressThatWasLeftOnTheNICIsRenewedThere(t *testing.T) {
	t.Parallel()
	l := newHostLAN(t)
	l.serve(time.Hour)
	l.leaseOnNIC()
	l.takeOver()
	a := l.lease.Address
	// keepAddressOnUplink: here the NIC alone has it.
	nstest.Run(t, l.host, "ip", "address", "add", a.String(), "dev", nic, "valid_lft", "600", "preferred_lft", "600", "noprefixroute")
	nstest.Run(t, l.host, "ip", "address", "del", a.String(), "dev", l.bridge)
	r, err := lease.Adopt(t.Context(), l.dir, &lease.Adoption{NIC: nic, MAC: l.mac, ClientID: hostID().String(), Lease: l.known, Bridge: l.bridge, Addresses: l.list(nic), NetNS: l.host})
	if err != nil || r == nil {
		t.Fatalf("Adopt: %v, %v", r, err)
	}
	l.keeper()
	until(t, "it is renewed", func() bool { return l.state() == lease.Bound })
	if left := l.onLink(nic)[a]; left < 30*time.Minute || len(l.onLink(l.bridge)) != 0 {
		t.Errorf("the NIC has %v, the bridge %v", l.onLink(nic), l.onLink(l.bridge))
	}
}

func TestTheHostIsLeftAloneWhereItIsNotAsItWas(t *testing.T) {
	t.Parallel()
	l := newHostLAN(t)
	l.serve(time.Hour)
	l.leaseOnNIC()
	l.takeOver()
	r := l.adopt()
	k := kernel{l.host}
	if p, err := k.enter(r); err != nil {
		t.Fatal(err)
	} else if err := p.close(); err != nil {
		t.Error(err)
	}
	elsewhere := *r
	elsewhere.NetNSCookie++
	if _, err := k.enter(&elsewhere); !errors.Is(err, errGone) || !strings.Contains(err.Error(), "does tombolod run in the host's?") {
		t.Errorf("in another namespace: %v", err)
	}
	for name, change := range map[string]func(*lease.Record){
		"bridge": func(r *lease.Record) { r.Bridge = "br8" },
		"NIC":    func(r *lease.Record) { h := *r.Host; h.NIC = "eth9"; r.Host = &h },
	} {
		without := *r
		change(&without)
		if _, err := k.enter(&without); !errors.Is(err, errGone) {
			t.Errorf("without its %s: %v", name, err)
		}
	}
	// The address is somewhere else by now.
	nstest.Run(t, l.host, "ip", "link", "add", "br9", "up", "type", "bridge")
	nstest.Run(t, l.host, "ip", "address", "del", r.Lease.Address.String(), "dev", l.bridge)
	nstest.Run(t, l.host, "ip", "address", "add", r.Lease.Address.String(), "dev", "br9")
	p, err := k.enter(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.apply(r.Applied, time.Hour); err == nil || !strings.Contains(err.Error(), "somebody moved it") {
		t.Errorf("of an address on another link: %v", err)
	}
	if err := p.close(); err != nil {
		t.Error(err)
	}
	if got := l.onLink(l.bridge); len(got) != 0 {
		t.Errorf("the bridge has %v", got)
	}
	nstest.Run(t, l.host, "ip", "link", "set", nic, "nomaster")
	if _, err := k.enter(r); err == nil || errors.Is(err, errGone) || !strings.Contains(err.Error(), "not a port of br0") {
		t.Errorf("given back by hand: %v", err)
	}
}

func TestTheHostsAddressComesBackWithItsRoutesInTheKernel(t *testing.T) {
	t.Parallel()
	l, s := newAdoptedLAN(t)
	routes := l.mainRoutes()
	stop := l.keeper()
	until(t, "it is confirmed", func() bool { return l.state() == lease.Bound })
	stop()
	// The kernel ends the address, and with the last one of the link all its routes.
	nstest.Run(t, l.host, "ip", "address", "del", l.lease.Address.String(), "dev", l.bridge)
	if got := l.mainRoutes(); len(got) != 0 {
		t.Fatalf("there are still %v", got)
	}
	l.keeper()
	until(t, "address and routes are back", func() bool { return slices.Equal(l.mainRoutes(), routes) })
	if left := l.onLink(l.bridge)[l.lease.Address]; left < 30*time.Minute {
		t.Errorf("the bridge has %v", l.onLink(l.bridge))
	}
	if early := s.tooEarly(); len(early) > 0 {
		t.Errorf("of clients whose lease was alive the server heard %v", early)
	}
}
