// Package teardown takes attachments and networks down: by their records, and by what the
// kernel has of them where there is none.
package teardown

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/hostport"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/dhcplease"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
)

// remains is an attachment that is to go.
type remains struct {
	hash      string
	owner     ipam.Owner        // empty if it is not known
	rec       *state.Attachment // nil if it has no record
	unread    bool              // it has a record that could not be read
	addresses []netip.Addr      // nil if they are not known
	retaken   []netip.Addr      // those of them that stay reserved
	leaseDir  string            // where its lease is on record; empty if it has none
	// unrecorded says that the attachment had no record to lock: so that no Add of it
	// begins meanwhile, all others are kept away.
	unrecorded bool
	unlocked   bool // it has a record, whose lock another has
}

// shapers are the links that shape the attachment's traffic. One without a record may have
// had limits.
func (r *remains) shapers() []string {
	if r.rec != nil && r.rec.State == state.Ready && r.rec.IFB == "" {
		return nil
	}
	return []string{bandwidth.IFBName(r.hash)}
}

func (r *remains) port() string { return "veth" + r.hash }

// Teardown takes attachments of one network down.
type Teardown struct {
	Session *session.Session
	Network string
	Known   Known
	// Allocator gives what takes addresses back, nil if nothing does: see network.Config.
	Allocator func(*Origin) (ipam.Allocator, error)
	// Step is called when a part of an attachment has gone.
	Step func(string) error
}

// Known is network.Known.
type Known struct {
	Bridge      string
	GatewayLink string
	Addresses   func() []netip.Addr
	Leased      bool
}

// Origin is network.Origin.
type Origin struct{ Type, Dir string }

// Attachment takes one down, whose Add may be at work.
func (t *Teardown) Attachment(ctx context.Context, owner ipam.Owner, hash string) error {
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
func (t *Teardown) lock(ctx context.Context, hash string) (*state.AttachmentLock, error) {
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

// Remains takes down what is left of an attachment, for the next Add of the same, which has the
// lock of its record.
func (t *Teardown) Remains(ctx context.Context, owner ipam.Owner, hash string) error {
	return t.takeDown(ctx, t.ownRemains(ctx, owner, hash))
}

// ownRemains is what there may be of one attachment.
func (t *Teardown) ownRemains(ctx context.Context, owner ipam.Owner, hash string) *remains {
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

// knownAddresses looks for the attachment's addresses where they may be written
// down: its record, its port's alias, what the caller knows. Nil means that none of
// them tells, and that it takes a search.
func (t *Teardown) knownAddresses(ctx context.Context, r *remains) []netip.Addr {
	if r.rec != nil && r.rec.State == state.Ready {
		return endpoint.Addresses(r.rec)
	}
	if l, err := t.Session.Links.Link(ctx, r.port()); err == nil {
		if a, ok := endpoint.ParseAlias(l.Alias); ok && a.Hash == r.hash && len(a.Addresses) > 0 {
			return a.Addresses
		}
	}
	if t.Known.Addresses == nil {
		return nil
	}
	return slices.Clone(t.Known.Addresses())
}

// leaseDir is where an attachment's lease is on record, by its own record or by what the
// caller knows; "" where it has none.
func (t *Teardown) leaseDir(rec *state.Attachment) string {
	switch {
	case rec != nil && rec.IPAMType == endpoint.Leased && filepath.IsAbs(rec.DataDir):
		return rec.DataDir
	case t.Known.Leased && (rec == nil || rec.IPAMType == endpoint.Leased):
		return t.Session.LeaseDir
	}
	return ""
}

// takeDown does every step. The address is given back after the link and the
// elements that use it are gone, and the record goes last, and only if all else
// did: it is what a later Del or Collect finds the rest by. What guards the pod goes when
// nothing passes its port any more.
//
// The caller has the record's lock, if there is a record, and no other: it is for takeDown
// to take them, in their order. Neither a disk nor a plugin is waited for with the state's.
func (t *Teardown) takeDown(ctx context.Context, r *remains) error {
	s := t.Session
	var leaseErr error
	if r.leaseDir != "" {
		// From the pod's own interface, while it is there.
		leaseErr = dhcplease.Release(ctx, s.Links, r.leaseDir, r.hash, s.Warn)
	}
	if err := s.Enter(ctx); err != nil {
		return errors.Join(leaseErr, err)
	}
	if r.unrecorded {
		still, err := t.alone(ctx, r)
		if err != nil || !still {
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
	err := fail.Join(
		func() error { return leaseErr },
		func() error { return unlist(ctx, s, &now) },
		func() error { return passPorts(ctx, s, &now) },
		func() error { flushed = FlushFlows(ctx, s.Links, now.rec); return nil },
		func() error { _ = t.Step("firewall"); return nil }, // nothing keeps the others from being taken
		func() error { return s.Links.Detach(ctx, r.port(), endpoint.AliasOwner(r.hash), now.shapers()...) },
		func() error { return <-flushed },
		func() error { _ = t.Step("link"); return nil },
		func() error { return t.release(ctx, &now) },
		func() error { _ = t.Step("ipam"); return nil },
	)
	if err != nil {
		s.Leave()
		return err
	}
	return t.forget(ctx, r.hash)
}

// FlushFlows has the kernel forget the flows that lead to a pod which is going. It goes through
// all of its table for that, some 10 ms, and so does it when it deletes the link: they are done
// side by side.
func FlushFlows(ctx context.Context, links *bridge.Conn, rec *state.Attachment) <-chan error {
	done := make(chan error, 1)
	var ports []nft.Port
	if rec != nil {
		ports = endpoint.Ports(rec)
	}
	if !hostport.HasFlows(ports...) {
		close(done)
		return done
	}
	// The kernel is opened by the caller's thread, to which it belongs; any can do the rest.
	conn, err := hostport.Dial(&hostport.Config{Routes: links.Routes()})
	if err != nil {
		done <- err
		return done
	}
	go func() {
		defer conn.Close()
		done <- conn.Flush(ctx, endpoint.Addresses(rec), ports...)
	}()
	return done
}

// passPorts passes host ports on to other attachments of the container.
func passPorts(ctx context.Context, s *session.Session, r *remains) error {
	if r.rec == nil {
		return nil
	}
	s.PassPorts(ctx, r.rec.Waiting)
	if slices.ContainsFunc(r.rec.Published, func(p state.Published) bool { return p.Withheld }) {
		s.StopWaiting(ctx, r.rec)
	}
	return nil
}

// alone keeps all others away from what has no record, and says whether it is so still.
func (t *Teardown) alone(ctx context.Context, r *remains) (bool, error) {
	if err := t.Session.EnterAlone(ctx); err != nil {
		return false, err
	}
	_, err := t.Session.Dir.Load(t.Network, r.hash)
	return errors.Is(err, fs.ErrNotExist), nil
}

// forget removes an attachment's record, and gives the lock up.
func (t *Teardown) forget(ctx context.Context, hash string) error {
	if err := t.Session.Enter(ctx); err != nil {
		return err
	}
	defer t.Session.Leave()
	if err := t.Session.Dir.Remove(t.Network, hash); err != nil {
		return fail.State(err)
	}
	return nil
}

// release gives the addresses back to the allocator: that of the record, should the network
// have another since. One that asks another program does so without the lock.
func (t *Teardown) release(ctx context.Context, r *remains) error {
	if r.rec != nil && r.rec.IPAMType == endpoint.Leased || r.rec == nil && t.Known.Leased {
		return nil // done, before the link went
	}
	if r.owner.ContainerID == "" {
		return nil // no allocator knows it by its short name
	}
	var origin *Origin
	if r.rec != nil {
		origin = &Origin{r.rec.IPAMType, r.rec.DataDir}
	}
	allocator, err := t.Allocator(origin)
	if err != nil || allocator == nil {
		return err
	}
	allocator = allocator.Bind(t.Session.IPAMNode(t.Network, r.owner, r.hash))
	if allocator.Slow() {
		t.Session.Leave()
	}
	addresses := slices.DeleteFunc(slices.Clone(r.addresses), func(a netip.Addr) bool { return slices.Contains(r.retaken, a) })
	if len(addresses) == 0 && len(r.retaken) > 0 {
		return nil
	}
	return allocator.Del(ctx, r.owner, addresses)
}

// unlist takes the attachment out of the firewall's sets. One that is guarded, or may be, is
// shut before: it would send what it likes until its port is gone. If that fails, the
// guard stays with the port.
func unlist(ctx context.Context, s *session.Session, r *remains) error {
	var err error
	if !session.IsKnown(r.rec) || r.rec.Guarded {
		err = s.Links.Shut(ctx, r.port(), endpoint.AliasOwner(r.hash))
		if err != nil && !errors.Is(err, bridge.ErrForeign) {
			return err
		}
	}
	return errors.Join(err, s.RemoveElements(ctx, r.hash, r.rec))
}
