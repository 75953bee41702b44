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

// transport is dhcpc.Transport, for messages of either type.
type transport[P any] interface {
	Send(ctx context.Context, p P) error
	Receive(ctx context.Context, until time.Time) (P, error)
	Close() error
}

// socket is a transport that uses one socket.
type socket[P any] struct {
	net.PacketConn
	buf  []byte
	read func(b []byte, from net.Addr) (P, error) // must copy the parts of b that it keeps
	send func(p P) error
}

// frameMax is the size of the read buffer in bytes. It exceeds any answer, since a client announces its maximum size
// (option 57).
const frameMax = 1 << 14

func newSocket[P any](conn net.PacketConn, read func([]byte, net.Addr) (P, error), send func(P) error) *socket[P] {
	return &socket[P]{conn, make([]byte, frameMax), read, send}
}

// Send sends a packet or a message.
func (s *socket[P]) Send(_ context.Context, p P) error { return s.send(p) }

// Receive returns the next packet or message for the client. It skips packets that cannot be parsed.
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

// deadline makes reads end at a time, or when ctx is done. The caller must call the returned function after reading.
// That function removes the limits, and returns only when no pending callback can disturb the next read.
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
		_ = s.SetReadDeadline(time.Unix(1, 0)) // long past, so that every reader stops
	})
	return func() {
		if !stop() {
			<-fired // otherwise it could interrupt the next read
		}
	}, nil
}

// witnessed is a transport that receives through the embedded transport and sends through another.
type witnessed[P any] struct {
	transport[P]
	send transport[P]
}

// witness opens a socket that receives frames on their way to the client. The function takes returns the program that
// selects these frames. witness then calls dial to open the transport for sending. Close of the result closes both.
func witness[P any, T transport[P]](c *Config, takes func(*Config) program, read func([]byte, net.Addr) (P, error),
	dial func() (T, error)) (transport[P], error) {
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

// Send sends a message through the transport for sending.
func (w *witnessed[P]) Send(ctx context.Context, p P) error { return w.send.Send(ctx, p) }

// Close closes both transports at the same time, since the kernel takes 12 to 16 ms to close a packet socket.
func (w *witnessed[P]) Close() error {
	closed := make(chan error, 1)
	go func() { closed <- w.send.Close() }()
	return errors.Join(w.transport.Close(), <-closed)
}

// argument returns an error about an invalid argument, which matches tombolo.ErrInvalid.
func argument(what string) error { return fmt.Errorf("%w: %s", tombolo.ErrInvalid, what) }

// DialWitness returns a transport that sends through the transport opened by dial, and receives at the other end of
// the client's link. There it receives frames that leave towards the client. At the host's end of a veth pair, these
// are frames that came to the pod through the bridge, and never frames from the pod. The pod cannot forge answers: it
// may rename or replace its interface, redirect packets, or answer itself, but the transport receives none of this.
//
// The transport receives DHCP answers and, with Config.ARP, all ARP packets. Frames must be sent to the client's MAC
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
