package addr

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Conn reads and writes the addresses of one network namespace. Its methods may
// be called from several goroutines, and ask nothing once their context is done.
// Errors of the kernel are *tombolo.OpError.
type Conn struct {
	nl     *nl.Conn
	shared bool
}

// Dial opens a connection to the addresses of a namespace; nil is that of the calling
// thread. The namespace may be closed afterwards.
func Dial(ns *netns.NS) (*Conn, error) {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, ns)
	if err != nil {
		return nil, err
	}
	return &Conn{nl: conn}, nil
}

// On makes a Conn over a connection that is open already and that stays with its
// owner: Close does nothing then. It is for packages of this module.
func On(s tombolo.Socket) *Conn { return &Conn{nl: nl.Of(s), shared: true} }

// Close closes the connection, unless it is another's.
func (c *Conn) Close() error {
	if c.shared {
		return nil
	}
	return c.nl.Close()
}

// Add adds an address. The error matches fs.ErrExist where the link has it
// already, and fs.ErrNotExist where there is no such link.
func (c *Conn) Add(ctx context.Context, a Address) error {
	return c.change(ctx, "add address", &a, unix.RTM_NEWADDR, netlink.Create|netlink.Excl)
}

// Replace adds an address, or overwrites the fields of one that is there as far as the kernel allows: lifetimes, Metric
// and Protocol, for IPv6 also Flags and Peer, but not back to a Metric of 0 or to no Peer. It leaves the other fields
// as they are, without an error; Ensure corrects those too.
func (c *Conn) Replace(ctx context.Context, a Address) error {
	return c.change(ctx, "replace address", &a, unix.RTM_NEWADDR, netlink.Create|netlink.Replace)
}

// change carries out one request.
func (c *Conn) change(ctx context.Context, op string, a *Address, typ netlink.HeaderType, flags netlink.HeaderFlags) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var b nl.Batch
	m, err := a.Message(typ, flags)
	b.Add(op, a, m, err)
	return c.nl.Execute(&b)
}

// Remove deletes an address, by its Prefix, Peer and Link. It is no error if the address or the link does not
// exist.
//
// With an IPv4 address go the routes that have it as their source, and, where it
// is the first of its network on the link and net.ipv4.conf.*.promote_secondaries
// is off, the others of that network.
func (c *Conn) Remove(ctx context.Context, a Address) error {
	err := c.change(ctx, "delete address", &a, unix.RTM_DELADDR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Filter says which addresses to list.
type Filter struct {
	// Link is a link's index; 0 is every link.
	Link int
	// Family is unix.AF_INET or unix.AF_INET6; 0 is both.
	Family uint8
}

// List returns the addresses that match a filter, which the kernel applies, in the kernel's order. The error matches
// fs.ErrNotExist where there is no such link, and tombolo.ErrInterrupted where the addresses changed faster than they
// could be read. The list is then the last try's, which may lack addresses and have others twice.
func (c *Conn) List(ctx context.Context, f Filter) ([]Address, error) {
	var list []Address
	err := c.walk(ctx, f, func() { list = nil }, func(a Address) error {
		list = append(list, a)
		return nil
	})
	return list, err
}

// walk lists addresses as they arrive, until each returns an error. It calls begin before each try.
func (c *Conn) walk(ctx context.Context, f Filter, begin func(), each func(Address) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ask, err := nl.Marshal(unix.RTM_GETADDR, 0, header(f.Family, 0, 0, f.Link).MarshalBinary, nil)
	return c.nl.Walk("list addresses", ask, err, begin, func(m netlink.Message) error {
		if m.Header.Type != unix.RTM_NEWADDR {
			return nil
		}
		a, err := decode(m.Data)
		// A kernel that has no IPv6 lists all families where IPv6 is asked for.
		if err == nil && (f.Family == 0 || f.Family == a.family()) {
			err = each(a)
		}
		return err
	})
}

// first returns the first IPv4 address of a link that matches, or nil if there is none.
func (c *Conn) first(ctx context.Context, link int, matches func(*Address) bool) (*Address, error) {
	var found *Address
	err := c.walk(ctx, Filter{Link: link, Family: unix.AF_INET}, func() {}, func(have Address) error {
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

// Has reports whether the link has the address, by its Prefix and Link, and by its Peer if that is set. For IPv6 it asks
// for the one address, for IPv4, which has no such request, it lists the link's.
func (c *Conn) Has(ctx context.Context, a Address) (bool, error) {
	same := func(have *Address) bool {
		return have.Link == a.Link && have.Prefix == a.Prefix && (!a.Peer.IsValid() || have.peer() == a.Peer)
	}
	if a.is4() {
		have, err := c.first(ctx, a.Link, same)
		return have != nil, err
	}

	have, err := c.get(ctx, &a)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && same(&have), err
}

// find gives the address which the kernel takes for the same as a, and
// fs.ErrNotExist if there is none.
func (c *Conn) find(ctx context.Context, a *Address) (Address, error) {
	if !a.is4() {
		return c.get(ctx, a)
	}
	// There is no get for IPv4.
	have, err := c.first(ctx, a.Link, func(have *Address) bool {
		return have.Prefix == a.Prefix && have.network() == a.network()
	})
	if have != nil {
		return *have, nil
	}
	return Address{}, cmp.Or[error](err, &tombolo.OpError{Op: "find address", Object: a.String(), Err: fs.ErrNotExist})
}

// peer is the other end's address, or the address itself where there is no peer,
// as the kernel sees it.
func (a *Address) peer() netip.Addr {
	if a.Peer.IsValid() {
		return a.Peer
	}
	return a.Prefix.Addr()
}

// network is what IPv4 compares besides address and prefix length.
func (a *Address) network() netip.Prefix {
	return netip.PrefixFrom(a.peer(), a.Prefix.Bits()).Masked()
}

// get asks for one IPv6 address, whose prefix length the kernel does not compare.
func (c *Conn) get(ctx context.Context, a *Address) (Address, error) {
	if err := ctx.Err(); err != nil {
		return Address{}, err
	}
	var have Address
	// Strict checking wants the prefix length to be 0 here, and takes no other attribute:
	// so not the one of no type, which the library adds to those that it has.
	m, err := nl.Marshal(unix.RTM_GETADDR, 0, header(unix.AF_INET6, 0, 0, a.Link).MarshalBinary, func(ae *netlink.AttributeEncoder) {
		nl.PutAddr(ae, unix.IFA_ADDRESS, a.Prefix.Addr())
	})
	var b nl.Batch
	b.AddGet("find address", a, m, err, func(m netlink.Message) error {
		var err error
		have, err = decode(m.Data)
		return err
	})
	err = c.nl.Execute(&b)
	return have, err
}

// Ensure makes a link have an address as it is given, and reports whether it had to change anything. It leaves a
// Broadcast, Label or Protocol that the address has if the field is not set. A finite lifetime starts anew, which is a
// change unless the seconds left are the same. An IPv4 address of another prefix length, or whose Peer is in another
// network, is another address to the kernel: Ensure adds it beside the first.
//
// Where the kernel cannot change a property in place, Ensure deletes the address and adds it again, in one message.
// If the kernel refuses the new one, Ensure puts the old one back. Remove says what else a deletion takes along.
//
//   - For IPv4, such properties are Flags, Scope, Broadcast, Label and Peer.
//   - For IPv6 they are the prefix length, a Peer that goes and a Metric that goes.
//   - An IPv6 address that is not usable is added again too: its duplicate address detection failed, or is under way
//     though IFA_F_NODAD is asked for.
//
// To wait until an IPv6 address is usable, see Watch.Wait.
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

// exchange deletes one address and adds another in its place.
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

// difference is what it takes to turn one address into another.
type difference int

const (
	same difference = iota
	replaceable
	deletable
)

func (a *Address) compare(have *Address) difference {
	fixed := a.askedFlags() ^ have.askedFlags() // flags that no request changes in place
	var changeable uint32
	if !a.is4() {
		// inet6_addr_modify() of the kernel.
		changeable = fixed &^ (unix.IFA_F_MCAUTOJOIN | unix.IFA_F_OPTIMISTIC)
		fixed &= unix.IFA_F_MCAUTOJOIN // optimistic is gone once the detection is over
	}
	unusable := have.Flags&unix.IFA_F_DADFAILED != 0 || have.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_NODAD != 0
	switch {
	case a.Prefix != have.Prefix, fixed != 0:
		return deletable
	case !a.is4() && (unusable || !a.Peer.IsValid() && have.Peer.IsValid() || a.Metric == 0 && have.Metric != 0):
		return deletable // the kernel passes over what a request does not have
	case a.is4() && (a.scope() != have.Scope || a.peer() != have.peer() ||
		a.Broadcast.IsValid() && a.Broadcast != have.Broadcast ||
		a.Label != "" && a.Label != have.Label):
		return deletable
	case changeable != 0, a.peer() != have.peer(), a.Metric != have.Metric,
		a.Protocol != 0 && a.Protocol != have.Protocol,
		seconds(a.Valid, nil) != seconds(have.Valid, nil),
		seconds(a.Preferred, a.Valid) != seconds(have.Preferred, nil):
		return replaceable
	}
	return same
}
