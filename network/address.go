package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/file"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// ipamNode returns the facts about the node that a network's IPAM allocator needs. own and hash are the owner and the
// hash of the attachment that the allocator works on. They are empty if it works on all attachments.
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

// bindAllocator returns the allocator with the facts about its node (ipamNode). If the allocator is slow, bindAllocator
// releases the state directory's lock.
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

// reservedAgain lists the addresses that CNI's host-local plugin has reserved again for the same container. This
// happens if the container is started again with that plugin, which does not know our records.
func (t *teardown) reservedAgain(ctx context.Context, r *remains) []netip.Addr {
	if r.rec.DataDir == "" {
		return nil // the directory is our own, which that plugin does not use
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

// knownAddresses returns the attachment's addresses. It tries the complete record, the port's alias, and the caller's
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

// release returns r.addresses, except r.stillReserved, to the allocator that the record names, since the network may
// use another one now. Without a record, it uses the network's present allocator. It leaves leases alone. For a slow
// allocator, it first releases the state directory's lock.
func (t *teardown) release(ctx context.Context, r *remains) error {
	if r.rec != nil && r.rec.IPAMType == endpoint.Leased || r.rec == nil && t.Known.Leased {
		return nil // takeDown released the lease before it deleted the link
	}

	if r.owner.ContainerID == "" {
		return nil // the container's full ID is unknown, so no allocator can find it
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

// allocate gets the addresses of a pod that does not lease them: from the network's allocator or, if there is none,
// from the request. An allocator that asks another program may be slow, so allocate releases the state directory's lock
// while it waits.
func (a *addCall) allocate(ctx context.Context) (err error) {
	if a.leasing != nil {
		return nil
	}

	if err := refuseDeleted(a.pending); err != nil {
		return err
	}

	addresses, routes := a.pod.Addresses, a.pod.Routes
	if a.nw.Allocator != nil {
		owner := a.pod.key(a.nw).owner()
		allocator := a.s.bindAllocator(a.nw.Allocator, a.nw.Name, owner, a.hash)
		got, err := allocator.Add(ctx, owner)
		if err != nil {
			return failf(errAllocator, "%w", err)
		}

		addresses, routes = got.Addresses, append(got.Routes, a.pod.Routes...)
		a.undo.push(func(ctx context.Context) error {
			if allocator.Slow() {
				a.s.leave()
			}
			return allocator.Del(ctx, owner,
				convertAll(addresses, func(one ipam.Address) netip.Addr { return one.Prefix.Addr() }))
		})
		if err := a.s.enter(ctx); err != nil {
			return err
		}
	}

	if a.assigned, err = newAssignment(addresses, routes); err != nil {
		return err
	}
	return a.node.reportStep("ipam")
}

// newAssignment checks the addresses of a pod, and returns them with the routes. It puts IPv4 first: runtimes regard
// the first address of a result as the pod's main address.
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

// leasePart implements podPart for the DHCP lease of an attachment. The lease's record is in a separate directory that
// outlasts the node's state. tombolod renews the lease.
type leasePart struct{}

// mend adapts an attachment to its lease. If the server has assigned another address since the Add, tombolod has
// changed the address inside the pod. mend then changes everything outside the pod that depends on the address.
func (leasePart) mend(ctx context.Context, p *podSite) error {
	rec, err := newerLease(p.Attachment)
	if rec == nil || err != nil {
		return nil // Check reports faults of a lease
	}
	if err := p.s.follow(ctx, p.Attachment, p.nw, rec); !errors.Is(err, state.ErrBusy) {
		return err
	}
	return nil // A Del that holds the record removes the elements by the present record.
}

// configureLease adds the lease's addresses and routes to the pod's interface. It also sets the interface's MTU if the
// lease has a smaller one.
func configureLease(ctx context.Context, pod *netns.NS, rec *lease.Record, link *bridge.Attachment) error {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return err
	}
	defer conn.Close()
	a, remaining := rec.Applied, rec.Lease.Left(time.Now())
	if a.MTU >= link.MTU {
		a.MTU = 0
	}

	at := &lease.Interface{Conn: conn, Index: link.PeerIndex, Name: rec.IfName, Priority: rec.Policy.Priority}

	// Add the routes without NLM_F_EXCL, since another interface may have a route to the same destination.
	add := func(_ context.Context, _ *route.Conn, r route.Route) error {
		m, err := r.Message(unix.RTM_NEWROUTE, netlink.Create)
		return conn.Change(ctx, "add route", &r, m, err)
	}
	return at.Apply(ctx, a, remaining, remaining, add)
}

// look compares an attachment with the record of its lease, and adds the differences to p.found. For a lease that has
// ended or failed, it recommends no repair, since tombolod has to renew it. look releases the state directory's lock.
func (leasePart) look(_ context.Context, p *podSite) error {
	if p.IPAMType != endpoint.Leased {
		return nil
	}

	p.s.leave() // release the lock first: leases are on a disk
	dir, err := lease.Open(p.DataDir)
	if err != nil {
		return err
	}

	remedy := tombolo.RemedyConfigure
	if err := dir.CheckKeeper(); err != nil && !p.keeperOptional {
		remedy = tombolo.RemedyKeeper
		p.found.advise(remedy, "%v", err)
	}

	rec, err := dir.Load(p.Hash())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		p.found.advise(tombolo.RemedyRecreate, "its lease has no record in %s", dir.Path())
		return nil
	case err != nil:
		p.found.advise(tombolo.RemedyRecreate, "%v", err)
		return nil
	case rec.State != lease.Bound:
		p.found.advise(remedy, "its lease is %s: %s", rec.State, rec.Error)
	case len(p.Addresses) == 0 || rec.Lease.Address != p.Addresses[0].Prefix:
		p.found.advise(tombolo.RemedyRepair, "its lease has the address %s", rec.Lease.Address)
	case rec.Lease.Left(time.Now()) == 0:
		p.found.advise(remedy, "its lease of %s ended at %s", rec.Lease.Address, rec.Lease.Expire.Format(time.RFC3339))
	}

	p.lookAt6(rec, remedy)
	return nil
}

// leasesOf lists the records of the network's leases. It skips sticky records, whose leases wait for their pod to
// come back.
func leasesOf(s *session, network string) ([]*lease.Record, error) {
	if s.LeaseDir == "" {
		return nil, nil // without a lease directory, leave leases out
	}

	dir, err := lease.Open(s.LeaseDir)
	if err != nil {
		return nil, err
	}

	all, damaged, err := dir.List()
	for _, d := range damaged {
		s.warn(d.Error())
	}

	return slices.DeleteFunc(all, func(r *lease.Record) bool {
		return r.Network != network || r.State == lease.Sticky
	}), err
}

// leaseDir returns the directory with the record of an attachment's lease, or "" if the attachment has no lease. It
// uses the directory in rec. Without a record or a directory in it, it returns Config.LeaseDir if the caller passed
// Known.Leased.
func (t *teardown) leaseDir(rec *state.Attachment) string {
	switch {
	case rec != nil && rec.IPAMType == endpoint.Leased && filepath.IsAbs(rec.DataDir):
		return rec.DataDir
	case t.Known.Leased && (rec == nil || rec.IPAMType == endpoint.Leased):
		return t.Session.LeaseDir
	}
	return ""
}

// lookAt6 compares an attachment with its DHCPv6 lease, and adds a finding with the remedy if the lease is missing, has
// ended or differs.
func (p *podSite) lookAt6(rec *lease.Record, remedy tombolo.Remedy) {
	if rec.Six == nil || rec.Six.Stateless {
		return
	}
	switch own := rec.Leased6(); {
	case !own.IsValid():
		p.found.advise(remedy, "it has no address by DHCPv6: %s", rec.Six.Error)
	case rec.Six.Lease.Left(time.Now()) == 0:
		p.found.advise(remedy, "its DHCPv6 lease of %s ended at %s", own.Addr(),
			rec.Six.Lease.Expire.Format(time.RFC3339))
	case !slices.Contains(prefixesOf(p.Addresses), own):
		p.found.advise(remedy, "its DHCPv6 lease has the address %s", own.Addr())
	}
}

// awaitKeeper waits for tombolod, which writes the record of a lease. It reads the record again and again until the
// function done returns true or an error, a read fails, or ctx ends. It returns the last record that it read. The
// caller must not hold the state directory's lock.
func awaitKeeper(ctx context.Context, path, hash string,
	done func(*lease.Record) (bool, error)) (rec *lease.Record, _ error) {
	leases, err := lease.Open(path)
	if err != nil {
		return nil, err
	}

	err = poll(ctx, 5*time.Millisecond, unlimited, func() (_ bool, err error) {
		if rec, err = leases.Load(hash); err != nil {
			return false, convertDeleted(err)
		}
		return done(rec)
	})
	if err != nil && err == ctx.Err() {
		err = fmt.Errorf("(%w)", context.Cause(ctx))
	}
	return rec, err
}

// awaitDHCPv6 waits until tombolod has got a pod's DHCPv6 address, or only its DNS if made.informs is set. It adds the
// address and DNS to made, the result of Add. If no address comes in time, it deletes the attachment and returns an
// error. A lack of DNS is no error.
func (n *Node) awaitDHCPv6(ctx context.Context, pod *Pod, made *Attachment) (*Attachment, error) {
	limit := cmp.Or(pod.Lease.Client.Timeout, dhcpc.DefaultTimeout)
	waiting, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if made.informs {
		n.awaitDNS(waiting, made)
	} else if err := n.awaitAddress6(waiting, made); err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
		return nil, errors.Join(err, n.Del(undo, made.Key, nil))
	}
	return made, nil
}

// awaitAddress6 waits until tombolod has leased an IPv6 address for a pod, and the attachment's record contains the
// address. By then the pod and the firewall have the address too. awaitAddress6 adds the address and its DNS to made.
func (n *Node) awaitAddress6(ctx context.Context, made *Attachment) error {
	rec, err := awaitKeeper(ctx, n.cfg.LeaseDir, made.rec.Hash(), func(rec *lease.Record) (bool, error) {
		own := rec.Leased6()
		if !own.IsValid() || rec.Six.Checking {
			return false, nil
		}
		now, err := n.cfg.Dir.Load(made.Network, made.rec.Hash())
		if err != nil {
			return false, convertDeleted(err)
		}
		made.rec = now
		return !now.Moving && slices.Contains(prefixesOf(now.Addresses), own), nil
	})

	switch {
	case err != nil && ctx.Err() != nil && rec != nil:
		reason := "tombolod has not said why: see its log"
		if rec.Six != nil && rec.Six.Error != "" {
			reason = rec.Six.Error
		}
		return failf(ErrTryAgain, `ipv6 "dhcp": %s %w`, reason, err)
	case err != nil:
		return err
	}

	own := ipam.Address{Prefix: rec.Leased6()}
	for _, r := range made.Routes {
		if r.Gateway.Is6() && r.Dst.Bits() <= 0 {
			own.Gateway = r.Gateway
		}
	}

	made.Addresses = append(slices.Clone(made.Addresses), own)
	made.addDNS(rec.Six.Lease.DNS, rec.Six.Lease.Search)
	return nil
}

// dnsWait limits how long an ADD waits for DNS by DHCPv6. tombolod asks a server three times in this time. The ADD
// succeeds without an answer too.
const dnsWait = 4 * time.Second

// awaitDNS waits, for at most dnsWait, until tombolod has got a pod's DNS configuration by DHCPv6, and adds it to
// made. If none comes, it only logs a warning.
func (n *Node) awaitDNS(ctx context.Context, made *Attachment) {
	ctx, cancel := context.WithTimeout(ctx, dnsWait)
	defer cancel()
	rec, err := awaitKeeper(ctx, n.cfg.LeaseDir, made.rec.Hash(), func(rec *lease.Record) (bool, error) {
		return rec.Six == nil || rec.Six.Information != nil, nil
	})
	switch {
	case err != nil:
		n.cfg.Log.Warn("routers announce DNS by DHCPv6, but none came: " + err.Error())
	case rec.Six != nil:
		made.addDNS(rec.Six.Information.DNS, rec.Six.Information.Search)
	}
}

// addDNS adds the name servers and search domains from a DHCPv6 server to a.DNS.
func (a *Attachment) addDNS(servers []netip.Addr, search []string) {
	for _, server := range servers {
		if server.IsLinkLocalUnicast() {
			server = server.WithZone(a.IfName)
		}
		a.DNS.Servers = append(a.DNS.Servers, server)
	}
	a.DNS.Search = append(a.DNS.Search, search...)
}

// convertDeleted converts an error from reading a record during a wait. If the record does not exist, the attachment
// was deleted in that time, and the error matches ErrTryAgain. Any other error matches ErrState.
func convertDeleted(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return failf(ErrTryAgain, `ipv6 "dhcp": the attachment was deleted during its ADD`)
	}
	return stateError(err)
}

// solicit makes the pod's kernel send router solicitations. The method awaitAdvertised later waits for the answer.
// solicit returns nil if the pod accepts no advertisements, or accepts them only after its interface was moved
// (Change.Moved).
func (a *addCall) solicit(ctx context.Context) (*bridge.Solicitation, error) {
	if a.port.Autoconf == nil || a.pod.Path == "" {
		return nil, nil
	}
	return a.s.Links.Solicit(ctx, a.pod.NetNS, a.port)
}

// unconfirmed reports whether no DHCP server answered and the pod uses its last lease again. In that case the ADD does
// not wait for a router either.
func (a *addCall) unconfirmed() bool { return a.leasing != nil && a.leasing.unconfirmed }

// awaitAdvertised waits until the pod has formed an address from a router advertisement. It adds the address, the
// default route and the name servers to a.assigned. It does not wait if the network uses DHCPv6, or if no DHCP server
// answered. It adds no default route if the network permits none, or routes through the host.
func (a *addCall) awaitAdvertised(ctx context.Context, solicitation *bridge.Solicitation) error {
	if solicitation == nil {
		return nil
	}

	var err error
	got, g := new(bridge.Autoconfigured), &a.assigned
	if !a.nw.DHCPv6 && !a.unconfirmed() {
		if got, err = solicitation.Wait(ctx); err != nil {
			return failf(ErrTryAgain, `ipv6 "slaac": %w`, err)
		}
		if len(got.Addresses) == 0 {
			a.s.warn(`ipv6 "slaac": the pod's own parameters (net.ipv6.conf) keep it from forming an address`)
		}
	}

	var gateway netip.Addr
	switch {
	case a.nw.NoDefaultRoute:
	case a.nw.Exit == ExitHost: // the pod already has a default route through the host
		gateway = hostNextHop(true)
	case len(got.Gateways) > 0: // the pod's kernel has learnt the default route
		gateway = got.Gateways[0]
		g.routes = append(g.routes, defaultRouteVia(gateway))
	}

	for _, address := range got.Addresses {
		g.addresses = append(g.addresses, ipam.Address{Prefix: address.Prefix, Gateway: gateway})
	}

	g.dns.Servers = append(g.dns.Servers, got.Servers...)
	g.informs = got.OtherConfig && len(got.Servers) == 0
	return nil
}
