package transport

import (
	"context"
	"errors"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// UDPThenRaw is a UDP socket for the first packets, and a packet socket from the first
// retransmission that stayed without an answer. It suits a first lease, with
// Config.Broadcast of package dhcpc set: where UDP does, the cost of a packet socket is
// saved. Use it from one goroutine.
type UDPThenRaw struct {
	cfg     Config
	now     dhcpc.Transport
	raw     *Raw
	unheard int // packets sent since the last answer
}

// unanswered is how many packets in a row may stay without an answer.
const unanswered = 2

// DialUDPThenRaw opens the UDP socket; where that is refused, the packet socket.
func DialUDPThenRaw(cfg *Config) (*UDPThenRaw, error) {
	if cfg == nil {
		return nil, argument("no configuration, which has to name the link")
	}
	f := &UDPThenRaw{cfg: *cfg}
	udp, udpErr := DialUDP(cfg)
	if udpErr == nil {
		f.now = udp
		return f, nil
	}
	if err := f.change(); err != nil {
		return nil, errors.Join(udpErr, err)
	}
	return f, nil
}

// Raw gives the packet socket, or nil where none has been opened: for Raw.Detach.
func (f *UDPThenRaw) Raw() *Raw {
	if f == nil {
		return nil
	}
	return f.raw
}

// change goes on with a packet socket.
func (f *UDPThenRaw) change() error {
	raw, err := DialRaw(&f.cfg)
	if err != nil {
		return err
	}
	if f.now != nil {
		_ = f.now.Close() // nothing was lost with it
	}
	f.now, f.raw = raw, raw
	return nil
}

// Send sends a packet by the socket in use, after changing it if need be.
func (f *UDPThenRaw) Send(ctx context.Context, p *dhcpc.Packet) error {
	if err := dialedFor(ctx, f != nil && f.now != nil); err != nil {
		return err
	}
	if p == nil {
		return noPacket()
	}
	if f.raw == nil && (f.unheard >= unanswered || p.ARP != nil) {
		if err := f.change(); err != nil {
			return err
		}
	}
	f.unheard++
	err := f.now.Send(ctx, p)
	if err == nil || f.raw != nil {
		return err
	}
	// No route without an address, say.
	if changed := f.change(); changed != nil {
		return errors.Join(err, changed)
	}
	return f.now.Send(ctx, p)
}

// Receive receives from the socket in use.
func (f *UDPThenRaw) Receive(ctx context.Context, until time.Time) (*dhcpc.Packet, error) {
	if err := dialedFor(ctx, f != nil && f.now != nil); err != nil {
		return nil, err
	}
	p, err := f.now.Receive(ctx, until)
	if err == nil {
		f.heard()
	}
	return p, err
}

func (f *UDPThenRaw) heard() { f.unheard = 0 }

// Close closes the socket in use.
func (f *UDPThenRaw) Close() error {
	if err := dialed(f != nil && f.now != nil); err != nil {
		return err
	}
	return f.now.Close()
}
