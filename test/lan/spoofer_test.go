package lan

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
	"github.com/tombolo-cni/tombolo/internal/testutil/nstest"
	"github.com/tombolo-cni/tombolo/netns"
)

// spoofer is a process of a pod that waits for the pod's interface, brings it up before
// anybody else does, and sends what no pod may, until it is stopped.
type spoofer struct {
	testing.TB
	sent atomic.Int64
	once sync.Once
	came chan struct{} // closed once it has sent something
	stop chan struct{}
	done sync.WaitGroup
}

// spoof has a pod say, as fast as it can, that it is the router: by its own MAC, and by
// nobody's.
func (l *lan) spoof(p *pod) *spoofer {
	s := &spoofer{TB: l, came: make(chan struct{}), stop: make(chan struct{})}
	s.done.Go(func() { expect.Success(l, p.ns.Do(s.run)) })
	return s
}

func (s *spoofer) run() error {
	raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(raw)
	control, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(control)
	for {
		select {
		case <-s.stop:
			return nil
		default:
		}
		if own, err := net.InterfaceByName(nic); err == nil && bringUp(control, own) {
			s.flood(raw, own)
		}
		runtime.Gosched() // others have work to do on this processor
	}
}

// bringUp has the interface up, whatever the plugin is at.
func bringUp(control int, own *net.Interface) bool {
	if own.Flags&net.FlagUp != 0 {
		return true
	}
	ifr, err := unix.NewIfreq(own.Name)
	if err != nil || unix.IoctlIfreq(control, unix.SIOCGIFFLAGS, ifr) != nil {
		return false
	}
	ifr.SetUint16(ifr.Uint16() | unix.IFF_UP)
	return unix.IoctlIfreq(control, unix.SIOCSIFFLAGS, ifr) == nil
}

// flood sends a few frames.
func (s *spoofer) flood(raw int, own *net.Interface) {
	for range 10 {
		for _, source := range []net.HardwareAddr{own.HardwareAddr, {2, 0x66, 0x66, 0x66, 0x66, 0x66}} {
			if unix.Sendto(raw, claimOf(source, netip.MustParseAddr(routerIP4)), 0, &unix.SockaddrLinklayer{Ifindex: own.Index}) == nil {
				s.sent.Add(1)
				s.once.Do(func() { close(s.came) })
			}
		}
	}
}

// began waits until it has sent something: a busy machine may not have let it.
func (s *spoofer) began() {
	s.Helper()
	select {
	case <-s.came:
	case <-time.After(patience):
		s.Fatal("the pod has sent nothing")
	}
}

// end stops it, and gives how many frames it has sent.
func (s *spoofer) end() int64 {
	close(s.stop)
	s.done.Wait()
	return s.sent.Load()
}

// spoofed ends each frame of a spoofer's.
const spoofed = "spoofed"

// claimOf is an ARP reply to all by which an address is at a MAC.
func claimOf(mac net.HardwareAddr, address netip.Addr) []byte {
	return bytes.Join([][]byte{
		{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac, {0x08, 0x06},
		{0, 1, 8, 0, 6, 4, 0, 2}, mac, address.AsSlice(), make([]byte, 6), address.AsSlice(), []byte(spoofed),
	}, nil)
}

// ear hears what comes in by a link of a machine's, ARP alone unless told otherwise.
type ear struct {
	testing.TB
	fd int
}

func (l *lan) listen(ns *netns.NS, link string) *ear {
	l.Helper()
	return l.listenTo(ns, link, unix.ETH_P_ARP)
}

func (l *lan) listenTo(ns *netns.NS, link string, ethernet uint16) *ear {
	l.Helper()
	e := &ear{TB: l, fd: -1}
	protocol := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, ethernet))
	must.Succeed(l, ns.Do(func() error {
		i, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		if e.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		return unix.Bind(e.fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: i.Index})
	}))
	l.Cleanup(func() { unix.Close(e.fd) })
	return e
}

// spoofs is how many frames of a spoofer's were heard since the last call.
func (e *ear) spoofs() (n int) {
	e.Helper()
	buf := make([]byte, 256)
	for {
		length, _, err := unix.Recvfrom(e.fd, buf, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return n
		case errors.Is(err, unix.EINTR):
		case err != nil:
			e.Fatal(err)
		case bytes.HasSuffix(buf[:length], []byte(spoofed)):
			n++
		}
	}
}

// next waits for a frame.
func (e *ear) next() []byte {
	e.Helper()
	buf := make([]byte, 2048)
	for end := time.Now().Add(patience); time.Now().Before(end); {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(e.fd), Events: unix.POLLIN}}, 1000)
		must.That(e, err == nil || errors.Is(err, unix.EINTR), "%v", err)
		if length, _, err := unix.Recvfrom(e.fd, buf, 0); err == nil {
			return buf[:length]
		}
	}
	e.Fatal("no frame came")
	return nil
}

// rogueSubnet is what a pod leases that was told so by another pod.
const rogueFirst, rogueLast = "192.168.50.210", "192.168.50.220"

// A pod that has all rights in its namespace takes itself for the router, while that is
// silent: so a machine that takes the pod for the router gets an answer, and no other does.
// Package nft has more attacks, frame by frame.
func TestGuardedPodIsNotTakenForTheRouter(t *testing.T) {
	t.Parallel()
	for _, guarded := range []bool{false, true} {
		t.Run(fmt.Sprintf("lanGuard %t", guarded), func(t *testing.T) {
			t.Parallel()
			l := newHost(t)
			l.dnsmasq()
			fields := object{}
			if !guarded {
				fields["lanGuard"] = false // the default is true
			}
			n := l.network(fields)
			evil := n.add(l.newPod("evil"))
			ip(t, l.router.ns, "link set "+nic+" down")
			for _, p := range []place{l.other, l.host} {
				ip(t, p.ns, "neigh flush all")
			}
			impersonate(t, l, evil)

			wait := aMinute
			if guarded {
				wait = aMoment
			}
			for _, who := range []struct {
				place
				asks netip.Addr
			}{{l.other, l.router.ip4}, {l.other, l.router.ip6}, {l.host, l.router.ip4}} {
				believed := nstest.PingWith(t, who.ns, who.asks, nstest.Echo{Wait: wait}) == nil
				expect.That(t, believed != guarded, "%s takes the pod for %s: %t", who.name, who.asks, believed)
			}
			if guarded {
				n.conf["ipam"].(object)["timeout"] = "2s" // nobody is to answer
			}
			neighbour := l.newPod("neighbour")
			out, err := n.verb("ADD", neighbour)
			switch {
			case guarded && (err == nil || !strings.Contains(err.Error(), `"code":11,`)):
				t.Errorf("ADD of another pod: %s %v, want that no server answered", out, err)
			case !guarded && err != nil:
				t.Errorf("the pod's server does not work, so the test shows nothing: %v", err)
			case !guarded:
				neighbour.learn(t, out)
				if neighbour.ip4.Less(nstest.Addr(rogueFirst)) || nstest.Addr(rogueLast).Less(neighbour.ip4) {
					t.Errorf("the other pod has %s, which is not the pod's to give", neighbour.ip4)
				}
				n.del(neighbour)
			}
			// What it is it may go on to be.
			if guarded {
				ip(t, evil.ns, "address del "+routerIP4+"/24 dev "+nic, "address del "+routerIP6+"/64 dev "+nic)
				l.serve(l.other, servicePort, 4)
				l.ask(evil.place, l.other.ip4, servicePort, evil.ip4)
			}
			n.del(evil)
		})
	}
}

// impersonate gives a pod the router's addresses, and a DHCP server.
func impersonate(t *testing.T, l *lan, evil *pod) {
	t.Helper()
	nstest.Sysctl(t, evil.ns, "net/ipv6/conf/"+nic+"/disable_ipv6", "0")
	nstest.Sysctl(t, evil.ns, "net/ipv6/conf/"+nic+"/accept_dad", "0")
	ip(t, evil.ns, "address add "+routerIP4+"/24 dev "+nic, "address add "+routerIP6+"/64 dev "+nic+" nodad")
	nstest.WaitForAddresses(t, evil.ns)
	cmd := exec.Command("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--no-ping", "--port=0",
		"--bind-interfaces", "--interface="+nic, "--except-interface=lo", "--dhcp-authoritative", "--pid-file=", "--user=root", "--leasefile-ro",
		"--log-facility="+t.TempDir()+"/log", "--dhcp-range="+rogueFirst+","+rogueLast+",2m")
	cmd.Stderr = l.Output()
	must.Succeed(t, evil.ns.Do(cmd.Start))
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	must.Until(l, "the pod serves DHCP", func() bool {
		return strings.Contains(nstest.Run(t, evil.ns, "ss", "-lnu"), ":67 ")
	})
}

// What lanGuard lets a pod send goes by EtherType, as the table of security.md says. What others send reaches a pod.
func TestLANGuardLetsPassIPAndARPAlone(t *testing.T) {
	l := newHost(t)
	n := l.network(object{"ipam": object{"type": "static", "addresses": []object{{"address": "192.168.50.70/24"}, {"address": "fd50::70/64"}}}})
	p := n.add(l.newPod("a"))
	macs := map[netip.Addr]net.HardwareAddr{p.ip4: hardware(t, p.place), l.other.ip4: hardware(t, l.other)}
	magic := slices.Concat(bytes.Repeat([]byte{0xff}, 6), bytes.Repeat(macs[l.other.ip4], 16))
	udp := slices.Concat([]byte{0x80, 0, 0, 9, 0, byte(len(magic) + 8), 0, 0}, magic)
	ipv4 := func(from place) []byte {
		header := slices.Concat([]byte{0x45, 0, 0, byte(20 + len(udp)), 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}, from.ip4.AsSlice(), []byte{255, 255, 255, 255})
		binary.BigEndian.PutUint16(header[10:], ^sum(header, 0))
		return append(header, udp...)
	}
	ipv6 := func(from place) []byte {
		return slices.Concat([]byte{0x60, 0, 0, 0, 0, 8, 59, 255}, from.ip6.AsSlice(), nstest.Addr("ff02::1").AsSlice(), make([]byte, 8))
	}
	other := func(place) []byte { return magic }
	for _, row := range []struct {
		types          []uint16
		payload        func(from place) []byte
		leaves, enters bool
	}{
		{[]uint16{unix.ETH_P_IP}, ipv4, true, true}, // Wake-on-LAN by UDP
		{[]uint16{unix.ETH_P_IPV6}, ipv6, true, true},
		{[]uint16{unix.ETH_P_ARP}, func(from place) []byte { return append(claimOf(macs[from.ip4], from.ip4)[14:], magic...) }, true, true},
		{[]uint16{unix.ETH_P_8021Q, unix.ETH_P_8021AD}, func(from place) []byte { return append([]byte{0, 5, 8, 0}, ipv4(from)...) }, false, false},
		{[]uint16{unix.ETH_P_8021Q}, func(from place) []byte { return append([]byte{0, 0, 8, 0}, ipv4(from)...) }, false, true},
		{[]uint16{0x0842, 0x887b, 0x88e1, 0x893a, unix.ETH_P_LLDP, unix.ETH_P_PAE, unix.ETH_P_MACSEC, unix.ETH_P_PPP_DISC, unix.ETH_P_PPP_SES,
			unix.ETH_P_MPLS_UC, unix.ETH_P_RARP, unix.ETH_P_PROFINET, unix.ETH_P_ETHERCAT, unix.ETH_P_1588, unix.ETH_P_TSN, unix.ETH_P_AOE,
			unix.ETH_P_FCOE, unix.ETH_P_BATMAN, unix.ETH_P_802_EX1, 38, 1500}, other, false, true},
	} {
		for _, typ := range row.types {
			frame := func(from place) []byte {
				return slices.Concat(bytes.Repeat([]byte{0xff}, 6), macs[from.ip4], binary.BigEndian.AppendUint16(nil, typ), row.payload(from))
			}
			expect.Equal(t, l.arrives(t, p.place, l.other, frame(p.place)), row.leaves, "a frame of type %#04x leaves the pod", typ)
			expect.Equal(t, l.arrives(t, l.other, p.place, frame(l.other)), row.enters, "a frame of type %#04x enters the pod", typ)
		}
	}
}

// arrives reports whether a frame that one machine sends reaches the other. The frame after it always does.
func (l *lan) arrives(t *testing.T, from, to place, frame []byte) bool {
	t.Helper()
	e := l.listenTo(to.ns, nic, unix.ETH_P_ALL)
	last := claimOf(frame[6:12], from.ip4)
	must.Succeed(t, from.ns.Do(func() error {
		raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(raw)
		link, err := net.InterfaceByName(nic)
		if err != nil {
			return err
		}
		sll := &unix.SockaddrLinklayer{Ifindex: link.Index}
		return errors.Join(unix.Sendto(raw, frame, 0, sll), unix.Sendto(raw, last, 0, sll))
	}))
	for came := false; ; {
		got := e.next()
		if bytes.Equal(got, last) {
			return came
		}
		came = came || bytes.HasPrefix(got, frame[:12]) && bytes.HasSuffix(got, frame[len(frame)-16:])
	}
}
