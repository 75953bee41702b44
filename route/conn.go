package route

import (
	"errors"
	"io/fs"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Config says how to open a Conn. The zero value, and nil, mean the caller's own
// namespace.
type Config struct {
	// NetNS is the namespace whose routes are meant; nil is that of the calling
	// thread. It may be closed after Dial.
	NetNS *netns.NS
}

// Conn reads and writes routes, rules and neighbours of one network namespace. Its
// methods may be called from several goroutines. Their errors are *tombolo.OpError.
type Conn struct {
	nl     *nl.Conn
	shared bool
}

// Dial opens a connection of its own.
func Dial(cfg *Config) (*Conn, error) {
	var c nl.Config
	if cfg != nil {
		c.NetNS = cfg.NetNS
	}
	conn, err := nl.Dial(unix.NETLINK_ROUTE, &c)
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// On makes a Conn over a connection that is open already and that stays with its
// owner: Close does nothing then. It is for packages of this module.
func On(conn *nl.Conn) *Conn { return &Conn{nl: conn, shared: true} }

// Close closes the connection, unless it is another's.
func (c *Conn) Close() error {
	if c == nil {
		return c.usable()
	}
	if c.shared {
		return nil
	}
	return c.nl.Close()
}

// Add adds a route. The error matches fs.ErrExist where its table has one with the
// same Dst, TOS and Priority (for IPv6: Dst, From and Priority), whatever that
// one's gateway or link.
func (c *Conn) Add(r Route) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	r.AppendAdd(&b)
	return c.nl.Execute(&b)
}

// Replace adds a route, or puts it in the place of the one that Add would find in
// its way. Packets find one or the other at any moment.
func (c *Conn) Replace(r Route) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	r.AppendReplace(&b)
	return c.nl.Execute(&b)
}

// Ensure makes a table have a route as it is given, and says whether it had to
// change anything: see Route.Matches for what counts as the same. Another in its
// place is replaced.
func (c *Conn) Ensure(r Route) (changed bool, _ error) {
	if err := c.usable(); err != nil {
		return false, err
	}

	err := c.Add(r)
	if !errors.Is(err, fs.ErrExist) {
		return err == nil, err
	}
	// The kernel's look-up takes an address, not a prefix, a priority and a table,
	// so there is no get that would do.
	n := r.normal()
	list, err := c.List(Filter{Family: n.Family, Table: n.Table, Link: n.Link})
	if err != nil {
		return false, err
	}
	for _, have := range list {
		if n.Matches(have) {
			return false, nil
		}
	}
	err = c.Replace(r)
	return err == nil, err
}

// Del deletes the first route of its table that has Dst, and those of the other
// fields that are set; MTU, AdvMSS, Metrics, Pref and Expires are not compared. The
// error matches fs.ErrNotExist where there is none.
func (c *Conn) Del(r Route) error {
	if err := c.usable(); err != nil {
		return err
	}

	var b nl.Batch
	r.AppendDel(&b)
	return c.nl.Execute(&b)
}

// Remove is Del for which a route or a link that is not there is success.
func (c *Conn) Remove(r Route) error {
	if err := c.usable(); err != nil {
		return err
	}
	return absentIsSuccess(c.Del(r))
}

func absentIsSuccess(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Filter says which routes to list. The zero value of a field is any.
type Filter struct {
	// Family is unix.AF_INET or unix.AF_INET6.
	Family uint8
	// Table is the table. Unlike in a Route, 0 is every one of them.
	Table uint32
	// Link is the index of the link that is sent to, by one next hop at least.
	Link     int
	Protocol Protocol
	Type     Type
}

// List gives the routes that match a filter, which the kernel applies, in the
// kernel's order. A table that does not exist has none. The error matches
// fs.ErrNotExist where there is no such link, and tombolo.ErrInterrupted where the
// routes changed faster than they could be read.
func (c *Conn) List(f Filter) ([]Route, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}

	var list []Route
	err := c.nl.Dump("list routes", unix.RTM_GETROUTE, f.encode, func(m nl.Message) error {
		if m.Header.Type != unix.RTM_NEWROUTE {
			return nil
		}
		r, known, err := decode(m.Data)
		// A kernel that has no IPv6 lists all families where IPv6 is asked for.
		if known && (f.Family == 0 || f.Family == r.Family) {
			list = append(list, r)
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // what the kernel says of the table; a link is ENODEV
	}
	return list, err
}

// encode writes the header and the attributes that the kernel filters by (Linux
// 4.20). Strict checking makes it refuse any that it does not know, where it would
// otherwise list everything.
func (f Filter) encode(e *nl.Encoder) {
	h := rtmsg{family: f.Family, protocol: uint8(f.Protocol), typeOf: uint8(f.Type)}
	if f.Table < 256 {
		h.table = uint8(f.Table)
	}
	h.encode(e)
	if f.Table > 255 {
		e.Uint32(unix.RTA_TABLE, f.Table)
	}
	if f.Link != 0 {
		e.Uint32(unix.RTA_OIF, uint32(f.Link))
	}
}

// Get asks the kernel which route a packet of this host to an address would take:
// the rules are heeded, and Dst is the address alone. The Type is Local for an
// address of the host itself. The error is an unix.ENETUNREACH or the like where
// there is none.
func (c *Conn) Get(dst netip.Addr) (Route, error) {
	if err := c.usable(); err != nil {
		return Route{}, err
	}

	var b nl.Batch
	var r Route
	AppendGet(&b, dst, &r)
	err := c.nl.Execute(&b)
	return r, err
}

// AppendGet appends the request of Conn.Get to a batch, whose execution fills
// into; it is for packages of this module.
func AppendGet(b *nl.Batch, dst netip.Addr, into *Route) {
	b.Get("look up route to", dst, unix.RTM_GETROUTE, 0, func(e *nl.Encoder) {
		h := rtmsg{family: familyOf(dst), dstLen: uint8(dst.BitLen())}
		if dst.Is4() {
			// Without it, IPv4 says main whatever the table; IPv6 refuses it.
			h.flags = unix.RTM_F_LOOKUP_TABLE
		}
		h.encode(e)
		e.Addr(unix.RTA_DST, dst)
	}, func(m nl.Message) error {
		r, _, err := decode(m.Data)
		*into = r
		return err
	})
}

// usable refuses a Conn that nothing can be done with.
func (c *Conn) usable() error {
	if c == nil {
		return (*nl.Conn)(nil).Usable()
	}
	return c.nl.Usable()
}
