package addr

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Address is an IP address on a link. Most callers set only Prefix and Link. The other fields are optional.
type Address struct {
	// Prefix is the address, with its host bits, and its prefix length. An IPv4 address in IPv6 form
	// (::ffff:10.0.0.1) counts as an IPv6 address; see netip.Addr.Unmap.
	Prefix netip.Prefix
	// Link is the index of the link.
	Link int
	// Peer is the address of the other end of a point-to-point link. The prefix length then applies to Peer.
	Peer netip.Addr
	// Broadcast is the broadcast address, for IPv4 only. Without it the address gets none, since the kernel does not
	// derive one from the prefix.
	Broadcast netip.Addr
	// Label is the label of an IPv4 address: the link's name, optionally with a colon and a suffix. Empty means the
	// link's name.
	Label string
	// Scope is the scope of an IPv4 address (RT_SCOPE_*). 0 means RT_SCOPE_HOST for 127.0.0.0/8, as in ip(8), and
	// RT_SCOPE_UNIVERSE for all others. The kernel derives the scope of an IPv6 address.
	Scope uint8
	// Flags are IFA_F_* of package unix: in a request the requested flags, in the results of List the kernel's.
	// Requests contain only flags that a user may set and that the address family has. So a listed address can be added
	// elsewhere unchanged, and addresses of both families can have the same Flags.
	//
	// IFA_F_NODAD makes an IPv6 address usable without duplicate address detection, which takes a second or two. A
	// program can bind to such an address when Add returns. The kernel adds the local route for incoming packets from a
	// work queue, in general within 1 ms. IFA_F_NOPREFIXROUTE keeps the kernel from adding the route to the prefix. The
	// kernel sets IFA_F_DADFAILED if another host has the address, and IFA_F_TENTATIVE until duplicate address
	// detection has finished.
	Flags uint32
	// Valid is how long the address exists, and Preferred how long it may be chosen for new connections; nil means for
	// ever. A Preferred that exceeds Valid is sent as Valid. The kernel counts in whole seconds, so fractions are
	// rounded up. The kernel refuses a Valid of zero. For an IPv4 address without Valid, it ignores a Preferred other
	// than zero.
	Valid, Preferred *time.Duration
	// Protocol is the origin of the address (IFAPROT_*). Numbers from 4 upwards are free; 2 is a router
	// advertisement. Kernels before Linux 5.18 ignore the field.
	Protocol uint8
	// Metric is the metric of the connected route that the kernel adds together with the address. 0 is the kernel's
	// default (0 for IPv4, 256 for IPv6).
	Metric uint32
	// Other holds attributes (IFA_*) that this package has no field for. Requests that add an address contain them
	// unchanged.
	Other []netlink.Attribute
}

// NoDAD is the flag IFA_F_NODAD, which turns duplicate address detection off. Programs can use it without package unix.
const NoDAD uint32 = unix.IFA_F_NODAD

const (
	askable4 = unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_MCAUTOJOIN
	askable6 = askable4 | unix.IFA_F_NODAD | unix.IFA_F_OPTIMISTIC | unix.IFA_F_HOMEADDRESS | unix.IFA_F_MANAGETEMPADDR
)

// String describes the address for error messages, for example "10.1.0.1/24 on link 5".
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

// requestFlags returns the flags in a.Flags that a request for the address's family may contain.
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

const ifaProto = 11 // IFA_PROTO, Linux 5.18

const infiniteLifetime = 0xffffffff // INFINITY_LIFE_TIME, in seconds

const (
	errPrefix = nl.Invalid("address and prefix length do not fit together")
	errPeer   = nl.Invalid("the peer is of another family than the address")
)

// Message returns a request about the address, for callers that send several in one datagram. For unix.RTM_NEWADDR,
// pass the flags of Conn.Add (netlink.Create and Excl) or of Conn.Replace (Create and Replace). For unix.RTM_DELADDR,
// pass no flags, as in Conn.Remove.
func (a Address) Message(typ netlink.HeaderType, flags netlink.HeaderFlags) (netlink.Message, error) {
	if typ != unix.RTM_DELADDR {
		return a.newMessage(flags)
	}
	body, err := a.identity()
	if err != nil {
		return netlink.Message{}, err
	}
	return nl.Marshal(unix.RTM_DELADDR, 0, body.MarshalBinary, a.putMapped)
}

// identity returns an address message with only the attributes that identify the address on its link. For IPv4-mapped
// IPv6 addresses (isMapped), the message has no attributes, and the caller must add those of putMapped.
func (a *Address) identity() (*rtnetlink.AddressMessage, error) {
	if !a.Prefix.IsValid() {
		return nil, errPrefix
	}

	if a.Peer.IsValid() && a.Peer.Is4() != a.is4() {
		return nil, errPeer
	}

	body := header(a.family(), uint8(a.Prefix.Bits()), a.scope(), a.Link)
	if a.isMapped() {
		return body, nil
	}

	body.Attributes = &rtnetlink.AddressAttributes{Address: a.peer().AsSlice()}
	if a.is4() || a.Peer.IsValid() {
		// For IPv6, send IFA_LOCAL only with a peer: if a request has IFA_LOCAL, the kernel takes IFA_ADDRESS for the
		// peer.
		body.Attributes.Local = a.Prefix.Addr().AsSlice()
	}

	return body, nil
}

// isMapped reports whether the address or its peer is an IPv4-mapped IPv6 address. Package rtnetlink would shorten such
// an address to 4 bytes, which the kernel refuses.
func (a *Address) isMapped() bool { return a.Prefix.Addr().Is4In6() || a.Peer.Is4In6() }

// putMapped writes address and peer if isMapped is true, and nothing otherwise.
func (a *Address) putMapped(ae *netlink.AttributeEncoder) {
	if !a.isMapped() {
		return
	}
	nl.PutAddr(ae, unix.IFA_ADDRESS, a.peer())
	if a.Peer.IsValid() {
		nl.PutAddr(ae, unix.IFA_LOCAL, a.Prefix.Addr())
	}
}

// header returns an address message without attributes.
func header(family, bits, scope uint8, link int) *rtnetlink.AddressMessage {
	return &rtnetlink.AddressMessage{Family: family, PrefixLength: bits, Scope: scope, Index: nl.Index(link)}
}

func (a *Address) newMessage(flags netlink.HeaderFlags) (netlink.Message, error) {
	body, err := a.identity()
	if err != nil {
		return netlink.Message{}, err
	}

	if a.is4() {
		if a.Broadcast.IsValid() {
			body.Attributes.Broadcast = a.Broadcast.AsSlice()
		}
		body.Attributes.Label = a.Label
	}

	// The message's header has room for only eight flags, so the flags are sent as an attribute.
	if body.Attributes != nil {
		body.Attributes.Flags = uint32(a.requestFlags())
		body.Attributes.Priority = a.Metric
	}

	return nl.Marshal(unix.RTM_NEWADDR, flags, body.MarshalBinary, func(ae *netlink.AttributeEncoder) {
		a.putMapped(ae)
		if body.Attributes == nil {
			ae.Uint32(unix.IFA_FLAGS, uint32(a.requestFlags()))
			if a.Metric != 0 {
				ae.Uint32(unix.IFA_RT_PRIORITY, a.Metric)
			}
		}

		if a.Valid != nil || a.Preferred != nil {
			var ci [unix.SizeofIfaCacheinfo]byte
			binary.NativeEndian.PutUint32(ci[0:], seconds(a.Preferred, a.Valid))
			binary.NativeEndian.PutUint32(ci[4:], seconds(a.Valid, nil))
			ae.Bytes(unix.IFA_CACHEINFO, ci[:])
		}

		if a.Protocol != 0 {
			ae.Uint8(ifaProto, a.Protocol)
		}

		nl.PutOther(ae, a.Other)
	})
}

// seconds converts a lifetime to the kernel's whole seconds, rounded up. nil becomes forever, and a negative lifetime
// 0. The result is at most limit, unless limit is nil: the kernel refuses an address that is preferred for longer
// than it is valid.
func seconds(d, limit *time.Duration) uint32 {
	if limit != nil && (d == nil || *d > *limit) {
		d = limit
	}

	if d == nil {
		return infiniteLifetime
	}

	return uint32(min(max(math.Ceil(d.Seconds()), 0), infiniteLifetime))
}

func lifetime(s uint32) *time.Duration {
	if s == infiniteLifetime {
		return nil
	}
	return new(time.Duration(s) * time.Second)
}

// decode parses the data of an RTM_NEWADDR or RTM_DELADDR.
func decode(data []byte) (Address, error) {
	if len(data) < unix.SizeofIfAddrmsg {
		return Address{}, fmt.Errorf("%w: an address of %d bytes", nl.ErrMalformed, len(data))
	}

	a := Address{
		Flags: uint32(data[2]),
		Scope: data[3],
		Link:  int(int32(binary.NativeEndian.Uint32(data[4:]))),
	}
	var local, address netip.Addr
	err := nl.Decode(data[unix.SizeofIfAddrmsg:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.IFA_LOCAL:
			ad.Do(nl.Addr(&local))
		case unix.IFA_ADDRESS:
			ad.Do(nl.Addr(&address))
		case unix.IFA_BROADCAST:
			ad.Do(nl.Addr(&a.Broadcast))
		case unix.IFA_LABEL:
			a.Label = ad.String()
		case unix.IFA_FLAGS:
			a.Flags = ad.Uint32()
		case unix.IFA_CACHEINFO:
			ad.Do(a.decodeLifetimes)
		case ifaProto:
			a.Protocol = ad.Uint8()
		case unix.IFA_RT_PRIORITY:
			a.Metric = ad.Uint32()
		case unix.IFA_UNSPEC: // rtnetlink writes this into each request
		default:
			a.Other = append(a.Other, nl.Keep(ad))
		}
	})
	if err != nil {
		return Address{}, err
	}

	if a.Flags&unix.IFA_F_DEPRECATED != 0 && a.Preferred == nil {
		// For an IPv4 address that is valid for ever, the kernel sends an endless preferred lifetime, even if the
		// address is deprecated. So set it to 0, as for any other deprecated address.
		a.Preferred = new(time.Duration)
	}

	if !local.IsValid() {
		local = address
	} else if address != local {
		a.Peer = address
	}

	a.Prefix = netip.PrefixFrom(local, int(data[1]))
	if !a.Prefix.IsValid() || (data[0] == unix.AF_INET) != local.Is4() || a.Peer.IsValid() &&
		a.Peer.Is4() != local.Is4() || a.Broadcast.Is6() {
		return Address{}, fmt.Errorf("%w: family %d, address %s/%d", nl.ErrMalformed, data[0], local, data[1])
	}

	return a, nil
}

// decodeLifetimes parses a struct ifa_cacheinfo (include/uapi/linux/if_addr.h).
func (a *Address) decodeLifetimes(b []byte) error {
	if len(b) < unix.SizeofIfaCacheinfo {
		return fmt.Errorf("lifetimes of %d bytes", len(b))
	}
	a.Preferred = lifetime(binary.NativeEndian.Uint32(b[0:]))
	a.Valid = lifetime(binary.NativeEndian.Uint32(b[4:]))
	return nil
}
