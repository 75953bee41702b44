package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

// takeovers returns a connection that makes a NIC a port of a bridge, or undoes this. Only an operator takes over a NIC
// (tombolo uplink take), never an Add.
func (s *session) takeovers() *uplink.Conn { return uplink.On(s.Links.Socket()) }

// recoverTake reads the record of a NIC's takeover. It returns nil if there is none. If a killed call left the takeover
// or its restoration unfinished, recoverTake gives the NIC back, and returns nil and isUndone. The caller holds the
// state directory's exclusive lock.
func (s *session) recoverTake(ctx context.Context, nic string) (rec *uplink.Record, isUndone bool, _ error) {
	rec, err := s.loadTake(nic)
	if err != nil || rec == nil || rec.State == uplink.Taken {
		return rec, false, err
	}
	return nil, true, s.giveBack(ctx, rec)
}

// giveBack undoes a takeover, even an unfinished one, and deletes the NIC's file for systemd-networkd.
func (s *session) giveBack(ctx context.Context, rec *uplink.Record) error {
	if err := s.takeovers().Restore(ctx, rec, s.Dir.Uplink(rec.NIC)); err != nil {
		return err
	}
	return file.Remove(networkdFile(rec.NIC)) // file.Remove ignores the path ""
}

// isPort reports whether the NIC of a takeover is still a port of the bridge.
func (s *session) isPort(ctx context.Context, rec *uplink.Record) (bool, error) {
	nic, err := s.link(ctx, rec.NIC)
	l, bridgeErr := s.link(ctx, rec.Bridge)
	err = cmp.Or(err, bridgeErr)
	return err == nil && l.Index != 0 && nic.Master == l.Index, err
}

// errTaken returns the error about a takeover that must be undone before the NIC has another use.
func errTaken(rec *uplink.Record) error {
	return failf(ErrConflict, "uplink %s was made a port of bridge %s by `tombolo uplink take`: tombolo uplink "+
		"restore %[1]s gives the NIC its addresses and routes back", rec.NIC, rec.Bridge)
}

// loadTake reads the record of a NIC's takeover. It returns nil if there is none, or only one of an earlier epoch,
// which is usually an earlier boot.
func (s *session) loadTake(nic string) (rec *uplink.Record, _ error) {
	data, err := s.Dir.Uplink(nic).Load()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, state.ErrStale) {
		return nil, nil
	}

	if err == nil {
		rec, err = uplink.ParseRecord(data)
	}
	return rec, stateError(err)
}

// withLock calls do under the state directory's exclusive lock, so that no Add changes the host at the same time. If
// nic cannot be the name of a link, it returns an error.
func (u Uplinks) withLock(ctx context.Context, nic string, do func(*session) error) error {
	if err := checkNIC(nic); err != nil {
		return err
	}
	return u.node.withSession(func(s *session) error {
		if err := s.enterAlone(ctx); err != nil {
			return err
		}
		return do(s)
	})
}

// PlanTake describes the work of Take. steps has a line for each step, action and warning, moves lists the addresses
// that would move, and warnings describe things that behave differently afterwards. PlanTake changes nothing. If the
// NIC is already taken over or shared, the error matches ErrConflict.
func (u Uplinks) PlanTake(ctx context.Context, nic, bridgeName string) (steps string, moves []netip.Addr,
	warnings []string, _ error) {
	if err := checkNIC(nic); err != nil {
		return "", nil, nil, err
	}

	plan := &uplink.Plan{}
	err := u.node.withSession(func(s *session) error {
		err := s.refuseTake(ctx, nic)
		if err == nil {
			plan, err = s.takeovers().Plan(ctx, uplink.Uplink{NIC: nic, Bridge: bridgeName})
		}
		return explainNIC(err, nic)
	})
	if err != nil {
		return "", nil, nil, err
	}
	return plan.Steps, plan.Moves, plan.Warnings, nil
}

// explainNIC replaces an error about a NIC that does not exist by one with advice, and returns any other error
// unchanged.
func explainNIC(err error, nic string) error {
	if errors.Is(err, fs.ErrNotExist) {
		return failf(ErrNoLink, "uplink %s: the host has no such link (ip link lists its links)", nic)
	}
	return err
}

// refuseTake returns an error if the NIC is already taken over or shared.
func (s *session) refuseTake(ctx context.Context, nic string) error {
	rec, err := s.loadTake(nic)
	if err != nil {
		return err
	}

	if rec != nil && rec.State == uplink.Taken {
		return errTaken(rec)
	}

	records, _, err := s.Dir.ListNetworks()
	err = stateError(err)
	for _, rec := range records {
		n := &site{s: s, rec: rec}
		if rec.Uplink == nic {
			err = errors.Join(err, n.find(ctx))
		}

		if n.share != nil {
			return failf(ErrConflict,
				"uplink %s is shared with bridge %s for network %q, whose pods are on the LAN without a takeover. "+
					"To make the NIC a port of a bridge all the same, remove the network first (tombolo "+
					"remove %[3]s)", nic, rec.Bridge, rec.Name)
		}
	}

	return err
}

// Take makes a NIC a port of a bridge, and moves the host's addresses and routes from the NIC to the bridge. If an
// earlier Take of the NIC was interrupted, Take undoes it first. If the NIC was taken over for this bridge, and is
// still its port, Take does nothing. Take is for an operator's command; an Add never takes a NIC over.
func (u Uplinks) Take(ctx context.Context, nic, bridgeName string) error {
	want := uplink.Uplink{NIC: nic, Bridge: bridgeName, Alias: endpoint.BridgeAlias}
	return u.withLock(ctx, nic, func(s *session) error {
		rec, _, err := s.recoverTake(ctx, nic)
		if err == nil && rec != nil && rec.Bridge == want.Bridge {
			if is, err := s.isPort(ctx, rec); is || err != nil {
				return err
			}
		}

		if err == nil {
			err = s.refuseTake(ctx, nic)
		}
		if err == nil {
			err = shieldLinks(nic, nic, bridgeName) // a start of systemd-networkd would undo the takeover
		}
		if err == nil {
			var unfinished *uplink.Record
			unfinished, err = s.takeovers().Take(ctx, want, s.Dir.Uplink(nic))
			if err != nil && unfinished == nil {
				err = errors.Join(err, file.Remove(networkdFile(nic)))
			}
		}
		return explainNIC(err, nic)
	})
}

// Restore undoes Take: it removes the NIC from the bridge, and moves the addresses and routes back. While pods are on
// the LAN through the NIC, or other programs have ports on the bridge, the error matches ErrAttached. If bridgeName is
// not empty, it must be the NIC's bridge, which avoids mistakes. If somebody deleted an address since Take, Restore
// gives the NIC back, and then returns an error that names the address.
func (u Uplinks) Restore(ctx context.Context, nic, bridgeName string) error {
	return u.node.nameDead(ctx, "", u.withLock(ctx, nic, func(s *session) error {
		rec, err := s.loadTake(nic)
		isPort := false
		if err == nil && rec != nil {
			isPort, err = s.isPort(ctx, rec)
		}
		if err == nil && (isPort || rec == nil) {
			err = refusePodsBehind(s, nic)
		}
		if err != nil {
			return err
		}

		rec, isUndone, err := s.recoverTake(ctx, nic)
		switch {
		case isUndone || err != nil:
			return err
		case rec == nil:
			return failf(ErrConflict, "uplink %s has not been taken over: there is nothing to give back", nic)
		case bridgeName != "" && bridgeName != rec.Bridge:
			return failf(ErrConflict, "uplink %s is a port of bridge %s, not of %s", nic, rec.Bridge, bridgeName)
		}

		if isPort {
			bridgeLink, err := s.link(ctx, rec.Bridge)
			if err == nil {
				err = s.refuseCutOff(ctx, bridgeLink, nic, nic)
			}
			if err != nil {
				return err
			}
		}

		if err := s.giveBack(ctx, rec); err != nil {
			return err
		}
		return s.refuseLost(ctx, rec)
	}))
}

// refuseLost returns an error that names the addresses which the NIC had before the takeover and lacks now: somebody
// deleted them from the bridge.
func (s *session) refuseLost(ctx context.Context, rec *uplink.Record) error {
	nic, err := s.link(ctx, rec.NIC)
	if err != nil || nic.Index == 0 {
		return err
	}

	have, err := s.Links.Addresses().List(ctx, addr.Filter{Link: nic.Index})
	var lost, commands []string
	for _, a := range rec.Before.Addresses {
		if !a.Prefix.Addr().IsLinkLocalUnicast() && !has(have, a.Prefix) {
			lost = append(lost, a.Prefix.String())
			commands = append(commands, fmt.Sprintf("ip address add %s dev %s", a.Prefix, nic.Name))
		}
	}

	if len(lost) == 0 || err != nil {
		return err
	}

	return failf(ErrConflict,
		"uplink %s is given back, but without %s, which somebody deleted from bridge %s, with its routes. To add it "+
			"again: %s",
		rec.NIC, strings.Join(lost, " and "), rec.Bridge, strings.Join(commands, " && "))
}

// finishTakes gives back all NICs whose takeover or restoration was interrupted.
func finishTakes(ctx context.Context, s *session) error {
	nics, err := s.Dir.Uplinks()
	err = stateError(err)
	for _, nic := range nics {
		_, _, one := s.recoverTake(ctx, nic)
		err = errors.Join(err, one)
	}
	return err
}

// takeReports reports on the NICs that were taken over, and lists their faults.
func (s *session) takeReports(ctx context.Context) (list []UplinkReport, wrong []tombolo.Difference, _ error) {
	nics, err := s.Dir.Uplinks()
	if err != nil {
		return nil, nil, stateError(err)
	}

	list = []UplinkReport{}
	for _, name := range nics {
		found, report := &findings{}, UplinkReport{NIC: name}
		rec, err := s.loadTake(name)
		switch {
		case err != nil:
			found.advise(tombolo.RemedyConfigure, "%v", err)
		case rec == nil:
			continue
		case rec.State != uplink.Taken:
			found.advise(tombolo.RemedyRepair, "the work on uplink %s was cut short (%s)", name, rec.State)
		default:
			isPort, err := s.isPort(ctx, rec)
			if err != nil {
				return nil, nil, err
			}
			if !isPort {
				found.advise(tombolo.RemedyConfigure,
					"uplink %s is no port of bridge %s any more: tombolo uplink restore %[1]s gives it what the "+
						"bridge has, or had if it is gone", name, rec.Bridge)
			}
		}

		if rec != nil {
			report.Bridge, report.State = rec.Bridge, string(rec.State)
		}

		report.Differences = found.texts()
		list, wrong = append(list, report), append(wrong, found.list...)
	}

	return list, wrong, nil
}
