package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/nftnl"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// session holds the sockets and locks of one call.
type session struct {
	settings
	Links    *bridge.Conn
	Firewall *nft.Conn
	Epoch    state.Epoch // the present epoch, usually one boot of the node; known after enter

	leaveNS    func() error // returns to the caller's namespace
	lock       *state.Lock
	generation string // the note about nf_tables in the lock's file, as this call found it
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

// close releases the state directory's lock, calls the functions passed to deferUntilClose, closes the sockets, and
// returns to the caller's namespace.
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

// deferUntilClose makes close call a function, when no lock is held. The function may take locks that come before the
// state directory's lock in the order of locks. Its error becomes a warning.
func (s *session) deferUntilClose(do func() error) { s.deferred = append(s.deferred, do) }

// warn logs a message for the operator about a problem that does not end the call.
func (s *session) warn(text string) { s.Log.Warn(printable.Line(text)) }

// enter takes the state directory's lock, shared. If the recorded epoch is over, usually by a reboot, enter begins a
// new one, which deletes the old records. If the session already holds the lock, it does nothing.
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

// leave releases the state directory's lock. The caller can then wait for something slow, or take a lock that comes
// earlier in the order of locks. It first notes nf_tables' generation in the lock's file. Records that were read under
// the lock may have changed at the next enter.
func (s *session) leave() {
	if s.lock == nil {
		return
	}
	s.saveGeneration()
	s.lock.Close()
	s.lock = nil
}

// enterAlone takes the state directory's lock exclusively, unless the session holds it exclusively already.
func (s *session) enterAlone(ctx context.Context) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	return s.lock.Upgrade(ctx)
}

// The file of the state directory's lock has a note, which leave writes. It contains nf_tables' generation, and
// checksums of the rulesets that were complete in this generation (nftnl.Verified). The note is valid only in its epoch
// and network namespace. While the generation stays the same, nf_tables is unchanged, and the next call requests this
// number instead of the rules.

// readGeneration passes the generation in the lock's file to the firewall's socket, if it was noted in this epoch,
// usually this boot.
func (s *session) readGeneration() {
	s.generation = s.lock.Note()
	text, ok := strings.CutPrefix(s.generation, s.Epoch.Token()+" ")
	if !ok {
		text = ""
	}
	s.rules().Use(text)
}

// saveGeneration writes the epoch and the generation of the nf_tables ruleset into the lock's file. The next call then
// knows whether the ruleset has changed.
func (s *session) saveGeneration() {
	text := s.rules().Text()
	if now := s.Epoch.Token() + " " + text; text != "" && now != s.generation {
		// A failure is harmless: without the note, the next call looks at the firewall.
		_ = s.lock.SetNote(now)
	}
}

// rules returns the firewall's netlink socket. The socket remembers the generation of the nf_tables ruleset.
func (s *session) rules() nftnl.SharedSocket { return nftnl.Of(s.Firewall.Socket()) }

// link returns a link of the host. If the link does not exist, the result has only a name.
func (s *session) link(ctx context.Context, name string) (*bridge.Link, error) {
	l, err := s.Links.Link(ctx, name)
	if name == "" || errors.Is(err, fs.ErrNotExist) {
		return &bridge.Link{Name: name}, nil
	}
	return l, err
}

// otherNetworks returns the records of all networks except for the named one.
func (s *session) otherNetworks(except string) ([]*state.Network, error) {
	all, _, err := s.Dir.ListNetworks()
	return slices.DeleteFunc(all, func(o *state.Network) bool { return o.Name == except }), stateError(err)
}

// attachments returns the records of a network's attachments, and warns of damaged ones.
func (s *session) attachments(network string) ([]*state.Attachment, error) {
	attachments, damaged, err := s.Dir.List(network)
	for _, d := range damaged {
		s.warn(d.Error())
	}
	return attachments, stateError(err)
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

// refuseDeleted returns an error if an ADD's record was removed. Call it before each change of objects that are named
// after the attachment, since another ADD may own them by then. Outside of an ADD, record is nil, and refuseDeleted
// returns nil.
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

// lookEvery is the pause between two checks by a waiting ADD that its record still exists.
const lookEvery = 100 * time.Millisecond

// runWhileRecorded runs a function that may take long, and ends it when the attachment's record is removed. The call
// that removes the record wants the ADD to end, and may wait for a lock that the ADD holds.
func runWhileRecorded(ctx context.Context, record *state.Pending, do func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	deleted := errDeleted()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		_ = poll(ctx, lookEvery, unlimited, func() (bool, error) {
			if gone, err := record.Gone(); gone && err == nil {
				cancel(deleted)
			}
			return false, nil
		})
	}()

	err := do(ctx)
	cancel(nil)
	<-watched
	if err != nil && context.Cause(ctx) == deleted {
		return deleted
	}

	return err
}

// DefaultStateDir is the state directory if Config.StateDir is empty.
const DefaultStateDir = state.DefaultDir

// UndoTimeout limits the time for undoing a failed Add. It does not depend on the Add's context, whose end may have
// caused the failure.
const UndoTimeout = 10 * time.Second

// Config holds the parameters of a Node. A nil Config and the zero value of a field mean the defaults.
type Config struct {
	// NetNS is the network namespace that contains the bridges, normally the host's. nil means the calling thread's
	// namespace. NetNS must stay open as long as the Node is used. Each call enters NetNS, and leaves it when it
	// returns.
	NetNS *netns.NS
	// StateDir is the directory with the records of networks and attachments. Empty means DefaultStateDir. All
	// programs on one node must use the same directory.
	StateDir string
	// LeaseDir is the directory with the records of DHCP leases. If it is empty, no pod can lease its address, and
	// Collect and Remove do not look for leases.
	LeaseDir string
	// Mark is the bit of the packet mark that means that a packet of a pod may be forwarded. All networks of a node
	// share it. 0 means nft.DefaultMark for Add, Check, Ready, Del and Change. Other calls then prefer the bit in the
	// networks' records.
	Mark uint32
	// Allocators returns the allocator to which Del releases addresses. origin is the recorded origin of a network's
	// attachment; nil selects the network's present allocator. If Allocators returns nil, the addresses are not
	// released. If Allocators itself is nil, only addresses with an origin of type host-local can be released. Del then
	// fails for the addresses of any other allocator.
	Allocators func(network string, origin *Origin) (ipam.Allocator, error)
	// Log receives warnings for the operator about problems that do not make a call fail. nil discards them.
	Log *slog.Logger
	// Step is called with a name after each step of Add, and of the removal in Del. If Step returns an error, Add
	// stops there and undoes its changes. nil means no calls.
	Step func(step string) error
}

// Node manages the networks and pods of one network namespace, normally the host's, together with their records. It
// holds no socket, file or lock between calls. Several goroutines and several processes may call its methods at the
// same time.
type Node struct{ cfg settings }

// settings is the Config of an open Node. Its Log is never nil. Dir is the state directory.
type settings struct {
	Config
	Dir  *state.Dir
	dial nl.Dialer // nil outside of tests
}

// Open returns a Node. If cfg.StateDir is not a valid absolute path, the error matches ErrInvalid. Open does not create
// the state directory; the first call that takes the directory's lock does.
func Open(ctx context.Context, cfg *Config) (*Node, error) {
	cfg = cmp.Or(cfg, &Config{})
	dir, err := state.Open(cmp.Or(cfg.StateDir, DefaultStateDir))
	if err != nil {
		return nil, failf(ErrInvalid, "%w", err)
	}

	n := &Node{settings{*cfg, dir, nl.DialerOf(ctx)}}
	n.cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return n, nil
}

// reportStep calls Config.Step, unless that is nil, with the name of the step that a call has just completed.
func (n *Node) reportStep(name string) error {
	if n.cfg.Step == nil {
		return nil
	}
	return n.cfg.Step(name)
}

// withEntered opens a session and takes the state directory's lock, shared. It calls the function do with the session,
// and closes the session.
func (n *Node) withEntered(ctx context.Context, do func(*session) error) error {
	s, err := openSession(n.cfg)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.enter(ctx); err != nil {
		return err
	}
	return do(s)
}

// withSession opens a session with openKnown, calls the function do with the session, and closes the session.
func (n *Node) withSession(do func(*session) error, networks ...string) error {
	s, err := n.openKnown(networks...)
	if err != nil {
		return err
	}
	defer s.close()
	return do(s)
}

// openKnown opens a session for a call without a network's configuration. If one of the given names cannot be a
// network's name, the error matches ErrInvalid. A network with the name need not exist. If Config.Mark is 0, openKnown
// reads the mark from a network's record: all networks share one mark.
func (n *Node) openKnown(networks ...string) (*session, error) {
	for _, name := range networks {
		if err := checkName(name); err != nil {
			return nil, err
		}
	}

	cfg := n.cfg
	if cfg.Mark == 0 {
		records, _, err := n.cfg.Dir.ListNetworks()
		if err != nil {
			return nil, stateError(err)
		}
		for _, rec := range records {
			cfg.Mark = cmp.Or(rec.Mark, cfg.Mark)
		}
	}

	return openSession(cfg)
}

// unlimited makes poll continue until done reports true or returns an error, or ctx ends.
const unlimited = time.Duration(-1)

// poll calls done, with pauses, until done reports true or returns an error, which poll returns. After limit, poll
// returns nil. If ctx ends, poll returns ctx's error.
func poll(ctx context.Context, pause, limit time.Duration, done func() (bool, error)) error {
	for end := time.Now().Add(limit); ; {
		if is, err := done(); is || err != nil || limit != unlimited && !time.Now().Before(end) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// undoSteps is a list of functions. Each function undoes one step.
type undoSteps []func(context.Context) error

func (u *undoSteps) push(step func(context.Context) error) { *u = append(*u, step) }

// run calls the functions in reverse order, within UndoTimeout, and returns cause joined with their errors.
func (u undoSteps) run(cause error) error {
	ctx, cancel := context.WithTimeout(context.Background(), UndoTimeout)
	defer cancel()
	errs := []error{cause}
	for i := len(u) - 1; i >= 0; i-- {
		errs = append(errs, u[i](ctx))
	}
	return errors.Join(errs...)
}
