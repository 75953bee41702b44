package transport_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
)

// newBridge is a LAN whose host's end is a bridge, with a server in a namespace of its
// own at another port, and a pod.
func newBridge(t testing.TB) (l *lan, server *lan) {
	t.Helper()
	host := nstest.New(t)
	nstest.Run(t, host, "ip", "link", "add", "br0", "address", "02:00:0a:09:00:fe", "type", "bridge", "forward_delay", "0")
	nstest.Run(t, host, "ip", "link", "set", "br0", "addrgenmode", "none", "up")
	l = &lan{pod: nstest.New(t), host: host, link: "br0", index: nstest.Index(t, host, "br0")}
	server = &lan{pod: nstest.New(t)}
	l.eth0, _ = nstest.Veth(t, l.pod, "eth0", host, "pod")
	server.eth0, _ = nstest.Veth(t, server.pod, "eth0", host, "server")
	nstest.Run(t, l.pod, "ip", "link", "set", "eth0", "address", clientMAC().String())
	for _, port := range []string{"pod", "server"} {
		nstest.Run(t, host, "ip", "link", "set", port, "master", "br0")
	}
	nstest.Run(t, server.pod, "ip", "address", "add", serverIP+"/24", "dev", "eth0")
	return l, server
}

// A life with the real thing, told by its lease file.
func TestDnsmasq(t *testing.T) {
	t.Parallel()
	l, server := newBridge(t)
	leases := dnsmasq(t, server.pod, "eth0", "--dhcp-option=option:dns-server,10.9.0.53", "--dhcp-option=option:domain-search,pod.lan,lan",
		"--dhcp-option=option:mtu,1400", "--domain=lan", "--dhcp-option=121,10.8.0.0/16,10.9.0.2,0.0.0.0/0,10.9.0.1")
	c := l.client(t, func(cfg *dhcpc.Config) { cfg.LinkMTU = 1500 })
	ctx := soon(t)
	lease := must.Of(c.Acquire(ctx)).Get(t)
	ip := lease.Address.Addr().String()
	must.Until(t, "the server's file of leases", func() bool { return strings.Contains(leases(), " 02:00:0a:09:00:07 "+ip+" pod-7 00:70:6f:64:2d:37\n") })
	if got := lease.Expire.Sub(lease.Obtained); got != 2*time.Minute || lease.MTU != 1400 || lease.Domain != "lan" ||
		strings.Join(lease.Search, " ") != "pod.lan lan" || len(lease.DNS) != 1 || len(lease.Routes) != 2 || len(lease.Ignored) != 0 {
		t.Errorf("lease %+v", lease)
	}
	l.apply(t, lease)

	for name, at := range map[string]time.Time{"renewal": lease.Renew, "rebinding": lease.Rebind} {
		got := renewed(t, c, shifted(lease, at))
		expect.That(t, got.Address == lease.Address && got.Obtained.After(lease.Obtained), "%s: %+v", name, got)
	}

	must.Succeed(t, c.Release(ctx, lease))
	must.Until(t, "the server's file of leases", func() bool { return leases() == "" })
}

func TestDnsmasqHearsTheBridgeReleaseForAPodThatIsGone(t *testing.T) {
	t.Parallel()
	for _, knowsMAC := range []bool{true, false} {
		l, server := newBridge(t)
		leases := dnsmasq(t, server.pod, "eth0")
		lease := must.Of(l.client(t, nil).Acquire(soon(t))).Get(t)
		must.That(t, len(lease.ServerMAC) > 0, "the server's MAC address is not known")
		must.Until(t, "the server's file of leases", func() bool { return leases() != "" })
		nstest.Run(t, l.host, "ip", "link", "del", "pod")
		if !knowsMAC {
			gone := *lease
			gone.ServerMAC = nil
			lease = &gone
		}
		for _, cfg := range []*transport.Config{nil, {NetNS: l.host}} {
			expect.Is(t, transport.Release(soon(t), cfg, lease), tombolo.ErrInvalid, "Release from no link")
		}
		must.Succeed(t, transport.Release(soon(t), &transport.Config{NetNS: l.host, Link: l.index}, lease))
		must.Until(t, "the server's file of leases", func() bool { return leases() == "" })
	}
	expect.Is(t, transport.Release(soon(t), &transport.Config{Link: 1}, &dhcpc.Lease{}), tombolo.ErrInvalid, "error")
}

// A server on the host itself, which what a packet socket sends on the bridge does not
// reach.
func TestDnsmasqOnTheHostHearsTheRelease(t *testing.T) {
	t.Parallel()
	l, _ := newBridge(t)
	nstest.Run(t, l.host, "ip", "address", "add", serverIP+"/24", "dev", "br0")
	nstest.Run(t, l.host, "ip", "link", "del", "server")
	nstest.Run(t, l.host, "ip", "link", "set", "lo", "up") // as on any host
	leases := dnsmasq(t, l.host, "br0")
	lease := must.Of(l.client(t, nil).Acquire(soon(t))).Get(t)
	nstest.Run(t, l.host, "ip", "link", "del", "pod")
	must.Succeed(t, transport.Release(soon(t), &transport.Config{NetNS: l.host, Link: l.index}, lease))
	must.Until(t, "the server's file of leases", func() bool { return leases() == "" })
}

// dnsmasq ignores a RELEASE with the address in option 50 and not in ciaddr: that the
// lease file changes above is proof of something.
func TestDnsmasqIgnoresAReleaseThatIsWrong(t *testing.T) {
	t.Parallel()
	l, server := newBridge(t)
	leases := dnsmasq(t, server.pod, "eth0")
	c := l.client(t, nil)
	lease := must.Of(c.Acquire(soon(t))).Get(t)
	p := must.Of(dhcpc.Release(lease, 1)).Get(t)
	m := must.Of(dhcpv4.FromBytes(p.Payload)).Get(t)
	m.UpdateOption(dhcpv4.OptRequestedIPAddress(m.ClientIPAddr))
	m.ClientIPAddr = net.IPv4zero
	p.Payload = m.ToBytes()
	conn := raw(t, l.config())
	must.Succeed(t, conn.Send(t.Context(), p))
	// It answers in order, so it has seen it by the time that another has a lease.
	mac := net.HardwareAddr{2, 0, 10, 9, 0, 8}
	other := &transport.Config{NetNS: l.pod, Link: l.eth0, MAC: mac}
	if _, err := l.client(t, func(c *dhcpc.Config) {
		// What is unicast to this MAC address is for none of the pod's interfaces.
		c.Broadcast = true
		c.MAC, c.ClientID, c.Dial = mac, []byte("\x00pod-8"), transport.Dialer(other)
	}).Acquire(soon(t)); err != nil {
		t.Fatal(err)
	}
	must.Until(t, "the server's file of leases", func() bool { return strings.Contains(leases(), lease.Address.Addr().String()) })
}

func TestDnsmasqRefusesAnAddressOfAnotherNetwork(t *testing.T) {
	t.Parallel()
	l, server := newBridge(t)
	dnsmasq(t, server.pod, "eth0")
	nstest.Run(t, l.pod, "ip", "address", "add", "192.0.2.7/24", "dev", "eth0")
	nstest.Run(t, l.pod, "ip", "route", "add", "default", "dev", "eth0")
	now := time.Now()
	moved := &dhcpc.Lease{
		Address: nstest.Prefix("192.0.2.7/24"), Server: addr("192.0.2.1"), MAC: dhcpc.Hex(clientMAC()), ClientID: []byte("\x00pod-7"),
		Obtained: now, Renew: now, Rebind: now, Expire: now.Add(time.Hour),
	}
	var got []*dhcpc.Lease
	ctx, cancel := context.WithCancel(soon(t))
	err := l.client(t, nil).Run(ctx, moved, func(_, next *dhcpc.Lease) error {
		if got = append(got, next); next != nil {
			cancel()
		}
		return nil
	})
	expect.That(t, errors.Is(err, context.Canceled) && len(got) == 2 && got[0] == nil && got[1].Server == addr(serverIP),
		"got %+v, %v: want another address, after a NAK", got, err)
}

func TestDnsmasqCommitsRapidly(t *testing.T) {
	t.Parallel()
	l, server := newBridge(t)
	leases := dnsmasq(t, server.pod, "eth0", "--dhcp-rapid-commit")
	count := &counting{}
	c := l.client(t, func(cfg *dhcpc.Config) { cfg.RapidCommit, cfg.Dial = true, count.dial(l) })
	lease := must.Of(c.Acquire(soon(t))).Get(t)
	must.Until(t, "the server's file of leases", func() bool { return strings.Contains(leases(), lease.Address.Addr().String()) })
	// One, unless the answer takes so long that it is sent again.
	expect.That(t, !slices.ContainsFunc(count.sent, func(m dhcpv4.MessageType) bool { return m != dhcpv4.MessageTypeDiscover }),
		"sent %v, want DISCOVER alone", count.sent)
}

func TestDnsmasqLeasesByUDP(t *testing.T) {
	t.Parallel()
	l, server := newBridge(t)
	nstest.Sysctl(t, l.pod, "net/ipv4/conf/all/rp_filter", "0")
	nstest.Sysctl(t, l.pod, "net/ipv4/conf/eth0/rp_filter", "0")
	dnsmasq(t, server.pod, "eth0")
	c := l.client(t, func(cfg *dhcpc.Config) { cfg.Broadcast, cfg.Dial = true, udpOnly(l) })
	expect.Success(t, expect.Err(c.Acquire(soon(t))))
}
