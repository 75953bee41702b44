package inspect

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
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
	err := Limits(ctx, s, a, found)
	return found.List, err
}

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
func Admitted(ctx context.Context, s *session.Session, a *state.Attachment, policy nft.Policy, found *Findings) error {
	if !a.Other {
		diffs, err := s.Firewall.CheckEndpoint(ctx, endpoint.Of(a))
		found.AddAll(diffs, "")
		return err
	}
	if !a.Admitted || a.Policy != recorded.PolicyName(policy) {
		found.Add("container %s was not admitted with policy %s", a.ContainerID, policy)
	}
	diffs, err := Other(ctx, s, a)
	found.AddAll(diffs, "")
	return err
}
