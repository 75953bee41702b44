package inspect

import (
	"context"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// Published compares host ports with those that were asked for.
func Published(ctx context.Context, s *session.Session, a *state.Attachment, ports []state.Published, snat nft.SNAT, found *Findings) error {
	if endpoint.SNAT(a.PortSNAT) != snat {
		found.Add("calls of its ports come from the host's address as by %q, which is not what was asked for", a.PortSNAT)
	}
	for _, p := range ports {
		if !slices.ContainsFunc(a.Published, func(has state.Published) bool {
			has.Withheld = false
			return has == p
		}) {
			found.Add("port %s of the host does not lead to the pod", endpoint.PortText(endpoint.Port(&p)))
		}
	}
	diffs, err := s.Firewall.CheckEndpoint(ctx, endpoint.Of(a))
	found.AddAll(diffs, "")
	return err
}

// Limited compares limits with those that were asked for.
func Limited(ctx context.Context, s *session.Session, a *state.Attachment, asked bandwidth.Shape, found *Findings) error {
	want, _, err := asked.Effective(max(a.MTU, 1))
	if err != nil {
		return err
	}
	if has := recorded.Shape(a); has != want {
		found.Add("the limits are %+v, where %+v was asked for", has, want)
	}
	return Limits(ctx, s, a, found)
}

// Admitted compares with what an attachment was to be admitted by.
func Admitted(ctx context.Context, s *session.Session, a *state.Attachment, found *Findings) error {
	diffs, err := s.Firewall.CheckEndpoint(ctx, endpoint.Of(a))
	found.AddAll(diffs, "")
	return err
}
