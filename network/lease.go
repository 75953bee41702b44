package network

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// leasePart is the part of a pod with its DHCP lease. The lease's record is in a separate directory that outlasts the
// node's state. The keeper renews the lease.
type leasePart struct{}

// mend updates an attachment to its lease. If the server has assigned another address since the Add, the keeper has
// changed the address inside the pod. mend then changes everything outside the pod that depends on the address.
func (leasePart) mend(ctx context.Context, p *podSite) error {
	rec, err := newerLease(p.Attachment)
	if rec == nil || err != nil {
		return nil // Check reports faults of a lease
	}
	if err := p.s.follow(ctx, p.Attachment, p.nw, rec); !errors.Is(err, state.ErrBusy) {
		return err
	}
	return nil // A Del that holds the record removes the elements by the present record.
}

// configureLease configures the pod for its lease.
func configureLease(ctx context.Context, pod *netns.NS, rec *lease.Record, link *bridge.Attachment) error {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return err
	}
	defer conn.Close()
	a, remaining := rec.Applied, rec.Lease.Left(time.Now())
	if a.MTU >= link.MTU {
		a.MTU = 0
	}

	at := &lease.Interface{Conn: conn, Index: link.PeerIndex, Name: rec.IfName, Priority: rec.Policy.Priority}

	// Add the routes without NLM_F_EXCL, as bridge.Attach does, since another interface may have a route to the same
	// destination.
	add := func(_ context.Context, _ *route.Conn, r route.Route) error {
		var b nl.Batch
		m, err := r.Message(unix.RTM_NEWROUTE, netlink.Create)
		b.Add("add route", &r, m, err)
		return conn.Execute(&b)
	}
	return at.Apply(ctx, a, remaining, remaining, add)
}

// leaseLockWait limits the wait for the lock of a lease's record. The keeper never holds the lock that long.
const leaseLockWait = 5 * time.Second

func lockLease(ctx context.Context, a *state.Attachment) (*lease.LockedRecord, error) {
	dir, err := lease.Open(a.DataDir)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, leaseLockWait)
	defer cancel()
	return dir.Lock(ctx, a.Hash())
}

// look compares an attachment with the record of its lease. For a lease that has ended or failed, it recommends no
// repair, since that is the keeper's task.
func (leasePart) look(_ context.Context, p *podSite) error {
	if p.IPAMType != endpoint.Leased {
		return nil
	}

	p.s.leave() // release the lock first: leases are on a disk
	dir, err := lease.Open(p.DataDir)
	if err != nil {
		return err
	}

	remedy := tombolo.RemedyConfigure
	if err := dir.CheckKeeper(); err != nil && !p.keeperOptional {
		remedy = tombolo.RemedyKeeper
		p.found.advise(remedy, "%v", err)
	}

	rec, err := dir.Load(p.Hash())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		p.found.advise(tombolo.RemedyRecreate, "its lease has no record in %s", dir.Path())
		return nil
	case err != nil:
		p.found.advise(tombolo.RemedyRecreate, "%v", err)
		return nil
	case rec.State != lease.Bound:
		p.found.advise(remedy, "its lease is %s: %s", rec.State, rec.Error)
	case len(p.Addresses) == 0 || rec.Lease.Address != p.Addresses[0].Prefix:
		p.found.advise(tombolo.RemedyRepair, "its lease is of %s", rec.Lease.Address)
	case rec.Lease.Left(time.Now()) == 0:
		p.found.advise(remedy, "its lease of %s ended at %s", rec.Lease.Address, rec.Lease.Expire.Format(time.RFC3339))
	}

	p.lookAt6(rec, remedy)
	return nil
}

// leasesOf lists the records of the network's leases. It skips sticky records, whose leases wait for their pod to
// come back.
func leasesOf(s *session, network string) ([]*lease.Record, error) {
	if s.LeaseDir == "" {
		return nil, nil // without a lease directory, leave leases out
	}

	dir, err := lease.Open(s.LeaseDir)
	if err != nil {
		return nil, err
	}

	all, damaged, err := dir.List()
	for _, d := range damaged {
		s.warn(d.Error())
	}

	return slices.DeleteFunc(all, func(r *lease.Record) bool {
		return r.Network != network || r.State == lease.Sticky
	}), err
}

// leaseDir returns the directory with the record of an attachment's lease, or "" if the attachment has no lease. It
// uses the directory in rec. If rec is nil or contains no directory, it uses the session's directory, provided that
// the caller passed Known.Leased.
func (t *teardown) leaseDir(rec *state.Attachment) string {
	switch {
	case rec != nil && rec.IPAMType == endpoint.Leased && filepath.IsAbs(rec.DataDir):
		return rec.DataDir
	case t.Known.Leased && (rec == nil || rec.IPAMType == endpoint.Leased):
		return t.Session.LeaseDir
	}
	return ""
}
