package bridge_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nltest"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// onesComplement is the checksum of IP, UDP and ICMPv6.
func onesComplement(parts ...[]byte) []byte {
	b := slices.Concat(parts...)
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return binary.BigEndian.AppendUint16(nil, ^uint16(sum))
}

func be16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

// frame is one from a pod, with an IP packet in it.
func frame(dst net.HardwareAddr, from, to netip.Addr, protocol byte, payload []byte) []byte {
	f := slices.Concat(dst, mac("02:66:66:66:66:66"))
	if from.Is4() {
		h := slices.Concat([]byte{0x45, 0}, be16(20+len(payload)), []byte{0, 7, 0, 0, 64, protocol, 0, 0}, from.AsSlice(), to.AsSlice())
		copy(h[10:], onesComplement(h))
		return slices.Concat(f, be16(unix.ETH_P_IP), h, payload)
	}
	return slices.Concat(f, be16(unix.ETH_P_IPV6), []byte{0x60, 0, 0, 0}, be16(len(payload)), []byte{protocol, 255}, from.AsSlice(), to.AsSlice(), payload)
}

// checked puts the checksum of a payload behind a header into it.
func checked(payload []byte, at int, from, to netip.Addr, protocol byte) []byte {
	copy(payload[at:], onesComplement(from.AsSlice(), to.AsSlice(), []byte{0, protocol}, be16(len(payload)), payload))
	return payload
}

const trespassPort = 9

// trespass is what a pod sends past the bridge, by what would be got by it.
func trespass(dst net.HardwareAddr) map[string][]byte {
	list := map[string][]byte{}
	for name, a := range map[string][2]string{
		"IPv4 from a neighbour":    {"10.44.0.99", "10.44.0.1"},
		"IPv4 from elsewhere":      {"198.51.100.1", "10.44.0.1"},
		"IPv4 from no address":     {"0.0.0.0", "10.44.0.1"},
		"IPv4 multicast":           {"198.51.100.1", "224.0.0.1"},
		"IPv6 from a neighbour":    {"fd44::99", "fd44::1"},
		"IPv6 from elsewhere":      {"2001:db8::1", "fd44::1"},
		"IPv6 to all of the nodes": {"fe80::66", "ff02::1"},
	} {
		from, to := nstest.Addr(a[0]), nstest.Addr(a[1])
		d := slices.Concat(be16(1024), be16(trespassPort), be16(8+len(name)), []byte{0, 0}, []byte(name))
		list[name] = frame(dst, from, to, unix.IPPROTO_UDP, checked(d, 6, from, to, unix.IPPROTO_UDP))
	}
	from, to := nstest.Addr("fe80::66"), nstest.Addr("ff02::1")
	ra := slices.Concat([]byte{134, 0, 0, 0, 64, 0x08}, be16(1800), make([]byte, 8)) // of high preference
	list["default route"] = frame(dst, from, to, unix.IPPROTO_ICMPV6, checked(ra, 2, from, to, unix.IPPROTO_ICMPV6))
	return list
}

// listeners hear datagrams that come in by one link, over IPv4 and over IPv6.
func listeners(tb testing.TB, ns *netns.NS, link string) []int {
	tb.Helper()
	var list []int
	for family, address := range map[int]unix.Sockaddr{
		unix.AF_INET: &unix.SockaddrInet4{Port: trespassPort}, unix.AF_INET6: &unix.SockaddrInet6{Port: trespassPort},
	} {
		inside(tb, ns, func() error {
			fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			tb.Cleanup(func() { unix.Close(fd) })
			list = append(list, fd)
			return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.BindToDevice(fd, link), unix.Bind(fd, address))
		})
	}
	return list
}

// gets sends frames from a pod, and says which of them the host took as from the port.
func gets(tb testing.TB, n *node, pod *netns.NS, port string, frames map[string][]byte) []string {
	tb.Helper()
	heard := listeners(tb, n.ns, port)
	nstest.Run(tb, n.ns, "ip", "-6", "route", "flush", "proto", "ra")
	// A tap sees each frame before the kernel works on it, and the last one after it has
	// done so with the others: they are in one processor's queue.
	tap, out := rawSocket(tb, n.ns, port), rawSocket(tb, pod, "eth0")
	last := slices.Concat(mac("02:77:77:77:77:77"), mac("02:66:66:66:66:66"), be16(0x88b5), []byte("the last one"))
	err := onOneCPU(func() error {
		for _, f := range append(slices.Collect(maps.Values(frames)), last) {
			if _, err := unix.Write(out, f); err != nil {
				return err
			}
		}
		return nil
	})
	must.Succeed(tb, err)
	buf := make([]byte, 2048)
	for seen := false; !seen; {
		length := must.Of(unix.Read(tap, buf)).Get(tb, "waiting for the last frame")
		seen = bytes.Equal(buf[:length], last)
	}
	var got []string
	for _, fd := range heard {
		for {
			length, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
			if err != nil {
				break
			}
			got = append(got, string(buf[:length]))
		}
	}
	if strings.Contains(nstest.Run(tb, n.ns, "ip", "-6", "route", "show", "default", "proto", "ra"), "fe80::66") {
		got = append(got, "default route")
	}
	slices.Sort(got)
	return got
}

// rawSocket sends and receives frames by a link.
func rawSocket(tb testing.TB, ns *netns.NS, link string) int {
	tb.Helper()
	fd, _ := nstest.PacketSocket(tb, ns, link, unix.SOCK_RAW, unix.ETH_P_ALL, patience)
	return fd
}

func names(frames map[string][]byte, but ...string) []string {
	var list []string
	for name := range frames {
		if !slices.Contains(but, name) {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// These are the barriers that stay when nobody has rules against it, or somebody flushed
// them; a port whose bridge is gone has no other.
func TestHostTakesNoIPByAPort(t *testing.T) {
	t.Parallel()
	for _, way := range []struct {
		name         string
		offTheBridge bool
	}{{"to a link-local group", false}, {"to its own MAC, off the bridge", true}} {
		t.Run(way.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := port(0)
			p.MAC = mac("02:00:00:00:00:01")
			pod, _ := attach(t, n, p)
			dst := mac("01:80:c2:00:00:03")
			if way.offTheBridge {
				dst = p.MAC
			}
			leave := func() {
				if way.offTheBridge {
					nstest.Run(t, n.ns, "ip", "link", "set", p.Name, "nomaster")
				}
			}
			attack := func() []string { return gets(t, n, pod, p.Name, trespass(dst)) }
			// No kernel takes what comes from nowhere.
			all := names(trespass(dst), "IPv4 from no address")
			// What is left of IPv6 has no parameter that is cheap to set.
			rest := []string{"IPv6 to all of the nodes"}
			if way.offTheBridge {
				rest = []string{"IPv6 from a neighbour", "IPv6 from elsewhere", "IPv6 to all of the nodes"}
			}
			leave()
			got := attack()
			expect.That(t, slices.Equal(got, rest), "after Attach, the host takes %v, want %v", got, rest)
			for _, parameter := range []string{"ipv4/conf/%s/rp_filter 0", "ipv6/conf/%s/drop_unicast_in_l2_multicast 0", "ipv6/conf/%s/accept_ra 1"} {
				path, value, _ := strings.Cut(fmt.Sprintf(parameter, p.Name), " ")
				nstest.Sysctl(t, n.ns, "net/"+path, value)
			}
			got = attack()
			expect.That(t, slices.Equal(got, all), "with the kernel's defaults, the host takes %v, want %v", got, all)
			diffs, err := n.conn.Check(t.Context(), p)
			if wanted := 3; err != nil || len(diffs) < wanted {
				t.Errorf("Check finds %v, %v, want %d differences", diffs, err, wanted)
			}
			must.Succeed(t, n.conn.Enslave(t.Context(), p))
			expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "after Enslave, Check")
			leave()
			got = attack()
			expect.That(t, slices.Equal(got, rest), "after Enslave, the host takes %v, want %v", got, rest)
		})
	}
}

// The kernel has no IPv6 on links of an MTU below 1280, and what it had of a link's
// parameters is gone when it comes back.
func TestHostTakesNoIPv6ByAPortWhoseMTUGrew(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := port(0)
	p.MTU, p.Addresses, p.Routes = 600, p.Addresses[:1], p.Routes[:1]
	attach(t, n, p)
	for _, mtu := range []int{1400, 1200, 1300} {
		must.Succeed(t, n.conn.SetPortMTU(t.Context(), p.Name, mtu))
		p.MTU = mtu
		expect.Of(n.conn.Check(t.Context(), p)).Len(t, 0, "with an MTU of %d, Check", mtu)
	}
}

// The port comes up in the request that closes it, and not with the pair.
func TestPortIsDownUntilItIsClosed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	conn, sent := recorded(t, n)
	p := port(0)
	p.BridgeIndex, p.MTU = n.link.Index, 1400
	_, err := conn.Attach(t.Context(), nstest.New(t), p)
	must.That(t, err == nil || strings.Contains(err.Error(), "sysctl"), "%v", err)
	ups := 0
	for _, datagram := range sent.Sent() {
		for _, m := range nltest.Split(datagram) {
			if m.Header.Type != unix.RTM_NEWLINK {
				continue
			}
			if up := binary.NativeEndian.Uint32(m.Data[8:])&unix.IFF_UP != 0; up {
				ups++
				expect.Equal(t, m.Header.Flags&unix.NLM_F_CREATE, 0, "the pair is made up")
			}
		}
	}
	expect.Equal(t, ups, 1, "requests set the port up")
}
