package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/uplink"
)

// An operator may let a bridge take over a NIC (tombolo uplink take). An Add never takes one over.

// take is the work on one NIC, under its lock.
type take struct {
	conn *uplink.Conn
	file *state.UplinkFile
	rec  *uplink.Record // nil if the NIC has not been taken over
	// undone is true if an earlier call was killed, and its work was undone just now.
	undone bool
}

// withNIC calls do under the lock of a NIC. It first completes or undoes the work of a killed call.
func (s *session) withNIC(ctx context.Context, nic string, do func(*take) error) error {
	lock, err := s.Dir.LockUplink(ctx, nic)
	if err != nil {
		return err
	}
	defer lock.Close()
	conn, err := uplink.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()

	t := &take{conn: conn, file: s.Dir.Uplink(nic)}
	if t.rec, err = loadTake(t.file); err != nil {
		return err
	}

	if t.rec != nil && t.rec.State != uplink.Taken {
		if t.rec, err = conn.Recover(ctx, t.rec, t.file); err != nil {
			return err
		}
		t.undone = t.rec == nil
	}

	return do(t)
}

// loadTake reads the record of a NIC. It returns nil if there is none in this epoch of the node.
func loadTake(file *state.UplinkFile) (*uplink.Record, error) {
	data, err := file.Load()
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, state.ErrStale) {
		return nil, nil
	}

	if err != nil {
		return nil, stateError(err)
	}

	rec, err := uplink.ParseRecord(data)
	if err != nil {
		return nil, stateError(err)
	}
	return rec, nil
}

// about calls do under the lock that keeps Adds away.
func (u Uplinks) about(ctx context.Context, nic string, do func(*session) error) error {
	if err := checkNIC(nic); err != nil {
		return err
	}
	return u.node.about(ctx, func(s *session) error {
		if err := s.EnterAlone(ctx); err != nil {
			return err
		}
		return do(s)
	})
}

// PlanTake describes the work of Take: steps has a line for each action, moves are the addresses that move, and
// warnings are about things that work differently afterwards. It changes nothing. For a NIC that is already taken
// over the error matches ErrConflict.
func (u Uplinks) PlanTake(ctx context.Context, nic, bridgeName string) (steps string, moves []netip.Addr,
	warnings []string, _ error) {
	if err := checkNIC(nic); err != nil {
		return "", nil, nil, err
	}

	want := uplink.Uplink{NIC: nic, Bridge: bridgeName}
	s, err := u.node.openKnown(ctx)
	if err != nil {
		return "", nil, nil, err
	}
	defer s.Close()
	if err := s.refuseTake(ctx, want); err != nil {
		return "", nil, nil, err
	}

	conn, err := uplink.Dial(nil)
	if err != nil {
		return "", nil, nil, err
	}
	defer conn.Close()
	plan, err := conn.Plan(ctx, want)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil, nil, noLink(nic)
	}

	if err != nil {
		return "", nil, nil, err
	}

	return plan.String(), plan.Moves, plan.Warnings, nil
}

// refuseTake refuses a NIC that is already taken over or shared.
func (s *session) refuseTake(ctx context.Context, want uplink.Uplink) error {
	rec, err := loadTake(s.Dir.Uplink(want.NIC))
	if err != nil {
		return err
	}

	if rec != nil && rec.State == uplink.Taken {
		return failf(ErrConflict,
			"uplink %s is a port of bridge %s already: tombolo uplink restore %[1]s gives it back",
			want.NIC, rec.Bridge)
	}

	records, _, err := s.Dir.ListNetworks()
	if err != nil {
		return stateError(err)
	}

	for _, rec := range records {
		n := &site{s: s, rec: rec}
		if rec.Uplink != want.NIC {
			continue
		}

		if err := n.find(ctx); err != nil {
			return err
		}

		if n.share != nil {
			return failf(ErrConflict,
				"uplink %s is shared with bridge %s for network %q, whose pods are on the LAN: nothing is to be "+
					"taken over. "+
					"If the NIC is to be a port of a bridge all the same, remove the network first (tombolo remove %s)",
				want.NIC, rec.Bridge, rec.Name, rec.Name)
		}
	}

	return nil
}

// Take makes a NIC a port of a bridge, which gets the host's addresses and routes. An Add never takes one over.
func (u Uplinks) Take(ctx context.Context, nic, bridgeName string) error {
	want := uplink.Uplink{NIC: nic, Bridge: bridgeName, Alias: endpoint.BridgeAlias}
	return u.about(ctx, nic, func(s *session) error {
		return s.withNIC(ctx, nic, func(t *take) error {
			if t.rec != nil && t.rec.Bridge == want.Bridge {
				return nil
			}

			if err := s.refuseTake(ctx, want); err != nil {
				return err
			}

			_, err := t.conn.Take(ctx, want, t.file)
			if errors.Is(err, fs.ErrNotExist) {
				return noLink(want.NIC)
			}
			return err
		})
	})
}

// Restore gives a NIC back that Take took over. While pods are on the LAN through it, the error is ErrAttached. A
// bridge may be named, to avoid mistakes.
func (u Uplinks) Restore(ctx context.Context, nic, bridgeName string) error {
	return u.node.nameDead(ctx, "", u.about(ctx, nic, func(s *session) error {
		if err := refusePodsBehind(s, nic); err != nil {
			return err
		}

		return s.withNIC(ctx, nic, func(t *take) error {
			switch {
			case t.undone:
				return nil
			case t.rec == nil:
				return failf(ErrConflict, "uplink %s has not been taken over: there is nothing to give back", nic)
			case bridgeName != "" && bridgeName != t.rec.Bridge:
				return failf(ErrConflict, "uplink %s is a port of bridge %s, not of %s", nic, t.rec.Bridge, bridgeName)
			}

			if on, err := s.link(ctx, t.rec.Bridge); err != nil {
				return err
			} else if err := s.refuseCutOff(ctx, on, nic, nic); err != nil {
				return err
			}

			if err := t.conn.Restore(ctx, t.rec, t.file); err != nil {
				return err
			}

			return s.allBack(ctx, t.rec)
		})
	}))
}

// allBack returns an error if the NIC lacks addresses that it had before the takeover. The error names them. A restore
// cannot move an address that somebody deleted from the bridge.
func (s *session) allBack(ctx context.Context, rec *uplink.Record) error {
	nic, err := s.link(ctx, rec.NIC)
	if err != nil || nic.Index == 0 {
		return err
	}

	has, err := s.Links.Addresses().List(ctx, addr.Filter{Link: nic.Index})
	var lost, commands []string
	for _, a := range rec.Before.Addresses {
		isBack := slices.ContainsFunc(has, func(b addr.Address) bool { return b.Prefix == a.Prefix })
		if !a.Prefix.Addr().IsLinkLocalUnicast() && !isBack {
			lost = append(lost, a.Prefix.String())
			commands = append(commands, fmt.Sprintf("ip address add %s dev %s", a.Prefix, nic.Name))
		}
	}

	if len(lost) == 0 || err != nil {
		return err
	}

	return failf(ErrConflict,
		"uplink %s is given back, but without %s: that was deleted from bridge %s, with its routes. If it is to be "+
			"back: %s",
		rec.NIC, strings.Join(lost, " and "), rec.Bridge, strings.Join(commands, " && "))
}

// finishTakes completes interrupted work on NICs.
func finishTakes(ctx context.Context, s *session) error {
	nics, err := s.Dir.Uplinks()
	errs := []error{stateError(err)}
	for _, nic := range nics {
		errs = append(errs, s.withNIC(ctx, nic, func(*take) error { return nil }))
	}
	return errors.Join(errs...)
}

// takes reports on the NICs that were taken over, and lists their faults.
func (s *session) takes(ctx context.Context) (list []UplinkReport, wrong []tombolo.Difference, _ error) {
	nics, err := s.Dir.Uplinks()
	if err != nil {
		return nil, nil, stateError(err)
	}

	list = []UplinkReport{}
	for _, nic := range nics {
		found, report := &findings{}, UplinkReport{NIC: nic}
		rec, err := loadTake(s.Dir.Uplink(nic))
		switch {
		case err != nil:
			found.Advise(tombolo.RemedyConfigure, "%v", err)
		case rec == nil:
			continue
		default:
			report.Bridge, report.State = rec.Bridge, string(rec.State)
			if err := s.lookAtTake(ctx, rec, found); err != nil {
				return nil, nil, err
			}
		}

		report.Differences = found.texts()
		list, wrong = append(list, report), append(wrong, found.List...)
	}

	return list, wrong, nil
}

// lookAtTake adds the faults of a NIC that was taken over.
func (s *session) lookAtTake(ctx context.Context, rec *uplink.Record, found *findings) error {
	if rec.State != uplink.Taken {
		found.Advise(tombolo.RemedyRepair, "the work on uplink %s was cut short (%s)", rec.NIC, rec.State)
		return nil
	}

	nic, err := s.link(ctx, rec.NIC)
	if err != nil {
		return err
	}

	on, err := s.link(ctx, rec.Bridge)
	if err == nil && (nic.Index == 0 || on.Index == 0 || nic.Master != on.Index) {
		found.Advise(tombolo.RemedyConfigure,
			"uplink %s is no port of bridge %s any more: tombolo uplink restore %[1]s gives it what the bridge has, "+
				"or had if it is gone", rec.NIC, rec.Bridge)
	}

	return err
}
