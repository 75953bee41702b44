package inspect

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Everything is what a comparison of all records with the kernel found: see network.Inspection.
type Everything struct {
	Attachments []OfAttachment
	Networks    []OfNetwork
	Uplinks     []tombolo.Difference
	Strays      *Strays
	Notes       []string // chains of others that may drop what pods send
	Damaged     []tombolo.Difference
}

// OfAttachment is what differs of an attachment.
type OfAttachment struct {
	Record      *state.Attachment
	Differences []tombolo.Difference
}

// OfNetwork is what differs of a network's own parts.
type OfNetwork struct {
	Network     string
	Differences []tombolo.Difference
}

// All compares all that is on record.
func All(ctx context.Context, s *session.Session) (*Everything, error) {
	networks, err := s.Dir.Networks()
	if err != nil {
		return nil, fail.State(err)
	}
	e := &Everything{}
	known := map[string]bool{}
	for _, name := range networks {
		if err := e.network(ctx, s, name, known); err != nil {
			return nil, err
		}
	}
	if err := e.uplinks(ctx, s); err != nil {
		return nil, err
	}
	e.Strays, err = FindStrays(ctx, s, known, networks)
	return e, err
}

// recreate is what helps where nothing can be repaired.
func recreate(text string) tombolo.Difference {
	return tombolo.Difference{Text: text, Remedy: tombolo.RemedyRecreate}
}

func (e *Everything) network(ctx context.Context, s *session.Session, name string, known map[string]bool) error {
	attachments, damaged, err := s.Dir.List(name)
	if err != nil {
		return fail.State(err)
	}
	for _, d := range damaged {
		known[d.Hash] = true
		e.Damaged = append(e.Damaged, recreate(d.Error()))
	}
	rec, err := s.Dir.LoadNetwork(name)
	if err == nil {
		diffs, err := Network(ctx, s, rec, attachments)
		if err != nil {
			return err
		}
		if len(attachments) > 0 {
			if err := e.mayDrop(ctx, s, rec); err != nil {
				return err
			}
		}
		if len(diffs) > 0 {
			e.Networks = append(e.Networks, OfNetwork{name, diffs})
		}
	} else {
		rec = nil
		if !errors.Is(err, fs.ErrNotExist) {
			e.Damaged = append(e.Damaged, recreate(err.Error()))
		}
	}
	for _, a := range attachments {
		known[a.Hash()] = true
		one := OfAttachment{Record: a}
		switch {
		case a.State != state.Ready && underWay(s, a):
		case a.State != state.Ready:
			one.Differences = []tombolo.Difference{recreate("its ADD did not finish")}
		case rec == nil:
			one.Differences = []tombolo.Difference{recreate("its network has no record")}
		default:
			if one.Differences, err = Attachment(ctx, s, rec, a); err != nil {
				return err
			}
		}
		e.Attachments = append(e.Attachments, one)
	}
	return nil
}

// underWay says that a call is at work on an attachment: it holds the lock of its record.
func underWay(s *session.Session, a *state.Attachment) bool {
	lock, err := s.Dir.LockAttachment(a.Network, a.Hash())
	if err == nil {
		_ = lock.Close()
	}
	return errors.Is(err, state.ErrBusy)
}

// uplinks compares the takeovers, but for what networks have said already.
func (e *Everything) uplinks(ctx context.Context, s *session.Session) error {
	nics, err := s.Dir.Uplinks()
	if err != nil {
		return fail.State(err)
	}
	found := &Findings{}
	for _, nic := range nics {
		diffs, err := s.Uplinks().Differences(ctx, nic, "")
		if err != nil {
			return err
		}
		found.AddAll(diffs, tombolo.RemedyRepair)
	}
	e.Uplinks = slices.DeleteFunc(found.List, func(d tombolo.Difference) bool {
		return slices.ContainsFunc(e.Networks, func(n OfNetwork) bool { return slices.Contains(n.Differences, d) })
	})
	return nil
}

// mayDrop notes the chains that only a packet can tell about. They are no difference.
func (e *Everything) mayDrop(ctx context.Context, s *session.Session, rec *state.Network) error {
	obstacles, err := s.Obstacles(ctx, rec)
	for _, o := range obstacles {
		if text := o.String(); o.Maybe && !slices.Contains(e.Notes, text) {
			e.Notes = append(e.Notes, text)
		}
	}
	return err
}
