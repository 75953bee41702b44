package tc

import (
	"encoding/binary"
	"math"
	"net"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// What is ours in the kernel has this handle, or this priority: "to", and none that
// people or agents choose. Other agents' filters are mostly of priority 1, and so
// come before ours; those that leave it to the kernel get 49152, and come after.
const (
	ownMinor    = 0x746f
	ownHandle   = ownMinor << 16
	ownPriority = ownMinor
)

// Parents and handles of include/uapi/linux/pkt_sched.h.
const (
	parentRoot    = 0xffffffff // TC_H_ROOT
	parentClsact  = 0xfffffff1 // TC_H_CLSACT, which is TC_H_INGRESS
	parentIngress = 0xfffffff2 // TC_H_CLSACT and TC_H_MIN_INGRESS
	parentEgress  = 0xfffffff3 // TC_H_CLSACT and TC_H_MIN_EGRESS
	handleClsact  = 0xffff0000
)

// Attributes of include/uapi/linux/{rtnetlink,pkt_sched,pkt_cls}.h and
// tc_act/tc_mirred.h.
const (
	tcaKind    = 1 // TCA_KIND
	tcaOptions = 2 // TCA_OPTIONS

	tbfParms  = 1 // TCA_TBF_PARMS
	tbfRate64 = 4 // TCA_TBF_RATE64
	tbfBurst  = 6 // TCA_TBF_BURST, Linux 3.14

	u32Sel = 5 // TCA_U32_SEL
	u32Act = 7 // TCA_U32_ACT

	bpfOpsLen = 4 // TCA_BPF_OPS_LEN
	bpfOps    = 5 // TCA_BPF_OPS
	bpfFlags  = 8 // TCA_BPF_FLAGS

	actKind    = 1 // TCA_ACT_KIND
	actOptions = 2 // TCA_ACT_OPTIONS

	mirredParms = 2 // TCA_MIRRED_PARMS
)

const (
	sizeofTCMsg      = 20 // struct tcmsg, include/uapi/linux/rtnetlink.h
	sizeofTBFQopt    = 36 // struct tc_tbf_qopt, include/uapi/linux/pkt_sched.h
	sizeofU32Sel     = 16 // struct tc_u32_sel without its keys, include/uapi/linux/pkt_cls.h
	sizeofU32Key     = 16 // struct tc_u32_key
	sizeofTCMirred   = 28 // struct tc_mirred, include/uapi/linux/tc_act/tc_mirred.h
	sizeofSockFilter = 8  // struct sock_filter, include/uapi/linux/filter.h
	linkEthernet     = 1  // TC_LINKLAYER_ETHERNET
	u32Terminal      = 1  // TC_U32_TERMINAL
	actStolen        = 4  // TC_ACT_STOLEN
	bpfActDirect     = 1  // TCA_BPF_FLAG_ACT_DIRECT
	mirredRedirect   = 1  // TCA_EGRESS_REDIR
	addrGenModeNone  = 1  // IN6_ADDR_GEN_MODE_NONE, include/uapi/linux/if_link.h
)

// tcMsg appends struct tcmsg. Inlined, it would be in the program a dozen times.
//
//go:noinline
func tcMsg(e *nl.Encoder, index int, handle, parent, info uint32) {
	var b [sizeofTCMsg]byte
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	binary.NativeEndian.PutUint32(b[8:], handle)
	binary.NativeEndian.PutUint32(b[12:], parent)
	binary.NativeEndian.PutUint32(b[16:], info)
	e.Raw(b[:])
}

// ifInfo appends struct ifinfomsg (include/uapi/linux/rtnetlink.h).
func ifInfo(e *nl.Encoder, index int, flags, change uint32) {
	var b [unix.SizeofIfInfomsg]byte
	binary.NativeEndian.PutUint32(b[4:], uint32(index))
	binary.NativeEndian.PutUint32(b[8:], flags)
	binary.NativeEndian.PutUint32(b[12:], change)
	e.Raw(b[:])
}

// setTBF appends a request that makes a token bucket filter the root qdisc of a
// link, or gives new parameters to the one of ours that is there, whose queue and
// tokens it keeps.
func setTBF(b *nl.Batch, name string, index int, w bucket) {
	b.Request("set qdisc tbf of", nl.Name(name), unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, func(e *nl.Encoder) {
		tcMsg(e, index, ownHandle, parentRoot, 0)
		e.String(tcaKind, "tbf")
		e.Nest(tcaOptions, w.encode)
	})
}

func (w bucket) encode(e *nl.Encoder) {
	var q [sizeofTBFQopt]byte
	q[1] = linkEthernet // otherwise the kernel wants a table of transmission times
	binary.NativeEndian.PutUint32(q[8:], uint32(min(w.rate, math.MaxUint32)))
	binary.NativeEndian.PutUint32(q[24:], w.limit)
	e.Bytes(tbfParms, q[:])
	// In bytes, so that no clock tick comes between us and what is meant.
	e.Uint32(tbfBurst, w.burst)
	if w.rate > math.MaxUint32 {
		var rate [8]byte
		binary.NativeEndian.PutUint64(rate[:], w.rate)
		e.Bytes(tbfRate64, rate[:])
	}
}

// delQdisc appends the deletion of the root qdisc, or with parentClsact of what is
// in the place of clsact.
func delQdisc(b *nl.Batch, name string, index int, parent uint32) {
	b.Request("delete qdisc of", nl.Name(name), unix.RTM_DELQDISC, 0, func(e *nl.Encoder) {
		tcMsg(e, index, 0, parent, 0)
	})
}

// getQdisc appends a request for the root qdisc, or for what is in the place of
// clsact. The kernel takes the answer for news that it multicasts: without asking
// for an echo, who asked is left out (Linux 6.1 and 6.18).
func getQdisc(b *nl.Batch, name string, index int, parent uint32, into *qdisc) {
	b.Get("get qdisc of", nl.Name(name), unix.RTM_GETQDISC, unix.NLM_F_ECHO, func(e *nl.Encoder) {
		tcMsg(e, index, 0, parent, 0)
	}, func(m nl.Message) error { return into.decode(m.Data) })
}

// addClsact appends a request that gives a port the place for filters.
func addClsact(b *nl.Batch, name string, index int) {
	b.Request("add qdisc clsact to", nl.Name(name), unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
		tcMsg(e, index, handleClsact, parentClsact, 0)
		e.String(tcaKind, "clsact")
	})
}

// filterInfo is the field tcm_info of a filter of our priority.
func filterInfo(protocol uint16) uint32 { return ownPriority<<16 | uint32(htons(protocol)) }

func htons(v uint16) uint16 {
	return binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v))
}

// addFilter appends a request for a filter that redirects all that comes in by a
// port to the egress of another link. u32 matches everything by a key of no bits;
// matchall would say it better, and is not in every kernel.
func addFilter(b *nl.Batch, name string, index, to int) {
	b.Request("add filter to", nl.Name(name), unix.RTM_NEWTFILTER, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
		tcMsg(e, index, 0, parentIngress, filterInfo(unix.ETH_P_ALL))
		e.String(tcaKind, "u32")
		e.Nest(tcaOptions, func(e *nl.Encoder) {
			var sel [sizeofU32Sel + sizeofU32Key]byte
			sel[0] = u32Terminal
			sel[2] = 1 // a single key, all zero
			e.Bytes(u32Sel, sel[:])
			e.Nest(u32Act, func(e *nl.Encoder) {
				e.Nest(1, func(e *nl.Encoder) {
					e.String(actKind, "mirred")
					e.Nest(actOptions, func(e *nl.Encoder) { e.Bytes(mirredParms, redirect(to)) })
				})
			})
		})
	})
}

func redirect(to int) []byte {
	p := make([]byte, sizeofTCMirred)
	binary.NativeEndian.PutUint32(p[8:], actStolen)
	binary.NativeEndian.PutUint32(p[20:], mirredRedirect)
	binary.NativeEndian.PutUint32(p[24:], uint32(to))
	return p
}

// delFilters appends the deletion of all that a port has in our priority, whose
// filters are of one protocol.
func delFilters(b *nl.Batch, name string, index int, protocol uint16) {
	b.Request("delete filter of", nl.Name(name), unix.RTM_DELTFILTER, 0, func(e *nl.Encoder) {
		tcMsg(e, index, 0, parentIngress, filterInfo(protocol))
	})
}

// addIFB appends a request for an ifb, still down. Its MAC is given, so that udev
// does not change it later.
func addIFB(b *nl.Batch, name string, mac net.HardwareAddr, mtu int) {
	b.Request("add link", nl.Name(name), unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, func(e *nl.Encoder) {
		ifInfo(e, 0, 0, 0)
		e.String(unix.IFLA_IFNAME, name)
		e.Bytes(unix.IFLA_ADDRESS, mac)
		e.Uint32(unix.IFLA_MTU, uint32(mtu))
		e.Nest(unix.IFLA_LINKINFO, func(e *nl.Encoder) { e.String(unix.IFLA_INFO_KIND, "ifb") })
	})
}

// setIFB appends what the kernel passes over in a request that creates: the alias,
// and that no link-local address is to be made.
func setIFB(b *nl.Batch, name, alias string, mtu int) {
	b.Request("set link", nl.Name(name), unix.RTM_NEWLINK, 0, func(e *nl.Encoder) {
		ifInfo(e, 0, 0, 0)
		e.String(unix.IFLA_IFNAME, name)
		if alias != "" {
			e.String(unix.IFLA_IFALIAS, alias)
		}
		// Below the least MTU of IPv6 (RFC 8200, section 5) a link has no IPv6 to set.
		if mtu < 1280 {
			return
		}
		e.Nest(unix.IFLA_AF_SPEC, func(e *nl.Encoder) {
			e.Nest(unix.AF_INET6, func(e *nl.Encoder) { e.Uint8(unix.IFLA_INET6_ADDR_GEN_MODE, addrGenModeNone) })
		})
	})
}

// setUp appends a request by index: whatever has the name by now, it is meant for
// the link that the qdisc was given to.
func setUp(b *nl.Batch, name string, index int) {
	b.Request("set link up", nl.Name(name), unix.RTM_NEWLINK, 0, func(e *nl.Encoder) {
		ifInfo(e, index, unix.IFF_UP, unix.IFF_UP)
	})
}

// delLink appends the deletion of a link by its index; by its name if that is 0.
func delLink(b *nl.Batch, name string, index int) {
	b.Request("delete link", nl.Name(name), unix.RTM_DELLINK, 0, func(e *nl.Encoder) {
		ifInfo(e, index, 0, 0)
		if index == 0 {
			e.String(unix.IFLA_IFNAME, name)
		}
	})
}

// skipStats is RTEXT_FILTER_SKIP_STATS: a reply without the counters is half as long.
const skipStats = 1 << 3

func getLink(b *nl.Batch, name string, into *link) {
	b.Get("get link", nl.Name(name), unix.RTM_GETLINK, 0, func(e *nl.Encoder) {
		ifInfo(e, 0, 0, 0)
		e.String(unix.IFLA_IFNAME, name)
		e.Uint32(unix.IFLA_EXT_MASK, skipStats)
	}, func(m nl.Message) error { return into.decode(m.Data) })
}
