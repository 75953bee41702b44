package bridge

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Conn manages the bridges of one network namespace through one netlink socket. Several goroutines may call its
// methods at the same time.
type Conn struct {
	nl *nl.Conn
	// dialPod opens a socket in the network namespace of the calling thread.
	dialPod func() (*nl.Conn, error)

	home netns.ID // the bridges' namespace; the zero ID if unknown

	mu      sync.Mutex
	ipv6    *sysctl.Dir              // see hostIPv6
	waiting map[string]*podNamespace // by port; attachments that Wait has not waited for yet
}

// Dial opens a connection to the network namespace ns, which contains the bridges. If ns is nil, Dial uses the
// namespace of the calling thread. If ns is not nil, Dial needs CAP_SYS_ADMIN, and the caller may close ns
// afterwards.
func Dial(ns *netns.NS) (*Conn, error) {
	c, err := nl.Dial(unix.NETLINK_ROUTE, ns)
	if err != nil {
		return nil, err
	}
	home := ns
	if ns == nil {
		if home, err = netns.Current(); err != nil {
			return nil, errors.Join(err, c.Close())
		}
		defer home.Close()
	}

	return &Conn{nl: c, dialPod: dialRoute, home: home.ID()}, nil
}

// checkPod returns an error if pod is nil or closed. It also returns an error if pod is the bridges' own network
// namespace, unless same is set.
func (c *Conn) checkPod(pod *netns.NS, same bool) error {
	var err error
	switch {
	case pod.FD() < 0:
		err = fmt.Errorf("%w: it is closed: %w", tombolo.ErrInvalid, unix.EBADF)
	case !same && pod.ID() == c.home:
		err = fmt.Errorf("%w: it is the namespace that the bridge is in", tombolo.ErrInvalid)
	default:
		return nil
	}
	return &tombolo.OpError{Op: "use pod's network namespace", Object: pod.String(), Err: err}
}

// On returns a Conn over an open socket. The Conn calls dialPod within a pod's namespace to open a socket there. If
// dialPod is nil, the socket leads to the kernel. Dial is for programs; On lets a test answer in the kernel's place.
func On(s tombolo.Socket, dialPod func() (tombolo.Socket, error)) *Conn {
	if dialPod == nil {
		return &Conn{nl: nl.Of(s), dialPod: dialRoute}
	}
	return &Conn{nl: nl.Of(s), dialPod: func() (*nl.Conn, error) {
		inPod, err := dialPod()
		return nl.Of(inPod), err
	}}
}

func dialRoute() (*nl.Conn, error) { return nl.Dial(unix.NETLINK_ROUTE, nil) }

// Close closes all sockets of the Conn, including those for pods that were attached with NoWait and not waited for.
// It changes nothing in such pods.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, inPod := range c.waiting {
		inPod.close()
	}

	c.waiting = nil
	if c.ipv6 != nil {
		_ = c.ipv6.Close() // an error does not matter: the kernel has answered all requests
		c.ipv6 = nil
	}
	return c.nl.Close()
}

// Addresses returns a connection for addresses in the bridges' network namespace. It uses c's socket, so the caller
// does not need to close it.
func (c *Conn) Addresses() *addr.Conn { return addr.On(c.Socket()) }

// Routes returns a connection for routes in the bridges' network namespace. It uses c's socket, so the caller does
// not need to close it.
func (c *Conn) Routes() *route.Conn { return route.On(c.Socket()) }

// Socket returns the connection's socket for use by other packages, such as bandwidth.On. The Conn c still owns the
// socket.
func (c *Conn) Socket() tombolo.Socket {
	return c.nl
}

// VLANs returns a connection for VLANs of the bridges. It uses c's socket, so the caller does not need to close it.
func (c *Conn) VLANs() *vlan.Conn { return vlan.On(c.Socket()) }

// ErrForeign is wrapped by errors about a link whose alias names another owner.
var ErrForeign = errors.New("the link belongs to another owner")

// Detach deletes a port, and with it the pod's interface, addresses and routes. In the same step it deletes the links
// named in also, such as an ifb for bandwidth limits. It is no error if a link does not exist. If the alias of a link
// does not begin with owner, the link belongs to another program. Detach keeps such a link and returns an error that
// matches ErrForeign. An empty owner matches any alias.
//
// Detach takes 12 to 36 ms, since the kernel waits for RCU grace periods. Several links at once take no longer than
// one.
func (c *Conn) Detach(ctx context.Context, name, owner string, also ...string) error {
	c.closeWaiting(name)
	var errs []error
	var ours []*Link
	for _, name := range append([]string{name}, also...) {
		l, err := c.ownedLink(ctx, name)
		if err == nil {
			err = l.checkOwner("delete link", owner)
		}
		switch {
		case err == nil:
			ours = append(ours, l)
		case !errors.Is(err, fs.ErrNotExist):
			errs = append(errs, err)
		}
	}

	if len(ours) > 0 {
		errs = append(errs, c.delLinks(ctx, ours))
	}

	return errors.Join(errs...)
}

// Shut sets a port down. The pod cannot set it up again, so no packet passes the port any more. So the caller can
// delete the port's guard before it deletes the port, which takes much longer. It is no error if the port does not
// exist. If the alias does not begin with owner, Shut changes nothing and returns an error that matches ErrForeign.
// An empty owner matches any alias.
func (c *Conn) Shut(ctx context.Context, name, owner string) error {
	return c.change(ctx, "set link down", name, owner, func(_ *Link, r *link.Request) bool {
		r.Change = unix.IFF_UP
		return true
	})
}

// SetAlias changes the alias of a link: see Port.Alias. It is no error if the link does not exist. If the present
// alias does not begin with owner, SetAlias changes nothing and returns an error that matches ErrForeign. An empty
// owner matches any alias.
func (c *Conn) SetAlias(ctx context.Context, name, owner, alias string) error {
	return c.change(ctx, "set alias of link", name, owner, func(l *Link, r *link.Request) bool {
		r.Alias = &alias
		return l.Alias != alias
	})
}

// change sends a request that changes a link of the owner. ask fills in the request, and returns false if no change
// is needed. It is no error if the link does not exist.
func (c *Conn) change(ctx context.Context, op, name, owner string, ask func(*Link, *link.Request) bool) error {
	l, err := c.ownedLink(ctx, name)
	if err == nil {
		err = l.checkOwner(op, owner)
	}

	if r := (link.Request{}); err == nil && ask(l, &r) {
		r.Index = l.Index
		err = r.Apply(ctx, c.nl, op, name)
	}

	return nl.PassAbsent(err)
}

// delLinks deletes links. It is no error if a link does not exist any more.
func (c *Conn) delLinks(ctx context.Context, list []*Link) error {
	var b nl.Batch
	if len(list) == 1 {
		// Delete the link by its index, which identifies the link that was checked. Another link may have its name by
		// now.
		link.Request{Index: list[0].Index}.Delete(&b, list[0].Name)
	} else {
		delTogether(&b, list)
	}

	err := c.nl.Do(ctx, &b)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}

	var errs []error
	for i := range b.Len() {
		errs = append(errs, nl.PassAbsent(b.Err(i)))
	}

	return errors.Join(errs...)
}

// dyingGroup is XORed with the index of a link to get a link group that no other link has. A group has 32 bits, and
// other programs choose small numbers.
const dyingGroup = 0x746f0000

// delTogether puts the links into one group and deletes the group, since the kernel then waits only once for all of
// them.
func delTogether(b *nl.Batch, list []*Link) {
	group := uint32(dyingGroup) ^ uint32(list[0].Index)
	for _, l := range list {
		link.Request{Index: l.Index, Group: &group}.Set(b, "set group of link", l.Name)
	}
	link.Request{Group: &group}.Delete(b, list[0].Name)
}

// ownedLink returns a link with only the attributes that checkOwner needs.
func (c *Conn) ownedLink(ctx context.Context, name string) (*Link, error) {
	return c.link(ctx, name, 0, unix.IFLA_IFNAME, unix.IFLA_IFALIAS)
}

// checkOwner returns an error that matches ErrForeign if the link's alias does not begin with owner.
func (l *Link) checkOwner(op, owner string) error {
	if strings.HasPrefix(l.Alias, owner) {
		return nil
	}
	return &tombolo.OpError{Op: op, Object: l.Name,
		Err: fmt.Errorf("%w: its alias is %q, where %q is expected", ErrForeign, l.Alias, owner)}
}
