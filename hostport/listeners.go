package hostport

import (
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/sockdiag"
	"github.com/tombolo-cni/tombolo/nft"
)

// Listener is a socket of the host that receives what is sent to a port. Once the port is
// published it receives nothing any more.
type Listener struct {
	Protocol uint8          // as in nft.Port
	Local    netip.AddrPort // that it is bound to

	socket sockdiag.Socket
}

// String says which program has the port, as far as that can be seen from here.
func (l Listener) String() string { return l.socket.InUse() }

// NotHeldFor leaves out the sockets by which a runtime reserves a container's ports without serving them:
// those of podman's conmon and of nerdctl's port reserver.
func NotHeldFor(containerID string, listeners []Listener) []Listener {
	var sockets []sockdiag.Socket
	for _, l := range listeners {
		sockets = append(sockets, l.socket)
	}
	held := sockdiag.HeldByMonitor(sockets, containerID)
	return slices.DeleteFunc(slices.Clone(listeners), func(l Listener) bool { return held[l.socket.Inode] })
}

// Listeners lists the sockets of the host that have any of the ports, in the order of protocol,
// address and port. Those of [::1] are left out: nothing that is sent there leads to a pod. So
// are those of 127.0.0.0/8, such as systemd-resolved's at 127.0.0.53, but for 127.0.0.1 and the
// HostAddr of a port: a port on all addresses does not lead there. An impossible port is
// tombolo.ErrInvalid.
func Listeners(ctx context.Context, cfg *Config, ports ...nft.Port) ([]Listener, error) {
	if ctx == nil {
		return nil, refuse("list sockets: the context is nil")
	}
	var wants []sockdiag.Want
	for _, p := range ports {
		if p.HostPort == 0 || p.Protocol != unix.IPPROTO_TCP && p.Protocol != unix.IPPROTO_UDP && p.Protocol != unix.IPPROTO_SCTP {
			return nil, refuse("list sockets: " + p.String() + ": want a port, and the protocol TCP, UDP or SCTP")
		}
		wants = append(wants, sockdiag.Want{Proto: p.Protocol, Addr: p.HostAddr, Port: p.HostPort})
	}
	if len(wants) == 0 {
		return nil, nil
	}
	var where sockdiag.Config
	if cfg != nil {
		where.NetNS = cfg.NetNS
	}
	conn, err := sockdiag.Dial(&where)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	sockets, err := conn.Listeners(ctx, wants)
	if err != nil {
		return nil, err
	}
	var list []Listener
	for _, s := range sockets {
		if isReached(s, ports) {
			list = append(list, Listener{s.Proto, s.Local, s})
		}
	}
	return list, nil
}

// isReached says whether the rules of some port take from the socket what is sent to it.
func isReached(s sockdiag.Socket, ports []nft.Port) bool {
	at := s.Local.Addr()
	if !at.IsLoopback() || at == netip.AddrFrom4([4]byte{127, 0, 0, 1}) {
		return true
	}
	return slices.ContainsFunc(ports, func(p nft.Port) bool {
		return p.HostAddr == at && p.HostPort == s.Local.Port() && p.Protocol == s.Proto
	})
}
