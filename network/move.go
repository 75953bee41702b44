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

// A lease that moves to another address takes along what an Add made for the old one outside of the pod: the
// attachment's record, its elements in the firewall (host ports, masquerade, guard) and the alias of its port. A
// guarded pod would be cut off by its new address, and a published port would lead to another host by the old one.
//
// The record comes first, with the addresses of before and of after, and Moving; then the kernel; then the record
// as it is from now on. So after a kill, the next process sees that there is a move to finish, and a Del sees all
// addresses to look for, not only the record's first.

// Follow brings an attachment up to its lease, if that gives the pod other addresses than are on record, or none any
// more, and gives its addresses of before and of now. Without an attachment by DHCP, it does nothing, and gives nil.
func (u Upkeep) Follow(ctx context.Context, key Key) (from, to []netip.Prefix, _ error) {
	if err := key.check(); err != nil {
		return nil, nil, err
	}
	dir := u.node.cfg.Dir
	if _, rec, err := leaseAhead(dir, key); rec == nil || err != nil {
		return nil, nil, err
	}
	err := u.node.about(ctx, func(s *session) error {
		if err := s.EnterAlone(ctx); err != nil {
			return err
		}
		// Nothing comes or goes any more, so this is the last look.
		a, rec, err := leaseAhead(dir, key)
		if rec == nil || err != nil {
			return err
		}
		nw, err := dir.LoadNetwork(key.Network)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return stateError(err)
		}
		was := prefixesOf(a.Addresses)
		if err := s.move(ctx, a, nw, rec); err != nil {
			return err
		}
		from, to = was, prefixesOf(a.Addresses)
		return nil
	})
	return from, to, err
}

// leaseAhead loads an attachment, and its lease if that is ahead of it.
func leaseAhead(dir *state.Dir, key Key) (a *state.Attachment, rec *lease.Record, err error) {
	if a, err = dir.Load(key.Network, key.hash()); err == nil {
		rec, err = ahead(a)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	return a, rec, stateError(err)
}

// ahead gives an attachment's lease, if that gives it other addresses than it has on record; else nil.
func ahead(a *state.Attachment) (*lease.Record, error) {
	if a.State != state.Ready || a.IPAMType != endpoint.Leased {
		return nil, nil
	}
	dir, err := lease.Open(a.DataDir)
	if err != nil {
		return nil, err
	}
	rec, err := dir.Load(a.Hash())
	if err == nil && (rec.NetNSCookie != a.NetNSCookie || !isAhead(a, rec)) {
		return nil, nil
	}
	return rec, err
}

func isAhead(a *state.Attachment, rec *lease.Record) bool {
	if rec.State != lease.Bound && rec.State != lease.Expired {
		return false
	}
	have, want := prefixesOf(a.Addresses), prefixesOf(leased(a, rec))
	isMissing := func(p netip.Prefix) bool { return !slices.Contains(have, p) }
	return a.Moving || len(have) != len(want) || slices.ContainsFunc(want, isMissing)
}

// leased returns an attachment's addresses by the record of its lease, with those that the pod has formed. Without a
// lease the pod has no address of IPv4, and the last one may be another's.
func leased(a *state.Attachment, rec *lease.Record) []ipam.Address {
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
		list = append(list, notLeased(a)...)
	}
	return list
}

// notLeased gives an attachment's other addresses: those of IPv6 that it has formed itself. One by DHCPv6
// has no network's prefix.
func notLeased(a *state.Attachment) []ipam.Address {
	return slices.DeleteFunc(slices.Clone(a.Addresses), func(o ipam.Address) bool {
		return o.Prefix.Addr().Is4() || o.Prefix.IsSingleIP()
	})
}

// moved returns an attachment as its lease has it.
func moved(a *state.Attachment, rec *lease.Record) *state.Attachment {
	next := *a
	next.Addresses, next.Moving = leased(a, rec), false
	return &next
}

// move moves an attachment to what its lease gives it, under the exclusive lock. It may be done again, from any point
// on. Without its network there is nothing in the firewall.
func (s *session) move(ctx context.Context, a *state.Attachment, nw *state.Network, rec *lease.Record) error {
	next := moved(a, rec)
	gone := slices.DeleteFunc(slices.Clone(a.Addresses), func(o ipam.Address) bool {
		return slices.Contains(prefixesOf(next.Addresses), o.Prefix)
	})
	both := *next
	both.Addresses, both.Moving = slices.Concat(next.Addresses, gone), true
	if err := s.Dir.Update(&both); err != nil {
		return stateError(err)
	}
	err := s.moveElements(ctx, next, nw, gone)
	if err == nil {
		err = errors.Join(forgetFlows(ctx, gone), s.renameAlias(ctx, next))
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

// moveElements changes the firewall. The elements that are there may be of any of the addresses of before, or of
// none; in each case the pod has what it needs after the first transaction.
func (s *session) moveElements(ctx context.Context, next *state.Attachment, nw *state.Network, gone []ipam.Address) error {
	if nw == nil {
		return nil
	}
	var err error
	now, old := endpoint.In(next, nw), *next
	for _, g := range gone {
		old.Addresses = append([]ipam.Address{g}, notLeased(next)...)
		err = errors.Join(err, s.Firewall.Move(ctx, endpoint.Of(&old), now))
	}
	old.Addresses = notLeased(next)
	err = errors.Join(err, s.Firewall.Move(ctx, endpoint.Of(&old), now))
	if errors.Is(err, fs.ErrNotExist) {
		// Another program flushed it. A repair, or the next Add, makes it anew by the records.
		s.Warn("the firewall was removed: tombolo repair puts it back: " + err.Error())
		return nil
	}
	return err
}

// forgetFlows has the kernel forget what it translates for addresses that may be
// others' from now on.
func forgetFlows(ctx context.Context, gone []ipam.Address) error {
	if len(gone) == 0 {
		return nil
	}
	var questions []conntrack.Question
	for _, g := range gone {
		questions = append(questions, conntrack.Of(g.Prefix.Addr()))
	}
	conn, err := conntrack.Dial(nil)
	if err != nil {
		return err
	}
	_, err = conn.Flush(ctx, questions...)
	return errors.Join(err, conn.Close())
}

// renameAlias writes an attachment's addresses into the alias of its port. It leaves a link of another owner alone, which
// the code that makes links reports.
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
