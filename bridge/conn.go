package bridge

import (
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

// Conn works on the bridges of one network namespace over one netlink socket. Several goroutines may call its
// methods.
type Conn struct {
	nl *nl.Conn
	// dialPod opens the socket in a pod's namespace, where it is called.
	dialPod func() (*nl.Conn, error)

	home netns.ID // the bridges' namespace; the zero ID if unknown

	mu      sync.Mutex
	ipv6    *sysctl.Dir              // see hostIPv6
	waiting map[string]*podNamespace // by port; attachments that Wait has not waited for yet
}

// Dial opens the socket in ns, the bridges' namespace on the host's side. Nil means the calling thread's namespace.
// Another one needs CAP_SYS_ADMIN, and may be closed afterwards.
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

// noteNetNS records the bridges' namespace, so that it is not mistaken for a pod's.
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

// checkPod returns an error if pod is closed or nil. Unless same is set, it also returns one if pod is the bridges'
// own namespace.
func (c *Conn) checkPod(pod *netns.NS, same bool) error {
	var err error
	switch {
	case pod.FD() < 0:
		err = fmt.Errorf("%w: it is closed, or none: %w", tombolo.ErrInvalid, unix.EBADF)
	case !same && pod.ID() == c.home:
		err = fmt.Errorf("%w: it is the namespace that the bridge is in", tombolo.ErrInvalid)
	default:
		return nil
	}
	return &tombolo.OpError{Op: "use pod's network namespace", Object: pod.String(), Err: err}
}

// On returns a Conn over an open socket. dialPod, called within a pod's namespace, opens a socket there; nil opens one
// to the kernel. Dial is for programs; On lets a test answer in the kernel's place.
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

// Close closes the sockets of the Conn, also those in pods whose attachment was started and not waited for. The
// interfaces of such pods stay as they are.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, in := range c.waiting {
		in.close()
	}

	c.waiting = nil
	if c.ipv6 != nil {
		_ = c.ipv6.Close() // an error does not matter: the kernel has answered all requests
		c.ipv6 = nil
	}
	return c.nl.Close()
}

// Addresses returns a connection for addresses in the bridges' namespace, over this connection's socket. It needs no
// Close.
func (c *Conn) Addresses() *addr.Conn { return addr.On(c.Socket()) }

// Routes returns a connection for routes in the bridges' namespace, over this connection's socket. It needs no Close.
func (c *Conn) Routes() *route.Conn { return route.On(c.Socket()) }

// Socket returns the socket for use by other packages (bandwidth.On). It still belongs to c.
func (c *Conn) Socket() tombolo.Socket {
	return c.nl
}

// VLANs returns a connection for VLANs of the bridges, over this connection's socket. It needs no Close.
func (c *Conn) VLANs() *vlan.Conn { return vlan.On(c.Socket()) }
