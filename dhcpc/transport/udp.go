package transport

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// DialUDP opens a UDP socket at port 68 of every address, bound to the interface. It supports no ARP, and received
// packets have neither MAC addresses nor a destination. It sends along the kernel's routes, from the packet's source
// address. Before the interface has an address, it receives only broadcasts. The kernel drops these unless rp_filter is
// 0 in the namespace, in `all` and for the interface. If several such sockets are open on one link, a unicast answer
// reaches only one of them, maybe the wrong one: see Dialer.
//
// If another program in the namespace uses the port exclusively, the error matches unix.EADDRINUSE. If Config.MAC is
// set, a missing link shows only at the first Send, which fails with unix.ENODEV or ENETUNREACH.
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

// The ports of DHCPv6, and the multicast group of all servers and relays on a link (RFC 8415, sections 7.1 and 7.2).
const (
	clientPort6 = 546
	serverPort6 = 547
	group6      = "ff02::1:2"
)

// DialUDP6 opens a UDP socket at port 546 of every IPv6 address, bound to the interface. It ignores Config.MAC and
// Config.ARP. If another program in the namespace uses the port exclusively, the error matches unix.EADDRINUSE.
//
// The socket sends from the interface's link-local address. For the second or two of that address's duplicate address
// detection, Send fails with unix.EADDRNOTAVAIL.
func DialUDP6(cfg *Config) (dhcpc.Transport[[]byte], error) {
	if err := cfg.checkLink(); err != nil {
		return nil, err
	}

	conn, err := cfg.listen(unix.AF_INET6, clientPort6, func(fd int) error {
		return setOptions(fd,
			option{"bind to link", unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, cfg.Link},
			option{"share the port", unix.SOL_SOCKET, unix.SO_REUSEADDR, 1},
			option{"leave IPv4 out", unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
			option{"send to the group on link", unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, cfg.Link})
	})
	if err != nil {
		return nil, err
	}

	// The socket is bound to the link, so the group's address needs no zone.
	group := netip.AddrPortFrom(netip.MustParseAddr(group6), serverPort6)
	read := func(b []byte, _ net.Addr) ([]byte, error) { return append([]byte{}, b...), nil }
	return newSocket(conn, read, func(message []byte) error {
		_, err := conn.WriteToUDPAddrPort(message, group)
		return err
	}), nil
}

// Send6 sends one message to all servers and relays, from a port chosen by the kernel, and receives nothing. It is
// for a RELEASE that package dhcp6 encoded, in a program that does not link that package.
func Send6(cfg *Config, message []byte) error {
	if len(message) > 0xffff-udpHeaderLen {
		return argument(fmt.Sprintf("message of %d bytes: too long for a packet", len(message)))
	}

	fd, err := cfg.socket(unix.AF_INET6)
	if err != nil {
		return err
	}

	defer unix.Close(fd)
	err = setOptions(fd, option{"bind to link", unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, cfg.Link},
		option{"send to the group on link", unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_IF, cfg.Link})
	if err == nil {
		group := netip.MustParseAddr(group6)
		err = unix.Sendto(fd, message, unix.MSG_DONTWAIT,
			&unix.SockaddrInet6{Addr: group.As16(), Port: serverPort6, ZoneId: uint32(cfg.Link)})
	}

	if err != nil {
		return &tombolo.OpError{Op: "send to DHCPv6 servers on", Object: cfg.object(), Err: err}
	}
	return nil
}
