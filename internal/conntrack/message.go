package conntrack

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
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
// net/netfilter/nf_internals.h. A field that is not asked for is not compared.
const (
	filterSrc     = 1 << 0 // CTA_FILTER_F_CTA_IP_SRC
	filterDst     = 1 << 1 // CTA_FILTER_F_CTA_IP_DST
	filterProto   = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM
	filterSrcPort = 1 << 4 // CTA_FILTER_F_CTA_PROTO_SRC_PORT
	filterDstPort = 1 << 5 // CTA_FILTER_F_CTA_PROTO_DST_PORT
)

// headerLen is the length of struct nfgenmsg.
const headerLen = 4

// header is struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h). The kernel
// lists flows of that family only.
func header(family uint8) []byte { return []byte{family, unix.NFNETLINK_V0, 0, 0} }

// encode puts a request together. Numbers are in network order in all attributes but
// those of a filter.
func encode(typ netlink.HeaderType, flags netlink.HeaderFlags, family uint8, fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	return nl.Encode(typ, flags, header(family), func(ae *netlink.AttributeEncoder) {
		ae.ByteOrder = binary.BigEndian
		if fn != nil {
			fn(ae)
		}
	})
}

// nested writes a nest that has no errors of its own.
func nested(ae *netlink.AttributeEncoder, typ uint16, fn func(ae *netlink.AttributeEncoder)) {
	ae.Nested(typ, func(ae *netlink.AttributeEncoder) error {
		fn(ae)
		return nil
	})
}

// deleteMessage names the flow by its tuple, zone and number. It must never go without
// the tuple: the kernel then deletes all flows.
func (f *Flow) deleteMessage() (netlink.Message, error) {
	if len(f.tuple) == 0 {
		return netlink.Message{}, fmt.Errorf("%w: a flow without a tuple", nl.ErrMalformed)
	}
	return encode(messageDelete, 0, familyOf(f.Orig.Src.Addr()), func(ae *netlink.AttributeEncoder) {
		f.encodeTuple(ae)
		ae.Uint32(attrID, f.ID)
	})
}

// walk goes over attributes whose numbers are in network order.
func walk(b []byte, fn func(ad *netlink.AttributeDecoder)) error {
	return nl.Decode(b, func(ad *netlink.AttributeDecoder) error {
		ad.ByteOrder = binary.BigEndian
		fn(ad)
		return nil
	})
}

// inside walks over the attributes within one.
func inside(ad *netlink.AttributeDecoder, fn func(ad *netlink.AttributeDecoder)) {
	ad.Do(func(b []byte) error { return walk(b, fn) })
}

// decodeStats reads the answer to IPCTNL_MSG_CT_GET_STATS: how many flows there are.
func decodeStats(b []byte) (uint32, error) {
	if len(b) < headerLen {
		return 0, fmt.Errorf("%w: statistics of %d bytes", nl.ErrMalformed, len(b))
	}
	var entries uint32
	seen := false
	err := walk(b[headerLen:], func(ad *netlink.AttributeDecoder) {
		if ad.Type() == statsEntries {
			entries, seen = ad.Uint32(), true
		}
	})
	if err == nil && !seen {
		return 0, fmt.Errorf("%w: statistics without the number of flows", nl.ErrMalformed)
	}
	return entries, err
}

// decode reads a message of type IPCTNL_MSG_CT_NEW.
func decode(b []byte) (Flow, error) {
	var f Flow
	if len(b) < headerLen {
		return f, fmt.Errorf("%w: a flow of %d bytes", nl.ErrMalformed, len(b))
	}
	var proto uint8
	seen := 0
	err := walk(b[headerLen:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case attrTupleOrig:
			f.tuple = ad.Bytes()
			ad.Do(decodeTuple(&f.Orig, &f.Proto))
			seen |= 1
		case attrTupleReply:
			ad.Do(decodeTuple(&f.Reply, &proto))
			seen |= 2
		case attrStatus:
			f.Status = ad.Uint32()
		case attrID:
			f.ID = ad.Uint32()
			seen |= 4
		case attrZone:
			f.Zone = ad.Uint16()
		}
	})
	switch {
	case err != nil:
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
func decodeTuple(t *Tuple, proto *uint8) func([]byte) error {
	return func(b []byte) error {
		var src, dst netip.Addr
		var srcPort, dstPort uint16
		err := walk(b, func(ad *netlink.AttributeDecoder) {
			switch ad.Type() {
			case tupleIP:
				inside(ad, func(ad *netlink.AttributeDecoder) {
					switch ad.Type() {
					case ipV4Src, ipV6Src:
						ad.Do(address(&src, ad.Type() == ipV4Src))
					case ipV4Dst, ipV6Dst:
						ad.Do(address(&dst, ad.Type() == ipV4Dst))
					}
				})
			case tupleProto:
				inside(ad, func(ad *netlink.AttributeDecoder) {
					switch ad.Type() {
					case protoNum:
						*proto = ad.Uint8()
					case protoSrcPort:
						srcPort = ad.Uint16()
					case protoDstPort:
						dstPort = ad.Uint16()
					}
				})
			}
		})
		if err == nil && (!src.IsValid() || !dst.IsValid() || src.Is4() != dst.Is4()) {
			err = fmt.Errorf("%w: a tuple without two addresses", nl.ErrMalformed)
		}
		*t = Tuple{netip.AddrPortFrom(src, srcPort), netip.AddrPortFrom(dst, dstPort)}
		return err
	}
}

// address reads an attribute of an address of one family.
func address(into *netip.Addr, is4 bool) func([]byte) error {
	return func(b []byte) error {
		if (len(b) == 4) != is4 {
			return fmt.Errorf("an address of %d bytes", len(b))
		}
		return nl.Addr(into)(b)
	}
}
