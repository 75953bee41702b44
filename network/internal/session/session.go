// Package session has the node open for one call: the kernel, the records, and the lock on
// them.
package session

import (
	"context"
	"log/slog"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Config says what to open.
type Config struct {
	Dir          *state.Dir
	LeaseDir     string // empty: no pod leases its address, and the host's own lease is left alone
	Mark         uint32 // of packets; 0 is nft.DefaultMark
	Log          *slog.Logger
	DialBridge   func() (*bridge.Conn, error)
	DialFirewall func(*nft.Config) (*nft.Conn, error)
}

// Session is what one call holds of the node.
type Session struct {
	Config
	Links    *bridge.Conn
	Firewall *nft.Conn
	Epoch    state.Epoch // of this start of the node; known after Enter

	lock  *state.Lock
	note  string // of the lock, as this call found it
	later []func() error
}

// Open opens the kernel, without the lock.
func Open(cfg Config) (*Session, error) {
	s := &Session{Config: cfg}
	if s.Mark == 0 {
		s.Mark = nft.DefaultMark
	}
	var err error
	if s.Links, err = cfg.DialBridge(); err != nil {
		return nil, err
	}
	if s.Firewall, err = cfg.DialFirewall(&nft.Config{Mark: s.Mark}); err != nil {
		s.Links.Close()
		return nil, err
	}
	return s, nil
}

// Foreign is what other firewalls have to let pods pass by, over the same socket.
func (s *Session) Foreign(adminChain string) *foreign.Conn {
	return foreign.On(s.Firewall.Socket(), &foreign.Config{Mark: s.Mark, AdminChain: adminChain})
}

// Close gives up the locks, then does what Later was given, and closes the sockets.
func (s *Session) Close() {
	s.Leave()
	for _, do := range s.later {
		if err := do(); err != nil {
			s.Warn(err.Error())
		}
	}
	s.Links.Close()
	s.Firewall.Close()
}

// Later leaves something to Close, when no lock is held: it may take those that come before
// the state's. An error of it is a warning.
func (s *Session) Later(do func() error) { s.later = append(s.later, do) }

// Warn logs what an operator should know although the call goes on.
func (s *Session) Warn(text string) { s.Log.Warn(printable.Line(text)) }

// Enter takes the shared lock and sees to it that the state belongs to this start
// of the node. It may be called again.
func (s *Session) Enter(ctx context.Context) error {
	if s.lock != nil {
		return nil
	}
	var err error
	s.lock, s.Epoch, err = s.Dir.Enter(ctx, s.begin)
	if err == nil {
		s.readNote()
	}
	return err
}

// Leave gives the lock up, so that the caller can wait for something slow, or take a lock that comes before it.
// What was read under the lock may have changed at the next Enter.
func (s *Session) Leave() {
	if s.lock == nil {
		return
	}
	s.leaveNote()
	s.lock.Close()
	s.lock = nil
}

// EnterAlone takes the lock exclusively.
func (s *Session) EnterAlone(ctx context.Context) error {
	if err := s.Enter(ctx); err != nil {
		return err
	}
	return s.lock.Upgrade(ctx)
}

// Shared says whether the session holds the lock, and not exclusively.
func (s *Session) Shared() bool { return s.lock.Mode() == state.Shared }

// Ensure has work done under the exclusive lock, unless done says that it needs none: see
// state.Lock.Ensure. Where the lock is exclusive already, it stays so.
func (s *Session) Ensure(ctx context.Context, done func() (bool, error), work func() error) error {
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

func (s *Session) readNote() {
	s.note = s.lock.Note()
	var cache nft.Cache
	if text, ok := strings.CutPrefix(s.note, s.Epoch.Token()+" "); ok {
		cache, _ = nft.ParseCache(text) // else as if there were none
	}
	s.Firewall.UseCache(cache)
}

func (s *Session) leaveNote() {
	cache := s.Firewall.Cache()
	if note := s.Epoch.Token() + " " + cache.String(); len(cache.Networks) > 0 && note != s.note {
		// Without it, the next call looks for itself.
		_ = s.lock.SetNote(note)
	}
}

// begin takes down, when a start of the node begins, what pods of an earlier one
// left in the kernel. After a reboot there is nothing; where a nested node
// restarts, its namespace may be the machine's.
func (s *Session) begin(start state.EpochStart) error {
	for _, a := range start.Stale {
		if err := s.RemoveElements(context.Background(), a.Hash(), a); err != nil {
			s.Warn("drop elements of an earlier start: " + err.Error())
		}
	}
	for _, a := range start.Stale {
		if a.Bridge == "" || !endpoint.PublishesIPv4(a) {
			continue
		}
		for _, name := range []string{a.GatewayLink(), a.Bridge} {
			if err := loopback.Shut(context.Background(), s.Links, name, true); err != nil {
				s.Warn("close the loopback of an earlier start: " + err.Error())
			}
		}
	}
	return nil
}

// IsKnown says whether an attachment's record, which may be nil, tells all that the firewall's sets have of it.
func IsKnown(rec *state.Attachment) bool {
	return rec != nil && rec.State == state.Ready && !rec.Moving
}

// RemoveElements takes an attachment out of the firewall's sets: by its keys where
// its record tells them, else by its owner's name, which is a search.
func (s *Session) RemoveElements(ctx context.Context, hash string, rec *state.Attachment) error {
	if IsKnown(rec) && s.Firewall.Remove(ctx, endpoint.Of(rec)) == nil {
		return nil
	}
	return s.Firewall.RemoveOwners(ctx, nft.Owner(hash))
}

// Attachments gives the records of a network's attachments, and warns of those that are
// damaged.
func (s *Session) Attachments(network string) ([]*state.Attachment, error) {
	attachments, damaged, err := s.Dir.List(network)
	if err != nil {
		return nil, fail.State(err)
	}
	for _, d := range damaged {
		s.Warn(d.Error())
	}
	return attachments, nil
}

// Uplinks is what takeovers need of this call.
func (s *Session) Uplinks() *takeover.Node {
	return &takeover.Node{Dir: s.Dir, Links: s.Links, LeaseDir: s.LeaseDir, Later: s.Later}
}

// Obstacles lists what stops pods of a network, or may stop them, and is out of reach, or left to its owner.
func (s *Session) Obstacles(ctx context.Context, rec *state.Network) ([]foreign.Obstacle, error) {
	c := foreign.On(s.Firewall.Socket(), &foreign.Config{Mark: uint32(rec.Mark), AdminChain: rec.AdminChain})
	return c.Obstacles(ctx, foreign.Path{Bridge: rec.GatewayLink(), Prefixes: rec.Subnets})
}
