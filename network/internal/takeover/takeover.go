// Package takeover makes a NIC of the host's a port of a network's bridge, and gives it back:
// with the record of it in the state directory, and the lease that the host has by the NIC.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// Node is what takeovers need of a call on a node.
type Node struct {
	Dir   *state.Dir
	Links *bridge.Conn
	// LeaseDir is where the lease that the host has by a NIC is on record. Where it is not
	// known, leases are left alone.
	LeaseDir string
	// Later is given what is to be done once the caller has no lock of the state any more: that of
	// a lease comes before it.
	Later func(func() error)
	// Made is called with a bridge that has just been made, before anything moves to it.
	Made func(context.Context, *bridge.Link)
}

// work is the work on one NIC, under its lock.
type work struct {
	node *Node
	conn *uplink.Conn
	file *state.UplinkFile
	rec  *uplink.Record // nil: it has not been taken
	// undone says that a takeover, or a return, was cut short and has just been brought
	// to its end, so that the NIC has all back.
	undone bool
}

// with does something with a NIC under its lock. It first finishes the work of a call that was killed, forward or
// back.
func (n *Node) with(ctx context.Context, nic string, do func(*work) error) error {
	lock, err := n.Dir.LockUplink(ctx, nic)
	if err != nil {
		return err
	}
	defer lock.Close()
	conn, err := uplink.Dial(&uplink.Config{Made: n.Made})
	if err != nil {
		return err
	}
	defer conn.Close()
	w := &work{node: n, conn: conn, file: n.Dir.Uplink(nic)}
	if w.rec, err = loadUplink(w.file); err != nil {
		return err
	}
	if w.rec != nil && w.rec.State != uplink.Taken {
		if w.rec, err = conn.Recover(ctx, w.rec, w.file); err != nil {
			return err
		}
		if w.undone = w.rec == nil; w.undone {
			n.disown(ctx, nic)
		}
	}
	return do(w)
}

// loadUplink reads the record of a takeover: nil where there is none in this epoch of
// the node.
func loadUplink(file *state.UplinkFile) (*uplink.Record, error) {
	data, err := file.Load()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, state.ErrStale) {
		return nil, nil
	}
	if err != nil {
		return nil, fail.State(err)
	}
	rec, err := uplink.ParseRecord(data)
	if err != nil {
		return nil, fail.State(err)
	}
	return rec, nil
}

// Ensure takes a NIC for its bridge, unless it is taken, and repairs parts that were undone. A bridge that the
// operator has put the NIC on needs nothing.
func (n *Node) Ensure(ctx context.Context, want uplink.Uplink) error {
	return n.with(ctx, want.NIC, func(w *work) error { return w.ensure(ctx, want) })
}

func (w *work) ensure(ctx context.Context, want uplink.Uplink) error {
	switch {
	case w.rec != nil && w.rec.Bridge != want.Bridge:
		return fail.Errorf(fail.ErrConflict, "uplink %s is a port of bridge %s already, and not of %s: name one bridge, or give it back first (tombolo uplink restore %s %s)",
			want.NIC, w.rec.Bridge, want.Bridge, want.NIC, w.rec.Bridge)
	case w.rec != nil:
		return w.mend(ctx, nil)
	}
	if on, err := w.node.onItsBridge(ctx, want); err != nil || on {
		return err
	}
	// An earlier takeover may have been undone by hand, and its lease still be the keeper's.
	w.node.disown(ctx, want.NIC)
	id, proven, err := w.node.prove(ctx, want)
	if err != nil {
		return err
	}
	want.ClientID = id
	if w.rec, err = w.conn.Take(ctx, want, w.file); err != nil {
		return err
	}
	w.node.adopt(ctx, w.rec, proven)
	return nil
}

func noLink(nic string) error {
	return fail.Errorf(fail.ErrNoLink, "uplink %s: the host has no such link (ip link shows those that there are)", nic)
}

// onItsBridge says whether the operator has made the NIC a port of the bridge.
func (n *Node) onItsBridge(ctx context.Context, want uplink.Uplink) (bool, error) {
	nic, err := n.Links.Link(ctx, want.NIC)
	if errors.Is(err, fs.ErrNotExist) {
		return false, noLink(want.NIC)
	}
	if err != nil {
		return false, err
	}
	l, err := n.Links.Link(ctx, want.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && l.Kind == "bridge" && nic.Master == l.Index, err
}

// mend repairs parts of the takeover that were undone, and has the record say what the host has by now: what it had
// before is not put back. Other addresses than those that pods follow are left to the keeper, if there is one: by
// the record it sees that pods have to follow them.
func (w *work) mend(ctx context.Context, followed []netip.Prefix) error {
	if _, err := w.conn.Mend(ctx, w.rec, w.file); err != nil {
		return err
	}
	_, now, err := w.conn.Check(ctx, w.rec)
	if err != nil {
		return err
	}
	hosts := now.HostAddresses()
	if slices.Equal(hosts, w.rec.HostAddresses()) || slices.Equal(hosts, followed) || !w.node.isKept() {
		if err := now.Save(w.file); err != nil {
			return err
		}
	}
	w.node.adopt(ctx, now, nil)
	return nil
}

// isKept says that a keeper looks after uplinks, or that this is not known: an operator's command does not know the
// leases' directory, and the keeper itself calls without it.
func (n *Node) isKept() bool {
	if n.LeaseDir == "" {
		return true
	}
	dir, err := lease.Open(n.LeaseDir)
	return err == nil && dir.CheckKeeper() == nil
}

// adopt makes the keeper responsible for the lease that the host has by the NIC, if it has one: its own client
// hears nothing there any more. Pods need not wait for that, so STATUS, CHECK and the operator's commands report
// failures.
func (n *Node) adopt(ctx context.Context, rec *uplink.Record, proven *dhcpc.Lease) {
	if n.LeaseDir != "" && rec.ClientID != "" {
		n.Later(func() error { return n.adoptLease(ctx, rec, proven) })
	}
}

func (n *Node) adoptLease(ctx context.Context, rec *uplink.Record, proven *dhcpc.Lease) error {
	dir, err := lease.Open(n.LeaseDir)
	if err != nil {
		return err
	}
	mac, err := net.ParseMAC(rec.Before.NIC.MAC)
	if err != nil {
		return err
	}
	return lease.Adopt(ctx, dir, &lease.Adoption{
		NIC: rec.NIC, MAC: mac, ClientID: rec.ClientID, Lease: proven, Bridge: rec.Bridge, Addresses: rec.Before.Addresses, Priority: priority(rec),
		Wanted: func() (bool, error) {
			now, err := loadUplink(n.Dir.Uplink(rec.NIC))
			return now != nil && now.State == uplink.Taken && now.Bridge == rec.Bridge, err
		},
	})
}

// priority is the metric of the default route that the host had by the NIC.
func priority(rec *uplink.Record) int {
	for _, r := range rec.Before.Routes {
		if r.Table == unix.RT_TABLE_MAIN && r.Gateway.Is4() && r.Dst.Bits() <= 0 {
			return int(r.Priority)
		}
	}
	return 0
}

// disown ends the keeper's part in the lease that the host had by a NIC which has been given back.
func (n *Node) disown(ctx context.Context, nic string) {
	if n.LeaseDir == "" {
		return
	}
	n.Later(func() error {
		dir, err := lease.Open(n.LeaseDir)
		if err != nil {
			return err
		}
		return lease.HandBack(ctx, dir, nic)
	})
}

// LeaseTrouble tells what is wrong with the leases that the host has by uplinks.
func LeaseTrouble(leaseDir string) []string {
	dir, err := lease.Open(leaseDir)
	if err != nil {
		return nil
	}
	found, err := lease.HostTrouble(dir)
	if err != nil {
		return []string{err.Error()}
	}
	return found
}

// Mend repairs parts of a takeover on record that were undone. The keeper names the host's addresses that pods
// follow.
func (n *Node) Mend(ctx context.Context, nic string, followed []netip.Prefix) error {
	return n.with(ctx, nic, func(w *work) error {
		if w.rec == nil {
			return nil // given back, or the operator's own bridge
		}
		return w.mend(ctx, followed)
	})
}

// Look compares a NIC that is taken over with its record, and gives the differences, and the record as it would be
// now. nil: the NIC is not taken over. It takes no lock: a keeper may be at work.
func (n *Node) Look(ctx context.Context, nic string) (rec, now *uplink.Record, _ []tombolo.Difference, _ error) {
	rec, err := loadUplink(n.Dir.Uplink(nic))
	if rec == nil {
		return nil, nil, nil, err
	}
	if rec.State != uplink.Taken {
		return rec, rec, say(tombolo.RemedyRepair, "the takeover of uplink %s was cut short (%s): the next ADD, or tombolo uplink restore, finishes it", nic, rec.State), nil
	}
	conn, err := uplink.Dial(nil)
	if err != nil {
		return rec, nil, nil, err
	}
	defer conn.Close()
	diffs, now, err := conn.Check(ctx, rec)
	return rec, now, diffs, err
}

// Differences finds what of a takeover is not as it was made. A NIC that was not taken over in this
// epoch has to be a port of the bridge, if one is named.
func (n *Node) Differences(ctx context.Context, nic, bridgeName string) ([]tombolo.Difference, error) {
	if nic == "" {
		return nil, nil
	}
	rec, _, diffs, err := n.Look(ctx, nic)
	switch {
	case rec != nil:
		return diffs, err
	case err != nil:
		return say(tombolo.RemedyConfigure, "%v", err), nil
	case bridgeName == "":
		return nil, nil
	}
	if _, err := n.Links.Link(ctx, bridgeName); errors.Is(err, fs.ErrNotExist) {
		return nil, nil // said already
	}
	on, err := n.onItsBridge(ctx, uplink.Uplink{NIC: nic, Bridge: bridgeName})
	if on || err != nil && !errors.Is(err, fail.ErrNoLink) {
		return nil, err
	}
	return say(tombolo.RemedyConfigure, "uplink %s is not a port of bridge %s", nic, bridgeName), nil
}

func say(remedy tombolo.Remedy, format string, args ...any) []tombolo.Difference {
	return []tombolo.Difference{{Text: fmt.Sprintf(format, args...), Remedy: remedy}}
}

// GiveBack gives a NIC back, if it has been taken over.
func (n *Node) GiveBack(ctx context.Context, nic string) error {
	return n.with(ctx, nic, func(w *work) error {
		if w.rec == nil {
			return nil
		}
		return w.giveBack(ctx)
	})
}

// giveBack restores the NIC, whose own client then hears again. Where that fails, the bridge has the
// address still, and the keeper goes on renewing it.
func (w *work) giveBack(ctx context.Context) error {
	err := w.conn.Restore(ctx, w.rec, w.file)
	if err == nil {
		w.node.disown(ctx, w.rec.NIC)
	}
	return err
}

// Restore gives a NIC back for the operator, who may name a bridge, to be sure that it is the
// one that is meant.
func (n *Node) Restore(ctx context.Context, nic, bridgeName string) error {
	return n.with(ctx, nic, func(w *work) error {
		switch {
		case w.undone:
			return nil
		case w.rec == nil:
			return fail.Errorf(fail.ErrConflict, "uplink %s has not been taken over: there is nothing to give back", nic)
		case bridgeName != "" && bridgeName != w.rec.Bridge:
			return fail.Errorf(fail.ErrConflict, "uplink %s is a port of bridge %s, not of %s", nic, w.rec.Bridge, bridgeName)
		}
		if err := w.giveBack(ctx); err != nil {
			return err
		}
		return w.allBack(ctx)
	})
}

// allBack says which addresses of the host's are not back that no lease or router gave: they were
// on the bridge no more.
func (w *work) allBack(ctx context.Context) error {
	nic, err := w.node.Links.Link(ctx, w.rec.NIC)
	if err != nil {
		return err
	}
	has, err := w.node.Links.Addresses().List(ctx, addr.Filter{Link: nic.Index})
	if err != nil {
		return err
	}
	var lost, commands []string
	for _, a := range w.rec.Before.Addresses {
		isBack := slices.ContainsFunc(has, func(b addr.Address) bool { return b.Prefix == a.Prefix })
		if a.Valid == nil && !a.Prefix.Addr().IsLinkLocalUnicast() && !isBack {
			lost = append(lost, a.Prefix.String())
			commands = append(commands, fmt.Sprintf("ip address add %s dev %s", a.Prefix, nic.Name))
		}
	}
	if len(lost) == 0 {
		return nil
	}
	return fail.Errorf(fail.ErrConflict, "uplink %s is given back, but without %s: that was deleted from bridge %s, with its routes. If it is to be back: %s",
		w.rec.NIC, strings.Join(lost, " and "), w.rec.Bridge, strings.Join(commands, " && "))
}

// Plan gives the steps by which a NIC would be taken over, if a server confirms the host's lease as it
// has to then. Nothing is changed.
func (n *Node) Plan(ctx context.Context, want uplink.Uplink) (*uplink.Steps, error) {
	steps, err := plan(ctx, want)
	if err == nil {
		_, _, err = n.prove(ctx, want)
	}
	return steps, err
}

func plan(ctx context.Context, want uplink.Uplink) (*uplink.Steps, error) {
	conn, err := uplink.Dial(nil)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	steps, err := conn.Plan(ctx, want)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, noLink(want.NIC)
	}
	return steps, err
}

// Ready says what keeps a NIC from being an uplink, or what became of one that is. It is nil where the
// operator has made it a port of the bridge.
func (n *Node) Ready(ctx context.Context, want uplink.Uplink) error {
	rec, _, diffs, err := n.Look(ctx, want.NIC)
	if err != nil {
		return err
	}
	if rec == nil {
		if on, err := n.onItsBridge(ctx, want); err != nil || on {
			return err
		}
		_, err := plan(ctx, want)
		return err
	}
	if list := append(printable.Texts(diffs), LeaseTrouble(n.LeaseDir)...); len(list) > 0 {
		return fmt.Errorf("uplink %s: %s", want.NIC, strings.Join(list, "; "))
	}
	return nil
}

// IsTaken says whether a NIC has been taken over, wholly or in part.
func (n *Node) IsTaken(nic string) (bool, error) {
	rec, err := loadUplink(n.Dir.Uplink(nic))
	return rec != nil, err
}
