package route

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// decode reads the data of an RTM_NEWROUTE. known is false for the families that
// this package leaves alone, such as multicast routing's.
func decode(data []byte) (r Route, known bool, _ error) {
	if len(data) < unix.SizeofRtMsg {
		return Route{}, false, fmt.Errorf("%w: a route of %d bytes", nl.ErrMalformed, len(data))
	}
	scope := Scope(data[6])
	r = Route{
		Family:   data[0],
		TOS:      data[3],
		Table:    uint32(data[4]),
		Protocol: Protocol(data[5]),
		Scope:    &scope,
		Type:     Type(data[7]),
		Flags:    Flags(binary.NativeEndian.Uint32(data[8:])),
	}
	if r.Family != unix.AF_INET && r.Family != unix.AF_INET6 {
		return Route{}, false, nil
	}
	r.OnLink = r.Flags&onLink != 0
	dst, src := netip.IPv6Unspecified(), netip.Addr{}
	if r.Family == unix.AF_INET {
		dst = netip.IPv4Unspecified()
	}
	attrs := nl.ParseAttrs(data[unix.SizeofRtMsg:])
	for attrs.Next() {
		var err error
		switch attrs.Type {
		case unix.RTA_DST:
			dst = attrs.Addr()
		case unix.RTA_SRC:
			src = attrs.Addr()
		default:
			err = r.decodeAttr(attrs)
		}
		if err != nil {
			return Route{}, false, err
		}
	}
	if err := attrs.Err(); err != nil {
		return Route{}, false, err
	}
	var err error
	if r.Dst, err = prefix(r.Family, dst, data[1]); err == nil && src.IsValid() {
		r.From, err = prefix(r.Family, src, data[2])
	}
	if r.From.IsSingleIP() && r.From.Addr().IsUnspecified() {
		r.From = netip.Prefix{} // how an answer to Get says that it had no source
	}
	return r, true, err
}

// decodeAttr reads an attribute, and passes over those that Route has no field for,
// such as congestion control. Of some it keeps in mind that they were there.
func (r *Route) decodeAttr(attrs *nl.Attrs) error {
	var err error
	switch attrs.Type {
	case unix.RTA_OIF:
		r.Link = int(int32(attrs.Uint32()))
	case unix.RTA_GATEWAY:
		r.Gateway = attrs.Addr()
	case unix.RTA_VIA:
		r.Gateway, err = via(attrs.Data)
	case unix.RTA_MULTIPATH:
		r.Nexthops, err = r.nexthops(attrs.Data)
	case rtaNHID:
		r.NexthopID = attrs.Uint32()
	case unix.RTA_PREFSRC:
		r.Source = attrs.Addr()
	case unix.RTA_PRIORITY:
		r.Priority = attrs.Uint32()
	case unix.RTA_TABLE:
		r.Table = attrs.Uint32()
	case unix.RTA_PREF:
		r.Pref = Pref(attrs.Uint8())
	case unix.RTA_METRICS:
		err = r.decodeMetrics(attrs.Nested())
	case unix.RTA_CACHEINFO:
		r.Expires = expires(attrs.Data)
	default:
		r.note(attrs.Type)
	}
	return err
}

// note keeps in mind that a route is more than is read of it.
func (r *Route) note(typ uint16) {
	switch typ {
	case unix.RTA_FLOW, unix.RTA_NEWDST, unix.RTA_ENCAP_TYPE, unix.RTA_ENCAP:
		if !slices.Contains(r.Unknown, typ) {
			r.Unknown = append(r.Unknown, typ)
		}
	}
}

func (r *Route) decodeMetrics(attrs *nl.Attrs) error {
	for attrs.Next() {
		switch {
		case attrs.Type == unix.RTAX_MTU:
			r.MTU = attrs.Uint32()
		case attrs.Type == unix.RTAX_ADVMSS:
			r.AdvMSS = attrs.Uint32()
		case attrs.Type != unix.RTAX_CC_ALGO: // the only one that is a string
			r.Metrics = append(r.Metrics, Metric{Number: attrs.Type, Value: attrs.Uint32()})
		}
	}
	return attrs.Err()
}

// expires reads struct rta_cacheinfo, whose third number is in USER_HZ, which is
// 100 on all architectures of today.
func expires(b []byte) *time.Duration {
	const userHZ = 100
	if len(b) < 12 {
		return nil
	}
	ticks := int32(binary.NativeEndian.Uint32(b[8:]))
	if ticks == 0 {
		return nil
	}
	d := time.Duration(ticks) * time.Second / userHZ
	return &d
}

// prefix puts an address and the length from a header together, and checks that
// they are of the header's family.
func prefix(family uint8, a netip.Addr, bits uint8) (netip.Prefix, error) {
	p := netip.PrefixFrom(a, int(bits))
	if !p.IsValid() || (family == unix.AF_INET) != a.Is4() {
		return netip.Prefix{}, fmt.Errorf("%w: family %d, prefix %s/%d", nl.ErrMalformed, family, a, bits)
	}
	return p, nil
}

// via reads struct rtvia: a family and an address of it.
func via(b []byte) (netip.Addr, error) {
	if len(b) < 2 {
		return netip.Addr{}, fmt.Errorf("%w: a gateway of %d bytes", nl.ErrMalformed, len(b))
	}
	a, ok := netip.AddrFromSlice(b[2:])
	if !ok || uint16(familyOf(a)) != binary.NativeEndian.Uint16(b) {
		return netip.Addr{}, fmt.Errorf("%w: a gateway of family %d and %d bytes", nl.ErrMalformed, binary.NativeEndian.Uint16(b), len(b)-2)
	}
	return a, nil
}

// nexthops reads an array of struct rtnexthop, each with its attributes.
func (r *Route) nexthops(b []byte) ([]Nexthop, error) {
	var hops []Nexthop
	for len(b) > 0 {
		if len(b) < unix.SizeofRtNexthop {
			return nil, fmt.Errorf("%w: %d bytes after the last next hop", nl.ErrMalformed, len(b))
		}
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtNexthop || n > len(b) {
			return nil, fmt.Errorf("%w: next hop of length %d in %d bytes", nl.ErrMalformed, n, len(b))
		}
		h := Nexthop{
			Flags:  Flags(b[2]),
			OnLink: Flags(b[2])&onLink != 0,
			Weight: int(b[3]) + 1,
			Link:   int(int32(binary.NativeEndian.Uint32(b[4:]))),
		}
		attrs := nl.ParseAttrs(b[unix.SizeofRtNexthop:n])
		for attrs.Next() {
			switch attrs.Type {
			case unix.RTA_GATEWAY:
				h.Gateway = attrs.Addr()
			case unix.RTA_VIA:
				var err error
				if h.Gateway, err = via(attrs.Data); err != nil {
					return nil, err
				}
			default:
				r.note(attrs.Type)
			}
		}
		if err := attrs.Err(); err != nil {
			return nil, err
		}
		hops = append(hops, h)
		b = b[min((n+3)&^3, len(b)):]
	}
	return hops, nil
}
