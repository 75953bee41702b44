package dhcpc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Client gets, keeps and releases leases for one interface: a Machine with a clock
// and sockets. It keeps no state between calls, so that several methods may be at
// work at once, if Config.Dial can bear it.
type Client struct {
	machine *Machine
	cfg     *Config
}

// New checks a configuration. Nothing is opened or sent yet.
func New(cfg *Config) (*Client, error) {
	m, err := NewMachine(cfg)
	if err != nil {
		return nil, err
	}
	if m.cfg.Dial == nil {
		return nil, trace.Invalid("no Dial in the configuration: package dhcpc/transport has some")
	}
	return &Client{machine: m, cfg: m.cfg}, nil
}

// Acquire gets a lease. It tries until one comes, Config.Timeout has passed or ctx is
// done, also after a NAK or a conflict. The error lists the messages sent and heard. It matches
// ErrTimeout, ctx's or a transport's error, and ErrNAK, ErrDeclined or ErrRefused too if
// such a thing happened last.
func (c *Client) Acquire(ctx context.Context) (*Lease, error) {
	limit := c.cfg.clock.Now().Add(c.cfg.Timeout)
	r := runner{Client: c, session: c.machine.Start(c.cfg.clock.Now(), rand.Uint64())}
	defer r.hangUp()
	for {
		out, err := r.next(ctx, limit)
		if err != nil {
			return nil, r.session.Failure("acquire lease", c.cfg.clock.Now(), err)
		}
		if out.Bound != nil {
			return out.Bound, nil
		}
	}
}

// Run keeps a lease until ctx is done: it renews it when it is due, and gets another when it is refused or runs
// out. It calls apply with each change, one at a time: with an old and a new lease after a renewal, where mostly
// nothing but the times differs; with nil for next when the lease is lost, and with nil for old when there is one
// again. When apply returns, the change must be in effect: renewals come from the leased address.
//
// A lease goes on ending while the machine is suspended. Within ten seconds of its waking, Run renews such a lease or
// calls apply with nil.
//
// Run ends with the error of apply, or with ctx's. It does not end because no server answers, or a transport fails:
// it tries again in time. It does end with tombolo.ErrInvalid.
func (c *Client) Run(ctx context.Context, l *Lease, apply func(old, next *Lease) error) error {
	if apply == nil {
		apply = func(_, _ *Lease) error { return nil }
	}
	s, err := c.machine.Restore(c.cfg.clock.Now(), rand.Uint64(), l)
	if err != nil {
		return fmt.Errorf("keep lease: %w", err)
	}
	r := runner{Client: c, session: s, patient: true, asleep: c.cfg.clock.Asleep()}
	defer r.hangUp()
	for {
		out, err := r.next(ctx, time.Time{})
		if err != nil {
			return fmt.Errorf("keep lease: %w", err)
		}
		if out.Lost != nil {
			err = apply(out.Lost, nil)
			l = nil
		}
		if out.Bound != nil && out.Bound != l {
			err = apply(l, out.Bound)
			l = out.Bound
		}
		if err != nil {
			return fmt.Errorf("apply lease: %w", err)
		}
	}
}

// Release gives a lease back, from its address, which the interface must still have.
// Servers do not answer, so that success means no more than that it was sent. See the
// function Release where the interface is gone.
func (c *Client) Release(ctx context.Context, l *Lease) error {
	p, err := Release(l, rand.Uint32())
	if err != nil {
		return fmt.Errorf("release lease: %w", err)
	}
	conn, err := c.dial(ctx, l.Address.Addr())
	if err == nil {
		err = errors.Join(conn.Send(ctx, p), conn.Close())
	}
	if err != nil {
		return fmt.Errorf("release lease of %s: %w", l.Address.Addr(), err)
	}
	return nil
}

// runner runs one session.
type runner struct {
	*Client
	session Session
	patient bool // a transport's error is like an answer that does not come
	conn    Transport[*Packet]
	bound   bool          // conn is of a client that has its address
	asleep  time.Duration // the clock's Asleep when the times of the session's lease were last set
}

// next waits for the next thing to happen, and takes the step. It ends with
// ErrTimeout at a limit, unless that is the zero time.
func (r *runner) next(ctx context.Context, limit time.Time) (Output, error) {
	for {
		if err := ctx.Err(); err != nil {
			return Output{}, err
		}
		now := r.cfg.clock.Now()
		if err := r.countSleep(now); err != nil {
			return Output{}, err
		}
		if !limit.IsZero() && !now.Before(limit) {
			return Output{}, ErrTimeout
		}
		if wake := r.session.wake; !wake.IsZero() && !now.Before(wake) {
			return r.step(ctx, nil)
		}
		p, err := r.wait(ctx, now, trace.Earlier(limit, r.session.wake))
		if err != nil {
			return Output{}, err
		}
		if p != nil {
			return r.step(ctx, p)
		}
	}
}

// countSleep moves the times of the lease by the time that the machine slept, which Now does not count. A lease that
// ended during the sleep, or that is due for renewal, is then due at once.
func (r *runner) countSleep(now time.Time) error {
	asleep := r.cfg.clock.Asleep()
	by := asleep - r.asleep
	if by < leastSleep || r.session.Lease() == nil {
		return nil
	}
	older := *r.session.Lease()
	for _, t := range []*time.Time{&older.Obtained, &older.Renew, &older.Rebind, &older.Expire} {
		if !t.IsZero() {
			*t = now.Add(t.Sub(now) - by) // the wall clock has moved on, so its time stays
		}
	}
	var err error
	r.asleep = asleep
	r.session, err = r.machine.Restore(now, rand.Uint64(), &older)
	return err
}

// wait waits for a packet, or until some time at the latest.
func (r *runner) wait(ctx context.Context, now, until time.Time) (*Packet, error) {
	if r.conn != nil && now.Before(r.session.listen) {
		p, err := r.conn.Receive(ctx, trace.Earlier(until, r.session.listen))
		switch {
		case err == nil:
			return p, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, ctx.Err() // it may be ctx's deadline
		case !r.patient || ctx.Err() != nil:
			return nil, err
		}
	}
	r.hangUp()
	return nil, r.cfg.clock.Wait(ctx, until)
}

// step takes a step and sends the packet that results.
func (r *runner) step(ctx context.Context, e *Packet) (Output, error) {
	var out Output
	r.session, out = r.machine.Step(r.session, r.cfg.clock.Now(), e)
	err := r.send(ctx, out.Send)
	if out.Listen.IsZero() {
		r.hangUp()
	}
	if r.patient {
		return out, ctx.Err()
	}
	return out, err
}

func (r *runner) send(ctx context.Context, p *Packet) error {
	if p == nil {
		return nil
	}
	// ARP probes go the way of a client without an address.
	bound := p.ARP == nil && !p.Src.Addr().IsUnspecified()
	if r.conn != nil && r.bound != bound {
		r.hangUp()
	}
	if r.conn == nil {
		local := p.Src.Addr()
		if !bound {
			local = netip.Addr{}
		}
		conn, err := r.dial(ctx, local)
		if err != nil {
			return err
		}
		r.conn, r.bound = conn, bound
	}
	return r.conn.Send(ctx, p)
}

// dial opens a transport by the caller's Dial, and refuses none.
func (c *Client) dial(ctx context.Context, local netip.Addr) (Transport[*Packet], error) {
	conn, err := c.cfg.Dial(ctx, local)
	if err == nil && conn == nil {
		err = trace.Argument("Dial gave no transport")
	}
	return conn, err
}

// hangUp closes the transport. Its error is of no use: nothing is written that could be lost.
func (r *runner) hangUp() {
	if r.conn != nil {
		_ = r.conn.Close()
		r.conn = nil
	}
}

// clock tells the time and waits: tests have one of their own.
type clock interface {
	Now() time.Time
	// Asleep returns for how long the machine has been suspended since it booted. Now does not count that time.
	Asleep() time.Duration
	// Wait returns at a time, or soon after the machine slept, or with ctx's error as soon as ctx is done. The zero
	// time never comes.
	Wait(ctx context.Context, until time.Time) error
}

const (
	// sleepLook is how often a wait looks whether the machine slept.
	sleepLook = 10 * time.Second
	// leastSleep is more than what lies between the looks at two clocks, and less than any lease lasts.
	leastSleep = 2 * time.Second
)

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) Asleep() time.Duration {
	var awake, all unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) // both clocks are always there
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &all)
	return time.Duration(all.Nano() - awake.Nano())
}

func (c systemClock) Wait(ctx context.Context, until time.Time) error {
	if until.IsZero() {
		<-ctx.Done()
		return ctx.Err()
	}
	asleep := c.Asleep()
	for left := time.Until(until); left > 0 && c.Asleep()-asleep < leastSleep; left = time.Until(until) {
		timer := time.NewTimer(min(left, sleepLook))
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
	return nil
}
