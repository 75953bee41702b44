package hostport

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// newHost is a namespace whose loopback interface is up, and has further addresses.
func newHost(tb testing.TB) *netns.NS {
	tb.Helper()
	ns := nstest.New(tb)
	nstest.Script(tb, ns, "ip link set lo up", "ip addr add 10.0.0.1/32 dev lo 2>/dev/null || true", "ip addr add fd00::1/128 dev lo nodad 2>/dev/null || true")
	return ns
}

// kind is how a test opens a socket.
type kind struct {
	proto  int
	at     string
	v6only bool
	idle   bool   // bound, but does not listen
	peer   string // connected to
	dev    string // SO_BINDTODEVICE
	shared bool   // SO_REUSEPORT

	freebind bool
}

func (k kind) open(ns *netns.NS) (fd int, _ error) {
	at := netip.MustParseAddrPort(k.at)
	domain, typ := unix.AF_INET, unix.SOCK_STREAM
	if at.Addr().Is6() {
		domain = unix.AF_INET6
	}
	if k.proto == unix.IPPROTO_UDP {
		typ = unix.SOCK_DGRAM
	}
	err := ns.Do(func() (err error) { fd, err = unix.Socket(domain, typ|unix.SOCK_CLOEXEC, k.proto); return err })
	if err != nil {
		return -1, err
	}
	if k.v6only {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	} else if domain == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	}
	if k.dev != "" {
		err = errors.Join(err, ns.Do(func() error { return unix.BindToDevice(fd, k.dev) }))
	}
	if k.freebind {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_FREEBIND, 1))
	}
	if k.shared {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1))
	}
	err = errors.Join(err, unix.Bind(fd, sockaddr(at)))
	if k.peer != "" {
		err = errors.Join(err, unix.Connect(fd, sockaddr(netip.MustParseAddrPort(k.peer))))
	}
	if k.proto != unix.IPPROTO_UDP && !k.idle && k.peer == "" {
		err = errors.Join(err, unix.Listen(fd, 1))
	}
	if err != nil {
		unix.Close(fd)
	}
	return fd, err
}

func sockaddr(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is6() {
		zone, _ := strconv.ParseUint(at.Addr().Zone(), 10, 32)
		return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16(), ZoneId: uint32(zone)}
	}
	return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
}

func mustOpen(tb testing.TB, ns *netns.NS, k kind) {
	tb.Helper()
	fd := must.Of(k.open(ns)).Get(tb, "open %+v", k)
	tb.Cleanup(func() { unix.Close(fd) })
}

func mustList(tb testing.TB, ns *netns.NS, ports ...nft.Port) []Listener {
	tb.Helper()
	return must.Of(Listeners(tb.Context(), ns, ports...)).Get(tb)
}

// The kernel's bind is the referee: it refuses a second socket exactly where the first takes some of what is wanted.
func TestASocketTakesAPortIfNoOtherCouldBeBoundToIt(t *testing.T) {
	t.Parallel()
	port := func(addr string, port uint16) (p nft.Port) {
		p.HostPort = port
		if addr != "" {
			p.HostAddr = nstest.Addr(addr)
		}
		return p
	}
	for name, proto := range map[string]int{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP} {
		for what, k := range map[string]kind{
			"any IPv4 address": {at: "0.0.0.0:80"}, "loopback": {at: "127.0.0.1:80"}, "an IPv4 address": {at: "10.0.0.1:80"},
			"any address": {at: "[::]:80"}, "any IPv6 address": {at: "[::]:80", v6only: true}, "an IPv6 address": {at: "[fd00::1]:80"},
			"an IPv4 address, mapped": {at: "[::ffff:10.0.0.1]:80"}, "any IPv4 address, mapped": {at: "[::ffff:0.0.0.0]:80"},
		} {
			t.Run(name+" at "+what, func(t *testing.T) {
				t.Parallel()
				ns := newHost(t)
				k.proto = proto
				mustOpen(t, ns, k)
				for _, want := range []struct {
					port nft.Port
					bind kind
				}{
					{port("", 80), kind{at: "[::]:80"}}, {port("0.0.0.0", 80), kind{at: "0.0.0.0:80"}}, {port("::", 80), kind{at: "[::]:80", v6only: true}},
					{port("127.0.0.1", 80), kind{at: "127.0.0.1:80"}}, {port("10.0.0.1", 80), kind{at: "10.0.0.1:80"}},
					{port("fd00::1", 80), kind{at: "[fd00::1]:80"}}, {port("", 81), kind{at: "[::]:81"}}, {port("10.0.0.1", 81), kind{at: "10.0.0.1:81"}},
				} {
					want.port.Protocol, want.bind.proto = nft.Protocol(proto), proto
					syscall.ForkLock.RLock() // a child would keep it open until it runs its program
					fd, err := want.bind.open(ns)
					if err == nil {
						unix.Close(fd)
					}
					syscall.ForkLock.RUnlock()
					must.That(t, err == nil || errors.Is(err, unix.EADDRINUSE), "%v", err)
					if got := mustList(t, ns, want.port); (err != nil) != (len(got) == 1) {
						t.Errorf("%s: found %v, but binding it: %v", want.port, got, err)
					}
				}
			})
		}
	}
}

func TestListenersAreThoseOfThePorts(t *testing.T) {
	t.Parallel()
	ns := newHost(t)
	tcp, udp := nft.Protocol(unix.IPPROTO_TCP), nft.Protocol(unix.IPPROTO_UDP)
	for _, k := range []kind{
		{proto: unix.IPPROTO_TCP, at: "127.0.0.1:80"}, {proto: unix.IPPROTO_TCP, at: "127.0.0.53:80"}, {proto: unix.IPPROTO_TCP, at: "[::1]:80"},
		{proto: unix.IPPROTO_TCP, at: "127.0.0.1:81"}, {proto: unix.IPPROTO_TCP, at: "0.0.0.0:82", idle: true},
		{proto: unix.IPPROTO_TCP, at: "127.0.0.1:83", peer: "127.0.0.1:80"}, {proto: unix.IPPROTO_UDP, at: "0.0.0.0:84", peer: "10.0.0.1:53"},
		{proto: unix.IPPROTO_UDP, at: "224.0.0.251:85"}, {proto: unix.IPPROTO_UDP, at: "255.255.255.255:85"}, {proto: unix.IPPROTO_UDP, at: "127.0.0.1:86"},
	} {
		mustOpen(t, ns, k)
	}
	nstest.Run(t, ns, "ip", "link", "add", "vx0", "type", "vxlan", "id", "7", "local", "10.0.0.1", "dev", "lo", "dstport", "4789")
	nstest.Run(t, ns, "ip", "link", "set", "vx0", "up")
	ports := []nft.Port{{Protocol: tcp, HostPort: 80}, {Protocol: udp, HostPort: 81}, {Protocol: tcp, HostPort: 82}, {Protocol: tcp, HostPort: 83},
		{Protocol: udp, HostPort: 84}, {Protocol: udp, HostPort: 85}, {Protocol: udp, HostPort: 86}, {Protocol: udp, HostPort: 4789}, {Protocol: nft.SCTP, HostPort: 80}}
	var got []string
	for _, l := range mustList(t, ns, ports...) {
		who := "this program"
		if !strings.Contains(l.String(), "hostport.test (pid ") {
			_, who, _ = strings.Cut(l.String(), " is in use by ")
			who, _, _ = strings.Cut(who, " (socket")
		}
		got = append(got, fmt.Sprintf("%d %s of %s", l.Protocol, l.Local, who))
	}
	const want = "6 127.0.0.1:80 of this program, 17 0.0.0.0:4789 of the kernel, or by a process that cannot be seen from here, 17 127.0.0.1:86 of this program"
	expect.Equal(t, strings.Join(got, ", "), want)
	own := mustList(t, ns, nft.Port{Protocol: tcp, HostAddr: nstest.Addr("127.0.0.53"), HostPort: 80})
	expect.That(t, len(own) == 1 && len(NotHeldFor("c1", own)) == 1, "listeners at the address itself are %v", own)
	for _, bad := range []nft.Port{{Protocol: 6}, {HostPort: 80}, {Protocol: 1, HostPort: 80}} {
		expect.Is(t, expect.Err(Listeners(t.Context(), nil, bad)), tombolo.ErrInvalid, "port %+v", bad)
	}
}

// Each socket is alone with its port, and collides with the host addresses named; "all" is a port without one.
func TestOnlyASocketThatWouldReceiveWhatAPortTakesIsInItsWay(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	nstest.Run(t, ns, "sh", "-ec", "ip link set lo up; "+
		"for l in up0/192.0.2.10/24 virbr0/192.168.122.1/24 kube-ipvs0/10.96.0.1/32 bare/ gone/192.168.123.1/24; do "+
		"ip link add ${l%%/*} type bridge; ip link set ${l%%/*} up; a=${l#*/}; test -z $a || ip addr add $a brd + dev ${l%%/*}; done; "+
		"ip addr add fd00:2::10/64 dev up0 nodad; ip addr add fe80::10/64 dev up0 nodad; ip addr add 2001:db8::1/64 dev virbr0 nodad")
	const (
		four, six = "all 0.0.0.0 127.0.0.1 192.0.2.10 192.168.122.1 10.96.0.1", "all :: fd00:2::10"
		both      = "all 0.0.0.0 :: 127.0.0.1 192.0.2.10 192.168.122.1 10.96.0.1 fd00:2::10"
		tcp, udp  = unix.IPPROTO_TCP, unix.IPPROTO_UDP
	)
	for i, tt := range []struct {
		what, want string
		kind
	}{
		{"any address", both, kind{proto: tcp, at: "[::]"}},
		{"any IPv4 address", four, kind{proto: udp, at: "0.0.0.0"}},
		{"any IPv6 address", six, kind{proto: udp, at: "[::]", v6only: true}},
		{"a group of sockets", four, kind{proto: udp, at: "0.0.0.0", shared: true}},
		{"libvirt's DHCP", "all 0.0.0.0 192.168.122.1", kind{proto: udp, at: "0.0.0.0", dev: "virbr0"}},
		{"libvirt's DHCPv6", "all ::", kind{proto: udp, at: "[::]", v6only: true, dev: "virbr0"}},
		{"both families of a link", "all 0.0.0.0 :: 192.168.122.1", kind{proto: tcp, at: "[::]", dev: "virbr0"}},
		{"an address of a link", "all 0.0.0.0 192.0.2.10", kind{proto: tcp, at: "192.0.2.10", dev: "up0"}},
		{"an address, by another link", "", kind{proto: tcp, at: "192.0.2.10", dev: "virbr0"}},
		{"a link without addresses, as a port or a VRF", "", kind{proto: tcp, at: "0.0.0.0", dev: "bare"}},
		{"a link that is gone", "", kind{proto: tcp, at: "0.0.0.0", dev: "gone"}},
		{"what the host calls", both, kind{proto: tcp, at: "[::]", dev: "lo"}},
		{"kube-ipvs0", "10.96.0.1", kind{proto: tcp, at: "0.0.0.0", dev: "kube-ipvs0"}},
		{"an address of kube-ipvs0", "10.96.0.1", kind{proto: tcp, at: "10.96.0.1"}},
		{"an address", "all 0.0.0.0 192.168.122.1", kind{proto: udp, at: "192.168.122.1"}},
		{"an address that comes later", "all ::", kind{proto: udp, at: "[fd00:2::11]", freebind: true}},
		{"a broadcast address", "", kind{proto: udp, at: "192.0.2.255"}},
		{"all of a link", "", kind{proto: udp, at: "255.255.255.255"}},
		{"a multicast address", "", kind{proto: udp, at: "224.0.0.251"}},
		{"a multicast address, IPv6", "", kind{proto: udp, at: "[ff0e::fb]"}},
		{"a link-local address", "", kind{proto: udp, at: "[fe80::10%" + strconv.Itoa(nstest.Index(t, ns, "up0")) + "]"}},
		{"localhost", "all 0.0.0.0 127.0.0.1", kind{proto: tcp, at: "127.0.0.1"}},
		{"systemd-resolved", "", kind{proto: udp, at: "127.0.0.53"}},
		{"localhost, IPv6", "", kind{proto: tcp, at: "[::1]"}},
		{"a client", "", kind{proto: udp, at: "0.0.0.0", peer: "192.0.2.10:53"}},
		{"bound alone", "", kind{proto: tcp, at: "0.0.0.0", idle: true}},
	} {
		number := uint16(2000 + i)
		tt.at += fmt.Sprintf(":%d", number)
		mustOpen(t, ns, tt.kind)
		if tt.shared {
			mustOpen(t, ns, tt.kind)
		}
		if tt.dev == "gone" {
			nstest.Run(t, ns, "ip", "link", "del", "gone")
		}
		var got []string
		for _, host := range strings.Fields(both) {
			p := nft.Port{Protocol: nft.Protocol(tt.proto), HostPort: number}
			if host != "all" {
				p.HostAddr = nstest.Addr(host)
			}
			for _, l := range mustList(t, ns, p) {
				if tt.dev != "" {
					expect.Contains(t, l.String(), " on "+tt.dev+" is in use by hostport.test (pid ")
				}
				got = append(got, host)
			}
		}
		expect.Equal(t, strings.Join(slices.Compact(got), " "), tt.want, "%s", tt.what)
	}
}

func FuzzSocket(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := decode(data)
		must.That(t, err == nil || errors.Is(err, nl.ErrMalformed), "%v is not %v", err, nl.ErrMalformed)
		l.conflictsWith(netip.Addr{})
	})
}
