package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
)

// When a lease gets another address, everything outside the pod that an Add made for the old address must follow.
// This is the attachment's record, its elements in the firewall (host ports, masquerade, guard), and the alias of its
// port. Otherwise the guard would block the pod's new address, and a host port would lead to another machine at the
// old address.
//
// First the record is written with the old and the new addresses, and with Moving set. Then the kernel is changed,
// and last the record is written in its final form. So after a kill, the next process completes the change, and a Del
// looks for the elements of all addresses.

// Follow updates an attachment to its lease, if the lease now has other addresses than the attachment's record, or
// has ended. It returns the addresses before and after. If the attachment does not exist or has no lease, Follow does
// nothing and returns nil.
func (u Upkeep) Follow(ctx context.Context, key Key) (from, to []netip.Prefix, _ error) {
	if err := key.check(); err != nil {
		return nil, nil, err
	}

	dir := u.node.cfg.Dir
	if _, rec, err := loadNewerLease(dir, key); rec == nil || err != nil {
		return nil, nil, err
	}

	err := u.node.withSession(func(s *session) error {
		if err := s.enterAlone(ctx); err != nil {
			return err
		}

		// Look again under the exclusive lock, since nothing can change any more.
		a, rec, err := loadNewerLease(dir, key)
		if rec == nil || err != nil {
			return err
		}

		nw, err := dir.LoadNetwork(key.Network)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return stateError(err)
		}

		before := prefixesOf(a.Addresses)
		if err := s.follow(ctx, a, nw, rec); err != nil {
			return err
		}

		from, to = before, prefixesOf(a.Addresses)
		return nil
	})

	return from, to, err
}

// loadNewerLease loads an attachment's record. If the lease has other addresses than this record (see the function
// ahead), it also returns the record of the lease. If the attachment does not exist, it returns nil for both.
func loadNewerLease(dir *state.Dir, key Key) (a *state.Attachment, rec *lease.Record, err error) {
	if a, err = dir.Load(key.Network, key.hash()); err == nil {
		rec, err = newerLease(a)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	return a, rec, stateError(err)
}

// newerLease returns the record of an attachment's lease if the lease has other addresses than the attachment's record.
// Otherwise it returns nil.
func newerLease(a *state.Attachment) (*lease.Record, error) {
	if a.State != state.Ready || a.IPAMType != endpoint.Leased {
		return nil, nil
	}

	dir, err := lease.Open(a.DataDir)
	if err != nil {
		return nil, err
	}

	rec, err := dir.Load(a.Hash())
	if err == nil && (rec.NetNSCookie != a.NetNSCookie || !isNewer(a, rec)) {
		return nil, nil
	}
	return rec, err
}

func isNewer(a *state.Attachment, rec *lease.Record) bool {
	if rec.State != lease.Bound && rec.State != lease.Expired {
		return false
	}
	have, want := prefixesOf(a.Addresses), prefixesOf(leasedAddresses(a, rec))
	isMissing := func(p netip.Prefix) bool { return !slices.Contains(have, p) }
	return a.Moving || len(have) != len(want) || slices.ContainsFunc(want, isMissing)
}

// leasedAddresses returns the addresses that an attachment has according to the record of its lease, with the IPv6
// addresses that the pod has formed. If the lease has ended, there is no IPv4 address, since another machine may have
// the last one.
func leasedAddresses(a *state.Attachment, rec *lease.Record) []ipam.Address {
	var list []ipam.Address
	if rec.State == lease.Bound {
		list = append(list, ipam.Address{Prefix: rec.Lease.Address, Gateway: rec.Policy.Router(rec.Lease)})
	}

	own6 := slices.Clone(rec.Formed)
	if six := rec.Leased6(); six.IsValid() {
		own6 = slices.Insert(own6, 0, six)
	}

	for _, p := range own6 {
		own := ipam.Address{Prefix: p}
		if i := slices.Index(prefixesOf(a.Addresses), p); i >= 0 {
			own.Gateway = a.Addresses[i].Gateway
		}
		list = append(list, own)
	}

	if rec.Formed == nil {
		list = append(list, formedAddresses(a)...)
	}

	return list
}

// formedAddresses returns the IPv6 addresses that the pod has formed itself. A DHCPv6 address is different in that it
// has a prefix of 128 bits.
func formedAddresses(a *state.Attachment) []ipam.Address {
	return slices.DeleteFunc(slices.Clone(a.Addresses), func(o ipam.Address) bool {
		return o.Prefix.Addr().Is4() || o.Prefix.IsSingleIP()
	})
}

// withLease returns an attachment updated to its lease.
func withLease(a *state.Attachment, rec *lease.Record) *state.Attachment {
	next := *a
	next.Addresses, next.Moving = leasedAddresses(a, rec), false
	return &next
}

// follow updates an attachment to its lease, under the exclusive lock. It may be repeated from any point. Without its
// network there is nothing in the firewall.
func (s *session) follow(ctx context.Context, a *state.Attachment, nw *state.Network, rec *lease.Record) error {
	next := withLease(a, rec)
	dropped := slices.DeleteFunc(slices.Clone(a.Addresses), func(o ipam.Address) bool {
		return slices.Contains(prefixesOf(next.Addresses), o.Prefix)
	})
	both := *next
	both.Addresses, both.Moving = slices.Concat(next.Addresses, dropped), true
	if err := s.Dir.Update(&both); err != nil {
		return stateError(err)
	}

	err := s.moveElements(ctx, next, nw, dropped)
	if err == nil {
		err = errors.Join(forgetFlows(ctx, dropped), s.renameAlias(ctx, next))
	}

	if err != nil {
		return fmt.Errorf("move attachment to its new address: %w", err)
	}

	if err := s.Dir.Update(next); err != nil {
		return stateError(err)
	}

	*a = *next
	return nil
}

// moveElements replaces the pod's elements in the firewall by those for its new addresses. The present elements may
// belong to any of the previous addresses, or to none. Whichever it is, the pod has all its elements after the first
// transaction.
func (s *session) moveElements(ctx context.Context, next *state.Attachment, nw *state.Network,
	dropped []ipam.Address) error {
	if nw == nil {
		return nil
	}

	var err error
	now, old := endpoint.In(next, nw), *next
	for _, g := range dropped {
		old.Addresses = append([]ipam.Address{g}, formedAddresses(next)...)
		err = errors.Join(err, s.Firewall.Move(ctx, endpoint.Of(&old), now))
	}

	old.Addresses = formedAddresses(next)
	err = errors.Join(err, s.Firewall.Move(ctx, endpoint.Of(&old), now))
	if errors.Is(err, fs.ErrNotExist) {
		// Another program has flushed the firewall. A repair, or the next Add, restores it from the records.
		s.warn("the firewall was removed: tombolo repair puts it back: " + err.Error())
		return nil
	}

	return err
}

// forgetFlows deletes the conntrack entries of addresses that the pod has lost, since another pod may get these
// addresses.
func forgetFlows(ctx context.Context, dropped []ipam.Address) error {
	if len(dropped) == 0 {
		return nil
	}

	var questions []conntrack.Selector
	for _, g := range dropped {
		questions = append(questions, conntrack.Of(g.Prefix.Addr()))
	}

	conn, err := conntrack.Dial(nil)
	if err != nil {
		return err
	}

	_, err = conn.Flush(ctx, questions...)
	return errors.Join(err, conn.Close())
}

// renameAlias writes an attachment's addresses into the alias of its port. If the link belongs to another owner, it
// does nothing, because the code that creates links reports that.
func (s *session) renameAlias(ctx context.Context, a *state.Attachment) error {
	err := s.Links.SetAlias(ctx, a.HostIf, endpoint.AliasOwner(a.Hash()), endpoint.AliasOf(a))
	if errors.Is(err, bridge.ErrForeign) {
		return nil
	}

	return err
}

func prefixesOf(list []ipam.Address) []netip.Prefix {
	all := make([]netip.Prefix, len(list))
	for i, a := range list {
		all[i] = a.Prefix
	}
	return all
}
