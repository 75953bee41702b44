package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
)

const (
	fraSportMask = 28 // FRA_SPORT_MASK, Linux 6.15
	fraDportMask = 29 // FRA_DPORT_MASK
)

// Rule is a rule of policy routing: what matches all of its selectors is looked up
// in its table. The zero value of a selector matches everything.
type Rule struct {
	// Family is unix.AF_INET or unix.AF_INET6; 0 is that of From or To.
	Family uint8
	// Priority is the rule's place, the lowest first. When it is added, 0 puts it
	// before all rules that have one.
	Priority uint32

	From, To netip.Prefix // host bits are disregarded
	IIF, OIF string       // names of links, which need not exist; "lo" as IIF is what the host itself sends
	// Mark is compared in the bits of Mask. A Mask of 0 is all bits where there is a
	// Mark, and no comparison where there is none.
	Mark, Mask uint32
	TOS        uint8
	IPProto    uint8 // IPPROTO_*
	// SrcPorts and DstPorts are for TCP, UDP and the like; set IPProto too.
	SrcPorts, DstPorts PortRange
	UIDs               *UIDRange // owner of the socket
	Invert             bool      // apply to what does not match

	// Action is what to do; 0 is ToTable.
	Action Action
	// Table is for ToTable; 0 is TableMain there.
	Table uint32
	// Goto is the Priority to go on with, for the action Goto.
	Goto uint32
	// L3MDev takes the table of the packet's VRF in place of Table.
	L3MDev bool
	// SuppressPrefixLength disregards a route found whose prefix has this length or
	// less; nil does not. SuppressGroup does so by the group of the route's link.
	SuppressPrefixLength, SuppressGroup *uint32

	// Protocol says who made the rule; 0 is ProtocolTombolo when it is added, and any
	// when it is deleted.
	Protocol Protocol
	// Unknown are types (FRA_*) of attributes that the kernel gave and this package
	// has no field for. A rule added without them may match more.
	Unknown []uint16
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// UIDRange is a range of user ids, both ends included.
type UIDRange struct{ First, Last uint32 }

// Action is what a rule does (FR_ACT_* of linux/fib_rules.h).
type Action uint8

// The actions. Those that end in an ICMP message are those of the route types of
// the same name.
const (
	ToTable         Action = unix.FR_ACT_TO_TBL
	Goto            Action = unix.FR_ACT_GOTO
	Nop             Action = unix.FR_ACT_NOP
	RuleBlackhole   Action = unix.FR_ACT_BLACKHOLE
	RuleUnreachable Action = unix.FR_ACT_UNREACHABLE
	RuleProhibit    Action = unix.FR_ACT_PROHIBIT
)

var (
	errRuleFamily   = errors.New("a rule without From and To needs its family")
	errRuleMixed    = errors.New("prefixes From and To are not of the rule's family")
	errRulePriority = errors.New("without a priority the kernel would add it each time")
	errRuleWide     = errors.New("a rule to be deleted needs its priority or a selector: the kernel would take the first that has the table")
)

// String names the rule as errors do: "100: from 10.1.0.0/16 table 7".
func (r Rule) String() string {
	var b strings.Builder
	if r.Priority != 0 {
		fmt.Fprintf(&b, "%d: ", r.Priority)
	}
	if r.Invert {
		b.WriteString("not ")
	}
	b.WriteString("from " + prefixOrAll(r.From))
	if r.To.IsValid() {
		b.WriteString(" to " + prefixOrAll(r.To))
	}
	if r.IIF != "" {
		b.WriteString(" iif " + r.IIF)
	}
	if r.OIF != "" {
		b.WriteString(" oif " + r.OIF)
	}
	if r.Mark != 0 || r.Mask != 0 {
		fmt.Fprintf(&b, " mark %#x/%#x", r.Mark, r.mask())
	}
	if r.Action <= ToTable {
		b.WriteString(" table " + strconv.FormatUint(uint64(r.table()), 10))
	}
	return b.String()
}

func prefixOrAll(p netip.Prefix) string {
	if p.Bits() <= 0 {
		return "all"
	}
	return p.Masked().String()
}

// mask is the kernel's reading of a mark without a mask: all its bits.
func (r *Rule) mask() uint32 {
	if r.Mark != 0 && r.Mask == 0 {
		return 0xffffffff
	}
	return r.Mask
}

// table is the table to look up, where that is what the rule does.
func (r *Rule) table() uint32 {
	if r.Table == 0 && r.Action <= ToTable && !r.L3MDev {
		return TableMain
	}
	return r.Table
}

// family gives 0 where nothing tells.
func (r *Rule) family() uint8 {
	switch {
	case r.Family != 0:
		return r.Family
	case r.From.IsValid():
		return familyOf(r.From.Addr())
	case r.To.IsValid():
		return familyOf(r.To.Addr())
	}
	return 0
}

// Rules gives the rules of a family, unix.AF_INET or unix.AF_INET6, or with 0 of
// both, in the order in which the kernel goes through them.
func (c *Conn) Rules(family uint8) ([]Rule, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}

	var list []Rule
	err := c.nl.Dump("list rules", unix.RTM_GETRULE, func(e *nl.Encoder) {
		e.Raw([]byte{family, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	}, func(m nl.Message) error {
		if m.Header.Type != unix.RTM_NEWRULE {
			return nil
		}
		r, known, err := decodeRule(m.Data)
		if known {
			list = append(list, r)
		}
		return err
	})
	return list, err
}

// AddRule adds a rule. The error matches fs.ErrExist where there is one with the
// same Priority, selectors, action and table. Without a Priority there never is:
// the kernel gives each a new one, and so takes the same rule again and again.
func (c *Conn) AddRule(r Rule) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	r.AppendAdd(&b)
	return c.nl.Execute(&b)
}

// EnsureRule adds a rule unless there is one that AddRule would find in its way,
// and says whether it did. It needs a Priority.
func (c *Conn) EnsureRule(r Rule) (changed bool, _ error) {
	if err := c.usable(); err != nil {
		return false, err
	}

	if r.Priority == 0 {
		return false, &tombolo.OpError{Op: "ensure rule", Object: r.String(), Err: errRulePriority}
	}
	err := c.AddRule(r)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	return err == nil, err
}

// DelRule deletes the first rule that has those fields of r that are set. The error
// matches fs.ErrNotExist where there is none. A rule with neither a Priority nor a
// selector is refused: it would match the kernel's own.
func (c *Conn) DelRule(r Rule) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	r.AppendDel(&b)
	return c.nl.Execute(&b)
}

// RemoveRule is DelRule for which a rule that is not there is success.
func (c *Conn) RemoveRule(r Rule) error {
	if err := c.usable(); err != nil {
		return err
	}
	return absentIsSuccess(c.DelRule(r))
}

// AppendAdd appends the request of Conn.AddRule to a batch, for packages of this
// module.
func (r Rule) AppendAdd(b *nl.Batch) {
	if r.Protocol == 0 {
		r.Protocol = ProtocolTombolo
	}
	b.Request("add rule", &r, unix.RTM_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, r.encode)
}

// AppendDel appends the request of Conn.DelRule to a batch, for packages of this
// module.
func (r Rule) AppendDel(b *nl.Batch) {
	b.Request("delete rule", &r, unix.RTM_DELRULE, 0, func(e *nl.Encoder) {
		if r.Priority == 0 && r.From.Bits() <= 0 && r.To.Bits() <= 0 && r.IIF == "" && r.OIF == "" && r.mask() == 0 {
			e.Fail(errRuleWide)
		}
		r.encode(e)
	})
}

// encode writes struct fib_rule_hdr (include/uapi/linux/fib_rules.h) and the
// attributes.
func (r *Rule) encode(e *nl.Encoder) {
	h := [12]byte{r.family(), 0, 0, r.TOS}
	switch {
	case h[0] == 0:
		e.Fail(errRuleFamily)
	case r.From.IsValid() && familyOf(r.From.Addr()) != h[0], r.To.IsValid() && familyOf(r.To.Addr()) != h[0]:
		e.Fail(errRuleMixed)
	}
	h[1], h[2] = uint8(max(r.To.Bits(), 0)), uint8(max(r.From.Bits(), 0))
	if r.table() < 256 {
		h[4] = uint8(r.table())
	}
	h[7] = uint8(max(r.Action, ToTable))
	var flags uint32
	if r.Invert {
		flags = unix.FIB_RULE_INVERT
	}
	binary.NativeEndian.PutUint32(h[8:], flags)
	e.Raw(h[:])
	if h[1] > 0 {
		e.Addr(unix.FRA_DST, r.To.Masked().Addr())
	}
	if h[2] > 0 {
		e.Addr(unix.FRA_SRC, r.From.Masked().Addr())
	}
	r.encodeAttrs(e)
}

// encodeAttrs writes the selectors that are set. A selector of zero is left out
// rather than sent as zero: the kernel would compare it.
func (r *Rule) encodeAttrs(e *nl.Encoder) {
	number := func(typ uint16, v uint32) {
		if v != 0 {
			e.Uint32(typ, v)
		}
	}
	optional := func(typ uint16, v *uint32) {
		if v != nil {
			e.Uint32(typ, *v)
		}
	}
	name := func(typ uint16, s string) {
		if s != "" {
			e.String(typ, s)
		}
	}
	octet := func(typ uint16, v uint8) {
		if v != 0 {
			e.Uint8(typ, v)
		}
	}
	ports := func(typ uint16, p PortRange) {
		if p != (PortRange{}) {
			b := binary.NativeEndian.AppendUint16(nil, p.First)
			e.Bytes(typ, binary.NativeEndian.AppendUint16(b, p.Last))
		}
	}
	number(unix.FRA_PRIORITY, r.Priority)
	name(unix.FRA_IIFNAME, r.IIF)
	name(unix.FRA_OIFNAME, r.OIF)
	if r.mask() != 0 {
		e.Uint32(unix.FRA_FWMARK, r.Mark)
		e.Uint32(unix.FRA_FWMASK, r.mask())
	}
	octet(unix.FRA_IP_PROTO, r.IPProto)
	ports(unix.FRA_SPORT_RANGE, r.SrcPorts)
	ports(unix.FRA_DPORT_RANGE, r.DstPorts)
	if r.UIDs != nil {
		b := binary.NativeEndian.AppendUint32(nil, r.UIDs.First)
		e.Bytes(unix.FRA_UID_RANGE, binary.NativeEndian.AppendUint32(b, r.UIDs.Last))
	}
	if r.table() > 255 {
		e.Uint32(unix.FRA_TABLE, r.table())
	}
	number(unix.FRA_GOTO, r.Goto)
	if r.L3MDev {
		e.Uint8(unix.FRA_L3MDEV, 1)
	}
	optional(unix.FRA_SUPPRESS_PREFIXLEN, r.SuppressPrefixLength)
	optional(unix.FRA_SUPPRESS_IFGROUP, r.SuppressGroup)
	octet(unix.FRA_PROTOCOL, uint8(r.Protocol))
}

// decodeRule reads the data of an RTM_NEWRULE. known is false for the families
// that this package leaves alone.
func decodeRule(data []byte) (r Rule, known bool, _ error) {
	if len(data) < 12 {
		return Rule{}, false, fmt.Errorf("%w: a rule of %d bytes", nl.ErrMalformed, len(data))
	}
	r = Rule{
		Family: data[0],
		TOS:    data[3],
		Table:  uint32(data[4]),
		Action: Action(data[7]),
		Invert: binary.NativeEndian.Uint32(data[8:])&unix.FIB_RULE_INVERT != 0,
	}
	if r.Family != unix.AF_INET && r.Family != unix.AF_INET6 {
		return Rule{}, false, nil
	}
	attrs := nl.ParseAttrs(data[12:])
	for attrs.Next() {
		var err error
		switch attrs.Type {
		case unix.FRA_DST:
			r.To, err = prefix(r.Family, attrs.Addr(), data[1])
		case unix.FRA_SRC:
			r.From, err = prefix(r.Family, attrs.Addr(), data[2])
		default:
			err = r.decodeAttr(attrs)
		}
		if err != nil {
			return Rule{}, false, err
		}
	}
	if err := attrs.Err(); err != nil {
		return Rule{}, false, err
	}
	return r, true, nil
}

// decodeAttr reads an attribute. One that is not known is kept in mind: a rule
// without one of its selectors would match more than the rule that was read.
func (r *Rule) decodeAttr(attrs *nl.Attrs) error {
	switch attrs.Type {
	case unix.FRA_PRIORITY:
		r.Priority = attrs.Uint32()
	case unix.FRA_IIFNAME:
		r.IIF = attrs.String()
	case unix.FRA_OIFNAME:
		r.OIF = attrs.String()
	case unix.FRA_FWMARK:
		r.Mark = attrs.Uint32()
	case unix.FRA_FWMASK:
		r.Mask = attrs.Uint32()
	case unix.FRA_IP_PROTO:
		r.IPProto = attrs.Uint8()
	case unix.FRA_SPORT_RANGE, unix.FRA_DPORT_RANGE:
		if len(attrs.Data) != 4 {
			return fmt.Errorf("%w: a range of ports of %d bytes", nl.ErrMalformed, len(attrs.Data))
		}
		p := PortRange{binary.NativeEndian.Uint16(attrs.Data), binary.NativeEndian.Uint16(attrs.Data[2:])}
		if attrs.Type == unix.FRA_SPORT_RANGE {
			r.SrcPorts = p
		} else {
			r.DstPorts = p
		}
	case unix.FRA_UID_RANGE:
		if len(attrs.Data) != 8 {
			return fmt.Errorf("%w: a range of users of %d bytes", nl.ErrMalformed, len(attrs.Data))
		}
		r.UIDs = &UIDRange{binary.NativeEndian.Uint32(attrs.Data), binary.NativeEndian.Uint32(attrs.Data[4:])}
	case unix.FRA_TABLE:
		r.Table = attrs.Uint32()
	case unix.FRA_GOTO:
		r.Goto = attrs.Uint32()
	case unix.FRA_L3MDEV:
		r.L3MDev = attrs.Uint8() != 0
	case unix.FRA_SUPPRESS_PREFIXLEN:
		r.SuppressPrefixLength = suppress(attrs.Uint32())
	case unix.FRA_SUPPRESS_IFGROUP:
		r.SuppressGroup = suppress(attrs.Uint32())
	case unix.FRA_PROTOCOL:
		r.Protocol = Protocol(attrs.Uint8())
	case unix.FRA_PAD:
	case fraSportMask, fraDportMask:
		// What the kernel makes of a range of one port selects no other.
		if attrs.Uint16() != 0xffff {
			r.Unknown = append(r.Unknown, attrs.Type)
		}
	default:
		r.Unknown = append(r.Unknown, attrs.Type)
	}
	return nil
}

// suppress turns the kernel's word for off, -1, into nil.
func suppress(v uint32) *uint32 {
	if v == 0xffffffff {
		return nil
	}
	return &v
}
