package build

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// Reach sees to it that ports of the host can lead to a pod that is there already: its network's
// rules are there, the host forwards what goes to its addresses, and 127.0.0.1 leads there. In the
// common case that is so, as with Ready.
func Reach(ctx context.Context, s *session.Session, a *state.Attachment) error {
	w := &Want{Loopback: endpoint.PublishesIPv4(a)}
	if len(a.Published) > 0 {
		w.Reached = endpoint.Addresses(a)
	}
	var shared *Shared
	var way, br *bridge.Link // to the pod; its bridge, which is the way unless there is a VLAN
	ready := false
	return s.Ensure(ctx, func() (bool, error) {
		var err error
		if way, err = s.Links.Link(ctx, a.GatewayLink()); err != nil {
			return false, err
		}
		if br = way; way.Name != a.Bridge {
			if br, err = s.Links.Link(ctx, a.Bridge); err != nil {
				return false, err
			}
		}
		if shared, err = sharedOf(ctx, s, a); err != nil {
			return false, err
		}
		if ready, err = s.Firewall.Ready(ctx, shared.rules); err != nil || !ready {
			return false, err
		}
		if ready, err = s.Foreign(shared.rec.AdminChain).Ready(ctx); err != nil || !ready {
			return false, err
		}
		if forwards, err := s.Links.Forwards(ctx, w.routing()); err != nil || !forwards {
			return false, nil
		}
		if !w.Loopback {
			return true, nil
		}
		return loopback.IsOpen(ctx, s.Links, shared.onto(s, way), way, br)
	}, func() error {
		if !ready {
			if err := shared.mend(ctx, s); err != nil {
				return err
			}
		}
		if _, err := s.Links.EnsureRouting(ctx, w.routing()); err != nil || !w.Loopback {
			return err
		}
		rec := shared.onto(s, way)
		if err := loopback.Open(ctx, s.Links, s.Dir, rec, way, br, s.Warn); err != nil || rec != shared.rec {
			return err
		}
		if err := s.Dir.SaveNetwork(rec); err != nil {
			return fail.State(err)
		}
		return nil
	})
}

// Shared is what attachments of a network have in common in the firewall.
type Shared struct {
	rec   *state.Network
	rules nft.Network
}

func sharedOf(ctx context.Context, s *session.Session, a *state.Attachment) (*Shared, error) {
	rec, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		return nil, fail.State(err)
	}
	l, err := s.Links.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return &Shared{rec: rec, rules: recorded.Rules(rec, &bridge.Link{})}, nil
	}
	if err != nil {
		return nil, err
	}
	return &Shared{rec: rec, rules: recorded.Rules(rec, l)}, nil
}

// onto is the network's record, as far as the way from 127.0.0.1 goes by it, for a link that may not be
// its bridge.
func (sh *Shared) onto(s *session.Session, l *bridge.Link) *state.Network {
	if sh.rec.GatewayLink() == l.Name {
		return sh.rec
	}
	return &state.Network{Name: sh.rules.Name, Bridge: l.Name, Mark: uint64(s.Mark)}
}

// mend makes the rules anew, and what others have a part in if something was missing.
func (sh *Shared) mend(ctx context.Context, s *session.Session) error {
	attachments, err := s.Attachments(sh.rec.Name)
	if err != nil {
		return err
	}
	rules, changed, err := restore(ctx, s, sh.rec, attachments)
	if err != nil {
		return err
	}
	if changed {
		if err := mendOthers(ctx, s, rules.Name); err != nil {
			return err
		}
	}
	if _, err := s.Firewall.Ensure(ctx, rules); err != nil {
		return err
	}
	_, err = obstacles(ctx, sh.rec)
	return err
}
