package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
)

// Filter says which flows are meant: those that fulfil all of its conditions. What
// is not set is no condition, but an address or a port must be set, in either tuple:
// no mistake is to flush a node's connections.
//
// The kernel is asked for no more than it compares rightly (6.18 and before), and
// the rest is compared here:
//   - IPv6 addresses it has the wrong way round: it would list all flows but those.
//     So a filter of nothing else than an IPv6 address has the kernel send all IPv6
//     flows of the namespace (some 250 bytes each): give Proto and a port too where
//     they are known.
//   - Of protocols other than TCP and UDP it disregards ports.
//
// Whatever the filter, the kernel walks its whole table, which all namespaces share:
// 9 ms for the usual 262,144 buckets, and 1 ms for every 5,000 flows in it. So it
// is asked once for each family, for what the filters of that family have in common, and not
// at all where the namespace has no flow. What it sends too much costs 2.5 µs a flow.
type Filter struct {
	// Family is unix.AF_INET or unix.AF_INET6; 0 is that of the addresses, or both
	// where there are none.
	Family uint8
	// Proto is an IP protocol number (unix.IPPROTO_UDP); 0 is any. Ports need one.
	Proto uint8
	// Orig is what packets of the flow's first sender look like before any
	// translation: of a published port, the client and the host's address.
	Orig Match
	// Reply is what packets of the other side look like before theirs: of a
	// published port, the pod and the client.
	Reply Match
	// Where is asked last, of flows that match otherwise; nil is no condition.
	Where func(Flow) bool
}

// Match is a condition on a tuple. An invalid or zero field is no condition.
type Match struct {
	Src, Dst         netip.Addr
	SrcPort, DstPort uint16
}

var errTooWide = errors.New("the filter has neither an address nor a port: it would match every flow of the node")

// split gives the filter as one of its family, or as two where it is of both: the
// kernel compares tuples of one family only.
func (f *Filter) split() ([]Filter, error) {
	family, err := f.check()
	if err != nil {
		return nil, err
	}
	families := []uint8{family}
	if family == unix.AF_UNSPEC {
		families = []uint8{unix.AF_INET, unix.AF_INET6}
	}
	var list []Filter
	for _, family := range families {
		one := *f
		one.Family = family
		list = append(list, one)
	}
	return list, nil
}

// check gives the family, or AF_UNSPEC for both.
func (f *Filter) check() (uint8, error) {
	if f.Orig.isEmpty() && f.Reply.isEmpty() {
		return 0, errTooWide
	}
	if (f.Orig.hasPort() || f.Reply.hasPort()) && !hasPorts(f.Proto) {
		return 0, fmt.Errorf("the filter has a port, and protocol %s has none", protoName(f.Proto))
	}
	family := f.Family
	for _, a := range []netip.Addr{f.Orig.Src, f.Orig.Dst, f.Reply.Src, f.Reply.Dst} {
		if !a.IsValid() {
			continue
		}
		if a.Is4In6() || a.Zone() != "" {
			return 0, fmt.Errorf("the filter has the address %s: flows have neither mapped addresses nor zones", a)
		}
		if of := familyOf(a); family == unix.AF_UNSPEC {
			family = of
		} else if family != of {
			return 0, fmt.Errorf("the filter has the address %s, and is of the other family", a)
		}
	}
	if family != unix.AF_UNSPEC && family != unix.AF_INET && family != unix.AF_INET6 {
		return 0, fmt.Errorf("the filter has address family %d: flows are of AF_INET or AF_INET6", family)
	}
	return family, nil
}

func familyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func (m Match) isEmpty() bool { return m == Match{} }

func (m Match) hasPort() bool { return m.SrcPort != 0 || m.DstPort != 0 }

func (m Match) matches(t Tuple) bool {
	return (!m.Src.IsValid() || m.Src == t.Src.Addr()) && (!m.Dst.IsValid() || m.Dst == t.Dst.Addr()) &&
		(m.SrcPort == 0 || m.SrcPort == t.Src.Port()) && (m.DstPort == 0 || m.DstPort == t.Dst.Port())
}

// matches is for filters of one family.
func (f *Filter) matches(flow *Flow) bool {
	return (f.Proto == 0 || f.Proto == flow.Proto) && f.Family == familyOf(flow.Orig.Src.Addr()) &&
		f.Orig.matches(flow.Orig) && f.Reply.matches(flow.Reply) && (f.Where == nil || f.Where(*flow))
}

// String gives the conditions, in the words of conntrack -L.
func (f *Filter) String() string {
	var words []string
	add := func(format string, args ...any) { words = append(words, fmt.Sprintf(format, args...)) }
	if f.Proto != 0 {
		add("%s", protoName(f.Proto))
	}
	for _, side := range []struct {
		name string
		m    Match
	}{{"orig", f.Orig}, {"reply", f.Reply}} {
		if side.m.isEmpty() {
			continue
		}
		add("%s", side.name)
		if side.m.Src.IsValid() {
			add("src=%s", side.m.Src)
		}
		if side.m.Dst.IsValid() {
			add("dst=%s", side.m.Dst)
		}
		if side.m.SrcPort != 0 {
			add("sport=%d", side.m.SrcPort)
		}
		if side.m.DstPort != 0 {
			add("dport=%d", side.m.DstPort)
		}
	}
	return strings.Join(words, " ")
}
