package icmp

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/netns"
)

// Listener hears the echo requests that reach a namespace, of both families,
// beside the kernel, which answers them.
type Listener struct {
	fd4, fd6 int
}

const none = -1 // for fd6: the kernel has no IPv6

// Listen begins to hear: what comes in from now on is kept, as far as the socket's
// buffer goes (net.core.rmem_default), until Sources takes it.
func Listen(ns *netns.NS) (*Listener, error) {
	fd4, err := open(ns, true)
	if err != nil {
		return nil, fmt.Errorf("listen for ICMP: %w", err)
	}
	fd6, err := open(ns, false)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return &Listener{fd4: fd4, fd6: none}, nil
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen for ICMPv6: %w", err), unix.Close(fd4))
	}
	return &Listener{fd4: fd4, fd6: fd6}, nil
}

// Close ends it. Call it once.
func (l *Listener) Close() error {
	if l.fd6 == none {
		return unix.Close(l.fd4)
	}
	return errors.Join(unix.Close(l.fd4), unix.Close(l.fd6))
}

// Sources gives the source addresses of the requests that came in since Listen or
// the last call, IPv4 first, each family in the order of arrival. It does not wait:
// a request that has been answered has been heard.
func (l *Listener) Sources() ([]netip.Addr, error) {
	v4, err4 := sources(l.fd4, true)
	if l.fd6 == none {
		return v4, err4
	}
	v6, err6 := sources(l.fd6, false)
	return append(v4, v6...), errors.Join(err4, err6)
}

// sources empties a socket.
func sources(fd int, is4 bool) ([]netip.Addr, error) {
	var list []netip.Addr
	buf := make([]byte, packetMax)
	for {
		n, from, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
		switch {
		case err == unix.EAGAIN:
			return list, nil
		case err == unix.EINTR:
			continue
		case err != nil:
			return list, fmt.Errorf("receive from raw socket: %w", err)
		}
		if m, ok := decode(buf[:n], is4); ok && m.kind == request {
			list = append(list, address(from))
		}
	}
}

// address is without a zone: the link is of no interest here.
func address(from unix.Sockaddr) netip.Addr {
	switch a := from.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(a.Addr)
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(a.Addr)
	}
	return netip.Addr{}
}
