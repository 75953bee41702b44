package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/conntrack"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/lockorder"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/trace"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/route"
)

// leaseCall is the state of an Add's work to lease the pod's address by DHCP.
type leaseCall struct {
	request *Lease
	client  lease.Client
	dir     *lease.Store
	lock    *lease.LockedRecord // the locked record of the lease; nil before begin
	rec     *lease.Record
	// unconfirmed means that no server answered, and the pod uses its last lease again. tombolod then asks servers to
	// confirm the lease.
	unconfirmed bool
}

// prepareLease checks the lease's configuration before anything is changed. It chooses a MAC if the pod requests none,
// and opens the directory of leases. It also stores the MAC and the kind of guard (anti-spoofing rules) in the
// attachment's record. While this Add waits for a DHCP server, other calls restore the guard from that record.
func (a *addCall) prepareLease() (*leaseCall, error) {
	l := &leaseCall{request: a.pod.Lease, client: lease.ClientOf(&a.pod.Lease.Client)}
	switch len(a.pod.MAC) {
	case 6:
	case 0:
		pod := *a.pod
		pod.MAC = ident.RandomMAC() // the server identifies the pod by its MAC
		a.pod = &pod
	default:
		return nil, failf(ErrInvalid, "container %s: %q is not a MAC of 6 bytes", a.pod.ContainerID, a.pod.MAC)
	}

	l.client.MAC, l.client.Sticky = dhcpc.Hex(a.pod.MAC), l.request.Sticky
	if _, err := dhcpc.NewMachine(l.client.DHCPConfig(nil)); err != nil {
		return nil, failf(ErrInvalid, "ipam: %w", err)
	}

	for _, p := range a.pod.Ports {
		if p.Protocol == unix.IPPROTO_UDP && p.PodPort <= dhcpv4.ClientPort &&
			dhcpv4.ClientPort < int(p.PodPort)+max(int(p.Count), 1) {
			return nil,
				failf(ErrInvalid,
					"runtimeConfig.portMappings: port %s leads to the pod's UDP port %d, where DHCP servers answer: "+
						"with ipam.type \"dhcp\" it cannot be published", endpoint.PortText(p), p.PodPort)
		}
	}

	var err error
	if l.dir, err = a.node.openLeases(l.request); err != nil {
		return nil, err
	}

	a.rec.IPAMType, a.rec.DataDir = endpoint.Leased, l.dir.Path()
	a.rec.MAC, a.rec.SLAAC = state.MAC(a.pod.MAC), a.nw.SLAAC
	a.rec.Guard = a.nw.Guard
	return l, nil
}

// openLeases opens the directory of lease records. If request requires a keeper (tombolod), which renews leases, and
// none runs or it is stuck, openLeases returns an error.
func (n *Node) openLeases(request *Lease) (*lease.Store, error) {
	dir, err := lease.Open(n.cfg.LeaseDir)
	if err != nil {
		return nil, failf(ErrInvalid, "%w", err)
	}

	if request.KeeperOptional {
		return dir, nil
	}

	if err := dir.CheckKeeper(); err != nil {
		return nil, failf(ErrTryAgain, `%w; or set ipam.keeper to "optional", if leases need not be renewed`, err)
	}
	return dir, nil
}

// obtain gets the addresses that a pod receives through its link, which is already up: a lease, and addresses from
// router advertisements. Then it updates the record, the port and the pod for these addresses. Servers and routers may
// be slow, so obtain releases the state directory's lock while it waits for them.
func (a *addCall) obtain(ctx context.Context) error {
	solicitation, err := a.solicit(ctx)
	if err != nil || solicitation == nil && a.leasing == nil {
		return err
	}

	if solicitation != nil {
		defer solicitation.Close()
	}

	a.s.leave()
	err = runWhileRecorded(ctx, a.pending, func(ctx context.Context) error {
		if a.leasing != nil {
			if err := a.acquire(ctx); err != nil {
				return err
			}
			a.assigned = newLeaseAssignment(a.leasing.rec, a.pod.Routes)
		}
		return a.awaitAdvertised(ctx, solicitation)
	})
	if err != nil {
		return err
	}

	if a.leasing != nil {
		err = a.applyLease(ctx)
	} else {
		err = a.s.enter(ctx)
	}

	if err != nil {
		return err
	}

	// Derive the record and the port again, since the pod's addresses are known only now.
	if err := a.derive(ctx); err != nil {
		return err
	}

	if err := a.s.Links.Enslave(ctx, a.portOnBridge()); err != nil {
		return err
	}

	if err := a.ready(ctx); err != nil || a.leasing == nil {
		return err
	}
	return a.node.reportStep("ipam")
}

// applyLease adds the IPv6 addresses that the pod formed to the lease's record in memory, and notes there if tombolod
// must request DNS by DHCPv6. It checks addresses that no server has confirmed (refuseTaken). Then it configures the
// pod for its lease.
func (a *addCall) applyLease(ctx context.Context) error {
	rec := a.leasing.rec
	if formed := a.assigned.addresses[1:]; len(formed) > 0 {
		rec.Formed = prefixesOf(formed)
	}

	if a.assigned.informs && !a.leasing.request.KeeperOptional {
		rec.Six = lease.SixOf(&rec.Client)
		rec.Six.Stateless = true
	}

	if err := a.s.enter(ctx); err != nil {
		return err
	}

	if err := a.refuseTaken(ctx); err != nil {
		return err
	}

	return explainRoute(configureLease(ctx, a.pod.NetNS, rec, a.link))
}

// recordLease writes the lease's record before the client sends a packet. So even after a kill, tombolod and Collect
// know that a lease may exist. If a later step of the Add fails, undoing the Add deletes the record.
func (a *addCall) recordLease(context.Context) error {
	l := a.leasing
	if l == nil {
		return nil
	}

	// Record the namespace's cookie. tombolod compares it to recognize that the attachment belongs to the lease.
	boot, err := state.BootID()
	cookie, cookieErr := a.pod.NetNS.Cookie()
	if err := cmp.Or(err, cookieErr); err != nil {
		return err
	}

	rec := &lease.Record{
		State: lease.Adding, Network: a.nw.Name, ContainerID: a.pod.ContainerID, IfName: a.pod.IfName, Pod: a.pod.Name,
		NetNS: a.pod.Path, NetNSCookie: cookie, Boot: boot, HostIf: a.rec.HostIf, Bridge: a.nw.Bridge,
		GatewayLink: cmp.Or(a.rec.NIC, a.rec.VLANLink()),
		Client:      l.client,
		Policy: lease.Policy{NoDefault: a.nw.NoDefaultRoute, Routes: l.request.Routes, Priority: l.request.Priority,
			IPv6: a.nw.SLAAC},
	}
	if a.usesHostRoute() {
		rec.Policy.Gateway = hostNextHop(false)
	}

	if a.nw.DHCPv6 {
		rec.Six = lease.SixOf(&rec.Client)
	}

	rec.Lease = l.dir.Recall(rec)
	if err := l.lock.Create(rec); err != nil {
		return stateError(err)
	}

	l.rec = rec
	a.undo.push(func(context.Context) error { return l.lock.Remove() })
	return nil
}

// acquire gets the lease through the pod's interface, and stores it in a.leasing.rec, without writing the record's
// file. If a later step of the Add fails, undoing the Add releases the lease, unless the lease is sticky.
func (a *addCall) acquire(ctx context.Context) error {
	rec, link := a.leasing.rec, a.link
	rec.Client.LinkMTU = link.MTU
	sockets := &transport.Config{NetNS: a.pod.NetNS, Link: link.PeerIndex, MAC: link.PeerMAC,
		ARP: rec.Client.DetectConflicts}
	cfg := rec.Client.DHCPConfig(rec.Lease)
	cfg.Last = rec.Lease
	cfg.Refuse = a.refuse(ctx, a.site.gatewayLink.Index, rec.Lease)

	// The firewall will admit the address that the server assigns, and a privileged process in the pod could forge a
	// server's answer. So receive the answers at the port, on the host's side.
	outside := &transport.Config{Link: link.Index, MAC: link.PeerMAC, ARP: sockets.ARP}
	cfg.Dial = func(ctx context.Context, local netip.Addr) (dhcpc.Transport[*dhcpc.Packet], error) {
		return transport.DialWitness(outside,
			func() (dhcpc.Transport[*dhcpc.Packet], error) { return transport.Dialer(sockets)(ctx, local) })
	}
	client, err := dhcpc.New(cfg)
	if err != nil {
		return failf(ErrInvalid, "ipam: %w", err)
	}

	lockorder.Slow("a DHCP server")
	got, err := client.Acquire(ctx)
	if err != nil && a.site.bridge.Bridge != nil && a.site.bridge.Bridge.PortDelay > 0 {
		return failf(ErrTryAgain, "%w: %s", err, endpoint.SlowPorts(a.nw.Bridge, a.site.bridge.Bridge.PortDelay))
	}

	if errors.Is(err, trace.ErrSilent) {
		if router := a.site.answeringRouter(ctx); router.IsValid() {
			return failf(ErrTryAgain, "%w; the host's router %s answers the host: see %s", err, router, endpoint.OneMAC)
		}
	}

	if err != nil {
		return failf(ErrTryAgain, "%w", err)
	}

	a.undo.push(func(ctx context.Context) error {
		a.s.leave()
		if rec.Client.Sticky {
			return nil // the lease belongs to the pod's next container
		}
		return transport.Release(ctx, sockets, got)
	})
	if a.leasing.unconfirmed = isUnconfirmed(rec.Lease, got); a.leasing.unconfirmed {
		rec.Note = "no DHCP server answered: the pod has its last lease, which no server has confirmed yet"
		a.s.warn(rec.Note + ": " + got.Address.String() + ", " + lease.TimeLeft(got, time.Now()))
	}

	if len(got.Others) > 0 {
		a.s.warn(lease.TwoServers(got))
	}

	for _, why := range got.Ignored {
		a.s.warn("lease of " + got.Address.String() + ": " + why)
	}

	rec.Lease, rec.Applied = got, rec.Policy.Apply(got)
	if slices.ContainsFunc(rec.Applied.Routes, func(r dhcpc.Route) bool { return r.Dst.Bits() == 0 }) {
		metric, err := freeMetric(ctx, a.pod.NetNS, unix.AF_INET, uint32(rec.Policy.Priority))
		if err != nil {
			return err
		}
		rec.Policy.Priority = int(metric)
	}

	if rec.Applied.MTU > got.MTU {
		a.s.warn(fmt.Sprintf("lease of %s: MTU %d is too small for IPv6, which the pod has: it gets %d", got.Address,
			got.MTU, rec.Applied.MTU))
	}

	return nil
}

// isUnconfirmed reports whether got is the last lease, which the client uses again because no server answered. See
// dhcpc.Config.
func isUnconfirmed(last, got *dhcpc.Lease) bool {
	return got == last || last != nil && !got.Infinite() && got.Renew.Equal(got.Rebind) && got.Renew.Before(time.Now())
}

// refuse returns a function that checks each lease that a server offers or grants. The function returns an error if the
// lease's address is unusable, the host's, a gateway's, or another pod's. link is the index of the link through which
// the host routes to the pods. had is the pod's previous lease, or nil. Its address may be a gateway, since the host
// may route through a pod.
func (a *addCall) refuse(ctx context.Context, link int, had *dhcpc.Lease) func(l, _ *dhcpc.Lease) error {
	var before netip.Addr
	if had != nil {
		before = had.Address.Addr()
	}
	return func(offer, _ *dhcpc.Lease) error {
		own := offer.Address.Addr()
		if err := lease.CheckUsable(offer); err != nil {
			return err
		}
		if err := lease.CheckConflict(ctx, a.s.Links.Routes(), link, own, before); err != nil {
			return err
		}
		return a.refuseAddress(ctx, cmp.Or(a.site.sharedNIC(), a.nw.GatewayLink()), own)
	}
}

// newLeaseAssignment returns the addresses, routes and DNS that a pod gets from its lease, and appends the routes in
// more.
func newLeaseAssignment(rec *lease.Record, more []route.Route) assignment {
	got := rec.Lease
	address := ipam.Address{Prefix: got.Address, Gateway: rec.Policy.Router(got)}
	g := assignment{addresses: []ipam.Address{address}, dns: DNS{slices.Clone(got.DNS), got.Domain, got.Search}}
	for _, r := range rec.Applied.Routes {
		one := route.Route{Dst: r.Dst, Gateway: r.Gateway, Priority: uint32(rec.Policy.Priority)}
		if !r.Gateway.IsValid() {
			one.Scope = new(uint8(unix.RT_SCOPE_LINK))
		}
		g.routes = append(g.routes, one)
	}

	g.routes = append(g.routes, more...)
	return g
}

// commit writes the lease's record with the state Bound, so that tombolod renews the lease. The write waits for the
// disk, so commit does not hold the state directory's lock during the write.
func (l *leaseCall) commit(ctx context.Context, s *session) error {
	s.leave()
	l.rec.State = lease.Bound
	if err := l.lock.Replace(l.rec); err != nil {
		return stateError(err)
	}
	return s.enter(ctx)
}

// When a lease gets another address, everything outside the pod that an Add made for the old address must follow. This
// is the attachment's record, its elements in the firewall (host ports, masquerade, guard), and the alias of its port.
// Without this, the guard would block the pod's new address, and a host port would lead to another machine at the old
// address.
//
// First the record is written with the old and the new addresses, and with its field Moving set. Then the kernel is
// changed, and last the record is written in its final form. So after a kill, the next process completes the change,
// and a Del looks for the elements of all addresses.

// Follow adapts an attachment to its lease, if the lease has ended or now has other addresses than the attachment's
// record. It changes the record, the pod's firewall elements and neighbour entries, and the port's alias, and deletes
// the conntrack entries of lost addresses. It returns the addresses before and after. If there is nothing to adapt,
// Follow does nothing, and returns nil for both lists and the error.
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

		// Load the records again, since they may have changed before the lock was exclusive.
		a, rec, err := loadNewerLease(dir, key)
		if rec == nil || err != nil {
			return err
		}

		nw, err := dir.LoadNetwork(key.Network)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return stateError(err)
		}

		before := prefixesOf(a.Addresses)
		if err = s.follow(ctx, a, nw, rec); err == nil {
			from, to = before, prefixesOf(a.Addresses)
		}
		return err
	})

	return from, to, err
}

// loadNewerLease loads an attachment's record, and the lease's record if the attachment must follow the lease
// (newerLease). If either record does not exist, it returns nil for both and no error.
func loadNewerLease(dir *state.Dir, key Key) (a *state.Attachment, rec *lease.Record, err error) {
	if a, err = dir.Load(key.Network, key.hash()); err == nil {
		rec, err = newerLease(a)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	return a, rec, stateError(err)
}

// newerLease returns the record of an attachment's lease if the attachment must follow the lease: the two records
// differ in the addresses, or a killed process left the attachment's record with Moving set. Otherwise it returns nil.
// It also returns nil if the Add is not complete, or if the lease belongs to another network namespace.
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
	return a.Moving || len(have) != len(want) || !containsAll(have, want)
}

// leasedAddresses returns the addresses that an attachment has according to the record of its lease. These are the IPv4
// address, an address by DHCPv6, and the IPv6 addresses that the pod has formed. If the lease has ended, the IPv4
// address is left out, since another machine may have it.
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

// formedAddresses returns the IPv6 addresses that the pod has formed from router advertisements. It leaves out a
// DHCPv6 address, which has a prefix length of 128.
func formedAddresses(a *state.Attachment) []ipam.Address {
	return slices.DeleteFunc(slices.Clone(a.Addresses), func(o ipam.Address) bool {
		return o.Prefix.Addr().Is4() || o.Prefix.IsSingleIP()
	})
}

// follow adapts an attachment's record, firewall elements, conntrack entries, alias and neighbour entries to its lease.
// The caller holds the state directory's exclusive lock. After an error or a kill at any point, it may be called again.
// If the network has no record, nw is nil, and follow leaves the firewall alone.
func (s *session) follow(ctx context.Context, a *state.Attachment, nw *state.Network, rec *lease.Record) error {
	next := new(*a)
	next.Addresses, next.Moving = leasedAddresses(a, rec), false
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
		err = errors.Join(forgetFlows(ctx, dropped), s.renameAlias(ctx, next), s.completeNextHops(ctx, next))
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

// moveElements replaces the pod's elements in the firewall's sets by elements for its new addresses. The present
// elements may belong to any of the previous addresses, or to none. In any case the pod has all its elements after the
// first transaction. If the sets are missing, moveElements only logs a warning.
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

	conn, err := conntrack.Dial(nil)
	if err != nil {
		return err
	}

	question := func(g ipam.Address) conntrack.Selector { return conntrack.Of(g.Prefix.Addr()) }
	_, err = conn.Flush(ctx, convertAll(dropped, question)...)
	return errors.Join(err, conn.Close())
}

// renameAlias writes an attachment's addresses into the alias of its port. If the link belongs to another owner, it
// does nothing and returns no error.
func (s *session) renameAlias(ctx context.Context, a *state.Attachment) error {
	err := s.Links.SetAlias(ctx, a.HostIf, endpoint.AliasOwner(a.Hash()), endpoint.AliasOf(a))
	if errors.Is(err, bridge.ErrForeign) {
		return nil
	}

	return err
}

func prefixesOf(list []ipam.Address) []netip.Prefix {
	return convertAll(list, func(a ipam.Address) netip.Prefix { return a.Prefix })
}
