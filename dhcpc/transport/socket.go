package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/dhcpc"
)

// transport is a dhcpc.Transport[*dhcpc.Packet] or a dhcpc.Transport[[]byte], by what it carries.
type transport[P any] interface {
	Send(ctx context.Context, p P) error
	Receive(ctx context.Context, until time.Time) (P, error)
	Close() error
}

// socket is a transport of one socket.
type socket[P any] struct {
	net.PacketConn
	buf  []byte
	read func(b []byte, from net.Addr) (P, error) // copies what it keeps
	send func(p P) error
}

// frameMax is longer than any answer to a client that says what it can take (option 57).
const frameMax = 1 << 14

func newSocket[P any](conn net.PacketConn, read func([]byte, net.Addr) (P, error), send func(P) error) *socket[P] {
	return &socket[P]{conn, make([]byte, frameMax), read, send}
}

// Send sends a packet or a message.
func (s *socket[P]) Send(_ context.Context, p P) error { return s.send(p) }

// Receive gives the next packet or message that is for the client. Damaged ones are passed over.
func (s *socket[P]) Receive(ctx context.Context, until time.Time) (P, error) {
	var none P
	done, err := s.deadline(ctx, until)
	if err != nil {
		return none, err
	}
	defer done()
	for {
		n, from, err := s.ReadFrom(s.buf)
		switch {
		case err != nil && ctx.Err() != nil:
			return none, ctx.Err()
		case err != nil:
			return none, err
		}
		if p, err := s.read(s.buf[:n], from); err == nil {
			return p, nil
		}
	}
}

// deadline bounds what is read by a time and by a context. The function that it returns ends that, and waits until
// it has.
func (s *socket[P]) deadline(ctx context.Context, until time.Time) (func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := s.SetReadDeadline(until); err != nil {
		return nil, err
	}
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(fired)
		_ = s.SetReadDeadline(time.Unix(1, 0)) // long past: every reader stops
	})
	return func() {
		if !stop() {
			<-fired // else it could cut the next read short
		}
	}, nil
}

// witnessed sends by one transport and hears by another.
type witnessed[P any] struct {
	transport[P]
	send transport[P]
}

// witness opens a socket that hears what leaves for the client and a filter takes, and then a transport to send by. The
// latter is closed with it.
func witness[P any, T transport[P]](c *Config, takes func(*Config) program, read func([]byte, net.Addr) (P, error), dial func() (T, error)) (transport[P], error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if dial == nil {
		return nil, argument("nothing to send by")
	}
	conn, err := c.listenRaw(append(leaving(c.MAC), takes(c)...), true)
	if err != nil {
		return nil, err
	}
	send, err := dial()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &witnessed[P]{newSocket(conn, read, nil), send}, nil
}

// Send sends by the transport that was dialled.
func (w *witnessed[P]) Send(ctx context.Context, p P) error { return w.send.Send(ctx, p) }

// Close closes both at once: the kernel takes 12 to 16 ms to close a packet socket.
func (w *witnessed[P]) Close() error {
	closed := make(chan error, 1)
	go func() { closed <- w.send.Close() }()
	return errors.Join(w.transport.Close(), <-closed)
}

// argument is the error about an argument that is not valid.
func argument(what string) error { return fmt.Errorf("%w: %s", tombolo.ErrInvalid, what) }

// DialWitness gives a transport that sends by the one that dial opens, and receives at the other end of the
// client's link, frames that leave there towards the client: at the host's end of a veth pair, answers that came to
// a pod by the bridge, and no frames of the pod's. The pod may rename its interface and put another in its place,
// redirect packets, and answer itself: none of that is received.
//
// It hears DHCP answers, and with Config.ARP what Ethernet's ARP says, that are sent to the client's MAC address or to
// all, without a tag or with one of VLAN 0; also what others on the same bridge say. Config.NetNS and Link are those of the other end,
// and Config.MAC, the client's own, is needed. Its errors are those of DialRaw and of dial.
func DialWitness(cfg *Config, dial func() (dhcpc.Transport[*dhcpc.Packet], error)) (dhcpc.Transport[*dhcpc.Packet], error) {
	return witness(cfg, func(c *Config) program { return frames(c.MAC, c.ARP) }, readFrame, dial)
}

// DialWitness6 is DialWitness for DHCPv6: it hears messages to port 546.
func DialWitness6(cfg *Config, dial func() (dhcpc.Transport[[]byte], error)) (dhcpc.Transport[[]byte], error) {
	read := func(frame []byte, _ net.Addr) ([]byte, error) { return decode6(frame) }
	return witness(cfg, func(*Config) program { return frames6() }, read, dial)
}
