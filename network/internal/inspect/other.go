package inspect

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/dhcplease"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Other compares what an attachment of another program's has of ours.
func Other(ctx context.Context, s *session.Session, a *state.Attachment) ([]tombolo.Difference, error) {
	found := &Findings{}
	if a.HostIf != "" {
		_, err := s.Links.Link(ctx, a.HostIf)
		if errors.Is(err, fs.ErrNotExist) {
			found.Advise(tombolo.RemedyRecreate, "its link %s is gone", a.HostIf)
			return found.List, nil
		}
		if err != nil {
			return nil, err
		}
	}
	if len(a.Published) > 0 || a.Admitted && a.Bridge != "" {
		ep := endpoint.Of(a)
		rules, err := recorded.OfOthers(ctx, s.Links, s.Dir, a.Network, nil)
		if err != nil {
			return nil, err
		}
		diffs, err := s.Firewall.Check(ctx, rules, &ep)
		if _, own := s.Dir.LoadNetwork(a.Network); own == nil {
			diffs, err = s.Firewall.CheckEndpoint(ctx, ep) // its rules are compared with its own attachments
		}
		if err != nil {
			return nil, err
		}
		found.AddAll(diffs, tombolo.RemedyRepair)
	}
	err := Limits(ctx, bandwidth.On(s.Links.Socket()), a, found)
	return found.List, errors.Join(err, Moved(a, found))
}

// Moved finds that the lease of an attachment of another program's is of another address now.
func Moved(a *state.Attachment, found *Findings) error {
	diffs, err := dhcplease.Moved(a)
	found.AddAll(diffs, tombolo.RemedyRecreate)
	return err
}
