package lan

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// everyone has all machines of a LAN with two pods, and what each of them hears at eth0.
type everyone struct {
	*lan
	machines []*machine
	onLAN    []*machine // without the internet
}

// machine is a place with a tap, and with a server at each family's bellPort.
type machine struct {
	place
	testing.TB
	mac     net.HardwareAddr
	index   int
	tap     int // a socket that gets a copy of each frame, but of those that it sends itself
	seen    []frame
	largest int             // see measure
	bells   [2]*net.UDPConn // by family: 4, 6

	mu    sync.Mutex
	rings map[string]int // how often a server heard a text
}

// frame is a copy of what a machine received, or sent.
type frame struct {
	kind byte // PACKET_HOST and so on
	data []byte
}

func (f frame) came() bool {
	return f.kind == unix.PACKET_HOST || f.kind == unix.PACKET_BROADCAST || f.kind == unix.PACKET_MULTICAST
}

// bellPort is that of mDNS, which a host's daemons serve by one link.
const bellPort = 5353

// groups are what machines announce themselves to: mDNS, SSDP, and all.
func groups() []string {
	return []string{"224.0.0.251", "239.255.255.250", "255.255.255.255", "192.168.50.255", "ff02::fb", "ff02::c", "ff02::1"}
}

// tapped gives each machine a tap and a server.
func (l *lan) tapped(pods ...*pod) *everyone {
	l.Helper()
	all := &everyone{lan: l}
	places := []place{l.host, l.other, l.router, l.internet}
	for _, p := range pods {
		places = append(places, p.place)
	}
	for _, p := range places {
		m := &machine{place: p, TB: l, rings: map[string]int{}}
		m.open()
		all.machines = append(all.machines, m)
		if p.ns != l.internet.ns {
			all.onLAN = append(all.onLAN, m)
		}
	}
	return all
}

func (m *machine) open() {
	m.Helper()
	every := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
	must.Succeed(m, m.ns.Do(func() error {
		link, err := net.InterfaceByName(nic)
		if err != nil {
			return err
		}
		m.mac, m.index = link.HardwareAddr, link.Index
		if m.tap, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		err = errors.Join(unix.SetsockoptInt(m.tap, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, room),
			unix.Bind(m.tap, &unix.SockaddrLinklayer{Protocol: every, Ifindex: link.Index}))
		for i, network := range []string{"udp4", "udp6"} {
			var bellErr error
			m.bells[i], bellErr = bell(network, link.Index, m.name != "router")
			err = errors.Join(err, bellErr)
		}
		return err
	}))
	var servers sync.WaitGroup
	for _, conn := range m.bells {
		servers.Go(func() { m.answer(conn) })
	}
	m.Cleanup(func() {
		unix.Close(m.tap)
		for _, conn := range m.bells {
			conn.Close()
		}
		servers.Wait()
	})
}

// bell opens a server that hears groups, by eth0 alone if bound, as dnsmasq, avahi and samba do.
func bell(network string, index int, bound bool) (*net.UDPConn, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		controlErr := c.Control(func(fd uintptr) {
			s := int(fd)
			err = unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_BROADCAST, 1)
			if bound {
				err = errors.Join(err, unix.SetsockoptString(s, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, nic))
			}
			for _, text := range groups() {
				group := netip.MustParseAddr(text)
				switch {
				case !group.IsMulticast() || group.Is4() != (network == "udp4") || text == "ff02::1":
				case group.Is4():
					joined := &unix.IPMreqn{Multiaddr: group.As4(), Ifindex: int32(index)}
					err = errors.Join(err, unix.SetsockoptIPMreqn(s, unix.IPPROTO_IP, unix.IP_ADD_MEMBERSHIP, joined))
				default:
					joined := &unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(index)}
					err = errors.Join(err, unix.SetsockoptIPv6Mreq(s, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, joined))
				}
			}
			if network == "udp4" {
				by := &unix.IPMreqn{Ifindex: int32(index)}
				err = errors.Join(err, unix.SetsockoptIPMreqn(s, unix.IPPROTO_IP, unix.IP_MULTICAST_IF, by),
					unix.SetsockoptInt(s, unix.IPPROTO_IP, unix.IP_PKTINFO, 1),
					unix.SetsockoptByte(s, unix.IPPROTO_IP, unix.IP_MULTICAST_LOOP, 0))
			} else {
				err = errors.Join(err, unix.SetsockoptInt(s, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, index),
					unix.SetsockoptInt(s, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1),
					unix.SetsockoptInt(s, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_LOOP, 0))
			}
		})
		return errors.Join(controlErr, err)
	}}
	conn, err := config.ListenPacket(context.Background(), network, fmt.Sprint(":", bellPort))
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

// answer counts texts, and sends back those that ask for it.
func (m *machine) answer(conn *net.UDPConn) {
	buf, to := make([]byte, 1<<16), make([]byte, 128)
	for {
		n, toLen, _, from, err := conn.ReadMsgUDPAddrPort(buf, to)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		text := buf[:n]
		m.mu.Lock()
		m.rings[string(text[:min(n, 64)])]++
		m.mu.Unlock()
		if bytes.HasPrefix(text, []byte("ask ")) {
			_, _, _ = conn.WriteMsgUDPAddrPort(text, to[:toLen], from) // from the address that was asked
		}
	}
}

func (m *machine) heard(text string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rings[text]
}

// frames returns what the tap has got by now.
func (m *machine) frames() []frame {
	m.Helper()
	buf := make([]byte, 1<<17)
	for {
		n, from, err := unix.Recvfrom(m.tap, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if errors.Is(err, unix.EAGAIN) {
			return m.seen
		}
		must.Succeed(m, err, "%s", m.name)
		m.seen = append(m.seen, frame{from.(*unix.SockaddrLinklayer).Pkttype, bytes.Clone(buf[:n])})
	}
}

// count returns how many frames a machine received for which is holds.
func (m *machine) count(is func(data []byte) bool) (n int) {
	m.Helper()
	for _, f := range m.frames() {
		if f.came() && is(f.data) {
			n++
		}
	}
	return n
}

// send sends a frame by eth0.
func (m *machine) send(data []byte) {
	m.Helper()
	must.Succeed(m, unix.Sendto(m.tap, data, 0, &unix.SockaddrLinklayer{Ifindex: m.index}))
}

// settle waits until all frames that are on their way have come: each machine hears one that was sent after them.
func (all *everyone) settle() {
	all.Helper()
	for round := range 2 {
		for _, from := range all.onLAN {
			mark := fmt.Sprint("mark ", round, from.name, time.Now().UnixNano())
			from.send(arpRequest(from, from, false, mark)) // which a guard lets out
			for _, to := range all.onLAN {
				if to != from {
					must.Until(all, to.name+" hears "+from.name, func() bool { return to.count(containing(mark)) > 0 })
				}
			}
		}
	}
}

func containing(text string) func([]byte) bool {
	return func(data []byte) bool { return bytes.Contains(data, []byte(text)) }
}

// question sends a text from a machine to an address until the text comes back.
func (m *machine) question(to netip.AddrPort, text string) error {
	m.Helper()
	network := map[bool]string{true: "udp4", false: "udp6"}[to.Addr().Is4()]
	var conn net.Conn
	err := m.ns.Do(func() (err error) {
		conn, err = net.Dial(network, to.String())
		return err
	})
	if err != nil {
		return err
	}
	defer conn.Close()
	must.Succeed(m, conn.SetDeadline(time.Now().Add(10*time.Second)))
	if _, err := conn.Write([]byte(text)); err != nil {
		return err
	}
	buf := make([]byte, 1<<16)
	n, err := conn.Read(buf)
	if err == nil && string(buf[:n]) != text {
		err = fmt.Errorf("%d bytes came back, of %d", n, len(text))
	}
	return err
}
