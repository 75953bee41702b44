package cni

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// uplinkWork is the work on one NIC, under its lock.
type uplinkWork struct {
	*host
	conn *uplink.Conn
	file *state.UplinkFile
	rec  *uplink.Record // nil: it has not been taken
	// undone says that a takeover, or a return, was cut short and has just been brought
	// to its end, so that the NIC has all back.
	undone bool
}

// withUplink does something with a NIC under its lock. What somebody began and was killed
// at is finished first, forward or back.
func (h *host) withUplink(ctx context.Context, nic string, do func(*uplinkWork) error) error {
	lock, err := h.dir.LockUplink(ctx, nic)
	if err != nil {
		return err
	}
	defer lock.Close()
	conn, err := uplink.Dial(&uplink.Config{Made: placeLoopback})
	if err != nil {
		return err
	}
	defer conn.Close()
	w := &uplinkWork{host: h, conn: conn, file: h.dir.Uplink(nic)}
	if w.rec, err = loadUplink(w.file); err != nil {
		return err
	}
	if w.rec != nil && w.rec.State != uplink.Taken {
		if w.rec, err = conn.Recover(ctx, w.rec, w.file); err != nil {
			return err
		}
		w.undone = w.rec == nil
	}
	return do(w)
}

// loadUplink reads the record of a takeover: nil where there is none in this life of
// the node.
func loadUplink(file *state.UplinkFile) (*uplink.Record, error) {
	data, err := file.Load()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, state.ErrStale) {
		return nil, nil
	}
	if err != nil {
		return nil, newError(codeIO, "%v", err)
	}
	rec, err := uplink.ParseRecord(data)
	if err != nil {
		return nil, newError(codeIO, "%v", err)
	}
	return rec, nil
}

// takeUplink sees to it that the network's uplink is a port of its bridge, and that the
// host has on the bridge what it had on the NIC.
func (h *host) takeUplink(ctx context.Context) error {
	want := h.settings.uplink()
	if want.NIC == "" {
		return nil
	}
	return h.withUplink(ctx, want.NIC, func(w *uplinkWork) error { return w.ensure(ctx, want) })
}

// ensure takes the NIC, unless it is taken, and mends what somebody undid of it. A bridge
// that the operator has put the NIC on needs nothing.
func (w *uplinkWork) ensure(ctx context.Context, want uplink.Uplink) error {
	switch {
	case w.rec != nil && w.rec.Bridge != want.Bridge:
		return newError(codeConflict, "uplink %s is a port of bridge %s already, and network %q wants it on %s: name one bridge, or give it back first (tombolo uplink restore %s %s)",
			want.NIC, w.rec.Bridge, w.call.network, want.Bridge, want.NIC, w.rec.Bridge)
	case w.rec != nil:
		return w.mend(ctx)
	}
	if on, err := w.onItsBridge(ctx, want); err != nil || on {
		return err
	}
	// Of an earlier takeover that somebody undid by hand.
	if err := w.disown(want.NIC); err != nil {
		return err
	}
	var err error
	if w.rec, err = w.conn.Take(ctx, want, w.file); err != nil {
		return err
	}
	for _, note := range w.rec.Notes {
		w.call.log.warn("uplink " + want.NIC + ": " + note)
	}
	w.adopt(ctx)
	return nil
}

// onItsBridge says whether the operator has made the NIC a port of the bridge.
func (w *uplinkWork) onItsBridge(ctx context.Context, want uplink.Uplink) (bool, error) {
	nic, err := w.br.Link(ctx, want.NIC)
	if errors.Is(err, fs.ErrNotExist) {
		return false, newError(codeNotAttachable, "uplink %s: the host has no such link (ip link shows those that there are)", want.NIC)
	}
	if err != nil {
		return false, err
	}
	l, err := w.br.Link(ctx, want.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && l.Kind == "bridge" && nic.Master == l.Index, err
}

// mend puts right what somebody undid of the takeover, and has the record say what the
// host has by now: what it had before is nobody's to put back. Other addresses are left to
// the keeper, if there is one: by the record it sees that pods have to follow them.
func (w *uplinkWork) mend(ctx context.Context) error {
	if _, err := w.conn.Mend(ctx, w.rec, w.file); err != nil {
		return err
	}
	now, err := w.conn.Present(ctx, w.rec)
	if err != nil {
		return err
	}
	if now != w.rec && (slices.Equal(now.HostAddresses(), w.rec.HostAddresses()) || !w.isKept()) {
		if err := now.Save(w.file); err != nil {
			return err
		}
		w.rec = now
	}
	w.adopt(ctx)
	return nil
}

// isKept says that a keeper looks after uplinks, or that nobody can tell: an operator's
// command does not know its directory, and the keeper itself calls one.
func (w *uplinkWork) isKept() bool {
	if w.settings.LeaseDir == "" {
		return true
	}
	dir, err := lease.Open(w.settings.LeaseDir)
	return err == nil && dir.Kept() == nil
}

// adopt makes the keeper responsible for the lease that the host has by the NIC, if it has
// one: its own client hears nothing there any more. Pods need not wait for that, so what
// goes wrong is for STATUS, CHECK and the operator's commands to say. It is done once no
// lock is held: that of the lease comes before the others.
func (w *uplinkWork) adopt(ctx context.Context) {
	if w.settings.LeaseDir == "" {
		return
	}
	rec := w.rec
	w.later = append(w.later, func() error { return w.adoptLease(ctx, rec) })
}

func (h *host) adoptLease(ctx context.Context, rec *uplink.Record) error {
	dir, err := lease.Open(h.settings.LeaseDir)
	if err != nil {
		return err
	}
	nic, err := h.br.Link(ctx, rec.NIC)
	if err != nil {
		return err
	}
	l, err := h.br.Link(ctx, rec.Bridge)
	if err != nil {
		return err
	}
	list, err := h.br.Addresses().List(addr.Filter{Link: l.Index, Family: unix.AF_INET})
	if err != nil {
		return err
	}
	hostName, err := os.Hostname()
	if err != nil {
		return err
	}
	_, err = lease.Adopt(ctx, dir, &lease.Adoption{
		NIC: nic.Name, Index: nic.Index, MAC: nic.MAC, Bridge: l.Name, Addresses: list, HostName: hostName,
		Wanted: func() (bool, error) { return isTaken(h.dir.Uplink(rec.NIC), rec.Bridge) },
	})
	return err
}

// isTaken says whether a NIC is taken over, for a bridge: who gives one back hands its lease
// back first, and has the lease's lock until it is done.
func isTaken(file *state.UplinkFile, bridgeName string) (bool, error) {
	rec, err := loadUplink(file)
	return err == nil && rec != nil && rec.State == uplink.Taken && rec.Bridge == bridgeName, err
}

// lockHostLease locks the record of the lease that the host has by a NIC, until Close: for
// who may have to hand it back while holding the state's lock, which comes after it.
func (h *host) lockHostLease(ctx context.Context, nic string) error {
	if h.settings.LeaseDir == "" || nic == "" {
		return nil
	}
	dir, err := lease.Open(h.settings.LeaseDir)
	if err != nil {
		return err
	}
	if h.hostLease, err = dir.Lock(ctx, lease.HostHash(nic)); err != nil {
		return newError(codeTryAgainLater, "%v", err)
	}
	return nil
}

// disown ends the keeper's part in the lease that the host has by the NIC. It waits for no
// lock, since it comes late.
func (w *uplinkWork) disown(nic string) error {
	if w.settings.LeaseDir == "" {
		return nil
	}
	if w.hostLease != nil {
		return lease.HandBackLocked(w.hostLease, nic)
	}
	dir, err := lease.Open(w.settings.LeaseDir)
	if err != nil {
		return err
	}
	if _, err := dir.Load(lease.HostHash(nic)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	held, err := dir.TryLock(lease.HostHash(nic))
	if err != nil {
		return err
	}
	if held == nil {
		return newError(codeTryAgainLater, "the lease that the host had by uplink %s is being renewed: try again", nic)
	}
	return errors.Join(lease.HandBackLocked(held, nic), held.Close())
}

// leaseTrouble tells what is wrong with the leases that the host has by uplinks.
func leaseTrouble(leaseDir string) []string {
	dir, err := lease.Open(leaseDir)
	if err != nil {
		return nil
	}
	found, err := lease.HostTrouble(dir)
	if err != nil {
		return []string{err.Error()}
	}
	var list []string
	for _, t := range found {
		list = append(list, t.String())
	}
	return list
}

// mendUplink puts right what somebody undid of a takeover that is on record.
func (h *host) mendUplink(ctx context.Context, nic string) error {
	if nic == "" {
		return nil
	}
	return h.withUplink(ctx, nic, func(w *uplinkWork) error {
		if w.rec == nil {
			return nil // the operator's own bridge
		}
		return w.mend(ctx)
	})
}

// hasUplink says whether the NIC is a port of the bridge, in one request.
func (h *host) hasUplink(ctx context.Context, rec *state.Network, l *bridge.Link) (bool, error) {
	if rec.Uplink == "" {
		return true, nil
	}
	nic, err := h.br.Link(ctx, rec.Uplink)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && nic.Master == l.Index, err
}

// uplinkDifferences finds what of a takeover is not as it was made. It takes no lock: a
// keeper may be at work on it.
func (h *host) uplinkDifferences(ctx context.Context, rec *state.Network, found *findings) error {
	if rec.Uplink == "" {
		return nil
	}
	taken, err := loadUplink(h.dir.Uplink(rec.Uplink))
	if err != nil {
		found.add("%v", err)
		return nil
	}
	if taken == nil {
		l, err := h.br.Link(ctx, rec.Bridge)
		if err == nil {
			var ok bool
			if ok, err = h.hasUplink(ctx, rec, l); err == nil && !ok {
				found.add("uplink %s is not a port of bridge %s", rec.Uplink, rec.Bridge)
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // said already
		}
		return err
	}
	if taken.State != uplink.Taken {
		found.add("the takeover of uplink %s was cut short (%s): the next ADD, or tombolo uplink restore, finishes it", rec.Uplink, taken.State)
		return nil
	}
	conn, err := uplink.Dial(&uplink.Config{Made: placeLoopback})
	if err != nil {
		return err
	}
	defer conn.Close()
	diffs, err := conn.Check(ctx, taken)
	found.addAll(diffs)
	return err
}

// releaseUplink gives a NIC back with the last network that is on its bridge.
func (h *host) releaseUplink(ctx context.Context, rec *state.Network) error {
	if rec.Uplink == "" {
		return nil
	}
	shared, err := h.sharers(rec)
	if err != nil || len(shared) > 0 {
		return err
	}
	return h.withUplink(ctx, rec.Uplink, func(w *uplinkWork) error {
		if w.rec == nil {
			return nil
		}
		return w.giveBack(ctx)
	})
}

// giveBack restores the NIC, whose own client then hears again.
func (w *uplinkWork) giveBack(ctx context.Context) error {
	if err := w.disown(w.rec.NIC); err != nil {
		return err
	}
	if err := w.conn.Restore(ctx, w.rec, w.file); err != nil {
		w.adopt(ctx) // it has the address still
		return err
	}
	return nil
}

// uplinkStatus says what keeps the uplink from being one, and what became of one that
// is.
func (c *call) uplinkStatus(ctx context.Context, s settings) error {
	if s.Uplink == "" {
		return nil
	}
	dir, err := state.Open(s.StateDir)
	if err != nil {
		return newError(codeNotAvailable, "%v", err)
	}
	h, err := c.openHost(s)
	if err != nil {
		return unavailable(err)
	}
	defer h.Close()
	rec, err := loadUplink(dir.Uplink(s.Uplink))
	if err != nil {
		return unavailable(err)
	}
	if rec == nil {
		return unavailable(h.couldTake(ctx))
	}
	found := &findings{}
	if err := h.uplinkDifferences(ctx, &state.Network{Uplink: s.Uplink, Bridge: s.Bridge}, found); err != nil {
		return unavailable(err)
	}
	found.list = append(found.list, leaseTrouble(s.LeaseDir)...)
	if len(found.list) > 0 {
		return newError(codeNotAvailable, "uplink %s: %s", s.Uplink, strings.Join(found.list, "; "))
	}
	return nil
}

// couldTake says whether the NIC could be taken over, without a change to anything.
func (h *host) couldTake(ctx context.Context) error {
	want := h.settings.uplink()
	conn, err := uplink.Dial(&uplink.Config{Made: placeLoopback})
	if err != nil {
		return err
	}
	defer conn.Close()
	w := &uplinkWork{host: h, conn: conn}
	if on, err := w.onItsBridge(ctx, want); err != nil || on {
		return err
	}
	s, err := conn.Snapshot(ctx, want.NIC, want.Bridge)
	if err != nil {
		return err
	}
	_, err = uplink.Plan(s, want)
	return err
}
