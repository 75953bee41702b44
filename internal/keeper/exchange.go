package keeper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

const (
	// renewWait limits the wait for the answer to a renewal. An answer comes within milliseconds or, as a rule, not at
	// all. If a server does not answer in that time, the next exchanges wait longer (see timeLimit).
	renewWait = 4 * time.Second

	// resendAfter is the time until an exchange sends an unanswered renewal a second time, since packets may get lost.
	resendAfter = time.Second

	// mostDoubts is the largest number of different reasons for rejecting answers that the keeper logs for one lease.
	mostDoubts = 8
)

// exchange holds the state of an exchange of messages with DHCP servers during one visit.
type exchange struct {
	*visit
	messageConn[*dhcpc.Packet]
	pod   pod
	local netip.Addr // the source address for which sendFrom dialled conn
	limit time.Time
	last  *dhcpc.Packet // a renewal to send a second time at the time `again`; nil if there is none
	again time.Time
}

// exchange runs the lease's DHCP session until the session expects no more answers, or the time limit has passed. Then
// it closes the transport.
func (v *visit) exchange(p pod) error {
	x := &exchange{visit: v, pod: p, limit: v.timeLimit(v.r.State != lease.Expired)}
	return errors.Join(x.run(), x.hangUp())
}

// timeLimit returns the time limit of an exchange that begins now. If servers are slow or the pod has no lease, the
// exchange may take the timeout of an ADD, and at least renewWait.
func (v *visit) timeLimit(hasLease bool) time.Time {
	if hasLease && !v.m.slow {
		return now().Add(renewWait)
	}
	return now().Add(max(cmp.Or(v.r.Client.Timeout, dhcpc.DefaultTimeout), renewWait))
}

// countLoss counts the error of a session if a server refused an address (NAK), or if a lease expired.
func (v *visit) countLoss(err error) {
	switch {
	case errors.Is(err, dhcpc.ErrNAK):
		v.metrics.naks.Inc()
	case errors.Is(err, dhcpc.ErrExpired):
		v.metrics.expired.Inc()
	}
}

func (x *exchange) run() error {
	var heard *dhcpc.Packet
	for {
		s, out := x.m.machine.Step(*x.m.session, now(), heard)
		x.m.session = &s
		if out.Unbelieved != "" && len(x.m.doubts) < mostDoubts && !slices.Contains(x.m.doubts, out.Unbelieved) {
			x.m.doubts = append(x.m.doubts, out.Unbelieved)
			x.Log.Warn("an answer is not trusted", append(x.logAttrs(), "why", out.Unbelieved)...)
		}

		var err error
		if out.Lost != nil || out.Err != nil {
			err = x.recordLoss(out)
		}

		if err == nil && out.Send != nil {
			err = x.send(out.Send)
			if s.Lease() != nil {
				x.last, x.again = out.Send, now().Add(resendAfter)
			}
		}

		if err == nil && out.Bound != nil {
			x.m.slow = false
			err = x.applyLease(out.Bound)
		}

		switch {
		case err != nil:
			return err
		case out.Listen.IsZero():
			return nil
		case !now().Before(x.limit):
			return x.recordNoAnswer()
		}

		heard, err = x.receive(x.ctx, trace.Earliest(out.Listen, x.limit, x.again))
		if err != nil {
			return fmt.Errorf("hear from DHCP servers: %w", err)
		}

		switch {
		case heard != nil || isDue(x.m.session, now()):
		case x.last != nil:
			if err := x.resend(); err != nil {
				return err
			}
		default:
			return x.recordNoAnswer()
		}
	}
}

// resend sends the last renewal again, through a packet socket, which the exchange also uses from then on. Such a
// socket needs no ARP and no route, and the pod's firewall does not filter it. A missing route or neighbour, or that
// firewall, may have stopped the first attempt.
func (x *exchange) resend() error {
	p := x.last
	x.last, x.again, x.m.slow = nil, time.Time{}, true
	return errors.Join(x.hangUp(), x.send(p))
}

// send sends a packet from the pod. It dials a transport for the packet's source address if necessary. If a UDP socket
// fails, it tries a packet socket.
func (x *exchange) send(p *dhcpc.Packet) error {
	var local netip.Addr
	if p.ARP == nil && !p.Src.Addr().IsUnspecified() {
		local = p.Src.Addr()
	}

	err := x.sendFrom(local, p)
	if err != nil && local.IsValid() && x.ctx.Err() == nil {
		// Try again with a packet socket. It works even if the pod has lost its address or route, or if its firewall
		// drops its own packets.
		x.m.slow = true
		err = errors.Join(x.hangUp(), x.sendFrom(local, p))
	}

	return state.WithOperation(err, "send to DHCP servers")
}

func (x *exchange) sendFrom(local netip.Addr, p *dhcpc.Packet) error {
	if x.conn != nil && x.local != local {
		if err := x.hangUp(); err != nil {
			return err
		}
	}

	if x.conn == nil {
		at := local
		if x.m.slow {
			at = netip.Addr{} // a packet socket: see resend
		}
		conn, err := x.pod.dial(x.ctx, at)
		if err != nil {
			return err
		}
		x.conn, x.local = conn, local
	}

	return x.conn.Send(x.ctx, p)
}

// messageConn is the transport between a visit and DHCP servers. conn is nil before the first message and after hangUp.
type messageConn[M any] struct {
	conn interface {
		Send(context.Context, M) error
		Receive(context.Context, time.Time) (M, error)
		Close() error
	}
}

// receive returns the next message. It returns the zero value at the given time, and at once if there is no transport.
func (l *messageConn[M]) receive(ctx context.Context, until time.Time) (message M, err error) {
	if l.conn == nil {
		return message, nil
	}
	message, err = l.conn.Receive(ctx, until)
	return message, state.Ignore(err, os.ErrDeadlineExceeded)
}

func (l *messageConn[M]) hangUp() error {
	if l.conn == nil {
		return nil
	}
	conn := l.conn
	l.conn = nil
	return conn.Close()
}

// recordNoAnswer counts an exchange that ended without an answer, and gives the next exchange more time. If the pod has
// a lease, it logs the failure and writes it into the record as a note. If not, it returns an error, and the next visit
// starts a new session.
func (x *exchange) recordNoAnswer() error {
	x.metrics.unanswered.Inc()
	x.m.slow = true
	s := x.m.session
	if s.Lease() == nil {
		x.m.session = nil // so that the next visit starts a new session
		return fmt.Errorf("no server gives a lease (%s)", s.State())
	}

	failure := s.Failure("not renewed yet", now(), dhcpc.ErrTimeout)
	x.Log.Warn("no server renews the lease yet", append(x.logAttrs(), "state", s.State(), "why", failure,
		"left", x.r.Lease.Left(now()).Round(time.Second), "next", s.Wake())...)
	return x.underLock(func(held *lease.LockedRecord) error {
		x.r.Note = failure.Error()
		return held.Replace(x.r)
	})
}

// applyLease applies a new or renewed lease to the pod, and records it. After an error it drops the session.
func (x *exchange) applyLease(l *dhcpc.Lease) error {
	before, fresh := x.r.Lease, x.r.State != lease.Bound
	err := x.underLock(func(held *lease.LockedRecord) error { return x.apply(held, x.pod, l) })
	if err != nil {
		// The record or the pod may lack the new lease. If the session continued, it would wait until the new lease is
		// due for renewal, and the pod's address would expire by the old one. So drop the session.
		x.m.session = nil
		return err
	}

	if fresh {
		x.metrics.acquisitions.Inc()
		x.Log.Info("lease got again", append(x.logAttrs(), "before", before.Address)...)
	} else {
		x.metrics.renewals.Inc()
		x.Log.Debug("lease renewed", append(x.logAttrs(), "expires", l.Expire)...)
	}

	return nil
}

// apply adds the addresses and routes of a lease to the pod, except those that the pod's owner removed, and records the
// lease. It removes the previous lease's addresses and routes that the new one lacks. The caller holds the record's
// lock, so that no DEL comes in between. Before a removal, apply records the old and the new addresses and routes
// together. So if the keeper is killed, the next one knows everything that the pod may have.
func (v *visit) apply(held *lease.LockedRecord, p pod, l *dhcpc.Lease) error {
	yielded, err := v.yield(p)
	if err != nil {
		return err
	}

	want := v.r.Intended(l)
	set := want
	if v.r.State == lease.Bound {
		set.Routes = want.Without(v.r.Applied).Routes
	}

	stale := v.r.Applied.Without(want)
	if !stale.Empty() {
		v.r.Applied = lease.Applied{
			Addresses: slices.Concat(want.Addresses, stale.Addresses),
			Routes:    slices.Concat(want.Routes, stale.Routes),
			MTU:       v.r.Applied.MTU,
		}
		if err := held.Replace(v.r); err != nil {
			return err
		}
	}

	left := l.Left(now())
	err = p.apply(set, left, left)
	if err == nil && !stale.Empty() {
		err = p.withdraw(stale)
	}

	trouble := ""
	if err != nil {
		// The server has granted the lease, so record it in spite of the error.
		trouble, v.m.isConfigured = err.Error(), false
	} else {
		v.r.Applied = want
		if v.m.confirm = l != v.r.Lease; v.m.confirm {
			v.m.nextCheck = now().Add(confirmAfter)
		}
	}

	if l == v.r.Lease && v.r.State == lease.Bound && stale.Empty() && !yielded && v.r.Error == trouble {
		return err // the record needs no change
	}

	v.r.Lease, v.r.State, v.r.Error, v.r.Note = l, lease.Bound, trouble, ""
	return errors.Join(err, held.Replace(v.r))
}

// recordLoss records that the session has lost its lease, and removes the lease's addresses and routes from the pod and
// from the host's rules. After a NAK another host may have the address. After an expiry the kernel has already removed
// it. If the session had no lease, and the record is Expired already, recordLoss changes neither the pod nor the
// record. In every case it logs the error, and starts a new time limit.
func (x *exchange) recordLoss(out dhcpc.Output) error {
	x.countLoss(out.Err)
	x.Log.Warn("lease lost: trying to get another", append(x.logAttrs(), "err", out.Err)...)
	x.m.slow = true
	x.limit = x.timeLimit(false)
	if out.Lost == nil && x.r.State == lease.Expired {
		return nil
	}

	err := x.underLock(func(held *lease.LockedRecord) error {
		err := x.pod.withdraw(x.r.Applied)
		if err == nil {
			x.r.Applied = lease.Applied{}
		}
		x.r.State, x.r.Error, x.r.Note = lease.Expired, fmt.Sprint(out.Err), ""
		return errors.Join(err, held.Replace(x.r))
	})

	// Only log the error, since the session searches for another lease in any case.
	if followErr := x.follow(); followErr != nil {
		x.countError("cannot take the lost address out of the firewall", append(x.logAttrs(), "err", followErr)...)
	}

	return err
}

// pod is a pod's network interface. *podInterface implements it, and tests replace it.
type pod interface {
	// dial opens a transport from the pod to DHCP servers. If local is valid, it is the source address.
	dial(ctx context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error)
	dial6() (dhcpc.Transport[[]byte], error)
	// apply adds addresses and routes to the pod. valid and preferred are the lifetimes of the addresses, as returned
	// by dhcpc.Lease.Left. The kernel removes an address when its valid lifetime ends.
	apply(a lease.Applied, valid, preferred time.Duration) error
	// withdraw removes addresses and routes. Missing ones are no error.
	withdraw(a lease.Applied) error
	// keeps returns the addresses and routes in a that still exist on the pod's interface.
	keeps(a lease.Applied) (lease.Applied, error)
	inUse(ctx context.Context, a lease.Applied, valid, preferred time.Duration) (bool, error)
	// formedAddresses lists the addresses that the pod formed from router advertisements.
	formedAddresses() ([]netip.Prefix, error)
	close() error
}

// node is the keeper's access to pods and to the host. kernel implements it, and tests replace it.
type node interface {
	// enter opens the interface of a lease's pod. The error matches errGone if the pod certainly no longer exists.
	enter(r *lease.Record) (pod, error)
	checkConflict(at string, a, had netip.Addr) error
	follow(ctx context.Context, r *lease.Record) (from, to []netip.Prefix, _ error)
	release(ctx context.Context, r *lease.Record, six bool) error
}

// errGone is the cause of an error about a pod that certainly no longer exists.
var errGone = errors.New("the pod is gone")
