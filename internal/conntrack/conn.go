// Package conntrack lists and deletes flows: a flow is the kernel's entry of packets that it has tracked, with the
// address translation that it goes on applying to them.
//
//	n, err := conn.Flush(ctx, conntrack.Of(netip.MustParseAddr("10.22.0.5")))
//
// NAT rules see the first packet of a flow only. A client that keeps sending datagrams from one port keeps its flow
// alive, and with it the translation that was chosen when it began.
//
// The kernel walks its whole table for each question, which all namespaces share: some 9 ms for the usual 262,144
// buckets, and 2.5 µs for each flow that it sends.
//
// It needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and
// Linux 6.1 or later with nf_conntrack_netlink (CONFIG_NF_CT_NETLINK). The messages
// are those of include/uapi/linux/netfilter/nfnetlink_conntrack.h.
package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Question says which flows are meant: those that fulfil all of its conditions.
type Question struct {
	// Family is unix.AF_INET or unix.AF_INET6.
	Family uint8
	// Proto is an IP protocol number (unix.IPPROTO_UDP); 0 is any.
	Proto uint8
	// Port is the one that the flow's first sender sends to, of TCP or UDP; 0 is any. It needs a Proto.
	Port uint16
	// Where is asked of flows that match otherwise.
	Where func(*Flow) bool
}

// Of asks for the flows that an address takes part in: those that it began, masqueraded or not, and those that lead
// to it. It is for an address whose pod is gone, before another pod gets it.
func Of(a netip.Addr) Question {
	return Question{Family: nl.FamilyOf(a), Where: func(f *Flow) bool { return f.Orig.Src.Addr() == a || f.Reply.Src.Addr() == a }}
}

// Conn lists and deletes the flows of one network namespace. Its methods may be
// called from several goroutines. Errors of the kernel are *tombolo.OpError, or wrap
// one.
type Conn struct{ nl *nl.Conn }

// Dial opens a connection to a namespace; nil is that of the calling thread.
func Dial(ns *netns.NS) (*Conn, error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, ns)
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// Usable is nil if the connection is open; otherwise the error matches tombolo.ErrInvalid.

// Close closes the connection.
func (c *Conn) Close() error { return c.nl.Close() }

// List gives the flows that questions are about, in the kernel's order. A flow that begins or ends meanwhile may be
// in the list or not.
//
// The errors match errors.ErrUnsupported where the kernel has no ctnetlink,
// fs.ErrPermission without CAP_NET_ADMIN, and tombolo.ErrInterrupted where the kernel
// said so of each of many tries.
func (c *Conn) List(ctx context.Context, questions ...Question) ([]Flow, error) {
	if len(questions) == 0 {
		return nil, nil
	}
	if count, err := c.count(); err != nil || count == 0 {
		return nil, err
	}
	var list []Flow
	for _, q := range questions {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		m, err := q.message()
		err = c.nl.List("list flows", m, err, func(m netlink.Message) error {
			flow, err := decode(m.Data)
			if err == nil && q.Where(&flow) {
				list = append(list, flow)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// count gives the number of flows in the namespace, which the kernel keeps at hand.
func (c *Conn) count() (count uint32, _ error) {
	var b nl.Batch
	m, err := encode(messageStats, unix.AF_UNSPEC, nil)
	b.AddGet("count flows", nil, m, err, func(m netlink.Message) (err error) {
		count, err = decodeStats(m.Data)
		return err
	})
	err = c.nl.Execute(&b)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		// nfnetlink knows no such subsystem, and could not load it.
		return 0, &tombolo.OpError{Op: "count flows", Err: fmt.Errorf(
			"%w: this kernel has no ctnetlink; load the module nf_conntrack_netlink, or use a kernel with CONFIG_NF_CT_NETLINK",
			errors.ErrUnsupported)}
	}
	return count, err
}

// Flush deletes the flows that questions are about, and says how many it deleted. Those that end by themselves
// meanwhile are not counted, and no error. A flow that began meanwhile with the same tuple stays.
//
// The next packet of such a client begins a flow anew, under the rules as they are
// then: so change the rules first.
func (c *Conn) Flush(ctx context.Context, questions ...Question) (deleted int, _ error) {
	list, err := c.List(ctx, questions...)
	if err != nil {
		return 0, err
	}
	// Acknowledgements must fit into the socket's buffer, which not everyone may enlarge.
	const atOnce = 128
	for len(list) > 0 {
		n := min(atOnce, len(list))
		if err := c.delete(list[:n], &deleted); err != nil {
			return deleted, err
		}
		list = list[n:]
	}
	return deleted, nil
}

func (c *Conn) delete(list []Flow, deleted *int) error {
	var b nl.Batch
	for i := range list {
		m, err := list[i].deleteMessage()
		b.Add("delete flow", &list[i], m, err)
	}
	err := c.nl.Execute(&b)
	for i := range list {
		switch of := b.Err(i); {
		case of == nil:
			*deleted++
		case !errors.Is(of, unix.ENOENT): // gone, or another with the same tuple
			return of
		default:
			err = nil
		}
	}
	return err
}

// include/uapi/linux/netfilter/nfnetlink_conntrack.h
const (
	messageGet    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1 // IPCTNL_MSG_CT_GET
	messageDelete = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE
	messageStats  = unix.NFNL_SUBSYS_CTNETLINK<<8 | 5 // IPCTNL_MSG_CT_GET_STATS

	attrTupleOrig  = 1  // CTA_TUPLE_ORIG
	attrTupleReply = 2  // CTA_TUPLE_REPLY
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

	// The bits of CTA_FILTER_*_FLAGS have no UAPI header (net/netfilter/nf_internals.h).
	filterProto   = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM
	filterDstPort = 1 << 5 // CTA_FILTER_F_CTA_PROTO_DST_PORT
)

// headerLen is the length of struct nfgenmsg.
const headerLen = 4

// Flow is an entry of the connection tracking.
type Flow struct {
	// Proto is the IP protocol's number.
	Proto uint8
	// Orig is the tuple of the direction in which the flow began, before any
	// translation, and Reply that of the answers before theirs.
	Orig, Reply Tuple

	// id tells flows with the same tuple apart, those before from those after.
	id   uint32
	zone uint16
	// tuple is the kernel's attribute that Orig was read from. It goes back as it is:
	// some protocols have more in it than addresses and ports.
	tuple []byte
}

// Tuple is one direction of a flow. Ports are 0 where the protocol has none.
type Tuple struct{ Src, Dst netip.AddrPort }

// String gives the protocol's number, the source and the destination.
func (f *Flow) String() string {
	return fmt.Sprintf("of protocol %d from %s to %s, answered by %s", f.Proto, f.Orig.Src, f.Orig.Dst, f.Reply.Src)
}

// encode puts a request together, with struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h). The kernel lists
// flows of that family only. Numbers are in network order in all attributes but those of a filter.
func encode(typ netlink.HeaderType, family uint8, fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	return nl.Encode(typ, 0, []byte{family, unix.NFNETLINK_V0, 0, 0}, func(ae *netlink.AttributeEncoder) {
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

// message has the kernel send the flows of the family, the protocol and the port.
func (q *Question) message() (netlink.Message, error) {
	return encode(messageGet, q.Family, func(ae *netlink.AttributeEncoder) {
		if q.Proto == 0 {
			return
		}
		flags := uint32(filterProto)
		nested(ae, attrTupleOrig, func(ae *netlink.AttributeEncoder) {
			nested(ae, tupleProto, func(ae *netlink.AttributeEncoder) {
				ae.Uint8(protoNum, q.Proto)
				if q.Port != 0 {
					flags |= filterDstPort
					ae.Uint16(protoDstPort, q.Port)
				}
			})
		})
		nested(ae, attrFilter, func(ae *netlink.AttributeEncoder) {
			ae.ByteOrder = binary.NativeEndian
			ae.Uint32(filterOrigFlags, flags)
			ae.Uint32(filterReplyFlags, 0)
		})
	})
}

// deleteMessage names the flow by its tuple, zone and number. It must never go without
// the tuple: the kernel then deletes all flows.
func (f *Flow) deleteMessage() (netlink.Message, error) {
	if len(f.tuple) == 0 {
		return netlink.Message{}, fmt.Errorf("%w: a flow without a tuple", nl.ErrMalformed)
	}
	return encode(messageDelete, nl.FamilyOf(f.Orig.Src.Addr()), func(ae *netlink.AttributeEncoder) {
		ae.Bytes(attrTupleOrig|netlink.Nested, f.tuple)
		if f.zone != 0 {
			ae.Uint16(attrZone, f.zone)
		}
		ae.Uint32(attrID, f.id)
	})
}

// walk goes over attributes behind a header; numbers are in network order.
func walk(b []byte, header int, fn func(ad *netlink.AttributeDecoder)) error {
	if len(b) < header {
		return fmt.Errorf("%w: %d bytes", nl.ErrMalformed, len(b))
	}
	return nl.Decode(b[header:], func(ad *netlink.AttributeDecoder) error {
		ad.ByteOrder = binary.BigEndian
		fn(ad)
		return nil
	})
}

// decodeStats reads the answer to IPCTNL_MSG_CT_GET_STATS: how many flows there are.
func decodeStats(b []byte) (entries uint32, _ error) {
	err := walk(b, headerLen, func(ad *netlink.AttributeDecoder) {
		if ad.Type() == statsEntries {
			entries = ad.Uint32()
		}
	})
	return entries, err
}

// decode reads a message of type IPCTNL_MSG_CT_NEW.
func decode(b []byte) (Flow, error) {
	var f Flow
	err := walk(b, headerLen, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case attrTupleOrig:
			f.tuple = ad.Bytes()
			ad.Do(func(b []byte) error { return f.decodeTuple(&f.Orig, b) })
		case attrTupleReply:
			ad.Do(func(b []byte) error { return f.decodeTuple(&f.Reply, b) })
		case attrID:
			f.id = ad.Uint32()
		case attrZone:
			f.zone = ad.Uint16()
		}
	})
	if err == nil && (!f.Orig.Src.IsValid() || !f.Reply.Src.IsValid()) {
		err = fmt.Errorf("%w: a flow without both of its tuples", nl.ErrMalformed)
	}
	return f, err
}

// decodeTuple reads CTA_TUPLE_ORIG or CTA_TUPLE_REPLY.
func (f *Flow) decodeTuple(t *Tuple, b []byte) error {
	var src, dst netip.Addr
	var srcPort, dstPort uint16
	err := walk(b, 0, func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case tupleIP:
			ad.Do(func(b []byte) error {
				return walk(b, 0, func(ad *netlink.AttributeDecoder) {
					switch ad.Type() {
					case ipV4Src, ipV6Src:
						ad.Do(nl.Addr(&src))
					case ipV4Dst, ipV6Dst:
						ad.Do(nl.Addr(&dst))
					}
				})
			})
		case tupleProto:
			ad.Do(func(b []byte) error {
				return walk(b, 0, func(ad *netlink.AttributeDecoder) {
					switch ad.Type() {
					case protoNum:
						f.Proto = ad.Uint8()
					case protoSrcPort:
						srcPort = ad.Uint16()
					case protoDstPort:
						dstPort = ad.Uint16()
					}
				})
			})
		}
	})
	*t = Tuple{netip.AddrPortFrom(src, srcPort), netip.AddrPortFrom(dst, dstPort)}
	return err
}
