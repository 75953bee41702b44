package keeper

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
	"github.com/tombolo-cni/tombolo/nft"
)

// A lease that moves to another address takes along what the plugin made for the old
// one outside of the pod: the attachment's record, its elements in the firewall (host
// ports, masquerade, guard) and the alias of its port. A guarded pod would be cut off
// by its new address, and a published port would lead to a stranger by the old one.
//
// The record comes first, with the addresses of before and of after, and Moving; then
// the kernel; then the record as it is from now on. So whatever a killed keeper leaves,
// its successor sees that there is something to finish, and a DEL that there is more than
// the record's first address to look for.

// dhcpIPAM is ipam.type of attachments whose IPv4 address is leased.
const dhcpIPAM = "dhcp"

// follow brings the attachment up to its lease, if it is behind. A pod that its lease took out of the subnet of
// the host's address, which its default route leads to, is led there anew.
func (v *visit) follow() error {
	if v.state == nil {
		return nil
	}
	a, err := v.attachment()
	if a == nil || !behind(a, v.r) {
		return err
	}
	if err := v.followAlone(); err != nil {
		return err
	}
	if gateway := v.r.Policy.Gateway; v.r.State == lease.Bound && gateway.IsValid() && !v.r.Lease.Address.Contains(gateway) {
		return v.repair(v.ctx)
	}
	return nil
}

// followAlone is follow under the exclusive lock of the state directory.
func (v *visit) followAlone() error {
	ctx, cancel := context.WithTimeout(v.ctx, lockedFor)
	defer cancel()
	// The lock of the lease's record is free meanwhile: a DEL takes it when it has this one.
	lock, err := v.state.Lock(ctx, state.Exclusive)
	if err != nil {
		return fmt.Errorf("move attachment to its new address: %w", err)
	}
	defer func() {
		if err := lock.Close(); err != nil {
			v.failed("cannot unlock state directory", "err", err)
		}
	}()
	// Nothing comes or goes any more, so this is the last look.
	r, err := v.leases.Load(v.r.Hash())
	if errors.Is(err, fs.ErrNotExist) || err == nil && r.Token != v.r.Token {
		return nil
	}
	if err != nil {
		return err
	}
	a, err := v.attachment()
	if a == nil || !behind(a, r) {
		return err
	}
	return v.move(a, r)
}

// attachment gives the record of the lease's attachment; nil where there is none to
// care about: the keeper is used without the plugin, or the plugin with another
// directory; its ADD is under way; or it is of an earlier epoch.
func (v *visit) attachment() (*state.Attachment, error) {
	a, err := v.state.Load(v.r.Network, v.r.Hash())
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, state.ErrName):
		return nil, nil
	case err != nil:
		return nil, err
	case a.State != state.Ready || a.IPAMType != dhcpIPAM || a.DataDir != v.leases.Path() || a.NetNSCookie != v.r.NetNSCookie:
		return nil, nil
	}
	return a, nil
}

// behind says whether an attachment has other addresses on record than its lease gives
// it.
func behind(a *state.Attachment, r *lease.Record) bool {
	if r.State != lease.Bound && r.State != lease.Expired {
		return false
	}
	return a.Moving || !slices.Equal(prefixes(a.Addresses), prefixes(leased(a, r)))
}

func prefixes(list []ipam.Address) []netip.Prefix {
	all := make([]netip.Prefix, len(list))
	for i, a := range list {
		all[i] = a.Prefix
	}
	return all
}

// leased gives an attachment's addresses by its lease, which is of IPv4; the others
// stay. Without a lease the pod has no address of IPv4, and the last one may be
// another's.
func leased(a *state.Attachment, r *lease.Record) []ipam.Address {
	var list []ipam.Address
	if r.State == lease.Bound {
		own := ipam.Address{Prefix: r.Lease.Address, Gateway: r.Policy.Gateway}
		if !own.Gateway.IsValid() && len(r.Lease.Routers) > 0 {
			own.Gateway = r.Lease.Routers[0]
		}
		list = append(list, own)
	}
	if six := r.Leased6(); six.IsValid() {
		own := ipam.Address{Prefix: six}
		if i := slices.Index(prefixes(a.Addresses), six); i >= 0 {
			own.Gateway = a.Addresses[i].Gateway
		}
		list = append(list, own)
	}
	return append(list, notLeased(a)...)
}

// hostGateways gives those of an attachment's addresses of before, and of its lease: the new
// address keeps the way out of the one before.
func hostGateways(a *state.Attachment, r *lease.Record) state.HostGateways {
	list := slices.Clone(a.HostGateways)
	if r.State != lease.Bound || list.Of(r.Lease.Address) != (state.HostGateway{}) {
		return list
	}
	i := slices.IndexFunc(a.Addresses, func(o ipam.Address) bool { return o.Prefix.Addr().Is4() })
	if i < 0 {
		return list
	}
	if own := list.Of(a.Addresses[i].Prefix); own != (state.HostGateway{}) {
		own.Of = r.Lease.Address
		list = append(list, own)
	}
	return list
}

// notLeased gives an attachment's other addresses: those of IPv6 that it has formed itself. One by DHCPv6
// has no network's prefix.
func notLeased(a *state.Attachment) []ipam.Address {
	return slices.DeleteFunc(slices.Clone(a.Addresses), func(o ipam.Address) bool {
		return o.Prefix.Addr().Is4() || by6(o.Prefix)
	})
}

// move does it.
func (v *visit) move(a *state.Attachment, r *lease.Record) error {
	next := *a
	next.Addresses, next.HostGateways, next.Moving = leased(a, r), hostGateways(a, r), false
	gone := slices.DeleteFunc(slices.Clone(a.Addresses), func(o ipam.Address) bool {
		return slices.Contains(prefixes(next.Addresses), o.Prefix)
	})
	both := next
	both.Addresses, both.Moving = slices.Concat(next.Addresses, gone), true
	if err := v.state.Update(&both); err != nil {
		return err
	}
	if err := v.moveInKernel(&next, prefixes(gone)); err != nil {
		return fmt.Errorf("move attachment to its new address: %w", err)
	}
	if err := v.state.Update(&next); err != nil {
		return err
	}
	v.metrics.moves.Inc()
	v.log.Info("attachment follows its lease", append(v.who(), "from", prefixes(gone), "to", prefixes(next.Addresses))...)
	return nil
}

// moveInKernel may be done again, from any point on.
func (v *visit) moveInKernel(next *state.Attachment, gone []netip.Prefix) error {
	if err := v.moveElements(next, gone); err != nil {
		return err
	}
	return errors.Join(v.forgetFlows(gone), v.renameAliases(next))
}

// moveElements changes the firewall. What there is now may be of any of the addresses of
// before, and of none; whichever it is, the pod has what it needs from the first of the
// transactions on.
func (v *visit) moveElements(next *state.Attachment, gone []netip.Prefix) error {
	network, err := v.state.LoadNetwork(next.Network)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nor has it anything in the kernel
	}
	if err != nil {
		return err
	}
	fw, err := nft.Dial(&nft.Config{NetNS: v.host})
	if err != nil {
		return err
	}
	now := endpoint.In(next, network)
	for _, p := range gone {
		old := *next
		old.Addresses = append([]ipam.Address{{Prefix: p}}, notLeased(next)...)
		err = errors.Join(err, fw.Move(v.ctx, endpoint.Of(&old), now))
	}
	without := *next
	without.Addresses = notLeased(next)
	err = errors.Join(err, fw.Move(v.ctx, endpoint.Of(&without), now))
	if errors.Is(err, fs.ErrNotExist) {
		// Another program flushed it. A repair, or the next ADD, makes it anew by the records.
		v.log.Warn("the firewall was removed: tombolo repair puts it back", append(v.who(), "err", err)...)
		err = nil
	}
	return errors.Join(err, fw.Close())
}

// forgetFlows has the kernel forget what it translates for addresses that may be
// others' from now on.
func (v *visit) forgetFlows(gone []netip.Prefix) error {
	var questions []conntrack.Question
	for _, p := range gone {
		questions = append(questions, conntrack.Of(p.Addr()))
	}
	if len(questions) == 0 {
		return nil
	}
	conn, err := conntrack.Dial(v.host)
	if err != nil {
		return err
	}
	_, err = conn.Flush(v.ctx, questions...)
	return errors.Join(err, conn.Close())
}

// renameAliases has the attachment's links in the host's namespace say its addresses.
func (v *visit) renameAliases(a *state.Attachment) error {
	conn, err := bridge.Dial(&bridge.Config{NetNS: v.host})
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range []string{a.HostIf, a.IFB} {
		if name == "" {
			continue
		}
		// The code that makes links reports another's link of that name.
		if err := conn.SetAlias(v.ctx, name, endpoint.AliasOwner(a.Hash()), endpoint.AliasOf(a)); !errors.Is(err, bridge.ErrForeign) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, conn.Close())...)
}
