package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

// More of include/uapi/linux/netfilter/nfnetlink_conntrack.h.
const (
	attrProtoInfo   = 4  // CTA_PROTOINFO
	attrHelp        = 5  // CTA_HELP
	attrNATSrc      = 6  // CTA_NAT_SRC
	attrTimeout     = 7  // CTA_TIMEOUT
	attrMark        = 8  // CTA_MARK
	attrNATDst      = 13 // CTA_NAT_DST
	attrSeqAdjOrig  = 15 // CTA_SEQ_ADJ_ORIG
	attrSeqAdjReply = 16 // CTA_SEQ_ADJ_REPLY
	attrLabels      = 22 // CTA_LABELS
	attrSynProxy    = 24 // CTA_SYNPROXY

	natV4Min = 1 // CTA_NAT_V4_MINIP
	natV4Max = 2 // CTA_NAT_V4_MAXIP
	natProto = 3 // CTA_NAT_PROTO
	natV6Min = 4 // CTA_NAT_V6_MINIP
	natV6Max = 5 // CTA_NAT_V6_MAXIP

	natPortMin = 1 // CTA_PROTONAT_PORT_MIN
	natPortMax = 2 // CTA_PROTONAT_PORT_MAX

	protoInfoTCP = 1 // CTA_PROTOINFO_TCP

	tcpState       = 1 // CTA_PROTOINFO_TCP_STATE
	tcpScaleOrig   = 2 // CTA_PROTOINFO_TCP_WSCALE_ORIGINAL
	tcpScaleReply  = 3 // CTA_PROTOINFO_TCP_WSCALE_REPLY
	tcpFlagsOrig   = 4 // CTA_PROTOINFO_TCP_FLAGS_ORIGINAL
	tcpFlagsReply  = 5 // CTA_PROTOINFO_TCP_FLAGS_REPLY
	tcpFlagLiberal = 8 // IP_CT_TCP_FLAG_BE_LIBERAL

	statusSeenReply = 1 << 1 // IPS_SEEN_REPLY
	statusAssured   = 1 << 2 // IPS_ASSURED
	statusConfirmed = 1 << 3 // IPS_CONFIRMED
	statusSrcNAT    = 1 << 4 // IPS_SRC_NAT
	statusFixedTime = 1 << 10
)

// Unbind makes flows whose source is translated to one of some addresses independent
// of the link that they go out by, and gives those that it did so to. The kernel
// remembers of a masqueraded flow which link that was: it deletes the flow when the
// link loses the address, though another may have it, and drops the flow's next packet
// if it goes out elsewhere. After that, what the far side sends reaches the host
// itself, which resets the connection.
//
// A flow that was not begun by a packet is not bound to a link. So each is deleted and
// written anew as it was, in one sendmsg. TCP's sequence numbers are not checked
// against its window from then on, as in any connection that the kernel joins midway;
// counters and timestamps begin anew. In the microseconds between, a packet may begin
// the flow by itself, bound again, and one of the far side may reset it.
//
// Flows of protocols without ports are left, and those for which except, if not nil,
// says so. A kernel without connection tracking has none. It needs
// CAP_NET_ADMIN.
func (c *Conn) Unbind(ctx context.Context, addrs []netip.Addr, except func(Flow) bool) ([]Flow, error) {
	var bound []binding
	for _, q := range bindings(addrs) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		list, err := c.bound(&q)
		if noConntrack(err) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		for _, b := range list {
			if except == nil || !except(b.flow) {
				bound = append(bound, b)
			}
		}
	}
	var done []Flow
	var errs []error
	for len(bound) > 0 {
		part := bound[:min(unbindAtOnce, len(bound))]
		bound = bound[len(part):]
		flows, err := c.unbindAtOnce(part)
		done = append(done, flows...)
		errs = append(errs, err)
	}
	return done, errors.Join(errs...)
}

const unbindAtOnce = deletesAtOnce / 2

func noConntrack(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)
}

// binding is a flow with what it takes to write it anew.
type binding struct {
	flow Flow
	// same are attributes that go back as they came.
	same []attribute
	info *tcpInfo
}

type attribute struct {
	typ   uint16
	value []byte
}

// tcpInfo is what the kernel knows of a TCP connection.
type tcpInfo struct {
	state  uint8
	scale  [2]uint8 // by direction, like the flags
	flags  [2]uint8
	scaled bool
}

// bindings makes questions of addresses: for IPv4 the kernel picks the flows.
func bindings(addrs []netip.Addr) []question {
	var list []question
	v6 := question{common: Filter{Family: unix.AF_INET6}}
	translated := func(f Flow) bool { return f.Status&statusSrcNAT != 0 && hasPorts(f.Proto) }
	for _, a := range addrs {
		f := Filter{Family: familyOf(a), Reply: Match{Dst: a}, Where: translated}
		if a.Is4() {
			list = append(list, ask([]Filter{f}))
		} else {
			v6.filters = append(v6.filters, f)
		}
	}
	if len(v6.filters) > 0 {
		list = append(list, v6)
	}
	return list
}

func (c *Conn) bound(q *question) ([]binding, error) {
	var list []binding
	ask, err := q.message()
	err = c.nl.List("list translated flows", ask, err, func(m netlink.Message) error {
		if m.Header.Type != messageNew {
			return nil
		}
		b, err := decodeBinding(m.Data)
		if err == nil && q.matches(&b.flow) {
			list = append(list, b)
		}
		return err
	})
	return list, err
}

// unbindAtOnce gives those flows that were written anew.
func (c *Conn) unbindAtOnce(list []binding) ([]Flow, error) {
	var b nl.Batch
	for i := range list {
		f := &list[i]
		m, err := f.flow.deleteMessage()
		b.Add("delete flow", &f.flow, m, err)
		m, err = f.message()
		b.Add("write flow", &f.flow, m, err)
	}
	err := c.nl.Execute(&b)
	var opErr *tombolo.OpError
	if err != nil && !errors.As(err, &opErr) {
		return nil, err
	}
	var done []Flow
	var errs []error
	for i := range list {
		deleted, written := b.Err(2*i), b.Err(2*i+1)
		switch {
		case deleted == nil && written == nil:
			done = append(done, list[i].flow)
		case deleted != nil && written == nil:
			// It had ended, and is not to live on.
			errs = append(errs, c.deleteWritten(&list[i].flow))
		case deleted == nil && !errors.Is(written, unix.EEXIST):
			errs = append(errs, written)
		}
	}
	return done, errors.Join(errs...)
}

func (c *Conn) deleteWritten(f *Flow) error {
	var b nl.Batch
	m, err := encode(messageDelete, 0, familyOf(f.Orig.Src.Addr()), f.encodeTuple)
	b.Add("delete flow", f, m, err)
	if err := c.nl.Execute(&b); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// message writes a flow as it was: its tuple, the reverse of that, and how the two are
// translated.
func (b *binding) message() (netlink.Message, error) {
	f := &b.flow
	return encode(messageNew, netlink.Create|netlink.Excl, familyOf(f.Orig.Src.Addr()), func(ae *netlink.AttributeEncoder) {
		f.encodeTuple(ae)
		nested(ae, attrTupleReply, Tuple{Src: f.Orig.Dst, Dst: f.Orig.Src}.encode(f.Proto))
		if f.Reply.Src != f.Orig.Dst {
			nested(ae, attrNATDst, encodeNAT(f.Reply.Src))
		}
		nested(ae, attrNATSrc, encodeNAT(f.Reply.Dst))
		// Other bits are the kernel's to set, and to name them is an error.
		ae.Uint32(attrStatus, statusConfirmed|f.Status&(statusSeenReply|statusAssured|statusFixedTime))
		if b.info != nil {
			nested(ae, attrProtoInfo, func(ae *netlink.AttributeEncoder) { nested(ae, protoInfoTCP, b.info.encode) })
		}
		for _, a := range b.same {
			ae.Bytes(a.typ, a.value)
		}
	})
}

// encodeTuple writes what names the flow, whichever one has the tuple.
func (f *Flow) encodeTuple(ae *netlink.AttributeEncoder) {
	ae.Bytes(attrTupleOrig|netlink.Nested, f.tuple)
	if f.Zone != 0 {
		ae.Uint16(attrZone, f.Zone)
	}
}

func (t Tuple) encode(proto uint8) func(*netlink.AttributeEncoder) {
	src, dst := uint16(ipV4Src), uint16(ipV4Dst)
	if t.Src.Addr().Is6() {
		src, dst = ipV6Src, ipV6Dst
	}
	return func(ae *netlink.AttributeEncoder) {
		nested(ae, tupleIP, func(ae *netlink.AttributeEncoder) {
			nl.PutAddr(ae, src, t.Src.Addr())
			nl.PutAddr(ae, dst, t.Dst.Addr())
		})
		nested(ae, tupleProto, func(ae *netlink.AttributeEncoder) {
			ae.Uint8(protoNum, proto)
			ae.Uint16(protoSrcPort, t.Src.Port())
			ae.Uint16(protoDstPort, t.Dst.Port())
		})
	}
}

// encodeNAT writes a range of one address and one port.
func encodeNAT(to netip.AddrPort) func(*netlink.AttributeEncoder) {
	low, high := uint16(natV4Min), uint16(natV4Max)
	if to.Addr().Is6() {
		low, high = natV6Min, natV6Max
	}
	return func(ae *netlink.AttributeEncoder) {
		nl.PutAddr(ae, low, to.Addr())
		nl.PutAddr(ae, high, to.Addr())
		nested(ae, natProto, func(ae *netlink.AttributeEncoder) {
			ae.Uint16(natPortMin, to.Port())
			ae.Uint16(natPortMax, to.Port())
		})
	}
}

func (i *tcpInfo) encode(ae *netlink.AttributeEncoder) {
	ae.Uint8(tcpState, i.state)
	if i.scaled {
		ae.Uint8(tcpScaleOrig, i.scale[0])
		ae.Uint8(tcpScaleReply, i.scale[1])
	}
	// struct nf_ct_tcp_flags: the flags, and which of them are meant.
	ae.Bytes(tcpFlagsOrig, []byte{i.flags[0] | tcpFlagLiberal, 0xff})
	ae.Bytes(tcpFlagsReply, []byte{i.flags[1] | tcpFlagLiberal, 0xff})
}

// decodeBinding reads a message of type IPCTNL_MSG_CT_NEW.
func decodeBinding(data []byte) (binding, error) {
	flow, err := decode(data)
	if err != nil {
		return binding{}, err
	}
	b := binding{flow: flow}
	keep := func(ad *netlink.AttributeDecoder, flags uint16) {
		b.same = append(b.same, attribute{ad.Type() | flags, ad.Bytes()})
	}
	err = walk(data[headerLen:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case attrTimeout, attrLabels:
			keep(ad, 0)
		case attrMark:
			if ad.Uint32() != 0 {
				keep(ad, 0)
			}
		case attrHelp, attrSeqAdjOrig, attrSeqAdjReply, attrSynProxy:
			keep(ad, netlink.Nested)
		case attrProtoInfo:
			if flow.Proto != unix.IPPROTO_TCP {
				keep(ad, netlink.Nested)
				return
			}
			inside(ad, func(ad *netlink.AttributeDecoder) {
				if ad.Type() == protoInfoTCP {
					b.info = new(tcpInfo)
					inside(ad, b.info.decode)
				}
			})
		}
	})
	if err != nil {
		return binding{}, err
	}
	return b, nil
}

func (i *tcpInfo) decode(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case tcpState:
		i.state = ad.Uint8()
	case tcpScaleOrig, tcpScaleReply:
		i.scale[ad.Type()-tcpScaleOrig] = ad.Uint8()
		i.scaled = true
	case tcpFlagsOrig, tcpFlagsReply:
		ad.Do(func(b []byte) error {
			if len(b) != 2 {
				return fmt.Errorf("flags of %d bytes", len(b))
			}
			i.flags[ad.Type()-tcpFlagsOrig] = b[0]
			return nil
		})
	}
}
