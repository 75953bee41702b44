package nft

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// site is a host with the bridge cbr0, two pods on it, and a machine outside that
// has routes to the pods.
type site struct {
	host, pod, other, outside *netns.NS
	c                         *Conn
}

const (
	podMAC  = "02:00:00:00:00:05"
	pod4    = "10.22.0.5"
	pod6    = "fd00:22::5"
	other4  = "10.22.0.6"
	far4    = "198.51.100.1" // addresses outside
	near4   = "172.16.0.1"
	far6    = "2001:db8:2::1"
	near6   = "fd00:16::1"
	host4   = "192.0.2.1" // the host's, towards outside
	host6   = "2001:db8:1::1"
	bridge4 = "10.22.0.1"
)

func newSite(tb testing.TB) *site {
	tb.Helper()
	s := nstest.NewSite(tb)
	return &site{s.Host, s.Pod, s.Other, s.Outside, dial(tb, s.Host)}
}

// ensureOnBridge has the rules of podnet on the site's bridge, and of the host's uplink.
func (s *site) ensureOnBridge(tb testing.TB) {
	tb.Helper()
	n := podnet()
	n.Bridge = "cbr0"
	mustEnsure(tb, s.c, n)
	must.Succeed(tb, s.c.SetHost(context.Background(), []string{"up0"}, nil, nil))
}

// seenAs gives the source address that a server somewhere sees of a caller.
func seenAs(tb testing.TB, from, at *netns.NS, server string) string {
	tb.Helper()
	seen, err := nstest.Ask(tb, from, "udp", nstest.Serve(tb, at, "udp", netip.AddrPortFrom(nstest.Addr(server), 0)))
	must.Succeed(tb, err, "asking at %s", server)
	return seen.Addr().String()
}

func TestMasqueradeChangesSourcesOnlyWhereItShould(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	network := func(nonMasquerade ...string) Network {
		n := podnet()
		n.NonMasquerade = nstest.Prefixes(nonMasquerade...)
		return n
	}
	off := podnet()
	off.Masquerade = false
	for _, tc := range []struct {
		name       string
		network    Network
		masquerade bool // of the endpoint
		want       map[string]string
	}{
		{"on", network(), true, map[string]string{far4: host4, near4: host4, far6: host6, near6: host6}},
		{"off for the endpoint", network(), false, map[string]string{far4: pod4, far6: pod6}},
		{"off for the network", off, false, map[string]string{far4: pod4, far6: pod6}},
		{"on but for some destinations", network("172.16.0.0/12", "fd00:16::/48"), true,
			map[string]string{far4: host4, near4: pod4, far6: host6, near6: pod6}},
		{"on but for single addresses", network("172.16.0.1/32", "fd00:16::1/128"), true,
			map[string]string{far4: host4, near4: pod4, far6: host6, near6: pod6}},
		{"on but for prefixes within a byte", network("172.16.0.0/19", "fd00:16::/45"), true,
			map[string]string{far4: host4, near4: pod4, far6: host6, near6: pod6}},
		{"on for IPv6 only", network("0.0.0.0/0"), true, map[string]string{far4: pod4, far6: host6}},
		{"on for IPv4 only", network("::/0"), true, map[string]string{far4: host4, far6: pod6}},
		{"on for nothing", network("0.0.0.0/0", "::/0"), true, map[string]string{far4: pod4, near4: pod4, far6: pod6, near6: pod6}},
		{"as kubenet had it", network("10.0.0.0/8", "172.16.0.0/12", "fd00::/8"), true,
			map[string]string{far4: host4, near4: pod4, far6: host6, near6: pod6}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			mustEnsure(t, s.c, tc.network)
			ep := pod("0123456789a", pod4, pod6)
			ep.Masquerade = tc.masquerade
			mustAdd(t, s.c, ep)
			defer func() { expect.Success(t, s.c.Remove(context.Background(), ep)) }()
			got := map[string]string{}
			for server := range tc.want {
				got[server] = seenAs(t, s.pod, s.outside, server)
			}
			expect.NoDiff(t, cmp.Diff(tc.want, got), "sources seen outside")
			// The other pod has no elements, and the host is none.
			expect.Equal(t, seenAs(t, s.other, s.outside, far4), other4, "a pod that was not added is seen as")
			expect.Equal(t, seenAs(t, s.pod, s.other, other4), pod4, "a pod of the same network sees")
			for server, want := range map[string]string{host4: pod4, bridge4: pod4, host6: pod6} {
				got := seenAs(t, s.pod, s.host, server)
				expect.That(t, got == want, "the host sees %s at %s", got, server)
			}
		})
	}
}

func TestMasqueradeOfTwoNetworksIsIndependent(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	other := Network{Name: "other", Masquerade: true, Prefixes: nstest.Prefixes("10.22.0.0/16"), NonMasquerade: nstest.Prefixes(far4 + "/32")}
	mustEnsure(t, s.c, podnet())
	mustEnsure(t, s.c, other)
	mustAdd(t, s.c, pod("00000000001", pod4), Endpoint{
		Owner: "00000000002", Network: "other", Bridge: "cbr0", Addrs: nstest.Addrs(other4), Masquerade: true,
	})
	want := map[string]string{pod4 + far4: host4, pod4 + near4: host4, other4 + far4: other4, other4 + near4: host4}
	got := map[string]string{
		pod4 + far4: seenAs(t, s.pod, s.outside, far4), pod4 + near4: seenAs(t, s.pod, s.outside, near4),
		other4 + far4: seenAs(t, s.other, s.outside, far4), other4 + near4: seenAs(t, s.other, s.outside, near4),
	}
	expect.NoDiff(t, cmp.Diff(want, got), "sources seen outside")
}

// Bridged frames pass the same hooks where the bridge calls iptables; there
// multicast can be seen to pass the chain.
func TestMulticastAndBroadcastKeepTheirSource(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	nstest.Run(t, s.host, "ip", "link", "set", "cbr0", "type", "bridge", "nf_call_iptables", "1")
	mustEnsure(t, s.c, podnet())
	mustAdd(t, s.c, pod("0123456789a", pod4))

	// To show that bridged frames are masqueraded here at all.
	nstest.Run(t, s.pod, "ip", "route", "add", "203.0.113.6", "dev", "eth0")
	got := seenAs(t, s.pod, s.other, "203.0.113.6")
	must.That(t, got == bridge4, "a bridged datagram to elsewhere is seen as %s, want it masqueraded as %s", got, bridge4)

	// Two ports: a child that another test starts may keep a socket open that is closed here.
	for _, group := range []netip.AddrPort{netip.MustParseAddrPort("239.1.2.3:5353"), netip.MustParseAddrPort("255.255.255.255:5354")} {
		expect.Equal(t, heardFrom(t, s.pod, s.other, group), pod4, "what %s sends to %s is seen as", pod4, group)
	}
}

// heardFrom gives the source of a datagram to everyone, as another pod hears it.
func heardFrom(tb testing.TB, from, at *netns.NS, to netip.AddrPort) string {
	tb.Helper()
	var receiver, sender *net.UDPConn
	err := at.Do(func() error {
		var err error
		if !to.Addr().IsMulticast() {
			receiver, err = net.ListenUDP("udp4", &net.UDPAddr{Port: int(to.Port())})
			return err
		}
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		receiver, err = net.ListenMulticastUDP("udp4", link, net.UDPAddrFromAddrPort(to))
		return err
	})
	must.Succeed(tb, err)
	defer receiver.Close()
	must.Succeed(tb, from.Do(func() error {
		var err error
		sender, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(to))
		return err
	}))
	defer sender.Close()
	must.Succeed(tb, expect.Err(sender.Write([]byte("?"))))
	must.Succeed(tb, receiver.SetReadDeadline(time.Now().Add(patience)))
	_, source, err := receiver.ReadFromUDPAddrPort(make([]byte, 16))
	must.Succeed(tb, err)
	return source.Addr().Unmap().String()
}

// spy is a foreign table that counts what has the mark and what has not, in both
// directions; behind our forward chain, and on both sides of our last chain. There the kernel's own multicast reports
// may have any mark.
const spy = `table inet spy {
	counter out_marked { }
	counter out_unmarked { }
	counter in_marked { }
	counter in_unmarked { }
	counter before_last { }
	counter after_last { }
	chain forward {
		type filter hook forward priority filter;
		oifname "up0" meta mark & 0x10 == 0x10 counter name out_marked
		oifname "up0" meta mark & 0x10 == 0 counter name out_unmarked
		oifname "cbr0" meta mark & 0x10 == 0x10 counter name in_marked
		oifname "cbr0" meta mark & 0x10 == 0 counter name in_unmarked
	}
	chain beforelast {
		type filter hook postrouting priority -161;
		meta l4proto udp meta mark & 0x10 == 0x10 counter name before_last
	}
	chain afterlast {
		type filter hook postrouting priority -159;
		meta l4proto udp meta mark & 0x10 == 0x10 counter name after_last
	}
}`

// counts reads the spy's counters, those that are not zero, and resets them.
func counts(tb testing.TB, ns *netns.NS) map[string]int {
	tb.Helper()
	got := map[string]int{}
	for _, counter := range listing(tb, ns)["counter"] {
		if n := int(counter["packets"].(float64)); n > 0 {
			got[counter["name"].(string)] = n
		}
	}
	nft(tb, ns, "reset", "counters")
	return got
}

func TestMarkIsForWhatPodsSendAndForReplies(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.ensureOnBridge(t)
	ep := pod("0123456789a", pod4, pod6)
	ep.Masquerade = false // so that outside can answer to the pod itself
	nft(t, s.host, spy)
	mustCall := func(t *testing.T, server string) {
		t.Helper()
		to := nstest.Serve(t, s.outside, "udp", netip.AddrPortFrom(nstest.Addr(server), 0))
		must.Succeed(t, call(s.pod, "udp", to.String(), patience))
	}
	unanswered := func(t *testing.T, server string) {
		t.Helper()
		answering := nstest.Serve(t, s.pod, "udp", netip.AddrPortFrom(nstest.Addr(server), 0))
		must.Succeed(t, nstest.OnOneCPU(func() error {
			err := s.outside.Do(func() error {
				// Nobody listens, and nobody says so: the pod sends no answer at all.
				conn, err := net.Dial("udp", netip.AddrPortFrom(nstest.Addr(server), 9).String())
				if err != nil {
					return err
				}
				defer conn.Close()
				_, err = conn.Write([]byte("?"))
				return err
			})
			// What is answered passes behind it, so it has passed. (Not a ping, which on a
			// slow machine sends more than one.)
			return errors.Join(err, call(s.outside, "udp", answering.String(), patience))
		}))
	}
	for _, tc := range []struct {
		name  string
		setUp func(t *testing.T)
		do    func(t *testing.T)
		want  map[string]int
	}{
		{
			name: "a pod that was not added",
			do:   func(t *testing.T) { mustCall(t, far4); mustCall(t, far6) },
			want: map[string]int{"out_unmarked": 2, "in_unmarked": 2},
		}, {
			name:  "a pod calls, and is answered",
			setUp: func(t *testing.T) { mustAdd(t, s.c, ep) },
			do:    func(t *testing.T) { mustCall(t, far4); mustCall(t, far6) },
			want:  map[string]int{"out_marked": 2, "in_marked": 2, "before_last": 4},
		}, {
			name: "a pod is called: what it answers is what a pod sends",
			setUp: func(t *testing.T) {
				nft(t, s.host, "add table inet muffle; add chain inet muffle f { type filter hook forward priority -300; }; "+
					"add rule inet muffle f ip protocol icmp icmp type destination-unreachable drop; "+
					"add rule inet muffle f icmpv6 type destination-unreachable drop")
			},
			do: func(t *testing.T) { unanswered(t, pod4); unanswered(t, pod6) },
			// Of each, two datagrams in, and the answer to the second out.
			want: map[string]int{"in_unmarked": 4, "out_marked": 2, "before_last": 2},
		}, {
			name: "another agent had set the bit",
			setUp: func(t *testing.T) {
				nft(t, s.host, "add table inet agent; add chain inet agent f { type filter hook forward priority mangle; }; "+
					"add rule inet agent f meta mark set 0xffffffff")
				must.Succeed(t, s.c.Remove(context.Background(), ep))
			},
			do:   func(t *testing.T) { mustCall(t, far4); mustCall(t, far6) },
			want: map[string]int{"out_unmarked": 2, "in_unmarked": 2},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.setUp != nil {
				tc.setUp(t)
			}
			counts(t, s.host)
			tc.do(t)
			expect.NoDiff(t, cmp.Diff(tc.want, counts(t, s.host)), "packets")
		})
	}
}

func TestMarkLeavesOtherBitsAlone(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.ensureOnBridge(t)
	mustAdd(t, s.c, pod("0123456789a", pod4))
	nft(t, s.host, `table inet agent {
		counter forwarded { }
		counter left { }
		chain before { type filter hook forward priority mangle; meta mark set 0xabcdefef; }
		chain after { type filter hook forward priority filter; oifname "up0" meta mark 0xabcdefff counter name forwarded; }
		chain last { type filter hook postrouting priority -159; oifname "up0" meta mark 0xabcdefef counter name left; }
	}`)
	must.Succeed(t, nstest.Ping(t, s.pod, nstest.Addr(far4)))
	got := counts(t, s.host)
	expect.That(t, got["forwarded"] != 0 && got["left"] != 0,
		"with bits that others set, packets forwarded and sent: %v", got)
}

func TestMarkOfPodsWithoutAddressesGoesByMAC(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	nstest.Run(t, s.host, "ip", "link", "set", "cbr0", "type", "bridge", "nf_call_iptables", "1")
	mustEnsure(t, s.c, Network{Name: "lan"}) // which has no bridge's name to clear the bit by
	mac := must.Of(net.ParseMAC(podMAC)).Get(t)
	nft(t, s.host, spy)
	ask := func() map[string]int {
		t.Helper()
		counts(t, s.host)
		at := nstest.Serve(t, s.other, "udp", netip.AddrPortFrom(nstest.Addr(other4), 0))
		must.Succeed(t, call(s.pod, "udp", at.String(), patience))
		return counts(t, s.host)
	}
	expect.NoDiff(t, cmp.Diff(map[string]int{"in_unmarked": 2}, ask()), "before it was added")
	mustAdd(t, s.c, Endpoint{Owner: "0123456789a", Network: "lan", Bridge: "cbr0", MAC: mac})
	expect.NoDiff(t, cmp.Diff(map[string]int{"in_marked": 2, "before_last": 2, "after_last": 2}, ask()), "request and reply afterwards")
}

// What the mark is for: a table that drops all but what carries it.
func TestForeignDropIsPassedWithTheMark(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.ensureOnBridge(t)
	nft(t, s.host, "add table ip filter; add chain ip filter FORWARD { type filter hook forward priority filter; policy drop; }; "+
		"add rule ip filter FORWARD meta mark & 0x10 == 0x10 counter accept")
	err := nstest.PingWith(t, s.pod, nstest.Addr(far4), nstest.Echo{Wait: 200 * time.Millisecond})
	must.That(t, errors.Is(err, nstest.ErrNoEcho), "a pod that was not added: %v", err)
	mustAdd(t, s.c, pod("0123456789a", pod4))
	expect.Success(t, nstest.Ping(t, s.pod, nstest.Addr(far4)), "a pod that was added")
	err = nstest.PingWith(t, s.outside, nstest.Addr(pod4), nstest.Echo{Wait: 200 * time.Millisecond})
	expect.Is(t, err, nstest.ErrNoEcho, "an unasked caller from outside")
}

// gate counts the datagrams of the test that come, and those that leave.
const gate = `table inet gate {
	counter came { }
	counter left { }
	chain came { type filter hook prerouting priority -400; udp dport 9999 counter name came; }
	chain left { type filter hook postrouting priority 400; udp dport 9999 counter name left; }
}`

// sendMarked sends a datagram whose socket has a mark, and waits for it to have
// passed: an echo that passes behind it comes back.
func sendMarked(tb testing.TB, from *netns.NS, to, echo string, mark int) {
	tb.Helper()
	send := func() error {
		domain, dst := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: 9999, Addr: nstest.Addr(to).As16()})
		if addr := nstest.Addr(to); addr.Is4() {
			domain, dst = unix.AF_INET, &unix.SockaddrInet4{Port: 9999, Addr: addr.As4()}
		}
		fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, mark); err != nil {
			return err
		}
		return unix.Sendto(fd, []byte("?"), 0, dst)
	}
	must.Succeed(tb, nstest.OnOneCPU(func() error {
		if err := from.Do(send); err != nil {
			return err
		}
		return nstest.Ping(tb, from, nstest.Addr(echo))
	}))
}

func TestMarkOfAnotherAgentAdmitsNothing(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	nstest.Script(t, s.host, "iptables -P FORWARD DROP", "iptables -t mangle -A PREROUTING -j MARK --set-xmark 0x10/0x10")
	nft(t, s.host, gate)
	passes := func(from *netns.NS, to, echo string, mark, want int) {
		t.Helper()
		counts(t, s.host)
		sendMarked(t, from, to, echo, mark)
		wanted := map[string]int{"came": 1}
		if want > 0 {
			wanted["left"] = want
		}
		expect.NoDiff(t, cmp.Diff(wanted, counts(t, s.host)), "a datagram to %s", to)
	}
	all := func(stranger, pods int) {
		t.Helper()
		passes(s.other, far4, bridge4, 0, stranger)
		passes(s.outside, pod4, host4, 0, stranger)
		passes(s.outside, pod6, host6, 0, stranger)
		passes(s.pod, far4, bridge4, 0, pods)
		passes(s.pod, far6, "fd00:22::1", 0, pods)
	}
	// Without our bridge in a table, nothing is admitted.
	admit := func() { must.Succeed(t, expect.Err(foreign.On(s.c.Socket(), nil).Ensure(context.Background()))) }
	admit()
	all(0, 0)
	s.ensureOnBridge(t)
	admit()
	mustAdd(t, s.c, pod("0123456789a", pod4, pod6))
	all(0, 1)
	// Nor does one that a pod sets.
	nstest.Script(t, s.host, "iptables -t mangle -F")
	passes(s.other, far4, bridge4, 0x10, 0)
	passes(s.pod, far4, bridge4, 0x10, 1)
	must.Succeed(t, s.c.Remove(context.Background(), pod("0123456789a", pod4, pod6)))
	passes(s.pod, far4, bridge4, 0x10, 0)
}
