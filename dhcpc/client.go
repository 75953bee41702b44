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

// Client acquires, renews and releases leases for one interface. It consists of a Machine, a clock and sockets. It
// keeps no state between calls, so several methods may run at once, if Config.Dial permits that.
type Client struct {
	machine *Machine
	cfg     *Config
}

// New checks a configuration and returns a Client. It opens no socket and sends nothing.
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

// Acquire gets a lease. It keeps trying, even after a NAK or a conflict, until it has a lease, Config.Timeout has
// passed, ctx is done or the transport fails. The error lists the messages sent and received. It matches ErrTimeout,
// ctx's error or a transport's error. If the last failure was a NAK, a conflict or a refusal, it also matches
// ErrNAK, ErrDeclined or ErrRefused.
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

// Run renews a lease whenever that is due, until ctx is done. If servers refuse the lease, or it expires, Run
// acquires another one.
//
// Run calls apply with each change, one at a time. After a renewal, old and next are not nil, and mostly differ only
// in their times. When the lease is lost, next is nil. When there is a lease again, old is nil. When apply returns,
// the change must be in effect, since renewals come from the leased address.
//
// Run ends with the error of apply, with ctx's error or with an error that matches tombolo.ErrInvalid. If no server
// answers, or a transport fails, Run tries again later. A lease also runs out while the machine is suspended. Within 15
// seconds of the machine's waking, Run renews a lease that is due for renewal. If the lease has ended, Run calls apply
// with next nil.
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

// Release sends a RELEASE from the leased address, which the interface must still have. Servers do not answer, so
// success only means that the message was sent. If the interface no longer exists, use the function Release of package
// transport.
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

// runner runs one Session with a clock and a transport.
type runner struct {
	*Client
	session Session
	patient bool // a transport's error counts as a missing answer
	conn    Transport[*Packet]
	local   netip.Addr    // the client's address that conn is for; not valid for a client without an address
	asleep  time.Duration // clock.Asleep at the start of Run, or when countSleep last counted it
}

// next waits for a packet or the session's wake-up time, runs one step of the session, and returns its output. It
// returns ErrTimeout at the time limit; the zero time means no limit.
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

		p, err := r.wait(ctx, now, trace.Earliest(limit, r.session.wake))
		if err != nil {
			return Output{}, err
		}

		if p != nil {
			return r.step(ctx, p)
		}
	}
}

// countSleep corrects the times of the lease, if there is one, after the machine was suspended, because Now does not
// count that time. If the lease expired or became due for renewal during the suspension, the next step handles that at
// once.
func (r *runner) countSleep(now time.Time) (err error) {
	asleep := r.cfg.clock.Asleep()
	by := asleep - r.asleep
	if by < leastSleep {
		return nil
	}

	r.asleep = asleep
	if r.session.Lease() == nil {
		return nil
	}

	older := *r.session.Lease()
	for _, t := range []*time.Time{&older.Obtained, &older.Renew, &older.Rebind, &older.Expire} {
		if !t.IsZero() {
			*t = now.Add(t.Sub(now) - by) // a time with a monotonic reading keeps its wall clock time
		}
	}

	r.session, err = r.machine.Restore(now, rand.Uint64(), &older)
	return err
}

// wait returns the next packet. It returns nil when the given time has come, or when the session expects no packet any
// more. The zero time means no limit. While the session expects no packet, or if the transport of a patient runner
// fails, wait closes the transport and waits without it.
func (r *runner) wait(ctx context.Context, now, until time.Time) (*Packet, error) {
	if r.conn != nil && now.Before(r.session.listen) {
		p, err := r.conn.Receive(ctx, trace.Earliest(until, r.session.listen))
		switch {
		case err == nil:
			return p, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, ctx.Err() // the deadline may have been ctx's
		case !r.patient || ctx.Err() != nil:
			return nil, err
		}
	}

	r.hangUp()
	return nil, r.cfg.clock.Wait(ctx, until)
}

// step runs one step of the session with the packet e, or without one if e is nil. It sends the resulting packet, and
// closes the transport if the session then expects no answer. If r.patient is set, it ignores an error of sending.
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

	// An ARP probe has no source. It needs the transport of a client without an address, like a message from 0.0.0.0.
	local := p.Src.Addr()
	if local.IsUnspecified() {
		local = netip.Addr{}
	}

	if r.conn != nil && r.local != local {
		r.hangUp()
	}

	if r.conn == nil {
		conn, err := r.dial(ctx, local)
		if err != nil {
			return err
		}
		r.conn, r.local = conn, local
	}

	return r.conn.Send(ctx, p)
}

// dial opens a transport with Config.Dial. If Config.Dial returns nil without an error, dial returns an error.
func (c *Client) dial(ctx context.Context, local netip.Addr) (Transport[*Packet], error) {
	conn, err := c.cfg.Dial(ctx, local)
	if err == nil && conn == nil {
		err = trace.Argument("Dial gave no transport")
	}
	return conn, err
}

// hangUp closes the transport, if it is open. The error of Close does not matter, since no written data could be
// lost.
func (r *runner) hangUp() {
	if r.conn != nil {
		_ = r.conn.Close()
		r.conn = nil
	}
}

// clock tells the time and waits. Tests replace it.
type clock interface {
	Now() time.Time
	// Asleep returns how long the machine has been suspended since it booted. Now does not count that time.
	Asleep() time.Duration
	// Wait returns nil when the given time has come, or soon after the machine was suspended. It returns ctx's error as
	// soon as ctx is done. With the zero time, it waits for ctx alone.
	Wait(ctx context.Context, until time.Time) error
}

const (
	// sleepLook is how often Wait checks whether the machine was suspended.
	sleepLook = 10 * time.Second
	// leastSleep is the shortest suspension that counts. It is shorter than every lease, and longer than the time
	// between the readings of two clocks.
	leastSleep = 2 * time.Second
)

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) Asleep() time.Duration {
	var awake, all unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &awake) // both clocks always exist
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
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(min(left, sleepLook)):
		}
	}

	return nil
}
