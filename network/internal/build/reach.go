package build

import (
	"context"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Reach sees to it that an attachment's network is as on record, with a change to that, and that ports of the host can
// lead to the attachment, which has them on record. change says whether it changed anything. In the common case
// nothing is missing, as with Ready.
func Reach(ctx context.Context, s *session.Session, a *state.Attachment, change func(*state.Network) bool) (rec *state.Network, _ error) {
	w := &Want{Loopback: endpoint.PublishesIPv4(a)}
	if len(a.Published) > 0 {
		w.Reached = endpoint.Addresses(a)
	}
	var b *Built
	err := s.Ensure(ctx, func() (bool, error) {
		var err error
		if rec, err = s.Dir.LoadNetwork(a.Network); err != nil {
			return false, fail.State(err)
		}
		if b = nil; change(rec) {
			return false, nil
		}
		w.Record.Pools, w.Record.PoolDir = rec.Pools, rec.PoolDir
		b, err = find(ctx, s, rec, w)
		return b != nil && b.almost == nil, err
	}, func() error {
		if b != nil {
			return complete(ctx, s, w, b)
		}
		return again(ctx, s, rec, w)
	})
	return rec, err
}

// again makes a network anew as its record has it, and what others have a part in if something was missing.
func again(ctx context.Context, s *session.Session, rec *state.Network, w *Want) error {
	attachments, err := s.Attachments(rec.Name)
	if err != nil {
		return err
	}
	rules, changed, err := restore(ctx, s, rec, attachments, w)
	if err != nil {
		return err
	}
	if changed {
		if err := mendOthers(ctx, s, rec.Name); err != nil {
			return err
		}
	}
	if _, err := s.Firewall.Ensure(ctx, rules); err != nil {
		return err
	}
	_, err = obstacles(ctx, s, rec)
	return err
}
