package transport

import (
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
)

// The ports of DHCPv6, and the multicast group of all servers and relays on a link (RFC 8415, sections 7.1 and 7.2).
const (
	clientPort6 = 546
	serverPort6 = 547
	group6      = "ff02::1:2"
)

// DialUDP6 opens a UDP socket at port 546 of every IPv6 address, bound to the interface. It ignores Config.MAC and
// ARP. If another program in the namespace uses the port exclusively, the error matches unix.EADDRINUSE.
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
	if err := cfg.checkLink(); err != nil {
		return err
	}
	if len(message) > 0xffff-udpHeaderLen {
		return argument(fmt.Sprintf("message of %d bytes: too long for a packet", len(message)))
	}

	fd, err := cfg.socket(unix.AF_INET6, unix.SOCK_DGRAM)
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
