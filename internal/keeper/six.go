package keeper

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/dhcp6"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/trace"
)

// Only the keeper leases a pod's DHCPv6 address, from the first SOLICIT on. The plugin's ADD only waits for the result
// in the record. The DHCPv6 lease is in the same record as the IPv4 lease, so a DEL releases both together. After a
// change of either lease, visit.follow updates the attachment.

// memory6 is the part of memory that concerns DHCPv6.
type memory6 struct {
	machine      *dhcp6.Machine
	session      *dhcp6.Session
	isConfigured bool // a visit has checked or set the address since the session began
}

// isDue6 reports whether DHCPv6 work is due at the time t.
func (v *visit) isDue6(t time.Time) bool {
	if v.r.Six == nil {
		return false
	}
	if i := v.r.Six.Information; i != nil && t.Before(i.Until) {
		return false
	}
	s := v.m.six.session
	return s == nil || !s.Wake().IsZero() && !t.Before(s.Wake())
}

// work6 does the DHCPv6 work that is due, and returns its error. It also writes the error into the record.
func (v *visit) work6(p pod) error {
	if v.r.Six == nil {
		return nil
	}
	err := v.keep6(p)
	if err != nil && !errors.Is(err, errDeleted) && v.ctx.Err() == nil {
		err = errors.Join(fmt.Errorf("DHCPv6: %w", err), v.note6(err.Error()))
	}
	return err
}

func (v *visit) keep6(p pod) error {
	if v.m.six.session == nil {
		if err := v.restore6(); err != nil {
			return err
		}
	}

	if l := v.r.Six.Lease; l != nil && !v.r.Six.Checking && l.Left(now()) != 0 {
		err := v.yield6(p)
		if err == nil && !v.m.six.isConfigured && v.r.Wants6() {
			err = apply6(p, l)
		}
		if err != nil {
			return err
		}
		v.m.six.isConfigured = true
	}

	if !v.isDue6(now()) {
		return nil
	}

	x := &exchange6{visit: v, pod: p, limit: v.timeLimit(v.r.Six.Lease != nil)}
	err := errors.Join(x.run(), x.hangUp())
	if s := v.m.six.session; s != nil && s.State() == dhcp6.Informed {
		v.m.six.session = nil // the next visit creates a new session
	}

	return errors.Join(err, v.follow())
}

// applied6 returns the addresses of a DHCPv6 lease, in the form for the methods of pod. There is only one address.
func applied6(l *dhcp6.Lease6) lease.Applied {
	return lease.Applied{Addresses: []netip.Prefix{netip.PrefixFrom(l.Address, l.Address.BitLen())}}
}

func apply6(p pod, l *dhcp6.Lease6) error {
	t := now()
	return p.apply(applied6(l), l.Left(t), l.PreferredFor(t))
}

// yield6 checks whether the pod still has the address of its DHCPv6 lease. If not, the pod's owner removed it: yield6
// records that, so that the pod does not get the address again. It does nothing if the lease ends soon, or if the owner
// removed an IPv6 address before (see Wants6).
func (v *visit) yield6(p pod) error {
	l := v.r.Six.Lease
	if endsSoon(l.Left(now())) || !v.r.Wants6() {
		return nil
	}

	kept, err := p.keeps(applied6(l))
	if err != nil || len(kept.Addresses) > 0 {
		return err
	}

	v.Log.Info("the pod's owner has removed the address by DHCPv6: it is not added again",
		append(v.logAttrs(), "ipv6", l.Address)...)
	return v.underLock(func(held *lease.LockedRecord) error {
		v.r.Removed.Addresses = append(v.r.Removed.Addresses, applied6(l).Addresses...)
		return held.Replace(v.r)
	})
}

// restore6 creates the DHCPv6 session from the record. A visit calls it if memory has no session, for example after a
// start of the keeper.
func (v *visit) restore6() error {
	cfg := v.r.Six.Config(v.r.Client.HostName)
	cfg.Refuse = v.refuse6(v.r)
	if l := v.r.Six.Lease; l != nil && v.r.Six.Checking {
		cfg.Address = l.Address // an earlier visit ended during duplicate address detection
	}

	machine, err := dhcp6.NewMachine(cfg)
	if err != nil {
		return err
	}

	s := machine.Start(now(), rand.Uint64())
	if v.r.Six.Stateless {
		s = machine.Inform(now(), rand.Uint64())
	}

	if l := v.r.Six.Lease; l != nil && !v.r.Six.Checking {
		if s, err = machine.Restore(now(), rand.Uint64(), l); err != nil {
			return err
		}
	}

	v.m.six.machine, v.m.six.session, v.m.six.isConfigured = machine, &s, false
	return nil
}

// noteFormed records the addresses that the pod formed from router advertisements. If they have changed, it calls
// follow, which updates the host's rules for the pod. It also schedules the next check. The pause before it is one
// second after a change of the addresses, and then doubles up to lookEvery. Routers may begin to advertise at any time,
// most often within seconds of a pod's start.
func (v *visit) noteFormed(p pod) error {
	formed, err := p.formedAddresses()
	if err != nil {
		return err
	}

	isNew := len(formed)+len(v.r.Formed) > 0 && !slices.Equal(formed, v.r.Formed)
	if isNew {
		v.m.formed = 0
		err = v.underLock(func(held *lease.LockedRecord) error {
			v.r.Formed = formed
			return held.Replace(v.r)
		})
	}

	v.m.nextCheck = trace.Earliest(v.m.nextCheck, now().Add(time.Second<<v.m.formed))
	v.m.formed = min(v.m.formed+1, 9)
	if err != nil || !isNew {
		return err
	}

	return v.follow()
}

// note6 writes trouble, the text of a DHCPv6 error, into the record, for the waiting ADD and for `tombolo check`.
func (v *visit) note6(trouble string) error {
	if v.r.Six.Error == trouble {
		return nil
	}
	return v.change6(func(six *lease.Six) { six.Error = trouble })
}

// change6 calls change on the DHCPv6 part of the record, and writes the record under its lock.
func (v *visit) change6(change func(*lease.Six)) error {
	six := *v.r.Six
	change(&six)
	return v.underLock(func(held *lease.LockedRecord) error {
		v.r.Six = &six
		return held.Replace(v.r)
	})
}

// tries6 is the number of failed visits after which the keeper deletes the record of a pod that is gone even if the
// DHCPv6 RELEASE fails. The pauses after these visits take about half a minute together.
const tries6 = 3

// expires6 returns the end of the pod's DHCPv6 lease, or the zero time if there is no lease or it never ends.
func (v *visit) expires6() time.Time {
	if v.r.Six == nil || v.r.Six.Lease == nil {
		return time.Time{}
	}
	return v.r.Six.Lease.Expire
}

// endUnreachable6 records the end of a DHCPv6 lease that has expired while the keeper cannot reach the pod: see
// endUnreachable.
func (v *visit) endUnreachable6(cause error) error {
	if ends := v.expires6(); ends.IsZero() || now().Before(ends) {
		return nil
	}

	v.Log.Warn("DHCPv6 lease ended, and its pod is out of reach: removing its address from the firewall",
		append(v.logAttrs(), "ipv6", v.r.Six.Lease.Address, "err", cause)...)
	v.metrics.expired.Inc()
	v.m.six.session = nil
	err := v.change6(func(six *lease.Six) {
		six.Lease, six.Release, six.Checking, six.Error = nil, nil, false, cause.Error()
	})
	return errors.Join(err, v.follow())
}

// exchange6 holds the state of an exchange of messages with DHCPv6 servers during one visit.
type exchange6 struct {
	*visit
	messageConn[[]byte]
	pod   pod
	limit time.Time
}

func (x *exchange6) run() error {
	var e dhcp6.Event
	for {
		before := x.m.six.session.State()
		s, out := x.m.six.machine.Step(*x.m.six.session, now(), e)
		x.m.six.session, e = &s, dhcp6.Event{}
		err := x.handleOutput(out)
		if err == nil && x.r.Six.Lease == nil && out.Send != nil && s.State() == before {
			// The session repeats a request. Record the failure now, since the waiting ADD may give up before the
			// exchange ends.
			err = x.note6(x.noResult().Error())
		}

		if err == nil && out.Check != nil {
			e.Verdict, err = x.check(out.Check)
		}

		if err != nil {
			x.m.six.session = nil // the next visit restores it from the record
			return err
		}

		switch {
		case out.Check != nil:
			continue
		case out.Listen.IsZero():
			return nil
		case !now().Before(x.limit):
			return x.recordNoAnswer()
		}

		message, err := x.receive(x.ctx, trace.Earliest(out.Listen, s.Wake(), x.limit))
		if err != nil {
			return err
		}

		if e.Message = message; message == nil && !now().Before(x.limit) {
			return x.recordNoAnswer()
		}
	}
}

// handleOutput handles the outputs of one step of the DHCPv6 session, except Check. It logs and records an error,
// records the loss of a lease, and sends the message. It applies a lease, or records DNS settings.
func (x *exchange6) handleOutput(out dhcp6.Output) error {
	if out.Err != nil {
		x.Log.Warn("no address by DHCPv6", append(x.logAttrs(), "err", out.Err)...)
		x.countLoss(out.Err)
	}

	var err error
	switch {
	case out.Lost != nil:
		err = x.recordLoss6(out)
	case out.Err != nil:
		err = x.note6(out.Err.Error())
	}

	if err == nil && out.Send != nil {
		err = x.send(out.Send)
	}

	switch {
	case err != nil:
		return err
	case out.Bound != nil:
		return x.applyLease6(out.Bound)
	case out.Information != nil: // a server sent DNS settings to a pod without a DHCPv6 lease
		i := out.Information
		x.Log.Debug("asked for DNS by DHCPv6", append(x.logAttrs(), "servers", i.DNS, "ignored", i.Ignored)...)
		until := now().Add(i.Refresh)
		return x.change6(func(six *lease.Six) {
			six.Information, six.Error = &lease.NameService{DNS: i.DNS, Search: i.Search, Until: until}, ""
		})
	}

	return nil
}

// check adds the address of a lease that a server has just granted to the pod, and waits until the kernel has found out
// whether another host has it. It first records the lease and updates the host's rules for the pod, which would
// otherwise drop the kernel's neighbour solicitation. If no other host has the address, it stays on the pod, and check
// returns Unused. Otherwise check removes the address, and the lease from the record, and returns InUse. If the pod
// must not get the address (see Wants6), check returns Unused at once and adds nothing.
func (x *exchange6) check(l *dhcp6.Lease6) (dhcp6.Verdict, error) {
	if !x.r.Wants6() {
		return dhcp6.Unused, nil
	}

	if err := x.write(l, true, ""); err != nil {
		return 0, err
	}

	if err := x.follow(); err != nil {
		return 0, err
	}

	t := now()
	inUse, err := x.pod.inUse(x.ctx, applied6(l), l.Left(t), l.PreferredFor(t))
	if err != nil || !inUse {
		return dhcp6.Unused, err
	}

	x.Log.Warn("another host has the address that a DHCPv6 server gave", append(x.logAttrs(), "ipv6", l.Address)...)
	if err := x.write(nil, false, fmt.Sprintf("%s: %v", l.Address, dhcpc.ErrDeclined)); err != nil {
		return 0, err
	}

	return dhcp6.InUse, x.follow()
}

// write records the DHCPv6 lease l, or no lease if l is nil. Unless checking is set, it also adds the lease's address
// to the pod, if the pod may have it (see Wants6). If l has another address than the previous lease, write removes the
// previous address. trouble is the error to record. If somebody else deleted or replaced the record, write releases
// l, unless the client is sticky.
func (x *exchange6) write(l *dhcp6.Lease6, checking bool, trouble string) error {
	six := *x.r.Six
	six.Lease, six.Release, six.Checking, six.Error, six.Note = l, nil, checking, trouble, ""
	if l != nil {
		release, err := dhcp6.Release(l, rand.Uint32())
		if err != nil {
			return err
		}
		six.Release = release
	}

	if l != nil && !checking {
		six.Address = l.Address
	}

	err := x.underLock(func(held *lease.LockedRecord) error {
		if before := x.r.Six.Lease; before != nil && l != nil && before.Address != l.Address {
			if err := x.pod.withdraw(applied6(before)); err != nil {
				return err
			}
		}

		if l != nil && !checking && x.r.Wants6() {
			if err := apply6(x.pod, l); err != nil {
				return err
			}
		}

		x.r.Six = &six
		return held.Replace(x.r)
	})
	if errors.Is(err, errDeleted) {
		// The DEL did not know this lease and so did not release it.
		if x.r.Six = &six; x.r.Releases6(now()) {
			err = errors.Join(err, x.release(true))
		}
	}

	return err
}

// applyLease6 applies and records a new or renewed lease by write, and counts it.
func (x *exchange6) applyLease6(l *dhcp6.Lease6) error {
	fresh := x.r.Six.Lease == nil || x.r.Six.Checking
	if !fresh {
		if err := x.yield6(x.pod); err != nil {
			return err
		}
	}

	if err := x.write(l, false, ""); err != nil {
		return err
	}

	x.m.six.isConfigured = true
	if fresh {
		x.metrics.acquisitions.Inc()
		x.Log.Info("leased by DHCPv6", append(x.logAttrs(), "ipv6", l.Address)...)
		return nil
	}

	x.metrics.renewals.Inc()
	return nil
}

// recordLoss6 removes the address of a lost lease from the pod and from the host's rules, and records that the pod has
// no lease. It also starts the exchange's time limit anew.
func (x *exchange6) recordLoss6(out dhcp6.Output) error {
	err := x.underLock(func(held *lease.LockedRecord) error {
		err := x.pod.withdraw(applied6(out.Lost))
		six := *x.r.Six
		six.Lease, six.Release, six.Checking, six.Note = nil, nil, false, ""
		if out.Err != nil {
			six.Error = out.Err.Error()
		}
		x.r.Six = &six
		return errors.Join(err, held.Replace(x.r))
	})
	if err == nil {
		err = x.follow()
	}

	x.limit = x.timeLimit(false)
	return err
}

// recordNoAnswer counts an exchange that ended without an answer, and gives the next exchange more time. If the pod has
// a lease, it logs the failure and writes it into the record as a note. If not, it returns an error.
func (x *exchange6) recordNoAnswer() error {
	x.metrics.unanswered.Inc()
	x.m.slow = true
	failure := x.noResult()
	if x.m.six.session.Lease() != nil {
		x.Log.Warn("no server renews the DHCPv6 lease yet",
			append(x.logAttrs(), "err", failure, "next", x.m.six.session.Wake())...)
		return x.change6(func(six *lease.Six) { six.Note = failure.Error() })
	}
	return failure
}

// noResult returns the error of an exchange that led neither to a lease nor to DNS settings. Its text lists the
// session's messages so far.
func (x *exchange6) noResult() error {
	op := "lease an address"
	if x.r.Six.Stateless {
		op = "ask for DNS"
	}
	return x.m.six.session.Failure(op, now(), dhcpc.ErrTimeout)
}

func (x *exchange6) send(message []byte) error {
	if x.conn == nil {
		conn, err := x.pod.dial6()
		if err != nil {
			return err
		}
		x.conn = conn
	}
	return x.conn.Send(x.ctx, message)
}
