package bridge

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Conn works on the bridges of one network namespace over one netlink socket. Its
// methods may be called from several goroutines.
type Conn struct {
	nl *nl.Conn
	// dialPod opens the socket in a pod's namespace. It is called there.
	dialPod func() (*nl.Conn, error)

	home netns.ID // where the bridges are; the zero ID if that is not known

	mu      sync.Mutex
	ipv6    *sysctl.Dir       // see hostIPv6
	waiting map[string]*inPod // by port; of attachments that are not settled yet
}

// Dial opens the socket, in the namespace of the bridges: the host's side. Nil is that of
// the calling thread; another one takes CAP_SYS_ADMIN, and may be closed afterwards.
func Dial(ns *netns.NS) (*Conn, error) {
	c, err := nl.Dial(unix.NETLINK_ROUTE, ns)
	if err != nil {
		return nil, err
	}
	conn := &Conn{nl: c, dialPod: dialRoute}
	if err := conn.noteNetNS(ns); err != nil {
		c.Close()
		return nil, err
	}
	return conn, nil
}

// noteNetNS notes which namespace the bridges are in, so that it is not taken for a
// pod's.
func (c *Conn) noteNetNS(ns *netns.NS) error {
	if ns != nil {
		c.home = ns.ID()
		return nil
	}
	own, err := netns.Current()
	if err != nil {
		return err
	}
	c.home = own.ID()
	return own.Close()
}

// checkPod returns an error if pod is closed or nil, or unless same is set if it is the bridge's own namespace.
func (c *Conn) checkPod(pod *netns.NS, same bool) error {
	err := pod.Usable()
	if err == nil && !same && pod.ID() == c.home {
		err = fmt.Errorf("%w: it is the namespace that the bridge is in", tombolo.ErrInvalid)
	}
	if err != nil {
		return &tombolo.OpError{Op: "use pod's network namespace", Object: pod.String(), Err: err}
	}
	return nil
}

// On works over a connection that is there already; dialPod, called within a
// pod's namespace, opens one there, nil a real one. It is for the packages of this
// module and for their tests, which put a fake kernel there.
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

// Close closes the socket. Attachments that have not been settled are as they are.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, in := range c.waiting {
		in.close()
	}
	c.waiting = nil
	if c.ipv6 != nil {
		_ = c.ipv6.Close() // an error loses nothing: the kernel has answered all requests
		c.ipv6 = nil
	}
	return c.nl.Close()
}

// Addresses works on the addresses of the bridges' namespace, over this
// connection's socket. It needs no Close of its own.
func (c *Conn) Addresses() *addr.Conn { return addr.On(c.Socket()) }

// Routes works on the routes of the bridges' namespace, over this connection's
// socket. It needs no Close of its own.
func (c *Conn) Routes() *route.Conn { return route.On(c.Socket()) }

// Socket is the connection, for other packages to work over (bandwidth.On). It stays with c.
func (c *Conn) Socket() tombolo.Socket {
	return c.nl
}

// VLANs works on those of the bridges' namespace, over this connection's socket. It needs no
// Close.
func (c *Conn) VLANs() *vlan.Conn { return vlan.On(c.Socket()) }

// execute sends a batch unless ctx is done: the kernel's work on it cannot be
// interrupted.
func (c *Conn) execute(ctx context.Context, b *nl.Batch) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return c.nl.Execute(b)
}
