package teardown

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
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
		func() error { s.PassPorts(ctx, rec.Waiting); return nil },
		func() error { return <-flushFlows(ctx, s.Links, rec) },
		func() error { return removeIFB(ctx, s, rec) },
	)
	if err != nil {
		return err
	}
	// A call that is killed before it removes the record leaves one from which the rest is known, and which does
	// not count as having ports.
	going := *rec
	going.State = state.Adding
	if err := s.Dir.Others().UpdateLocked(&going); err != nil {
		return fail.State(err)
	}
	if err := Unpublished(ctx, s, rec); err != nil {
		return err
	}
	if err := s.Dir.Others().Remove(rec.Network, rec.Hash()); err != nil {
		return fail.State(err)
	}
	return nil
}

// IsDamagedOther says whether an attachment is on record as another program's alone, and that record is damaged.
func IsDamagedOther(dir *state.Dir, network, hash string) bool {
	_, ours := dir.Load(network, hash)
	_, others := dir.Others().Load(network, hash)
	return errors.Is(ours, fs.ErrNotExist) && errors.Is(others, state.ErrDamaged)
}

// DamagedOther takes down what the firewall has of an attachment of another program's, by its hash, and removes the
// record, if that is damaged still.
func DamagedOther(ctx context.Context, s *session.Session, network, hash string) error {
	lock, err := s.Dir.Others().LockAttachment(network, hash)
	if errors.Is(err, state.ErrBusy) {
		return nil // a call is at work on it
	}
	defer lock.Close() // nil where the record is no file, which cannot be locked
	if _, err := s.Dir.Others().Load(network, hash); !errors.Is(err, state.ErrDamaged) {
		return nil
	}
	if err := s.Enter(ctx); err != nil {
		return err
	}
	if err := s.RemoveElements(ctx, hash, nil); err != nil {
		return err
	}
	if err := s.Dir.Others().Remove(network, hash); err != nil {
		return fail.State(err)
	}
	return nil
}

// Unpublished takes back what the way from 127.0.0.1 to an attachment's ports needed, unless other pods need it. For
// a pod in a VLAN that is of two links: of the host's in the VLAN, and of the bridge.
func Unpublished(ctx context.Context, s *session.Session, rec *state.Attachment) error {
	if rec.Other {
		return NotPublished(ctx, s, rec) // a killed call may have begun it
	}
	return closeLoopbackAfter(ctx, s, Known{}, rec)
}

// NotPublished is Unpublished for an attachment whose record has no ports, where a killed call may have left some
// of it.
func NotPublished(ctx context.Context, s *session.Session, rec *state.Attachment) error {
	var errs []error
	for _, name := range slices.Compact([]string{rec.Bridge, rec.GatewayLink()}) {
		if name != "" {
			errs = append(errs, closeLoopback(ctx, s, name, false, rec.Other))
		}
	}
	return errors.Join(errs...)
}

func removeIFB(ctx context.Context, s *session.Session, rec *state.Attachment) error {
	if rec.IFB == "" {
		return nil
	}
	return bandwidth.On(s.Links.Socket()).Remove(ctx, bandwidth.Target{IFB: rec.IFB, Owner: endpoint.AliasOwner(rec.Hash())})
}

// CollectOthers takes down what attachments of other programs' have of ours that keep does not name.
func CollectOthers(ctx context.Context, s *session.Session, network string, keep []ipam.Owner) error {
	valid := map[string]bool{}
	for _, o := range keep {
		valid[ident.Hash(network, o.ContainerID, o.IfName)] = true
	}
	list, damaged, err := s.Dir.Others().List(network)
	errs := []error{err}
	for _, d := range damaged {
		s.Warn(d.Error())
		if d.Hash != "" && !valid[d.Hash] {
			errs = append(errs, DamagedOther(ctx, s, network, d.Hash))
		}
	}
	for _, rec := range list {
		if valid[rec.Hash()] {
			continue
		}
		lock, err := s.Dir.Others().LockAttachment(network, rec.Hash())
		if err != nil {
			continue // a call is at work on it
		}
		errs = append(errs, Other(ctx, s, rec), lock.Close())
	}
	return errors.Join(append(errs, s.Clean(ctx))...)
}
