package keeper

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// visit looks at an uplink and does what is due; then t.due says when to look again, and
// is zero if there is no such uplink any more.
func (u *uplinks) visit(t *taken) {
	rec := u.load(t)
	if rec == nil {
		return
	}
	// Before it is looked at, so that nothing falls in between.
	u.hear()
	t.links = u.work.links(rec)
	if rec.State != uplink.Taken {
		u.finishAlone(t, rec)
		return
	}
	diffs, err := u.work.check(u.ctx, rec)
	switch {
	case err != nil:
		u.later(t, "cannot look at uplink", err)
	case len(diffs) == 0:
		u.fine(t, rec)
	case t.patience.waits(now()):
		t.due = t.patience.until
	default:
		u.alone(t, func() { u.mend(t) })
		u.putBack(t)
	}
}

// putBack has the pods of an uplink put back that was mended, or whose host has other
// addresses. It is done without the NIC's lock, since a repair takes that of the
// directory before it.
func (u *uplinks) putBack(t *taken) {
	if !t.putBack {
		return
	}
	if err := u.repair(u.ctx); err != nil {
		u.later(t, "cannot put the pods of an uplink back: tombolo repair, or their network's next ADD, does it", err)
		return
	}
	t.putBack = false
}

// fine is an uplink that is as it was made, or as an operator has changed it on purpose.
func (u *uplinks) fine(t *taken, rec *uplink.Record) {
	present, err := u.work.present(u.ctx, rec)
	if err != nil {
		u.later(t, "cannot look at uplink", err)
		return
	}
	from, to := rec.HostAddresses(), present.HostAddresses()
	if !slices.Equal(from, to) {
		u.log.Info("the host has other addresses: its pods follow", "nic", rec.NIC, "bridge", rec.Bridge, "from", from, "to", to)
		t.putBack = true
	}
	// First the pods: as long as the record is of before, a successor sees that there is
	// something to do.
	u.putBack(t)
	if !t.putBack { // else it is to be tried again
		t.failures = 0
		t.patience.calm(now())
		t.due = now().Add(lookAtUplinks)
	}
	if present != rec {
		u.alone(t, func() { u.record(t, to) })
	}
	if !t.putBack && !t.adopted {
		u.adopt(t)
	}
}

// finishAlone finishes what was cut short, and hands the lease back that the host has by a NIC
// which is given back then. As long as the NIC cannot be given back, its lease is renewed.
// The lease's lock comes before the NIC's.
func (u *uplinks) finishAlone(t *taken, rec *uplink.Record) {
	t.adopted = false
	give := func() error {
		u.alone(t, func() { u.finish(t) })
		if !t.due.IsZero() {
			return errNotBack
		}
		return nil
	}
	if rec.State == uplink.Taking {
		_ = give() // there is no lease to hand back, or it stays
		return
	}
	if err := u.work.disown(u.ctx, t.nic, give); err != nil && !errors.Is(err, errNotBack) {
		u.later(t, "cannot hand the DHCP lease of the host's NIC back", err)
	}
}

// errNotBack says that a NIC has not been given back yet: why was said.
var errNotBack = errors.New("the NIC has not been given back")

// record brings the record of a takeover up to date. It holds the lock. Pods have followed
// the host to some addresses: if it has others by now, they have to follow first.
func (u *uplinks) record(t *taken, followed []netip.Prefix) {
	rec := u.load(t)
	if rec == nil || rec.State != uplink.Taken {
		return // another process did it, and its change is announced
	}
	present, err := u.work.present(u.ctx, rec)
	switch {
	case err == nil && !slices.Equal(present.HostAddresses(), followed):
		t.due = now()
	case err == nil && present != rec:
		err = present.Save(u.state.Uplink(t.nic))
	}
	if err != nil {
		u.later(t, "cannot write down what the host has on its bridge", err)
	}
}

// adopt has the lease that the NIC had looked after. Another process may be about to give the NIC
// back: a process that does has the lease's lock, and under that the work looks again.
func (u *uplinks) adopt(t *taken) {
	rec := u.load(t)
	if rec == nil {
		return
	}
	if rec.State != uplink.Taken {
		t.due = now()
		return
	}
	err := u.work.adopt(u.ctx, rec)
	if err != nil {
		u.trouble("cannot adopt the DHCP lease of the host's NIC: it runs out unless a later try succeeds", "nic", t.nic, "err", err)
	}
	t.adopted = err == nil
}

// finish completes a takeover, or a return, whose process was killed. It holds the lock, so
// that no other process works on it.
func (u *uplinks) finish(t *taken) {
	rec := u.load(t)
	if rec == nil {
		return
	}
	if rec.State == uplink.Taken {
		t.due = now() // the process that had the lock did it
		return
	}
	u.log.Warn("the work on an uplink was cut short: finishing it", "nic", rec.NIC, "bridge", rec.Bridge, "state", rec.State, "step", rec.Step)
	after, err := u.work.finish(u.ctx, rec, u.state.Uplink(t.nic))
	if err != nil {
		u.later(t, "cannot finish the work on an uplink", err)
		return
	}
	u.metrics.count(&u.metrics.uplinksFinished)
	if after == nil {
		u.log.Info("uplink given back", "nic", rec.NIC, "bridge", rec.Bridge)
		t.due = time.Time{}
		return
	}
	u.log.Info("uplink taken over", "nic", rec.NIC, "bridge", rec.Bridge)
	t.state, t.due = after.State, now()
}

// mend repairs what another program undid. It holds the lock, so that a difference is not
// the middle of another process's work.
func (u *uplinks) mend(t *taken) {
	rec := u.load(t)
	if rec == nil {
		return
	}
	if rec.State != uplink.Taken {
		t.due = now()
		return
	}
	diffs, err := u.work.check(u.ctx, rec)
	if err != nil {
		u.later(t, "cannot look at uplink", err)
		return
	}
	if len(diffs) == 0 {
		t.due = now().Add(pauseUplinks)
		return
	}
	who := []any{"nic", rec.NIC, "bridge", rec.Bridge}
	u.log.Warn("somebody changed an uplink: mending it", append(who, "found", texts(diffs))...)
	changed, err := u.work.mend(u.ctx, rec, u.state.Uplink(t.nic))
	if err != nil {
		u.later(t, "cannot mend uplink", err)
		return
	}
	t.failures, t.adopted = 0, false
	// To see that it is well, and for how long.
	t.due = now().Add(pauseUplinks)
	if changed {
		t.putBack = true
		u.metrics.count(&u.metrics.uplinkMends)
		u.log.Info("uplink mended", who...)
	}
	if wait := t.patience.mended(now()); wait > 0 {
		u.log.Error("something keeps undoing the takeover of an uplink: have the network manager leave it alone "+
			"(NetworkManager: nmcli device set NIC managed no; systemd-networkd: Unmanaged=yes for the NIC), or give it back (tombolo uplink restore NIC BRIDGE)",
			append(who, "mends", t.patience.mends, "next", wait)...)
	}
}

func texts(diffs []tombolo.Difference) []string {
	list := make([]string, len(diffs))
	for i, d := range diffs {
		list[i] = d.String()
	}
	return list
}

// drop forgets the takeover of an earlier epoch: the NIC was set up anew since.
func (u *uplinks) drop(t *taken) {
	file := u.state.Uplink(t.nic)
	if _, err := file.Load(); !errors.Is(err, state.ErrStale) {
		t.due = now()
		return
	}
	if err := file.Remove(); err != nil {
		u.later(t, "cannot drop the record of an uplink", err)
		return
	}
	u.log.Info("uplink of an earlier epoch forgotten", "nic", t.nic)
	t.due = time.Time{}
}

// later has an uplink looked at again after a failure.
func (u *uplinks) later(t *taken, what string, err error) {
	if u.ctx.Err() != nil {
		return // that the keeper ends is no failure
	}
	pause := min(time.Second<<min(t.failures, 10), lastRetry)
	t.failures++
	t.due = now().Add(pause)
	u.trouble(what, "nic", t.nic, "tries", t.failures, "again", pause, "err", err)
}

// patience says how soon an uplink may be mended again. Two programs that undo each
// other's work in turns would keep the host from the network, and a CPU busy.
type patience struct {
	mends int
	last  time.Time
	until time.Time
}

const (
	// mendsAtOnce are mended without a pause: a network manager that is restarted may
	// do its work in several goes.
	mendsAtOnce = 3

	// Then they wait for the first of these, doubled up to the second.
	firstPatience = 30 * time.Second
	lastPatience  = 10 * time.Minute

	// calmAfter without a mend, what was before is forgotten.
	calmAfter = 15 * time.Minute
)

// mended counts a mend, and gives how long to wait before the next.
func (p *patience) mended(t time.Time) time.Duration {
	p.mends++
	p.last = t
	if p.mends < mendsAtOnce {
		return 0
	}
	wait := min(firstPatience<<min(p.mends-mendsAtOnce, 10), lastPatience)
	p.until = t.Add(wait)
	return wait
}

// waits says that it is too early for another.
func (p *patience) waits(t time.Time) bool { return t.Before(p.until) }

// calm forgets mends that are long ago.
func (p *patience) calm(t time.Time) {
	if t.Sub(p.last) > calmAfter {
		*p = patience{}
	}
}
