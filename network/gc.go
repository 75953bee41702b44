package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// collectWait limits the time that Collect and CollectDead spend on one attachment, so that a locked one leaves time
// for the others.
const collectWait = 10 * time.Second

// collectExcept removes all attachments of the network that keep does not name, and returns those with known names.
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

// collect removes one attachment that is not in keep. began is the time when the list of attachments was made.
// collect skips an attachment that has changed or was created since then, and an attachment with an ADD or DEL in
// progress. If the record was unreadable for the list and is readable now, its creation time decides.
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

	// Limit the wait for the lock of a lease, since the keeper may hold it while it waits for the disk.
	ctx, cancel := context.WithTimeout(ctx, collectWait)
	defer cancel()
	return t.takeDown(ctx, &now)
}

// inventory holds the attachments of one network, or of all networks, by hash (ident.Hash).
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

// inventory finds all attachments that are on record, have a lease, or have objects in the kernel. If network is
// empty, it finds the attachments of all networks. The caller lists the leases before it takes the state's lock,
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

		// Regard an element of an unknown attachment and network as another program's. If its network's name contains
		// a slash, it is a shortened name, so the network may be a known one.
		if !ident.IsHash(hash) || inv.all[hash] == nil && !slices.Contains(networks, e.Network) &&
			!strings.Contains(e.Network, "/") {
			inv.others = append(inv.others, "elements of endpoint "+hash+" of network "+e.Network+
				" are another program's: no record tells of either")
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

// strays returns the attachments without a record, and the attachments with elements of addresses that they do not
// have. They are sorted by hash.
func (inv *inventory) strays() []*remains {
	var list []*remains
	for _, hash := range slices.Sorted(maps.Keys(inv.all)) {
		if r := inv.all[hash]; r.rec == nil && !r.isUnreadable || r.hasOldElements() {
			list = append(list, r)
		}
	}
	return list
}
