package conntrack

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// include/uapi/linux/netfilter/nfnetlink_conntrack.h
const (
	messageNew    = unix.NFNL_SUBSYS_CTNETLINK << 8   // IPCTNL_MSG_CT_NEW
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE

	messageStats = unix.NFNL_SUBSYS_CTNETLINK<<8 | 5 // IPCTNL_MSG_CT_GET_STATS

	attrTupleOrig  = 1  // CTA_TUPLE_ORIG
	attrTupleReply = 2  // CTA_TUPLE_REPLY
	attrStatus     = 3  // CTA_STATUS
	attrID         = 12 // CTA_ID
	attrZone       = 18 // CTA_ZONE
	attrFilter     = 25 // CTA_FILTER

	tupleIP    = 1 // CTA_TUPLE_IP
	tupleProto = 2 // CTA_TUPLE_PROTO

	ipV4Src = 1 // CTA_IP_V4_SRC
	ipV4Dst = 2 // CTA_IP_V4_DST
	ipV6Src = 3 // CTA_IP_V6_SRC
	ipV6Dst = 4 // CTA_IP_V6_DST

	protoNum     = 1 // CTA_PROTO_NUM
	protoSrcPort = 2 // CTA_PROTO_SRC_PORT
	protoDstPort = 3 // CTA_PROTO_DST_PORT

	statsEntries = 1 // CTA_STATS_GLOBAL_ENTRIES

	filterOrigFlags  = 1 // CTA_FILTER_ORIG_FLAGS
	filterReplyFlags = 2 // CTA_FILTER_REPLY_FLAGS
)

// The bits of CTA_FILTER_*_FLAGS have no UAPI header: they are in the kernel's
// net/netfilter/nf_internals.h. What is not asked for is not compared.
const (
	filterSrc     = 1 << 0 // CTA_FILTER_F_CTA_IP_SRC
	filterDst     = 1 << 1 // CTA_FILTER_F_CTA_IP_DST
	filterProto   = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM
	filterSrcPort = 1 << 4 // CTA_FILTER_F_CTA_PROTO_SRC_PORT
	filterDstPort = 1 << 5 // CTA_FILTER_F_CTA_PROTO_DST_PORT
)

// headerLen is the length of struct nfgenmsg.
const headerLen = 4

// header appends struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h). The
// kernel lists flows of that family only.
func header(e *nl.Encoder, family uint8) { e.Raw([]byte{family, unix.NFNETLINK_V0, 0, 0}) }

func port(e *nl.Encoder, typ, v uint16) { e.Bytes(typ, binary.BigEndian.AppendUint16(nil, v)) }

// encodeDelete names the flow by its tuple, zone and number. It must never go without
// the tuple: the kernel then deletes all flows.
func (f *Flow) encodeDelete(e *nl.Encoder) {
	if len(f.tuple) == 0 {
		e.Fail(fmt.Errorf("%w: a flow without a tuple", nl.ErrMalformed))
		return
	}
	header(e, familyOf(f.Orig.Src.Addr()))
	e.Bytes(attrTupleOrig|unix.NLA_F_NESTED, f.tuple)
	if f.Zone != 0 {
		port(e, attrZone, f.Zone)
	}
	e.Uint32BE(attrID, f.ID)
}

// decodeStats reads the answer to IPCTNL_MSG_CT_GET_STATS: how many flows there are.
func decodeStats(b []byte) (uint32, error) {
	if len(b) < headerLen {
		return 0, fmt.Errorf("%w: statistics of %d bytes", nl.ErrMalformed, len(b))
	}
	var entries uint32
	seen := false
	attrs := nl.ParseAttrs(b[headerLen:])
	for attrs.Next() {
		if attrs.Type == statsEntries {
			entries, seen = attrs.Uint32BE(), true
		}
	}
	if attrs.Err() == nil && !seen {
		return 0, fmt.Errorf("%w: statistics without the number of flows", nl.ErrMalformed)
	}
	return entries, attrs.Err()
}

// decode reads a message of type IPCTNL_MSG_CT_NEW. The flow keeps a part of b.
func decode(b []byte) (Flow, error) {
	var f Flow
	if len(b) < headerLen {
		return f, fmt.Errorf("%w: a flow of %d bytes", nl.ErrMalformed, len(b))
	}
	var proto uint8
	var err error
	seen := 0
	attrs := nl.ParseAttrs(b[headerLen:])
	for attrs.Next() && err == nil {
		switch attrs.Type {
		case attrTupleOrig:
			f.tuple = attrs.Data
			f.Orig, f.Proto, err = decodeTuple(attrs.Nested())
			seen |= 1
		case attrTupleReply:
			f.Reply, proto, err = decodeTuple(attrs.Nested())
			seen |= 2
		case attrStatus:
			f.Status = attrs.Uint32BE()
		case attrID:
			f.ID = attrs.Uint32BE()
			seen |= 4
		case attrZone:
			f.Zone, err = uint16BE(attrs)
		}
	}
	switch {
	case err != nil:
	case attrs.Err() != nil:
		err = attrs.Err()
	case seen != 7:
		err = fmt.Errorf("%w: a flow without both of its tuples and its number", nl.ErrMalformed)
	case proto != f.Proto:
		err = fmt.Errorf("%w: a flow of protocols %d and %d", nl.ErrMalformed, f.Proto, proto)
	}
	if err != nil {
		return Flow{}, err
	}
	return f, nil
}

// decodeTuple reads CTA_TUPLE_ORIG or CTA_TUPLE_REPLY. A tuple has both addresses, of
// one family; that the reply's is of the same holds for every kernel without NAT64.
func decodeTuple(attrs *nl.Attrs) (t Tuple, proto uint8, _ error) {
	var src, dst netip.Addr
	var srcPort, dstPort uint16
	var err error
	for attrs.Next() && err == nil {
		switch attrs.Type {
		case tupleIP:
			src, dst, err = decodeAddrs(attrs.Nested())
		case tupleProto:
			proto, srcPort, dstPort, err = decodeProto(attrs.Nested())
		}
	}
	if err == nil {
		err = attrs.Err()
	}
	if err == nil && (!src.IsValid() || !dst.IsValid() || src.Is4() != dst.Is4()) {
		err = fmt.Errorf("%w: a tuple without two addresses", nl.ErrMalformed)
	}
	if err != nil {
		return Tuple{}, 0, err
	}
	return Tuple{netip.AddrPortFrom(src, srcPort), netip.AddrPortFrom(dst, dstPort)}, proto, nil
}

func decodeAddrs(attrs *nl.Attrs) (src, dst netip.Addr, _ error) {
	for attrs.Next() {
		var is4 bool
		switch attrs.Type {
		case ipV4Src, ipV4Dst:
			is4 = true
		case ipV6Src, ipV6Dst:
		default:
			continue
		}
		a := attrs.Addr()
		if a.IsValid() && a.Is4() != is4 {
			return src, dst, fmt.Errorf("%w: attribute %d of %d bytes", nl.ErrMalformed, attrs.Type, len(attrs.Data))
		}
		if attrs.Type == ipV4Src || attrs.Type == ipV6Src {
			src = a
		} else {
			dst = a
		}
	}
	return src, dst, attrs.Err()
}

func decodeProto(attrs *nl.Attrs) (proto uint8, srcPort, dstPort uint16, _ error) {
	var err error
	for attrs.Next() && err == nil {
		switch attrs.Type {
		case protoNum:
			proto = attrs.Uint8()
		case protoSrcPort:
			srcPort, err = uint16BE(attrs)
		case protoDstPort:
			dstPort, err = uint16BE(attrs)
		}
	}
	if err == nil {
		err = attrs.Err()
	}
	return proto, srcPort, dstPort, err
}

// uint16BE reads a value of two bytes in network order.
func uint16BE(a *nl.Attrs) (uint16, error) {
	if len(a.Data) != 2 {
		return 0, fmt.Errorf("%w: attribute %d: %d bytes where 2 are due", nl.ErrMalformed, a.Type, len(a.Data))
	}
	return binary.BigEndian.Uint16(a.Data), nil
}
