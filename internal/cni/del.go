package cni

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// del carries out DEL. It needs neither the pod's namespace nor a result: the
// port's name follows from the call, and who it belongs to from its alias. What
// is gone already is success; what fails does not keep the rest from being done.
func (c *call) del(ctx context.Context, conf *NetConf) error {
	h, err := c.openHost(conf.settings())
	if err != nil {
		return err
	}
	defer h.Close()
	lock, err := h.dir.LockAttachment(c.network, c.hash())
	if err == nil {
		defer lock.Close()
	}
	remains := h.ownRemains(ctx, conf)
	remains.unlocked = errors.Is(err, state.ErrBusy)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
	case errors.Is(err, state.ErrBusy) && remains.rec != nil && remains.rec.State == state.Adding:
		// An ADD is at work, which ends when it finds its record gone, and undoes what it
		// makes after this.
		if err := h.forget(ctx, c.hash()); err != nil {
			return err
		}
	case !errors.Is(err, state.ErrBusy): // another DEL does the same
		c.log.warn(err.Error())
	}
	if err := h.takeDown(ctx, conf, remains); err != nil {
		return err
	}
	return h.closeLoopbackAfter(ctx, remains.rec)
}

// remains is an attachment that is to go.
type remains struct {
	hash        string
	port        string
	containerID string // empty if it is not known
	ifName      string
	rec         *state.Attachment // nil if it has no record
	addresses   []netip.Addr      // nil if they are not known
	leaseDir    string            // where its lease is on record; empty if it has none
	// unrecorded says that the attachment had no record to lock: so that no ADD of it
	// begins meanwhile, all others are kept away.
	unrecorded bool
	// unfinished says that its ADD never came to its end, as the free lock of its record
	// tells. An ADD of an earlier version, which locks no record, has the state's lock: all
	// others are kept away here, too.
	unfinished bool
	unlocked   bool // it has a record, whose lock another has
}

// ownRemains is what there may be of the call's own attachment.
func (h *host) ownRemains(ctx context.Context, conf *NetConf) *remains {
	rec, err := h.dir.Load(h.call.network, h.call.hash())
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			h.call.log.warn(err.Error())
		}
		rec = nil
	}
	return &remains{
		hash: h.call.hash(), port: h.call.hostName(), containerID: h.call.containerID, ifName: h.call.ifName,
		rec: rec, leaseDir: h.leaseDir(conf, rec), addresses: h.knownAddresses(ctx, conf, rec),
	}
}

// shapers are the links that shape the attachment's traffic. One without a record may have
// had limits.
func (r *remains) shapers() []string {
	if r.rec != nil && r.rec.State == state.Ready && r.rec.IFB == "" {
		return nil
	}
	return []string{bandwidth.IFBName(r.hash)}
}

// takeDown does every step. The address is given back after the link and the
// elements that use it are gone, and the record goes last, and only if all else
// did: it is what a later DEL or GC finds the rest by. What guards the pod goes when
// nothing passes its port any more.
//
// The caller has the record's lock, if there is a record, and no other: it is for takeDown
// to take them, in their order. Neither a disk nor a plugin is waited for with the state's.
func (h *host) takeDown(ctx context.Context, conf *NetConf, r *remains) error {
	// From the pod's own interface, while it is there.
	leaseErr := h.releaseLease(ctx, r.leaseDir, r.hash)
	if err := h.enter(ctx); err != nil {
		return errors.Join(leaseErr, err)
	}
	if r.unrecorded || r.unfinished {
		still, err := h.alone(ctx, r)
		if err != nil || !still {
			h.leave()
			return errors.Join(leaseErr, err)
		}
	}
	if r.unlocked {
		// The keeper may have moved it meanwhile.
		if now, err := h.dir.Load(h.call.network, r.hash); err == nil {
			r.rec, r.addresses = now, addressesOf(now)
		}
	}
	flushed := nothingToDo()
	err := joinSteps(
		func() error { return leaseErr },
		func() error { return h.unlist(ctx, r) },
		func() error { flushed = flushOwnFlows(ctx, r.rec); return nil },
		func() error { h.call.log.step("firewall"); return nil },
		func() error { return h.br.Detach(ctx, r.port, aliasOwner(r.hash), r.shapers()...) },
		func() error { return <-flushed },
		func() error { h.call.log.step("link"); return nil },
		func() error { return h.release(ctx, conf, r) },
		func() error { h.call.log.step("ipam"); return nil },
	)
	if err != nil {
		h.leave()
		return err
	}
	return h.forget(ctx, r.hash)
}

// alone keeps all others away from what has no record, or that of an ADD that never came to
// its end, and says whether it is so still.
func (h *host) alone(ctx context.Context, r *remains) (bool, error) {
	if err := h.lock.Upgrade(ctx); err != nil {
		return false, err
	}
	now, err := h.dir.Load(h.call.network, r.hash)
	if r.unrecorded || errors.Is(err, fs.ErrNotExist) {
		return r.unrecorded && errors.Is(err, fs.ErrNotExist), nil
	}
	return err != nil || now.State == state.Adding, nil
}

// forget removes an attachment's record, and gives the lock up.
func (h *host) forget(ctx context.Context, hash string) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	defer h.leave()
	if err := h.dir.Remove(h.call.network, hash); err != nil {
		return newError(codeIO, "%v", err)
	}
	return nil
}

// isKnown says whether the record tells all that the firewall's sets have of the attachment.
func (r *remains) isKnown() bool { return r.rec != nil && r.rec.State == state.Ready && !r.rec.Moving }

// unlist takes the attachment out of the firewall's sets. One that is guarded, or may be, is
// shut before: it would send what it likes until its port is gone. If that fails, the
// guard stays with the port.
func (h *host) unlist(ctx context.Context, r *remains) error {
	var err error
	if !r.isKnown() || r.rec.Guarded {
		err = h.br.Shut(ctx, r.port, aliasOwner(r.hash))
		if err != nil && !errors.Is(err, bridge.ErrForeign) {
			return err
		}
	}
	return errors.Join(err, h.removeElements(ctx, r.hash, r.rec))
}

// inBackground does a step beside others: the kernel mostly waits in it.
func inBackground(step func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- step() }()
	return done
}

func nothingToDo() <-chan error {
	done := make(chan error, 1)
	done <- nil
	return done
}

// knownAddresses looks for the attachment's addresses where they may be written
// down: its record, its port's alias, the result of its ADD. Nil means that none of
// them tells, and that it takes a search.
func (h *host) knownAddresses(ctx context.Context, conf *NetConf, rec *state.Attachment) []netip.Addr {
	if rec != nil && rec.State == state.Ready {
		return addressesOf(rec)
	}
	if l, err := h.br.Link(ctx, h.call.hostName()); err == nil {
		if a, ok := parseAlias(l.Alias); ok && a.hash == h.call.hash() && len(a.addresses) > 0 {
			return a.addresses
		}
	}
	prev, err := parsePrevResult(conf, h.call.cniVersion)
	if err != nil || prev == nil {
		return nil
	}
	return h.addressesIn(prev)
}

// addressesIn gives the addresses of a result that are this attachment's: those
// of the pod's interface. Nil if it is not among the interfaces.
func (h *host) addressesIn(prev *current.Result) []netip.Addr {
	var list []netip.Addr
	for _, ip := range prev.IPs {
		if ip.Interface != nil && prev.Interfaces[*ip.Interface].Name != h.call.ifName {
			continue
		}
		if p, ok := prefixOf(ip.Address); ok {
			list = append(list, p.Addr())
		}
	}
	return list
}

// release gives the addresses back to the IPAM: that of the record, should the
// configuration have changed since, or lost it. For a plugin it gives up the lock.
func (h *host) release(ctx context.Context, conf *NetConf, r *remains) error {
	if r.rec != nil && r.rec.IPAMType == ipamDHCP || r.rec == nil && conf.ipamType() == ipamDHCP {
		return nil // done, before the link went
	}
	if r.containerID == "" {
		return nil // no IPAM knows it by its short name
	}
	one := *h
	if r.containerID != h.call.containerID || r.ifName != h.call.ifName {
		c := *h.call
		c.containerID, c.ifName, c.netns = r.containerID, r.ifName, ""
		one.call = &c
	}
	req := one.ipamRequest(false)
	if r.rec != nil && (r.rec.IPAMType != conf.ipamType() || r.rec.DataDir != conf.dataDir()) {
		req.Stdin = recordedConfig(h.call.cniVersion, r.rec)
	}
	allocator, err := ipamconf.New(req)
	if err != nil {
		return err
	}
	if allocator.Slow() {
		h.leave()
	}
	return allocator.Bind(one.ipamNode()).Del(ctx, one.call.owner(), r.addresses)
}

// recordedConfig is a configuration with the IPAM by which an attachment got its
// addresses.
func recordedConfig(cniVersion string, rec *state.Attachment) []byte {
	ipamConf := map[string]string{}
	if rec.IPAMType != "" {
		ipamConf["type"] = rec.IPAMType
	}
	if rec.DataDir != "" {
		ipamConf["dataDir"] = rec.DataDir
	}
	// Marshalling strings cannot fail.
	data, _ := json.Marshal(map[string]any{"cniVersion": cniVersion, "name": rec.Network, "type": "tombolo", "ipam": ipamConf})
	return data
}
