// Package routing reads policy rules and neighbour entries, and encodes the requests that copy neighbour entries to
// another link. The kernel also calls entries of a bridge's forwarding table (FDB) neighbours; these are in package
// bridge.
package routing

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Rule is a rule of policy routing. For packets that match all of its selectors, the kernel looks up a route in its
// table. The zero value of a selector matches everything.
type Rule struct {
	Family   uint8  // unix.AF_INET or unix.AF_INET6
	Priority uint32 // the place of the rule; the lowest comes first

	From, To   netip.Prefix
	IIF, OIF   string // names of links, which need not exist; IIF "lo" means packets of the host itself
	Mark, Mask uint32 // Mark is compared in the bits of Mask
	TOS        uint8
	Invert     bool // apply the rule to packets that do not match

	Action   uint8  // the action: FR_ACT_* of linux/fib_rules.h
	Table    uint32 // for FR_ACT_TO_TBL
	Protocol uint8  // the origin of the rule

	// Other holds all other attributes (FRA_*), which include selectors such as ports and users.
	Other []netlink.Attribute
}

// String returns the rule's description for errors, such as "100: from 10.1.0.0/16 table 7".
func (r Rule) String() string {
	text := "from " + prefixOrAll(r.From)
	add := func(isSet bool, format string, args ...any) {
		if isSet {
			text += " " + fmt.Sprintf(format, args...)
		}
	}
	add(r.To.IsValid(), "to %s", prefixOrAll(r.To))
	add(r.IIF != "", "iif %s", r.IIF)
	add(r.OIF != "", "oif %s", r.OIF)
	add(r.Mask != 0, "mark %#x/%#x", r.Mark, r.Mask)
	for _, a := range r.Other {
		add(true, "attribute %d %x", nl.TypeOf(a), a.Data)
	}

	add(r.Action <= unix.FR_ACT_TO_TBL, "table %d", r.Table)
	text += map[uint8]string{
		unix.FR_ACT_BLACKHOLE: " blackhole", unix.FR_ACT_UNREACHABLE: " unreachable", unix.FR_ACT_PROHIBIT: " prohibit",
	}[r.Action]
	if r.Invert {
		text = "not " + text
	}

	if r.Priority != 0 {
		text = fmt.Sprintf("%d: %s", r.Priority, text)
	}
	return text
}

// prefixOrAll returns a prefix as text, or "all" for a prefix of length 0.
func prefixOrAll(p netip.Prefix) string {
	if p.Bits() <= 0 {
		return "all"
	}
	return p.Masked().String()
}

// Rules returns the policy rules of IPv4 and IPv6, each family in the kernel's order.
func Rules(c *nl.Conn) ([]Rule, error) {
	var list []Rule
	ask, err := nl.Marshal(unix.RTM_GETRULE, 0, (&rtnetlink.RuleMessage{}).MarshalBinary, nil)
	err = c.List(context.Background(), "list rules", ask, err, func(m netlink.Message) error {
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

// Foreign returns the first rule, except for the kernel's own three, that applies to a packet from src to dst. in is
// the name of the packet's incoming link, or "lo" for a packet of the host itself. If table is not 0, the rule must
// look up this table; if table is 0, it may have any action. Foreign skips rules with other conditions, such as a
// mark or a port, since it cannot know whether the packet meets them.
func Foreign(rules []Rule, src, dst netip.Addr, link string, table uint32) (Rule, bool) {
	for _, r := range rules {
		isFromAll, isToAll, looksUp := r.From.Bits() <= 0, r.To.Bits() <= 0, r.Action == unix.FR_ACT_TO_TBL
		isKernels := isFromAll && isToAll && r.IIF == "" && looksUp &&
			r.Table >= unix.RT_TABLE_DEFAULT && r.Table <= unix.RT_TABLE_LOCAL
		hasMore := r.Invert || r.Mask != 0 || r.TOS != 0 || r.OIF != "" || len(r.Other) > 0
		matches := (isFromAll || r.From.Contains(src)) && (isToAll || r.To.Contains(dst)) &&
			(r.IIF == "" || r.IIF == link) && r.Family == nl.FamilyOf(dst)
		if matches && !isKernels && !hasMore && (table == 0 || looksUp && r.Table == table) {
			return r, true
		}
	}

	return Rule{}, false
}

// Ahead returns the command that adds a rule before r. The added rule looks up packets with the selector in table
// main.
func (r *Rule) Ahead(selector string) string {
	family := map[uint8]int{unix.AF_INET: 4, unix.AF_INET6: 6}[r.Family]
	return fmt.Sprintf("ip -%d rule add %s lookup main priority %d", family, selector, max(r.Priority, 1)-1)
}

// Outside returns an external address of a's family for looking up routes. The address is from the blocks for
// documentation (RFC 5737, RFC 3849), and nothing is sent to it.
func Outside(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte{203, 0, 113, 1})
	}
	return netip.MustParseAddr("2001:db8:ffff::1")
}

// decodeRule parses the data of an RTM_NEWRULE. known is false if the family is neither IPv4 nor IPv6.
func decodeRule(data []byte) (r Rule, known bool, _ error) {
	if len(data) < 12 {
		return Rule{}, false, fmt.Errorf("%w: a rule of %d bytes", nl.ErrMalformed, len(data))
	}

	r = Rule{
		Family: data[0],
		TOS:    data[3],
		Table:  uint32(data[4]),
		Action: data[7],
		Invert: binary.NativeEndian.Uint32(data[8:])&unix.FIB_RULE_INVERT != 0,
	}
	if r.Family != unix.AF_INET && r.Family != unix.AF_INET6 {
		return Rule{}, false, nil
	}

	var from, to netip.Addr
	err := nl.Decode(data[12:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.FRA_DST:
			ad.Do(nl.Addr(&to))
		case unix.FRA_SRC:
			ad.Do(nl.Addr(&from))
		default:
			r.decodeAttr(ad)
		}
	})
	if err == nil && to.IsValid() {
		r.To, err = nl.Prefix(r.Family, to, data[1])
	}

	if err == nil && from.IsValid() {
		r.From, err = nl.Prefix(r.Family, from, data[2])
	}

	if err != nil {
		return Rule{}, false, err
	}

	return r, true, nil
}

// decodeAttr parses one attribute. It appends unknown attributes to Other, since a rule without one of its selectors
// would match more packets.
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
	case unix.FRA_TABLE:
		r.Table = ad.Uint32()
	case unix.FRA_SUPPRESS_PREFIXLEN:
		if ad.Uint32() != 0xffffffff { // 0xffffffff means that the attribute is off
			r.Other = append(r.Other, nl.Keep(ad))
		}
	case unix.FRA_PROTOCOL:
		r.Protocol = ad.Uint8()
	case unix.FRA_PAD:
	default:
		r.Other = append(r.Other, nl.Keep(ad))
	}
}
