package keeper

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

const (
	// lookEvery is the interval of visits to a pod that has no other work due.
	lookEvery = 5 * time.Minute

	// confirmAfter is the time from setting a pod's address to checking that it still exists. If the address
	// disappears within this time after a renewal, the keeper sets it again. Later, its disappearance means that the
	// pod's owner removed it. The kernel may delete an address that was just set: to end addresses whose lifetime is
	// over, it first reads the clock and then waits for its lock. An address that was set in between looks expired
	// (check_lifetime in net/ipv4/devinet.c, Linux 6.18). On a busy machine, about 100 of 1,000,000 renewals lose the
	// address in this way.
	confirmAfter = time.Second

	// yieldUntil is a time before the end of a lease. If an address disappears earlier, the pod's owner removed it.
	// If it disappears later, the kernel may have ended it.
	yieldUntil = 3 * time.Second

	// After a failure the next visit follows after firstRetry. The pause doubles with each failure up to lastRetry,
	// and varies at random by a quarter.
	firstRetry = 5 * time.Second
	lastRetry  = 5 * time.Minute

	// lockedFor limits the wait for a record's lock. An ADD may hold the lock for longer, while it waits for its
	// server, but then there is no lease to renew yet.
	lockedFor = 5 * time.Second
)

// memory is the state that a lease's visits share. A new keeper starts without it.
type memory struct {
	token        string // the Token of the record that this memory belongs to
	machine      *dhcpc.Machine
	session      *dhcpc.Session // nil before the first exchange, and after the machine slept
	isConfigured bool           // address and routes were checked since the keeper began
	confirm      bool           // a renewal set the address, and it was not checked since
	nextCheck    time.Time      // the time of the next check of the pod
	formed       int            // how often the pod's autoconfigured addresses were checked since they changed
	failures     int            // consecutive failed visits
	slow         bool           // the last visit got no answer in time
	doubts       []string       // rejected answers that were logged
	six          memory6
}

// outcome is the result of a visit.
type outcome struct {
	gone   bool // the record no longer exists
	memory memory
	state  lease.State
	wake   time.Time
	next   time.Time // the time of the renewal, for the metrics
}

// visit is one worker's visit to one lease.
type visit struct {
	*Keeper
	ctx context.Context
	r   *lease.Record
	m   memory
}

// visit reads a lease's record and does the work that is due.
func (k *Keeper) visit(ctx context.Context, hash string, m memory) outcome {
	r, err := k.Leases.Load(hash)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return outcome{gone: true}
	case errors.Is(err, file.ErrDamaged):
		k.metrics.damaged.Inc()
		k.Log.Error("lease record is damaged: its lease runs out unless the pod is added anew", "record", hash, "err",
			err)
		return outcome{gone: true}
	case err != nil:
		k.countError("cannot read lease record", "record", hash, "err", err)
		return outcome{memory: m, wake: now().Add(lookEvery)}
	}

	if m.token != r.Token {
		m = memory{token: r.Token}
	}

	v := &visit{Keeper: k, ctx: ctx, r: r, m: m}
	switch {
	case r.State == lease.Sticky:
		return v.dropEnded()
	case r.Boot != k.boot:
		return v.releaseGone("the machine has booted since")
	case r.State == lease.Adding:
		return v.visitAdding()
	}

	return v.keep()
}

// dropEnded deletes the record of a remembered lease that has ended, since another client may have the address now.
func (v *visit) dropEnded() outcome {
	ends := v.r.Expires()
	if ends.IsZero() || now().Before(ends) {
		return v.outcome(ends)
	}
	return v.drop("cannot remove remembered lease", (*lease.LockedRecord).Remove)
}

// visitAdding leaves the record alone while its ADD runs or its pod exists: a DEL or GC will follow. It deletes the
// record if the ADD died and the pod no longer exists.
func (v *visit) visitAdding() outcome {
	held, err := v.Leases.TryLock(v.r.Hash())
	if err != nil {
		return v.fail("cannot lock lease record", err)
	}

	if held == nil {
		// An ADD holds the lock. When the ADD writes the record, a file event starts the next visit. If the ADD is
		// killed, there is no event, so look again after a minute.
		return v.outcome(now().Add(time.Minute))
	}
	defer v.unlock(held)
	if fresh, err := held.Load(); err != nil || fresh.State != lease.Adding {
		return v.outcome(now())
	}

	pod, err := v.node.enter(v.r)
	if err == nil {
		if err = pod.close(); err == nil {
			return v.outcome(now().Add(lookEvery))
		}
	}

	if !errors.Is(err, errGone) {
		return v.fail("cannot look for the pod of an unfinished ADD", err)
	}

	if err := held.Remove(); err != nil {
		return v.fail("cannot remove lease record", err)
	}

	v.Log.Info("record of an unfinished ADD removed: its pod is gone", v.logAttrs()...)
	return outcome{gone: true}
}

// keep checks a running pod, and renews its leases if they are due.
func (v *visit) keep() outcome {
	t := now()
	due := v.m.session == nil || isDue(v.m.session, t) || v.isDue6(t)
	if !due && v.m.isConfigured && t.Before(v.m.nextCheck) {
		return v.idle() // the previous visit's own write caused this one
	}

	if v.r.NetNS == "" {
		return v.outcome(t.Add(lookEvery)) // Docker has not moved the interface yet: network.Change.Moved
	}

	pod, err := v.node.enter(v.r)
	switch {
	case errors.Is(err, errGone):
		return v.releaseGone("its pod is gone")
	case err != nil:
		return v.retryRenewal("cannot enter the pod", err)
	}

	v.m.nextCheck = t.Add(lookEvery) // the work below may set another time
	err = v.work(pod)
	if !errors.Is(err, errDeleted) {
		err = errors.Join(err, v.work6(pod))
	}

	if v.r.Policy.IPv6 && !errors.Is(err, errDeleted) {
		err = errors.Join(err, v.noteFormed(pod))
	}

	if err = errors.Join(err, pod.close()); err != nil {
		return v.retryRenewal("cannot keep lease", err)
	}

	v.m.failures = 0
	return v.idle()
}

// retryRenewal handles a visit that failed with err, and returns the outcome with the time of the next try. If the
// lease has expired, it ends the lease. If another process changed the record, the next visit is due at once.
func (v *visit) retryRenewal(what string, err error) outcome {
	if !errors.Is(err, errDeleted) {
		err = errors.Join(err, v.endUnreachable(err))
	}
	if errors.Is(err, errDeleted) {
		return outcome{state: v.r.State, wake: now()} // read the record that replaced it
	}
	return v.fail(what, err)
}

// endUnreachable ends a lease that has expired while the keeper cannot reach the pod's interface. The pod's owner may
// have renamed or moved the interface, or shut the keeper out. Another host may now have the address, so the host's
// rules for the pod must no longer contain it. The kernel ends the address in the pod.
func (v *visit) endUnreachable(cause error) error {
	if v.ctx.Err() != nil {
		return nil
	}

	if err := v.endUnreachable6(cause); err != nil {
		return err
	}

	switch {
	case v.r.State == lease.Expired:
		return v.follow() // complete the work of a killed keeper, or of a failed attempt
	case v.r.State != lease.Bound || v.r.Lease.Left(now()) != 0:
		return nil
	}

	v.Log.Warn("lease ended, and its pod is out of reach: nothing leads to its address any more",
		append(v.logAttrs(), "err", cause)...)
	v.metrics.expired.Inc()
	v.m.session = nil
	err := v.underLock(func(held *lease.LockedRecord) error {
		v.r.State, v.r.Error = lease.Expired, cause.Error()
		return held.Replace(v.r)
	})
	return errors.Join(err, v.follow())
}

// follow updates the host's rules for the pod to the addresses that the pod now leases: see network.Upkeep.Follow.
func (v *visit) follow() error {
	ctx, cancel := context.WithTimeout(v.ctx, lockedFor)
	defer cancel()
	from, to, err := v.node.follow(ctx, v.r)
	if from == nil || err != nil {
		return err
	}
	v.metrics.moves.Inc()
	v.Log.Info("attachment follows its lease", append(v.logAttrs(), "from", from, "to", to)...)
	return nil
}

// isDue reports whether a session has work to do at the time t.
func isDue(s *dhcpc.Session, t time.Time) bool { return !s.Wake().IsZero() && !t.Before(s.Wake()) }

func (v *visit) work(p pod) error {
	if v.m.session == nil {
		if err := v.restore(); err != nil {
			return err
		}
	}

	if v.m.isConfigured && v.r.State == lease.Bound {
		has, err := p.keeps(v.r.Applied)
		if err != nil {
			return err
		}
		lost := len(v.r.Applied.Without(has).Addresses) > 0
		v.m.isConfigured = v.r.Applied.Without(has).Empty()
		v.m.confirm = v.m.confirm && lost
	}

	if !v.m.isConfigured {
		if err := v.configurePod(p); err != nil {
			return err
		}
		v.m.isConfigured = true
	}

	var err error
	if isDue(v.m.session, now()) {
		err = v.exchange(p)
	}

	return errors.Join(err, v.follow())
}

// restore creates a session from the record. It continues the pod's lease or, if that was lost, the search for
// another.
func (v *visit) restore() error {
	cfg := v.r.Client.DHCPConfig(v.r.Lease)
	cfg.Refuse = v.refuse(v.r)
	machine, err := dhcpc.NewMachine(cfg)
	if err != nil {
		return err
	}

	t := now()
	s := machine.Start(t, rand.Uint64())
	if v.r.State == lease.Bound {
		if s, err = machine.Restore(t, rand.Uint64(), v.r.Lease); err != nil {
			return err
		}
	}

	v.m.machine, v.m.session = machine, &s
	return nil
}

// configurePod configures the pod as its record demands. This is necessary when a keeper begins, since an earlier
// keeper may have been killed between writing the record and configuring the pod.
func (v *visit) configurePod(p pod) error {
	if v.r.State != lease.Bound || v.r.Lease.Left(now()) == 0 {
		return nil
	}
	return v.underLock(func(held *lease.LockedRecord) error { return v.apply(held, p, v.r.Lease) })
}

// yield removes those addresses and routes from v.r.Applied that the pod no longer has. The pod's owner removed them,
// so yield adds them to v.r.Removed and returns true: the pod does not get them again. Soon after a renewal, the
// kernel may have removed the address instead (confirmAfter). Then yield returns false.
func (v *visit) yield(p pod) (yielded bool, _ error) {
	if v.r.State != lease.Bound || endsSoon(v.r.Lease.Left(now())) {
		return false, nil
	}

	has, err := p.keeps(v.r.Applied)
	gone := v.r.Applied.Without(has)
	if err != nil || gone.Empty() {
		return false, err
	}

	if v.r.Applied = has; v.m.confirm {
		return false, nil // the kernel has removed the address
	}

	v.r.Removed.Addresses = append(v.r.Removed.Addresses, gone.Addresses...)
	v.r.Removed.Routes = append(v.r.Removed.Routes, gone.Routes...)
	v.Log.Info("the pod's owner has removed what the lease gave it, and does not get it again",
		append(v.logAttrs(), "addresses", gone.Addresses, "routes", gone.Routes)...)
	return true, nil
}

// endsSoon reports whether the lease ends so soon that the kernel may already have removed its address. left is the
// remaining time, or negative for a lease that never ends.
func endsSoon(left time.Duration) bool { return left >= 0 && left < yieldUntil }

// releaseGone releases or remembers the lease of a pod that no longer exists, and deletes the record.
func (v *visit) releaseGone(why string) outcome {
	return v.drop("cannot end the lease of a pod that is gone", func(held *lease.LockedRecord) error {
		// Release only a bound lease. An address that an ADD wanted to request, or that a server refused, does not
		// belong to the pod.
		released := v.r.State == lease.Bound && v.r.Lease.Left(now()) != 0
		switch {
		case v.r.Client.Sticky && released && len(v.r.Client.ClientID) > 0:
			v.Log.Info("lease remembered", append(v.logAttrs(), "why", why)...)
			return held.Remember(v.ctx, v.r)
		case released:
			if err := v.release4(v.r.Lease); err != nil {
				return err // repeat until the lease ends, since the bridge may not exist yet
			}
		}

		if v.r.Releases6(now()) {
			// Without a link-local address on the bridge this can never succeed. Give up after some attempts, so that
			// the record does not stay for ever.
			if err := v.release6(); err != nil && v.m.failures < tries6 {
				return fmt.Errorf("DHCPv6: %w", err)
			}
		}

		if err := held.Remove(); err != nil {
			return err
		}

		v.Log.Info("lease dropped", append(v.logAttrs(), "why", why, "released", released)...)
		return nil
	})
}

// release calls send to release a lease from the host's bridge, unless another pod now has the same client identity.
// The server cannot distinguish the two pods, so a RELEASE would end the other pod's lease.
func (v *visit) release(send func() error) error {
	others, err := v.Leases.Same(v.r)
	if err != nil {
		return err
	}

	if len(others) > 0 {
		v.Log.Info("lease not released: another pod has it now",
			append(v.logAttrs(), "other", others[0].ContainerID)...)
		return nil
	}

	if err := send(); err != nil {
		return err
	}

	v.metrics.releases.Inc()
	return nil
}

func (v *visit) release4(l *dhcpc.Lease) error {
	return v.release(func() error { return v.node.release(v.ctx, v.r, l) })
}

func (v *visit) release6() error {
	return v.release(func() error { return v.node.release6(v.ctx, v.r) })
}

// drop calls the function do, which ends a record, if the record is unchanged since it was read. If do returns an
// error, drop logs it with the message in the parameter fails. If the record has changed, the next visit is due at
// once.
func (v *visit) drop(fails string, do func(*lease.LockedRecord) error) outcome {
	switch err := v.underLock(do); {
	case errors.Is(err, errDeleted):
		return v.outcome(now()) // visit again at once, to read the new record
	case err != nil:
		return v.fail(fails, err)
	}
	return outcome{gone: true}
}

// errDeleted is the cause of an error about a record that was removed, or replaced by another ADD, since it was read.
var errDeleted = errors.New("the lease was deleted meanwhile")

// underLock calls fn while it holds the record's lock. If the record was removed or replaced since it was read,
// underLock does not call fn, and the error matches errDeleted.
func (v *visit) underLock(fn func(*lease.LockedRecord) error) error {
	ctx, cancel := context.WithTimeout(v.ctx, lockedFor)
	defer cancel()
	held, err := v.Leases.Lock(ctx, v.r.Hash())
	if err != nil {
		return err
	}
	defer v.unlock(held)
	err = held.Same(v.r)
	switch {
	case errors.Is(err, os.ErrNotExist) || errors.Is(err, lease.ErrSuperseded):
		return fmt.Errorf("%w: %w", errDeleted, err)
	case err != nil:
		return err
	}

	return fn(held)
}

func (k *Keeper) unlock(held *lease.LockedRecord) {
	if err := held.Close(); err != nil {
		k.countError("cannot unlock lease record", "record", held.Hash(), "err", err)
	}
}

// outcome returns the result of a successful visit. wake is the time of the next visit.
func (v *visit) outcome(wake time.Time) outcome {
	return outcome{memory: v.m, state: v.r.State, wake: wake}
}

// idle returns the result of a visit that left nothing due. The next visit comes when a session or the next check of
// the pod is due.
func (v *visit) idle() outcome {
	o := v.outcome(v.m.nextCheck)
	if s := v.m.session; s != nil {
		o.next = s.Wake()
	}
	o.wake = earliest(o.wake, o.next)
	if s := v.m.six.session; s != nil {
		o.wake = earliest(o.wake, s.Wake())
	}
	return o
}

// fail logs an error, and returns the result of a visit that must be repeated after a pause.
func (v *visit) fail(what string, err error) outcome {
	if v.ctx.Err() != nil {
		return v.outcome(time.Time{}) // the end of the keeper is no failure
	}

	v.countError(what, append(v.logAttrs(), "err", err)...)
	pause := min(firstRetry<<min(v.m.failures, 10), lastRetry)
	v.m.failures++
	o := v.outcome(now().Add(pause - pause/4 + rand.N(pause/2)))

	// If the lease is due before the end of the pause, visit it then. Without this, it might end without another
	// attempt, or its end would be noticed too late.
	due := []time.Time{v.expires6()}
	if v.m.session != nil {
		due = append(due, v.m.session.Wake())
	}

	if v.r.State == lease.Bound {
		due = append(due, v.r.Expires())
	}

	for _, t := range due {
		if t.After(now()) {
			o.wake = earliest(o.wake, t)
		}
	}

	return o
}

// countError counts an error about leases, and logs it.
func (k *Keeper) countError(what string, args ...any) {
	k.metrics.errors.WithLabelValues("lease").Inc()
	k.Log.Warn(what, args...)
}

// logAttrs returns the log attributes that identify a lease.
func (v *visit) logAttrs() []any {
	args := []any{"network", v.r.Network, "pod", v.r.Pod, "container", v.r.ContainerID, "interface", v.r.IfName}
	if v.r.Lease != nil {
		args = append(args, "address", v.r.Lease.Address)
	}
	return args
}
