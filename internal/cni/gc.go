package cni

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/ipam"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// gc carries out GC: it frees what this network owns and no valid attachment
// claims. Without a list it does nothing: a runtime that names none may have
// lost it. An empty list is one: then every attachment goes.
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
	if err := h.enter(ctx); err != nil {
		return err
	}
	if err := h.lock.Upgrade(ctx); err != nil {
		return err
	}
	var owners []ipam.Owner
	valid := map[string]bool{}
	for _, a := range list {
		owners = append(owners, ipam.Owner{ContainerID: a.ContainerID, IfName: a.IfName})
		valid[ident.Hash(c.network, a.ContainerID, a.IfName)] = true
	}
	return errors.Join(
		h.collect(ctx, conf, valid),
		h.collectReservations(ctx, conf, owners),
		h.lock.Clean(),
	)
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

// collect takes down every attachment that is not valid: those on record, and
// those which the kernel alone knows of.
func (h *host) collect(ctx context.Context, conf *NetConf, valid map[string]bool) error {
	victims, err := h.attachments(ctx)
	errs := []error{err}
	var gone []*state.Attachment
	for hash, v := range victims {
		if valid[hash] {
			continue
		}
		gone = append(gone, v.rec)
		if v.leaseDir == "" {
			v.leaseDir = h.leaseDir(conf, v.rec)
		}
		v.release = func(addresses []netip.Addr) error { return h.releaseFor(ctx, conf, v.rec, addresses) }
		errs = append(errs, h.takeDown(ctx, v))
	}
	return errors.Join(append(errs, h.closeLoopbackAfter(ctx, gone...))...)
}

// attachments finds all attachments of the call's network, by their short names.
func (h *host) attachments(ctx context.Context) (map[string]*victim, error) {
	all := map[string]*victim{}
	at := func(hash string) *victim {
		if all[hash] == nil {
			all[hash] = &victim{hash: hash, port: "veth" + hash}
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
	leases, err := h.leases()
	errs = append(errs, err)
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

// releaseFor gives back what an attachment on record has from a plugin of its
// own; what is reserved in process, collectReservations sees to.
func (h *host) releaseFor(ctx context.Context, conf *NetConf, rec *state.Attachment, addresses []netip.Addr) error {
	if rec == nil {
		return nil
	}
	c := *h.call
	c.containerID, c.ifName, c.netns = rec.ContainerID, rec.IfName, ""
	one := *h
	one.call = &c
	return one.release(ctx, conf, rec, addresses)
}

func (h *host) collectReservations(ctx context.Context, conf *NetConf, valid []ipam.Owner) error {
	if conf.ipamType() == ipamDHCP {
		return nil // leases are attachments like others
	}
	allocator, err := ipam.New(h.ipamRequest(false))
	if err != nil {
		return err
	}
	return allocator.GC(ctx, valid)
}
