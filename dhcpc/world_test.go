package dhcpc

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"

	"github.com/tombolo-cni/tombolo/internal/testutil/expect"
	"github.com/tombolo-cni/tombolo/internal/testutil/must"
)

// world is a clock and a network with one scripted server on it. Time passes only
// while somebody waits.
type world struct {
	t     testing.TB
	now   time.Time
	slept time.Duration
	// sleeps is for how long the machine is suspended during the next wait.
	sleeps time.Duration
	serve  func(m *dhcpv4.DHCPv4, p *Packet) []*Packet // nil: nobody is there

	queue  []*Packet
	log    []string // what was sent, and what was opened and closed
	open   int
	broken error // of every Send and Receive
	closed error // of every Dial
	// onWait runs whenever somebody waits.
	onWait func()
}

func (w *world) Now() time.Time { return w.now }

func (w *world) Asleep() time.Duration { return w.slept }

func (w *world) Wait(ctx context.Context, until time.Time) error {
	if w.onWait != nil {
		w.onWait()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	must.That(w.t, !until.IsZero(), "waits for ever")
	if w.sleeps > 0 {
		w.slept, w.sleeps = w.slept+w.sleeps, 0
	} else if until.After(w.now) {
		w.now = until
	}
	return nil
}

func (w *world) dial(_ context.Context, local netip.Addr) (Transport[*Packet], error) {
	if w.closed != nil {
		return nil, w.closed
	}
	w.open++
	w.queue = nil
	what := "open raw"
	if local.IsValid() {
		what = "open " + local.String()
	}
	w.log = append(w.log, what)
	return &line{w}, nil
}

// line is a Transport in a world.
type line struct{ *world }

func (l *line) Send(_ context.Context, p *Packet) error {
	if l.broken != nil {
		return l.broken
	}
	m, err := dhcpv4.FromBytes(p.Payload)
	if err != nil {
		return err
	}
	l.log = append(l.log, m.MessageType().String())
	if l.serve != nil {
		l.queue = append(l.queue, l.serve(m, p)...)
	}
	return nil
}

func (l *line) Receive(ctx context.Context, until time.Time) (*Packet, error) {
	if len(l.queue) > 0 {
		p := l.queue[0]
		l.queue = l.queue[1:]
		return p, nil
	}
	if l.broken != nil {
		return nil, l.broken
	}
	if err := l.Wait(ctx, until); err != nil {
		return nil, err
	}
	return nil, os.ErrDeadlineExceeded
}

func (l *line) Close() error {
	l.open--
	l.log = append(l.log, "close")
	return nil
}

// honest is a server that gives everybody the same address.
func honest(changes ...change) func(*dhcpv4.DHCPv4, *Packet) []*Packet {
	return func(m *dhcpv4.DHCPv4, _ *Packet) []*Packet {
		switch m.MessageType() {
		case discover:
			return []*Packet{answer(m, offer, changes...)}
		case request:
			return []*Packet{answer(m, ack, changes...)}
		}
		return nil
	}
}

// refusing is one that offers and then refuses.
func refusing(m *dhcpv4.DHCPv4, _ *Packet) []*Packet {
	if m.MessageType() == discover {
		return []*Packet{answer(m, offer)}
	}
	return []*Packet{answer(m, nak)}
}

func newWorld(t testing.TB, serve func(*dhcpv4.DHCPv4, *Packet) []*Packet, change ...func(*Config)) (*world, *Client) {
	t.Helper()
	w := &world{t: t, now: epoch(), serve: serve}
	cfg := testConfig()
	cfg.clock, cfg.Dial = w, w.dial
	for _, f := range change {
		f(cfg)
	}
	c := must.Of(New(cfg)).Get(t)
	t.Cleanup(func() { expect.Equal(t, w.open, 0, "%d transports left open: %v", w.open, w.log) })
	return w, c
}

var errBroken = errors.New("network is down")
