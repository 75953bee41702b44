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

// ErrRefused is the cause of an error about a NIC that cannot be taken over as it is. Nothing was changed, and the
// text has advice.
var ErrRefused = errors.New("it cannot be taken over as it is")

// Uplink describes a takeover.
type Uplink struct {
	// NIC is the interface that becomes a port. It must be an Ethernet device that is up.
	NIC string
	// Bridge is created with the NIC's MAC and MTU.
	Bridge string
	// Alias is the alias of a new bridge: see bridge.Bridge.
	Alias string
}

// Conn works on the NICs of one network namespace. Several goroutines may call its methods. For one NIC or bridge,
// only one caller in all processes may make changes at a time. The caller must lock.
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

// over returns a Conn over an open socket.
func over(ns *netns.NS, conn *nl.Conn) *Conn {
	return &Conn{nl: conn, ns: ns, addrs: addr.On(conn), routes: route.On(conn), bridge: bridge.On(conn, nil)}
}

// reopen opens the namespace a second time, for later access to files below /proc.
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
