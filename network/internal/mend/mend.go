// Package mend puts back what pods have lost inside, and takes away what no pod has.
package mend

import (
	"context"
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/inspect"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// Strays deletes what belongs to nobody. No Add is at work meanwhile.
func Strays(ctx context.Context, s *session.Session) error {
	if err := s.EnterAlone(ctx); err != nil {
		return err
	}
	defer s.Leave()
	networks, err := s.Dir.Networks()
	if err != nil {
		return fail.State(err)
	}
	known := map[string]bool{}
	for _, name := range networks {
		attachments, damaged, err := s.Dir.List(name)
		if err != nil {
			return fail.State(err)
		}
		for _, a := range attachments {
			known[a.Hash()] = true
		}
		for _, d := range damaged {
			known[d.Hash] = true
		}
	}
	strays, err := inspect.FindStrays(ctx, s, known, networks)
	if err != nil {
		return err
	}
	if len(strays.Elements)+len(strays.IFBs) == 0 {
		return nil
	}
	var owners []nft.Owner
	for hash := range strays.Elements {
		owners = append(owners, nft.Owner(hash))
	}
	errs := []error{s.Firewall.RemoveOwners(ctx, owners...)}
	shapes := bandwidth.On(s.Links.Socket())
	for hash, ifb := range strays.IFBs {
		errs = append(errs, shapes.Remove(ctx, bandwidth.Target{IFB: ifb, Owner: endpoint.AliasOwner(hash)}))
	}
	return errors.Join(errs...)
}

// Pods puts back in pods what Add gave them and they lost. It goes on past pods for which that
// fails.
func Pods(ctx context.Context, s *session.Session) error {
	networks, err := s.Dir.Networks()
	if err != nil {
		return fail.State(err)
	}
	if len(networks) == 0 {
		return nil
	}
	if err := s.Enter(ctx); err != nil {
		return err
	}
	var errs []error
	for _, name := range networks {
		attachments, err := s.Attachments(name)
		errs = append(errs, err)
		for _, a := range attachments {
			if a.State != state.Ready || a.Moving {
				continue
			}
			if err := repairPod(ctx, s, a); err != nil {
				errs = append(errs, fmt.Errorf("container %s: %w", a.ContainerID, err))
			}
		}
	}
	return errors.Join(errs...)
}

func repairPod(ctx context.Context, s *session.Session, a *state.Attachment) error {
	pod, lost := inspect.Pod(a)
	if lost != "" {
		return nil
	}
	defer pod.Close()
	port, err := inspect.Port(ctx, s, a)
	if err != nil {
		return err
	}
	if port.Routes = recorded.Routes(a); a.IPAMType != endpoint.Leased {
		port.Addresses = recorded.Lasting(a)
	}
	diffs, err := s.Links.Check(ctx, pod, port)
	if err != nil {
		return err
	}
	for _, d := range diffs {
		if d.What == "MAC" && a.NetNSCookie == 0 {
			return nil // the path may be another pod's by now
		}
		if d.Object == "interface "+port.Peer && d.What != "MAC" {
			return s.Links.Restore(ctx, pod, port)
		}
	}
	return nil
}
