package chained

import (
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Limit gives the attachment limits in place of those that it has, or none, and names the link that shapes
// what it sends; empty if that has no limit. The record says so first, as with Publish.
func (at Attachment) Limit(ctx context.Context, s *session.Session, asked bandwidth.Shape) (ifb string, _ error) {
	err := at.change(ctx, s, func(a, next *state.Attachment) error {
		if asked.IsZero() && recorded.Shape(a).IsZero() {
			return nil
		}
		var effective bandwidth.Shape
		if !asked.IsZero() {
			var err error
			if effective, err = Effective(s, asked, a.MTU); err != nil {
				return err
			}
		}
		target := recorded.Target(a)
		recorded.Limit(next, effective)
		ifb = next.IFB
		conn := bandwidth.On(s.Links.Socket())
		dir := s.Dir
		if asked.IsZero() {
			if err := conn.Remove(ctx, target); err != nil {
				return err
			}
			return dir.UpdateLocked(next)
		}
		if err := dir.UpdateLocked(next); err != nil {
			return fail.State(err)
		}
		_, err := conn.Ensure(ctx, target, effective)
		if err == nil {
			return nil
		}
		return errors.Join(err, conn.Remove(context.WithoutCancel(ctx), target), dir.UpdateLocked(a))
	})
	return ifb, err
}

// Effective gives limits as the kernel enforces them, and warns of what is not as it was asked for.
func Effective(s *session.Session, asked bandwidth.Shape, mtu int) (bandwidth.Shape, error) {
	effective, adjusted, err := asked.Effective(mtu)
	if err != nil {
		return bandwidth.Shape{}, fail.Errorf(bandwidth.ErrInvalid, "bandwidth: %w", err)
	}
	for _, adj := range adjusted {
		s.Warn("bandwidth: " + adj.String())
	}
	return effective, nil
}
