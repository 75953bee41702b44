package chained

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/build"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Admit has other firewalls let pass what the attachment sends and what answers, and gives its network an
// ingress policy (empty: open). An attachment of ours is admitted already. One that the host has no route to, such as
// a macvlan's, or that has an address of the host's own, is so on record alone: nothing passes by that.
func (at Attachment) Admit(ctx context.Context, s *session.Session, policy, adminChain string) error {
	if at.Other == nil {
		if err := s.Enter(ctx); err != nil {
			return err
		}
		return at.setPolicy(ctx, s, policy, adminChain)
	}
	return at.change(ctx, s, func(a, next *state.Attachment) error {
		next.Admitted, next.Policy = true, policy
		if a.Bridge != "" {
			if err := at.refuseOthers(ctx, s, a); err != nil {
				return err
			}
			if err := build.Reach(ctx, s, next); err != nil {
				return err
			}
		}
		dir := s.Dir.Of(a)
		if err := dir.UpdateLocked(next); err != nil {
			return fail.State(err)
		}
		if a.Bridge == "" {
			return at.setPolicy(ctx, s, policy, adminChain)
		}
		// Of an address that another had, nothing is left to it: the host leads it here now.
		err := s.Firewall.Move(ctx, endpoint.Of(a), endpoint.Of(next))
		if err == nil {
			return at.setPolicy(ctx, s, policy, adminChain)
		}
		ctx = context.WithoutCancel(ctx)
		return errors.Join(err, s.Firewall.Move(ctx, endpoint.Of(next), endpoint.Of(a)), dir.UpdateLocked(a))
	})
}

// setPolicy notes a policy and the operator's chain on the network's record, if it has one, and makes the rules.
func (at Attachment) setPolicy(ctx context.Context, s *session.Session, policy, adminChain string) error {
	return at.setNetwork(ctx, s, func(n *state.Network) bool {
		changes := n.ChainedPolicy != policy || n.AdminChain != adminChain
		n.ChainedPolicy, n.AdminChain = policy, adminChain
		return changes
	})
}

// setNetwork changes the network's record, if it has one, and makes the rules, unless change says that it was so.
func (at Attachment) setNetwork(ctx context.Context, s *session.Session, change func(*state.Network) bool) error {
	rec, err := s.Dir.LoadNetwork(at.Network)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !change(rec) {
		return nil
	}
	if err != nil {
		return fail.State(err)
	}
	if err := s.EnterAlone(ctx); err != nil {
		return err
	}
	if rec, err = s.Dir.LoadNetwork(at.Network); err != nil {
		return fail.State(err)
	}
	l, err := s.Links.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		l, err = &bridge.Link{}, nil // those on it are gone, and at is on another program's
	}
	if err != nil {
		return err
	}
	change(rec)
	if err := s.Dir.SaveNetwork(rec); err != nil {
		return fail.State(err)
	}
	_, err = s.Firewall.Ensure(ctx, recorded.Rules(rec, l))
	return err
}

// Unadmit takes that back of an attachment of another program's. The policy stays as long as others of the
// network are there.
func (at Attachment) Unadmit(ctx context.Context, s *session.Session) error {
	if at.Other == nil {
		return nil
	}
	return at.change(ctx, s, func(a, next *state.Attachment) error {
		if !a.Admitted {
			return nil
		}
		next.Admitted, next.Policy = false, ""
		if a.Bridge != "" {
			if err := s.Firewall.Move(ctx, endpoint.Of(a), endpoint.Of(next)); err != nil {
				return err
			}
		}
		return s.Dir.Of(a).UpdateLocked(next)
	})
}
