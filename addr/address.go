package addr

import (
	"net/netip"
	"strconv"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Address is an address on a link. Prefix and Link are enough for most uses. The zero value of another field means the
// kernel's default for a new address. Conn.Ensure gives an address that default back, except that it leaves Broadcast,
// Label and Protocol.
type Address struct {
	// Prefix is the address, with its host bits, and its prefix length. An IPv4 address in IPv6 form
	// (::ffff:10.0.0.1) is an IPv6 address here; see netip.Addr.Unmap.
	Prefix netip.Prefix
	// Link is the index of the link.
	Link int
	// Peer is the other end of a point-to-point link. The prefix length is then the length of the peer's network.
	Peer netip.Addr
	// Broadcast is for IPv4 only. Zero is none: the kernel derives none from the prefix.
	Broadcast netip.Addr
	// Label is for IPv4 only: the link's name, or the name with a colon and a suffix. Empty is the link's name.
	Label string
	// Scope is how far an IPv4 address is valid (RT_SCOPE_*): 0 is RT_SCOPE_HOST for 127.0.0.0/8, as ip(8) has it, and
	// RT_SCOPE_UNIVERSE for all others. The kernel derives the scope of an IPv6 address.
	Scope uint8
	// Flags are flags of package unix (IFA_F_*). List returns all flags that the kernel has. Add and Ensure send only
	// those that a user may set and that the family has, so a listed address can be added elsewhere as it is.
	//
	// IFA_F_NODAD makes an IPv6 address usable without duplicate address detection, which takes a second or two. A
	// program can bind to the address when Add returns. Packets for it are received once a worker of the kernel has
	// made its local route, in general within 1 ms. IFA_F_NOPREFIXROUTE keeps the kernel from adding the route to the
	// prefix. The kernel sets IFA_F_DADFAILED if another host has the address, and IFA_F_TENTATIVE until the address
	// is usable.
	Flags uint32
	// Valid is how long the address exists, and Preferred how long it may be chosen for new connections; nil is for
	// ever. The kernel counts whole seconds, and parts are rounded up. It refuses a Valid of zero.
	Valid, Preferred *time.Duration
	// Protocol is the origin of the address (IFAPROT_*): 2 is a router advertisement, and any number from 4 upwards is
	// free. Kernels before Linux 5.18 drop it.
	Protocol uint8
	// Metric is the metric of the connected route that the kernel adds together with the address; 0 is the kernel's
	// default: 0 for IPv4, 256 for IPv6.
	Metric uint32
	// Other are attributes (IFA_*) without a field here. List returns them, and they are sent as they are.
	Other []netlink.Attribute
}

// NoDAD is IFA_F_NODAD, for programs that need nothing else of package unix.
const NoDAD uint32 = unix.IFA_F_NODAD

const (
	askable4 = unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_MCAUTOJOIN
	askable6 = askable4 | unix.IFA_F_NODAD | unix.IFA_F_OPTIMISTIC | unix.IFA_F_HOMEADDRESS | unix.IFA_F_MANAGETEMPADDR
)

// String names the address as errors do: "10.1.0.1/24 on link 5".
func (a Address) String() string {
	s := a.Prefix.String()
	if a.Peer.IsValid() {
		s = a.Prefix.Addr().String() + " peer " + netip.PrefixFrom(a.Peer, a.Prefix.Bits()).String()
	}
	return s + " on link " + strconv.Itoa(a.Link)
}

func (a *Address) is4() bool { return a.Prefix.Addr().Is4() }

func (a *Address) family() uint8 { return nl.FamilyOf(a.Prefix.Addr()) }

// scope returns the scope to send. A global address of 127.0.0.0/8 would become the source of what links without an
// address send, which the kernel refuses.
func (a *Address) scope() uint8 {
	if a.Scope == unix.RT_SCOPE_UNIVERSE && a.is4() && a.Prefix.Addr().IsLoopback() {
		return unix.RT_SCOPE_HOST
	}
	return a.Scope
}

// askedFlags are those that may be sent.
func (a *Address) askedFlags() uint32 {
	if a.is4() {
		return a.Flags & askable4
	}
	return a.Flags & askable6
}

// Broadcast is the last address of an IPv4 network, its broadcast address; the zero Addr for IPv6
// and for networks that have none (/31 and /32, RFC 3021).
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
