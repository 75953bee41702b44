// Package routing reads policy rules, and reads, adds and deletes neighbour entries. Entries of a bridge's
// forwarding table (FDB), which the kernel also calls neighbours, are in package bridge.
package routing

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Rule is a rule of policy routing. The kernel applies the rule's action to packets that match all of its selectors.
// The usual action looks up a route in Table. The zero value of a selector matches everything.
type Rule struct {
	Family   uint8  // unix.AF_INET or unix.AF_INET6
	Priority uint32 // the place of the rule; the lowest comes first

	From, To   netip.Prefix
	IIF, OIF   string // names of links, which need not exist; IIF "lo" means packets of the host itself
	Mark, Mask uint32 // the packet's mark must equal Mark in the bits of Mask
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

// prefixOrAll returns a prefix as text. For an invalid prefix and for one of length 0 it returns "all".
func prefixOrAll(p netip.Prefix) string {
	if p.Bits() <= 0 {
		return "all"
	}
	return p.Masked().String()
}

// Rules returns the policy rules of IPv4 and IPv6, each family in the kernel's order.
func Rules(c *nl.Conn) ([]Rule, error) {
	return list(c, "list rules", unix.RTM_GETRULE, (&rtnetlink.RuleMessage{}).MarshalBinary, decodeRule)
}

// list returns all objects of a kind. ask is the type of the request, whose body is empty. decode parses an object, and
// reports whether its family is known. list skips other objects.
func list[T any](c *nl.Conn, op string, ask netlink.HeaderType, body func() ([]byte, error),
	decode func([]byte) (T, bool, error)) (all []T, _ error) {
	const fromGetToNew = unix.RTM_NEWRULE - unix.RTM_GETRULE // equal for all kinds of objects
	m, err := nl.Marshal(ask, 0, body, nil)
	err = c.List(context.Background(), op, m, err, func(m netlink.Message) error {
		if int(m.Header.Type) != int(ask)+fromGetToNew {
			return nil
		}
		one, known, err := decode(m.Data)
		if known {
			all = append(all, one)
		}
		return err
	})

	return all, err
}

// Foreign returns the first rule that applies to a packet from src to dst. The second result is false if there is none.
// link is the name of the packet's incoming link, or "lo" for a packet of the host itself. If table is not 0, the rule
// must look up this table. Foreign skips the kernel's default rules, which look up the tables local, main and default
// for all packets. It also skips rules with other conditions, such as a mark or a port, since it cannot know whether
// the packet meets them.
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

// Ahead returns the ip command that adds a rule before r. selector selects the packets of the new rule, in the syntax
// of ip-rule(8). The new rule sends these packets to table main.
func (r *Rule) Ahead(selector string) string {
	family := map[uint8]int{unix.AF_INET: 4, unix.AF_INET6: 6}[r.Family]
	return fmt.Sprintf("ip -%d rule add %s lookup main priority %d", family, selector, max(r.Priority, 1)-1)
}

// Outside returns an Internet address of a's family, for looking up the route to the Internet. The address is from a
// block for documentation (RFC 5737, RFC 3849), and nothing is sent to it.
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

// decodeAttr parses one attribute into the rule. It appends an unknown attribute to Other, since it may be a
// selector. Without this selector, the rule would seem to match more packets.
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

const (
	ndaFlagsExt = 15 // NDA_FLAGS_EXT, Linux 5.16
	ntfExtShift = 8  // NTF_EXT_SHIFT: the flags of NDA_FLAGS_EXT begin at this bit of Flags
)

// NeighbourEntry is an entry in the neighbour table of a link, which is the ARP cache for IPv4 and the neighbour cache
// for IPv6.
type NeighbourEntry struct {
	Addr netip.Addr
	MAC  net.HardwareAddr // empty until the neighbour has answered
	Link int              // the link's index
	// State is the kernel's state of the entry. In a request, 0 means Permanent.
	State State
	Flags NeighbourFlags
	// Other holds attributes (NDA_*) that this package has no field for. Requests contain them unchanged.
	Other []netlink.Attribute
}

// State is the state of a neighbour entry (NUD_* of linux/neighbour.h).
type State uint16

// These are some states of a neighbour entry.
const (
	Reachable State = unix.NUD_REACHABLE // confirmed recently
	Stale     State = unix.NUD_STALE     // must be confirmed at its next use
	Delay     State = unix.NUD_DELAY     // used, and waiting for a confirmation
	Probe     State = unix.NUD_PROBE     // the kernel is asking the neighbour
	Failed    State = unix.NUD_FAILED    // the neighbour did not answer
	NoARP     State = unix.NUD_NOARP     // the kernel never asks, but may evict the entry
	Permanent State = unix.NUD_PERMANENT // set by a program: the kernel neither asks nor evicts the entry
)

// NeighbourFlags are the flags of a neighbour entry. The lower eight bits are NTF_*, and the higher bits are
// NTF_EXT_*.
type NeighbourFlags uint32

// Use asks the kernel to resolve the MAC at once, as if a packet to the neighbour were sent.
const Use NeighbourFlags = unix.NTF_USE

// String returns the neighbour's name for errors, such as "10.1.0.2 on link 3".
func (n NeighbourEntry) String() string { return n.Addr.String() + " on link " + strconv.Itoa(n.Link) }

// Neighbours returns the neighbour entries of all links.
func Neighbours(c *nl.Conn) ([]NeighbourEntry, error) {
	return list(c, "list neighbours", unix.RTM_GETNEIGH, (&rtnetlink.NeighMessage{}).MarshalBinary, decodeNeighbour)
}

// Find returns the neighbour entry of an address on a link (Linux 5.0). If there is none, the error matches
// fs.ErrNotExist.
func Find(c *nl.Conn, link int, a netip.Addr) (NeighbourEntry, error) {
	want := NeighbourEntry{Addr: a, Link: link}
	var got NeighbourEntry
	m, err := want.identity(unix.RTM_GETNEIGH)
	err = c.Get(context.Background(), "find neighbour", &want, m, err, func(m netlink.Message) (err error) {
		got, _, err = decodeNeighbour(m.Data)
		return err
	})

	return got, err
}

// Replace adds entries. It overwrites existing entries of the same address and link. op names the work in errors.
func Replace(conn *nl.Conn, op string, entries ...NeighbourEntry) error {
	var b nl.Batch
	for _, entry := range entries {
		m, err := entry.ReplaceMessage()
		b.Add(op, entry, m, err)
	}
	return conn.Execute(&b)
}

// ReplaceMessage returns a request that adds an entry, or overwrites the existing entry of the same address and link.
// It is for callers that send several requests in one datagram.
func (n NeighbourEntry) ReplaceMessage() (netlink.Message, error) {
	return n.newMessage(netlink.Create | netlink.Replace)
}

// DelMessage returns a request that deletes the entry of an address on a link. If there is no entry, the kernel's
// answer is an error that matches fs.ErrNotExist.
func (n NeighbourEntry) DelMessage() (netlink.Message, error) { return n.identity(unix.RTM_DELNEIGH) }

// identity returns a request of the given type, which names an entry by its address and link. It encodes the address
// itself, since rtnetlink's encoder would add attributes that the kernel refuses in a get.
func (n *NeighbourEntry) identity(typ netlink.HeaderType) (netlink.Message, error) {
	body := &rtnetlink.NeighMessage{Family: uint16(nl.FamilyOf(n.Addr)), Index: nl.Index(n.Link)}
	return nl.Marshal(typ, 0, body.MarshalBinary,
		func(ae *netlink.AttributeEncoder) { nl.PutAddr(ae, unix.NDA_DST, n.Addr) })
}

// newMessage returns a request that contains the entry. It encodes an IPv4 address in 4 bytes: from 16 bytes the kernel
// would use only the first four. For an entry without a MAC, newMessage writes the address attribute without package
// rtnetlink, since that package would also write an empty link-layer address.
func (n *NeighbourEntry) newMessage(flags netlink.HeaderFlags) (netlink.Message, error) {
	body := &rtnetlink.NeighMessage{
		Family: uint16(nl.FamilyOf(n.Addr)), Index: nl.Index(n.Link), State: uint16(n.State), Flags: uint8(n.Flags),
	}
	if n.State == 0 {
		body.State = uint16(Permanent)
	}

	if len(n.MAC) > 0 && n.Addr.IsValid() {
		body.Attributes = &rtnetlink.NeighAttributes{Address: n.Addr.AsSlice(), LLAddress: n.MAC,
			IfIndex: nl.Index(n.Link)}
	}

	return nl.Marshal(unix.RTM_NEWNEIGH, flags, body.MarshalBinary, func(ae *netlink.AttributeEncoder) {
		if body.Attributes == nil {
			nl.PutAddr(ae, unix.NDA_DST, n.Addr)
		}
		if more := n.Flags >> ntfExtShift; more != 0 {
			ae.Uint32(ndaFlagsExt, uint32(more))
		}
		nl.PutOther(ae, n.Other)
	})
}

// decodeNeighbour parses the data of an RTM_NEWNEIGH. known is false if the family is neither IPv4 nor IPv6, as for a
// bridge's forwarding table.
func decodeNeighbour(data []byte) (n NeighbourEntry, known bool, _ error) {
	if len(data) < unix.SizeofNdMsg {
		return NeighbourEntry{}, false, fmt.Errorf("%w: a neighbour of %d bytes", nl.ErrMalformed, len(data))
	}

	family := data[0]
	if family != unix.AF_INET && family != unix.AF_INET6 {
		return NeighbourEntry{}, false, nil
	}

	n = NeighbourEntry{
		Link:  int(int32(binary.NativeEndian.Uint32(data[4:]))),
		State: State(binary.NativeEndian.Uint16(data[8:])),
		Flags: NeighbourFlags(data[10]),
	}
	err := nl.Decode(data[unix.SizeofNdMsg:], func(ad *netlink.AttributeDecoder) {
		switch ad.Type() {
		case unix.NDA_DST:
			ad.Do(nl.Addr(&n.Addr))
		case unix.NDA_LLADDR:
			n.MAC = ad.Bytes()
		case ndaFlagsExt:
			n.Flags |= NeighbourFlags(ad.Uint32()) << ntfExtShift
		case unix.NDA_CACHEINFO, unix.NDA_PROBES: // computed by the kernel
		case unix.NDA_UNSPEC, unix.NDA_IFINDEX: // rtnetlink writes these into each request
		default:
			n.Other = append(n.Other, nl.Keep(ad))
		}
	})
	if err != nil {
		return NeighbourEntry{}, false, err
	}

	if !n.Addr.IsValid() || nl.FamilyOf(n.Addr) != family {
		return NeighbourEntry{}, false, fmt.Errorf("%w: family %d, neighbour %s", nl.ErrMalformed, family, n.Addr)
	}

	return n, true, nil
}
