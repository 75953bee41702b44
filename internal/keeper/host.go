package keeper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
)

// A lease of the host's own (lease.Record.Host) is renewed on the bridge, as its client
// would have done on the NIC. Three things differ from a pod's: its server may be unknown
// until it is confirmed on the bridge (lease.Adopting); it is never released;
// and what the host has is taken away only when there is something in its place, since
// the keeper, unlike the owner of a pod, is not asked again.

// hostLink is the host, entered: the bridge whose port the NIC is.
type hostLink interface {
	pod
	// routes gives the routes that go with a lease's address, and whether the host has
	// that address.
	routes(l *dhcpc.Lease) (list []lease.HostRoute, present bool, _ error)
	// setRoutes adds routes, in their order, each in the place of that of the same
	// destination, table and metric.
	setRoutes(list []lease.HostRoute) error
	// removeRoutes takes routes away; that they are gone is success.
	removeRoutes(list []lease.HostRoute) error
}

var (
	// errUnconfirmed says that no server has confirmed a lease that is being adopted.
	errUnconfirmed = errors.New("no DHCP server confirms the lease")
)

// keepHost does what is due for a lease of the host's own.
func (v *visit) keepHost() outcome {
	if v.r.Boot != v.boot {
		return v.dropHost("the machine has booted since")
	}
	o := v.visitHost()
	if !o.gone {
		v.metrics.setHost(v.r)
	}
	return o
}

func (v *visit) visitHost() outcome {
	t := now()
	// A failure is written into the record, which the keeper notices.
	if hold := v.m.hold; t.Before(hold) {
		return v.outcome(hold)
	}
	due := v.m.session == nil || wakes(v.m.session, t)
	if !due && v.m.right && t.Before(v.m.look) {
		return v.idle()
	}
	entered, err := v.node.enter(v.r)
	if err != nil {
		if v.r.Lease.Left(t) == 0 && errors.Is(err, errGone) {
			return v.dropHost(err.Error())
		}
		return v.hostFailed("cannot keep the host's own lease", err)
	}
	v.m.look = t.Add(lookEvery)
	err = errors.Join(v.workOnHost(entered), entered.close())
	switch {
	case errors.Is(err, errDeleted):
		return outcome{state: v.r.State, wake: now()}
	case err != nil:
		return v.hostFailed("cannot keep the host's own lease", err)
	}
	v.m.failures, v.m.hold = 0, time.Time{}
	if v.r.State == lease.Bound && v.m.session.State() == dhcpc.Bound {
		v.tell("") // nothing is waited for
	}
	return v.idle()
}

func (v *visit) workOnHost(p pod) error {
	if v.r.State == lease.Adopting {
		return v.adopt(p)
	}
	if v.m.session == nil {
		if err := v.restore(); err != nil {
			return err
		}
	}
	// At every look: what an operator or a network manager did to the address and its
	// routes is written down, and an address that went away is put back.
	if err := v.putRight(p); err != nil {
		return err
	}
	v.m.right = true
	if !wakes(v.m.session, now()) {
		return nil
	}
	err := v.exchange(p)
	v.m.look = now().Add(confirmAfter)
	return err
}

// adopt asks whether the lease that the host had is still its own, by a renewal: the server
// that gave it, and at the next visit all of them.
func (v *visit) adopt(p pod) error {
	// So that the lease's routes are known even if the address ends before it is confirmed.
	if err := v.noteRoutes(p); err != nil {
		return err
	}
	t := now()
	broadcast := v.r.Lease.Server.IsUnspecified() || v.m.failures%2 == 1
	l := *v.r.Lease
	if l.Left(t) != 0 {
		l.Renew = earliest(l.Renew, t)
		l.Obtained = earliest(l.Obtained, l.Renew)
		if broadcast {
			l.Rebind = l.Renew
		} else if !l.Rebind.After(t) {
			l.Rebind = l.Expire
		}
	}
	machine, err := dhcpc.NewMachine(v.r.Client.Config(&l))
	if err != nil {
		return err
	}
	s, err := machine.Restore(t, rand.Uint64(), &l)
	if err != nil {
		return err
	}
	v.m.machine, v.m.session = machine, &s
	err = v.exchange(p)
	if v.r.State == lease.Adopting {
		v.m.session = nil
		if err == nil {
			err = errUnconfirmed
		}
		whom := v.r.Lease.Server.String()
		if broadcast {
			whom = "any server"
		}
		return fmt.Errorf("asked %s for %s: %w", whom, v.r.Lease.Address.Addr(), err)
	}
	return err
}

// noteRoutes writes down what routes the host's address has now.
func (v *visit) noteRoutes(p pod) error {
	list, present, err := p.(hostLink).routes(v.r.Lease)
	if err != nil || !present || slices.EqualFunc(list, v.r.Host.Routes, sameRoute) {
		return err
	}
	return v.underLockOf(func(held *lease.Held) error {
		v.r.Host.Routes = list
		return held.Replace(v.r)
	})
}

// applyHost makes the host have what a lease comes to, and the record say so. The new
// address and its routes come before the old ones go. As in apply, the record says first
// that the host has both.
func (v *visit) applyHost(held *lease.Held, p pod, l *dhcpc.Lease) error {
	host := p.(hostLink)
	have, present, err := host.routes(v.r.Lease)
	if err != nil {
		return err
	}
	changed := false
	if present && !slices.EqualFunc(have, v.r.Host.Routes, sameRoute) {
		v.r.Host.Routes, changed = have, true
	}
	want := lease.Applied{Addresses: v.r.Policy.Apply(l).Addresses}
	stale := v.r.Applied.Without(want)
	routes := planRoutes(v.r.Host.Routes, v.r.Lease, l, present)
	if !stale.Empty() {
		v.r.Applied.Addresses = slices.Concat(want.Addresses, stale.Addresses)
		if err := held.Replace(v.r); err != nil {
			return err
		}
	}
	if err := v.changeHost(host, want, stale, routes, l); err != nil {
		// The lease is the host's all the same.
		v.m.right = false
		return errors.Join(err, v.hostHas(held, l, v.r.Applied, v.r.Host.Routes, err.Error()))
	}
	trouble := ""
	if l == v.r.Lease && v.r.State == lease.Bound {
		if stale.Empty() && !changed {
			return nil // nothing new to write
		}
		trouble = v.r.Error // no news from a server
	}
	return v.hostHas(held, l, want, routes.all, trouble)
}

// changeHost does to the kernel what is to be done.
func (v *visit) changeHost(host hostLink, want, stale lease.Applied, routes routePlan, l *dhcpc.Lease) error {
	left := v.hostLeft(l)
	if err := errors.Join(host.apply(want, left), host.setRoutes(routes.set)); err != nil || stale.Empty() {
		return err
	}
	if err := errors.Join(host.removeRoutes(routes.remove), host.withdraw(stale)); err != nil {
		return err
	}
	// With the first address of a network the kernel takes the others away, unless
	// promote_secondaries is set, and their routes with them.
	return errors.Join(host.apply(want, left), host.setRoutes(routes.all))
}

// hostLeft is how long the kernel is to keep the address; -1 is for ever.
func (v *visit) hostLeft(l *dhcpc.Lease) time.Duration {
	if v.r.Host.Permanent {
		return -1
	}
	return l.Left(now())
}

// putHostBack is for a host whose address went away when it was to be renewed.
func (v *visit) putHostBack(host hostLink) error {
	return errors.Join(host.apply(v.r.Applied, v.hostLeft(v.r.Lease)), host.setRoutes(v.r.Host.Routes))
}

// hostHas writes down what the host has.
func (v *visit) hostHas(held *lease.Held, l *dhcpc.Lease, a lease.Applied, routes []lease.HostRoute, trouble string) error {
	v.r.Lease, v.r.State, v.r.Applied, v.r.Error = l, lease.Bound, a, trouble
	v.r.Host.Routes = routes
	return held.Replace(v.r)
}

// hostLost is what becomes of the host's address when its lease was refused or ran out:
// nothing, until there is another. The kernel ends it with the lease, unless it was told of
// no end.
func (x *exchange) hostLost(out dhcpc.Output) error {
	x.log.Error("the host's own DHCP lease is lost: asking for another; until there is one the host keeps its address, for as long as the kernel was told to",
		append(x.whoHost(), "err", out.Err)...)
	x.m.slow, x.asked, x.m.lost = true, false, out.Err
	x.limit = now().Add(acquireWait)
	if out.Lost == nil && x.r.State == lease.Expired {
		return nil
	}
	return x.underLockOf(func(held *lease.Held) error {
		x.r.State, x.r.Error = lease.Expired, fmt.Sprint(out.Err)
		return held.Replace(x.r)
	})
}

// hostBound reports a lease that a server granted to the host.
func (x *exchange) hostBound(was lease.State, before *dhcpc.Lease) {
	l := x.r.Lease
	switch {
	case was == lease.Adopting:
		x.metrics.count(&x.metrics.renewals)
		x.log.Info("the host's own DHCP lease is adopted", append(x.whoHost(), "server", l.Server, "expires", l.Expire)...)
	case was == lease.Expired && before.Address != l.Address:
		x.metrics.count(&x.metrics.acquisitions)
		x.log.Error("the host has another address", append(x.whoHost(), "before", before.Address)...)
	case was == lease.Expired:
		x.metrics.count(&x.metrics.acquisitions)
		x.log.Warn("the host's own DHCP lease is got again", append(x.whoHost(), "expires", l.Expire)...)
	default:
		x.metrics.count(&x.metrics.renewals)
		x.log.Debug("the host's own DHCP lease is renewed", append(x.whoHost(), "expires", l.Expire)...)
	}
}

// hostFailed is the outcome of a visit that has to be made again: operators are told,
// by log and record, while the host still has its address.
func (v *visit) hostFailed(what string, err error) outcome {
	if v.ctx.Err() != nil {
		return v.outcome(time.Time{})
	}
	v.metrics.count(&v.metrics.errors)
	left := v.r.Lease.Left(now())
	v.log.Log(v.ctx, v.severity(left), what, append(v.whoHost(), "err", err, "left", left.Round(time.Second), "remedy", v.remedy())...)
	v.m.failures++
	pause := min(firstRetry<<min(v.m.failures-1, 10), lastRetry)
	if left > 0 {
		pause = min(pause, max(left/4, time.Second))
	}
	v.m.hold = now().Add(pause - pause/4 + rand.N(pause/2))
	if ends := v.r.Expires(); ends.After(now()) && ends.Before(v.m.hold) {
		v.m.hold = ends
	}
	if s := v.m.session; s != nil && s.Wake().After(now()) && s.Wake().Before(v.m.hold) {
		v.m.hold = s.Wake()
	}
	v.tell(fmt.Sprintf("%v: %s", err, v.remedy()))
	return v.outcome(v.m.hold)
}

// tell writes a trouble into the record, for `tombolo leases` and STATUS.
func (v *visit) tell(trouble string) {
	if v.r.Error == trouble {
		return
	}
	err := v.underLockOf(func(held *lease.Held) error {
		v.r.Error = trouble
		return held.Replace(v.r)
	})
	if err != nil && !errors.Is(err, errDeleted) && v.ctx.Err() == nil {
		v.failed("cannot write the host's lease record", append(v.whoHost(), "err", err)...)
	}
}

// remedy says what an operator can do.
func (v *visit) remedy() string {
	return fmt.Sprintf("is the DHCP server up, and do the LAN and the firewall let UDP ports 67 and 68 pass on %s? Without it the host loses its address when the lease ends; `tombolo uplink restore %s %s` gives the NIC, and the lease, back to the host's own client",
		v.r.Bridge, v.r.Host.NIC, v.r.Bridge)
}

// severity is an error when it becomes urgent.
func (v *visit) severity(left time.Duration) slog.Level {
	whole := v.r.Lease.Expire.Sub(v.r.Lease.Obtained)
	if left >= 0 && left < whole/4 || v.r.State == lease.Expired {
		return slog.LevelError
	}
	return slog.LevelWarn
}

// hostUnheard is the end of an exchange without an answer, of a lease that was
// confirmed before.
func (x *exchange) hostUnheard() error {
	switch {
	case x.r.State == lease.Adopting:
		return errUnconfirmed
	case x.r.State == lease.Expired && x.m.lost != nil:
		return fmt.Errorf("no server gives another lease: %w", x.m.lost)
	case x.r.State == lease.Expired:
		return errors.New("no server gives another lease")
	}
	left := x.r.Lease.Left(now())
	x.log.Log(context.WithoutCancel(x.ctx), x.severity(left), "no server renews the host's own DHCP lease yet",
		append(x.whoHost(), "left", left.Round(time.Second), "next", x.m.session.Wake(), "remedy", x.remedy())...)
	x.tell("no server renews the lease: " + x.remedy())
	return nil
}

// dropHost forgets a lease that the host does not use any more. It is not released: the host's own
// client may have it again.
func (v *visit) dropHost(why string) outcome {
	return v.underLock(func(held *lease.Held) outcome {
		if err := held.Remove(); err != nil {
			return v.failedWith("cannot remove the host's lease record", err)
		}
		v.metrics.hostGone(v.r.Hash())
		v.log.Info("the host's own DHCP lease is left to its client", append(v.whoHost(), "why", why)...)
		return outcome{gone: true}
	})
}

// whoHost names the lease in a log.
func (v *visit) whoHost() []any {
	return []any{"nic", v.r.Host.NIC, "bridge", v.r.Bridge, "address", v.r.Lease.Address}
}
