package transport

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// DialUDP opens a UDP socket at port 68 of every address, bound to the interface. It has no MAC addresses and no ARP.
// It sends along the kernel's routes, from the packet's source address. Before the interface has an address, it
// receives only broadcasts. The kernel drops these unless rp_filter is 0 in the namespace, in `all` and for the
// interface. If several such sockets are open on one link, a unicast answer reaches only one of them, maybe the wrong
// one: see Dialer.
//
// If another program in the namespace uses the port exclusively, the error matches unix.EADDRINUSE. A missing link
// shows only at the first Send, which fails with unix.ENODEV or ENETUNREACH.
func DialUDP(cfg *Config) (dhcpc.Transport[*dhcpc.Packet], error) {
	c, err := cfg.complete()
	if err != nil {
		return nil, err
	}

	filter, err := bpf.Assemble(datagrams(c.MAC))
	if err != nil {
		return nil, fmt.Errorf("assemble filter: %w", err)
	}

	conn, err := c.listen(unix.AF_INET, dhcpv4.ClientPort, func(fd int) error {
		if err := nl.AttachFilter(fd, filter); err != nil {
			return err
		}
		return setOptions(fd,
			option{"bind to link", unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, c.Link},
			option{"share the port", unix.SOL_SOCKET, unix.SO_REUSEADDR, 1},
			option{"allow broadcasts", unix.SOL_SOCKET, unix.SO_BROADCAST, 1})
	})
	if err != nil {
		return nil, err
	}

	return newSocket(conn, readDatagram, func(p *dhcpc.Packet) error { return sendDatagram(conn, p) }), nil
}

func readDatagram(b []byte, from net.Addr) (*dhcpc.Packet, error) {
	src := from.(*net.UDPAddr).AddrPort()
	return &dhcpc.Packet{Src: netip.AddrPortFrom(src.Addr().Unmap(), src.Port()), Payload: bytes.Clone(b)}, nil
}

func sendDatagram(conn *net.UDPConn, p *dhcpc.Packet) error {
	if p == nil {
		return argument("no packet")
	}

	if p.ARP != nil {
		return fmt.Errorf("send ARP packet from a UDP socket: %w", unix.EOPNOTSUPP)
	}

	var oob []byte
	if src := p.Src.Addr(); src.Is4() && !src.IsUnspecified() {
		// Set the source address. Otherwise the kernel might choose another address of the interface.
		oob = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: src.As4()})
	}

	_, _, err := conn.WriteMsgUDPAddrPort(p.Payload, oob, p.Dst)
	return err
}

// listen opens a UDP socket by system calls, and calls prepare before it binds the socket. net.ListenConfig would
// link Go's resolver into every program and so slow down its start.
func (c *Config) listen(family, port int, prepare func(fd int) error) (*net.UDPConn, error) {
	var own unix.Sockaddr = &unix.SockaddrInet4{Port: port}
	if family == unix.AF_INET6 {
		own = &unix.SockaddrInet6{Port: port}
	}

	var conn net.PacketConn
	err := c.do(func() error {
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("socket: %w", err)
		}

		file := os.NewFile(uintptr(fd), "udp")
		defer file.Close()
		if err := prepare(fd); err != nil {
			return err
		}

		if err := unix.Bind(fd, own); err != nil {
			return fmt.Errorf("bind to port %d: %w", port, err)
		}

		conn, err = net.FilePacketConn(file) // conn has a duplicate of the descriptor
		return err
	})
	if err != nil {
		return nil, &tombolo.OpError{Op: "open UDP socket on", Object: c.object(), Err: err}
	}

	return conn.(*net.UDPConn), nil
}

// option is a socket option for setsockopt(2), and the name of the operation for errors.
type option struct {
	what               string
	level, name, value int
}

func setOptions(fd int, options ...option) error {
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("%s: %w", o.what, err)
		}
	}
	return nil
}
