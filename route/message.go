package route

import (
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const rtaNHID = 30 // RTA_NH_ID, Linux 5.3

const (
	errFamily = nl.Invalid("a default route without a gateway needs its family")
	errPrefix = nl.Invalid("destination's prefix length does not fit its address")
	errFrom   = nl.Invalid("source prefix is not of the destination's family")
)

// Message returns a request about the route, for callers that send several in one datagram. typ is unix.RTM_NEWROUTE or
// unix.RTM_DELROUTE. For RTM_NEWROUTE, pass the flags of Conn.Add (netlink.Create and Excl) or of Conn.Replace (Create
// and Replace). For RTM_DELROUTE, pass no flags, as in Conn.Remove. For a deletion, the kernel does not compare fields
// that are zero, except Dst, From, TOS and Table. Unlike Conn.Add, Message leaves a Protocol of 0 as it is.
//
// With the flags Create and Append, the kernel adds the route behind existing routes with the same key. Packets take
// the first of these routes. For IPv6 the kernel combines routes with a gateway into one route with several next hops.
func (r Route) Message(typ netlink.HeaderType, flags netlink.HeaderFlags) (netlink.Message, error) {
	n := r.normal()
	n.Protocol = r.Protocol
	if typ != unix.RTM_DELROUTE {
		return n.message(typ, flags, n.attributes)
	}

	// In a deletion, 0 matches any value. This includes the priority, whose default for a new IPv6 route is 1024.
	n.Type, n.Priority = r.Type, r.Priority
	if r.Scope == nil {
		n.Scope = new(uint8(unix.RT_SCOPE_NOWHERE)) // NOWHERE matches any scope
	}
	return n.message(typ, 0, n.keyAttributes)
}

// message encodes a request about a route that Route.normal prepared. The function attributes adds the attributes.
func (n *Route) message(typ netlink.HeaderType, flags netlink.HeaderFlags,
	attributes func(*request) error) (netlink.Message, error) {
	switch {
	case n.Family == 0:
		return netlink.Message{}, errFamily
	case !n.Dst.IsValid():
		return netlink.Message{}, errPrefix
	case n.From.IsValid() && nl.FamilyOf(n.From.Addr()) != n.Family:
		return netlink.Message{}, errFrom
	}

	q := request{RouteMessage: rtnetlink.RouteMessage{
		Family: n.Family, DstLength: uint8(n.Dst.Bits()), SrcLength: uint8(max(n.From.Bits(), 0)), Tos: n.TOS,
		Protocol: n.Protocol, Scope: *n.Scope, Type: uint8(n.Type),
	}}
	q.table(n.Table)
	if n.OnLink {
		q.Flags = unix.RTNH_F_ONLINK
	}

	if err := attributes(&q); err != nil {
		return netlink.Message{}, err
	}

	return nl.Marshal(typ, flags, q.MarshalBinary, q.write)
}

// request is rtnetlink's route message, extended by attributes that rtnetlink lacks.
type request struct {
	rtnetlink.RouteMessage
	rest []func(*netlink.AttributeEncoder)
}

func (q *request) write(ae *netlink.AttributeEncoder) {
	for _, fn := range q.rest {
		fn(ae)
	}
}

func (q *request) more(fn func(*netlink.AttributeEncoder)) { q.rest = append(q.rest, fn) }

// table sets the table. The message's header has only one byte for it, so larger numbers become an attribute.
func (q *request) table(table uint32) {
	if table < 256 {
		q.Table = uint8(table)
	} else {
		q.Attributes.Table = table
	}
}

// address writes the address a to *into, a field of rtnetlink's message. For an IPv4-mapped IPv6 address it writes the
// attribute typ itself, since rtnetlink would shorten the address to 4 bytes.
func (q *request) address(into *net.IP, typ uint16, a netip.Addr) {
	if a.Is4In6() {
		q.more(func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, typ, a) })
		return
	}
	*into = a.AsSlice()
}

// attributes adds the attributes of a new route.
func (n *Route) attributes(q *request) error {
	if err := n.keyAttributes(q); err != nil {
		return err
	}

	if others := n.others(); len(others) > 0 {
		q.more(func(ae *netlink.AttributeEncoder) { nl.PutOther(ae, others) })
	}

	metrics, err := n.metrics()
	if err != nil {
		return err
	}

	if len(metrics) > 0 {
		q.more(func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_METRICS|netlink.Nested, metrics) })
	}

	if n.Family == unix.AF_INET6 {
		if n.Pref != 0 {
			q.Attributes.Pref = &n.Pref
		}
		if n.Expires != nil {
			q.Attributes.Expires = new(seconds(*n.Expires))
		}
	}

	return nil
}

// keyAttributes adds the attributes that requests for a deletion have too: prefixes, source address, priority and next
// hops.
func (n *Route) keyAttributes(q *request) error {
	if n.Dst.Bits() > 0 {
		q.address(&q.Attributes.Dst, unix.RTA_DST, n.Dst.Addr())
	}

	if n.From.IsValid() {
		q.more(func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.RTA_SRC, n.From.Addr()) })
	}

	if n.Source.IsValid() {
		q.address(&q.Attributes.Src, unix.RTA_PREFSRC, n.Source)
	}

	q.Attributes.Priority = n.Priority
	switch {
	case n.NexthopID != 0:
		// Leave out the next hops that List returns with a nexthop object, since the kernel refuses both in one
		// request.
		q.more(func(ae *netlink.AttributeEncoder) { ae.Uint32(rtaNHID, n.NexthopID) })
		return nil
	case len(n.Nexthops) > 0:
		return n.multipath(q)
	case !n.Gateway.IsValid():
	case nl.FamilyOf(n.Gateway) == n.Family:
		q.address(&q.Attributes.Gateway, unix.RTA_GATEWAY, n.Gateway)
	default:
		q.more(func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_VIA, rtvia(n.Gateway)) })
	}

	q.Attributes.OutIface = nl.Index(n.Link)
	return nil
}

// rtvia returns a struct rtvia, for a gateway of another address family than the route's.
func rtvia(gateway netip.Addr) []byte {
	return append(binary.NativeEndian.AppendUint16(nil, uint16(nl.FamilyOf(gateway))), gateway.AsSlice()...)
}

// multipath adds several next hops, as an array of struct rtnexthop, each with its attributes. Package rtnetlink
// supports neither gateways of the other family nor Other.
func (n *Route) multipath(q *request) error {
	var b []byte
	for _, h := range n.Nexthops {
		if h.Weight < 0 || h.Weight > 256 {
			return nl.Invalid(fmt.Sprintf("weight %d of a next hop is not within 1 and 256", h.Weight))
		}

		ae := netlink.NewAttributeEncoder()
		switch {
		case !h.Gateway.IsValid():
		case nl.FamilyOf(h.Gateway) == n.Family:
			nl.PutAddr(ae, unix.RTA_GATEWAY, h.Gateway)
		default:
			ae.Bytes(unix.RTA_VIA, rtvia(h.Gateway))
		}

		nl.PutOther(ae, h.Other)
		attrs, err := ae.Encode()
		if err != nil {
			return err
		}

		var flags byte
		if h.OnLink {
			flags = unix.RTNH_F_ONLINK
		}

		b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtNexthop+len(attrs)))
		b = append(b, flags, uint8(max(h.Weight, 1)-1))
		b = binary.NativeEndian.AppendUint32(b, nl.Index(h.Link))
		b = append(b, attrs...)
	}

	q.more(func(ae *netlink.AttributeEncoder) { ae.Bytes(unix.RTA_MULTIPATH, b) })
	return nil
}

// others returns the attributes in Other to send, without RTA_METRICS, which the method metrics encodes. For a route
// with a nexthop object it leaves out the encapsulation, which is part of that object.
func (n *Route) others() []netlink.Attribute {
	return slices.DeleteFunc(slices.Clone(n.Other), func(a netlink.Attribute) bool {
		isEncap := nl.TypeOf(a) == unix.RTA_ENCAP || nl.TypeOf(a) == unix.RTA_ENCAP_TYPE
		return nl.TypeOf(a) == unix.RTA_METRICS || n.NexthopID != 0 && isEncap
	})
}

// metrics returns the content of RTA_METRICS: the metrics in Other, MTU and AdvMSS. Package rtnetlink supports only
// five metrics.
func (n *Route) metrics() ([]byte, error) {
	var fields []netlink.Attribute
	put := func(typ uint16, value uint32) {
		if value != 0 {
			fields = append(fields, netlink.Attribute{Type: typ, Data: binary.NativeEndian.AppendUint32(nil, value)})
		}
	}
	put(unix.RTAX_MTU, n.MTU)
	put(unix.RTAX_ADVMSS, n.AdvMSS)
	b, err := netlink.MarshalAttributes(fields)
	for _, a := range n.Other {
		if nl.TypeOf(a) == unix.RTA_METRICS {
			b = slices.Concat(a.Data, b)
		}
	}

	return b, err
}

// seconds converts a duration to whole seconds, rounded up. The result is at least 1, since the kernel lists a route
// with 0 like one that never expires.
func seconds(d time.Duration) uint32 {
	return uint32(min(max(math.Ceil(d.Seconds()), 1), math.MaxUint32))
}

// unspecified returns the unspecified address of a family, 0.0.0.0 or ::.
func unspecified(family uint8) netip.Addr {
	if family == unix.AF_INET {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// decode parses the data of an RTM_NEWROUTE. known is false if the family is neither IPv4 nor IPv6, as for routes of
// multicast routing.
func decode(data []byte) (r Route, known bool, _ error) {
	if len(data) < unix.SizeofRtMsg {
		return Route{}, false, fmt.Errorf("%w: a route of %d bytes", nl.ErrMalformed, len(data))
	}

	r = Route{
		Family:   data[0],
		TOS:      data[3],
		Table:    uint32(data[4]),
		Protocol: data[5],
		Scope:    new(data[6]),
		Type:     Type(data[7]),
		Flags:    binary.NativeEndian.Uint32(data[8:]),
	}
	if r.Family != unix.AF_INET && r.Family != unix.AF_INET6 {
		return Route{}, false, nil
	}

	r.OnLink = r.Flags&unix.RTNH_F_ONLINK != 0
	dst, src := unspecified(r.Family), netip.Addr{}
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
		r.From = netip.Prefix{} // in an answer to Get, ::/128 means that the request had no source
	}

	return r, true, err
}

// decodeAttr parses one attribute. If Route has no field for the attribute, it goes to Other.
func (r *Route) decodeAttr(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case unix.RTA_OIF:
		r.Link = int(int32(ad.Uint32()))
	case unix.RTA_GATEWAY:
		ad.Do(nl.Addr(&r.Gateway))
	case unix.RTA_VIA:
		ad.Do(via(&r.Gateway))
	case unix.RTA_MULTIPATH:
		ad.Do(func(b []byte) (err error) {
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
		r.Expires = new(time.Duration(ad.Uint32()) * time.Second)
	case unix.RTA_PAD, unix.RTA_IIF, unix.RTA_UID, unix.RTA_MARK:
		// Ignore padding, and the attributes of an answer to Get that repeat the request.
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

// expires parses struct rta_cacheinfo. It returns nil if the route never expires. The field rta_expires counts in
// USER_HZ, which is 100 on all architectures that Go supports.
func expires(b []byte) *time.Duration {
	const userHZ = 100
	if len(b) < 12 {
		return nil
	}
	ticks := int32(binary.NativeEndian.Uint32(b[8:]))
	if ticks == 0 {
		return nil
	}
	return new(time.Duration(ticks) * time.Second / userHZ)
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
