package bridge_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// node is a namespace with a bridge in it, which has a gateway's addresses.
type node struct {
	ns   *netns.NS
	conn *bridge.Conn
	link *bridge.Link
}

var gateways = []string{"10.44.0.1/24", "fd44::1/64"}

// br0 is the node's bridge.
func br0() bridge.Bridge { return bridge.Bridge{Name: "br0", MTU: 1400, Alias: "node"} }

func newNode(tb testing.TB) *node {
	tb.Helper()
	n := &node{ns: nstest.New(tb)}
	n.conn = must.Of(bridge.Dial(n.ns)).Get(tb)
	tb.Cleanup(func() { n.conn.Close() })
	var err error
	n.link, _, err = ensure(tb, n.conn, br0())
	must.Succeed(tb, err)
	for _, gw := range gateways {
		must.Succeed(tb, n.conn.Addresses().Add(tb.Context(), addr.Address{Prefix: nstest.Prefix(gw), Link: n.link.Index, Flags: unix.IFA_F_NODAD}))
	}
	return n
}

// port describes pod number i, with both families.
func port(i byte) bridge.Port {
	a4 := netip.AddrFrom4([4]byte{10, 44, 0, 10 + i})
	a6 := netip.MustParseAddr("fd44::").As16()
	a6[15] = 0x10 + i
	return bridge.Port{
		Bridge: "br0", Name: bridge.HostName("net", string('a'+rune(i)), "eth0"), Peer: "eth0",
		Alias:     "owner-" + string('a'+rune(i)),
		Addresses: []netip.Prefix{netip.PrefixFrom(a4, 24), netip.PrefixFrom(netip.AddrFrom16(a6), 64)},
		Routes: []route.Route{
			{Gateway: nstest.Addr("10.44.0.1")},
			{Gateway: nstest.Addr("fd44::1")},
		},
	}
}

func attach(tb testing.TB, n *node, p bridge.Port) (*netns.NS, *bridge.Attachment) {
	tb.Helper()
	pod := nstest.New(tb)
	a := must.Of(n.conn.Attach(tb.Context(), pod, p)).Get(tb)
	return pod, a
}

func TestAttachedPodsReachEachOtherAndTheGatewayAtOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a, _ := attach(t, n, port(0))
	b, _ := attach(t, n, port(1))
	for _, dst := range append(addrs(port(1)), nstest.Addr("10.44.0.1"), nstest.Addr("fd44::1")) {
		expect.Success(t, nstest.Ping(t, a, dst), "first pod to %s", dst)
	}
	for _, dst := range addrs(port(0)) {
		expect.Success(t, nstest.Ping(t, b, dst), "second pod to %s", dst)
		expect.Success(t, nstest.Ping(t, n.ns, dst), "host to %s", dst)
	}
}

func addrs(p bridge.Port) []netip.Addr {
	var list []netip.Addr
	for _, a := range p.Addresses {
		list = append(list, a.Addr())
	}
	return list
}

func TestAttachMakesWhatItReports(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.MAC, p.PeerMAC = mac("02:00:00:00:00:01"), mac("0a:58:0a:2c:00:0a")
	p.Hairpin, p.Isolated, p.ForwardGroups = true, true, true
	pod, a := attach(t, n, p)

	cookie := must.Of(pod.Cookie()).Get(t)
	want := &bridge.Attachment{NetNSCookie: cookie, Index: nstest.Index(t, n.ns, p.Name), MAC: p.MAC,
		PeerIndex: nstest.Index(t, pod, "eth0"), PeerMAC: p.PeerMAC, MTU: 1400}
	expect.NoDiff(t, cmp.Diff(want, a), "attachment")
	l := must.Of(n.conn.Link(t.Context(), p.Name)).Get(t)
	wantLink := &bridge.Link{Index: a.Index, Name: p.Name, Kind: "veth", MAC: p.MAC, MTU: 1400, Up: true,
		Master: n.link.Index, Peer: a.PeerIndex, Alias: p.Alias, Forwarding: true,
		Port: &bridge.Port{Name: p.Name, BridgeIndex: n.link.Index, MAC: p.MAC, MTU: 1400, Alias: p.Alias, Hairpin: true, Isolated: true, ForwardGroups: true}}
	expect.NoDiff(t, cmp.Diff(wantLink, l, cmpopts.IgnoreUnexported(bridge.Link{}, bridge.Port{})), "port")
	expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "Check")
	// iproute2 as the referee of what the kernel was given.
	details := nstest.Run(t, n.ns, "ip", "-d", "link", "show", p.Name)
	for _, want := range []string{"alias " + p.Alias, "hairpin on", "isolated on", "addrgenmode none", "02:00:00:00:00:01"} {
		expect.Contains(t, details, want, "ip -d link")
	}
	// With more than it uses, the kernel waits for a grace period to begin with.
	for _, end := range []string{details, nstest.Run(t, pod, "ip", "-d", "link", "show", "eth0")} {
		expect.Contains(t, end, "numtxqueues 1 ", "there is not one queue to send by")
	}
}

func TestPodsIPv6IsReadyAtOnceAndQuiet(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod, a := attach(t, n, port(0))
	shown := nstest.Run(t, pod, "ip", "-6", "addr", "show", "dev", "eth0")
	for _, bad := range []string{"tentative", "dadfailed"} {
		expect.That(t, !strings.Contains(shown, bad), "an address is %s:\n%s", bad, shown)
	}
	expect.Contains(t, shown, "scope link", "the pod has no link-local address")
	expect.Equal(t, nstest.Sysctl(t, pod, "net/ipv6/conf/eth0/accept_ra"), "0", "accept_ra is")
	_ = a
}

func TestPodWithoutIPv6HasNoIPv6Address(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.Addresses, p.Routes = p.Addresses[:1], p.Routes[:1]
	pod, _ := attach(t, n, p)
	expect.Equal(t, nstest.Run(t, pod, "ip", "-6", "addr", "show", "dev", "eth0"), "", "the pod has")
	expect.Equal(t, nstest.Run(t, n.ns, "ip", "-6", "addr", "show", "dev", p.Name), "", "the port has")
}

func TestRouteAttributesReachTheKernel(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.Routes = append(p.Routes,
		route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.44.0.1"), MTU: 1300, AdvMSS: 1200, Priority: 50, Table: 100},
		route.Route{Dst: nstest.Prefix("198.51.100.0/24"), Gateway: nstest.Addr("10.99.0.1"), OnLink: true},
	)
	pod, _ := attach(t, n, p)
	if got := nstest.Run(t, pod, "ip", "route", "show", "table", "100"); !strings.Contains(got, "192.0.2.0/24 via 10.44.0.1") ||
		!strings.Contains(got, "metric 50 mtu 1300 advmss 1200") {
		t.Errorf("table 100: %s", got)
	}
	expect.Contains(t, nstest.Run(t, pod, "ip", "route", "show", "198.51.100.0/24"), "onlink", "main table")
}

func TestAttachRefusesNamesThatAreTaken(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod, _ := attach(t, n, port(0))

	t.Run("port", func(t *testing.T) {
		p := port(0)
		p.Peer = "eth1"
		_, err := n.conn.Attach(t.Context(), pod, p)
		expect.That(t, errors.Is(err, fs.ErrExist), "error is %v, want one that matches fs.ErrExist", err)
	})
	t.Run("interface", func(t *testing.T) {
		p := port(1)
		expect.Is(t, expect.Err(n.conn.Attach(t.Context(), pod, p)), bridge.ErrPeerExists)
		expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
	})
	// The first attachment took no harm.
	expect.Success(t, nstest.Ping(t, pod, nstest.Addr("10.44.0.1")))
}

func TestFailedAttachLeavesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	cases := map[string]func(*bridge.Port){
		"route without a way": func(p *bridge.Port) {
			p.Routes = append(p.Routes, route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("172.31.0.1")})
		},
		"address twice":  func(p *bridge.Port) { p.Addresses = append(p.Addresses, p.Addresses[0]) },
		"no such bridge": func(p *bridge.Port) { p.Bridge = "br9" },
		"not a bridge":   func(p *bridge.Port) { p.Bridge = "lo" },
		"MTU too large":  func(p *bridge.Port) { p.MTU = 1 << 20 },
	}
	for name, spoil := range cases {
		t.Run(name, func(t *testing.T) {
			pod := nstest.New(t)
			p := port(2)
			spoil(&p)
			_, err := n.conn.Attach(t.Context(), pod, p)
			must.That(t, err != nil, "no error")
			expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
			out := nstest.Run(t, pod, "ip", "-o", "link")
			expect.That(t, strings.Count(out, "\n") == 1, "the pod has more than lo:\n%s", out)
		})
	}
}

func TestInvalidPortsAreRefusedBeforeTheKernelIsAsked(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod := nstest.New(t)
	cases := map[string]func(*bridge.Port){
		"empty name":          func(p *bridge.Port) { p.Name = "" },
		"name to be numbered": func(p *bridge.Port) { p.Name = "veth%d" },
		"peer to be numbered": func(p *bridge.Port) { p.Peer = "eth%d" },
		"long name":           func(p *bridge.Port) { p.Name = "sixteen-bytes-xy" },
		"name with a slash":   func(p *bridge.Port) { p.Peer = "eth/0" },
		"long alias":          func(p *bridge.Port) { p.Alias = strings.Repeat("x", 256) },
		"multicast MAC":       func(p *bridge.Port) { p.PeerMAC = mac("01:00:5e:00:00:01") },
		"down with addresses": func(p *bridge.Port) { p.Down = true },
		"its IPv6, and ours": func(p *bridge.Port) {
			p.LeaveIPv6, p.Addresses = true, []netip.Prefix{netip.MustParsePrefix("fd22::5/64")}
		},
		"an address of nobody": func(p *bridge.Port) { p.Addresses = []netip.Prefix{{}} },
	}
	for name, spoil := range cases {
		t.Run(name, func(t *testing.T) {
			p := port(3)
			spoil(&p)
			expect.Is(t, expect.Err(n.conn.Attach(t.Context(), pod, p)), tombolo.ErrInvalid)
		})
	}
}

func TestQuietPortWorksWithAStaticEntry(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.StaticFDB, p.NoLearning, p.NoFlood, p.NoMulticastFlood = true, true, true, true
	p.Addresses, p.Routes = p.Addresses[:1], p.Routes[:1]
	pod, _ := attach(t, n, p)
	other, _ := attach(t, n, port(1))
	for _, from := range []*netns.NS{n.ns, other} {
		expect.Success(t, nstest.Ping(t, from, p.Addresses[0].Addr()))
	}
	expect.Success(t, nstest.Ping(t, pod, nstest.Addr("10.44.0.1")))
	expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "Check")
}

func TestInterfaceThatStaysDown(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.Down, p.Addresses, p.Routes = true, nil, nil
	pod, _ := attach(t, n, p)
	out := nstest.Run(t, pod, "ip", "-o", "link", "show", "eth0")
	expect.That(t, !strings.Contains(out, "UP"), "it is up: %s", out)
	expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "Check")
}

func TestDuplicateAddressIsDetectedWhereAskedFor(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.DAD = true
	pod, _ := attach(t, n, p)
	out := nstest.Run(t, pod, "ip", "-6", "addr", "show", "dev", "eth0")
	expect.That(t, !strings.Contains(out, "tentative"), "Attach did not wait:\n%s", out)
	twin := port(1)
	twin.DAD, twin.Addresses = true, p.Addresses
	expect.Is(t, expect.Err(n.conn.Attach(t.Context(), nstest.New(t), twin)), addr.ErrDuplicate, "error for the second pod with the address is")
	expect.Is(t, expect.Err(n.conn.Link(t.Context(), twin.Name)), fs.ErrNotExist, "its port is there")
}

func TestDetachTakesOnlyWhatIsOurs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	pod, _ := attach(t, n, p)
	expect.Is(t, n.conn.Detach(t.Context(), p.Name, "owner-b"), bridge.ErrForeign, "Detach for another owner")
	must.Succeed(t, n.conn.Detach(t.Context(), p.Name, "owner-a"))
	out := nstest.Run(t, pod, "ip", "-o", "link")
	expect.That(t, !strings.Contains(out, "eth0"), "the pod still has:\n%s", out)
	expect.Success(t, n.conn.Detach(t.Context(), p.Name, "owner-a"), "second Detach")
}

func TestCheckFindsEachDifference(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		spoil func(t *testing.T, n *node, pod *netns.NS, p bridge.Port)
		want  string
	}{
		"port gone": {func(t *testing.T, n *node, _ *netns.NS, p bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "del", p.Name)
		}, "link"},
		"port down": {func(t *testing.T, n *node, _ *netns.NS, p bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "down")
		}, "link is down, should be up"},
		"off the bridge": {func(t *testing.T, n *node, _ *netns.NS, p bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "nomaster")
		}, "membership in bridge br0 is missing"},
		"bridge gone": {func(t *testing.T, n *node, _ *netns.NS, p bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "del", "br0")
		}, "bridge br0 is missing"},
		"MTU of the port": {func(t *testing.T, n *node, _ *netns.NS, p bridge.Port) {
			nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "mtu", "1300")
		}, "MTU is 1300, should be 1400"},
		// Its inside is the pod's own.
		"the pod's interface": {func(t *testing.T, _ *node, pod *netns.NS, _ bridge.Port) {
			nstest.Run(t, pod, "sh", "-ec", "ip link set eth0 down; ip addr flush dev eth0; ip link set eth0 name eth9 mtu 9000 address 02:00:00:00:00:77")
		}, ""},
		"hairpin": {func(t *testing.T, n *node, _ *netns.NS, p bridge.Port) {
			nstest.Run(t, n.ns, "bridge", "link", "set", "dev", p.Name, "hairpin", "off")
		}, "hairpin is off, should be on"},
		"isolation": {func(t *testing.T, n *node, _ *netns.NS, p bridge.Port) {
			nstest.Run(t, n.ns, "bridge", "link", "set", "dev", p.Name, "isolated", "on")
		}, "isolation is on, should be off"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := port(0)
			p.Hairpin, p.MTU = true, 1400
			p.Routes = append(p.Routes, route.Route{Dst: nstest.Prefix("192.0.2.0/24"), Gateway: nstest.Addr("10.44.0.1"), Priority: 50, MTU: 1300, AdvMSS: 1200})
			p.MAC, p.PeerMAC = mac("02:00:00:00:00:01"), mac("02:00:00:00:00:02")
			pod, _ := attach(t, n, p)
			if diffs, err := n.conn.Check(t.Context(), p); err != nil || len(diffs) > 0 {
				t.Fatalf("Check before: %v, %v", diffs, err)
			}
			c.spoil(t, n, pod, p)
			diffs := must.Of(n.conn.Check(t.Context(), p)).Get(t)
			var lines []string
			for _, d := range diffs {
				lines = append(lines, d.String())
			}
			got := strings.Join(lines, "\n")
			expect.That(t, (c.want != "" || got == "") && strings.Contains(got, c.want),
				"Check says:\n%s\nwant: %s", got, c.want)
		})
	}
}

func TestEnsureBridgeIsIdempotentAndCorrects(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	changed, err := n.conn.Ensure(t.Context(), br0())
	expect.That(t, err == nil && !changed, "second Ensure: changed %t, %v", changed, err)
	nstest.Run(t, n.ns, "ip", "link", "set", "br0", "down", "mtu", "1280")
	l, changed, err := ensure(t, n.conn, br0())
	expect.That(t, err == nil && changed && l.MTU == 1400 && l.Up,
		"Ensure of a spoilt bridge: %+v, changed %t, %v", l, changed, err)
	_, err = n.conn.Ensure(t.Context(), bridge.Bridge{Name: "lo"})
	expect.That(t, errors.Is(err, bridge.ErrNotBridge), "Ensure of lo: %v, want ErrNotBridge", err)
}

func TestBridgeKeepsItsMACAndMTUAsPortsComeAndGo(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	before := n.link.MAC
	p := port(0)
	p.MAC, p.MTU = mac("02:00:00:00:00:00"), 1280 // lower than any that is chosen at random
	attach(t, n, p)
	l := must.Of(n.conn.Link(t.Context(), "br0")).Get(t)
	expect.That(t, l.MAC.String() == before.String() && l.MTU == 1400,
		"bridge has MAC %s and MTU %d, had %s and 1400", l.MAC, l.MTU, before)
}

func TestEnslavePutsAPortBack(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.Hairpin = true
	pod, _ := attach(t, n, p)
	nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "nomaster", "down")
	must.Succeed(t, n.conn.Enslave(t.Context(), p))
	expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "Check")
	expect.Success(t, nstest.Ping(t, pod, nstest.Addr("10.44.0.1")))
}

func TestCancelledAttachDoesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p := port(0)
	expect.Is(t, expect.Err(n.conn.Attach(ctx, nstest.New(t), p)), context.Canceled)
	expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
}

func TestBridgeIsFullAt1023Ports(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: 1023 ports take a while")
	}
	t.Parallel()
	n := newNode(t)
	pod := nstest.New(t)
	var err error
	for i := range 1024 {
		p := bridge.Port{Bridge: "br0", Name: bridge.HostName("full", "c", string(rune(i))), Peer: "eth" + itoa(i), Down: true}
		if _, err = n.conn.Attach(t.Context(), pod, p); err != nil {
			expect.Equal(t, i, 1023, "port %d was refused", i)
			break
		}
	}
	expect.Is(t, err, bridge.ErrBridgeFull)
}

func itoa(i int) string {
	if i < 10 {
		return string('0' + rune(i))
	}
	return itoa(i/10) + string('0'+rune(i%10))
}

func mac(s string) net.HardwareAddr {
	m, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return m
}

// What a caller does before the port comes up is done once it is a port with all its
// attributes, so that the port of a pod that sends at once has a limit or a filter already.
func TestBeforeUpIsCalledWhileThePortIsDownOnItsBridge(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pod := nstest.New(t)
	p := port(5)
	p.Hairpin = true
	var calls int
	p.BeforeUp = func(_ context.Context, index int) error {
		calls++
		l, err := n.conn.Link(t.Context(), p.Name)
		if err != nil {
			return err
		}
		expect.That(t, l.Index == index && !l.Up && l.Master != 0 && l.Alias == p.Alias,
			"called with index %d of %+v", index, l)
		expect.Contains(t, nstest.Run(t, n.ns, "bridge", "-d", "link", "show", "dev", p.Name), "hairpin on", "the port has not its attributes yet")
		nstest.Run(t, n.ns, "tc", "qdisc", "add", "dev", p.Name, "root", "tbf", "rate", "8mbit", "burst", "10k", "limit", "30k")
		return nil
	}
	a, err := n.conn.Attach(t.Context(), pod, p)
	must.That(t, err == nil && calls == 1, "called %d times, %v", calls, err)
	l, err := n.conn.Link(t.Context(), p.Name)
	expect.That(t, err == nil && l.Up && l.Index == a.Index, "afterwards the port is %+v, %v", l, err)
	expect.Contains(t, nstest.Run(t, n.ns, "tc", "qdisc", "show", "dev", p.Name), "tbf", "what was put on it is gone")
	// Enslave mends a port that is up, and calls nothing.
	nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "down")
	if err := n.conn.Enslave(t.Context(), p); err != nil || calls != 1 {
		t.Errorf("Enslave: %v, and %d calls", err, calls)
	}
	if l, err := n.conn.Link(t.Context(), p.Name); err != nil || !l.Up {
		t.Errorf("after Enslave the port is %+v, %v", l, err)
	}
}

func TestAttachIsUndoneWhenBeforeUpOrTheComingUpFails(t *testing.T) {
	t.Parallel()
	refused := errors.New("not this one")
	up := nltest.Fault{Type: unix.RTM_NEWLINK, Nth: 3, Errno: unix.ENOBUFS}
	for name, c := range map[string]struct {
		faults []*nltest.Fault
		err    error
		want   error
	}{
		"BeforeUp":      {nil, refused, refused},
		"the coming up": {[]*nltest.Fault{&up}, nil, unix.ENOBUFS},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			pod := nstest.New(t)
			p := port(5)
			var called bool
			p.BeforeUp = func(context.Context, int) error { called = true; return c.err }
			_, err := faultyConn(t, n, c.faults, nil).Attach(t.Context(), pod, p)
			expect.That(t, errors.Is(err, c.want) && called, "error is %v, called %t", err, called)
			expect.Is(t, expect.Err(n.conn.Link(t.Context(), p.Name)), fs.ErrNotExist, "the port is there")
			out := nstest.Run(t, pod, "ip", "-o", "link")
			expect.That(t, strings.Count(out, "\n") == 1, "the pod has more than lo:\n%s", out)
			if c.faults != nil {
				nltest.MustHaveFired(t, c.faults[0])
			}
		})
	}
}

// ensure gives the bridge as it is after Ensure, too.
func ensure(tb testing.TB, conn *bridge.Conn, br bridge.Bridge) (*bridge.Link, bool, error) {
	tb.Helper()
	changed, err := conn.Ensure(tb.Context(), br)
	l, lookErr := conn.Link(tb.Context(), br.Name)
	if err == nil {
		err = lookErr
	}
	return l, changed, err
}
