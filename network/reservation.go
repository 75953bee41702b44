package network

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/route"
)

// ipamNode returns the facts about the node that a network's allocator needs. own and hash are the owner and the hash
// of the attachment that the allocator works on. They are empty if it works on all attachments.
func (s *session) ipamNode(network string, own ipam.Owner, hash string) ipam.Node {
	return ipam.Node{
		Epoch: ipam.Epoch{Token: s.Epoch.Token(), Started: s.Dir.Begun(s.Epoch)},
		Live:  func(ctx context.Context) ([]ipam.Live, error) { return s.liveAddresses(ctx, network) },
		Hash: func(o ipam.Owner) string {
			if hash != "" && o == own {
				return hash
			}
			return ident.Hash(network, o.ContainerID, o.IfName)
		},
		InUse: func(hash string) bool {
			_, err := s.Dir.Load(network, hash)
			return !errors.Is(err, fs.ErrNotExist)
		},
		Warn: s.warn,
	}
}

// bindAllocator returns the allocator with the facts about its node. If the allocator is slow, bindAllocator releases
// the state's lock.
func (s *session) bindAllocator(a ipam.Allocator, network string, own ipam.Owner, hash string) ipam.Allocator {
	if a.Slow() {
		s.leave()
	}
	return a.Bind(s.ipamNode(network, own, hash))
}

// collectReservations releases the reservations of attachments that are neither in valid nor on record. An attachment
// on record may have an ADD in progress, or be newer than the caller's list.
func (t *teardown) collectReservations(ctx context.Context, valid []ipam.Owner) error {
	if t.Known.Leased {
		return nil // leased addresses have no reservations
	}

	if err := t.Session.enter(ctx); err != nil {
		return err
	}
	defer t.Session.leave()
	allocator, err := t.node.allocator(t.Network, nil)
	if err != nil || allocator == nil {
		return err
	}
	return t.Session.bindAllocator(allocator, t.Network, ipam.Owner{}, "").Collect(ctx, valid)
}

// reservedAgain lists the addresses that the reference host-local plugin has reserved again for the same attachment.
// This happens if the container is started again with that plugin, which does not know our records.
func (t *teardown) reservedAgain(ctx context.Context, r *remains) []netip.Addr {
	if r.rec.DataDir == "" {
		return nil // the directory is one of ours
	}

	written, err := t.Session.Dir.Written(t.Network, r.hash)
	if err != nil {
		return nil
	}

	var list []netip.Addr
	for _, a := range r.addresses {
		path := r.rec.DataDir + "/" + t.Network + "/" + a.String()
		info, err := os.Stat(path)
		if err != nil || !info.Mode().IsRegular() || !info.ModTime().After(written) {
			continue
		}

		// Count only a reservation that names the container. A reservation that was restored from the kernel's
		// addresses names none.
		text, err := file.ReadNamed(ctx, path, file.MaxRecord, 0)
		if err == nil && strings.HasPrefix(string(text), r.owner.ContainerID) {
			list = append(list, a)
		}
	}

	return list
}

// removeReservations deletes the network's own directory of reservations. Without attachments, the files there are
// only bookkeeping. A directory that the configuration names is the operator's, and stays.
func (s *session) removeReservations(network string) error {
	return stateError(os.RemoveAll(s.Dir.Path() + "/ipam/" + network))
}

// knownAddresses returns the attachment's addresses. It tries the record, the port's alias, and the caller's
// Known.Addresses in turn. nil means that the addresses are unknown, and must be searched for.
func (t *teardown) knownAddresses(ctx context.Context, r *remains) []netip.Addr {
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

// release releases the addresses to the allocator that the record names, since the network may have another one now.
// For a slow allocator, it first releases the state's lock.
func (t *teardown) release(ctx context.Context, r *remains) error {
	if r.rec != nil && r.rec.IPAMType == endpoint.Leased || r.rec == nil && t.Known.Leased {
		return nil // the lease was released before the link was deleted
	}

	if r.owner.ContainerID == "" {
		return nil // its full name is unknown, so no allocator can find it
	}

	var origin *Origin
	if r.rec != nil {
		origin = &Origin{r.rec.IPAMType, r.rec.DataDir}
	}

	allocator, err := t.node.allocator(t.Network, origin)
	if err != nil || allocator == nil {
		return err
	}

	allocator = t.Session.bindAllocator(allocator, t.Network, r.owner, r.hash)
	addresses := slices.DeleteFunc(slices.Clone(r.addresses),
		func(a netip.Addr) bool { return slices.Contains(r.stillReserved, a) })
	if len(addresses) == 0 && len(r.stillReserved) > 0 {
		return nil
	}

	return allocator.Del(ctx, r.owner, addresses)
}

// removeElements deletes the attachment's elements from the firewall's sets. If the pod is guarded, or may be,
// removeElements first sets its port down. Without this, the pod could send anything until the port is gone. If the
// port cannot be set down, the elements stay.
func removeElements(ctx context.Context, s *session, r *remains) error {
	var err error
	if !isKnown(r.rec) || r.rec.Guard != "" {
		err = s.Links.Shut(ctx, r.port(), endpoint.AliasOwner(r.hash))
		if err != nil && !errors.Is(err, bridge.ErrForeign) {
			return err
		}
	}
	return errors.Join(err, s.removeElements(ctx, r.hash, r.rec))
}

// allocate gets the addresses of a pod that does not lease them. An allocator that asks another program may be slow, so
// allocate gives up the state's lock while it waits.
func (a *addCall) allocate(ctx context.Context) (err error) {
	if a.leasing != nil {
		return nil
	}

	if err := refuseDeleted(a.pending); err != nil {
		return err
	}

	if a.nw.Allocator == nil {
		if a.assigned, err = newAssignment(a.pod.Addresses, a.pod.Routes); err != nil {
			return err
		}
		return a.node.reportStep("ipam")
	}

	owner := a.pod.key(a.nw).owner()
	allocator := a.s.bindAllocator(a.nw.Allocator, a.nw.Name, owner, a.hash)
	got, err := allocator.Add(ctx, owner)
	if err != nil {
		return &allocationError{err}
	}

	a.undo.push(func(ctx context.Context) error {
		if allocator.Slow() {
			a.s.leave()
		}
		var addrs []netip.Addr
		for _, one := range got.Addresses {
			addrs = append(addrs, one.Prefix.Addr())
		}
		return allocator.Del(ctx, owner, addrs)
	})
	if err := a.s.enter(ctx); err != nil {
		return err
	}

	if a.assigned, err = newAssignment(got.Addresses, append(got.Routes, a.pod.Routes...)); err != nil {
		return err
	}
	return a.node.reportStep("ipam")
}

// newAssignment checks the addresses of a pod, and returns them with the routes. It puts IPv4 first: runtimes regard
// the first address of a result as the pod's.
func newAssignment(addresses []ipam.Address, routes []route.Route) (assignment, error) {
	g := assignment{routes: routes, addresses: slices.Clone(addresses)}
	for i, a := range addresses {
		if !a.Prefix.IsValid() {
			return g, failf(ErrInvalid, "the ipam's ips[%d] is no address with a prefix length", i)
		}
		if a.Gateway.IsValid() && a.Gateway.BitLen() != a.Prefix.Addr().BitLen() {
			return g, failf(ErrInvalid, "the ipam's ips[%d]: the gateway %s is not of the family of %s", i, a.Gateway,
				a.Prefix)
		}
	}

	slices.SortStableFunc(g.addresses, func(a, b ipam.Address) int {
		return a.Prefix.Addr().BitLen() - b.Prefix.Addr().BitLen()
	})
	return g, nil
}
