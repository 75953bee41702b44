package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// UplinkPlan gives the steps by which a NIC would be taken over, in words. Nothing is
// changed.
func (p *Plugin) UplinkPlan(ctx context.Context, u uplink.Uplink) (string, error) {
	conn, err := uplink.Dial(&uplink.Config{Made: placeLoopback})
	if err != nil {
		return "", err
	}
	defer conn.Close()
	s, err := conn.Snapshot(ctx, u.NIC, u.Bridge)
	if err != nil {
		return "", err
	}
	u.Alias = bridgeAlias
	plan, err := uplink.Plan(s, u)
	if err != nil {
		return "", err
	}
	return plan.String(), nil
}

// UplinkTake takes a NIC over, as the first ADD of a network with that uplink would, and
// gives what the operator should know of how it went.
func (p *Plugin) UplinkTake(ctx context.Context, stateDir, leaseDir string, u uplink.Uplink) ([]string, error) {
	h, err := p.openUplinks(ctx, "uplink take", stateDir, leaseDir, u.NIC)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	u.Alias = bridgeAlias
	var notes []string
	err = h.withUplink(ctx, u.NIC, func(w *uplinkWork) error {
		err := w.ensure(ctx, u)
		if w.rec != nil {
			notes = w.rec.Notes
		}
		return err
	})
	return notes, err
}

// UplinkRestore gives a NIC back. It refuses while pods are on the LAN by it. A bridge
// may be named, to be sure that it is the one that is meant.
func (p *Plugin) UplinkRestore(ctx context.Context, stateDir, leaseDir, nic, bridgeName string) error {
	h, err := p.openUplinks(ctx, "uplink restore", stateDir, leaseDir, nic)
	if err != nil {
		return err
	}
	defer h.Close()
	if err := h.refusePodsBehind(nic); err != nil {
		return err
	}
	return h.withUplink(ctx, nic, func(w *uplinkWork) error {
		switch {
		case w.undone:
			return w.disown(nic)
		case w.rec == nil:
			return newError(codeConflict, "uplink %s has not been taken over: there is nothing to give back", nic)
		case bridgeName != "" && bridgeName != w.rec.Bridge:
			return newError(codeConflict, "uplink %s is a port of bridge %s, not of %s", nic, w.rec.Bridge, bridgeName)
		}
		return w.giveBack(ctx)
	})
}

// openUplinks opens the host for a command about an uplink, under the lock that keeps
// ADDs away, and, before that, the one of the lease that the host has by the NIC.
func (p *Plugin) openUplinks(ctx context.Context, verb, stateDir, leaseDir, nic string) (*host, error) {
	h, err := p.openOperator(verb, stateDir)
	if err != nil {
		return nil, err
	}
	h.settings.LeaseDir = leaseDir
	err = h.lockHostLease(ctx, nic)
	if err == nil {
		err = h.enterAlone(ctx)
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// refusePodsBehind keeps pods from losing their LAN.
func (h *host) refusePodsBehind(nic string) error {
	networks, _, err := h.dir.ListNetworks()
	if err != nil {
		return newError(codeIO, "%v", err)
	}
	for _, n := range networks {
		if n.Uplink != nic {
			continue
		}
		attachments, _, err := h.dir.List(n.Name)
		if err != nil {
			return newError(codeIO, "%v", err)
		}
		if len(attachments) > 0 {
			return newError(codeAttached, "uplink %s: network %q has %s on it: remove the pods first", nic, n.Name, plural(len(attachments), "attachment", "attachments"))
		}
	}
	return nil
}

// UplinkReport is what is known of one uplink.
type UplinkReport struct {
	NIC    string       `json:"nic"`
	Bridge string       `json:"bridge"`
	State  uplink.State `json:"state"`
	// Differences are what is not as the takeover made it.
	Differences []string `json:"differences"`
}

// Uplinks reports on the NICs that are taken over, or on one of them. It changes
// nothing.
func (p *Plugin) Uplinks(ctx context.Context, stateDir, leaseDir, nic string) ([]UplinkReport, error) {
	h, err := p.openOperator("uplink status", stateDir)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	nics, err := h.dir.Uplinks()
	if err != nil {
		return nil, newError(codeIO, "%v", err)
	}
	if nic != "" {
		nics = slices.DeleteFunc(nics, func(n string) bool { return n != nic })
	}
	conn, err := uplink.Dial(&uplink.Config{Made: placeLoopback})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	h.settings.LeaseDir = leaseDir
	list := []UplinkReport{}
	for _, name := range nics {
		report, err := h.report(ctx, conn, name)
		if err != nil {
			return nil, err
		}
		if report != nil {
			list = append(list, *report)
		}
	}
	return list, nil
}

func (h *host) report(ctx context.Context, conn *uplink.Conn, nic string) (*UplinkReport, error) {
	data, err := h.dir.Uplink(nic).Load()
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, state.ErrStale):
		return nil, nil
	case err != nil:
		return &UplinkReport{NIC: nic, Differences: []string{err.Error()}}, nil
	}
	rec, err := uplink.ParseRecord(data)
	if err != nil {
		return &UplinkReport{NIC: nic, Differences: []string{err.Error()}}, nil
	}
	r := &UplinkReport{NIC: nic, Bridge: rec.Bridge, State: rec.State, Differences: []string{}}
	if rec.State != uplink.Taken {
		r.Differences = append(r.Differences, "it was cut short: the keeper, the next ADD, or tombolo uplink restore, finishes it")
		return r, nil
	}
	diffs, err := conn.Check(ctx, rec)
	for _, d := range diffs {
		r.Differences = append(r.Differences, fmt.Sprint(d))
	}
	r.Differences = append(r.Differences, leaseTrouble(h.settings.LeaseDir)...)
	return r, err
}
