package route

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jsimonetti/rtnetlink/v2"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Conn reads and writes the routes of one network namespace. Several goroutines may call its methods at once. A
// method sends nothing if its context is done. Errors of the kernel are *tombolo.OpError.
type Conn struct {
	nl     *nl.Conn
	shared bool
}

// Dial opens a connection that works on the routes of the network namespace ns. If ns is nil, it uses the calling
// thread's namespace. The caller may close ns afterwards.
func Dial(ns *netns.NS) (*Conn, error) {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, ns)
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// On returns a Conn that uses the socket of another Conn (see bridge.Conn.Socket). Its Close leaves the socket open.
func On(s tombolo.Socket) *Conn { return &Conn{nl: nl.Of(s), shared: true} }

// Close closes the connection's socket, unless the Conn comes from On.
func (c *Conn) Close() error {
	if c.shared {
		return nil
	}
	return c.nl.Close()
}

// Add adds a route. If its table has a route with the same Dst, TOS and Priority (for IPv6: Dst, From and Priority),
// even with another gateway or link, the error matches fs.ErrExist.
func (c *Conn) Add(ctx context.Context, r Route) error {
	r.Protocol = cmp.Or(r.Protocol, ProtocolTombolo)
	return c.change(ctx, "add route", &r, unix.RTM_NEWROUTE, netlink.Create|netlink.Excl)
}

// Replace adds a route. If Add would fail because of an existing route, Replace replaces that route without a gap. At
// any moment packets find either the old or the new route.
func (c *Conn) Replace(ctx context.Context, r Route) error {
	r.Protocol = cmp.Or(r.Protocol, ProtocolTombolo)
	return c.change(ctx, "replace route", &r, unix.RTM_NEWROUTE, netlink.Create|netlink.Replace)
}

// Ensure adds a route, or corrects an existing one, and reports whether it changed anything. If there is another route
// with the same key (see Add), Ensure compares the two by Route.Matches and replaces the existing one if they differ.
// The remaining seconds of Expires must be equal too.
func (c *Conn) Ensure(ctx context.Context, r Route) (changed bool, _ error) {
	err := c.Add(ctx, r)
	if !errors.Is(err, fs.ErrExist) {
		return err == nil, err
	}

	// The kernel can look up the route to an address, but not a prefix with a priority in a table. So list the
	// routes.
	n := r.normal()
	isThere := false
	err = c.walk(ctx, Filter{Family: n.Family, Table: n.Table, Link: n.Link}, func() {}, func(have Route) error {
		if isThere = n.Matches(have) && (n.Expires == nil || seconds(*n.Expires) == seconds(*have.Expires)); isThere {
			return fs.SkipAll
		}
		return nil
	})
	if isThere {
		return false, nil
	}

	if err != nil {
		return false, err
	}

	err = c.Replace(ctx, r)
	return err == nil, err
}

func (c *Conn) change(ctx context.Context, op string, r *Route, typ netlink.HeaderType,
	flags netlink.HeaderFlags) error {
	m, err := r.Message(typ, flags)
	return c.nl.Change(ctx, op, r, m, err)
}

// Remove deletes the first route of r's table with the same Dst, From and TOS that also equals r in all fields that are
// set. It does not compare OnLink, MTU, AdvMSS, Pref, Expires or Other, and for IPv6 neither Source nor Type. A missing
// route or link is no error.
func (c *Conn) Remove(ctx context.Context, r Route) error {
	return nl.PassAbsent(c.change(ctx, "delete route", &r, unix.RTM_DELROUTE, 0))
}

// Filter selects the routes to list. A zero field matches any value.
type Filter struct {
	// Family is unix.AF_INET or unix.AF_INET6.
	Family uint8
	// Table is the routing table. 0 means all tables, unlike in a Route.
	Table uint32
	// Link is the index of a link. It selects the routes with at least one next hop on that link.
	Link     int
	Protocol uint8
	Type     Type
}

// List returns the routes that match a filter, in the kernel's order. The kernel applies the filter. A table that does
// not exist has no routes. If there is no such link, the error matches fs.ErrNotExist. If changes interrupted every
// attempt, the error matches tombolo.ErrInterrupted, and the returned list comes from the last attempt. It may lack
// routes, or have one twice.
func (c *Conn) List(ctx context.Context, f Filter) ([]Route, error) {
	var list []Route
	err := c.walk(ctx, f, func() { list = nil }, func(r Route) error {
		list = append(list, r)
		return nil
	})
	return list, err
}

// Walk calls the callback each with every route that List would return. It builds no list, since a pod may have any
// number of routes. The callback must not use the Conn. If routes change during the call, the callback may miss a route
// or get one twice.
func (c *Conn) Walk(ctx context.Context, f Filter, each func(Route)) error {
	return c.walk(ctx, f, nil, func(r Route) error {
		each(r)
		return nil
	})
}

func (c *Conn) walk(ctx context.Context, f Filter, begin func(), each func(Route) error) error {
	ask, err := f.message()
	err = c.nl.Walk(ctx, "list routes", ask, err, begin, func(m netlink.Message) error {
		if m.Header.Type != unix.RTM_NEWROUTE {
			return nil
		}
		r, known, err := decode(m.Data)

		// Filter here too: a kernel without IPv6 lists all families if IPv6 is requested.
		if known && (f.Family == 0 || f.Family == r.Family) {
			err = cmp.Or(err, each(r))
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		return nil // a missing table; a missing link is ENODEV
	}

	return err
}

// message returns a request that makes the kernel apply the filter (Linux 4.20). With strict checking, the kernel
// refuses attributes that it does not know. Without strict checking, it would ignore the filter and list everything.
func (f Filter) message() (netlink.Message, error) {
	q := request{RouteMessage: rtnetlink.RouteMessage{Family: f.Family, Protocol: f.Protocol,
		Type: uint8(f.Type)}}
	q.table(f.Table)
	q.Attributes.OutIface = nl.Index(f.Link)
	return nl.Marshal(unix.RTM_GETROUTE, 0, q.MarshalBinary, nil)
}

// Get returns the route that a packet from this host to the address dst would take. The kernel applies its policy
// rules. In the result, Dst contains only the address dst. The Type is unix.RTN_LOCAL for an address of this host.
// Without a route, the error is unix.ENETUNREACH or similar: see NoRoute.
func (c *Conn) Get(ctx context.Context, dst netip.Addr) (Route, error) {
	return c.GetFrom(ctx, netip.Addr{}, dst, 0)
}

// GetFrom returns the route of a packet from the address src to the address dst. If link is not 0, the packet comes in
// by the link with that index. For IPv4 the kernel then also checks the source. If the reverse path filter would drop
// the packet, the error is EXDEV, or EINVAL from newer kernels. If link is 0, an IPv4 src must be an address of this
// host. If src is invalid, the kernel chooses a source.
func (c *Conn) GetFrom(ctx context.Context, src, dst netip.Addr, link int) (Route, error) {
	q := request{RouteMessage: rtnetlink.RouteMessage{Family: nl.FamilyOf(dst), DstLength: uint8(dst.BitLen()),
		SrcLength: uint8(src.BitLen())}}
	if dst.Is4() {
		// Ask for the table of the route. Without this flag, IPv4 reports table main for every route. IPv6 refuses
		// the flag.
		q.Flags = unix.RTM_F_LOOKUP_TABLE
	}

	q.more(func(ae *netlink.AttributeEncoder) {
		nl.PutAddr(ae, unix.RTA_DST, dst)
		if src.IsValid() {
			nl.PutAddr(ae, unix.RTA_SRC, src)
		}
		if link != 0 {
			ae.Uint32(unix.RTA_IIF, nl.Index(link))
		}
	})

	ask, err := nl.Marshal(unix.RTM_GETROUTE, 0, q.MarshalBinary, q.write)

	var r Route
	err = c.nl.Get(ctx, "look up route to", dst, ask, err, func(m netlink.Message) (err error) {
		r, _, err = decode(m.Data)
		return err
	})

	return r, err
}

// NoRoute reports whether an error of Get means that no route leads to the address. There may be no route at all, or
// one that refuses packets, such as an unreachable route. The kernel may also lack the address family.
func NoRoute(err error) bool {
	return slices.ContainsFunc([]error{fs.ErrNotExist, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL,
		unix.EOPNOTSUPP},
		func(no error) bool { return errors.Is(err, no) })
}

// Route is a route. Most uses need only Dst and one of Gateway and Link. For any other field a zero value lets the
// kernel choose, or has the meaning in the field's comment. In the results of List and Get every field has the
// kernel's value: Table, for example, is unix.RT_TABLE_MAIN and not 0.
type Route struct {
	// Dst is the destination. Its host bits are ignored. The zero value means the default route. Its family is Family
	// or, if Family is 0, the gateway's.
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
	// NexthopID is the number of a nexthop object (Linux 5.3), which replaces Gateway, Link and Nexthops. List and Get
	// also fill in the next hops of the object.
	NexthopID uint32 `json:"nexthopID,omitempty"`

	// Source is the source address for packets of this host that have none yet.
	Source netip.Addr `json:"source,omitzero"`
	// Priority orders routes to the same destination, the lowest first. 0 leaves the choice to the kernel: 0 for
	// IPv4, 1024 for IPv6.
	Priority uint32 `json:"priority,omitempty"`
	// Table is the routing table; 0 means unix.RT_TABLE_MAIN.
	Table uint32 `json:"table,omitempty"`
	// Scope is the scope of an IPv4 destination (RT_SCOPE_*). For a new route, nil means the default of ip-route(8),
	// and for a deletion any scope. The default is host for local routes; link for broadcast, multicast, anycast, and
	// unicast without Gateway, Nexthops and NexthopID; else global.
	Scope *uint8 `json:"scope,omitempty"`
	// Protocol is the origin of the route (RTPROT_*). 0 means ProtocolTombolo for a new route, and any for a deletion.
	Protocol uint8 `json:"protocol,omitempty"`
	// Type is the kernel's treatment of packets (RTN_*). 0 means unix.RTN_UNICAST for a new route, and any type for a
	// deletion.
	Type Type `json:"type,omitempty"`
	// Pref ranks IPv6 routes learnt from routers (RFC 4191, section 2.1). Requests for IPv4 contain neither Pref nor
	// Expires.
	Pref uint8 `json:"pref,omitempty"`
	// Expires is the time until the kernel deletes an IPv6 route; nil means never. The kernel counts in whole
	// seconds, so fractions are rounded up.
	Expires *time.Duration `json:"expires,omitempty"`

	// MTU is the largest packet in bytes, and AdvMSS the TCP segment size to advertise. 0 means the link's value.
	MTU    uint32 `json:"mtu,omitempty"`
	AdvMSS uint32 `json:"advmss,omitempty"`

	// Flags are the kernel's flags in results (RTM_F_* and RTNH_F_*). Requests do not contain them.
	Flags uint32 `json:"flags,omitempty"`
	// Other holds attributes (RTA_*) that this package has no field for: encapsulation, realms, and an RTA_METRICS with
	// further metrics. Requests that add a route contain them, except the encapsulation of a nexthop object.
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

// Type is the kernel's treatment of packets that match a route (RTN_* of package unix).
type Type uint8

// String returns the name of the type in ip-route(8), or its number.
func (t Type) String() string {
	names := [...]string{
		0: "unicast", unix.RTN_UNICAST: "unicast", unix.RTN_LOCAL: "local", unix.RTN_BROADCAST: "broadcast",
		unix.RTN_ANYCAST: "anycast", unix.RTN_MULTICAST: "multicast", unix.RTN_BLACKHOLE: "blackhole",
		unix.RTN_UNREACHABLE: "unreachable", unix.RTN_PROHIBIT: "prohibit", unix.RTN_THROW: "throw",
	}
	if int(t) < len(names) {
		return names[t]
	}
	return strconv.Itoa(int(t))
}

// String describes the route for error messages, for example "10.0.0.0/8 via 10.1.0.1 on link 3".
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

// normal returns a copy of the route with the defaults of Add in place of zero values. It clears Pref and Expires of an
// IPv4 route, and Gateway and Link beside Nexthops.
func (r *Route) normal() Route {
	n := *r
	n.Family = r.family()
	if n.Dst = n.Dst.Masked(); !n.Dst.IsValid() {
		n.Dst = netip.PrefixFrom(unspecified(n.Family), 0)
	}

	if n.From = n.From.Masked(); n.From.Bits() == 0 {
		n.From = netip.Prefix{}
	}

	n.Table, n.Type = cmp.Or(n.Table, unix.RT_TABLE_MAIN), cmp.Or(n.Type, unix.RTN_UNICAST)
	n.Protocol = cmp.Or(n.Protocol, ProtocolTombolo)
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
	isDirect := r.Type == unix.RTN_UNICAST && !r.Gateway.IsValid() && len(r.Nexthops) == 0 && r.NexthopID == 0
	switch {
	case r.Family == unix.AF_INET6:
	case r.Type == unix.RTN_LOCAL:
		return unix.RT_SCOPE_HOST
	case isDirect, r.Type == unix.RTN_BROADCAST, r.Type == unix.RTN_MULTICAST, r.Type == unix.RTN_ANYCAST:
		return unix.RT_SCOPE_LINK
	}

	return unix.RT_SCOPE_UNIVERSE
}

// Matches reports whether Add(r) would create have, a route from List. Matches does not compare Flags, the remaining
// time of Expires, or Nexthop.Other. Of a nexthop object it compares only the number. It ignores Link if r has a
// Gateway and no Link, and Route.Other if r has none. It ignores the next hops of a Type that sends no packets, such as
// unreachable.
func (r Route) Matches(have Route) bool {
	want := r.normal()
	have = have.normal()
	return want.sameKey(&have) && want.sameHops(&have) &&
		want.Source == have.Source &&
		want.Protocol == have.Protocol && want.Type == have.Type && *want.Scope == *have.Scope &&
		want.MTU == have.MTU && want.AdvMSS == have.AdvMSS &&
		want.Pref == have.Pref && (want.Expires == nil) == (have.Expires == nil) && want.sameOthers(&have)
}

// sameOthers reports whether both routes have the same attributes in Other. If r.Other is empty, it returns true.
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
	case r.Type >= unix.RTN_BLACKHOLE && r.Type <= unix.RTN_THROW: // also unreachable and prohibit
		return true // for IPv6 the kernel lists such a route with the loopback interface
	}
	hop := Nexthop{Gateway: r.Gateway, Link: r.Link, OnLink: r.OnLink}
	return hop.matches(Nexthop{Gateway: have.Gateway, Link: have.Link, OnLink: have.OnLink}) &&
		slices.EqualFunc(r.Nexthops, have.Nexthops, Nexthop.matches)
}

func (h Nexthop) matches(have Nexthop) bool {
	return h.Gateway == have.Gateway && h.OnLink == have.OnLink &&
		max(h.Weight, 1) == max(have.Weight, 1) &&
		(h.Link == have.Link || h.Link == 0 && h.Gateway.IsValid())
}
