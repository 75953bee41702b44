package conntrack

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// question is one dump: what the kernel is asked for, and the filters that it is to
// answer.
type question struct {
	common  Filter // what all of them demand
	filters []Filter
}

// plan makes a question of each family's filters.
func plan(filters []Filter) []question {
	var list []question
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		of := slices.DeleteFunc(slices.Clone(filters), func(f Filter) bool { return f.Family != family })
		if len(of) > 0 {
			list = append(list, ask(of))
		}
	}
	return list
}

func ask(filters []Filter) question {
	q := question{common: filters[0], filters: filters}
	for _, f := range filters[1:] {
		q.common = inCommon(q.common, f)
	}
	q.common.Where = nil
	return q
}

// inCommon gives the conditions that both filters have.
func inCommon(a, b Filter) Filter {
	f := Filter{Orig: bothMatch(a.Orig, b.Orig), Reply: bothMatch(a.Reply, b.Reply)}
	if a.Family == b.Family {
		f.Family = a.Family
	}
	if a.Proto == b.Proto {
		f.Proto = a.Proto
	} else {
		// The kernel compares no ports without a protocol.
		f.Orig.SrcPort, f.Orig.DstPort, f.Reply.SrcPort, f.Reply.DstPort = 0, 0, 0, 0
	}
	return f
}

func bothMatch(a, b Match) Match {
	addr := func(a, b netip.Addr) netip.Addr {
		if a == b {
			return a
		}
		return netip.Addr{}
	}
	port := func(a, b uint16) uint16 {
		if a == b {
			return a
		}
		return 0
	}
	return Match{addr(a.Src, b.Src), addr(a.Dst, b.Dst), port(a.SrcPort, b.SrcPort), port(a.DstPort, b.DstPort)}
}

func (q *question) matches(flow *Flow) bool {
	return slices.ContainsFunc(q.filters, func(f Filter) bool { return f.matches(flow) })
}

// String gives the filters.
func (q *question) String() string {
	var list []string
	for i := range q.filters {
		if s := q.filters[i].String(); !slices.Contains(list, s) {
			list = append(list, s)
		}
	}
	return strings.Join(list, ", or ")
}

// message is the request.
func (q *question) message() (netlink.Message, error) {
	f := &q.common
	orig, reply := flags(f.Orig, f.Family), flags(f.Reply, f.Family)
	// The protocol is the same in both tuples, so that one may name it for both.
	if f.Proto != 0 && reply&filterProto == 0 {
		orig |= filterProto
	}
	return encode(messageGet, 0, f.Family, func(ae *netlink.AttributeEncoder) {
		if f.Family == unix.AF_UNSPEC || orig == 0 && reply == 0 {
			return
		}
		encodeFilter(ae, attrTupleOrig, f.Proto, f.Orig, orig)
		encodeFilter(ae, attrTupleReply, f.Proto, f.Reply, reply)
		nested(ae, attrFilter, func(ae *netlink.AttributeEncoder) {
			ae.ByteOrder = binary.NativeEndian
			ae.Uint32(filterOrigFlags, orig)
			ae.Uint32(filterReplyFlags, reply)
		})
	})
}

// flags says what the kernel is to compare.
func flags(m Match, family uint8) uint32 {
	var flags uint32
	set := func(bits uint32, on bool) {
		if on {
			flags |= bits
		}
	}
	set(filterSrc, family == unix.AF_INET && m.Src.IsValid())
	set(filterDst, family == unix.AF_INET && m.Dst.IsValid())
	set(filterProto|filterSrcPort, m.SrcPort != 0)
	set(filterProto|filterDstPort, m.DstPort != 0)
	return flags
}

// encodeFilter writes the tuple that the flags are about.
func encodeFilter(ae *netlink.AttributeEncoder, typ uint16, proto uint8, m Match, flags uint32) {
	if flags == 0 {
		return
	}
	has := func(bit uint32) bool { return flags&bit != 0 }
	nested(ae, typ, func(ae *netlink.AttributeEncoder) {
		if has(filterSrc | filterDst) {
			nested(ae, tupleIP, func(ae *netlink.AttributeEncoder) {
				if has(filterSrc) {
					nl.PutAddr(ae, ipV4Src, m.Src)
				}
				if has(filterDst) {
					nl.PutAddr(ae, ipV4Dst, m.Dst)
				}
			})
		}
		if has(filterProto) {
			nested(ae, tupleProto, func(ae *netlink.AttributeEncoder) {
				ae.Uint8(protoNum, proto)
				if has(filterSrcPort) {
					ae.Uint16(protoSrcPort, m.SrcPort)
				}
				if has(filterDstPort) {
					ae.Uint16(protoDstPort, m.DstPort)
				}
			})
		}
	})
}
