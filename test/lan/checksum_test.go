package lan

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

const virtioHeader = 10 // struct virtio_net_hdr, which stands before a frame with PACKET_VNET_HDR

// smuggled is a frame of which two bytes are others when the pod sends it: the link that fills in the checksum
// writes the frame's own over them.
type smuggled struct {
	name   string
	frame  []byte
	at     int    // where the two bytes are
	decent uint16 // what the guard is to see there
	from   int    // where the sum begins
	free   int    // two bytes that make the sum come out, and mean nothing
}

// bytes is what the pod sends: a virtio_net_hdr, and the frame.
func (s *smuggled) bytes() []byte {
	const needsChecksum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	header := []byte{needsChecksum, 0, 0, 0, 0, 0}
	header = binary.NativeEndian.AppendUint16(header, uint16(s.from))
	header = binary.NativeEndian.AppendUint16(header, uint16(s.at-s.from))
	sent := slices.Clone(s.frame)
	wanted := binary.BigEndian.Uint16(sent[s.at:])
	binary.BigEndian.PutUint16(sent[s.at:], s.decent)
	binary.BigEndian.PutUint16(sent[s.free:], 0)
	// ^(sum + free) is to be what is wanted.
	binary.BigEndian.PutUint16(sent[s.free:], sum(sent[s.from:], sum(binary.BigEndian.AppendUint16(nil, wanted), 0))^0xffff)
	return append(header, sent...)
}

// arrived says whether the frame came, with what was to be smuggled in it.
func (s *smuggled) arrived(got []byte) bool {
	masked := slices.Clone(got)
	if len(masked) < len(s.frame) {
		return false
	}
	copy(masked[s.free:], s.frame[s.free:s.free+2])
	return bytes.Equal(masked[:len(s.frame)], s.frame)
}

// sum is RFC 1071's, and not inverted.
func sum(b []byte, before uint16) uint16 {
	total := uint32(before)
	for i := 0; i+1 < len(b); i += 2 {
		total += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		total += uint32(b[len(b)-1]) << 8
	}
	for total > 0xffff {
		total = total>>16 + total&0xffff
	}
	return uint16(total)
}

// smuggles are frames of a pod that no guarded pod may send.
func smuggles(own *pod, mac, others net.HardwareAddr) []*smuggled {
	const ethernet, ip4, ip6, options = 14, 20, 40, 8
	const start = 20 // the first byte that the kernel lets a pod name
	be := func(v int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(v)) }
	last := func(a netip.Addr) uint16 { b := a.AsSlice(); return binary.BigEndian.Uint16(b[len(b)-2:]) }
	// ipv6 has an option for experiments, which no checksum covers, before the message.
	ipv6 := func(protocol byte, from, to netip.Addr, message []byte, checksum int) []byte {
		pseudo := slices.Concat(from.AsSlice(), to.AsSlice(), be(len(message)), []byte{0, protocol})
		copy(message[checksum:], be(int(^sum(message, sum(pseudo, 0)))))
		return slices.Concat([]byte{0x86, 0xdd, 0x60, 0, 0, 0}, be(options+len(message)), []byte{unix.IPPROTO_DSTOPTS, 255},
			from.AsSlice(), to.AsSlice(), []byte{protocol, 0, 0x1e, 4, 0, 0, 0, 0}, message)
	}
	local := netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
	frame := func(to net.HardwareAddr, rest ...[]byte) []byte {
		return slices.Concat(to, mac, slices.Concat(rest...))
	}

	advert := slices.Concat([]byte{134, 0, 0, 0, 64, 0x08, 0x07, 0x08}, make([]byte, 8)) // preference high, half an hour
	router := frame(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, ipv6(unix.IPPROTO_ICMPV6, local, nstest.Addr("ff02::1"), advert, 2))
	datagram := slices.Concat(be(1024), be(9), be(12), be(0), []byte("rest"))
	foreign := frame(others, ipv6(unix.IPPROTO_UDP, nstest.Addr(routerIP6), nstest.Addr(otherIP6), datagram, 6))
	header := slices.Concat([]byte{0x45, 0}, be(ip4+12), []byte{0, 7, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, own.ip4.AsSlice(), nstest.Addr(otherIP4).AsSlice())
	copy(header[10:], be(int(^sum(header, 0))))
	offer := frame(others, []byte{0x08, 0x00}, header, be(1024), be(68), be(12), be(0), []byte("rest"))
	claim := frame(others, []byte{0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 2}, mac, nstest.Addr(routerIP4).AsSlice(), others, nstest.Addr(otherIP4).AsSlice(), make([]byte, 18))
	return []*smuggled{
		{"a router advertisement", router, ethernet + ip6 + options, 128 << 8, start, ethernet + ip6 + 4},
		{"a datagram from the router's IPv6 address", foreign, ethernet + 22, last(own.ip6), start, ethernet + ip6 + 4},
		{"a datagram to UDP port 68", offer, ethernet + ip4 + 2, 9, ethernet + ip4, ethernet + ip4 + 8},
		{"ARP by which the pod has the router's address", claim, ethernet + 16, last(own.ip4), start, ethernet + 28},
	}
}

// rawAlone runs fn with no capability but CAP_NET_RAW, in a pod and on one processor, so that its frames keep their order.
func rawAlone(t *testing.T, ns *netns.NS, fn func() error) {
	t.Helper()
	must.Succeed(t, ns.Do(func() error {
		var had, one unix.CPUSet
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var all [2]unix.CapUserData
		if err := errors.Join(unix.SchedGetaffinity(0, &had), unix.Capget(&hdr, &all[0])); err != nil {
			return err
		}
		for cpu := 0; one.Count() == 0; cpu++ {
			if had.IsSet(cpu) {
				one.Set(cpu)
			}
		}
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return err
		}
		defer unix.SchedSetaffinity(0, &had)
		less := all
		less[0].Effective, less[1].Effective = 1<<unix.CAP_NET_RAW, 0
		if err := unix.Capset(&hdr, &less[0]); err != nil {
			return err
		}
		return errors.Join(fn(), unix.Capset(&hdr, &all[0]))
	}))
}

// setTxChecksum is ethtool -K LINK tx on or off, in the namespace of the calling thread.
func setTxChecksum(link string, on uint32) error {
	_, err := ethtool(link, unix.ETHTOOL_STXCSUM, on)
	return err
}

func ethtool(link string, cmd, data uint32) (uint32, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	value := struct{ cmd, data uint32 }{cmd, data}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&value)}
	copy(request.name[:], link)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return 0, errno
	}
	return value.data, nil
}

// smuggle has a pod send such frames, with CAP_NET_RAW alone, and says which of them a machine of the LAN got.
func (l *lan) smuggle(t *testing.T, own *pod, list []*smuggled) (got []string) {
	t.Helper()
	e := l.listenTo(l.other.ns, nic, unix.ETH_P_ALL)
	last := claimOf(hardware(t, own.place), own.ip4)
	rawAlone(t, own.ns, func() error { return sendAll(list, last) })
	came := map[string]bool{}
	for frame := e.next(); !bytes.HasSuffix(frame, []byte(spoofed)); frame = e.next() {
		for _, s := range list {
			came[s.name] = came[s.name] || s.arrived(frame)
		}
	}
	for _, s := range list {
		if came[s.name] {
			got = append(got, s.name)
		}
	}
	return got
}

// sendAll sends frames past the queueing discipline and by it, and then the last one.
func sendAll(list []*smuggled, last []byte) error {
	raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(raw)
	link, err := net.InterfaceByName(nic)
	if err != nil {
		return err
	}
	to := &unix.SockaddrLinklayer{Ifindex: link.Index}
	errs := []error{unix.SetsockoptInt(raw, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1)}
	for _, bypass := range []int{1, 0} {
		errs = append(errs, unix.SetsockoptInt(raw, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, bypass))
		for _, s := range list {
			errs = append(errs, unix.Sendto(raw, s.bytes(), 0, to))
		}
	}
	return errors.Join(append(errs, unix.Sendto(raw, append(make([]byte, virtioHeader), last...), 0, to))...)
}

// A link that lacks checksum offloading writes a checksum where a pod has told it to, behind the guard. So what a
// guarded pod sends has its checksums before it gets to the guard, and the pod needs CAP_NET_ADMIN to change that.
func TestGuardedPodSmugglesNothingInChecksums(t *testing.T) {
	l := newHost(t)
	n := l.network(object{"ipam": object{"type": "static", "addresses": []object{{"address": "192.168.50.70/24"}, {"address": "fd50::70/64"}}}})
	p := n.add(l.newPod("evil"))
	must.Succeed(t, l.host.ns.Do(func() error { return setTxChecksum(nic, 0) }))
	must.Succeed(t, l.host.ns.Do(func() error {
		expect.Of(ethtool(n.portOf(p), unix.ETHTOOL_GGRO, 0)).Is(t, 1, "the port joins the segments that the pod sends one by one")
		return nil
	}))
	all := smuggles(p, hardware(t, p.place), hardware(t, l.other))
	got := l.smuggle(t, p, all)
	expect.That(t, len(got) == 0, "a machine of the LAN got %q", got)
	rawAlone(t, p.ns, func() error {
		err := setTxChecksum(nic, 1)
		expect.That(t, errors.Is(err, unix.EPERM), "the pod turns its checksum offloading on: %v, want EPERM", err)
		// By pages that it has spliced into a socket, a pod would change a datagram behind the guard.
		expect.Of(ethtool(nic, unix.ETHTOOL_GSG, 0)).Is(t, 0, "the pod sends pages as they are")
		_, err = ethtool(nic, unix.ETHTOOL_SSG, 1)
		expect.That(t, errors.Is(err, unix.EPERM), "the pod turns scatter and gather on: %v, want EPERM", err)
		return nil
	})

	// With CAP_NET_ADMIN it can, and then they pass: so the attack works.
	must.Succeed(t, p.ns.Do(func() error { return setTxChecksum(nic, 1) }))
	if got := l.smuggle(t, p, all); len(got) != len(all) {
		t.Errorf("with the offloading on, of %d frames a machine of the LAN got %q: the test shows nothing", len(all), got)
	}
}

func hardware(t *testing.T, p place) net.HardwareAddr {
	t.Helper()
	return must.Of(net.ParseMAC(macOf(t, p, nic))).Get(t)
}
