package transport

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/netns"
)

// Config configures a transport.
type Config struct {
	// NetNS is the network namespace of the interface; nil means the calling thread's. The caller may close it once the
	// socket is open. A function from Dialer uses it in each call.
	NetNS *netns.NS
	// Link is the interface's index in the namespace. The interface must be up to send messages.
	Link int
	// MAC is the client's hardware address. The transport receives only answers to this address. nil means the
	// interface's own address. DialWitness and DialWitness6 require MAC.
	MAC net.HardwareAddr
	// VLAN is the ID, 1 to 4094, of the tag that DialRaw and Release add to their frames. It is for an interface that
	// carries several VLANs, such as a trunk port of a bridge. With 0 the frames have no tag. VLAN does not concern
	// received frames.
	VLAN uint16
	// ARP makes DialRaw and DialWitness also receive ARP packets, as needed for Config.DetectConflicts of package
	// dhcpc.
	ARP bool
}

// do runs fn in the network namespace Config.NetNS, or in the calling thread's namespace if that is nil.
func (c *Config) do(fn func() error) error {
	if c.NetNS == nil {
		return fn()
	}
	return c.NetNS.Do(fn)
}

// socket opens a UDP socket that is used only for sending on the link. If the Config is nil or names no link, the error
// matches tombolo.ErrInvalid.
func (c *Config) socket(family int) (fd int, err error) {
	if err := c.checkLink(); err != nil {
		return 0, err
	}

	err = c.do(func() error {
		fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return 0, &tombolo.OpError{Op: "open socket on", Object: c.object(), Err: err}
	}
	return fd, nil
}

// checkLink returns an error if the Config is nil or names no link.
func (c *Config) checkLink() error {
	switch {
	case c == nil:
		return argument("no configuration, which has to name the link")
	case c.Link <= 0:
		return argument(fmt.Sprintf("link %d: want an interface's index", c.Link))
	}
	return nil
}

// check returns an error if Link or MAC is not valid.
func (c *Config) check() error {
	if err := c.checkLink(); err != nil {
		return err
	}
	if len(c.MAC) != macLen {
		return argument(fmt.Sprintf("MAC address %q: want %d bytes", c.MAC, macLen))
	}
	return nil
}

// complete checks the Config, and returns a copy. If MAC is nil, the copy has the interface's own MAC.
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

// object returns a text with the link's index, for errors.
func (c *Config) object() string { return "link " + strconv.Itoa(c.Link) }

// DialRaw opens a packet socket on the interface. It receives DHCP answers to the client's MAC address and, with
// Config.ARP, ARP packets. It sends complete frames, so it needs no route, neighbour or address.
//
// If Config.MAC is not the interface's own, the interface also receives frames to Config.MAC until Close, if necessary
// in promiscuous mode. A macvlan never receives such frames, so it needs Config.Broadcast of package dhcpc, which a
// server may ignore. Without CAP_NET_RAW the error matches unix.EPERM. If Config.MAC is set and there is no such link,
// the error matches fs.ErrNotExist.
func DialRaw(cfg *Config) (dhcpc.Transport[*dhcpc.Packet], error) {
	c, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	conn, err := c.listenRaw(append(incoming(c.MAC), frames(c.MAC, c.ARP)...))
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

// receiveMAC makes the interface receive frames to the client's MAC address until the socket is closed. It does nothing
// if the address is the interface's own.
func (c *Config) receiveMAC(conn *packet.Conn) error {
	if bytes.Equal(conn.LocalAddr().(*packet.Addr).HardwareAddr, c.MAC) {
		return nil
	}

	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}

	m := unix.PacketMreq{Ifindex: int32(c.Link), Type: unix.PACKET_MR_UNICAST, Alen: macLen}
	copy(m.Address[:], c.MAC)

	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptPacketMreq(int(fd), unix.SOL_PACKET, unix.PACKET_ADD_MEMBERSHIP, &m)
	})
	return errors.Join(err, failed)
}

// listenRaw opens a packet socket with the program in the parameter takes as its filter. The socket sees frames of all
// protocols, also frames that leave the interface.
func (c *Config) listenRaw(takes program) (*packet.Conn, error) {
	filter, err := bpf.Assemble(takes)
	if err != nil {
		return nil, fmt.Errorf("assemble filter: %w", err)
	}

	var conn *packet.Conn
	err = c.do(func() error {
		var err error

		// Pass only the index. To look up the interface, package net would read the list of all interfaces.
		conn, err = packet.Listen(&net.Interface{Index: c.Link}, packet.Raw, unix.ETH_P_ALL,
			&packet.Config{Filter: filter})
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

// linkMAC returns the interface's own MAC address.
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

// Dialer returns the Dial function for a dhcpc.Config. For a client without an address, it opens a transport as
// DialRaw does. For a client with an address, the transport sends as DialUDP's does and receives as DialRaw's does.
// So several clients on one link each hear their own answers.
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

// Release sends the RELEASE of a lease from any interface on the server's link, such as the bridge when the client's
// interface is gone. The frame has the client's MAC and IP addresses. Its destination MAC is Lease.ServerMAC, which is
// the server's or a relay's, or else the broadcast address. Config.MAC is not used.
//
// A server in the same namespace, at the bridge's own address, does not receive frames that the bridge itself sends.
// To such a server, Release sends through the kernel from the server's own address, as if the packet had come in by
// the bridge. This needs the loopback interface of the bridge's namespace to be up. If it is down, the kernel drops
// the packet without an error.
func Release(ctx context.Context, cfg *Config, l *dhcpc.Lease) error {
	p, err := dhcpc.Release(l, rand.Uint32())
	if err != nil {
		return fmt.Errorf("release lease: %w", err)
	}

	here, err := releaseHere(cfg, p)
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
	conn, err := c.listenRaw(append(incoming(c.MAC), frames(c.MAC, false)...))
	if err != nil {
		return err
	}
	raw := c.frameSocket(conn)
	return errors.Join(raw.Send(ctx, p), raw.Close())
}

// releaseHere sends a RELEASE to a server in the same namespace, at an address of the interface. It reports whether the
// server has such an address. If not, it sends nothing.
func releaseHere(cfg *Config, p *dhcpc.Packet) (bool, error) {
	fd, err := cfg.socket(unix.AF_INET)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)

	// Bind the socket to the interface. The server then sees the packet as received on this interface.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, cfg.Link); err != nil {
		return false, &tombolo.OpError{Op: "bind UDP socket to", Object: cfg.object(), Err: err}
	}

	server := unix.SockaddrInet4{Addr: p.Dst.Addr().As4(), Port: int(p.Dst.Port())}
	if err := unix.Connect(fd, &server); err != nil {
		return false, nil // without a route, the server is certainly not this host
	}

	// The server's address is local if the kernel chooses the same address as the source. (A bind would prove
	// nothing: the kernel permits any address while the namespace has none.)
	own, _ := unix.Getsockname(fd)
	if from, ok := own.(*unix.SockaddrInet4); !ok || from.Addr != server.Addr {
		return false, nil
	}

	if _, err := unix.Write(fd, p.Payload); err != nil {
		return false, &tombolo.OpError{Op: "send to", Object: p.Dst.String(), Err: err}
	}

	return true, nil
}

// socket is a Transport that sends and receives through one packet or UDP socket.
type socket[P any] struct {
	net.PacketConn
	buf  []byte
	read func(b []byte, from net.Addr) (P, error) // must copy the parts of b that it keeps
	send func(p P) error
}

// frameMax is the size of the read buffer in bytes. It exceeds the maximum size of an answer that a DHCPv4 client
// announces (option 57), and usual DHCPv6 answers.
const frameMax = 1 << 14

func newSocket[P any](conn net.PacketConn, read func([]byte, net.Addr) (P, error), send func(P) error) *socket[P] {
	return &socket[P]{conn, make([]byte, frameMax), read, send}
}

// Send sends a packet or a message.
func (s *socket[P]) Send(_ context.Context, p P) error { return s.send(p) }

// Receive returns the next packet or message for the client. It skips packets that cannot be parsed.
func (s *socket[P]) Receive(ctx context.Context, until time.Time) (none P, err error) {
	if err := cmp.Or(ctx.Err(), s.SetReadDeadline(until)); err != nil {
		return none, err
	}

	// When ctx is done, make reads end. Before returning, wait for this, so that it cannot interrupt the next read.
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(fired)
		_ = s.SetReadDeadline(time.Unix(1, 0)) // long past, so that every reader stops
	})
	defer func() {
		if !stop() {
			<-fired
		}
	}()

	for {
		n, from, err := s.ReadFrom(s.buf)
		if err != nil {
			return none, cmp.Or(ctx.Err(), err)
		}
		if p, err := s.read(s.buf[:n], from); err == nil {
			return p, nil
		}
	}
}

// witnessed is a transport that receives through the embedded transport and sends through another.
type witnessed[P any] struct {
	dhcpc.Transport[P]
	send dhcpc.Transport[P]
}

// witness opens a socket that receives frames on their way to the client, as far as the program from takes(c) accepts
// them. It then calls dial to open the transport for sending. Close of the result closes both sockets.
func witness[P any](c *Config, takes func(*Config) program, read func([]byte, net.Addr) (P, error),
	dial func() (dhcpc.Transport[P], error)) (dhcpc.Transport[P], error) {
	if err := c.check(); err != nil {
		return nil, err
	}

	if dial == nil {
		return nil, argument("nothing to send by")
	}

	conn, err := c.listenRaw(append(leaving(c.MAC), takes(c)...))
	if err != nil {
		return nil, err
	}

	send, err := dial()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}

	return &witnessed[P]{newSocket(conn, read, nil), send}, nil
}

// Send sends a message through the transport for sending.
func (w *witnessed[P]) Send(ctx context.Context, p P) error { return w.send.Send(ctx, p) }

// Close closes both transports at the same time, since the kernel takes 10 to 20 ms to close a packet socket.
func (w *witnessed[P]) Close() error {
	closed := make(chan error, 1)
	go func() { closed <- w.send.Close() }()
	return errors.Join(w.Transport.Close(), <-closed)
}

// argument returns an error about an invalid argument, which matches tombolo.ErrInvalid.
func argument(what string) error { return fmt.Errorf("%w: %s", tombolo.ErrInvalid, what) }

// DialWitness returns a transport that sends through the transport opened by dial, and receives at the other end of
// the client's link. There it receives frames that leave towards the client. At the host's end of a veth pair, these
// are frames that came to the pod through the bridge, and never frames from the pod. The pod cannot forge answers: it
// may rename or replace its interface, redirect packets, or answer itself, but the transport receives none of this.
//
// The transport receives DHCP answers and, with Config.ARP, ARP packets. Frames must be sent to the client's MAC
// address or to the broadcast address, untagged or with a tag of VLAN 0. They may also come from other ports of the
// same bridge. Config.NetNS and Link describe the other end. Config.MAC is the client's own and is required.
// DialWitness returns the same errors as DialRaw and dial.
func DialWitness(cfg *Config, dial func() (dhcpc.Transport[*dhcpc.Packet], error)) (dhcpc.Transport[*dhcpc.Packet],
	error) {
	return witness(cfg, func(c *Config) program { return frames(c.MAC, c.ARP) }, readFrame, dial)
}

// DialWitness6 does the work of DialWitness for DHCPv6: the transport receives messages to UDP port 546.
func DialWitness6(cfg *Config, dial func() (dhcpc.Transport[[]byte], error)) (dhcpc.Transport[[]byte], error) {
	read := func(frame []byte, _ net.Addr) ([]byte, error) { return decode6(frame) }
	return witness(cfg, func(*Config) program { return frames6() }, read, dial)
}
