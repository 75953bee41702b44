package cni

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// collectWait is what GC gives one attachment, so that one that cannot be had leaves time
// for the others.
const collectWait = 10 * time.Second

// gc carries out GC: it frees what this network owns and no valid attachment
// claims. Without a list it does nothing: a runtime that names none may have
// lost it. An empty list is one: then every attachment goes.
//
// What there is gets listed first, and goes one by one, so that other calls get their turn
// in between; each is looked at again under its own lock.
func (c *call) gc(ctx context.Context, conf *NetConf) error {
	list, err := conf.validAttachments()
	if err != nil || list == nil {
		return err
	}
	h, err := c.openHost(conf.settings())
	if err != nil {
		return err
	}
	defer h.Close()
	var owners []ipam.Owner
	valid := map[string]bool{}
	for _, a := range list {
		owners = append(owners, ipam.Owner{ContainerID: a.ContainerID, IfName: a.IfName})
		valid[ident.Hash(c.network, a.ContainerID, a.IfName)] = true
	}
	found, err := h.listAttachments(ctx)
	errs := []error{err}
	var gone []*state.Attachment
	for hash, r := range found {
		if !valid[hash] {
			errs = append(errs, h.collect(ctx, conf, r))
			gone = append(gone, r.rec)
		}
	}
	errs = append(errs, h.closeLoopbackAfter(ctx, gone...))
	h.leave()
	return errors.Join(append(errs,
		h.collectReservations(ctx, conf, owners),
		h.clean(ctx),
	)...)
}

// clean removes what crashes left of files that were being written.
func (h *host) clean(ctx context.Context) error {
	if err := h.enterAlone(ctx); err != nil {
		return err
	}
	defer h.leave()
	return h.lock.Clean()
}

// validAttachments is nil where the runtime gave no list. One that cannot be read
// as a whole is an error, unlike anything else that teardown is given: whatever is
// not on the list gets deleted.
func (c *NetConf) validAttachments() ([]types.GCAttachment, error) {
	var list []types.GCAttachment
	if len(c.ValidAttachments) == 0 {
		return nil, nil
	}
	if err := json.Unmarshal(c.ValidAttachments, &list); err != nil {
		return nil, newError(codeDecoding, "cni.dev/valid-attachments: %v", err)
	}
	for i, a := range list {
		if a.ContainerID == "" || a.IfName == "" {
			return nil, newError(codeDecoding, "cni.dev/valid-attachments[%d] lacks its containerID or its ifname", i)
		}
	}
	return list, nil
}

// collect takes down one attachment that is not valid, if it is still what was listed. One
// whose ADD or DEL is at work is not garbage, nor is one whose ADD came since.
func (h *host) collect(ctx context.Context, conf *NetConf, r *remains) error {
	lock, err := h.dir.LockAttachment(h.call.network, r.hash)
	switch {
	case errors.Is(err, state.ErrBusy):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		r.rec, r.unrecorded = nil, true
	case err != nil:
		h.call.log.warn(err.Error()) // of a record that is no file
	default:
		defer lock.Close()
		now, err := h.dir.Load(h.call.network, r.hash)
		if err == nil && (r.rec == nil || !r.rec.Created.Equal(now.Created)) {
			return nil
		}
		if r.rec = now; err == nil {
			r.addresses, r.containerID, r.ifName = addressesOf(now), now.ContainerID, now.IfName
			r.unfinished = now.State == state.Adding
		}
	}
	if r.leaseDir == "" {
		r.leaseDir = h.leaseDir(conf, r.rec)
	}
	// The keeper has a lease's lock for as long as the disk takes.
	ctx, cancel := context.WithTimeout(ctx, collectWait)
	defer cancel()
	return h.takeDown(ctx, conf, r)
}

// listAttachments finds all attachments of the network.
func (h *host) listAttachments(ctx context.Context) (map[string]*remains, error) {
	leases, err := h.leases()
	if enterErr := h.enter(ctx); enterErr != nil {
		return nil, errors.Join(err, enterErr)
	}
	defer h.leave()
	found, listErr := h.attachments(ctx, leases)
	return found, errors.Join(err, listErr)
}

// attachments finds all attachments of the call's network, by their short names. Leases are
// on a disk, and listed before.
func (h *host) attachments(ctx context.Context, leases []*lease.Record) (map[string]*remains, error) {
	all := map[string]*remains{}
	at := func(hash string) *remains {
		if all[hash] == nil {
			all[hash] = &remains{hash: hash, port: "veth" + hash}
		}
		return all[hash]
	}
	var errs []error
	records, damaged, err := h.dir.List(h.call.network)
	errs = append(errs, err)
	for _, rec := range records {
		v := at(rec.Hash())
		v.rec, v.addresses = rec, addressesOf(rec)
	}
	for _, d := range damaged {
		h.call.log.warn(d.Error())
		if d.Hash != "" {
			at(d.Hash)
		}
	}
	links, err := h.br.Veths(ctx)
	errs = append(errs, err)
	for i := range links {
		if a, ok := parseAlias(links[i].Alias); ok && a.network == networkToken(h.call.network) {
			if v := at(a.hash); v.rec == nil {
				v.addresses = a.addresses
			}
		}
	}
	endpoints, err := h.fw.Endpoints(ctx, h.call.network)
	errs = append(errs, err)
	for _, e := range endpoints {
		if v := at(string(e.Owner)); v.rec == nil && v.addresses == nil {
			v.addresses = e.Addrs
		}
	}
	for _, l := range leases {
		at(l.Hash()).leaseDir = h.settings.LeaseDir
	}
	ifbs, err := listIFBs(ctx)
	errs = append(errs, err)
	for _, a := range ifbs {
		if a.network == networkToken(h.call.network) {
			at(a.hash)
		}
	}
	return all, errors.Join(errs...)
}

// collectReservations gives back what no valid attachment has reserved, and none on record:
// one may be under way, or have come since the runtime made its list.
func (h *host) collectReservations(ctx context.Context, conf *NetConf, valid []ipam.Owner) error {
	if conf.ipamType() == ipamDHCP {
		return nil // leases are attachments like others
	}
	if err := h.enter(ctx); err != nil {
		return err
	}
	defer h.leave()
	allocator, err := ipamconf.New(h.ipamRequest(false))
	if err != nil {
		return err
	}
	if allocator.Slow() {
		h.leave()
	}
	return allocator.Bind(h.ipamNode()).Collect(ctx, valid)
}
