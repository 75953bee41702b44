package network

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// collectWait is what GC gives one attachment, so that one that cannot be had leaves time
// for the others.
const collectWait = 10 * time.Second

// Collect takes down all attachments of a network that are not in keep, by the records, the
// leases, and what the kernel has, and gives back what no attachment has reserved. It gives
// those that went, as far as they have names. What is at work, or came since, is left alone.
// known may be nil.
//
// What there is gets listed first, and goes one by one, so that other calls get their turn
// in between; each is looked at again under its own lock.
func (n *Node) Collect(ctx context.Context, network string, keep []Key, known *Known) ([]Key, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	if err := checkName(network); err != nil {
		return nil, err
	}
	began := time.Now()
	s, err := n.open(n.mark)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	t := &teardown{node: n, s: s, network: network}
	if known != nil {
		t.known = *known
	}
	var owners []ipam.Owner
	valid := map[string]bool{}
	for _, key := range keep {
		key.Network = network
		owners = append(owners, ipam.Owner{ContainerID: key.ContainerID, IfName: key.IfName})
		valid[key.hash()] = true
	}
	found, err := s.listAttachments(ctx, network)
	errs := []error{err}
	var gone []*state.Attachment
	var keys []Key
	for hash, r := range found {
		if valid[hash] {
			continue
		}
		errs = append(errs, t.collect(ctx, r, began))
		gone = append(gone, r.rec)
		if r.rec != nil {
			keys = append(keys, Key{network, r.rec.ContainerID, r.rec.IfName})
		}
	}
	errs = append(errs, s.closeLoopbackAfter(ctx, t.known.Bridge, gone...))
	s.leave()
	return keys, errors.Join(append(errs,
		t.collectReservations(ctx, owners),
		s.clean(ctx),
	)...)
}

// clean removes what crashes left of files that were being written.
func (s *session) clean(ctx context.Context) error {
	if err := s.enterAlone(ctx); err != nil {
		return err
	}
	defer s.leave()
	return s.lock.Clean()
}

// collect takes down one attachment that is not valid, if it is still what was listed. One
// whose ADD or DEL is at work is not garbage, nor is one whose ADD came since. A record that
// could not be read for the list, and now can, came since only if it was made since.
func (t *teardown) collect(ctx context.Context, r *remains, began time.Time) error {
	now := *r
	lock, err := t.s.dir.LockAttachment(t.network, r.hash)
	switch {
	case errors.Is(err, state.ErrBusy):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		now.rec, now.unrecorded = nil, true
	case err != nil:
		t.s.warn(err.Error()) // of a record that is no file
	default:
		defer lock.Close()
		rec, err := t.s.dir.Load(t.network, r.hash)
		switch {
		case err != nil:
		case r.unread && rec.Created.Before(began):
		case r.rec == nil || !r.rec.Created.Equal(rec.Created):
			return nil
		}
		if now.rec = rec; err == nil {
			now.addresses, now.owner = endpoint.Addresses(rec), ipam.Owner{ContainerID: rec.ContainerID, IfName: rec.IfName}
			now.unfinished = rec.State == state.Adding
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
func (s *session) listAttachments(ctx context.Context, network string) (map[string]*remains, error) {
	leases, err := s.leases(network)
	if enterErr := s.enter(ctx); enterErr != nil {
		return nil, errors.Join(err, enterErr)
	}
	defer s.leave()
	found, listErr := s.attachments(ctx, network, leases)
	return found, errors.Join(err, listErr)
}

// attachments finds all attachments of a network, by their short names. Leases are
// on a disk, and listed before.
func (s *session) attachments(ctx context.Context, network string, leases []*lease.Record) (map[string]*remains, error) {
	all := map[string]*remains{}
	at := func(hash string) *remains {
		if all[hash] == nil {
			all[hash] = &remains{hash: hash, port: "veth" + hash}
		}
		return all[hash]
	}
	var errs []error
	records, damaged, err := s.dir.List(network)
	errs = append(errs, err)
	for _, rec := range records {
		v := at(rec.Hash())
		v.rec, v.addresses = rec, endpoint.Addresses(rec)
	}
	for _, d := range damaged {
		s.warn(d.Error())
		if d.Hash != "" {
			at(d.Hash).unread = true
		}
	}
	links, err := s.br.Veths(ctx)
	errs = append(errs, err)
	for i := range links {
		if a, ok := endpoint.ParseAlias(links[i].Alias); ok && a.Network == endpoint.NetworkToken(network) {
			if v := at(a.Hash); v.rec == nil {
				v.addresses = a.Addresses
			}
		}
	}
	endpoints, err := s.fw.Endpoints(ctx, network)
	errs = append(errs, err)
	for _, e := range endpoints {
		if v := at(string(e.Owner)); v.rec == nil && v.addresses == nil {
			v.addresses = e.Addrs
		}
	}
	for _, l := range leases {
		at(l.Hash()).leaseDir = s.leaseDir
	}
	ifbs, err := listIFBs(ctx)
	errs = append(errs, err)
	for _, a := range ifbs {
		if a.Network == endpoint.NetworkToken(network) {
			at(a.Hash)
		}
	}
	return all, errors.Join(errs...)
}

// collectReservations gives back what no valid attachment has reserved, and none on record:
// one may be under way, or have come since the caller made its list.
func (t *teardown) collectReservations(ctx context.Context, valid []ipam.Owner) error {
	if t.known.Leased {
		return nil // leases are attachments like others
	}
	if err := t.s.enter(ctx); err != nil {
		return err
	}
	defer t.s.leave()
	allocator, err := t.node.allocator(t.network, nil)
	if err != nil || allocator == nil {
		return err
	}
	allocator = allocator.Bind(t.s.ipamNode(t.network))
	if allocator.Slow() {
		t.s.leave()
	}
	return allocator.Collect(ctx, valid)
}

// leases lists the network's, but for those that only wait for their pod to come back.
func (s *session) leases(network string) ([]*lease.Record, error) {
	if s.leaseDir == "" {
		return nil, nil // an operator's command
	}
	dir, err := lease.Open(s.leaseDir)
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
