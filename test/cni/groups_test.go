package cni

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

func be16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

// sum16 is the checksum of IP, UDP and ICMPv6, of bytes of an even number.
func sum16(b []byte) []byte {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return be16(int(^uint16(sum)))
}

const groupPort = 9

// groupFrames are a datagram to the host, and a router advertisement of high preference,
// to one of the link-local groups.
func groupFrames(group int) [][]byte {
	header := slices.Concat([]byte{0x01, 0x80, 0xc2, 0, 0, byte(group)}, []byte{2, 0x66, 0x66, 0x66, 0x66, 0x66})
	from, to := nstest.Addr("198.51.100.1"), nstest.Addr(gateway4)
	text := fmt.Sprintf("group %x.", group)
	ip := slices.Concat([]byte{0x45, 0}, be16(28+len(text)), []byte{0, 7, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.AsSlice(), to.AsSlice())
	copy(ip[10:], sum16(ip))
	datagram := slices.Concat(header, be16(unix.ETH_P_IP), ip, be16(1024), be16(groupPort), be16(8+len(text)), be16(0), []byte(text))

	router, all := nstest.Addr(fmt.Sprintf("fe80::66:%x", group)), nstest.Addr("ff02::1")
	ra := slices.Concat([]byte{134, 0, 0, 0, 64, 0x08}, be16(1800), make([]byte, 8))
	copy(ra[2:], sum16(slices.Concat(router.AsSlice(), all.AsSlice(), []byte{0, unix.IPPROTO_ICMPV6}, be16(len(ra)), ra)))
	advertisement := slices.Concat(header, be16(unix.ETH_P_IPV6), []byte{0x60, 0, 0, 0}, be16(len(ra)),
		[]byte{unix.IPPROTO_ICMPV6, 255}, router.AsSlice(), all.AsSlice(), ra)
	return [][]byte{datagram, advertisement}
}

func rawSocket(tb testing.TB, ns *netns.NS, link string) int {
	tb.Helper()
	fd, _ := nstest.PacketSocket(tb, ns, link, unix.SOCK_RAW, unix.ETH_P_ALL, time.Minute)
	return fd
}

// pastTheBridge has a pod send to all link-local groups, and says by which of them the
// host took a datagram and a default route as from the pod's port.
func (w *network) pastTheBridge(p *pod) (datagrams, routes []string) {
	w.Helper()
	n, port := w.node, w.port(p)
	n.ip("-6 route flush proto ra")
	heard := -1
	err := n.ns.Do(func() error {
		var err error
		if heard, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return errors.Join(unix.BindToDevice(heard, port), unix.Bind(heard, &unix.SockaddrInet4{Port: groupPort}))
	})
	must.Succeed(w, err)
	defer unix.Close(heard)
	// A tap sees each frame before the kernel works on it, and the last one after it has
	// done so with the others, if all are in one processor's queue.
	tap, out := rawSocket(w, n.ns, port), rawSocket(w, p.NS, "eth0")
	last := slices.Concat(net.HardwareAddr{2, 0x77, 0, 0, 0, 1}, net.HardwareAddr{2, 0x66, 0x66, 0x66, 0x66, 0x66}, be16(0x88b5), []byte("the last one"))
	must.Succeed(w, nstest.OnOneCPU(func() error {
		var errs []error
		for group := range 16 {
			for _, f := range groupFrames(group) {
				_, err := unix.Write(out, f)
				errs = append(errs, err)
			}
		}
		_, err := unix.Write(out, last)
		return errors.Join(append(errs, err)...)
	}))
	buf := make([]byte, 2048)
	for seen := false; !seen; {
		length := must.Of(unix.Read(tap, buf)).Get(w, "waiting for the last frame")
		seen = slices.Equal(buf[:length], last)
	}
	for {
		length, _, err := unix.Recvfrom(heard, buf, unix.MSG_DONTWAIT)
		if err != nil {
			break
		}
		datagrams = append(datagrams, strings.TrimSuffix(strings.TrimPrefix(string(buf[:length]), "group "), "."))
	}
	table := n.run("ip", "-6", "route", "show", "default", "proto", "ra")
	for group := range 16 {
		if strings.Contains(table, fmt.Sprintf("via fe80::66:%x ", group)) {
			routes = append(routes, fmt.Sprintf("%x", group))
		}
	}
	return datagrams, routes
}

func allGroupsBut(others string) []string {
	return slices.DeleteFunc(strings.Split("0123456789abcdef", ""), func(g string) bool { return strings.Contains(others, g) })
}

// asBefore makes a port what it was before these frames were thought of: with the
// kernel's defaults, and no rules against them.
func (w *network) asBefore(p *pod) {
	w.Helper()
	n, port := w.node, w.port(p)
	n.nft("add table bridge tombolo; delete table bridge tombolo")
	n.ip("link set " + port + " type bridge_slave group_fwd_mask 0")
	nstest.Sysctl(w, n.ns, "net/ipv4/conf/"+port+"/rp_filter", "0")
	nstest.Sysctl(w, n.ns, "net/ipv6/conf/"+port+"/drop_unicast_in_l2_multicast", "0")
	nstest.Sysctl(w, n.ns, "net/ipv6/conf/"+port+"/accept_ra", "2") // as the host forwards
}

func TestHostTakesNothingPastTheBridge(t *testing.T) {
	t.Parallel()
	for name, fields := range map[string]conf{
		"gateway":         {},
		"gateway guarded": {"guard": true},
		"layer 2":         {"mode": "l2", "ipam": hostLocal(subnet4)},
		"without IPAM":    {"mode": "l2", "ipam": nil},
		"IPv4 alone":      {"ipam": hostLocal(subnet4)},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(fields)
			w.plugin["bridge"] = "cbr0"
			a := w.addPod("a")
			n.ip("address replace " + gateway4 + "/24 dev cbr0") // in mode l2 it has none
			port := w.port(a)
			want := func(when string, datagrams, routes []string) {
				t.Helper()
				if gotDatagrams, gotRoutes := w.pastTheBridge(a); !slices.Equal(gotDatagrams, datagrams) || !slices.Equal(gotRoutes, routes) {
					t.Errorf("%s: the host takes datagrams by the groups %v, want %v, and default routes by %v, want %v", when, gotDatagrams, datagrams, gotRoutes, routes)
				}
			}
			want("after ADD", nil, nil)
			// What the rules do by themselves, whatever becomes of the port.
			nstest.Sysctl(t, n.ns, "net/ipv4/conf/"+port+"/rp_filter", "0")
			nstest.Sysctl(t, n.ns, "net/ipv6/conf/"+port+"/drop_unicast_in_l2_multicast", "0")
			nstest.Sysctl(t, n.ns, "net/ipv6/conf/"+port+"/accept_ra", "2")
			n.ip("link set " + port + " group 0")
			want("with rules alone", nil, nil)
			n.ip("link set cbr0 type bridge stp_state 1 forward_delay 200")
			want("with rules alone, and STP", nil, nil)
			n.ip("link set cbr0 type bridge stp_state 0")
			// And the port without rules.
			must.Succeed(t, n.operate("repair", "--state", n.state).err(), "repair")
			n.nft("flush ruleset")
			want("with a port alone", nil, nil)
			w.asBefore(a)
			want("with neither", allGroupsBut("01"), allGroupsBut("01"))
		})
	}
}

// What closes the ports of pods that run is gone: nothing is restarted, and CHECK says what
// is open until the next ADD, or a repair.
func TestPortsOfPodsThatRunAreClosed(t *testing.T) {
	t.Parallel()
	for name, mend := range map[string]func(*network){
		"by the next ADD":   func(w *network) { w.add(w.node.pod("next")) },
		"by tombolo repair": func(w *network) { w.node.operate("repair", "--state", w.node.state) },
		"by another network's": func(w *network) {
			w.node.network("other", conf{"bridge": "br1", "ipam": hostLocal("10.78.0.0/24")}).add(w.node.pod("other"))
		},
	} {
		nstest.RunParallel(t, name, func(t *testing.T) {
			n := newNode(t)
			w := n.podnet(nil)
			a := w.addPod("a")
			w.asBefore(a)
			if datagrams, routes := w.pastTheBridge(a); len(datagrams) != 14 || len(routes) != 14 {
				t.Fatalf("the host takes datagrams by the groups %v, and routes by %v: nothing is to be mended", datagrams, routes)
			}
			err := w.check(a)
			for _, says := range []string{"rp_filter", "accept_ra", "drop_unicast_in_l2_multicast", "link-local groups", "bridge tombolo"} {
				wantError(t, err, 113, says)
			}
			mend(w)
			expect.Success(t, w.check(a), "CHECK")
			datagrams, routes := w.pastTheBridge(a)
			expect.That(t, len(datagrams)+len(routes) == 0, "the host takes datagrams by the groups %v, and routes by %v", datagrams, routes)
		})
	}
}

// A pod says which groups it is in when it starts, and again at each change. That is for
// multicast routers, whose ports the operator takes out of the group that pods are in.
func TestPodsAreSparedWhatOnlyMulticastRoutersRead(t *testing.T) {
	t.Parallel()
	const listenerReport = 143
	n := newNode(t)
	w := n.podnet(nil)
	spared, router, speaker := n.pod("spared"), n.pod("router"), n.pod("speaker")
	r := w.add(spared)
	w.add(router)
	n.ip("link set " + w.port(router) + " group 0")
	said := w.add(speaker)
	wantPing(t, speaker.NS, r.IPs[1].Address.IP.String())
	from := must.Of(net.ParseMAC(said.Interfaces[2].Mac)).Get(t)
	isReport := func(f frame) bool { return f.icmp6 == listenerReport && f.incoming && f.from == from.String() }
	podHears, routerHears, speaks := capture(t, spared.NS, "eth0"), capture(t, router.NS, "eth0"), capture(t, speaker.NS, "eth0")
	nstest.Run(t, speaker.NS, "ip", "address", "add", "fd00:77::77/64", "dev", "eth0", "nodad")
	routerHears.until(isReport)
	speaks.send(from, "the report was before this")
	for _, f := range podHears.until(func(f frame) bool { return f.protocol == testProtocol }) {
		expect.That(t, !isReport(f), "the pod heard %+v", f)
	}
	for _, p := range []*pod{spared, router, speaker} {
		expect.Success(t, w.check(p))
	}
}
