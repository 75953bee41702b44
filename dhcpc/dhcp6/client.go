package dhcp6

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/internal/trace"
)

// Client gets, keeps and releases leases for one interface: a Machine with a clock and a
// transport. It keeps no state between calls.
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
		return nil, argument("no Dial in the configuration")
	}
	return &Client{machine: m, cfg: m.cfg}, nil
}

// Machine gives the client's state machine, for a caller that runs it without a goroutine.
func (c *Client) Machine() *Machine {
	if c == nil {
		return nil
	}
	return c.machine
}

// Acquire gets a lease. It tries until one comes, Config.Timeout has passed or ctx is done, also
// after refusals and conflicts. The error is an *Error.
func (c *Client) Acquire(ctx context.Context) (*Lease, error) {
	if err := c.usable(ctx); err != nil {
		return nil, fmt.Errorf("acquire lease: %w", err)
	}
	out, err := c.until(ctx, "acquire lease", c.machine.Start(c.cfg.Clock.Now(), rand.Uint64()), func(o Output) bool { return o.Bound != nil })
	return out.Bound, err
}

// Inform gets options without a lease, as a host does that has formed its address itself. The error is an *Error.
func (c *Client) Inform(ctx context.Context) (*Information, error) {
	const op = "ask for information"
	if err := c.usable(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	out, err := c.until(ctx, op, c.machine.Inform(c.cfg.Clock.Now(), rand.Uint64()), func(o Output) bool { return o.Information != nil })
	return out.Information, err
}

// until runs a session until it has what is wanted of it.
func (c *Client) until(ctx context.Context, op string, s Session, done func(Output) bool) (Output, error) {
	limit := c.cfg.Clock.Now().Add(c.cfg.Timeout)
	r := runner{Client: c, session: s}
	defer r.hangUp()
	for {
		out, err := r.next(ctx, limit)
		if err != nil {
			return Output{}, r.session.Failure(op, c.cfg.Clock.Now(), err)
		}
		if done(out) {
			return out, nil
		}
	}
}

// Run keeps a lease until ctx is done: it renews it when it is due, and gets another when it is
// refused or runs out. It calls apply with each change, one at a time: with an old and a new lease
// after a renewal, where mostly nothing but the times differs; with nil for next when the lease is
// lost, and with nil for old when there is one again.
//
// Run ends with the error of apply, or with ctx's. That no server answers, and that a
// transport or Config.InUse fails, is no reason: it tries again in time. dhcpc.ErrInvalid is one.
func (c *Client) Run(ctx context.Context, l *Lease, apply func(old, next *Lease) error) error {
	if err := c.usable(ctx); err != nil {
		return fmt.Errorf("keep lease: %w", err)
	}
	if apply == nil {
		apply = func(_, _ *Lease) error { return nil }
	}
	s, err := c.machine.Restore(c.cfg.Clock.Now(), rand.Uint64(), l)
	if err != nil {
		return fmt.Errorf("keep lease: %w", err)
	}
	r := runner{Client: c, session: s, patient: true}
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
		if err == nil && out.Bound != nil {
			err = apply(l, out.Bound)
			l = out.Bound
		}
		if err != nil {
			return fmt.Errorf("apply lease: %w", err)
		}
	}
}

// Release gives a lease back. It does not wait for the server's answer: RFC 8415 would have the message
// sent up to four times, and what is lost ends by itself. See the function Release where there is no Client.
func (c *Client) Release(ctx context.Context, l *Lease) error {
	if err := c.usable(ctx); err != nil {
		return fmt.Errorf("release lease: %w", err)
	}
	message, err := Release(l, rand.Uint32())
	if err != nil {
		return fmt.Errorf("release lease: %w", err)
	}
	conn, err := c.dial(ctx)
	if err == nil {
		err = errors.Join(conn.Send(ctx, message), conn.Close())
	}
	if err != nil {
		return fmt.Errorf("release lease of %s: %w", l.Address, err)
	}
	return nil
}

// usable refuses a Client that New did not make, and a context that is nil.
func (c *Client) usable(ctx context.Context) error {
	switch {
	case c == nil || c.machine == nil:
		return argument("the client was not made by New")
	case ctx == nil:
		return argument("no context")
	}
	return nil
}

// dial opens a transport by the caller's Dial, and refuses none.
func (c *Client) dial(ctx context.Context) (Transport, error) {
	conn, err := c.cfg.Dial(ctx)
	if err == nil && conn == nil {
		err = argument("Dial gave no transport")
	}
	return conn, err
}

// runner runs one session.
type runner struct {
	*Client
	session Session
	patient bool // a transport's error is like an answer that does not come
	conn    Transport
	check   *Lease // not yet looked for
	retry   time.Time
}

// next waits for the next thing to happen, and takes the step. It ends with dhcpc.ErrTimeout at a
// limit, unless that is the zero time.
func (r *runner) next(ctx context.Context, limit time.Time) (Output, error) {
	for {
		if err := ctx.Err(); err != nil {
			return Output{}, err
		}
		now := r.cfg.Clock.Now()
		if !limit.IsZero() && !now.Before(limit) {
			return Output{}, dhcpc.ErrTimeout
		}
		if wake := r.session.wake; !wake.IsZero() && !now.Before(wake) {
			return r.step(ctx, Event{})
		}
		if r.check != nil && !now.Before(r.retry) {
			if v, err := r.look(ctx); v != 0 || err != nil {
				return r.verdict(ctx, v, err)
			}
			continue
		}
		message, err := r.wait(ctx, now, trace.Earlier(limit, r.session.wake))
		if err != nil {
			return Output{}, err
		}
		if message != nil {
			return r.step(ctx, Event{Message: message})
		}
	}
}

func (r *runner) verdict(ctx context.Context, v Verdict, err error) (Output, error) {
	if err != nil {
		return Output{}, err
	}
	return r.step(ctx, Event{Verdict: v})
}

// look has the caller look for the address of a lease on the link. It gives no verdict where that
// failed, and is to be tried again.
func (r *runner) look(ctx context.Context) (Verdict, error) {
	inUse, err := r.cfg.InUse(ctx, r.check)
	switch {
	case err != nil && r.patient && ctx.Err() == nil:
		r.retry = r.cfg.Clock.Now().Add(lookAgain)
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("look for other hosts that have %s: %w", r.check.Address, err)
	case inUse:
		return InUse, nil
	}
	return Unused, nil
}

// lookAgain is when Config.InUse is called again that failed.
const lookAgain = 10 * time.Second

// wait waits for a message, or until some time at the latest.
func (r *runner) wait(ctx context.Context, now, until time.Time) ([]byte, error) {
	if r.check != nil {
		until = trace.Earlier(until, r.retry)
	}
	if r.conn != nil && now.Before(r.session.listen) {
		message, err := r.conn.Receive(ctx, trace.Earlier(until, r.session.listen))
		switch {
		case err == nil:
			return message, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, ctx.Err() // it may be ctx's deadline
		case !r.patient || ctx.Err() != nil:
			return nil, err
		}
	}
	r.hangUp()
	return nil, r.cfg.Clock.Wait(ctx, until)
}

// step takes a step and sends what there is to send.
func (r *runner) step(ctx context.Context, e Event) (Output, error) {
	var out Output
	r.session, out = r.machine.Step(r.session, r.cfg.Clock.Now(), e)
	if out.Check != nil && r.cfg.InUse != nil {
		r.check, r.retry = out.Check, time.Time{}
	} else if r.session.state != Checking {
		r.check = nil
	}
	err := r.send(ctx, out.Send)
	if out.Listen.IsZero() {
		r.hangUp()
	}
	if r.patient {
		return out, ctx.Err()
	}
	return out, err
}

func (r *runner) send(ctx context.Context, message []byte) error {
	if message == nil {
		return nil
	}
	if r.conn == nil {
		conn, err := r.dial(ctx)
		if err != nil {
			return err
		}
		r.conn = conn
	}
	return r.conn.Send(ctx, message)
}

// hangUp closes the transport. Its error is of no use to anybody: nothing is written that could be
// lost.
func (r *runner) hangUp() {
	if r.conn != nil {
		_ = r.conn.Close()
		r.conn = nil
	}
}
