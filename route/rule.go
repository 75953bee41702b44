package route

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strconv"
	"strings"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
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

	// Protocol is the origin of the rule; 0 is ProtocolTombolo when it is added, and any
	// when it is deleted.
	Protocol Protocol
	// Other are attributes (FRA_*) that the kernel gave and this package has no field
	// for. They are sent as they are, since a rule without them may match more.
	Other []netlink.Attribute
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

const (
	errRuleFamily   = nl.Invalid("a rule without From and To needs its family")
	errRuleMixed    = nl.Invalid("prefixes From and To are not of the rule's family")
	errRuleLink     = nl.Invalid("a link's name has a NUL in it, at which the kernel would end it")
	errRulePriority = nl.Invalid("without a priority the kernel would add it each time")
	errRuleWide     = nl.Invalid("a rule to be deleted needs its priority or a selector: the kernel would take the first that has the table")
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
	ask, err := nl.Marshal(unix.RTM_GETRULE, 0, (&rtnetlink.RuleMessage{Family: family}).MarshalBinary, nil)
	err = c.nl.List("list rules", ask, err, func(m netlink.Message) error {
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
	m, err := r.AddMessage()
	return c.change("add rule", &r, m, err)
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
	m, err := r.DelMessage()
	return c.change("delete rule", &r, m, err)
}

// RemoveRule is DelRule for which a rule that is not there is success.
func (c *Conn) RemoveRule(r Rule) error {
	if err := c.usable(); err != nil {
		return err
	}
	return absentIsSuccess(c.DelRule(r))
}

// AddMessage gives the request of Conn.AddRule, for callers that put several requests into
// one datagram.
func (r Rule) AddMessage() (netlink.Message, error) {
	if r.Protocol == 0 {
		r.Protocol = ProtocolTombolo
	}
	return r.message(unix.RTM_NEWRULE, netlink.Create|netlink.Excl)
}

// DelMessage gives the request of Conn.DelRule.
func (r Rule) DelMessage() (netlink.Message, error) {
	if r.Priority == 0 && r.From.Bits() <= 0 && r.To.Bits() <= 0 && r.IIF == "" && r.OIF == "" && r.mask() == 0 {
		return netlink.Message{}, errRuleWide
	}
	return r.message(unix.RTM_DELRULE, 0)
}

func (r *Rule) message(typ netlink.HeaderType, flags netlink.HeaderFlags) (netlink.Message, error) {
	family := r.family()
	switch {
	case family == 0:
		return netlink.Message{}, errRuleFamily
	case r.From.IsValid() && familyOf(r.From.Addr()) != family, r.To.IsValid() && familyOf(r.To.Addr()) != family:
		return netlink.Message{}, errRuleMixed
	case strings.ContainsRune(r.IIF+r.OIF, 0):
		return netlink.Message{}, errRuleLink
	}
	body := &rtnetlink.RuleMessage{
		Family: family, DstLength: uint8(max(r.To.Bits(), 0)), SrcLength: uint8(max(r.From.Bits(), 0)), TOS: r.TOS,
		Action: uint8(max(r.Action, ToTable)), Attributes: r.attributes(),
	}
	if r.table() < 256 {
		body.Table = uint8(r.table())
	}
	if r.Invert {
		body.Flags = unix.FIB_RULE_INVERT
	}
	return nl.Marshal(typ, flags, body.MarshalBinary, func(ae *netlink.AttributeEncoder) {
		// The library shortens an IPv6 address that maps an IPv4 one, and has ids of
		// users of 16 bits.
		if body.DstLength > 0 {
			nl.PutAddr(ae, unix.FRA_DST, r.To.Masked().Addr())
		}
		if body.SrcLength > 0 {
			nl.PutAddr(ae, unix.FRA_SRC, r.From.Masked().Addr())
		}
		if r.UIDs != nil {
			b := binary.NativeEndian.AppendUint32(nil, r.UIDs.First)
			ae.Bytes(unix.FRA_UID_RANGE, binary.NativeEndian.AppendUint32(b, r.UIDs.Last))
		}
		nl.PutOther(ae, r.Other)
	})
}

// attributes are the selectors that are set. A selector of zero is left out rather than
// sent as zero: the kernel would compare it.
func (r *Rule) attributes() *rtnetlink.RuleAttributes {
	a := &rtnetlink.RuleAttributes{
		Priority: nonZero(r.Priority), IIFName: nonZero(r.IIF), OIFName: nonZero(r.OIF), IPProto: nonZero(r.IPProto),
		Goto: nonZero(r.Goto), Protocol: nonZero(uint8(r.Protocol)),
		SuppressPrefixLen: r.SuppressPrefixLength, SuppressIFGroup: r.SuppressGroup,
		SPortRange: ports(r.SrcPorts), DPortRange: ports(r.DstPorts),
	}
	if mask := r.mask(); mask != 0 {
		a.FwMark, a.FwMask = &r.Mark, &mask
	}
	if table := r.table(); table > 255 {
		a.Table = &table
	}
	if r.L3MDev {
		a.L3MDev = nonZero(uint8(1))
	}
	return a
}

func ports(p PortRange) *rtnetlink.RulePortRange {
	if p == (PortRange{}) {
		return nil
	}
	return &rtnetlink.RulePortRange{Start: p.First, End: p.Last}
}

// nonZero gives nil for a value that is left out.
func nonZero[T comparable](v T) *T {
	if v == *new(T) {
		return nil
	}
	return &v
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
	var from, to netip.Addr
	err := nl.Decode(data[12:], func(ad *netlink.AttributeDecoder) error {
		switch ad.Type() {
		case unix.FRA_DST:
			ad.Do(nl.Addr(&to))
		case unix.FRA_SRC:
			ad.Do(nl.Addr(&from))
		default:
			r.decodeAttr(ad)
		}
		return nil
	})
	if err == nil && to.IsValid() {
		r.To, err = prefix(r.Family, to, data[1])
	}
	if err == nil && from.IsValid() {
		r.From, err = prefix(r.Family, from, data[2])
	}
	if err != nil {
		return Rule{}, false, err
	}
	return r, true, nil
}

// decodeAttr reads an attribute. One that is not known is kept: a rule without one of
// its selectors would match more than the rule that was read.
func (r *Rule) decodeAttr(ad *netlink.AttributeDecoder) {
	switch ad.Type() {
	case unix.FRA_PRIORITY:
		r.Priority = ad.Uint32()
	case unix.FRA_IIFNAME:
		r.IIF = ad.String()
	case unix.FRA_OIFNAME:
		r.OIF = ad.String()
	case unix.FRA_FWMARK:
		r.Mark = ad.Uint32()
	case unix.FRA_FWMASK:
		r.Mask = ad.Uint32()
	case unix.FRA_IP_PROTO:
		r.IPProto = ad.Uint8()
	case unix.FRA_SPORT_RANGE:
		ad.Do(r.SrcPorts.decode)
	case unix.FRA_DPORT_RANGE:
		ad.Do(r.DstPorts.decode)
	case unix.FRA_UID_RANGE:
		r.UIDs = new(UIDRange)
		ad.Do(r.UIDs.decode)
	case unix.FRA_TABLE:
		r.Table = ad.Uint32()
	case unix.FRA_GOTO:
		r.Goto = ad.Uint32()
	case unix.FRA_L3MDEV:
		r.L3MDev = ad.Uint8() != 0
	case unix.FRA_SUPPRESS_PREFIXLEN:
		r.SuppressPrefixLength = suppress(ad.Uint32())
	case unix.FRA_SUPPRESS_IFGROUP:
		r.SuppressGroup = suppress(ad.Uint32())
	case unix.FRA_PROTOCOL:
		r.Protocol = Protocol(ad.Uint8())
	case unix.FRA_PAD:
	case fraSportMask, fraDportMask:
		// What the kernel makes of a range of one port selects no other.
		if ad.Uint16() != 0xffff {
			r.Other = append(r.Other, nl.Keep(ad))
		}
	default:
		r.Other = append(r.Other, nl.Keep(ad))
	}
}

// decode reads struct fib_rule_port_range.
func (p *PortRange) decode(b []byte) error {
	if len(b) != 4 {
		return fmt.Errorf("a range of ports of %d bytes", len(b))
	}
	*p = PortRange{binary.NativeEndian.Uint16(b), binary.NativeEndian.Uint16(b[2:])}
	return nil
}

// decode reads struct fib_rule_uid_range.
func (u *UIDRange) decode(b []byte) error {
	if len(b) != 8 {
		return fmt.Errorf("a range of users of %d bytes", len(b))
	}
	*u = UIDRange{binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint32(b[4:])}
	return nil
}

// suppress turns the kernel's word for off, -1, into nil.
func suppress(v uint32) *uint32 {
	if v == 0xffffffff {
		return nil
	}
	return &v
}
