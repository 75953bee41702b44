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
		if a.Admitted || !a.Other {
			if ready, err = s.Foreign(shared.adminChain()).Ready(ctx); err != nil || !ready {
				return false, err
			}
		}
		if forwards, err := s.Links.Forwards(ctx, w.routing()); err != nil || !forwards {
			return false, nil
		}
		if w.Loopback = w.Loopback && (way.Kind == "bridge" || way.Kind == "veth" || br != way); !w.Loopback {
			return true, nil
		}
		return loopback.IsOpen(ctx, s.Links, shared.onto(s, way), way, br)
	}, func() error {
		if !ready {
			if err := shared.mend(ctx, s, a.Admitted); err != nil {
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

// Shared is what attachments of a network have in common in the firewall. Of one whose attachments
// are all other programs', there is no record, and no rules but those that all networks share.
type Shared struct {
	rec   *state.Network // nil if there is none
	rules nft.Network
}

func (sh *Shared) adminChain() string {
	if sh.rec == nil {
		return ""
	}
	return sh.rec.AdminChain
}

func sharedOf(ctx context.Context, s *session.Session, a *state.Attachment) (*Shared, error) {
	rec, err := s.Dir.LoadNetwork(a.Network)
	if errors.Is(err, fs.ErrNotExist) {
		rules, err := recorded.OfOthers(ctx, s.Links, s.Dir, a.Network, a)
		return &Shared{rules: rules}, err
	}
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
	if sh.rec != nil && sh.rec.GatewayLink() == l.Name {
		return sh.rec
	}
	return &state.Network{Name: sh.rules.Name, Bridge: l.Name, Mark: uint64(s.Mark)}
}

// mend makes the rules anew, and what others have a part in if something was missing.
func (sh *Shared) mend(ctx context.Context, s *session.Session, admitted bool) error {
	rules, changed := sh.rules, false
	if sh.rec == nil {
		outcome, err := s.Firewall.Prepare(ctx, rules)
		if err != nil {
			return err
		}
		if changed = outcome.Changed; changed {
			if err := restoreOthers(ctx, s); err != nil {
				return err
			}
		}
		if admitted {
			if _, err := s.Foreign("").Ensure(ctx); err != nil {
				return err
			}
		}
	} else {
		attachments, err := s.Attachments(sh.rec.Name)
		if err != nil {
			return err
		}
		if rules, changed, err = restore(ctx, s, sh.rec, attachments); err != nil {
			return err
		}
	}
	if changed {
		if err := mendOthers(ctx, s, rules.Name); err != nil {
			return err
		}
	}
	if _, err := s.Firewall.Ensure(ctx, rules); err != nil || sh.rec == nil {
		return err
	}
	_, err := obstacles(ctx, sh.rec)
	return err
}

// restoreOthers puts back what attachments of other programs' have of ours: elements and limits.
func restoreOthers(ctx context.Context, s *session.Session) error {
	others, damaged, err := s.Dir.ListOthers()
	if err != nil {
		return fail.State(err)
	}
	for _, d := range damaged {
		s.Warn(d.Error())
	}
	for _, a := range others {
		if a.State != state.Ready {
			continue
		}
		var l *bridge.Link
		if a.HostIf != "" {
			l, err = s.Links.Link(ctx, a.HostIf)
			if errors.Is(err, fs.ErrNotExist) {
				continue // the pod is gone, and another may have its ports by now
			}
			if err != nil {
				return err
			}
		}
		if len(a.Published) > 0 || a.Admitted && a.Bridge != "" {
			if err := s.Firewall.Replace(ctx, endpoint.Of(a)); err != nil {
				return err
			}
		}
		if l != nil {
			if err := restoreLimits(ctx, s, a, l); err != nil {
				return err
			}
		}
	}
	return nil
}

// others makes what they need anew, and puts back what they have.
func (r *repair) others(ctx context.Context) error {
	networks, admitted, err := recorded.Others(ctx, r.s.Links, r.s.Dir, nil)
	if err != nil {
		return fail.State(err)
	}
	for _, n := range networks {
		outcome, err := r.s.Firewall.Prepare(ctx, n)
		if err != nil {
			return err
		}
		r.changed, r.mended = r.changed || outcome.Changed, append(r.mended, n)
	}
	if admitted {
		if _, err := r.s.Foreign("").Ensure(ctx); err != nil {
			return err
		}
	}
	return restoreOthers(ctx, r.s)
}
