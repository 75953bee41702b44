package uplink

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// ErrRefused is the cause where a NIC cannot be taken over as it is. Nothing was changed, and the text says what to do.
var ErrRefused = errors.New("it cannot be taken over as it is")

// Uplink says what is to be taken over, and how.
type Uplink struct {
	// NIC is the interface that becomes a port: an Ethernet device that is up.
	NIC string
	// Bridge is made, with the NIC's MAC and MTU.
	Bridge string
	// Alias is given to a bridge that is made: see bridge.Bridge.
	Alias string
}

// Conn works on the NICs of one network namespace. Its methods may be called from
// several goroutines, but for one NIC or bridge only one may change anything at a
// time, of all processes: a lock is the caller's matter.
type Conn struct {
	nl     *nl.Conn
	ns     *netns.NS
	addrs  *addr.Conn
	routes *route.Conn
	bridge *bridge.Conn
}

// Dial opens the sockets in a network namespace, which may be closed afterwards. If ns is nil, it uses the calling
// thread's namespace.
func Dial(ns *netns.NS) (*Conn, error) {
	own, err := reopen(ns)
	if err != nil {
		return nil, err
	}

	conn, err := nl.Dial(unix.NETLINK_ROUTE, own)
	if err != nil {
		return nil, errors.Join(err, own.Close())
	}

	return over(own, conn), nil
}

// over makes a Conn of what Dial opens.
func over(ns *netns.NS, conn *nl.Conn) *Conn {
	return &Conn{nl: conn, ns: ns, addrs: addr.On(conn), routes: route.On(conn), bridge: bridge.On(conn, nil)}
}

// reopen opens the namespace again, since files below /proc are read and written there later.
func reopen(ns *netns.NS) (*netns.NS, error) {
	if ns == nil {
		return netns.Current()
	}

	return netns.Open(fmt.Sprintf("/proc/self/fd/%d", ns.FD()))
}

// Close closes the sockets.
func (c *Conn) Close() error {
	return errors.Join(c.nl.Close(), c.ns.Close())
}
