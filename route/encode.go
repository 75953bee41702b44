package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

const rtaNHID = 30 // RTA_NH_ID, Linux 5.3

var (
	errFamily = errors.New("a default route without a gateway needs its family")
	errPrefix = errors.New("destination's prefix length does not fit its address")
	errFrom   = errors.New("source prefix is not of the destination's family")
)

// AppendAdd appends the request of Conn.Add to a batch, for packages of this
// module that put several requests into one message.
func (r Route) AppendAdd(b *nl.Batch) {
	b.Request("add route", &r, unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r.encode)
}

// AppendReplace appends the request of Conn.Replace to a batch, for packages of
// this module.
func (r Route) AppendReplace(b *nl.Batch) {
	b.Request("replace route", &r, unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, r.encode)
}

// AppendDel appends the request of Conn.Del to a batch, for packages of this
// module.
func (r Route) AppendDel(b *nl.Batch) {
	b.Request("delete route", &r, unix.RTM_DELROUTE, 0, r.encodeDel)
}

// rtmsg is struct rtmsg (include/uapi/linux/rtnetlink.h).
type rtmsg struct {
	family, dstLen, srcLen, tos    uint8
	table, protocol, scope, typeOf uint8
	flags                          uint32
}

func (m rtmsg) encode(e *nl.Encoder) {
	h := [unix.SizeofRtMsg]byte{m.family, m.dstLen, m.srcLen, m.tos, m.table, m.protocol, m.scope, m.typeOf}
	binary.NativeEndian.PutUint32(h[8:], m.flags)
	e.Raw(h[:])
}

func (r *Route) encode(e *nl.Encoder) {
	n := r.normal()
	n.encodeAll(e)
}

// encodeAll writes a normal route.
func (n *Route) encodeAll(e *nl.Encoder) {
	n.encodeKey(e)
	n.encodeMetrics(e)
	if n.Family == unix.AF_INET6 {
		if n.Pref != 0 {
			e.Uint8(unix.RTA_PREF, uint8(n.Pref))
		}
		if n.Expires != nil {
			e.Uint32(unix.RTA_EXPIRES, seconds(*n.Expires))
		}
	}
}

// encodeDel writes what a route to be deleted must match. What r leaves open, the
// kernel does not compare.
func (r *Route) encodeDel(e *nl.Encoder) {
	n := r.normal()
	// In a deletion 0 is any, also for the priority, which for IPv6 has a default.
	n.Protocol, n.Type, n.Priority = r.Protocol, r.Type, r.Priority
	if r.Scope == nil {
		scope := scopeAny
		n.Scope = &scope
	}
	n.encodeKey(e)
}

// encodeKey writes all that tells a route from others. r is a normal one, but for
// the wildcards of a deletion.
func (r *Route) encodeKey(e *nl.Encoder) {
	switch {
	case r.Family == 0:
		e.Fail(errFamily)
		return
	case !r.Dst.IsValid():
		e.Fail(errPrefix)
		return
	case r.From.IsValid() && familyOf(r.From.Addr()) != r.Family:
		e.Fail(errFrom)
		return
	}
	h := rtmsg{
		family: r.Family, dstLen: uint8(r.Dst.Bits()), tos: r.TOS,
		protocol: uint8(r.Protocol), scope: uint8(*r.Scope), typeOf: uint8(r.Type),
	}
	if r.From.IsValid() {
		h.srcLen = uint8(r.From.Bits())
	}
	// The header has one byte for the table; the attribute, where there is one, wins.
	if r.Table < 256 {
		h.table = uint8(r.Table)
	}
	if r.OnLink {
		h.flags = uint32(onLink)
	}
	h.encode(e)
	if r.Table > 255 {
		e.Uint32(unix.RTA_TABLE, r.Table)
	}
	if r.Dst.Bits() > 0 {
		e.Addr(unix.RTA_DST, r.Dst.Addr())
	}
	if r.From.IsValid() {
		e.Addr(unix.RTA_SRC, r.From.Addr())
	}
	if r.Source.IsValid() {
		e.Addr(unix.RTA_PREFSRC, r.Source)
	}
	if r.Priority != 0 {
		e.Uint32(unix.RTA_PRIORITY, r.Priority)
	}
	r.encodeHops(e)
}

func (r *Route) encodeHops(e *nl.Encoder) {
	if r.NexthopID != 0 {
		// The kernel refuses the others beside it, and List gives them.
		e.Uint32(rtaNHID, r.NexthopID)
		return
	}
	if len(r.Nexthops) > 0 {
		encodeNexthops(e, r.Family, r.Nexthops)
		return
	}
	switch {
	case !r.Gateway.IsValid():
	case familyOf(r.Gateway) == r.Family:
		e.Addr(unix.RTA_GATEWAY, r.Gateway)
	default:
		typ, value := gatewayAttr(r.Family, r.Gateway)
		e.Bytes(typ, value)
	}
	if r.Link != 0 {
		e.Uint32(unix.RTA_OIF, uint32(r.Link))
	}
}

// encodeNexthops writes an array of struct rtnexthop, each with its attributes.
func encodeNexthops(e *nl.Encoder, family uint8, hops []Nexthop) {
	var b []byte
	for _, h := range hops {
		if h.Weight < 0 || h.Weight > 256 {
			e.Fail(fmt.Errorf("weight %d of a next hop is not within 1 and 256", h.Weight))
			return
		}
		var flags uint8
		if h.OnLink {
			flags = uint8(onLink)
		}
		start := len(b)
		b = append(b, 0, 0, flags, uint8(max(h.Weight, 1)-1)) // the length first, set below
		b = binary.NativeEndian.AppendUint32(b, uint32(h.Link))
		if h.Gateway.IsValid() {
			typ, value := gatewayAttr(family, h.Gateway)
			b = binary.NativeEndian.AppendUint16(b, uint16(unix.NLA_HDRLEN+len(value)))
			b = binary.NativeEndian.AppendUint16(b, typ)
			b = append(b, value...)
			for len(b)%unix.NLA_ALIGNTO != 0 {
				b = append(b, 0)
			}
		}
		binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	}
	e.Bytes(unix.RTA_MULTIPATH, b)
}

// gatewayAttr gives the attribute for a gateway: RTA_VIA, with struct rtvia, where
// it is not of the route's own family.
func gatewayAttr(family uint8, gateway netip.Addr) (typ uint16, value []byte) {
	if familyOf(gateway) == family {
		return unix.RTA_GATEWAY, gateway.AsSlice()
	}
	via := binary.NativeEndian.AppendUint16(nil, uint16(familyOf(gateway)))
	return unix.RTA_VIA, append(via, gateway.AsSlice()...)
}

// encodeMetrics writes the nest only where there is something in it.
func (r *Route) encodeMetrics(e *nl.Encoder) {
	if r.MTU == 0 && r.AdvMSS == 0 && len(r.Metrics) == 0 {
		return
	}
	e.Nest(unix.RTA_METRICS, func(e *nl.Encoder) {
		if r.MTU != 0 {
			e.Uint32(unix.RTAX_MTU, r.MTU)
		}
		if r.AdvMSS != 0 {
			e.Uint32(unix.RTAX_ADVMSS, r.AdvMSS)
		}
		for _, m := range r.Metrics {
			e.Uint32(m.Number, m.Value)
		}
	})
}

// seconds rounds up; what is over already is 1 s, since 0 would mean never.
func seconds(d time.Duration) uint32 {
	s := d / time.Second
	if d%time.Second > 0 {
		s++
	}
	return uint32(min(max(s, 1), 0xffffffff))
}
