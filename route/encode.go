package route

import (
	"encoding/binary"
	"fmt"
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

// Message returns a request about the route, for callers that send several in one datagram. typ is unix.RTM_NEWROUTE
// or unix.RTM_DELROUTE. For RTM_NEWROUTE, pass the flags of Conn.Add (netlink.Create and Excl) or of Conn.Replace
// (Create and Replace). For RTM_DELROUTE, pass no flags, as in Conn.Remove. For a deletion, the kernel does not
// compare fields that are zero. Unlike Conn.Add, Message leaves a Protocol of 0 as it is.
//
// With the flags Create and Append, the kernel adds the route behind existing ones with the same key. It uses the
// first of them. For IPv6 it combines those with a gateway into one route with several next hops.
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

// message returns a request about a route in the form that Route.normal returns. For a deletion, the caller has already
// set the fields that match any value.
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

// request is the library's route message, extended by attributes that the library lacks.
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

// address writes the address a to *into, a field of the library's message. For an IPv4-mapped IPv6 address it writes
// the attribute typ itself, since the library would shorten the address to 4 bytes.
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
			in := seconds(*n.Expires)
			q.Attributes.Expires = &in
		}
	}

	return nil
}

// keyAttributes adds the attributes that identify a route among others.
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

// multipath adds several next hops. The library encodes them unless it does not support one of them.
func (n *Route) multipath(q *request) error {
	plain := true
	for _, h := range n.Nexthops {
		if h.Weight < 0 || h.Weight > 256 {
			return nl.Invalid(fmt.Sprintf("weight %d of a next hop is not within 1 and 256", h.Weight))
		}

		one := rtnetlink.NextHop{Hop: rtnetlink.RTNextHop{Hops: uint8(max(h.Weight, 1) - 1), IfIndex: nl.Index(h.Link)}}
		if h.OnLink {
			one.Hop.Flags = unix.RTNH_F_ONLINK
		}

		if h.Gateway.IsValid() {
			one.Gateway = h.Gateway.AsSlice()
			plain = plain && nl.FamilyOf(h.Gateway) == n.Family && !h.Gateway.Is4In6()
		}

		plain = plain && len(h.Other) == 0
		q.Attributes.Multipath = append(q.Attributes.Multipath, one)
	}

	if plain {
		return nil
	}

	hops := q.Attributes.Multipath
	q.Attributes.Multipath = nil
	q.more(func(ae *netlink.AttributeEncoder) {
		ae.Do(unix.RTA_MULTIPATH, func() ([]byte, error) { return n.rtnexthops(hops) })
	})
	return nil
}

// rtnexthops encodes an array of struct rtnexthop, each with its attributes.
func (n *Route) rtnexthops(hops []rtnetlink.NextHop) ([]byte, error) {
	var b []byte
	for i, h := range hops {
		ae := netlink.NewAttributeEncoder()
		switch gateway := n.Nexthops[i].Gateway; {
		case !gateway.IsValid():
		case nl.FamilyOf(gateway) == n.Family:
			ae.Bytes(unix.RTA_GATEWAY, h.Gateway)
		default:
			ae.Bytes(unix.RTA_VIA, rtvia(gateway))
		}

		nl.PutOther(ae, n.Nexthops[i].Other)
		attrs, err := ae.Encode()
		if err != nil {
			return nil, err
		}

		b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtNexthop+len(attrs)))
		b = append(b, h.Hop.Flags, h.Hop.Hops)
		b = binary.NativeEndian.AppendUint32(b, h.Hop.IfIndex)
		b = append(b, attrs...)
	}

	return b, nil
}

// others returns the attributes in Other to send, without RTA_METRICS, which metrics sends. For a route with a
// nexthop object it leaves out the encapsulation, which is part of that object.
func (n *Route) others() []netlink.Attribute {
	return slices.DeleteFunc(slices.Clone(n.Other), func(a netlink.Attribute) bool {
		isEncap := nl.TypeOf(a) == unix.RTA_ENCAP || nl.TypeOf(a) == unix.RTA_ENCAP_TYPE
		return nl.TypeOf(a) == unix.RTA_METRICS || n.NexthopID != 0 && isEncap
	})
}

// metrics returns the content of RTA_METRICS: the metrics in Other, MTU and AdvMSS. The library supports only five
// metrics.
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

// seconds converts a duration to whole seconds, rounded up. The result is at least 1, since the kernel takes 0 as
// never.
func seconds(d time.Duration) uint32 {
	s := d / time.Second
	if d%time.Second > 0 {
		s++
	}
	return uint32(min(max(s, 1), 0xffffffff))
}
