package network

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// collectWait is what GC gives one attachment, so that one that cannot be had leaves time
// for the others.
const collectWait = 10 * time.Second

// Collect takes down all attachments of the network that keep does not name, and gives those
// that went, as far as they have names.
func (t *teardown) Collect(ctx context.Context, keep []ipam.Owner) ([]ipam.Owner, error) {
	began := time.Now()
	valid := map[string]bool{}
	for _, o := range keep {
		valid[ident.Hash(t.Network, o.ContainerID, o.IfName)] = true
	}
	found, err := listAttachments(ctx, t.Session, t.Network)
	errs := []error{err}
	var gone []*state.Attachment
	var owners []ipam.Owner
	for hash, r := range found {
		if valid[hash] {
			continue
		}
		errs = append(errs, t.collect(ctx, r, began))
		gone = append(gone, r.rec)
		if r.rec != nil {
			owners = append(owners, ipam.Owner{ContainerID: r.rec.ContainerID, IfName: r.rec.IfName})
		}
	}
	errs = append(errs, closeLoopbackAfter(ctx, t.Session, t.Known, gone...))
	t.Session.Leave()
	return owners, errors.Join(append(errs, t.collectReservations(ctx, keep))...)
}

// collect takes down one attachment that is not valid, if it is still what was listed. One
// whose ADD or DEL is at work is not garbage, nor is one whose ADD came since. A record that
// could not be read for the list, and now can, came since only if it was made since.
func (t *teardown) collect(ctx context.Context, r *remains, began time.Time) error {
	now := *r
	lock, err := t.Session.Dir.LockAttachment(t.Network, r.hash)
	switch {
	case errors.Is(err, state.ErrBusy):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		now.rec, now.unrecorded = nil, true
	case err != nil:
		t.Session.Warn(err.Error()) // of a record that is no file
	default:
		defer lock.Close()
		rec, err := t.Session.Dir.Load(t.Network, r.hash)
		switch {
		case err != nil:
		case r.unread && rec.Created.Before(began):
		case r.rec == nil || !r.rec.Created.Equal(rec.Created):
			return nil
		}
		if now.rec = rec; err == nil {
			now.addresses, now.owner = endpoint.Addresses(rec), ipam.Owner{ContainerID: rec.ContainerID, IfName: rec.IfName}
		}
	}
	if now.leaseDir == "" {
		now.leaseDir = t.leaseDir(now.rec)
	}
	// The keeper has a lease's lock for as long as the disk takes.
	ctx, cancel := context.WithTimeout(ctx, collectWait)
	defer cancel()
	return t.takeDown(ctx, &now)
}

// listAttachments finds all attachments of a network.
func listAttachments(ctx context.Context, s *session, network string) (map[string]*remains, error) {
	leases, err := leasesOf(s, network)
	if enterErr := s.Enter(ctx); enterErr != nil {
		return nil, errors.Join(err, enterErr)
	}
	defer s.Leave()
	found, listErr := allAttachments(ctx, s, network, leases)
	return found, errors.Join(err, listErr)
}

// attachments finds all attachments of a network, by their short names. Leases are
// on a disk, and listed before.
func allAttachments(ctx context.Context, s *session, network string, leases []*lease.Record) (map[string]*remains, error) {
	all := map[string]*remains{}
	at := func(hash string) *remains {
		if all[hash] == nil {
			all[hash] = &remains{hash: hash}
		}
		return all[hash]
	}
	var errs []error
	records, damaged, err := s.Dir.List(network)
	errs = append(errs, err)
	for _, rec := range records {
		v := at(rec.Hash())
		v.rec, v.addresses = rec, endpoint.Addresses(rec)
	}
	for _, d := range damaged {
		s.Warn(d.Error())
		if d.Hash != "" {
			at(d.Hash).unread = true
		}
	}
	links, err := s.Links.Veths(ctx)
	errs = append(errs, err)
	for i := range links {
		if a, ok := endpoint.ParseAlias(links[i].Alias); ok && a.Network == endpoint.NetworkToken(network) {
			if v := at(a.Hash); v.rec == nil {
				v.addresses = a.Addresses
			}
		}
	}
	endpoints, err := s.Firewall.Endpoints(ctx, network)
	errs = append(errs, err)
	for _, e := range endpoints {
		if !ident.IsHash(string(e.Owner)) {
			continue // another program's
		}
		if v := at(string(e.Owner)); v.rec == nil && v.addresses == nil {
			v.addresses = e.Addrs
		}
	}
	for _, l := range leases {
		at(l.Hash()).leaseDir = s.LeaseDir
	}
	ifbs, err := s.IFBs(ctx)
	errs = append(errs, err)
	for _, a := range ifbs {
		if a.Network == endpoint.NetworkToken(network) {
			at(a.Hash)
		}
	}
	return all, errors.Join(errs...)
}
