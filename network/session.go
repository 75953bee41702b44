package network

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/nft"
)

// session is what one call holds of the node: the kernel, the state directory, and the
// lock on it.
type session struct {
	log      *slog.Logger
	leaseDir string // empty: see Config.LeaseDir
	mark     uint32 // of packets
	br       *bridge.Conn
	fw       *nft.Conn
	dir      *state.Dir
	lock     *state.Lock
	epoch    state.Epoch
	note     string // of the lock, as this call found it

	// hostLease is the lock of the lease that the host has by a NIC, where a command has it
	// all the time.
	hostLease *lease.Held
	// later is done once no lock is held: it takes locks that come before the state's.
	later []func() error
}

// open opens the kernel, without the lock.
func (n *Node) open(mark uint32) (*session, error) {
	if mark == 0 {
		mark = nft.DefaultMark
	}
	s := &session{log: n.log, leaseDir: n.leaseDir, dir: n.dir, mark: mark}
	var err error
	if s.br, err = n.dialBridge(); err != nil {
		return nil, err
	}
	if s.fw, err = n.dialFirewall(&nft.Config{Mark: mark}); err != nil {
		s.br.Close()
		return nil, err
	}
	return s, nil
}

// Close gives everything back, the locks first, and does what was left for then.
func (s *session) Close() {
	s.leave()
	if s.hostLease != nil {
		s.hostLease.Close()
	}
	for _, do := range s.later {
		if err := do(); err != nil {
			s.warn(err.Error())
		}
	}
	s.br.Close()
	s.fw.Close()
}

// warn is for what was worked around.
func (s *session) warn(text string) { s.log.Warn(printable.Line(text)) }

// enter takes the shared lock and sees to it that the state belongs to this life
// of the node. It may be called again.
func (s *session) enter(ctx context.Context) error {
	if s.lock != nil {
		return nil
	}
	var err error
	s.lock, s.epoch, err = s.dir.Enter(ctx, s.begin)
	if err == nil {
		s.readNote()
	}
	return err
}

// leave gives the lock up, so that something slow can be waited for, or a lock that
// comes before it. What was seen under it may be otherwise after the next enter.
func (s *session) leave() {
	if s.lock == nil {
		return
	}
	s.leaveNote()
	s.lock.Close()
	s.lock = nil
}

// enterAlone takes the lock exclusively.
func (s *session) enterAlone(ctx context.Context) error {
	if err := s.enter(ctx); err != nil {
		return err
	}
	return s.lock.Upgrade(ctx)
}

// The note is which networks the firewall was ready for, in this epoch and namespace,
// when the last call was done with it: so the next one asks for a single number, unless
// others have changed nf_tables since.

func (s *session) readNote() {
	s.note = s.lock.Note()
	var seal nft.Seal
	if text, ok := strings.CutPrefix(s.note, s.epoch.Token()+" "); ok {
		seal, _ = nft.ParseSeal(text) // else as if there were none
	}
	s.fw.Trust(seal)
}

func (s *session) leaveNote() {
	seal := s.fw.Seal()
	if note := s.epoch.Token() + " " + seal.String(); len(seal.Networks) > 0 && note != s.note {
		// Without it, the next call looks for itself.
		_ = s.lock.SetNote(note)
	}
}

// begin takes down, when a life of the node begins, what pods of an earlier one
// left in the kernel. After a reboot there is nothing; where a nested node
// restarts, its namespace may be the machine's.
func (s *session) begin(life state.NewLife) error {
	for _, a := range life.Stale {
		if err := s.removeElements(context.Background(), a.Hash(), a); err != nil {
			s.warn("drop elements of an earlier life: " + err.Error())
		}
	}
	for _, a := range life.Stale {
		if a.Bridge == "" || !endpoint.PublishesIPv4(a) {
			continue
		}
		if err := loopback.Shut(context.Background(), s.br, a.Bridge, true); err != nil {
			s.warn("close the loopback of an earlier life: " + err.Error())
		}
	}
	return nil
}

// removeElements takes an attachment out of the firewall's sets: by its keys where
// its record tells them, else by its owner's name, which is a search.
func (s *session) removeElements(ctx context.Context, hash string, rec *state.Attachment) error {
	if rec == nil || rec.State != state.Ready || rec.Moving {
		return s.fw.RemoveOwners(ctx, nft.Owner(hash))
	}
	return s.fw.Remove(ctx, endpoint.Of(rec))
}

// ipamNode is what an allocator of a network is told of the node.
func (s *session) ipamNode(network string) ipam.Node {
	return ipam.Node{
		Epoch: ipam.Epoch{Token: s.epoch.Token(), Started: s.epoch.Started},
		Live:  func(ctx context.Context) ([]ipam.Live, error) { return s.live(ctx, network) },
		Hash:  (&Network{Name: network}).hashOf,
		InUse: func(hash string) bool {
			_, err := s.dir.Load(network, hash)
			return !errors.Is(err, fs.ErrNotExist)
		},
		Warn: s.warn,
	}
}

// live lists the addresses that pods of a network have in the kernel: by the
// aliases of their ports, and by their nf_tables elements where an alias was too
// short for them.
func (s *session) live(ctx context.Context, network string) ([]ipam.Live, error) {
	links, err := s.br.Veths(ctx)
	if err != nil {
		return nil, err
	}
	var list []ipam.Live
	ports := map[string]bool{}
	for i := range links {
		a, ok := endpoint.ParseAlias(links[i].Alias)
		if !ok || a.Network != endpoint.NetworkToken(network) {
			continue
		}
		ports[a.Hash] = true
		for _, ip := range a.Addresses {
			list = append(list, ipam.Live{Hash: a.Hash, Addr: ip})
		}
	}
	endpoints, err := s.fw.Endpoints(ctx, network)
	if err != nil {
		return nil, err
	}
	for _, e := range endpoints {
		// An element outlives its pod where a DEL never came; a port does not.
		if !ports[string(e.Owner)] {
			continue
		}
		for _, ip := range e.Addrs {
			list = append(list, ipam.Live{Hash: string(e.Owner), Addr: ip})
		}
	}
	return list, nil
}
