package transport

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/netns"
)

// Config describes where to open a socket.
type Config struct {
	// NetNS is the network namespace; nil means the calling thread's. It may be closed once the socket is open.
	NetNS *netns.NS
	// Link is the interface's index in the namespace. The interface must be up to send.
	Link int
	// MAC is the client's hardware address. Answers to other addresses are not received. Nil means the interface's
	// own.
	MAC net.HardwareAddr
	// VLAN is the ID, 1 to 4094, of the tag that DialRaw, Release and Send6 add to their frames. It is for an
	// interface that is a trunk, such as a bridge's port. With 0 the frames have no tag.
	VLAN uint16
	// ARP makes DialRaw also receive ARP packets, for Config.DetectConflicts of package dhcpc.
	ARP bool
}

// do runs fn in the namespace.
func (c *Config) do(fn func() error) error {
	if c.NetNS == nil {
		return fn()
	}
	return c.NetNS.Do(fn)
}

// socket opens a socket for sending only.
func (c *Config) socket(family, kind int) (fd int, err error) {
	err = c.do(func() error {
		fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return 0, &tombolo.OpError{Op: "open socket on", Object: c.object(), Err: err}
	}
	return fd, nil
}

// checkLink returns an error unless the Config names a link.
func (c *Config) checkLink() error {
	switch {
	case c == nil:
		return argument("no configuration, which has to name the link")
	case c.Link <= 0:
		return argument(fmt.Sprintf("link %d: want an interface's index", c.Link))
	}
	return nil
}

// check returns an error if a field is not valid.
func (c *Config) check() error {
	if err := c.checkLink(); err != nil {
		return err
	}
	if len(c.MAC) != macLen {
		return argument(fmt.Sprintf("MAC address %q: want %d bytes", c.MAC, macLen))
	}
	return nil
}

// complete checks the Config, and returns a copy. A missing MAC becomes the interface's.
func (c *Config) complete() (*Config, error) {
	if err := c.checkLink(); err != nil {
		return nil, err
	}

	full := *c
	full.MAC = slices.Clone(c.MAC)
	if full.MAC == nil {
		var err error
		if full.MAC, err = c.linkMAC(); err != nil {
			return nil, err
		}
	}
	return &full, full.check()
}

// object returns the name of the link in errors.
func (c *Config) object() string { return "link " + strconv.Itoa(c.Link) }

// DialRaw opens a packet socket, bound to the interface, for DHCP answers to the client's MAC address and, with
// Config.ARP, ARP packets. It sends complete frames, so it needs no route, neighbour or address. If Config.MAC is not
// the interface's own, the interface receives frames for it too until Close, where need be in promiscuous mode. The
// error matches unix.EPERM without CAP_NET_RAW, and fs.ErrNotExist if there is no such link.
func DialRaw(cfg *Config) (dhcpc.Transport[*dhcpc.Packet], error) {
	c, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	conn, err := c.listenRaw(append(incoming(), frames(c.MAC, c.ARP)...), c.ARP)
	if err != nil {
		return nil, err
	}
	if err := c.receiveMAC(conn); err != nil {
		err = &tombolo.OpError{Op: "receive for " + c.MAC.String() + " on", Object: c.object(), Err: err}
		return nil, errors.Join(err, conn.Close())
	}
	return c.frameSocket(conn), nil
}

func (c *Config) frameSocket(conn *packet.Conn) *socket[*dhcpc.Packet] {
	return newSocket(conn, readFrame, func(p *dhcpc.Packet) error { return c.sendFrame(conn, p) })
}

// receiveMAC has the interface receive frames for the client's MAC address until the socket is closed, unless the
// address is the interface's own.
func (c *Config) receiveMAC(conn *packet.Conn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	filter, err := bpf.Assemble(append(incomingFor(c.MAC), frames(c.MAC, c.ARP)...))
	if err != nil {
		return err
	}
	all := unix.SockaddrLinklayer{Protocol: binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL}), Ifindex: c.Link}
	m := unix.PacketMreq{Ifindex: int32(c.Link), Type: unix.PACKET_MR_UNICAST, Alen: macLen}
	copy(m.Address[:], c.MAC)

	var failed error
	err = raw.Control(func(fd uintptr) {
		at, err := unix.Getsockname(int(fd))
		if own, ok := at.(*unix.SockaddrLinklayer); err != nil || ok && bytes.Equal(own.Addr[:own.Halen], c.MAC) {
			failed = err
			return
		}
		failed = cmp.Or(nl.AttachFilter(int(fd), filter), unix.Bind(int(fd), &all),
			unix.SetsockoptPacketMreq(int(fd), unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &m))
	})
	return errors.Join(err, failed)
}

// listenRaw opens a packet socket with a filter. Only a socket for allProtocols also receives frames that leave the
// interface.
func (c *Config) listenRaw(takes program, allProtocols bool) (*packet.Conn, error) {
	filter, err := bpf.Assemble(takes)
	if err != nil {
		return nil, fmt.Errorf("assemble filter: %w", err)
	}

	protocol := unix.ETH_P_IP
	if allProtocols {
		protocol = unix.ETH_P_ALL
	}

	var conn *packet.Conn
	err = c.do(func() error {
		var err error

		// Give only the index. A look-up of the interface would list all interfaces.
		conn, err = packet.Listen(&net.Interface{Index: c.Link}, packet.Raw, protocol, &packet.Config{Filter: filter})
		return err
	})
	if err != nil {
		return nil, &tombolo.OpError{Op: "open packet socket on", Object: c.object(), Err: err}
	}

	return conn, nil
}

func readFrame(frame []byte, _ net.Addr) (*dhcpc.Packet, error) { return decode(frame) }

func (c *Config) sendFrame(conn *packet.Conn, p *dhcpc.Packet) error {
	if p == nil {
		return argument("no packet")
	}

	frame, err := encode(p, c.MAC)
	if err != nil {
		return fmt.Errorf("send: %w", err)
	}

	frame = tagged(frame, c.VLAN)
	_, err = conn.WriteTo(frame, &packet.Addr{HardwareAddr: net.HardwareAddr(frame[:macLen])})
	return err
}

// linkMAC returns the interface's own MAC.
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

// Dialer returns the Dial function for a dhcpc.Config. A client without an address gets DialRaw. One that has its
// address sends as DialUDP does and receives as DialRaw does, so several clients on one link each hear their own
// answers.
func Dialer(cfg *Config) func(ctx context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
	return func(ctx context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		raw, err := DialRaw(cfg)
		if err != nil || !local.IsValid() {
			return raw, err
		}
		udp, err := DialUDP(cfg)
		if err != nil {
			return nil, errors.Join(err, raw.Close())
		}
		return &witnessed[*dhcpc.Packet]{raw, udp}, nil
	}
}

// Release sends the RELEASE of a lease from another interface than the client's: from the bridge's, when the client's
// is gone. The frame has the client's MAC and IP addresses, and as its destination the MAC of the server, or of the
// relay before it, from the lease. Without that MAC it is broadcast. Config.MAC is not used.
//
// A server in the same namespace, at the bridge's own address, does not receive frames that the bridge itself sends.
// For such a server, Release sends through the kernel from the server's own address, as if the packet had come in by
// the bridge. This needs the loopback interface of the bridge's namespace to be up. Otherwise the kernel drops the
// packet without an error.
func Release(ctx context.Context, cfg *Config, l *dhcpc.Lease) error {
	p, err := dhcpc.Release(l, rand.Uint32())
	if err != nil {
		return fmt.Errorf("release lease: %w", err)
	}

	here := false
	if err = cfg.checkLink(); err == nil {
		here, err = releaseHere(cfg, p)
	}

	if err == nil && !here {
		err = releaseFrom(ctx, cfg, p)
	}

	if err != nil {
		return fmt.Errorf("release lease of %s: %w", l.Address.Addr(), err)
	}

	return nil
}

// releaseFrom sends a RELEASE as a frame on the interface.
func releaseFrom(ctx context.Context, cfg *Config, p *dhcpc.Packet) error {
	c := *cfg
	c.MAC, c.ARP = net.HardwareAddr(p.SrcMAC), false
	if err := c.check(); err != nil {
		return err
	}
	conn, err := c.listenRaw(append(incoming(), frames(c.MAC, false)...), false)
	if err != nil {
		return err
	}
	raw := c.frameSocket(conn)
	return errors.Join(raw.Send(ctx, p), raw.Close())
}

// releaseHere sends a RELEASE to a server whose address is on the interface itself, and reports whether there is such
// a server.
func releaseHere(cfg *Config, p *dhcpc.Packet) (bool, error) {
	fd, err := cfg.socket(unix.AF_INET, unix.SOCK_DGRAM)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)

	// The server sees a packet to its own address as received on the interface where it was sent.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, cfg.Link); err != nil {
		return false, &tombolo.OpError{Op: "bind UDP socket to", Object: cfg.object(), Err: err}
	}

	server := unix.SockaddrInet4{Addr: p.Dst.Addr().As4(), Port: int(p.Dst.Port())}
	if err := unix.Connect(fd, &server); err != nil {
		return false, nil // no route, so the server is certainly not here
	}

	// For its own addresses the kernel chooses the same source address. (A bind proves nothing: the kernel permits
	// any address while the namespace has none.)
	own, err := unix.Getsockname(fd)
	if err != nil {
		return false, &tombolo.OpError{Op: "read address of UDP socket on", Object: cfg.object(), Err: err}
	}

	if from, ok := own.(*unix.SockaddrInet4); !ok || from.Addr != server.Addr {
		return false, nil
	}

	if _, err := unix.Write(fd, p.Payload); err != nil {
		return false, &tombolo.OpError{Op: "send to", Object: p.Dst.String(), Err: err}
	}

	return true, nil
}
