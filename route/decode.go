package route

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// decode parses the data of an RTM_NEWROUTE. known is false if the family is neither IPv4 nor IPv6, as for routes of
// multicast routing.
func decode(data []byte) (r Route, known bool, _ error) {
	if len(data) < unix.SizeofRtMsg {
		return Route{}, false, fmt.Errorf("%w: a route of %d bytes", nl.ErrMalformed, len(data))
	}

	scope := data[6]
	r = Route{
		Family:   data[0],
		TOS:      data[3],
		Table:    uint32(data[4]),
		Protocol: data[5],
		Scope:    &scope,
		Type:     Type(data[7]),
		Flags:    binary.NativeEndian.Uint32(data[8:]),
	}
	if r.Family != unix.AF_INET && r.Family != unix.AF_INET6 {
		return Route{}, false, nil
	}

	r.OnLink = r.Flags&unix.RTNH_F_ONLINK != 0
	dst, src := netip.IPv6Unspecified(), netip.Addr{}
	if r.Family == unix.AF_INET {
		dst = netip.IPv4Unspecified()
	}

	err := nl.Decode(data[unix.SizeofRtMsg:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.RTA_DST:
			ad.Do(nl.Addr(&dst))
		case unix.RTA_SRC:
			ad.Do(nl.Addr(&src))
		default:
			r.decodeAttr(ad)
		}
	})
	if err != nil {
		return Route{}, false, err
	}

	if r.Dst, err = nl.Prefix(r.Family, dst, data[1]); err == nil && src.IsValid() {
		r.From, err = nl.Prefix(r.Family, src, data[2])
	}

	if r.From.IsSingleIP() && r.From.Addr().IsUnspecified() {
		r.From = netip.Prefix{} // in an answer to Get, 0/0 means that the request had no source
	}

	return r, true, err
}

// decodeAttr parses one attribute. It appends attributes that Route has no field for to Other.
func (r *Route) decodeAttr(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case unix.RTA_OIF:
		r.Link = int(int32(ad.Uint32()))
	case unix.RTA_GATEWAY:
		ad.Do(nl.Addr(&r.Gateway))
	case unix.RTA_VIA:
		ad.Do(via(&r.Gateway))
	case unix.RTA_MULTIPATH:
		ad.Do(func(b []byte) error {
			var err error
			r.Nexthops, err = nexthops(b)
			return err
		})
	case rtaNHID:
		r.NexthopID = ad.Uint32()
	case unix.RTA_PREFSRC:
		ad.Do(nl.Addr(&r.Source))
	case unix.RTA_PRIORITY:
		r.Priority = ad.Uint32()
	case unix.RTA_TABLE:
		r.Table = ad.Uint32()
	case unix.RTA_PREF:
		r.Pref = ad.Uint8()
	case unix.RTA_METRICS:
		r.decodeMetrics(ad)
	case unix.RTA_CACHEINFO:
		r.Expires = expires(ad.Bytes())
	case unix.RTA_EXPIRES: // only requests contain this attribute
		d := time.Duration(ad.Uint32()) * time.Second
		r.Expires = &d
	case unix.RTA_PAD, unix.RTA_IIF, unix.RTA_UID, unix.RTA_MARK:
		// Ignore these attributes. In an answer to Get they repeat the request.
	default:
		r.Other = append(r.Other, nl.Keep(ad))
	}
}

// decodeMetrics parses RTA_METRICS. MTU and AdvMSS have fields; the other metrics go to Other, as one attribute.
func (r *Route) decodeMetrics(ad *netlink.AttributeDecoder) {
	ad.Do(func(b []byte) error {
		var others []netlink.Attribute
		err := nl.Decode(b, func(ad *netlink.AttributeDecoder) {
			switch ad.Type() {
			case unix.RTAX_MTU:
				r.MTU = ad.Uint32()
			case unix.RTAX_ADVMSS:
				r.AdvMSS = ad.Uint32()
			default:
				others = append(others, nl.Keep(ad))
			}
		})
		if err != nil || len(others) == 0 {
			return err
		}

		data, err := netlink.MarshalAttributes(others)
		r.Other = append(r.Other, netlink.Attribute{Type: unix.RTA_METRICS, Data: data})
		return err
	})
}

// expires parses struct rta_cacheinfo. It returns nil if the route never expires. The struct's third number counts in
// USER_HZ, which is 100 on all present architectures.
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

// via returns a function that parses struct rtvia, which is an address family and an address. The function writes the
// address to *into.
func via(into *netip.Addr) func([]byte) error {
	return func(b []byte) error {
		if len(b) < 2 {
			return fmt.Errorf("a gateway of %d bytes", len(b))
		}
		a, ok := netip.AddrFromSlice(b[2:])
		if !ok || uint16(nl.FamilyOf(a)) != binary.NativeEndian.Uint16(b) {
			return fmt.Errorf("a gateway of family %d and %d bytes", binary.NativeEndian.Uint16(b), len(b)-2)
		}
		*into = a
		return nil
	}
}

// nexthops parses an array of struct rtnexthop. Each element is followed by its attributes.
func nexthops(b []byte) ([]Nexthop, error) {
	var hops []Nexthop
	for len(b) > 0 {
		if len(b) < unix.SizeofRtNexthop {
			return nil, fmt.Errorf("%d bytes after the last next hop", len(b))
		}

		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtNexthop || n > len(b) {
			return nil, fmt.Errorf("next hop of length %d in %d bytes", n, len(b))
		}

		h := Nexthop{
			Flags:  uint32(b[2]),
			OnLink: b[2]&unix.RTNH_F_ONLINK != 0,
			Weight: int(b[3]) + 1,
			Link:   int(int32(binary.NativeEndian.Uint32(b[4:]))),
		}
		err := nl.Decode(b[unix.SizeofRtNexthop:n], func(ad *netlink.AttributeDecoder) {
			switch ad.Type() {
			case unix.RTA_GATEWAY:
				ad.Do(nl.Addr(&h.Gateway))
			case unix.RTA_VIA:
				ad.Do(via(&h.Gateway))
			default:
				h.Other = append(h.Other, nl.Keep(ad))
			}
		})
		if err != nil {
			return nil, err
		}

		hops = append(hops, h)
		b = b[min((n+3)&^3, len(b)):]
	}

	return hops, nil
}
