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
	conn := &Conn{nl: c, dialPod: dialRoute}
	if err := conn.noteNetNS(ns); err != nil {
		c.Close()
		return nil, err
	}
	return conn, nil
}

// noteNetNS records which network namespace contains the bridges, for checkPod and checkThread.
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

// checkPod returns an error if pod is nil or closed. It also returns an error if pod is the bridges' own network
// namespace, unless same is set.
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
