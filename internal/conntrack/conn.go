// Package conntrack lists and deletes flows of the kernel's connection tracking. A flow is the kernel's entry for one
// connection, and contains the address translation of its packets.
//
//	n, err := conn.Flush(ctx, conntrack.Of(netip.MustParseAddr("10.22.0.5")))
//
// NAT rules see only the first packet of a flow. A client that keeps sending datagrams from one port keeps its flow,
// with the translation that was chosen when the flow began.
//
// If the network namespace has flows, the kernel walks through its whole table for each Selector. All network
// namespaces share this table. The walk takes about 9 ms for 262,144 buckets (the default with more than 4 GiB of
// memory), and 2.5 µs for each returned flow.
//
// The package needs CAP_NET_ADMIN in the user namespace that owns the network namespace, and Linux 6.1 or later with
// nf_conntrack_netlink (CONFIG_NF_CT_NETLINK). The messages are defined in
// include/uapi/linux/netfilter/nfnetlink_conntrack.h.
package conntrack

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Selector selects flows of the connection tracking. A flow must meet all of its conditions.
type Selector struct {
	// Family is the address family of the flows: unix.AF_INET or unix.AF_INET6.
	Family uint8
	// Proto is the number of an IP protocol, such as unix.IPPROTO_UDP. 0 means any protocol.
	Proto uint8
	// Port is the destination port of the flow's first packet, for TCP or UDP. 0 means any port. It requires Proto.
	Port uint16
	// Where reports whether to select a flow. List calls it for flows that meet the other conditions. It must not be
	// nil.
	Where func(*Flow) bool
}

// Of returns a Selector for all flows from an address, masqueraded or not, and for all flows to it, also through a port
// of the host. Use it for the address of a deleted pod, before another pod gets the address.
func Of(a netip.Addr) Selector {
	return Selector{Family: nl.FamilyOf(a),
		Where: func(f *Flow) bool { return f.Orig.Src.Addr() == a || f.Reply.Src.Addr() == a }}
}

// Conn lists and deletes the flows of one network namespace. Several goroutines may call its methods at the same
// time. Errors from the kernel are, or wrap, a *tombolo.OpError.
type Conn struct{ nl *nl.Conn }

// Dial opens a connection that works on the network namespace ns. If ns is nil, it works on the calling thread's
// namespace.
func Dial(ns *netns.NS) (*Conn, error) {
	conn, err := nl.Dial(unix.NETLINK_NETFILTER, ns)
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// Close closes the connection.
func (c *Conn) Close() error { return c.nl.Close() }

// List returns the flows that at least one Selector in questions selects, for one Selector after the other. If several
// select a flow, List repeats the flow. If a flow begins or ends during the call, the result may contain it or not.
//
// The error matches errors.ErrUnsupported if the kernel has no ctnetlink, fs.ErrPermission without CAP_NET_ADMIN, and
// tombolo.ErrInterrupted if many attempts in a row were interrupted.
func (c *Conn) List(ctx context.Context, questions ...Selector) ([]Flow, error) {
	if len(questions) == 0 || ctx.Err() != nil {
		return nil, ctx.Err()
	}

	if count, err := c.count(); err != nil || count == 0 {
		return nil, err
	}

	var list []Flow
	for _, q := range questions {
		m, err := q.message()
		err = c.nl.List(ctx, "list flows", m, err, func(m netlink.Message) error {
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

// count returns the number of flows in the network namespace. It reads a counter of the kernel, not the whole table.
func (c *Conn) count() (count uint32, _ error) {
	m, err := encode(messageStats, unix.AF_UNSPEC, func(*netlink.AttributeEncoder) {})
	err = c.nl.Get(context.Background(), "count flows", nil, m, err, func(m netlink.Message) (err error) {
		count, err = decodeStats(m.Data)
		return err
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		// The kernel does not know the subsystem ctnetlink, and could not load its module.
		return 0, &tombolo.OpError{Op: "count flows", Err: fmt.Errorf(
			"%w: this kernel has no ctnetlink; load the module nf_conntrack_netlink, or use a kernel with "+
				"CONFIG_NF_CT_NETLINK",
			errors.ErrUnsupported)}
	}

	return count, err
}

// Flush deletes the flows that at least one Selector in questions selects, and returns the number of deleted flows. A
// flow that ends by itself during the call is no error and is not counted. If a new flow with the same addresses and
// ports replaces a selected flow during the call, Flush leaves the new one, unless it has the same id.
//
// The next packet of a client opens a new flow under the present rules. So change the rules before Flush.
func (c *Conn) Flush(ctx context.Context, questions ...Selector) (deleted int, _ error) {
	list, err := c.List(ctx, questions...)
	if err != nil {
		return 0, err
	}

	// Limit the size of a batch. Its acknowledgements must fit into the socket's buffer, which only a privileged
	// process can enlarge beyond net.core.rmem_max.
	const atOnce = 128
	for some := range slices.Chunk(list, atOnce) {
		var b nl.Batch
		for i := range some {
			m, err := some[i].deleteMessage()
			b.Add("delete flow", &some[i], m, err)
		}

		_ = c.nl.Execute(&b) // b has the error of each flow
		for i := range some {
			switch err := b.Err(i); {
			case err == nil:
				deleted++
			case !errors.Is(err, unix.ENOENT): // ENOENT: no flow has this tuple and id
				return deleted, err
			}
		}
	}

	return deleted, nil
}

// Constants of include/uapi/linux/netfilter/nfnetlink_conntrack.h.
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

	// The bits of CTA_FILTER_*_FLAGS are not in the UAPI headers, but in net/netfilter/nf_internals.h.
	filterProto   = 1 << 3 // CTA_FILTER_F_CTA_PROTO_NUM
	filterDstPort = 1 << 5 // CTA_FILTER_F_CTA_PROTO_DST_PORT
)

// headerLen is the length of struct nfgenmsg in bytes.
const headerLen = 4

// Flow is an entry of the kernel's connection tracking.
type Flow struct {
	// Proto is the number of the IP protocol.
	Proto uint8
	// Orig is the tuple of the flow's first packet, before any translation. Reply is the tuple of the answers, before
	// they are translated back.
	Orig, Reply Tuple

	// id is the kernel's CTA_ID, a hash that is almost unique. It distinguishes flows that have the same tuple at
	// different times.
	id   uint32
	zone uint16
	// tuple is the kernel's attribute for Orig. A request to delete the flow contains it unchanged, since for some
	// protocols it has more than addresses and ports.
	tuple []byte
}

// Tuple holds the source and the destination of packets in one direction of a flow. The ports are 0 if the protocol
// has none.
type Tuple struct{ Src, Dst netip.AddrPort }

// String describes the flow by its protocol's number, its source and destination, and the source of the answers.
func (f *Flow) String() string {
	return fmt.Sprintf("of protocol %d from %s to %s, answered by %s", f.Proto, f.Orig.Src, f.Orig.Dst, f.Reply.Src)
}

// encode returns a request with struct nfgenmsg (include/uapi/linux/netfilter/nfnetlink.h). For a listing, the kernel
// returns only flows of the given family. Numbers are in network byte order, except in the attributes of a filter.
func encode(typ netlink.HeaderType, family uint8, fn func(ae *netlink.AttributeEncoder)) (netlink.Message, error) {
	return nl.Encode(typ, 0, []byte{family, unix.NFNETLINK_V0, 0, 0}, func(ae *netlink.AttributeEncoder) {
		ae.ByteOrder = binary.BigEndian
		fn(ae)
	})
}

// message returns a request for the flows that have the selector's family, protocol and port.
func (q *Selector) message() (netlink.Message, error) {
	return encode(messageGet, q.Family, func(ae *netlink.AttributeEncoder) {
		if q.Proto == 0 {
			return
		}

		flags := uint32(filterProto)
		nl.Nested(ae, attrTupleOrig, func(ae *netlink.AttributeEncoder) {
			nl.Nested(ae, tupleProto, func(ae *netlink.AttributeEncoder) {
				ae.Uint8(protoNum, q.Proto)
				if q.Port != 0 {
					flags |= filterDstPort
					ae.Uint16(protoDstPort, q.Port)
				}
			})
		})

		nl.Nested(ae, attrFilter, func(ae *netlink.AttributeEncoder) {
			ae.ByteOrder = binary.NativeEndian
			ae.Uint32(filterOrigFlags, flags)
			ae.Uint32(filterReplyFlags, 0)
		})
	})
}

// deleteMessage returns a request that deletes the flow with this tuple, zone and id. If the flow has no tuple,
// deleteMessage returns an error, since for such a request the kernel would delete all flows.
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

// number returns the number that b contains in network byte order, or 0 if b is empty.
func number(b []byte) (n uint32) {
	for _, digit := range b {
		n = n<<8 | uint32(digit)
	}
	return n
}

// decodeStats returns the number of flows in an answer to IPCTNL_MSG_CT_GET_STATS.
func decodeStats(b []byte) (entries uint32, _ error) {
	text := nl.Find(b[min(headerLen, len(b)):], statsEntries)
	if len(text) != 4 {
		return 0, fmt.Errorf("%w: statistics of %d bytes", nl.ErrMalformed, len(b))
	}
	return number(text), nil
}

// decode parses a message of the type IPCTNL_MSG_CT_NEW.
func decode(b []byte) (Flow, error) {
	b = b[min(headerLen, len(b)):]
	f := Flow{tuple: nl.Find(b, attrTupleOrig), id: number(nl.Find(b, attrID))}
	f.zone = uint16(number(nl.Find(b, attrZone)))
	f.Orig, f.Proto = decodeTuple(f.tuple)
	f.Reply, _ = decodeTuple(nl.Find(b, attrTupleReply))
	if !f.Orig.Src.IsValid() || !f.Reply.Src.IsValid() {
		return f, fmt.Errorf("%w: a flow without both of its tuples", nl.ErrMalformed)
	}
	return f, nil
}

// decodeTuple parses CTA_TUPLE_ORIG or CTA_TUPLE_REPLY.
func decodeTuple(b []byte) (t Tuple, protocol uint8) {
	end := func(v4, v6, port uint16) netip.AddrPort {
		a, _ := netip.AddrFromSlice(slices.Concat(nl.Find(b, tupleIP, v4), nl.Find(b, tupleIP, v6)))
		return netip.AddrPortFrom(a, uint16(number(nl.Find(b, tupleProto, port))))
	}
	t = Tuple{end(ipV4Src, ipV6Src, protoSrcPort), end(ipV4Dst, ipV6Dst, protoDstPort)}
	return t, uint8(number(nl.Find(b, tupleProto, protoNum)))
}
