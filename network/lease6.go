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

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/ipam"
)

// lookAt6 compares an attachment with its DHCPv6 lease.
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
	case !slices.ContainsFunc(p.Addresses, func(a ipam.Address) bool { return a.Prefix == own }):
		p.found.advise(remedy, "its DHCPv6 lease is of %s", own.Addr())
	}
}

// awaitKeeper reads the record of a lease again and again, until the function done returns true or an error, or until
// ctx ends. It returns the last record that it read. The caller must not hold the state's lock.
func awaitKeeper(ctx context.Context, path, hash string, done func(*lease.Record) (bool, error)) (*lease.Record,
	error) {
	leases, err := lease.Open(path)
	if err != nil {
		return nil, err
	}

	for {
		rec, err := leases.Load(hash)
		if err != nil {
			return nil, convertDeleted(err)
		}

		if is, err := done(rec); is || err != nil {
			return rec, err
		}
		select {
		case <-ctx.Done():
			return rec, fmt.Errorf("(%w)", context.Cause(ctx))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// awaitDHCPv6 waits until the keeper has got a pod's DHCPv6 address, or its DNS alone if made.informs is set. It adds
// the address and DNS to the result of Add. If there is no address, it deletes the attachment and returns an error. A
// lack of DNS is no error.
func (n *Node) awaitDHCPv6(ctx context.Context, pod *Pod, made *Attachment) (*Attachment, error) {
	limit := cmp.Or(pod.Lease.Client.Timeout, dhcpc.DefaultTimeout)
	waiting, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if made.informs {
		n.awaitDNS(waiting, made)
		return made, nil
	}

	if err := n.awaitAddress6(waiting, made); err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
		return nil, errors.Join(err, n.Del(undo, made.Key, nil))
	}
	return made, nil
}

// awaitAddress6 waits until the keeper has leased an IPv6 address for a pod, and the attachment's record contains the
// address. By then the pod and the firewall have it too.
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

// dnsWait limits how long an ADD waits for DNS by DHCPv6. The keeper asks a server three times in this time. The ADD
// succeeds without an answer too.
const dnsWait = 4 * time.Second

// awaitDNS waits, for at most dnsWait, until the keeper has got a pod's DNS configuration, and adds it to the result.
func (n *Node) awaitDNS(ctx context.Context, made *Attachment) {
	ctx, cancel := context.WithTimeout(ctx, dnsWait)
	defer cancel()
	rec, err := awaitKeeper(ctx, n.cfg.LeaseDir, made.rec.Hash(), func(rec *lease.Record) (bool, error) {
		return rec.Six == nil || rec.Six.Information != nil, nil
	})
	switch {
	case err != nil:
		n.cfg.Log.Warn("no DNS by DHCPv6, although routers say that there is " + err.Error())
	case rec.Six != nil:
		made.addDNS(rec.Six.Information.DNS, rec.Six.Information.Search)
	}
}

// addDNS adds the name servers and search domains from a DHCPv6 server to the result.
func (a *Attachment) addDNS(servers []netip.Addr, search []string) {
	for _, server := range servers {
		if server.IsLinkLocalUnicast() {
			server = server.WithZone(a.IfName)
		}
		a.DNS.Servers = append(a.DNS.Servers, server)
	}
	a.DNS.Search = append(a.DNS.Search, search...)
}

// convertDeleted converts an error from reading a record during a wait. If the record does not exist, the
// attachment was deleted in that time, and the error matches ErrTryAgain.
func convertDeleted(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return failf(ErrTryAgain, `ipv6 "dhcp": the attachment was deleted meanwhile`)
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

// unconfirmed reports whether no DHCP server answered. In that case the ADD does not wait for a router either.
func (a *addCall) unconfirmed() bool { return a.leasing != nil && a.leasing.unconfirmed }

// awaitAdvertised waits until the pod has formed an address from a router advertisement. It adds the address, the
// default route and the name servers to a.given.
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
			a.s.warn(`ipv6 "slaac": parameters of the pod's own (net.ipv6.conf) keep it from forming an address`)
		}
	}

	var gateway netip.Addr
	switch {
	case a.nw.NoDefaultRoute:
	case a.nw.Exit == ExitHost: // the pod has that route
		gateway = hostNextHop(true)
	case len(got.Gateways) > 0: // the pod's kernel has learnt that route
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
