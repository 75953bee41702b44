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

// Config says where the NIC is. The zero value, and a nil *Config, is the caller's
// network namespace.
type Config struct {
	// NetNS is the NIC's namespace; nil is that of the calling thread. It may be closed
	// after Dial.
	NetNS *netns.NS
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

// Dial opens the sockets. It needs CAP_SYS_ADMIN where cfg names a namespace.
func Dial(cfg *Config) (*Conn, error) {
	ns, err := own(cfg)
	if err != nil {
		return nil, err
	}
	conn, err := nl.Dial(unix.NETLINK_ROUTE, ns)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return over(ns, conn), nil
}

// over makes a Conn of what Dial opens.
func over(ns *netns.NS, conn *nl.Conn) *Conn {
	return &Conn{nl: conn, ns: ns, addrs: addr.On(conn), routes: route.On(conn), bridge: bridge.On(conn, nil)}
}

// own opens the namespace again, for what is read and written below /proc later.
func own(cfg *Config) (*netns.NS, error) {
	if cfg == nil || cfg.NetNS == nil {
		return netns.Current()
	}
	if err := cfg.NetNS.Usable(); err != nil {
		return nil, err
	}
	return netns.Open(fmt.Sprintf("/proc/self/fd/%d", cfg.NetNS.FD()))
}

// Close closes the sockets.
func (c *Conn) Close() error {
	return errors.Join(c.nl.Close(), c.ns.Close())
}
