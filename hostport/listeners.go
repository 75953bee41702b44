package hostport

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// Listener is a socket of the host that receives what is sent to a port. Once the port is
// published it receives nothing any more.
type Listener struct {
	Protocol nft.Protocol
	Local    netip.AddrPort // that it is bound to; an IPv4 address of an IPv6 socket is given as IPv4

	onlyIPv6 bool   // at [::], it takes no IPv4
	inode    uint32 // the number by which the processes that have it open know it
}

// Listeners lists the sockets of the host that have any of the ports, in the order of protocol,
// address and port. Those of [::1] are left out: nothing that is sent there leads to a pod. So
// are those of 127.0.0.0/8, such as systemd-resolved's at 127.0.0.53, but for 127.0.0.1 and the
// HostAddr of a port: a port on all addresses does not lead there. An impossible port is
// tombolo.ErrInvalid.
//
// TCP and SCTP count that listen, and UDP that is bound and not connected: that is all that a server looks like to
// the kernel. So a client of UDP that does not connect counts too. Those of a multicast address do not count. Where the
// kernel has no module for a protocol (tcp_diag, udp_diag, sctp_diag), and cannot load it, no socket is found. Of an
// SCTP socket with several addresses the first counts.
func Listeners(ctx context.Context, host *netns.NS, ports ...nft.Port) ([]Listener, error) {
	if ctx == nil {
		return nil, refuse("list sockets: the context is nil")
	}
	var protocols []nft.Protocol
	for _, p := range ports {
		if p.HostPort == 0 || p.Protocol != unix.IPPROTO_TCP && p.Protocol != unix.IPPROTO_UDP && p.Protocol != unix.IPPROTO_SCTP {
			return nil, refuse("list sockets: " + p.String() + ": want a port, and the protocol TCP, UDP or SCTP")
		}
		if !slices.Contains(protocols, p.Protocol) {
			protocols = append(protocols, p.Protocol)
		}
	}
	if len(protocols) == 0 {
		return nil, nil
	}
	conn, err := nl.Dial(unix.NETLINK_SOCK_DIAG, host)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	var list []Listener
	for _, protocol := range protocols {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			part, err := sockets(conn, protocol, family)
			if err != nil {
				return nil, err
			}
			list = append(list, slices.DeleteFunc(part, func(l Listener) bool {
				return !slices.ContainsFunc(ports, func(p nft.Port) bool { return l.takes(p) })
			})...)
		}
	}
	slices.SortFunc(list, func(a, b Listener) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.Local.Compare(b.Local), cmp.Compare(a.inode, b.inode))
	})
	return list, nil
}

// sockets lists those that are not connected, by struct inet_diag_req_v2 (include/uapi/linux/inet_diag.h). IPv6
// sockets may take IPv4 too.
func sockets(conn *nl.Conn, protocol nft.Protocol, family uint8) ([]Listener, error) {
	const requestLen, listening, closed = 56, 10, 7 // states of include/net/tcp_states.h: UDP is closed until it connects
	state := uint8(listening)
	if protocol == unix.IPPROTO_UDP {
		state = closed
	}
	b := make([]byte, requestLen)
	b[0], b[1] = family, byte(protocol)
	binary.NativeEndian.PutUint32(b[4:], 1<<state)
	var list []Listener
	m, err := nl.Encode(unix.SOCK_DIAG_BY_FAMILY, 0, b, nil)
	err = conn.List("list sockets of the host", m, err, func(m netlink.Message) error {
		l, err := decode(m.Data)
		if l.Protocol = protocol; err == nil && m.Data[1] == state { // SCTP lists other states too
			list = append(list, l)
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	return list, err
}

// decode reads struct inet_diag_msg and INET_DIAG_SKV6ONLY.
func decode(b []byte) (Listener, error) {
	const messageLen, portAt, addressAt, inodeAt, onlyIPv6 = 72, 4, 8, 68, 11
	if len(b) < messageLen {
		return Listener{}, fmt.Errorf("%w: a socket of %d bytes", nl.ErrMalformed, len(b))
	}
	local := netip.AddrFrom16([16]byte(b[addressAt:])).Unmap()
	if b[0] == unix.AF_INET {
		local = netip.AddrFrom4([4]byte(b[addressAt:]))
	}
	l := Listener{Local: netip.AddrPortFrom(local, binary.BigEndian.Uint16(b[portAt:])), inode: binary.NativeEndian.Uint32(b[inodeAt:])}
	err := nl.Decode(b[messageLen:], func(ad *netlink.AttributeDecoder) error {
		if ad.Type() == onlyIPv6 {
			l.onlyIPv6 = ad.Uint8() != 0
		}
		return nil
	})
	return l, err
}

// takes says whether the rules of a port take from the socket what is sent to it: an address of its own against any
// address counts, in either direction, and so does IPv4 of a socket at [::] that is not for IPv6 only.
func (l *Listener) takes(p nft.Port) bool {
	at, host := l.Local.Addr(), p.HostAddr.Unmap().WithZone("")
	switch {
	case l.Protocol != p.Protocol || l.Local.Port() != p.HostPort || at.IsMulticast() || at == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return false
	case at.IsLoopback() && at != netip.AddrFrom4([4]byte{127, 0, 0, 1}):
		return at == p.HostAddr
	case !host.IsValid():
		return true
	case host.Is4() != at.Is4():
		return host.Is4() && at.IsUnspecified() && !l.onlyIPv6
	}
	return host.IsUnspecified() || at.IsUnspecified() || host == at
}
