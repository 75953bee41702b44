package route

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/nl/nltest"
)

// TestCopiesKeepAttributesOfLaterKernels has each object bear one that no kernel has yet.
func TestCopiesKeepAttributesOfLaterKernels(t *testing.T) {
	t.Parallel()
	const later = 62
	for kernel, list := range nltest.Recordings(t) {
		seen := map[netlink.HeaderType]bool{}
		for _, r := range list {
			for _, m := range r.Messages {
				if seen[m.Header.Type] {
					continue
				}
				attribute, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: later, Data: []byte("kept")}})
				if err != nil {
					t.Fatal(err)
				}
				m.Data = append(slices.Clone(m.Data), attribute...)
				copied, err := copyOf(m)
				if err != nil {
					continue // another of its type will do
				}
				seen[m.Header.Type] = true
				if !slices.Contains(said(copied), fmt.Sprintf("%d: %x", later, "kept")) {
					t.Errorf("%s, %s: the copy says %q", kernel, r.Command, said(copied))
				}
			}
		}
		if len(seen) != 3 {
			t.Errorf("%s: of %d types of messages, want routes, rules and neighbours", kernel, len(seen))
		}
	}
}

// copyOf reads an object, and gives the request that adds it again.
func copyOf(m netlink.Message) (netlink.Message, error) { return requestOf(m, duplicate) }

type verb int

const (
	duplicate verb = iota
	deletion
)

func requestOf(m netlink.Message, v verb) (netlink.Message, error) {
	pick := func(list ...func() (netlink.Message, error)) (netlink.Message, error) { return list[v]() }
	switch m.Header.Type {
	case unix.RTM_NEWROUTE:
		r, known, err := decode(m.Data)
		return journalled(r, known, err, func(r *Route) (netlink.Message, error) {
			return pick(func() (netlink.Message, error) { return r.CopyMessage(true) }, r.DelMessage)
		})
	case unix.RTM_NEWRULE:
		r, known, err := decodeRule(m.Data)
		return journalled(r, known, err, func(r *Rule) (netlink.Message, error) { return pick(r.CopyMessage, r.DelMessage) })
	case unix.RTM_NEWNEIGH:
		n, known, err := decodeNeighbour(m.Data)
		return journalled(n, known, err, func(n *Neighbour) (netlink.Message, error) { return pick(n.ReplaceMessage, n.DelMessage) })
	}
	return netlink.Message{}, fmt.Errorf("message of type %d", m.Header.Type)
}

// journalled does something with an object that was on record meanwhile.
func journalled[T any](object T, known bool, err error, do func(*T) (netlink.Message, error)) (netlink.Message, error) {
	if err != nil || !known {
		return netlink.Message{}, errors.Join(err, map[bool]error{false: errors.New("of a family that is left alone")}[known])
	}
	text, err := json.Marshal(object)
	if err != nil {
		return netlink.Message{}, err
	}
	var again T
	if err := json.Unmarshal(text, &again); err != nil {
		return netlink.Message{}, err
	}
	return do(&again)
}

// said gives what a message says, in an order of its own, without what is the kernel's
// to say and without the values that mean nothing.
func said(m netlink.Message) []string {
	var lines []string
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	switch b := m.Data; m.Header.Type {
	case unix.RTM_NEWROUTE:
		say("family %d, prefixes %d %d, tos %d, protocol %d, scope %d, type %d", b[0], b[1], b[2], b[3], b[5], b[6], b[7])
		say("flags %d", Flags(binary.NativeEndian.Uint32(b[8:]))&onLink)
		sayRoute(say, b)
	case unix.RTM_NEWRULE:
		say("family %d, prefixes %d %d, tos %d, action %d", b[0], b[1], b[2], b[3], b[7])
		say("flags %d", binary.NativeEndian.Uint32(b[8:])&unix.FIB_RULE_INVERT)
		sayRule(say, b)
	case unix.RTM_NEWNEIGH:
		say("family %d, link %d, flags %d", b[0], binary.NativeEndian.Uint32(b[4:]), b[10])
		if b[10]&unix.NTF_PROXY == 0 { // such an entry has none
			say("state %d", binary.NativeEndian.Uint16(b[8:]))
		}
		eachAttribute(b[unix.SizeofNdMsg:], func(a netlink.Attribute) {
			switch a.Type {
			case unix.NDA_CACHEINFO, unix.NDA_PROBES: // the kernel's own
			case unix.NDA_UNSPEC, unix.NDA_IFINDEX: // rtnetlink's
			default:
				say("%d: %x", a.Type, a.Data)
			}
		})
	}
	slices.Sort(lines)
	return lines
}

func sayRoute(say func(string, ...any), b []byte) {
	table, byObject := uint32(b[4]), false
	eachAttribute(b[unix.SizeofRtMsg:], func(a netlink.Attribute) { byObject = byObject || a.Type == rtaNHID })
	eachAttribute(b[unix.SizeofRtMsg:], func(a netlink.Attribute) {
		switch a.Type {
		case unix.RTA_TABLE:
			table = binary.NativeEndian.Uint32(a.Data)
		case unix.RTA_CACHEINFO, unix.RTA_EXPIRES:
			if a.Type == unix.RTA_EXPIRES || expires(a.Data) != nil {
				say("expires")
			}
		case unix.RTA_PREF:
			if a.Data[0] != byte(PrefMedium) {
				say("preference %d", a.Data[0])
			}
		case unix.RTA_METRICS:
			eachAttribute(a.Data, func(m netlink.Attribute) { say("metric %d: %x", m.Type, m.Data) })
		case unix.RTA_OIF, unix.RTA_GATEWAY, unix.RTA_VIA, unix.RTA_ENCAP, unix.RTA_ENCAP_TYPE:
			if !byObject { // else the kernel shows what the object has
				say("%d: %x", a.Type, a.Data)
			}
		case unix.RTA_MULTIPATH:
			for i, rest := 0, a.Data; len(rest) > 0 && !byObject; i++ {
				n := int(binary.NativeEndian.Uint16(rest))
				say("hop %d: flags %d, hops %d, link %x", i, Flags(rest[2])&onLink, rest[3], rest[4:8])
				eachAttribute(rest[unix.SizeofRtNexthop:n], func(a netlink.Attribute) { say("hop %d: %d: %x", i, a.Type, a.Data) })
				rest = rest[min((n+3)&^3, len(rest)):]
			}
		default:
			say("%d: %x", a.Type, a.Data)
		}
	})
	say("table %d", table)
}

func sayRule(say func(string, ...any), b []byte) {
	table := uint32(b[4])
	eachAttribute(b[12:], func(a netlink.Attribute) {
		number := uint32(0)
		if len(a.Data) == 4 {
			number = binary.NativeEndian.Uint32(a.Data)
		}
		switch {
		case a.Type == unix.FRA_TABLE:
			table = number
		case (a.Type == unix.FRA_SUPPRESS_PREFIXLEN || a.Type == unix.FRA_SUPPRESS_IFGROUP) && number == 0xffffffff: // off
		case a.Type == unix.FRA_FWMARK && number == 0: // where there is a mask, it is compared nevertheless
		case a.Type == unix.FRA_PROTOCOL && a.Data[0] == 0: // nobody's
		case (a.Type == fraSportMask || a.Type == fraDportMask) && binary.NativeEndian.Uint16(a.Data) == 0xffff: // no mask
		default:
			say("%d: %x", a.Type, a.Data)
		}
	})
	say("table %d", table)
}

func eachAttribute(b []byte, fn func(netlink.Attribute)) {
	list, err := netlink.UnmarshalAttributes(b)
	if err != nil {
		panic(err)
	}
	for _, a := range list {
		a.Type = typeOf(a)
		fn(a)
	}
}

// seed gives a fuzz target all that kernels listed of a type.
func seed(f *testing.F, typ netlink.HeaderType) {
	for _, list := range nltest.Recordings(f) {
		for _, r := range list {
			for _, m := range r.Messages {
				if m.Header.Type == typ {
					f.Add(m.Data)
				}
			}
		}
	}
}

// mustKeepUnknown fails where attributes are lost that no kernel of today has.
func mustKeepUnknown(t *testing.T, listed, copied []byte, header int) {
	t.Helper()
	const unheardOf = 64
	unknown := func(b []byte) []netlink.Attribute {
		var list []netlink.Attribute
		if err := nl.Decode(b[header:], func(ad *netlink.AttributeDecoder) error {
			if ad.Type() >= unheardOf {
				list = append(list, nl.Keep(ad))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return list
	}
	if diff := cmp.Diff(unknown(listed), unknown(copied)); diff != "" {
		t.Errorf("unknown attributes (-listed +copied):\n%s", diff)
	}
}
