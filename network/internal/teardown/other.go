package teardown

import (
	"context"
	"errors"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Other takes down what an attachment of another program's has of ours, and its record, whose lock the
// caller has.
func Other(ctx context.Context, s *session.Session, rec *state.Attachment) error {
	if err := s.Enter(ctx); err != nil {
		return err
	}
	err := fail.Join(
		func() error {
			if rec.Bridge == "" {
				return nil
			}
			return s.RemoveElements(ctx, rec.Hash(), rec)
		},
		func() error { return s.PassPorts(ctx, rec.Waiting) },
		func() error { return <-flushFlows(ctx, s.Links, rec) },
		func() error { return removeIFB(ctx, rec) },
	)
	if err != nil {
		return err
	}
	if err := s.Dir.Others().Remove(rec.Network, rec.Hash()); err != nil {
		return fail.State(err)
	}
	return Unpublished(ctx, s, rec)
}

// Unpublished takes back what the way from 127.0.0.1 to an attachment's ports needed, unless others need
// it: for a pod in a VLAN, of the host's link there and of the bridge.
func Unpublished(ctx context.Context, s *session.Session, rec *state.Attachment) error {
	return closeLoopbackAfter(ctx, s, Known{}, rec)
}

func removeIFB(ctx context.Context, rec *state.Attachment) error {
	if rec.IFB == "" {
		return nil
	}
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	return conn.Remove(ctx, bandwidth.Target{IFB: rec.IFB, Owner: endpoint.AliasOwner(rec.Hash())})
}

// CollectOthers takes down what attachments of other programs' have of ours that keep does not name.
func CollectOthers(ctx context.Context, s *session.Session, network string, keep []ipam.Owner) error {
	valid := map[ipam.Owner]bool{}
	for _, o := range keep {
		valid[o] = true
	}
	list, _, err := s.Dir.Others().List(network)
	errs := []error{err}
	for _, rec := range list {
		if valid[ipam.Owner{ContainerID: rec.ContainerID, IfName: rec.IfName}] {
			continue
		}
		lock, err := s.Dir.Others().LockAttachment(network, rec.Hash())
		if err != nil {
			continue // a call is at work on it
		}
		errs = append(errs, Other(ctx, s, rec), lock.Close())
	}
	return errors.Join(errs...)
}
