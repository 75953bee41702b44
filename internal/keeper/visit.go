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
	"github.com/tombolo-cni/tombolo/internal/trace"
)

const (
	// lookEvery is the interval between checks of a pod if nothing is due earlier. A lease may be due earlier, and so
	// may the checks of new addresses (see confirmAfter and noteFormed).
	lookEvery = 5 * time.Minute

	// confirmAfter is the time from setting a pod's address to checking that it still exists. If the check does not
	// find the address, the keeper sets it again. If the address disappears after the check, the keeper concludes that
	// the pod's owner removed it. The kernel may delete an address that was just set: to end expired addresses, it
	// first reads the clock and then waits for its lock. An address that was set in between looks expired
	// (check_lifetime in net/ipv4/devinet.c, Linux 6.18). On a busy machine, about 100 of 1,000,000 renewals lose the
	// address in this way.
	confirmAfter = time.Second

	// yieldUntil is the length of time before the end of a lease in which the kernel may already have removed the
	// address. If an address disappears from the pod earlier, the pod's owner removed it.
	yieldUntil = 3 * time.Second

	// After a failure the next visit follows after firstRetry. The pause doubles with each failure up to lastRetry,
	// and varies at random by a quarter.
	firstRetry = 5 * time.Second
	lastRetry  = 5 * time.Minute

	// lockedFor limits the wait for a record's lock, and the duration of an update of the host's rules. An ADD may hold
	// the lock for longer, while it waits for its server, but then there is no lease to renew yet.
	lockedFor = 5 * time.Second
)

// memory is the state that the keeper holds for a lease between visits. It is not on disk: a new keeper starts without
// it.
type memory struct {
	token        string // the Token of the lease record that this memory belongs to
	machine      *dhcpc.Machine
	session      *dhcpc.Session // nil if the next visit must restore it from the record
	isConfigured bool           // the pod had the lease's address and routes at the last check
	confirm      bool           // a new or renewed lease set the address, and no check has found the address since
	nextCheck    time.Time      // the time of the next check of the pod
	formed       int            // number of checks of the autoconfigured addresses since they last changed, at most 9
	failures     int            // consecutive failed visits
	// slow is set after a failed send of a UDP socket, a late or missing answer, or the loss of the DHCPv4 lease.
	// Exchanges then wait longer, and those of DHCPv4 use packet sockets. Only a granted or renewed DHCPv4 lease resets
	// slow.
	slow   bool
	doubts []string // the reasons for rejected answers that were logged
	six    memory6
}

// outcome is the result of a visit to a lease.
type outcome struct {
	gone   bool // the loop must forget the lease until its record changes
	memory memory
	state  lease.State
	wake   time.Time
}

// visit holds the state of one worker's visit to one lease.
type visit struct {
	*Keeper
	ctx context.Context
	r   *lease.Record
	m   memory
}

// visit reads the record of the lease with the given hash, and does the work that is due. m is the memory of earlier
// visits. The outcome has the time of the next visit.
func (k *Keeper) visit(ctx context.Context, hash string, m memory) outcome {
	r, err := k.Leases.Load(hash)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return outcome{gone: true}
	case errors.Is(err, file.ErrDamaged):
		k.metrics.damaged.Inc()
		k.Log.Error("lease record is damaged: its lease runs out unless the pod is recreated", "record", hash, "err",
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

// dropEnded deletes the record of a sticky lease if the lease has ended, since another client may then have the
// address. Such a record waits for the pod's next container. Before the end, dropEnded changes nothing, and its outcome
// sets the next visit to the end of the lease.
func (v *visit) dropEnded() outcome {
	ends := v.r.Expires()
	if ends.IsZero() || now().Before(ends) {
		return v.outcome(ends)
	}
	return v.drop("cannot remove remembered lease", (*lease.LockedRecord).Remove)
}

// visitAdding visits a lease whose ADD has not finished. It leaves the record to that ADD, or to a DEL or GC, unless
// the pod no longer exists.
func (v *visit) visitAdding() outcome {
	once, cancel := context.WithCancel(v.ctx)
	cancel() // so that Lock does not wait
	held, err := v.Leases.Lock(once, v.r.Hash())
	switch {
	case errors.Is(err, file.ErrLocked):
		// An ADD or a DEL holds the lock. When it writes or removes the record, a file event starts the next visit. If
		// it is killed, there is no event, so look again after a minute.
		return v.outcome(now().Add(time.Minute))
	case err != nil:
		return v.fail("cannot lock lease record", err)
	}

	// The ADD may have ended since the visit read the record.
	fresh, err := held.Load()
	if closeErr := held.Close(); err != nil || closeErr != nil || fresh.State != lease.Adding {
		return v.outcome(now())
	}

	pod, err := v.node.enter(v.r)
	if errors.Is(err, errGone) {
		return v.releaseGone("the pod of an unfinished ADD is gone")
	}

	if err == nil {
		_ = pod.close()
	}
	return v.outcome(now().Add(lookEvery))
}

// keep checks the pod of a lease, and renews its leases if they are due. If the pod no longer exists, it calls
// releaseGone.
func (v *visit) keep() outcome {
	t := now()
	due := v.m.session == nil || isDue(v.m.session, t) || v.isDue6(t)
	if !due && v.m.isConfigured && t.Before(v.m.nextCheck) {
		return v.idle() // usually, the previous visit's own change of the record caused this visit
	}

	if v.r.NetNS == "" {
		return v.outcome(t.Add(lookEvery)) // wait until Docker has moved the interface: network.Change.Moved
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

// retryRenewal handles a visit that failed with err, and returns the outcome with the time of the next try. If a lease
// has expired, it also records the lease's end. If somebody else replaced or deleted the record, the next visit is
// due at once.
func (v *visit) retryRenewal(what string, err error) outcome {
	if !errors.Is(err, errDeleted) {
		err = errors.Join(err, v.endUnreachable(err))
	}
	if errors.Is(err, errDeleted) {
		return outcome{state: v.r.State, wake: now()} // read the record that replaced it
	}
	return v.fail(what, err)
}

// endUnreachable records the end of a DHCPv4 or DHCPv6 lease that has expired, after a visit that failed with cause.
// For example, the pod's owner may have moved the interface to another namespace. Another host may have the address
// now, so endUnreachable removes the address from the host's rules for the pod. In the pod, the kernel removes it.
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

	v.Log.Warn("lease ended, and its pod is out of reach: removing its address from the firewall",
		append(v.logAttrs(), "err", cause)...)
	v.metrics.expired.Inc()
	v.m.session = nil
	err := v.underLock(func(held *lease.LockedRecord) error {
		v.r.State, v.r.Error = lease.Expired, cause.Error()
		return held.Replace(v.r)
	})
	return errors.Join(err, v.follow())
}

// follow updates the attachment's record and the host's rules for the pod to the addresses that the pod now leases (see
// network.Upkeep.Follow).
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

// isDue reports whether a DHCP session has work to do at the time t.
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

// restore creates the DHCP session from the record. If the pod has a lease, the session continues it. If not, the
// session searches for a new one.
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

// configurePod adds the address and routes of the record's lease to the pod, except those that the pod's owner removed
// (see yield). If the lease has ended, it does nothing. The first visit to a lease calls it. So do a visit after the
// method apply failed, and a visit that finds an address or a route missing in the pod.
func (v *visit) configurePod(p pod) error {
	if v.r.State != lease.Bound || v.r.Lease.Left(now()) == 0 {
		return nil
	}
	return v.underLock(func(held *lease.LockedRecord) error { return v.apply(held, p, v.r.Lease) })
}

// yield removes from v.r.Applied the addresses and routes that the pod no longer has. v.r.Applied lists those that
// Tombolo added. The pod's owner removed them, so yield adds them to v.r.Removed and returns true: the pod does not get
// them again. Soon after a renewal, the kernel may have removed the address instead (see confirmAfter). Then yield
// returns false. It does nothing if the lease is not bound or ends soon.
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
	v.Log.Info("the pod's owner has removed addresses or routes of the lease: they are not added again",
		append(v.logAttrs(), "addresses", gone.Addresses, "routes", gone.Routes)...)
	return true, nil
}

// endsSoon reports whether the lease ends so soon that the kernel may already have removed its address. left is the
// remaining time; a negative value means that the lease never ends.
func endsSoon(left time.Duration) bool { return left >= 0 && left < yieldUntil }

// releaseGone releases the leases of a pod that no longer exists, and deletes the record. If the client is sticky and
// has a client identifier, and its lease is bound and has not ended, releaseGone instead turns the record into one for
// the pod's next container. why is the reason, for the log.
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
			if err := v.release(false); err != nil {
				return err
			}
		}

		if v.r.Releases6(now()) {
			// Without a link-local address on the host's link, the RELEASE can never succeed. Give up after some
			// attempts, so that the record does not stay for ever.
			if err := v.release(true); err != nil && v.m.failures < tries6 {
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

// release releases the DHCPv4 lease or, if six is set, the DHCPv6 lease, unless another pod now has the same client
// identity. The server cannot distinguish the two pods, so a RELEASE would end the other pod's lease.
func (v *visit) release(six bool) error {
	others, err := v.Leases.Same(v.r)
	if err != nil {
		return err
	}

	if len(others) > 0 {
		v.Log.Info("lease not released: another pod has its address now",
			append(v.logAttrs(), "other", others[0].ContainerID)...)
		return nil
	}

	if err := v.node.release(v.ctx, v.r, six); err != nil {
		return err
	}

	v.metrics.releases.Inc()
	return nil
}

// drop calls do to delete or replace a record, unless somebody else deleted or replaced it since the visit read it. In
// that case, the next visit is due at once. If do returns an error, drop logs the error with the message fails, and
// schedules another try. Otherwise the loop forgets the lease until its record changes.
func (v *visit) drop(fails string, do func(*lease.LockedRecord) error) outcome {
	switch err := v.underLock(do); {
	case errors.Is(err, errDeleted):
		return v.outcome(now()) // read the new record
	case err != nil:
		return v.fail(fails, err)
	}
	return outcome{gone: true}
}

// errDeleted is the cause of an error about a record that somebody else, such as a DEL or an ADD, deleted or replaced
// since the visit read it.
var errDeleted = errors.New("the lease was deleted in the meantime")

// underLock calls fn while it holds the record's lock. If somebody else deleted or replaced the record since the
// visit read it, underLock does not call fn, and its error matches errDeleted.
func (v *visit) underLock(fn func(*lease.LockedRecord) error) (err error) {
	ctx, cancel := context.WithTimeout(v.ctx, lockedFor)
	defer cancel()
	held, err := v.Leases.Lock(ctx, v.r.Hash())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, held.Close()) }()
	err = held.Same(v.r)
	switch {
	case errors.Is(err, os.ErrNotExist) || errors.Is(err, lease.ErrSuperseded):
		return fmt.Errorf("%w: %w", errDeleted, err)
	case err != nil:
		return err
	}

	return fn(held)
}

// outcome returns the result of a successful visit. wake is the time of the next visit.
func (v *visit) outcome(wake time.Time) outcome {
	return outcome{memory: v.m, state: v.r.State, wake: wake}
}

// idle returns the outcome of a visit that left no work. The next visit is due when a DHCP session or the check of the
// pod is due.
func (v *visit) idle() outcome {
	o := v.outcome(v.m.nextCheck)
	if s := v.m.session; s != nil {
		o.wake = trace.Earliest(o.wake, s.Wake())
	}
	if s := v.m.six.session; s != nil {
		o.wake = trace.Earliest(o.wake, s.Wake())
	}
	return o
}

// fail counts and logs an error, and returns the outcome of a visit that must be repeated after a pause. After the end
// of the keeper's context it does neither, and no visit follows.
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
	due := []time.Time{v.expires6(), v.r.Expires()}
	if v.m.session != nil {
		due = append(due, v.m.session.Wake())
	}

	for _, t := range due {
		if t.After(now()) {
			o.wake = trace.Earliest(o.wake, t)
		}
	}

	return o
}

// countError counts an error about leases in the metrics, and logs it.
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
