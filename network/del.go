package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// Known holds facts about attachments without a record. The caller knows them from its configuration, or from the
// result of an Add. The zero Known holds no facts.
type Known struct {
	Bridge      string              // the bridge of the attachments' network
	GatewayLink string              // the network's gateway link: see Network.GatewayLink
	Addresses   func() []netip.Addr // returns the addresses of the attachment; called only without a complete record
	Leased      bool                // the attachments' addresses come by DHCP
}

// Del removes an attachment. It needs neither the pod's namespace nor the network's configuration. Without
// Config.Allocators, it returns an error if it must release an address to an allocator other than host-local. Objects
// that are gone already are no error. After a failed step, Del continues with the other steps, keeps the attachment's
// record, and returns all errors. known may be nil.
func (n *Node) Del(ctx context.Context, key Key, known *Known) error {
	if err := key.check(); err != nil {
		return err
	}
	s, err := openSession(n.cfg)
	if err != nil {
		return err
	}
	defer s.close()
	return n.teardown(s, key.Network, known).remove(ctx, key.owner(), key.hash())
}

// teardown returns a teardown for attachments of a network. known may be nil.
func (n *Node) teardown(s *session, network string, known *Known) *teardown {
	return &teardown{node: n, Session: s, Network: network, Known: *cmp.Or(known, &Known{})}
}

// Collect removes all attachments of a network that are not in keep. It returns the keys of the recorded attachments
// that are not in keep, even if it skipped one or could not remove it. It finds attachments by their records, their
// leases and their objects in the kernel. It also releases reserved addresses that belong to no attachment. It skips
// attachments that another call works on, and attachments that were created after its list. known may be nil.
//
// An empty or nil keep removes all attachments. So a caller that got no list from its runtime must not call Collect.
//
// Collect first lists all attachments, and then removes one at a time, so that other calls get the locks in between.
// It looks at each attachment again under the attachment's own lock.
func (n *Node) Collect(ctx context.Context, network string, keep []Key, known *Known) ([]Key, error) {
	s, err := n.openKnown(network)
	if err != nil {
		return nil, err
	}
	defer s.close()
	return n.teardown(s, network, known).collectExcept(ctx, keep)
}

// Remove deletes the objects of a network that Collect leaves. These are its rules, its gateways, its record, and its
// host-local directory in the state directory. Remove also deletes a bridge that Tombolo created, if nothing else uses
// the bridge. With the last network, it also deletes Tombolo's rules in chains of other programs, and turns off the
// forwarding that Tombolo turned on; before Linux 6.17, IPv6 forwarding stays on. If the network has attachments, the
// error matches ErrAttached, and mentions those that CollectDead would remove. If the network does not exist, Remove
// returns nil: use Upkeep.Known to find out.
func (n *Node) Remove(ctx context.Context, name string) error {
	err := n.withSession(func(s *session) error { return removeNetwork(ctx, s, name) }, name)
	return n.nameDead(ctx, name, err)
}

// unnamed is the recorded type of an allocator for which Network.Origin is empty.
const unnamed = "allocator"

// origin returns the origin to record for the network's attachments. It is Network.Origin, or unnamed if an Allocator
// has no Origin and there is no Config.Allocators.
func (n *Node) origin(nw *Network) Origin {
	if n.cfg.Allocators == nil && nw.Allocator != nil && nw.Origin.Type == "" {
		return Origin{Type: unnamed}
	}
	return nw.Origin
}

// allocator returns the allocator to which addresses are released, or nil if there is none. Without Config.Allocators,
// it creates an allocator that needs only the record, or returns an error if that is not possible.
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
		return nil,
			failf(ErrInvalid,
				"its address is of a Network.Allocator, which is not on record: set Config.Allocators, or a "+
					"Network.Origin of type host-local")
	}

	return nil, failf(ErrInvalid,
		"its address is the IPAM plugin %q's, which only a call with the network's configuration can ask: have the "+
			"runtime DEL it or call GC", origin.Type)
}

// remains describes an attachment that is to be removed.
type remains struct {
	hash          string
	owner         ipam.Owner        // empty if unknown
	rec           *state.Attachment // nil if it has no record
	isUnreadable  bool              // its record could not be read
	addresses     []netip.Addr      // nil if unknown
	stillReserved []netip.Addr      // the part of addresses that release keeps reserved
	leaseDir      string            // the directory with its lease; empty if it has none
	// The next five fields come from the kernel. portName is the port's name, and network the network in the port's
	// alias. elementNetwork is the network in the comments of the attachment's elements. ifb is the link that shapes
	// the traffic from the pod.
	network, portName, elementNetwork, ifb string
	elementAddresses                       []netip.Addr // the addresses of its elements
	// unrecorded means that the attachment had no record to lock. takeDown then takes the state directory's exclusive
	// lock, so that no Add of the attachment can begin.
	unrecorded        bool
	isLockedElsewhere bool // it has a record that another call has locked
}

// teardown removes attachments of one network.
type teardown struct {
	Session *session
	Network string
	Known   Known
	node    *Node
}

// remove removes an attachment, even if its Add is in progress. It also turns route_localnet off where no pod needs it
// any more.
func (t *teardown) remove(ctx context.Context, owner ipam.Owner, hash string) error {
	lock, err := t.lock(ctx, hash)
	if err == nil {
		defer lock.Close()
	}

	r := t.ownRemains(ctx, owner, hash)
	r.isLockedElsewhere = errors.Is(err, state.ErrBusy)
	switch {
	case err == nil, errors.Is(err, fs.ErrNotExist):
	case errors.Is(err, state.ErrBusy) && r.rec != nil && r.rec.State == state.Adding:
		// An Add is in progress. It ends when it finds its record gone, and undoes its later changes. Wait for its
		// end, so that the next Add of the attachment does not find those changes.
		wait, err := t.Session.Dir.AtWork(t.Network, hash)
		if err != nil {
			return err
		}
		defer func() {
			t.Session.leave()
			waitAtMost(ctx, wait, addEnds)
		}()
		if err := t.forget(ctx, hash); err != nil {
			return err
		}
	case !errors.Is(err, state.ErrBusy): // ErrBusy needs no warning: usually another Del is removing the attachment
		t.Session.warn(err.Error())
	}

	if err := t.takeDown(ctx, r); err != nil {
		return err
	}

	return closeLoopbackAfter(ctx, t.Session, t.Known, r.rec)
}

// lock locks an attachment's record. If another call has locked the record of a complete attachment, lock waits up to
// writeEnds for its end. That call mostly writes a new record, for example to pass a host port on, and its changes must
// be removed too. If the record is still locked, the error matches state.ErrBusy.
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

	waitAtMost(ctx, wait, writeEnds)
	return dir.LockAttachment(t.Network, hash)
}

// writeEnds limits how long a Del waits for another call to write an attachment's record.
const writeEnds = 500 * time.Millisecond

// addEnds limits how long a Del waits for the end of an Add. An Add that hangs longer will not touch the objects of
// an Add that follows the Del.
const addEnds = 3 * time.Second

// waitAtMost calls wait with a context that ends after limit. wait waits for the end of another call.
func waitAtMost(ctx context.Context, wait func(context.Context), limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	wait(ctx)
}

// ownRemains describes the remains of one attachment, by its record. Without a record it uses the facts in t.Known.
func (t *teardown) ownRemains(ctx context.Context, owner ipam.Owner, hash string) *remains {
	rec, err := t.Session.Dir.Load(t.Network, hash)
	if nl.PassAbsent(err) != nil {
		t.Session.warn(err.Error())
	}

	r := &remains{hash: hash, owner: owner, rec: rec, leaseDir: t.leaseDir(rec)}
	r.addresses = t.knownAddresses(ctx, r)
	return r
}

// takeDown removes an attachment: lease, firewall elements, links, addresses and record. It runs every step, even after
// a failed one. It deletes the elements of the guard (anti-spoofing rules) when no frame can pass the port any more. It
// deletes elements and links before it releases addresses. It deletes the record last, and only if all steps succeeded,
// because a later Del or Collect finds the rest by the record.
//
// The caller holds the record's lock, unless there is no record or another call has locked it (r.isLockedElsewhere).
// The caller holds no other lock. takeDown takes the other locks in their order. It does not hold the state
// directory's lock while it releases a lease, or calls a slow allocator.
func (t *teardown) takeDown(ctx context.Context, r *remains) error {
	s := t.Session
	var leaseErr error
	if r.leaseDir != "" {
		// Release the lease from the pod's own interface, while that exists.
		leaseErr = lease.GiveBack(ctx, r.leaseDir, r.hash, s.Links, s.warn)
		if errors.Is(leaseErr, file.ErrLocked) {
			leaseErr = failf(ErrTryAgain, "%w", leaseErr)
		} else {
			leaseErr = stateError(leaseErr)
		}
	}

	if err := s.enter(ctx); err != nil {
		return errors.Join(leaseErr, err)
	}

	if r.unrecorded { // the exclusive lock excludes other calls, if there is still no record
		err := s.enterAlone(ctx)
		if _, loadErr := s.Dir.Load(t.Network, r.hash); err != nil || !errors.Is(loadErr, fs.ErrNotExist) {
			s.leave()
			return errors.Join(leaseErr, err)
		}
	}

	now := *r
	if r.isLockedElsewhere {
		// tombolod may have changed the attachment's addresses since r was filled in.
		if rec, err := s.Dir.Load(t.Network, r.hash); err == nil {
			now.rec, now.addresses = rec, endpoint.Addresses(rec)
		}
	}

	// An error of reportStep must not stop the other steps.
	errs := []error{leaseErr, removeElements(ctx, s, &now)}
	s.passPorts(ctx, now.rec)
	flushed := flushFlows(ctx, s.Links, now.rec)
	_ = t.node.reportStep("firewall")
	errs = append(errs, s.Links.Detach(ctx, r.port(), endpoint.AliasOwner(r.hash), now.ifbNames()...), <-flushed)
	_ = t.node.reportStep("link")
	errs = append(errs, t.release(ctx, &now))
	_ = t.node.reportStep("ipam")
	if err := errors.Join(errs...); err != nil {
		s.leave()
		return err
	}

	return t.forget(ctx, r.hash)
}

// forget deletes an attachment's record. It takes the state directory's lock, shared, and releases it afterwards.
func (t *teardown) forget(ctx context.Context, hash string) error {
	if err := t.Session.enter(ctx); err != nil {
		return err
	}
	defer t.Session.leave()
	return stateError(t.Session.Dir.Remove(t.Network, hash))
}

// collectWait limits the time that Collect and CollectDead spend on one attachment, so that a locked one leaves time
// for the others.
const collectWait = 10 * time.Second

// collectExcept removes the attachments of the network that are not in keep. It skips those that another call has
// locked, and those created since it listed them (see collect). It returns the keys of all listed ones with a readable
// record, also of those that it skipped or could not remove. It also releases reservations without an attachment, and
// turns route_localnet off where no pod needs it.
func (t *teardown) collectExcept(ctx context.Context, keep []Key) (went []Key, _ error) {
	began := time.Now()
	valid := map[string]bool{}
	var owners []ipam.Owner
	for _, key := range keep {
		valid[ident.Hash(t.Network, key.ContainerID, key.IfName)] = true
		owners = append(owners, key.owner())
	}

	leases, leaseErr := leasesOf(t.Session, t.Network)
	if err := t.Session.enter(ctx); err != nil {
		return nil, errors.Join(leaseErr, err)
	}

	found, err := t.Session.inventory(ctx, t.Network, leases)
	t.Session.leave()
	errs := []error{leaseErr, err}
	var records []*state.Attachment
	for hash, r := range found.all {
		if valid[hash] {
			continue
		}
		errs = append(errs, t.collect(ctx, r, began))
		records = append(records, r.rec)
		if r.rec != nil {
			went = append(went, keyOf(r.rec))
		}
	}

	errs = append(errs, closeLoopbackAfter(ctx, t.Session, t.Known, records...))
	t.Session.leave()
	return went, errors.Join(append(errs, t.collectReservations(ctx, owners))...)
}

// collect removes one attachment that the caller's list of valid attachments lacks. r is its entry in the list of
// attachments that the caller made after the time began. collect skips an attachment that was created after the list,
// even if an older one of its name was on the list. It also skips an attachment that another call has locked. If the
// record was unreadable in the list and is readable now, collect removes the attachment only if it was created before
// began.
func (t *teardown) collect(ctx context.Context, r *remains, began time.Time) error {
	now := *r
	lock, err := t.Session.Dir.LockAttachment(t.Network, r.hash)
	switch {
	case errors.Is(err, state.ErrBusy):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		now.rec, now.unrecorded = nil, true
	case err != nil:
		t.Session.warn(err.Error()) // the record is not a regular file
	default:
		defer lock.Close()
		rec, err := t.Session.Dir.Load(t.Network, r.hash)
		switch {
		case err != nil:
		case r.isUnreadable && rec.Created.Before(began):
		case r.rec == nil || !r.rec.Created.Equal(rec.Created):
			return nil
		}
		if now.rec = rec; err == nil {
			now.addresses, now.owner = endpoint.Addresses(rec), keyOf(rec).owner()
		}
	}

	now.leaseDir = cmp.Or(now.leaseDir, t.leaseDir(now.rec))

	// Limit the wait for the lock of a lease, since tombolod may hold it while it waits for the disk.
	ctx, cancel := context.WithTimeout(ctx, collectWait)
	defer cancel()
	return t.takeDown(ctx, &now)
}

// inventory holds the records and kernel objects of the attachments of one network, or of all networks. The keys of all
// are hashes (ident.Hash).
type inventory struct {
	all    map[string]*remains
	others []string // descriptions of other programs' elements
}

func (inv *inventory) at(hash string) *remains {
	if inv.all[hash] == nil {
		inv.all[hash] = &remains{hash: hash}
	}
	return inv.all[hash]
}

// inventory finds all attachments that are on record, have a lease, or have objects in the kernel. If network is empty,
// it finds the attachments of all networks. The caller lists the leases before it takes the state directory's lock,
// since they are on a disk.
func (s *session) inventory(ctx context.Context, network string, leases []*lease.Record) (*inventory, error) {
	inv := &inventory{all: map[string]*remains{}}
	networks, err := []string{network}, error(nil)
	if network == "" {
		networks, err = s.Dir.Networks()
	}

	errs := []error{err}
	for _, name := range networks {
		records, damaged, err := s.Dir.List(name)
		errs = append(errs, err)
		for _, rec := range records {
			v := inv.at(rec.Hash())
			v.rec, v.addresses = rec, endpoint.Addresses(rec)
		}
		for _, d := range damaged {
			if inv.at(d.Hash).isUnreadable = true; network != "" {
				s.warn(d.Error())
			}
		}
	}

	delete(inv.all, "") // the record of a file whose name is no hash
	isOurs := func(token string) bool { return network == "" || token == endpoint.NetworkToken(network) }
	links, err := s.Links.Veths(ctx)
	errs = append(errs, err)
	for i := range links {
		if a, ok := endpoint.ParseAlias(links[i].Alias); ok && isOurs(a.Network) {
			v := inv.at(a.Hash)
			if v.portName, v.network = links[i].Name, a.Network; v.rec == nil {
				v.addresses = a.Addresses
			}
		}
	}

	endpoints, err := s.Firewall.Endpoints(ctx, network)
	errs = append(errs, err)
	for _, e := range endpoints {
		hash := string(e.Owner)

		// If neither the attachment nor the network of an element is known, regard the element as another program's.
		// A network's name with a slash is a shortened name, so that network may be a known one.
		if !ident.IsHash(hash) || inv.all[hash] == nil && !slices.Contains(networks, e.Network) &&
			!strings.Contains(e.Network, "/") {
			inv.others = append(inv.others, "elements of endpoint "+hash+" of network "+e.Network+
				" have no record here: another stateDir has it, or an old save was loaded; after a save "+
				"this helps: tombolo remove "+e.Network)
			continue
		}

		v := inv.at(hash)
		v.elementAddresses = e.Addrs
		if v.elementNetwork = e.Network; v.rec == nil && v.addresses == nil {
			v.addresses = e.Addrs
		}
	}

	for _, l := range leases {
		inv.at(l.Hash()).leaseDir = s.LeaseDir
	}

	ifbs, err := bandwidth.On(s.Links.Socket()).IFBs(ctx)
	errs = append(errs, err)
	for name, alias := range ifbs {
		if a, ok := endpoint.ParseAlias(alias); ok && isOurs(a.Network) {
			inv.at(a.Hash).ifb = name
		}
	}

	return inv, errors.Join(errs...)
}

// hasElementsOnly reports whether only firewall elements of an attachment exist. A program may have loaded them from an
// older copy of our tables.
func (r *remains) hasElementsOnly() bool {
	return r.rec == nil && !r.isUnreadable && r.leaseDir == "" && r.portName == "" && r.ifb == ""
}

// strays returns the attachments without a record, and those whose firewall elements contain addresses that the
// attachment does not have. It leaves out attachments with an unreadable record. The list is sorted by hash.
func (inv *inventory) strays() []*remains {
	var list []*remains
	for _, hash := range slices.Sorted(maps.Keys(inv.all)) {
		if r := inv.all[hash]; r.rec == nil && !r.isUnreadable || r.hasOldElements() {
			list = append(list, r)
		}
	}
	return list
}
