package sockdiag

import (
	"fmt"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// Want is a port that is to be published.
type Want struct {
	// Proto is unix.IPPROTO_TCP, _UDP or _SCTP.
	Proto uint8
	// Addr is the host's address that the port is wanted of. 0.0.0.0 is every IPv4
	// address and :: every IPv6 address; an invalid one is both.
	Addr netip.Addr
	// Port is not 0.
	Port uint16
}

// String gives address, port and protocol, with * for the addresses of both families.
func (w Want) String() string {
	if !w.Addr.IsValid() {
		return fmt.Sprintf("*:%d/%s", w.Port, protoName(w.Proto))
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(w.Addr, w.Port), protoName(w.Proto))
}

func (w Want) check() error {
	switch w.Proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
	default:
		return fmt.Errorf("%s: the protocol must be one of TCP, UDP and SCTP", w)
	}
	if w.Port == 0 {
		return fmt.Errorf("%s: there is no port 0", w)
	}
	return nil
}

// Socket is a socket that receives what is sent to a port.
type Socket struct {
	// Proto is unix.IPPROTO_TCP, _UDP or _SCTP.
	Proto uint8
	// Local is the address and port that it is bound to. An IPv4 address of an IPv6
	// socket (::ffff:127.0.0.1) is given as IPv4.
	Local netip.AddrPort
	// V6Only says of one at [::] that it takes no IPv4.
	V6Only bool
	// Link is the index of the link that it is bound to (SO_BINDTODEVICE), 0 for none.
	// It hears nothing that comes in elsewhere.
	Link int
	// Inode is the number by which the processes that have it open know it. 0 where
	// none can.
	Inode uint32
	// UID is the user that created it.
	UID uint32
}

// Network is "tcp", "udp" or "sctp".
func (s Socket) Network() string { return protoName(s.Proto) }

// String gives address, port and protocol.
func (s Socket) String() string { return s.Local.String() + "/" + protoName(s.Proto) }

// Takes says whether the socket receives some of what is sent to a wanted port: an
// address of its own against any address counts, in either direction, and so does
// IPv4 of a socket at [::] that is not for IPv6 only.
func (s Socket) Takes(w Want) bool {
	local := s.Local.Addr()
	if s.Proto != w.Proto || s.Local.Port() != w.Port || isForMany(local) {
		return false
	}
	if !w.Addr.IsValid() {
		return true
	}
	want := w.Addr.Unmap().WithZone("")
	if want.Is4() != local.Is4() {
		return want.Is4() && local.IsUnspecified() && !s.V6Only
	}
	return want.IsUnspecified() || local.IsUnspecified() || want == local
}

// isForMany says that an address is never that of one host.
func isForMany(a netip.Addr) bool {
	return a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

func protoName(p uint8) string {
	switch p {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	}
	return strconv.Itoa(int(p))
}
