package route

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"

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

// On returns a Conn over the socket of another Conn (bridge.Conn's Socket), which stays open: Close does nothing.
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

// Ensure adds a route, or corrects an existing one, and reports whether it changed anything. If there is another
// route with the same key (see Add), Ensure compares the two by Route.Matches and replaces the existing one if they
// differ.
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

// change sends one request of the given message type about the route.
func (c *Conn) change(ctx context.Context, op string, r *Route, typ netlink.HeaderType,
	flags netlink.HeaderFlags) error {
	var b nl.Batch
	m, err := r.Message(typ, flags)
	b.Add(op, r, m, err)
	return c.nl.Do(ctx, &b)
}

// Remove deletes the first route of r's table that has the destination Dst and equals r in all other fields that are
// set. It does not compare MTU, AdvMSS, Pref and Expires. A missing route or link is no error.
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

// List returns the routes that match a filter, in the kernel's order. The kernel applies the filter. A table that
// does not exist has no routes. If there is no such link, the error matches fs.ErrNotExist. If each try was
// interrupted by changes, the error matches tombolo.ErrInterrupted, and the returned list comes from the last try. It
// may lack routes, or have one twice.
func (c *Conn) List(ctx context.Context, f Filter) ([]Route, error) {
	var list []Route
	err := c.walk(ctx, f, func() { list = nil }, func(r Route) error {
		list = append(list, r)
		return nil
	})
	return list, err
}

// Walk calls the callback each with every route that List would return. It builds no list, since a pod may have any
// number of routes. The callback must not use the Conn. It may get a route twice if routes changed during the call.
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

// message returns a request with the kernel's filter (Linux 4.20). With strict checking, the kernel refuses
// attributes that it does not know. Without strict checking, it would ignore the filter and list everything.
func (f Filter) message() (netlink.Message, error) {
	q := request{RouteMessage: rtnetlink.RouteMessage{Family: f.Family, Protocol: f.Protocol,
		Type: uint8(f.Type)}}
	q.table(f.Table)
	q.Attributes.OutIface = nl.Index(f.Link)
	return nl.Marshal(unix.RTM_GETROUTE, 0, q.MarshalBinary, nil)
}

// Get returns the route that a packet from this host to the address dst would take. The kernel applies its policy
// rules. In the result, Dst is only the address. The Type is unix.RTN_LOCAL for an address of this host. Without a
// route, the error is unix.ENETUNREACH or similar: see NoRoute.
func (c *Conn) Get(ctx context.Context, dst netip.Addr) (Route, error) {
	return c.GetFrom(ctx, netip.Addr{}, dst, 0)
}

// GetFrom returns the route of a packet from the address src to the address dst. If link is not 0, the packet comes
// in by the link with that index. The kernel then also checks the source: the error is EXDEV if the reverse path
// filter would drop the packet. If link is 0, src must be an address of this host.
func (c *Conn) GetFrom(ctx context.Context, src, dst netip.Addr, link int) (Route, error) {
	q := request{RouteMessage: rtnetlink.RouteMessage{Family: nl.FamilyOf(dst), DstLength: uint8(dst.BitLen())}}
	if dst.Is4() {
		// Ask for the table of the route. Without this flag, IPv4 reports table main for every route. IPv6 refuses
		// the flag.
		q.Flags = unix.RTM_F_LOOKUP_TABLE
	}

	if src.IsValid() {
		q.SrcLength = uint8(src.BitLen())
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
	var b nl.Batch
	var r Route
	b.AddGet("look up route to", dst, ask, err, func(m netlink.Message) error {
		var err error
		r, _, err = decode(m.Data)
		return err
	})
	err = c.nl.Do(ctx, &b)
	return r, err
}

// NoRoute reports whether an error of Get means that no route leads to the address. There may be no route at all, or
// one that refuses packets, such as an unreachable route. The kernel may also lack the address family.
func NoRoute(err error) bool {
	return slices.ContainsFunc([]error{fs.ErrNotExist, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL,
		unix.EOPNOTSUPP},
		func(no error) bool { return errors.Is(err, no) })
}
