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

// Listener describes a socket of the host that listens on a port. After the port is published, new connections and
// packets to the published addresses go to the pod, and no longer to the socket.
type Listener struct {
	Protocol nft.Protocol
	Local    netip.AddrPort // the address and port of the socket; ::ffff:10.0.0.1 becomes 10.0.0.1
	Link     string         // the link that it is bound to (SO_BINDTODEVICE), if any

	onlyIPv6 bool   // a socket at [::] that accepts no IPv4
	link     int    // the index of Link; 0 if it is not bound to a link
	inode    uint32 // the socket's inode number, as in /proc/PID/fd
}

// Listeners returns the sockets of the host that would lose packets to a pod if the ports were published. The result
// is sorted by protocol, address and port. A port without a HostAddr counts as published on all addresses of the host.
// If a port has HostPort 0, or another protocol than TCP, UDP and SCTP, the error matches tombolo.ErrInvalid.
//
//   - Listeners finds TCP and SCTP sockets that listen, and UDP sockets that are bound and not connected. It also
//     finds UDP clients that do not connect their socket, since the kernel does not distinguish them from servers.
//   - It finds a socket that is bound to a link if the port is published on an address of that link. A VRF device
//     usually has no address, so Listeners does not find servers that are bound to a VRF.
//   - It ignores sockets at multicast, broadcast and IPv6 link-local addresses, since packets to these addresses never
//     go to a pod.
//   - At loopback addresses, it considers only 127.0.0.1 and the HostAddr of a port. So it ignores systemd-resolved at
//     127.0.0.53.
//   - It ignores sockets at addresses of kube-ipvs0, the link with kube-proxy's service addresses, except at the
//     HostAddr of a port.
//
// If the kernel lacks the module for a protocol (tcp_diag, udp_diag, sctp_diag) and cannot load it, Listeners finds no
// sockets of that protocol. If an SCTP socket has several addresses, only the first one is considered.
func Listeners(ctx context.Context, host *netns.NS, ports ...nft.Port) ([]Listener, error) {
	requested := map[nft.Protocol]map[uint16][]netip.Addr{}
	for _, p := range ports {
		if p.HostPort == 0 || p.Protocol != unix.IPPROTO_TCP && p.Protocol != unix.IPPROTO_UDP &&
			p.Protocol != unix.IPPROTO_SCTP {
			return nil, refuse("list sockets: " + p.String() + ": want a port, and the protocol TCP, UDP or SCTP")
		}
		if requested[p.Protocol] == nil {
			requested[p.Protocol] = map[uint16][]netip.Addr{}
		}
		for i := range max(p.Count, 1) {
			requested[p.Protocol][p.HostPort+i] = append(requested[p.Protocol][p.HostPort+i], p.HostAddr)
		}
	}

	if len(requested) == 0 {
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
	for protocol, requested := range requested {
		for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
			found, err := sockets(ctx, conn, protocol, family)
			if err != nil {
				return nil, err
			}
			for _, l := range found {
				if slices.ContainsFunc(requested[l.Local.Port()],
					func(a netip.Addr) bool { return l.conflictsWith(a) && own.reaches(&l, a) }) {
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

// links caches the names and addresses of the host's links. It reads them when they are first needed.
type links struct {
	ctx       context.Context
	host      *netns.NS
	addresses []addr.Address
	names     map[int]string
	err       error
}

// read reads the links and addresses, unless an earlier call has done so. It stores an error in k.err.
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
	err = link.List(conn, "list links of the host", "", 0, func(l *link.Info) { k.names[l.Index] = l.Name })
	k.addresses, k.err = addr.On(conn).List(k.ctx, addr.Filter{})
	k.err = errors.Join(err, k.err)
}

// reaches reports whether packets to a port on the address host would reach the socket. An invalid or unspecified
// host means all addresses. The packets must come by a link that the socket listens on, to an address that Listeners
// does not ignore. Only if necessary, reaches reads the host's links and addresses, and then sets l.Link.
func (k *links) reaches(l *Listener, host netip.Addr) bool {
	const loopback = 1 // index of lo; the host reaches all of its own addresses through it
	at, all := l.Local.Addr(), !host.IsValid() || host.IsUnspecified()
	bound := l.link > loopback
	if l.link == 0 && (!all || at.IsUnspecified()) {
		return true
	}

	k.read()
	if l.Link = k.names[l.link]; !bound {
		return !all || at.IsUnspecified() || !slices.ContainsFunc(k.addresses, func(a addr.Address) bool {
			own := a.Prefix.Addr()
			return at == own && k.names[a.Link] == link.ServiceLink || at.Is4() && at != own &&
				(at == a.Broadcast || at == addr.Broadcast(a.Prefix))
		})
	}

	return slices.ContainsFunc(k.addresses, func(a addr.Address) bool {
		own := a.Prefix.Addr()
		here := &Listener{Local: netip.AddrPortFrom(own, 0)}
		return a.Link == l.link && l.conflictsWith(own) && here.conflictsWith(host) &&
			!(all && (own.IsLoopback() || k.names[a.Link] == link.ServiceLink))
	})
}

// sockets lists the sockets of a protocol and family that listen or, for UDP, are not connected. IPv6 sockets may
// accept IPv4 too. If the kernel lacks the protocol's module, the list is empty. The request is struct
// inet_diag_req_v2 (include/uapi/linux/inet_diag.h).
func sockets(ctx context.Context, conn *nl.Conn, protocol nft.Protocol, family uint8) ([]Listener, error) {
	// requestLen is the size of the request in bytes. listening and closed are states of include/net/tcp_states.h. A
	// UDP socket has the state "closed" until it is connected.
	const requestLen, listening, closed = 56, 10, 7
	state := uint8(listening)
	if protocol == unix.IPPROTO_UDP {
		state = closed
	}

	b := make([]byte, requestLen)
	b[0], b[1] = family, byte(protocol)
	binary.NativeEndian.PutUint32(b[4:], 1<<state)
	var list []Listener
	m, err := nl.Encode(unix.SOCK_DIAG_BY_FAMILY, 0, b, nil)
	err = conn.List(ctx, "list sockets of the host", m, err, func(m netlink.Message) error {
		l, err := decode(m.Data)
		if l.Protocol = protocol; err == nil && m.Data[1] == state { // for SCTP the kernel lists other states too
			list = append(list, l)
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}

	return list, err
}

// decode parses struct inet_diag_msg and the attribute INET_DIAG_SKV6ONLY.
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
	isOnly := nl.Find(b[messageLen:], onlyIPv6)
	l.onlyIPv6 = len(isOnly) == 1 && isOnly[0] != 0
	return l, nil
}

// conflictsWith reports whether a port published on the address host would take packets from the socket. An invalid
// host means all addresses, and an unspecified one all addresses of its family. conflictsWith considers only the
// socket's own address, and not its link.
func (l *Listener) conflictsWith(host netip.Addr) bool {
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
