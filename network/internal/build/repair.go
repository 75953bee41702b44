package build

import (
	"context"
	"errors"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// Repair makes all networks anew that are on record, as their records have them, and
// puts every pod back: after somebody flushed the firewall, deleted a bridge or
// changed it. It is what the next ADD of each network would do. A network that nothing needs
// is left to its next ADD. Of some networks, where any are named, it makes these alone, unless
// something was missing that others have a part in.
func Repair(ctx context.Context, s *session.Session, some ...string) error {
	if err := s.EnterAlone(ctx); err != nil {
		return err
	}
	records, damaged, err := s.Dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	var errs []error
	for _, d := range damaged {
		errs = append(errs, d)
	}
	if len(some) == 0 {
		errs = append(errs, mendUplinks(ctx, s))
	}
	r := &repair{s: s}
	var others []*state.Network
	for _, rec := range records {
		if len(some) > 0 && !slices.Contains(some, rec.Name) {
			others = append(others, rec)
			continue
		}
		errs = append(errs, r.network(ctx, rec))
	}
	if r.changed {
		for _, rec := range others {
			errs = append(errs, r.network(ctx, rec))
		}
	}
	errs = append(errs, declareMended(ctx, s, r.mended))
	for _, a := range r.followers {
		if slices.ContainsFunc(a.Published, func(p state.Published) bool { return p.Withheld }) {
			errs = append(errs, s.Publish(ctx, state.Waiting{Network: a.Network, Hash: a.Hash()})) // a DEL may have been killed that was to pass them on
		}
	}
	s.Leave()
	return errors.Join(append(errs, Follow(ctx, s, r.followers))...)
}

// mendUplinks mends those that no network is by, too.
func mendUplinks(ctx context.Context, s *session.Session) error {
	nics, err := s.Dir.Uplinks()
	errs := []error{err}
	for _, nic := range nics {
		errs = append(errs, s.Uplinks().Mend(ctx, nic, nil))
	}
	return errors.Join(errs...)
}

// repair is one under way.
type repair struct {
	s         *session.Session
	mended    []nft.Network
	followers []*state.Attachment
	changed   bool // something was missing that other networks have a part in
}

func (r *repair) network(ctx context.Context, rec *state.Network) error {
	if rec.Epoch != r.s.Epoch.Token() {
		return nil // of an earlier epoch: its next ADD builds it
	}
	attachments, err := r.s.Attachments(rec.Name)
	if err != nil {
		return err
	}
	if unused, err := r.s.Unused(rec, attachments); unused || err != nil {
		return err
	}
	rules, changed, err := restore(ctx, r.s, rec, attachments, nil)
	r.changed = r.changed || changed
	if err != nil {
		return err
	}
	r.mended, r.followers = append(r.mended, rules), append(r.followers, attachments...)
	_, err = obstacles(ctx, r.s, rec)
	return err
}
