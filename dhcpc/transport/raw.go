package transport

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/netns"
)

// Config says where a socket is opened.
type Config struct {
	// NetNS is the namespace; nil is that of the calling thread. It may be closed once
	// the socket is open.
	NetNS *netns.NS
	// Link is the interface's index there. The interface must be up to send.
	Link int
	// MAC is the client's hardware address: answers to others are not heard. Nil is
	// the interface's own.
	MAC net.HardwareAddr
	// VLAN is the ID, 1 to 4094, with which a Raw, Release and Send6 tag their frames, on an interface that is a
	// trunk, such as a bridge's port. With 0 the frames have no tag.
	VLAN uint16
	// ARP has a Raw hear ARP packets too, for Config.DetectConflicts of package dhcpc.
	ARP bool
}

// do runs fn in the namespace.
func (c *Config) do(fn func() error) error {
	if c.NetNS == nil {
		return fn()
	}
	return c.NetNS.Do(fn)
}

func (c *Config) checkLink() error {
	switch {
	case c == nil:
		return argument("no configuration, which has to name the link")
	case c.Link <= 0:
		return argument(fmt.Sprintf("link %d: want an interface's index", c.Link))
	}
	return nil
}

func (c *Config) check() error {
	if err := c.checkLink(); err != nil {
		return err
	}
	if len(c.MAC) != macLen {
		return argument(fmt.Sprintf("MAC address %q: want %d bytes", c.MAC, macLen))
	}
	return nil
}

// complete checks the Config, and gives a copy that has the interface's MAC if it had none.
func (c *Config) complete() (*Config, error) {
	if err := c.checkLink(); err != nil {
		return nil, err
	}
	full := *c
	if full.MAC == nil {
		var err error
		if full.MAC, err = c.linkMAC(); err != nil {
			return nil, err
		}
	}
	return &full, full.check()
}

func (c *Config) object() string { return "link " + strconv.Itoa(c.Link) }

// Raw is a packet socket, bound to an interface. It is a dhcpc.Transport. Use it from
// one goroutine.
type Raw struct {
	conn *packet.Conn
	mac  net.HardwareAddr
	vlan uint16
	buf  []byte
	// closed says that Close was called.
	closed atomic.Bool
}

func (r *Raw) isOpen() bool { return r != nil && r.conn != nil && !r.closed.Load() }

// frameMax is longer than any answer to a client that says what it can take (option 57).
const frameMax = 1 << 14

// DialRaw opens a packet socket. The error matches unix.EPERM without CAP_NET_RAW, and
// fs.ErrNotExist where there is no such link.
func DialRaw(cfg *Config) (*Raw, error) {
	c, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	return dialRaw(c, incoming(), c.ARP)
}

// dialRaw opens a packet socket for those DHCP answers, and with ARP such packets, that a
// direction lets through. What leaves an interface is shown to sockets for all protocols
// alone.
func dialRaw(c *Config, direction program, allProtocols bool) (*Raw, error) {
	protocol := unix.ETH_P_IP
	if allProtocols {
		protocol = unix.ETH_P_ALL
	}
	return listenRaw(c, append(direction, frames(c.MAC, c.ARP)...), protocol)
}

// listenRaw opens a packet socket for what a filter lets through.
func listenRaw(c *Config, takes program, protocol int) (*Raw, error) {
	filter, err := bpf.Assemble(takes)
	if err != nil {
		return nil, fmt.Errorf("assemble filter: %w", err)
	}
	var conn *packet.Conn
	err = c.do(func() error {
		var err error
		// By its index alone: a look-up of the interface would list all there are.
		conn, err = packet.Listen(&net.Interface{Index: c.Link}, packet.Raw, protocol, &packet.Config{Filter: filter})
		return err
	})
	if err != nil {
		return nil, &tombolo.OpError{Op: "open packet socket on", Object: c.object(), Err: err}
	}
	return &Raw{conn: conn, mac: slices.Clone(c.MAC), vlan: c.VLAN, buf: make([]byte, frameMax)}, nil
}

// linkMAC reads the interface's own address.
func (c *Config) linkMAC() (net.HardwareAddr, error) {
	var mac net.HardwareAddr
	err := c.do(func() error {
		link, err := net.InterfaceByIndex(c.Link)
		if err == nil {
			mac = link.HardwareAddr
		}
		return err
	})
	if err != nil {
		return nil, &tombolo.OpError{Op: "read MAC address of", Object: c.object(), Err: err}
	}
	return mac, nil
}

// Send sends a packet as a frame of its own: no route, neighbour or address is needed.
func (r *Raw) Send(_ context.Context, p *dhcpc.Packet) error {
	if err := dialed(r.isOpen()); err != nil {
		return err
	}
	if p == nil {
		return noPacket()
	}
	frame, err := encode(p, r.mac)
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if r.vlan != 0 {
		frame = tagged(frame, r.vlan)
	}
	_, err = r.conn.WriteTo(frame, &packet.Addr{HardwareAddr: net.HardwareAddr(frame[:macLen])})
	return err
}

// Receive gives the next DHCP answer to the client's MAC address, or ARP packet. What
// is damaged is passed over.
func (r *Raw) Receive(ctx context.Context, until time.Time) (*dhcpc.Packet, error) {
	if err := dialedFor(ctx, r.isOpen()); err != nil {
		return nil, err
	}
	done, err := deadline(ctx, r.conn, until)
	if err != nil {
		return nil, err
	}
	defer done()
	for {
		n, _, err := r.conn.ReadFrom(r.buf)
		if err != nil {
			return nil, orDone(ctx, err)
		}
		if p, err := decode(r.buf[:n]); err == nil {
			return p, nil
		}
	}
}

// Close closes the socket.
func (r *Raw) Close() error {
	if err := dialed(r != nil && r.conn != nil); err != nil {
		return err
	}
	r.closed.Store(true)
	return r.conn.Close()
}
