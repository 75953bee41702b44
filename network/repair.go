package network

import (
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/nft"
)

// Repair makes all networks anew that are on record, as their records have them, and
// puts every pod back: after somebody flushed the firewall, deleted a bridge or
// changed it. It is what the next ADD of each network would do.
func (n *Node) Repair(ctx context.Context) error {
	if err := n.usable(ctx); err != nil {
		return err
	}
	s, err := n.openKnown()
	if err != nil {
		return err
	}
	defer s.Close()
	if err := s.enterAlone(ctx); err != nil {
		return err
	}
	records, damaged, err := s.dir.ListNetworks()
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
		if rec.Epoch != s.epoch.Token() {
			continue // of an earlier life: its next ADD builds it
		}
		attachments, err := s.listed(rec.Name)
		if err == nil {
			var rules nft.Network
			if rules, err = s.restore(ctx, rec, attachments); err == nil {
				mended = append(mended, rules)
				followers = append(followers, attachments...)
				err = refuseObstaclesOf(ctx, rec)
			}
		}
		errs = append(errs, err)
	}
	errs = append(errs, s.declareMended(ctx, mended))
	s.leave()
	return errors.Join(append(errs, s.followHost(ctx, followers))...)
}
