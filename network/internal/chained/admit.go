package chained

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Admit gives the attachment's network an ingress policy (empty: open), and notes the operator's chain. The attachment
// itself is admitted already, by its Add.
func (at Attachment) Admit(ctx context.Context, s *session.Session, policy, adminChain string) error {
	if err := s.Enter(ctx); err != nil {
		return err
	}
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
