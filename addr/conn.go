package addr

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Conn reads and writes the addresses of one network namespace. Several goroutines may call its methods at once. A
// method sends nothing if its context is done. Errors of the kernel are, or wrap, a *tombolo.OpError.
type Conn struct {
	nl     *nl.Conn
	shared bool
}

// Dial opens a connection that works on the addresses of the network namespace ns. If ns is nil, it uses the calling
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

// Add adds an address. If the link already has the address, the error matches fs.ErrExist. If there is no such link,
// the error matches fs.ErrNotExist.
func (c *Conn) Add(ctx context.Context, a Address) error {
	return c.change(ctx, "add address", &a, unix.RTM_NEWADDR, netlink.Create|netlink.Excl)
}

// Replace adds an address. If the link already has the address, Replace overwrites the properties that the kernel can
// change in place. These are lifetimes, Metric and Protocol, for IPv6 also Peer and most Flags. Replace leaves all
// other properties as they are, without an error. Ensure corrects them too.
func (c *Conn) Replace(ctx context.Context, a Address) error {
	return c.change(ctx, "replace address", &a, unix.RTM_NEWADDR, netlink.Create|netlink.Replace)
}

func (c *Conn) change(ctx context.Context, op string, a *Address, typ netlink.HeaderType,
	flags netlink.HeaderFlags) error {
	m, err := a.Message(typ, flags)
	return c.nl.Change(ctx, op, a, m, err)
}

// Remove deletes an address, identified by its Prefix, Peer and Link. It is no error if the address or the link does
// not exist.
//
// The kernel also deletes the routes with a deleted IPv4 address as their source. With the first address of a network
// on the link, the kernel also deletes the network's other addresses, unless net.ipv4.conf.*.promote_secondaries is on.
func (c *Conn) Remove(ctx context.Context, a Address) error {
	return nl.PassAbsent(c.change(ctx, "delete address", &a, unix.RTM_DELADDR, 0))
}

// Filter selects the addresses to list.
type Filter struct {
	// Link is a link's index; 0 means every link.
	Link int
	// Family is unix.AF_INET or unix.AF_INET6; 0 means both.
	Family uint8
}

// List returns the addresses that match a filter, in the kernel's order. The kernel applies the filter. If there is no
// such link, the error matches fs.ErrNotExist. If changes interrupted every attempt, the error matches
// tombolo.ErrInterrupted, and the returned list comes from the last attempt. It may lack addresses, or have one twice.
func (c *Conn) List(ctx context.Context, f Filter) ([]Address, error) {
	var list []Address
	err := c.walk(ctx, f, func() { list = nil }, func(a Address) error {
		list = append(list, a)
		return nil
	})
	return list, err
}

// walk calls the callback each with every listed address, and stops at the first error that each returns. It calls
// begin before every attempt, since changes may interrupt a listing.
func (c *Conn) walk(ctx context.Context, f Filter, begin func(), each func(Address) error) error {
	ask, err := nl.Marshal(unix.RTM_GETADDR, 0, header(f.Family, 0, 0, f.Link).MarshalBinary, nil)
	return c.nl.Walk(ctx, "list addresses", ask, err, begin, func(m netlink.Message) error {
		if m.Header.Type != unix.RTM_NEWADDR {
			return nil
		}
		a, err := decode(m.Data)

		// Filter here too: a kernel without IPv6 lists all families if IPv6 is requested.
		if err == nil && (f.Family == 0 || f.Family == a.family()) {
			err = each(a)
		}
		return err
	})
}

// first returns the first address that the function matches accepts, or nil if there is none. For IPv6, it requests
// only the address a. The kernel has no request for a single IPv4 address, so for IPv4 it lists the addresses of a's
// link.
func (c *Conn) first(ctx context.Context, a *Address, matches func(*Address) bool) (*Address, error) {
	if !a.is4() {
		have, err := c.get(ctx, a)
		if err != nil || !matches(&have) {
			return nil, nl.PassAbsent(err)
		}
		return &have, nil
	}

	var found *Address
	err := c.walk(ctx, Filter{Link: a.Link, Family: unix.AF_INET}, func() {}, func(have Address) error {
		if !matches(&have) {
			return nil
		}
		found = &have
		return fs.SkipAll
	})
	if found != nil {
		return found, nil
	}
	return nil, err
}

// Has reports whether the link a.Link has the address a.Prefix. It also compares the Peer if a has one. For IPv6, Has
// requests only that address. IPv4 has no such request, so Has lists the link's addresses.
func (c *Conn) Has(ctx context.Context, a Address) (bool, error) {
	have, err := c.first(ctx, &a, func(have *Address) bool {
		return have.Link == a.Link && have.Prefix == a.Prefix && (!a.Peer.IsValid() || have.peer() == a.Peer)
	})
	return have != nil, err
}

// find returns the address that the kernel considers equal to a. If there is none, the error matches fs.ErrNotExist.
func (c *Conn) find(ctx context.Context, a *Address) (Address, error) {
	have, err := c.first(ctx, a, func(have *Address) bool {
		return !a.is4() || have.Prefix == a.Prefix && have.network() == a.network()
	})
	if have != nil {
		return *have, nil
	}
	return Address{}, cmp.Or[error](err, &tombolo.OpError{Op: "find address", Object: a.String(), Err: fs.ErrNotExist})
}

// peer returns the other end's address or, like the kernel, the address itself if there is no peer.
func (a *Address) peer() netip.Addr {
	if a.Peer.IsValid() {
		return a.Peer
	}
	return a.Prefix.Addr()
}

// network returns the network of the peer or, without a peer, of the address. The kernel identifies an IPv4 address
// by its network too, besides its address and prefix length.
func (a *Address) network() netip.Prefix {
	return netip.PrefixFrom(a.peer(), a.Prefix.Bits()).Masked()
}

// get returns the IPv6 address a on its link. It ignores the prefix length. If the address is missing, the error
// matches fs.ErrNotExist. If the link is missing, the kernel may return the same address of another link.
func (c *Conn) get(ctx context.Context, a *Address) (Address, error) {
	var have Address

	// With strict checking the kernel requires a prefix length of 0 here, and refuses an attribute of type 0. The
	// encoder of package rtnetlink would add one.
	m, err := nl.Marshal(unix.RTM_GETADDR, 0, header(unix.AF_INET6, 0, 0, a.Link).MarshalBinary,
		func(ae *netlink.AttributeEncoder) {
			nl.PutAddr(ae, unix.IFA_ADDRESS, a.Prefix.Addr())
		})
	err = c.nl.Get(ctx, "find address", a, m, err, func(m netlink.Message) (err error) {
		have, err = decode(m.Data)
		return err
	})

	return have, err
}

// Ensure adds an address to a link, or corrects an existing one, and reports whether it changed anything. It does not
// compare a Broadcast, Label or Protocol that is not set. It renews a finite lifetime unless the remaining seconds are
// equal; renewing counts as a change.
//
// If the kernel cannot change a property in place, Ensure deletes the address and adds it again in one datagram. If the
// kernel refuses the new address, Ensure restores the old one. For IPv4 such properties are Flags, Scope, Broadcast,
// Label and Peer; see Remove for the consequences of a deletion. For IPv6 they are the prefix length, IFA_F_MCAUTOJOIN,
// and a Peer or Metric to remove. Ensure also replaces an unusable IPv6 address: one whose duplicate address detection
// failed, or is in progress although IFA_F_NODAD is requested.
func (c *Conn) Ensure(ctx context.Context, a Address) (changed bool, _ error) {
	err := c.Add(ctx, a)
	if !errors.Is(err, fs.ErrExist) {
		return err == nil, err
	}

	have, err := c.find(ctx, &a)
	if err != nil {
		return false, err
	}

	switch a.compare(&have) {
	case replaceable:
		err = c.Replace(ctx, a)
	case deletable:
		err = c.exchange(ctx, have, a)
	default:
		return false, nil
	}

	return err == nil, err
}

// exchange deletes one address and adds another in its place, in one datagram. If the kernel refuses the new address,
// exchange adds the old one again.
func (c *Conn) exchange(ctx context.Context, from, to Address) error {
	var b nl.Batch
	m, err := from.Message(unix.RTM_DELADDR, 0)
	b.Add("delete address", &from, m, err)
	m, err = to.Message(unix.RTM_NEWADDR, netlink.Create|netlink.Excl)
	b.Add("add address", &to, m, err)
	c.nl.Execute(&b)
	delErr, addErr := b.Err(0), b.Err(1)
	if addErr != nil && delErr == nil {
		return errors.Join(addErr, c.Add(ctx, from))
	}

	if delErr != nil && !errors.Is(delErr, fs.ErrNotExist) {
		return delErr
	}

	return addErr
}

// difference is the result of compare: the addresses are equal, or Conn.Replace can turn one into the other, or only a
// deletion followed by an Add can.
type difference int

const (
	same difference = iota
	replaceable
	deletable
)

func (a *Address) compare(have *Address) difference {
	fixed := a.requestFlags() ^ have.requestFlags() // flags that no request can change in place
	var changeable uint32
	if !a.is4() {
		// These are the flags that inet6_addr_modify() of the kernel can change.
		changeable = fixed &^ (unix.IFA_F_MCAUTOJOIN | unix.IFA_F_OPTIMISTIC)
		fixed &= unix.IFA_F_MCAUTOJOIN // the optimistic flag disappears when the detection ends
	}

	unusable := have.Flags&unix.IFA_F_DADFAILED != 0 || have.Flags&unix.IFA_F_TENTATIVE != 0 &&
		a.Flags&unix.IFA_F_NODAD != 0
	switch {
	case a.Prefix != have.Prefix, fixed != 0:
		return deletable
	case !a.is4() && (unusable || !a.Peer.IsValid() && have.Peer.IsValid() || a.Metric == 0 && have.Metric != 0):
		return deletable // a request without Peer or Metric leaves the old one unchanged
	case a.is4() && (a.scope() != have.Scope || a.peer() != have.peer() ||
		a.Broadcast.IsValid() && a.Broadcast != have.Broadcast ||
		a.Label != "" && a.Label != have.Label):
		return deletable
	case changeable != 0, a.peer() != have.peer(), a.Metric != have.Metric,
		a.Protocol != 0 && a.Protocol != have.Protocol,
		seconds(a.Valid, nil) != seconds(have.Valid, nil),
		seconds(a.preferred(), a.Valid) != seconds(have.preferred(), nil):
		return replaceable
	}

	return same
}

// preferred returns Preferred as the kernel takes it: for an IPv4 address without Valid, it ignores all values but 0.
func (a *Address) preferred() *time.Duration {
	if a.is4() && a.Valid == nil && seconds(a.Preferred, nil) > 0 {
		return nil
	}
	return a.Preferred
}
