package conntrack

import (
	"errors"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
	"github.com/tombolo-cni/tombolo/internal/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// masquerading is a host between a pod and a far host, to which the pod's traffic is
// masqueraded: to 198.51.100.5 and 2001:db8:51::5 on the link out. Another link, other,
// could take those addresses over.
type masquerading struct{ host, pod, far *netns.NS }

func newMasquerading(tb testing.TB) *masquerading {
	tb.Helper()
	m := &masquerading{nstest.New(tb), nstest.New(tb), nstest.New(tb)}
	nstest.Veth(tb, m.host, "in", m.pod, "eth0")
	nstest.Veth(tb, m.host, "out", m.far, "eth0")
	nstest.Veth(tb, m.host, "other", m.host, "end")
	nstest.Sysctl(tb, m.host, "net/ipv4/ip_forward", "1")
	nstest.Sysctl(tb, m.host, "net/ipv6/conf/all/forwarding", "1")
	for _, do := range []struct {
		ns       *netns.NS
		commands []string
	}{
		{m.host, []string{"ip addr add 10.22.0.1/24 dev in", "ip addr add fd00:22::1/64 dev in nodad", "ip addr add 198.51.100.5/24 dev out", "ip addr add 2001:db8:51::5/64 dev out nodad",
			"nft add table inet nat", "nft add chain inet nat post { type nat hook postrouting priority srcnat; }", "nft add rule inet nat post oifname out masquerade fully-random",
			"nft add chain inet nat pre { type nat hook prerouting priority dstnat; }",
			"nft add rule inet nat pre ip daddr 10.99.0.1 dnat ip to 198.51.100.1", "nft add rule inet nat pre ip6 daddr fd00:99::1 dnat ip6 to 2001:db8:51::1"}},
		{m.pod, []string{"ip addr add 10.22.0.6/24 dev eth0", "ip addr add fd00:22::6/64 dev eth0 nodad", "ip route add default via 10.22.0.1", "ip -6 route add default via fd00:22::1"}},
		{m.far, []string{"ip addr add 198.51.100.1/24 dev eth0", "ip addr add 2001:db8:51::1/64 dev eth0 nodad"}},
	} {
		for _, c := range do.commands {
			f := strings.Fields(c)
			nstest.Run(tb, do.ns, f[0], f[1:]...)
		}
	}
	nstest.WaitForAddresses(tb, m.host, m.pod, m.far)
	for _, a := range []string{"198.51.100.1", "2001:db8:51::1"} {
		if err := nstest.Ping(tb, m.pod, nstest.Addr(a)); err != nil {
			tb.Fatal(err)
		}
	}
	return m
}

// server is the far host's address of a family.
func (m *masquerading) server(like netip.Addr) netip.Addr {
	if like.Is4() {
		return nstest.Addr("198.51.100.1")
	}
	return nstest.Addr("2001:db8:51::1")
}

func (m *masquerading) listen(tb testing.TB, at netip.AddrPort) net.Listener {
	tb.Helper()
	var l net.Listener
	if err := m.far.Do(func() error {
		var err error
		l, err = net.Listen("tcp", at.String())
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	return l
}

func (m *masquerading) dial(tb testing.TB, to string) net.Conn {
	tb.Helper()
	var c net.Conn
	if err := m.pod.Do(func() error {
		var err error
		c, err = net.Dial("tcp", to)
		return err
	}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

// connect opens a connection of the pod's that stays.
func (m *masquerading) connect(tb testing.TB, to string) net.Conn {
	tb.Helper()
	at := netip.MustParseAddrPort(to)
	l := m.listen(tb, netip.AddrPortFrom(m.server(at.Addr()), at.Port()))
	defer l.Close()
	c := m.dial(tb, to)
	server, err := l.Accept()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { server.Close() })
	return c
}

// shown gives the TCP flows as conntrack(8) lists them, without what time changes.
func (m *masquerading) shown(tb testing.TB) []string {
	tb.Helper()
	var list []string
	for _, family := range []string{"ipv4", "ipv6"} {
		for line := range strings.Lines(nstest.Run(tb, m.host, "conntrack", "-L", "-f", family, "-p", "tcp")) {
			line = regexp.MustCompile(`^(\S+ +[0-9]+) [0-9]+`).ReplaceAllString(line, "$1 …")
			list = append(list, strings.Join(strings.Fields(regexp.MustCompile(` use=[0-9]+`).ReplaceAllString(line, "")), " "))
		}
	}
	slices.Sort(list)
	return list
}

func (m *masquerading) moveAddresses(tb testing.TB) {
	tb.Helper()
	for _, c := range []string{
		"addr add 198.51.100.5/24 dev other noprefixroute", "addr add 2001:db8:51::5/64 dev other nodad noprefixroute",
		"addr del 198.51.100.5/24 dev out", "addr del 2001:db8:51::5/64 dev out",
	} {
		nstest.Run(tb, m.host, "ip", strings.Fields(c)...)
	}
}

// loseAddresses has the link out get the addresses that have moved, and lose them again.
func (m *masquerading) loseAddresses(tb testing.TB) {
	tb.Helper()
	for _, c := range []string{"add", "del"} {
		nstest.Run(tb, m.host, "ip", "addr", c, "198.51.100.5/24", "dev", "out")
		nstest.Run(tb, m.host, "ip", "addr", c, "2001:db8:51::5/64", "dev", "out")
	}
}

func targets() []string {
	// The latter two are translated in both directions.
	return []string{"198.51.100.1:7001", "[2001:db8:51::1]:7002", "10.99.0.1:7003", "[fd00:99::1]:7004"}
}

func outside() []netip.Addr {
	return []netip.Addr{nstest.Addr("198.51.100.5"), nstest.Addr("2001:db8:51::5")}
}

func TestUnboundFlowsSurviveThatTheirLinkLosesTheAddress(t *testing.T) {
	t.Parallel()
	for _, unbind := range []bool{false, true} {
		m := newMasquerading(t)
		for _, to := range targets() {
			m.connect(t, to)
		}
		before := m.shown(t)
		if len(before) != len(targets()) {
			t.Fatalf("flows: %q", before)
		}
		if unbind {
			c := dial(t, m.host)
			flows, err := c.Unbind(t.Context(), outside(), nil)
			if err != nil || len(flows) != len(targets()) {
				t.Fatalf("unbind: %v, %v, want %d flows", flows, err, len(targets()))
			}
			if after := m.shown(t); !slices.Equal(before, after) {
				t.Errorf("flows before and after:\n%s\n\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
			}
			again, err := c.Unbind(t.Context(), outside(), func(f Flow) bool {
				return slices.ContainsFunc(flows, func(o Flow) bool { return o.String() == f.String() })
			})
			if err != nil || len(again) != 0 {
				t.Errorf("unbind others: %v, %v", again, err)
			}
		}
		m.moveAddresses(t)
		// The kernel forgets them in a worker of its own; or not, where it has 16 such works
		// to do already, in whatever namespaces.
		for !unbind && len(m.shown(t)) > 0 && t.Context().Err() == nil {
			m.loseAddresses(t)
		}
		if left := m.shown(t); unbind && !slices.Equal(before, left) {
			t.Errorf("flows before and after the address moved:\n%s\n\n%s", strings.Join(before, "\n"), strings.Join(left, "\n"))
		}
	}
}

func TestUnboundConnectionsGoOn(t *testing.T) {
	t.Parallel()
	m := newMasquerading(t)
	c := dial(t, m.host)
	for _, to := range targets() {
		at := netip.MustParseAddrPort(to)
		server := nstest.Serve(t, m.far, "tcp", netip.AddrPortFrom(m.server(at.Addr()), 0))
		conn := m.dial(t, netip.AddrPortFrom(at.Addr(), server.Port()).String())
		if flows, err := c.Unbind(t.Context(), outside(), nil); err != nil || len(flows) == 0 {
			t.Fatalf("unbind: %v, %v", flows, err)
		}
		if _, err := conn.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		if n, err := conn.Read(b); err != nil || n == 0 {
			t.Errorf("%s: answer %q, %v", to, b[:n], err)
		}
	}
}

// What comes next is out of the window that a flow begins with, in either direction:
// the flow counts no packet from before.
func TestUnboundConnectionsTakeAnySequenceNumber(t *testing.T) {
	t.Parallel()
	m := newMasquerading(t)
	for _, to := range targets() {
		m.connect(t, to)
	}
	c := dial(t, m.host)
	liberal := func() (list [][2]bool) {
		t.Helper()
		for _, q := range bindings(outside()) {
			bound, err := c.bound(&q)
			if err != nil {
				t.Fatal(err)
			}
			for _, b := range bound {
				list = append(list, [2]bool{b.info.flags[0]&tcpFlagLiberal != 0, b.info.flags[1]&tcpFlagLiberal != 0})
			}
		}
		return list
	}
	if got, want := liberal(), slices.Repeat([][2]bool{{false, false}}, len(targets())); !slices.Equal(got, want) {
		t.Fatalf("before, by direction: %v, want %v", got, want)
	}
	if _, err := c.Unbind(t.Context(), outside(), nil); err != nil {
		t.Fatal(err)
	}
	if got, want := liberal(), slices.Repeat([][2]bool{{true, true}}, len(targets())); !slices.Equal(got, want) {
		t.Errorf("after, by direction: %v, want %v", got, want)
	}
}

func TestUnbindLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	m := newMasquerading(t)
	for _, to := range targets() {
		m.connect(t, to)
	}
	c := dial(t, m.host)
	for name, addrs := range map[string][]netip.Addr{"no address": nil, "other addresses": {nstest.Addr("198.51.100.6"), nstest.Addr("2001:db8:51::6"), nstest.Addr("10.22.0.1")}} {
		if flows, err := c.Unbind(t.Context(), addrs, nil); err != nil || len(flows) != 0 {
			t.Errorf("%s: %v, %v", name, flows, err)
		}
	}
}

func TestUnbindOfAFlowThatEndsMeanwhileLeavesNothing(t *testing.T) {
	t.Parallel()
	m := newMasquerading(t)
	m.connect(t, targets()[0])
	c := dial(t, m.host)
	list, err := c.bound(&bindings(outside())[0])
	if err != nil || len(list) != 1 {
		t.Fatalf("bound flows: %v, %v", list, err)
	}
	if n, err := c.delete(t.Context(), []Flow{list[0].flow}); n != 1 || err != nil {
		t.Fatalf("delete: %d, %v", n, err)
	}
	if flows, err := c.unbindAtOnce(list); err != nil || len(flows) != 0 {
		t.Errorf("unbind: %v, %v", flows, err)
	}
	if left := m.shown(t); len(left) != 0 {
		t.Errorf("flows: %q", left)
	}
}

func TestUnbindByAKernelThatSaysNothing(t *testing.T) {
	t.Parallel()
	c := On(nl.New(nltest.NewFake(func([]netlink.Message) [][]byte { return nil })))
	if _, err := c.Unbind(t.Context(), outside(), nil); err == nil {
		t.Error("no error")
	}
}

func FuzzBinding(f *testing.F) {
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := decodeBinding(data)
		if err != nil {
			if !errors.Is(err, nl.ErrMalformed) {
				t.Fatalf("%v is not %v", err, nl.ErrMalformed)
			}
			return
		}
		if !hasPorts(b.flow.Proto) {
			return
		}
		sent, err := b.message()
		if err != nil {
			return
		}
		again, err := decodeTupleOf(sent.Data)
		if err != nil || again != b.flow.Orig {
			t.Fatalf("written %v, %v, want %v", again, err, b.flow.Orig)
		}
	})
}

// decodeTupleOf reads the first tuple of a request.
func decodeTupleOf(data []byte) (Tuple, error) {
	var t Tuple
	var proto uint8
	err := walk(data[headerLen:], func(ad *netlink.AttributeDecoder) {
		if ad.Type() == attrTupleOrig {
			ad.Do(decodeTuple(&t, &proto))
		}
	})
	return t, err
}
