package session

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// PassPorts has those attachments publish their host ports that waited for one which has just
// lost its own. It needs the state's lock. What cannot be is no reason for that one to stay: Repair
// tries again.
func (s *Session) PassPorts(ctx context.Context, waiting []state.Waiting) {
	for i, w := range waiting {
		if err := s.Publish(ctx, w, waiting[i+1:]...); err != nil {
			s.Warn("pass host ports on to another attachment of the container: " + err.Error())
		}
	}
}

// How often a record that is locked is looked at again, and when.
const (
	busyTries = 20
	busyPause = 5 * time.Millisecond
)

// withholds says whether an attachment whose Add is done has host ports withheld.
func (s *Session) withholds(w state.Waiting) bool {
	a, err := s.Dir.Load(w.Network, w.Hash)
	return err == nil && a.State == state.Ready && slices.ContainsFunc(a.Published, func(p state.Published) bool { return p.Withheld })
}

// Publish publishes what an attachment's record has as withheld, unless somebody else has it;
// others may wait for it then. An attachment that another call is at work on, or that is gone, is
// passed over: what is withheld still, Repair publishes.
func (s *Session) Publish(ctx context.Context, w state.Waiting, others ...state.Waiting) error {
	dir := s.Dir
	lock, err := dir.LockAttachment(w.Network, w.Hash)
	// Another Publish may have it for a moment, which has met with a conflict that is over.
	for i := 0; i < busyTries && errors.Is(err, state.ErrBusy) && s.withholds(w); i++ {
		time.Sleep(busyPause)
		lock, err = dir.LockAttachment(w.Network, w.Hash)
	}
	if err != nil {
		return nil
	}
	defer lock.Close()
	a, err := dir.Load(w.Network, w.Hash)
	if err != nil || a.State != state.Ready {
		return nil
	}
	a.Waiting = append(a.Waiting, others...)
	seen, err := s.seen(a)
	if err != nil {
		return err
	}
	was, changed := seen(a), false
	for i := range a.Published {
		one := &a.Published[i]
		if !one.Withheld {
			continue
		}
		before := seen(a)
		one.Withheld = false
		err := s.Firewall.Update(ctx, before, seen(a))
		if errors.As(err, new(*nft.ConflictError)) {
			one.Withheld = true
			continue
		}
		if err != nil {
			return err
		}
		changed = true
	}
	if !changed {
		return nil
	}
	if err := dir.UpdateLocked(a); err != nil {
		return errors.Join(err, s.Firewall.Update(ctx, seen(a), was))
	}
	return nil
}

// seen gives how the firewall sees an attachment, whose record is about to change.
func (s *Session) seen(a *state.Attachment) (func(*state.Attachment) nft.Endpoint, error) {
	n, err := s.Dir.LoadNetwork(a.Network)
	return func(a *state.Attachment) nft.Endpoint { return endpoint.In(a, n) }, err
}

// Await has an attachment wait for the host ports of another of its container, and be answered by that one where
// the pod calls a port from its address here.
func (s *Session) Await(ctx context.Context, has *state.Attachment, w state.Waiting) error {
	for _, o := range has.Waiting {
		if same(o, w) && slices.Equal(o.Addresses, w.Addresses) {
			return nil
		}
	}
	return s.setWaiting(ctx, has, func(list []state.Waiting) []state.Waiting {
		return append(slices.DeleteFunc(list, func(o state.Waiting) bool { return same(o, w) }), w)
	})
}

// StopWaiting is the reverse, for an attachment that goes: its addresses may be another pod's then. That it
// cannot be is no reason for that one to stay.
func (s *Session) StopWaiting(ctx context.Context, gone *state.Attachment) {
	w := state.Waiting{Network: gone.Network, Hash: gone.Hash()}
	isIt := func(o state.Waiting) bool { return same(o, w) }
	networks, err := s.Dir.Networks()
	for _, name := range networks {
		list, listErr := s.Attachments(name)
		err = errors.Join(err, listErr)
		for _, has := range list {
			if has.ContainerID == gone.ContainerID && slices.ContainsFunc(has.Waiting, isIt) {
				err = errors.Join(err, s.setWaiting(ctx, has, func(list []state.Waiting) []state.Waiting { return slices.DeleteFunc(list, isIt) }))
			}
		}
	}
	if err != nil {
		s.Warn("have an attachment wait for host ports no more: " + err.Error())
	}
}

func same(a, b state.Waiting) bool { return a.Network == b.Network && a.Hash == b.Hash }

// setWaiting changes what waits for an attachment's host ports, on record and in the firewall.
func (s *Session) setWaiting(ctx context.Context, has *state.Attachment, change func([]state.Waiting) []state.Waiting) error {
	lock, err := s.Dir.LockAttachment(has.Network, has.Hash())
	if err != nil {
		return err
	}
	defer lock.Close()
	if has, err = s.Dir.Load(has.Network, has.Hash()); err != nil {
		return err
	}
	seen, err := s.seen(has)
	if err != nil {
		return err
	}
	before := seen(has)
	has.Waiting = change(has.Waiting)
	if err := s.Firewall.Update(ctx, before, seen(has)); err != nil {
		return err
	}
	return s.Dir.UpdateLocked(has)
}
