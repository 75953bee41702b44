package addr

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Address is an address on a link. Most uses need only Prefix and Link. A zero value of any other field leaves the
// choice to the kernel.
type Address struct {
	// Prefix is the address, with its host bits, and its prefix length. An IPv4 address in IPv6 form
	// (::ffff:10.0.0.1) counts as an IPv6 address; see netip.Addr.Unmap.
	Prefix netip.Prefix
	// Link is the index of the link.
	Link int
	// Peer is the other end of a point-to-point link. The prefix length then belongs to the peer's network.
	Peer netip.Addr
	// Broadcast is for IPv4 only. The kernel derives none from the prefix, so a zero value sets none.
	Broadcast netip.Addr
	// Label is for IPv4 only. It is the link's name, optionally with a colon and a suffix. Empty means the link's
	// name.
	Label string
	// Scope is the scope of an IPv4 address (RT_SCOPE_*). 0 means RT_SCOPE_HOST for 127.0.0.0/8, as in ip(8), and
	// RT_SCOPE_UNIVERSE for all others. The kernel derives the scope of an IPv6 address.
	Scope uint8
	// Flags are IFA_F_* of package unix: in a request the requested flags, in the results of List the kernel's. Add
	// and Ensure send only flags that a user may set and that the address family has. So a listed address can be
	// added elsewhere unchanged, and addresses of both families can have the same Flags.
	//
	// IFA_F_NODAD makes an IPv6 address usable without duplicate address detection, which takes a second or two. A
	// program can bind to such an address when Add returns. The kernel adds the local route for incoming packets from
	// a work queue, in general within 1 ms. IFA_F_NOPREFIXROUTE keeps the kernel from adding the route to the prefix.
	// The kernel sets IFA_F_DADFAILED if another host has the address, and IFA_F_TENTATIVE until the address is
	// usable.
	Flags uint32
	// Valid is how long the address exists, and Preferred how long it may be chosen for new connections; nil means
	// for ever. The kernel counts in whole seconds, so fractions are rounded up. It refuses a Valid of zero. For an
	// IPv4 address without Valid, it ignores a Preferred other than zero.
	Valid, Preferred *time.Duration
	// Protocol is the origin of the address (IFAPROT_*). Numbers from 4 upwards are free; 2 is a router
	// advertisement. Kernels before Linux 5.18 ignore the field.
	Protocol uint8
	// Metric is the metric of the connected route that the kernel adds together with the address. 0 is the kernel's
	// default (0 for IPv4, 256 for IPv6).
	Metric uint32
	// Other holds attributes (IFA_*) that this package has no field for. Requests contain them unchanged.
	Other []netlink.Attribute
}

// NoDAD is IFA_F_NODAD, for programs that need nothing else from package unix.
const NoDAD uint32 = unix.IFA_F_NODAD

const (
	askable4 = unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_MCAUTOJOIN
	askable6 = askable4 | unix.IFA_F_NODAD | unix.IFA_F_OPTIMISTIC | unix.IFA_F_HOMEADDRESS | unix.IFA_F_MANAGETEMPADDR
)

// String returns the address's name for errors, such as "10.1.0.1/24 on link 5".
func (a Address) String() string {
	s := a.Prefix.String()
	if a.Peer.IsValid() {
		s = a.Prefix.Addr().String() + " peer " + netip.PrefixFrom(a.Peer, a.Prefix.Bits()).String()
	}
	return s + " on link " + strconv.Itoa(a.Link)
}

func (a *Address) is4() bool { return a.Prefix.Addr().Is4() }

func (a *Address) family() uint8 { return nl.FamilyOf(a.Prefix.Addr()) }

// scope returns the scope to send. An address in 127.0.0.0/8 gets scope host by default. With global scope, links
// without an address would use it as their source, and the kernel refuses such packets.
func (a *Address) scope() uint8 {
	if a.Scope == unix.RT_SCOPE_UNIVERSE && a.is4() && a.Prefix.Addr().IsLoopback() {
		return unix.RT_SCOPE_HOST
	}
	return a.Scope
}

// requestFlags returns the flags that a request for the address's family may contain.
func (a *Address) requestFlags() uint32 {
	if a.is4() {
		return a.Flags & askable4
	}
	return a.Flags & askable6
}

// Broadcast returns the broadcast address of an IPv4 network, which is its last address. It returns the zero Addr for
// IPv6, and for networks without a broadcast address (/31 and /32, RFC 3021).
func Broadcast(p netip.Prefix) netip.Addr {
	if !p.Addr().Is4() || p.Bits() < 0 || p.Bits() > 30 {
		return netip.Addr{}
	}
	b := p.Masked().Addr().As4()
	for i := range 32 - p.Bits() {
		b[3-i/8] |= 1 << (i % 8)
	}
	return netip.AddrFrom4(b)
}

// LinkLocal returns the address in fe80::/64 that the kernel makes of a MAC of 6 bytes: it ends in the modified EUI-64
// (RFC 4291, appendix A), as addresses of SLAAC do. If the MAC has another length, it returns the zero Addr.
func LinkLocal(mac net.HardwareAddr) netip.Addr {
	if len(mac) != 6 {
		return netip.Addr{}
	}
	return ident.LinkLocal(mac)
}
