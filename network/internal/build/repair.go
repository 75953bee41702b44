package build

import (
	"context"
	"errors"
	"slices"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/reroute"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// Repair makes all networks anew that are on record, as their records have them, and
// puts every pod back: after somebody flushed the firewall, deleted a bridge or
// changed it. It is what the next ADD of each network would do. A network that nothing needs
// is left to its next ADD.
func Repair(ctx context.Context, s *session.Session) error {
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
	var mended []nft.Network
	var followers []*state.Attachment
	for _, rec := range records {
		if rec.Epoch != s.Epoch.Token() {
			continue // of an earlier epoch: its next ADD builds it
		}
		attachments, err := s.Attachments(rec.Name)
		unused := false
		if err == nil {
			unused, err = s.Unused(rec, attachments)
		}
		if err == nil && !unused {
			var rules nft.Network
			if rules, err = restore(ctx, s, rec, attachments); err == nil {
				mended = append(mended, rules)
				followers = append(followers, attachments...)
				err = refuseObstaclesOf(ctx, rec)
			}
		}
		errs = append(errs, err)
	}
	errs = append(errs, declareMended(ctx, s, mended))
	for _, a := range followers {
		if slices.ContainsFunc(a.Published, func(p state.Published) bool { return p.Withheld }) {
			errs = append(errs, s.Publish(ctx, state.Waiting{Network: a.Network, Hash: a.Hash()})) // a DEL may have been killed that was to pass them on
		}
	}
	s.Leave()
	return errors.Join(append(errs, reroute.Follow(ctx, s, followers))...)
}
