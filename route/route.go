package route

import (
	"bytes"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
)

// Route is a route. Most uses need only Dst and one of Gateway and Link. For any other field a zero value lets the
// kernel choose, or has the meaning in the field's comment. In the results of List and Get every field has the
// kernel's value: Table, for example, is unix.RT_TABLE_MAIN and not 0.
type Route struct {
	// Dst is the destination. Its host bits are ignored. The zero value means the default route, of the family Family
	// or, if that is 0, of Gateway's.
	Dst netip.Prefix `json:"dst"`
	// Family is unix.AF_INET or unix.AF_INET6. It is needed only for a default route without a Gateway, or with a
	// Gateway of the other family.
	Family uint8 `json:"family,omitempty"`
	// From restricts an IPv6 route to packets from this prefix.
	From netip.Prefix `json:"from,omitzero"`
	// TOS restricts an IPv4 route to packets with this type of service.
	TOS uint8 `json:"tos,omitempty"`

	// Gateway is the next hop. For an IPv4 route it may be an IPv6 address (Linux 5.2).
	Gateway netip.Addr `json:"gateway,omitzero"`
	// Link is the index of the outgoing link. 0 means the link that leads to Gateway.
	Link int `json:"link,omitempty"`
	// OnLink tells the kernel that Gateway is directly reachable on Link, although no route leads to it.
	OnLink bool `json:"onLink,omitempty"`
	// Nexthops are several next hops, which replace Gateway and Link. The kernel chooses one for each flow.
	Nexthops []Nexthop `json:"nexthops,omitempty"`
	// NexthopID is the number of a nexthop object (Linux 5.3), which replaces Gateway, Link and Nexthops. List and
	// Get also return the content of the object.
	NexthopID uint32 `json:"nexthopID,omitempty"`

	// Source is the source address for packets of this host that have none yet.
	Source netip.Addr `json:"source,omitzero"`
	// Priority orders routes to the same destination, the lowest first. 0 leaves the choice to the kernel: 0 for
	// IPv4, 1024 for IPv6.
	Priority uint32 `json:"priority,omitempty"`
	// Table is the routing table; 0 means unix.RT_TABLE_MAIN.
	Table uint32 `json:"table,omitempty"`
	// Scope is the scope of an IPv4 destination (RT_SCOPE_*). nil means the default of ip-route(8). That is host for
	// a local route, link for broadcast and for a route without a gateway, and else global.
	Scope *uint8 `json:"scope,omitempty"`
	// Protocol is the origin of the route (RTPROT_*). 0 means ProtocolTombolo for a new route, and any for a deletion.
	Protocol uint8 `json:"protocol,omitempty"`
	// Type is the kernel's treatment of packets (RTN_*). 0 means unix.RTN_UNICAST for a new route, and any type for a
	// deletion.
	Type Type `json:"type,omitempty"`
	// Pref ranks IPv6 routes learnt from routers (RFC 4191, section 2.1). It is ignored for IPv4, and so is Expires.
	Pref uint8 `json:"pref,omitempty"`
	// Expires is the time until the kernel deletes an IPv6 route; nil means never. The kernel counts in whole
	// seconds, so fractions are rounded up.
	Expires *time.Duration `json:"expires,omitempty"`

	// MTU is the largest packet in bytes, and AdvMSS the TCP segment size to advertise. 0 means the link's value.
	MTU    uint32 `json:"mtu,omitempty"`
	AdvMSS uint32 `json:"advmss,omitempty"`

	// Flags are the kernel's flags in results (RTM_F_* and RTNH_F_*). Requests do not contain them.
	Flags uint32 `json:"flags,omitempty"`
	// Other holds attributes (RTA_*) that this package has no field for: encapsulation, realms, and an RTA_METRICS
	// with further metrics. Requests contain them unchanged, since a route without them would be another route.
	Other []netlink.Attribute `json:"other,omitempty"`
}

// Nexthop is one of several next hops of a route.
type Nexthop struct {
	Gateway netip.Addr `json:"gateway,omitzero"`
	Link    int        `json:"link,omitempty"`
	OnLink  bool       `json:"onLink,omitempty"`
	// Weight is this hop's share of the flows, relative to the other hops: 1 to 256. 0 means 1.
	Weight int `json:"weight,omitempty"`
	// Flags are the kernel's flags in results (RTNH_F_*). Requests do not contain them.
	Flags uint32 `json:"flags,omitempty"`
	// Other holds further attributes, as in Route.
	Other []netlink.Attribute `json:"other,omitempty"`
}

// ProtocolTombolo marks the routes of this module. It is the letter t, 116. Neither the kernel, nor iproute2, nor any
// routing daemon that we know uses this number.
const ProtocolTombolo uint8 = 't'

// Type is the treatment of packets that a route matches (RTN_* of package unix).
type Type uint8

// String returns the name of the type in ip-route(8), or its number.
func (t Type) String() string {
	switch t {
	case 0, unix.RTN_UNICAST:
		return "unicast"
	case unix.RTN_LOCAL:
		return "local"
	case unix.RTN_BROADCAST:
		return "broadcast"
	case unix.RTN_ANYCAST:
		return "anycast"
	case unix.RTN_MULTICAST:
		return "multicast"
	case unix.RTN_BLACKHOLE:
		return "blackhole"
	case unix.RTN_UNREACHABLE:
		return "unreachable"
	case unix.RTN_PROHIBIT:
		return "prohibit"
	case unix.RTN_THROW:
		return "throw"
	}

	return strconv.Itoa(int(t))
}

// String returns the route's name for errors, such as "10.0.0.0/8 via 10.1.0.1 on link 3".
func (r Route) String() string {
	var b strings.Builder
	if r.Type != 0 && r.Type != unix.RTN_UNICAST {
		b.WriteString(r.Type.String() + " ")
	}

	if r.isDefault() {
		b.WriteString("default")
	} else {
		b.WriteString(r.Dst.Masked().String())
	}

	if r.From.IsValid() && r.From.Bits() > 0 {
		b.WriteString(" from " + r.From.String())
	}

	writeHop(&b, r.Gateway, r.Link)
	for _, h := range r.Nexthops {
		b.WriteString(" nexthop")
		writeHop(&b, h.Gateway, h.Link)
	}

	if r.NexthopID != 0 {
		b.WriteString(" nexthop object " + strconv.FormatUint(uint64(r.NexthopID), 10))
	}

	if r.Table != 0 && r.Table != unix.RT_TABLE_MAIN {
		b.WriteString(" in table " + strconv.FormatUint(uint64(r.Table), 10))
	}

	return b.String()
}

func writeHop(b *strings.Builder, gateway netip.Addr, link int) {
	if gateway.IsValid() {
		b.WriteString(" via " + gateway.String())
	}
	if link != 0 {
		b.WriteString(" on link " + strconv.Itoa(link))
	}
}

func (r *Route) isDefault() bool { return !r.Dst.IsValid() || r.Dst.Bits() == 0 }

// family returns the route's address family, or 0 if no field determines it.
func (r *Route) family() uint8 {
	switch {
	case r.Dst.IsValid():
		return nl.FamilyOf(r.Dst.Addr())
	case r.Family != 0:
		return r.Family
	case r.Gateway.IsValid():
		return nl.FamilyOf(r.Gateway)
	}

	for _, h := range r.Nexthops {
		if h.Gateway.IsValid() {
			return nl.FamilyOf(h.Gateway)
		}
	}

	return 0
}

// normal returns a copy of the route with its zero values replaced by their defaults for Add.
func (r *Route) normal() Route {
	n := *r
	n.Family = r.family()
	everywhere := netip.IPv6Unspecified()
	if n.Family == unix.AF_INET {
		everywhere = netip.IPv4Unspecified()
	}

	if n.Dst = n.Dst.Masked(); !n.Dst.IsValid() {
		n.Dst = netip.PrefixFrom(everywhere, 0)
	}

	if n.From = n.From.Masked(); n.From.Bits() == 0 {
		n.From = netip.Prefix{}
	}

	if n.Table == 0 {
		n.Table = unix.RT_TABLE_MAIN
	}

	if n.Type == 0 {
		n.Type = unix.RTN_UNICAST
	}

	if n.Protocol == 0 {
		n.Protocol = ProtocolTombolo
	}

	if n.Family == unix.AF_INET6 && n.Priority == 0 {
		n.Priority = 1024 // IP6_RT_PRIO_USER
	}

	if n.Scope == nil {
		n.Scope = new(n.customaryScope())
	}

	if n.Family == unix.AF_INET { // requests for IPv4 do not contain the fields of IPv6
		n.Pref, n.Expires = 0, nil
	}

	if len(n.Nexthops) > 0 {
		n.Gateway, n.Link = netip.Addr{}, 0
	}

	return n
}

func (r *Route) customaryScope() uint8 {
	switch {
	case r.Family == unix.AF_INET6:
		return unix.RT_SCOPE_UNIVERSE
	case r.Type == unix.RTN_LOCAL:
		return unix.RT_SCOPE_HOST
	case r.Type == unix.RTN_BROADCAST, r.Type == unix.RTN_MULTICAST, r.Type == unix.RTN_ANYCAST:
		return unix.RT_SCOPE_LINK
	case r.Type == unix.RTN_UNICAST && !r.Gateway.IsValid() && len(r.Nexthops) == 0 && r.NexthopID == 0:
		return unix.RT_SCOPE_LINK
	}

	return unix.RT_SCOPE_UNIVERSE
}

// Matches compares the route with have, a route from List, and reports whether Add(r) would create have. CHECK uses
// it. Matches does not compare Flags, the remaining time of Expires, and the content of a nexthop object. It compares
// Link unless that is 0 and there is a Gateway, and Other unless r has none.
func (r Route) Matches(have Route) bool {
	want := r.normal()
	have = have.normal()
	return want.sameKey(&have) && want.sameHops(&have) &&
		want.Source == have.Source &&
		want.Protocol == have.Protocol && want.Type == have.Type && *want.Scope == *have.Scope &&
		want.MTU == have.MTU && want.AdvMSS == have.AdvMSS &&
		want.Pref == have.Pref && (want.Expires == nil) == (have.Expires == nil) && want.sameOthers(&have)
}

// sameOthers reports whether both routes have the same attributes in Other. If r has no such attribute, it returns
// true.
func (r *Route) sameOthers(have *Route) bool {
	return len(r.Other) == 0 || slices.EqualFunc(r.Other, have.Other, func(a, b netlink.Attribute) bool {
		return nl.TypeOf(a) == nl.TypeOf(b) && bytes.Equal(a.Data, b.Data)
	})
}

func (r *Route) sameKey(have *Route) bool {
	return r.Family == have.Family && r.Dst == have.Dst && r.From == have.From && r.TOS == have.TOS &&
		r.Table == have.Table && r.Priority == have.Priority
}

func (r *Route) sameHops(have *Route) bool {
	switch {
	case r.NexthopID != 0 || have.NexthopID != 0:
		return r.NexthopID == have.NexthopID
	case r.sendsNothing():
		return true // for IPv6 the kernel names the loopback interface
	}
	hop := Nexthop{Gateway: r.Gateway, Link: r.Link, OnLink: r.OnLink}
	return hop.matches(Nexthop{Gateway: have.Gateway, Link: have.Link, OnLink: have.OnLink}) &&
		slices.EqualFunc(r.Nexthops, have.Nexthops, Nexthop.matches)
}

func (r *Route) sendsNothing() bool {
	return r.Type == unix.RTN_BLACKHOLE || r.Type == unix.RTN_UNREACHABLE || r.Type == unix.RTN_PROHIBIT ||
		r.Type == unix.RTN_THROW
}

func (h Nexthop) matches(have Nexthop) bool {
	return h.Gateway == have.Gateway && h.OnLink == have.OnLink &&
		max(h.Weight, 1) == max(have.Weight, 1) &&
		(h.Link == have.Link || h.Link == 0 && h.Gateway.IsValid())
}
