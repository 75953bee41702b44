package cni

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"

	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/ipam"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/tc"
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
	if err := h.enter(ctx); err != nil {
		return err
	}
	rec, err := h.dir.Load(c.network, c.hash())
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			c.log.warn(err.Error())
		}
		rec = nil
	}
	err = h.takeDown(ctx, &victim{
		hash: c.hash(), port: c.hostName(), rec: rec, leaseDir: h.leaseDir(conf, rec),
		addresses: h.knownAddresses(ctx, conf, rec),
		release: func(addresses []netip.Addr) error {
			return h.release(ctx, conf, rec, addresses)
		},
	})
	if err != nil {
		return err
	}
	return h.closeLoopbackAfter(ctx, rec)
}

// victim is an attachment that is to go.
type victim struct {
	hash      string
	port      string
	rec       *state.Attachment // nil if it has no record
	addresses []netip.Addr      // nil if they are not known
	leaseDir  string            // where its lease is on record; empty if it has none
	release   func([]netip.Addr) error
}

// shapers are the links that shape the victim's traffic. One without a record may have
// had limits.
func (v *victim) shapers() []string {
	if v.rec != nil && v.rec.State == state.Ready && v.rec.IFB == "" {
		return nil
	}
	return []string{tc.IFBName(v.hash)}
}

// takeDown does every step. The address is given back after the link and the
// elements that use it are gone, and the record goes last, and only if all else
// did: it is what a later DEL or GC finds the rest by. What guards the pod goes after its
// port, and stays if that does.
func (h *host) takeDown(ctx context.Context, v *victim) error {
	flushed := nothingToDo()
	err := joinSteps(
		// From the pod's own interface, while it is there.
		func() error { return h.releaseLease(ctx, v.leaseDir, v.hash) },
		func() error { return h.unlist(ctx, v) },
		func() error { flushed = flushOwnFlows(ctx, v.rec); return nil },
		func() error { h.call.log.step("firewall"); return nil },
		func() error { return h.detach(ctx, v) },
		func() error { return <-flushed },
		func() error { h.call.log.step("link"); return nil },
		func() error { return v.release(v.addresses) },
		func() error { h.call.log.step("ipam"); return nil },
	)
	if err != nil {
		return err
	}
	if err := h.dir.Remove(h.call.network, v.hash); err != nil {
		return newError(codeIO, "%v", err)
	}
	return nil
}

// isKnown says whether the record tells all that the firewall's sets have of the victim.
func (v *victim) isKnown() bool { return v.rec != nil && v.rec.State == state.Ready && !v.rec.Moving }

// unlist takes the victim out of the firewall's sets, but for its guard; one that is
// not known, detach does.
func (h *host) unlist(ctx context.Context, v *victim) error {
	if !v.isKnown() {
		return nil
	}
	ep := endpointOf(v.rec)
	ep.GuardedPort = ""
	return h.fw.Remove(ctx, ep)
}

// detach deletes the victim's port, and then what is left of it in the firewall's sets.
func (h *host) detach(ctx context.Context, v *victim) error {
	err := h.br.Detach(ctx, v.port, aliasOwner(v.hash), v.shapers()...)
	if err != nil && !errors.Is(err, bridge.ErrForeign) || v.isKnown() && !v.rec.Guarded {
		return err
	}
	return errors.Join(err, h.removeElements(ctx, v.hash, v.rec))
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
// configuration have changed since, or lost it.
func (h *host) release(ctx context.Context, conf *NetConf, rec *state.Attachment, addresses []netip.Addr) error {
	if rec != nil && rec.IPAMType == ipamDHCP || rec == nil && conf.ipamType() == ipamDHCP {
		return nil // done, before the link went
	}
	req := h.ipamRequest(false)
	if rec != nil && (rec.IPAMType != conf.ipamType() || rec.DataDir != conf.dataDir()) {
		req.Stdin = recordedConfig(h.call.cniVersion, rec)
	}
	allocator, err := ipam.New(req)
	if err != nil {
		return err
	}
	return allocator.Del(ctx, addresses)
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
