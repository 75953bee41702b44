package network

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/lease/giveback"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// Known is what a caller knows of attachments that have no record: from its configuration, or
// from the result of an Add. The zero Known is nothing.
type Known struct {
	Bridge      string              // of their network
	GatewayLink string              // of their network: see Network.GatewayLink
	Addresses   func() []netip.Addr // of the one that Del is for; called only if it has no record
	Leased      bool                // their addresses come by DHCP
}

// Del takes an attachment down. It needs neither the pod's namespace nor a configuration: the port's name follows
// from the key, and its owner from its alias. It is no error if parts are gone already; a step that fails does not
// keep the rest from being done. known may be nil.
func (n *Node) Del(ctx context.Context, key Key, known *Known) error {
	if err := key.check(); err != nil {
		return err
	}
	s, err := openSession(n.cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	return n.teardown(s, key.Network, known).Attachment(ctx, key.owner(), key.hash())
}

// teardown takes attachments of a network down.
func (n *Node) teardown(s *session, network string, known *Known) *teardown {
	t := &teardown{node: n, Session: s, Network: network}
	if known != nil {
		t.Known = *known
	}
	return t
}

// Collect takes down all attachments of a network that are not in keep, by the records, the leases, and the
// kernel's objects, and gives back addresses that no attachment has reserved. It gives those that went, as far as
// they have names. It leaves alone attachments on which a call is at work, or that came since. known may be nil. An
// empty keep, nil too, is a list of no attachment: all go. A caller that has no list, since its runtime gave none,
// must not call.
//
// It lists all first, and takes them down one by one, so that other calls get their turn in between; it looks at
// each again under its own lock.
func (n *Node) Collect(ctx context.Context, network string, keep []Key, known *Known) ([]Key, error) {
	s, err := n.openKnown(ctx, network)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	return n.teardown(s, network, known).Collect(ctx, keep)
}

// Remove takes down what Collect leaves of a network: its rules, its gateways, its record, its directory of host-local
// in the state directory, and its bridge where nothing else is on it. The host goes on forwarding. It refuses while the
// network has attachments (ErrAttached), and names those that CollectDead would take down. One that is not there is
// none to refuse: Upkeep.Known tells.
func (n *Node) Remove(ctx context.Context, name string) error {
	return n.nameDead(ctx, name, n.about(ctx, func(s *session) error { return removeNetwork(ctx, s, name) }, name))
}

// unnamed is on record of addresses whose allocator Network.Origin does not name.
const unnamed = "allocator"

// origin is what goes on record of a network's allocator. Config.Allocators knows it by what Network.Origin says.
func (n *Node) origin(nw *Network) Origin {
	if n.cfg.Allocators == nil && nw.Allocator != nil && nw.Origin.Type == "" {
		return Origin{Type: unnamed}
	}
	return nw.Origin
}

// allocator gives what takes addresses back; nil where nothing does. Without Config.Allocators that is what needs to
// know no more than is on record.
func (n *Node) allocator(network string, origin *Origin) (ipam.Allocator, error) {
	if n.cfg.Allocators != nil {
		return n.cfg.Allocators(network, origin)
	}
	if origin == nil {
		return nil, nil
	}
	switch origin.Type {
	case "", "static", "dhcp":
		return nil, nil
	case "host-local":
		dir := origin.Dir
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(n.cfg.Dir.Path(), "ipam")
		}
		return ipam.NewHostLocal(&ipam.Config{Network: network, Dir: dir})
	case unnamed:
		return nil, failf(ErrInvalid, "its address is of a Network.Allocator, which is not on record: set Config.Allocators, or a Network.Origin of type host-local")
	}
	return nil, failf(ErrInvalid, "its address is the IPAM plugin %q's, which only a call with the network's configuration can ask: have the runtime DEL it or call GC", origin.Type)
}

// remains is an attachment that is to go.
type remains struct {
	hash      string
	owner     ipam.Owner        // empty if it is not known
	rec       *state.Attachment // nil if it has no record
	unread    bool              // it has a record that could not be read
	addresses []netip.Addr      // nil if they are not known
	retaken   []netip.Addr      // those of them that stay reserved
	leaseDir  string            // where its lease is on record; empty if it has none
	// network, onPort, elementsOf and ifb are what the kernel has: its network by the port's alias, the port's name, the
	// network by its elements, and the link that shapes its traffic.
	network, onPort, elementsOf, ifb string
	entered                          []netip.Addr // the addresses that its elements are of
	// unrecorded says that the attachment had no record to lock: so that no Add of it
	// begins meanwhile, all others are kept away.
	unrecorded bool
	unlocked   bool // it has a record, whose lock another has
}

// teardown takes attachments of one network down.
type teardown struct {
	Session *session
	Network string
	Known   Known
	node    *Node
}

// Attachment takes one down, whose Add may be at work.
func (t *teardown) Attachment(ctx context.Context, owner ipam.Owner, hash string) error {
	lock, err := t.lock(ctx, hash)
	if err == nil {
		defer lock.Close()
	}
	r := t.ownRemains(ctx, owner, hash)
	r.unlocked = errors.Is(err, state.ErrBusy)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
	case errors.Is(err, state.ErrBusy) && r.rec != nil && r.rec.State == state.Adding:
		// An Add is at work, which ends when it finds its record gone, and undoes what it
		// makes after this. The next Add of the attachment is to find nothing of it.
		wait, err := t.Session.Dir.AtWork(t.Network, hash)
		if err != nil {
			return err
		}
		defer func() {
			t.Session.Leave()
			outwait(ctx, wait, addEnds)
		}()
		if err := t.forget(ctx, hash); err != nil {
			return err
		}
	case !errors.Is(err, state.ErrBusy): // another Del does the same
		t.Session.Warn(err.Error())
	}
	if err := t.takeDown(ctx, r); err != nil {
		return err
	}
	return closeLoopbackAfter(ctx, t.Session, t.Known, r.rec)
}

// lock takes the lock of an attachment's record. A call that has that of one whose Add is done
// writes the record anew, as a rule: a Del passes a host port on to it, say. Such a call is waited
// for, since what it writes is to go too, or to be passed on further.
func (t *teardown) lock(ctx context.Context, hash string) (*state.AttachmentLock, error) {
	dir := t.Session.Dir
	lock, err := dir.LockAttachment(t.Network, hash)
	if !errors.Is(err, state.ErrBusy) {
		return lock, err
	}
	if rec, loadErr := dir.Load(t.Network, hash); loadErr != nil || rec.State != state.Ready {
		return nil, err
	}
	wait, workErr := dir.AtWork(t.Network, hash)
	if workErr != nil {
		return nil, err
	}
	outwait(ctx, wait, writeEnds)
	return dir.LockAttachment(t.Network, hash)
}

// writeEnds is how long a Del waits for a record to be written.
const writeEnds = 500 * time.Millisecond

// addEnds is how long a Del waits for an Add to end. One that hangs for longer leaves alone what
// an Add after the Del makes.
const addEnds = 3 * time.Second

// outwait waits for another call to end.
func outwait(ctx context.Context, wait func(context.Context), limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	wait(ctx)
}

// ownRemains is what there may be of one attachment.
func (t *teardown) ownRemains(ctx context.Context, owner ipam.Owner, hash string) *remains {
	rec, err := t.Session.Dir.Load(t.Network, hash)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			t.Session.Warn(err.Error())
		}
		rec = nil
	}
	r := &remains{
		hash: hash, owner: owner, rec: rec, leaseDir: t.leaseDir(rec),
	}
	r.addresses = t.knownAddresses(ctx, r)
	return r
}

// takeDown does every step. The address is given back after the link and the elements that use it are gone, and the
// record goes last, and only if all else did: it is what a later Del or Collect finds the rest by. The pod's guard
// goes when nothing passes its port any more.
//
// The caller has the record's lock, if there is a record, and no other: it is for takeDown
// to take them, in their order. Neither a disk nor a plugin is waited for with the state's.
func (t *teardown) takeDown(ctx context.Context, r *remains) error {
	s := t.Session
	var leaseErr error
	if r.leaseDir != "" {
		// From the pod's own interface, while it is there.
		leaseErr = giveback.All(ctx, r.leaseDir, r.hash, s.Links, s.Warn)
		if errors.Is(leaseErr, file.ErrLocked) {
			leaseErr = failf(ErrTryAgain, "%w", leaseErr)
		} else {
			leaseErr = stateError(leaseErr)
		}
	}
	if err := s.Enter(ctx); err != nil {
		return errors.Join(leaseErr, err)
	}
	if r.unrecorded { // all others are kept away, if it is so still
		err := s.EnterAlone(ctx)
		if _, loadErr := s.Dir.Load(t.Network, r.hash); err != nil || !errors.Is(loadErr, fs.ErrNotExist) {
			s.Leave()
			return errors.Join(leaseErr, err)
		}
	}
	now := *r
	if r.unlocked {
		// The keeper may have moved it meanwhile.
		if rec, err := s.Dir.Load(t.Network, r.hash); err == nil {
			now.rec, now.addresses = rec, endpoint.Addresses(rec)
		}
	}
	var flushed <-chan error
	err := joinSteps(
		func() error { return leaseErr },
		func() error { return unlist(ctx, s, &now) },
		func() error { s.passPorts(ctx, now.rec); return nil },
		func() error { flushed = flushFlows(ctx, s.Links, now.rec); return nil },
		func() error { _ = t.node.step("firewall"); return nil }, // nothing keeps the others from being taken
		func() error { return s.Links.Detach(ctx, r.port(), endpoint.AliasOwner(r.hash), now.shapers()...) },
		func() error { return <-flushed },
		func() error { _ = t.node.step("link"); return nil },
		func() error { return t.release(ctx, &now) },
		func() error { _ = t.node.step("ipam"); return nil },
	)
	if err != nil {
		s.Leave()
		return err
	}
	return t.forget(ctx, r.hash)
}

// forget removes an attachment's record, and gives the lock up.
func (t *teardown) forget(ctx context.Context, hash string) error {
	if err := t.Session.Enter(ctx); err != nil {
		return err
	}
	defer t.Session.Leave()
	return stateError(t.Session.Dir.Remove(t.Network, hash))
}
