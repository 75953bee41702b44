package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// session holds the sockets and locks of one call.
type session struct {
	settings
	Links    *bridge.Conn
	Firewall *nft.Conn
	Epoch    state.Epoch // the epoch of this boot of the node; known after enter

	bridges map[string]*bridge.Link // cached bridges; nil if nothing is cached

	leaveNS    func() error // returns to the caller's namespace
	lock       *state.Lock
	generation string // from the lock's file, as this call found it
	deferred   []func() error
}

// openSession opens a call's sockets, and enters cfg.NetNS. It takes no lock.
func openSession(cfg settings) (*session, error) {
	s := &session{settings: cfg, leaveNS: func() error { return nil }}
	s.Mark = cmp.Or(s.Mark, nft.DefaultMark)
	var err error
	if s.NetNS != nil {
		if s.leaveNS, err = s.NetNS.Enter(); err != nil {
			return nil, err
		}
	}

	if s.Links, err = s.dialLinks(); err != nil {
		return nil, errors.Join(err, s.leaveNS())
	}

	if s.Firewall, err = s.dialFirewall(); err != nil {
		s.Links.Close()
		return nil, errors.Join(err, s.leaveNS())
	}

	return s, nil
}

func (s *session) dialLinks() (*bridge.Conn, error) {
	if s.dial == nil {
		return bridge.Dial(nil)
	}
	conn, err := s.dial(unix.NETLINK_ROUTE, false)
	return bridge.On(conn, func() (tombolo.Socket, error) { return s.dial(unix.NETLINK_ROUTE, true) }), err
}

func (s *session) dialFirewall() (*nft.Conn, error) {
	cfg := &nft.Config{Mark: s.Mark}
	if s.dial == nil {
		return nft.Dial(cfg)
	}
	conn, err := s.dial(unix.NETLINK_NETFILTER, false)
	return nft.On(conn, cfg), err
}

// close releases the locks, then calls the functions given to deferUntilClose, and closes the sockets.
func (s *session) close() {
	s.leave()
	for _, do := range s.deferred {
		if err := do(); err != nil {
			s.warn(err.Error())
		}
	}

	s.Links.Close()
	s.Firewall.Close()
	if err := s.leaveNS(); err != nil {
		s.warn(err.Error())
	}
}

// deferUntilClose leaves a function to Close, which calls it when no lock is held. It may take locks that come before
// the state's. Its error becomes a warning.
func (s *session) deferUntilClose(do func() error) { s.deferred = append(s.deferred, do) }

// warn logs a message for the operator although the call continues.
func (s *session) warn(text string) { s.Log.Warn(printable.Line(text)) }

// enter takes the shared lock, and ensures that the state belongs to this boot of the node. It may be called again.
func (s *session) enter(ctx context.Context) error {
	if s.lock != nil {
		return nil
	}
	var err error
	s.lock, s.Epoch, err = s.Dir.Enter(ctx)
	if err == nil {
		s.readGeneration()
	}
	return err
}

// leave releases the lock, so that the caller can wait for something slow, or take a lock that comes before it.
// Records that were read under the lock may have changed at the next enter.
func (s *session) leave() {
	if s.lock == nil {
		return
	}
	s.saveGeneration()
	s.lock.Close()
	s.lock = nil
}

// enterAlone takes the lock exclusively, unless the session holds it exclusively already.
func (s *session) enterAlone(ctx context.Context) error {
	if err := s.enter(ctx); err != nil || !s.shared() {
		return err
	}
	return s.lock.Upgrade(ctx)
}

// shared reports whether the session holds the lock, but not exclusively.
func (s *session) shared() bool { return s.lock.Mode() == state.Shared }

// ensure runs work under the exclusive lock, unless done reports that it is unnecessary: see state.Lock.Ensure. An
// exclusive lock stays exclusive.
func (s *session) ensure(ctx context.Context, done func() (bool, error), work func() error) error {
	if s.shared() {
		return s.lock.Ensure(ctx, done, work)
	}
	if is, err := done(); is || err != nil {
		return err
	}
	return work()
}

// The lock's file holds nf_tables' generation at the end of the last call, with the networks that the firewall was
// ready for then, in this epoch and namespace. While the generation stays the same, nobody has changed nf_tables, and
// the next call requests this number instead of the rules.

// readGeneration passes the generation in the lock's file to the firewall's socket.
func (s *session) readGeneration() {
	s.generation = s.lock.Note()
	text, ok := strings.CutPrefix(s.generation, s.Epoch.Token()+" ")
	if !ok {
		text = ""
	}
	s.rules().Use(text)
}

// saveGeneration writes the generation that the firewall's socket knows into the lock's file.
func (s *session) saveGeneration() {
	text := s.rules().Text()
	if now := s.Epoch.Token() + " " + text; text != "" && now != s.generation {
		// A failure is harmless: without the note, the next call looks at the firewall.
		_ = s.lock.SetNote(now)
	}
}

// firewallNetwork returns the firewall's socket, which knows the generation.
func (s *session) rules() nftnl.SharedSocket { return nftnl.Of(s.Firewall.Socket()) }

// link returns a link of the host. If the link does not exist, the result has only a name.
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

// cacheBridges makes the method link request each bridge from the kernel only once, however many pods are on it. The
// effect ends when the caller calls forget. The caller must not change a bridge before that.
func (s *session) cacheBridges() (forget func()) {
	s.bridges = map[string]*bridge.Link{}
	return func() { s.bridges = nil }
}

// otherNetworks returns the records of all networks except for the named one.
func (s *session) otherNetworks(except string) ([]*state.Network, error) {
	all, _, err := s.Dir.ListNetworks()
	return slices.DeleteFunc(all, func(o *state.Network) bool { return o.Name == except }), stateError(err)
}

// attachments returns the records of a network's attachments, and warns of damaged ones.
func (s *session) attachments(network string) ([]*state.Attachment, error) {
	attachments, damaged, err := s.Dir.List(network)
	if err != nil {
		return nil, stateError(err)
	}
	for _, d := range damaged {
		s.warn(d.Error())
	}
	return attachments, nil
}

// allAttachments returns the records of all networks' attachments.
func (s *session) allAttachments() (all []*state.Attachment, _ error) {
	networks, err := s.Dir.Networks()
	err = stateError(err)
	for _, name := range networks {
		attachments, listErr := s.attachments(name)
		all, err = append(all, attachments...), errors.Join(err, listErr)
	}
	return all, err
}

// withLockedRecord takes the lock of an attachment's record, and calls the function do with the record. If another call
// holds the lock, the error matches state.ErrBusy.
func (s *session) withLockedRecord(network, hash string, do func(*state.Attachment) error) error {
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

// errDeleted returns the error of an ADD whose record another call has removed.
func errDeleted() error {
	return failf(ErrTryAgain, "the attachment was deleted, or collected as garbage, while it was being made")
}

// refuseDeleted returns an error if an ADD's record was removed. Call it before creating or removing anything that has
// the same name for the next ADD of the attachment. For a complete ADD it returns nil.
func refuseDeleted(record *state.Pending) error {
	if record == nil {
		return nil
	}
	gone, err := record.Gone()
	if gone {
		return errDeleted()
	}
	return err
}

// lookEvery is how often an ADD that waits for others checks that its record still exists.
const lookEvery = 100 * time.Millisecond

// runWhileRecorded runs a function that may take long, and ends it when the attachment's record is removed: the call
// that removes it wants the ADD to end, and may wait for a lock that it holds.
func runWhileRecorded(ctx context.Context, record *state.Pending, do func(context.Context) error) error {
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
