package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// session is what one call holds of the node.
type session struct {
	settings
	Links    *bridge.Conn
	Firewall *nft.Conn
	Epoch    state.Epoch // of this start of the node; known after Enter

	bridges map[string]*bridge.Link // that are remembered; nil: none is to be

	leave func() error // NetNS
	lock  *state.Lock
	note  string // of the lock, as this call found it
	later []func() error
}

// openSession opens the kernel, without the lock.
func openSession(cfg settings) (*session, error) {
	s := &session{settings: cfg, leave: func() error { return nil }}
	s.Mark = cmp.Or(s.Mark, nft.DefaultMark)
	var err error
	if s.NetNS != nil {
		if s.leave, err = s.NetNS.Enter(); err != nil {
			return nil, err
		}
	}
	if s.Links, err = cfg.DialBridge(); err != nil {
		return nil, errors.Join(err, s.leave())
	}
	if s.Firewall, err = cfg.DialFirewall(&nft.Config{Mark: s.Mark}); err != nil {
		s.Links.Close()
		return nil, errors.Join(err, s.leave())
	}
	return s, nil
}

// Close gives up the locks, then does what Later was given, and closes the sockets.
func (s *session) Close() {
	s.Leave()
	for _, do := range s.later {
		if err := do(); err != nil {
			s.Warn(err.Error())
		}
	}
	s.Links.Close()
	s.Firewall.Close()
	if err := s.leave(); err != nil {
		s.Warn(err.Error())
	}
}

// Later leaves something to Close, when no lock is held: it may take those that come before
// the state's. An error of it is a warning.
func (s *session) Later(do func() error) { s.later = append(s.later, do) }

// Warn logs what an operator should know although the call goes on.
func (s *session) Warn(text string) { s.Log.Warn(printable.Line(text)) }

// Enter takes the shared lock and sees to it that the state belongs to this start
// of the node. It may be called again.
func (s *session) Enter(ctx context.Context) error {
	if s.lock != nil {
		return nil
	}
	var err error
	s.lock, s.Epoch, err = s.Dir.Enter(ctx)
	if err == nil {
		s.readNote()
	}
	return err
}

// Leave gives the lock up, so that the caller can wait for something slow, or take a lock that comes before it.
// Records that were read under the lock may have changed at the next Enter.
func (s *session) Leave() {
	if s.lock == nil {
		return
	}
	s.leaveNote()
	s.lock.Close()
	s.lock = nil
}

// EnterAlone takes the lock exclusively, unless the session holds it so.
func (s *session) EnterAlone(ctx context.Context) error {
	if err := s.Enter(ctx); err != nil || !s.Shared() {
		return err
	}
	return s.lock.Upgrade(ctx)
}

// Shared says whether the session holds the lock, and not exclusively.
func (s *session) Shared() bool { return s.lock.Mode() == state.Shared }

// Ensure has work done under the exclusive lock, unless done says that it needs none: see
// state.Lock.Ensure. Where the lock is exclusive already, it stays so.
func (s *session) Ensure(ctx context.Context, done func() (bool, error), work func() error) error {
	if s.Shared() {
		return s.lock.Ensure(ctx, done, work)
	}
	if is, err := done(); is || err != nil {
		return err
	}
	return work()
}

// The note is which networks the firewall was ready for, in this epoch and namespace,
// when the last call was done with it: so the next one asks for a single number, unless
// others have changed nf_tables since.

func (s *session) readNote() {
	s.note = s.lock.Note()
	text, ok := strings.CutPrefix(s.note, s.Epoch.Token()+" ")
	if !ok {
		text = ""
	}
	s.seen().Use(text)
}

func (s *session) leaveNote() {
	text := s.seen().Text()
	if note := s.Epoch.Token() + " " + text; text != "" && note != s.note {
		// Without it, the next call looks for itself.
		_ = s.lock.SetNote(note)
	}
}

// seen is the firewall's socket, and what was seen over it.
func (s *session) seen() nftnl.Socket { return nftnl.Of(s.Firewall.Socket()) }

// link gives a link of the host's, with nothing but its name where it is missing.
func (s *session) link(ctx context.Context, name string) (*bridge.Link, error) {
	if l := s.bridges[name]; l != nil {
		return l, nil
	}
	l, err := s.Links.Link(ctx, name)
	if name == "" || errors.Is(err, fs.ErrNotExist) {
		return &bridge.Link{Name: name}, nil
	}
	if err == nil && s.bridges != nil && l.Kind == "bridge" {
		s.bridges[name] = l
	}
	return l, err
}

// remember has a bridge asked for once, however many pods are on it, until forget is called. Meanwhile none is changed.
func (s *session) remember() (forget func()) {
	s.bridges = map[string]*bridge.Link{}
	return func() { s.bridges = nil }
}

// others gives the records of the networks but one.
func (s *session) others(than string) ([]*state.Network, error) {
	all, _, err := s.Dir.ListNetworks()
	return slices.DeleteFunc(all, func(o *state.Network) bool { return o.Name == than }), stateError(err)
}

// Attachments gives the records of a network's attachments, and warns of those that are
// damaged.
func (s *session) Attachments(network string) ([]*state.Attachment, error) {
	attachments, damaged, err := s.Dir.List(network)
	if err != nil {
		return nil, stateError(err)
	}
	for _, d := range damaged {
		s.Warn(d.Error())
	}
	return attachments, nil
}

// allAttachments gives those of all networks.
func (s *session) allAttachments() (all []*state.Attachment, _ error) {
	networks, err := s.Dir.Networks()
	err = stateError(err)
	for _, name := range networks {
		attachments, listErr := s.Attachments(name)
		all, err = append(all, attachments...), errors.Join(err, listErr)
	}
	return all, err
}

// locked does something with an attachment's record, as it is under its lock.
func (s *session) locked(network, hash string, do func(*state.Attachment) error) error {
	lock, err := s.Dir.LockAttachment(network, hash)
	if err != nil {
		return err
	}
	defer lock.Close()
	a, err := s.Dir.Load(network, hash)
	if err != nil {
		return err
	}
	return do(a)
}

// errDeleted is how an ADD ends whose record was removed.
func errDeleted() error {
	return failf(ErrTryAgain, "the attachment was deleted, or collected as garbage, while it was being made")
}

// wanted is the error with which an ADD ends whose record was removed. It asks before it
// makes, or takes away, what has the same name for the next ADD of the attachment. One that is done
// is wanted: nil.
func wanted(record *state.Pending) error {
	if record == nil {
		return nil
	}
	gone, err := record.Gone()
	if gone {
		return errDeleted()
	}
	return err
}

// lookEvery is how often an ADD that waits for others looks whether it is wanted still.
const lookEvery = 100 * time.Millisecond

// whileWanted does something that may take long, and ends it when the attachment's record
// is removed: the call that removes it wants the ADD to end, and may wait for a lock that it has.
func whileWanted(ctx context.Context, record *state.Pending, do func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	deleted := errDeleted()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for ctx.Err() == nil {
			if gone, err := record.Gone(); gone && err == nil {
				cancel(deleted)
			}
			select {
			case <-ctx.Done():
			case <-time.After(lookEvery):
			}
		}
	}()
	err := do(ctx)
	cancel(nil)
	<-watched
	if err != nil && context.Cause(ctx) == deleted {
		return deleted
	}
	return err
}
