package addr

import (
	"net/netip"
	"strconv"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Address is an address on a link. Prefix and Link are enough for most uses; the
// zero value of every other field leaves the matter to the kernel.
type Address struct {
	// Prefix is the address, with its host bits, and its prefix length. An IPv4
	// address in IPv6 form (::ffff:10.0.0.1) is taken as the IPv6 address that it
	// is; see netip.Addr.Unmap.
	Prefix netip.Prefix
	// Link is the index of the link.
	Link int
	// Peer is the other end of a point-to-point link. The prefix length is then
	// that of the peer's network.
	Peer netip.Addr
	// Broadcast is IPv4 only. The kernel derives none from the prefix: the zero value sets none.
	Broadcast netip.Addr
	// Label is IPv4 only: the link's name, or the name with a colon and a suffix. Empty is the link's name.
	Label string
	// Scope is how far an IPv4 address is valid (RT_SCOPE_*): 0 is RT_SCOPE_HOST for 127.0.0.0/8, as ip(8) has it, and
	// RT_SCOPE_UNIVERSE for all others. The kernel derives the scope of an IPv6 address.
	Scope uint8
	// Flags are those of package unix (IFA_F_*), as asked for, or, in what List returns, as the kernel has them.
	// Add and Ensure send only flags that a user may set and that the family has: so a listed address can be added
	// elsewhere as it is, and both families can be given the same flags.
	//
	// IFA_F_NODAD makes an IPv6 address usable without duplicate address detection, which takes a second or two. It
	// can be bound to when Add returns; the local route, by which packets for it are taken, comes from a work
	// queue, in general within 1 ms. IFA_F_NOPREFIXROUTE keeps the kernel from adding the route to the prefix. The
	// kernel sets IFA_F_DADFAILED where another host has the address, and IFA_F_TENTATIVE until the address is
	// usable.
	Flags uint32
	// Valid is how long the address exists, and Preferred how long it may be chosen for new connections; nil is for
	// ever. The kernel counts in whole seconds: parts are rounded up. It refuses a Valid of zero.
	Valid, Preferred *time.Duration
	// Protocol is the origin of the address (IFAPROT_*, any number from 4 upwards is
	// free; 2 is a router advertisement): Linux 5.18, older kernels drop it.
	Protocol uint8
	// Metric is that of the route to the prefix which the kernel adds with the
	// address; 0 is its default (0 for IPv4, 256 for IPv6).
	Metric uint32
	// Other are attributes (IFA_*) that the kernel gave and this package has no field
	// for. They are sent as they are.
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
