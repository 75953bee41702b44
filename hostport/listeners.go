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

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// Listener is a socket of the host that receives what is sent to a port. Once the port is
// published it receives nothing any more.
type Listener struct {
	Protocol nft.Protocol
	Local    netip.AddrPort // that it is bound to; an IPv4 address of an IPv6 socket is given as IPv4
	Link     string         // the link that it is bound to (SO_BINDTODEVICE), if it is one

	onlyIPv6 bool   // at [::], it takes no IPv4
	link     int    // the index of Link, or of lo; 0 is none
	inode    uint32 // the number by which the processes that have it open know it
}

// Listeners lists the sockets of the host that would lose packets to any of the ports, in the order of protocol,
// address and port. A port without a HostAddr is one on all addresses of the host. An impossible port is
// tombolo.ErrInvalid.
//
//   - TCP and SCTP sockets count that listen, and UDP sockets that are bound and not connected: that is all that a
//     server looks like to the kernel. So a client of UDP that does not connect counts too.
//   - A socket that is bound to a link counts if that link has an address of the port's. A server in a VRF has none.
//   - Sockets at multicast, broadcast and IPv6 link-local addresses and at [::1] do not count: nothing that is sent
//     there leads to a pod. Nor do those in 127.0.0.0/8, such as systemd-resolved's at 127.0.0.53, but for 127.0.0.1
//     and the HostAddr of a port. Nor do those at addresses of kube-ipvs0, but for the HostAddr of a port.
//
// Where the kernel has no module for a protocol (tcp_diag, udp_diag, sctp_diag), and cannot load it, no socket is found.
// Of an SCTP socket with several addresses the first counts.
func Listeners(ctx context.Context, host *netns.NS, ports ...nft.Port) ([]Listener, error) {
	wanted := map[nft.Protocol]map[uint16][]netip.Addr{}
	for _, p := range ports {
		if p.HostPort == 0 || p.Protocol != unix.IPPROTO_TCP && p.Protocol != unix.IPPROTO_UDP && p.Protocol != unix.IPPROTO_SCTP {
			return nil, refuse("list sockets: " + p.String() + ": want a port, and the protocol TCP, UDP or SCTP")
		}
		if wanted[p.Protocol] == nil {
			wanted[p.Protocol] = map[uint16][]netip.Addr{}
		}
		for i := range max(p.Count, 1) {
			wanted[p.Protocol][p.HostPort+i] = append(wanted[p.Protocol][p.HostPort+i], p.HostAddr)
		}
	}
	if len(wanted) == 0 {
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

	own := &links{ctx: ctx, host: host}
	var list []Listener
	for protocol, wanted := range wanted {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			found, err := sockets(conn, protocol, family)
			if err != nil {
				return nil, err
			}
			for _, l := range found {
				if slices.ContainsFunc(wanted[l.Local.Port()], func(a netip.Addr) bool { return l.takes(a) && own.lead(&l, a) }) {
					list = append(list, l)
				}
			}
		}
	}
	slices.SortFunc(list, func(a, b Listener) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.Local.Compare(b.Local), cmp.Compare(a.inode, b.inode))
	})
	return list, own.err
}

// links knows the host's links and their addresses, once it was asked for them.
type links struct {
	ctx       context.Context
	host      *netns.NS
	addresses []addr.Address
	names     map[int]string
	err       error
}

func (k *links) read() {
	if k.names != nil || k.err != nil {
		return
	}
	conn, err := nl.Dial(unix.NETLINK_ROUTE, k.host)
	if err != nil {
		k.err = err
		return
	}
	defer conn.Close()
	k.names = map[int]string{}
	err = link.List(conn, "list links of the host", "", 0, func(l *link.Link) { k.names[l.Index] = l.Name })
	k.addresses, k.err = addr.On(conn).List(k.ctx, addr.Filter{})
	k.err = errors.Join(err, k.err)
}

// lead reports whether packets to a port on a host address, or on all, reach the socket by a link that the socket
// hears and at an address that is not left alone. It asks the kernel only for a socket that is bound to a link, and for
// one at a single address against a port on all.
func (k *links) lead(l *Listener, host netip.Addr) bool {
	const loopback = 1 // the index of lo: by it the host calls all of its addresses
	at, all := l.Local.Addr(), !host.IsValid() || host.IsUnspecified()
	bound := l.link > loopback
	if !bound && (!all || at.IsUnspecified()) {
		return true
	}
	k.read()
	if l.Link = k.names[l.link]; !bound {
		return !slices.ContainsFunc(k.addresses, func(a addr.Address) bool {
			own := a.Prefix.Addr()
			return at == own && k.names[a.Link] == link.ServiceLink || at.Is4() && at != own && (at == a.Broadcast || at == addr.Broadcast(a.Prefix))
		})
	}
	return slices.ContainsFunc(k.addresses, func(a addr.Address) bool {
		own := a.Prefix.Addr()
		here := &Listener{Local: netip.AddrPortFrom(own, 0)}
		return a.Link == l.link && l.takes(own) && here.takes(host) && !(all && (own.IsLoopback() || k.names[a.Link] == link.ServiceLink))
	})
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
	const messageLen, portAt, addressAt, linkAt, inodeAt, onlyIPv6 = 72, 4, 8, 40, 68, 11
	if len(b) < messageLen {
		return Listener{}, fmt.Errorf("%w: a socket of %d bytes", nl.ErrMalformed, len(b))
	}
	local := netip.AddrFrom16([16]byte(b[addressAt:])).Unmap()
	if b[0] == unix.AF_INET {
		local = netip.AddrFrom4([4]byte(b[addressAt:]))
	}
	l := Listener{
		Local: netip.AddrPortFrom(local, binary.BigEndian.Uint16(b[portAt:])),
		link:  int(binary.NativeEndian.Uint32(b[linkAt:])), inode: binary.NativeEndian.Uint32(b[inodeAt:]),
	}
	err := nl.Decode(b[messageLen:], func(ad *netlink.AttributeDecoder) error {
		if ad.Type() == onlyIPv6 {
			l.onlyIPv6 = ad.Uint8() != 0
		}
		return nil
	})
	return l, err
}

// takes reports whether the rules of a port on a host address, or on all if that is not valid, take packets from the
// socket, as far as its own address tells.
func (l *Listener) takes(host netip.Addr) bool {
	at, host := l.Local.Addr(), host.Unmap().WithZone("")
	switch {
	case at.IsMulticast(), at == netip.AddrFrom4([4]byte{255, 255, 255, 255}), at.Is6() && at.IsLinkLocalUnicast():
		return false
	case at.IsLoopback() && at != netip.AddrFrom4([4]byte{127, 0, 0, 1}):
		return at == host
	case !host.IsValid():
		return true
	case host.Is4() != at.Is4():
		return host.Is4() && at.IsUnspecified() && !l.onlyIPv6
	}
	return host.IsUnspecified() || at.IsUnspecified() || host == at
}
