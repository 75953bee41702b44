package build

import (
	"context"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/route"
)

// hasGateway says whether the bridge, or the host's link in its VLAN, has a gateway's address, in one request: for
// IPv6 by a get of it. IPv4 has no such get, so the routing table is asked whether
// the host has it; for IPv6 it would not do, since the kernel makes the address's
// route some milliseconds after the address.
func hasGateway(links *bridge.Conn, gw netip.Prefix, l *bridge.Link) (bool, error) {
	if gw.Addr().Is6() {
		return links.Addresses().Has(addr.Address{Prefix: gw, Link: l.Index})
	}
	r, err := links.Routes().Get(gw.Addr())
	if err != nil && recorded.IsNoRoute(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return r.Type == route.Local, nil
}

const (
	forwarding4 = "net/ipv4/ip_forward"
	forwarding6 = "net/ipv6/conf/all/forwarding"
)

// ensureLinkLocal gives a bridge the address from which the host, as a router, asks
// for pods (RFC 4861, section 7.2.2). One that the kernel makes would not do: it is
// of no use until duplicate detection is over, and a bridge that began without
// IPv6 never gets it.
func ensureLinkLocal(links *bridge.Conn, l *bridge.Link) error {
	_, err := links.Addresses().Ensure(addr.Address{Prefix: netip.PrefixFrom(bridge.LinkLocal(l.MAC), 64), Link: l.Index, Flags: addr.NoDAD})
	return err
}

// buildGateways puts the gateways on the bridge, and takes those off that no pod
// needs any more.
func buildGateways(ctx context.Context, s *session.Session, rec *state.Network, l *bridge.Link, force bool) error {
	have, err := s.Links.Addresses().List(addr.Filter{Link: l.Index})
	if err != nil {
		return err
	}
	stale, err := staleGateways(s, rec)
	if err != nil {
		return err
	}
	usable, err := addr.Listen(nil)
	if err != nil {
		return err
	}
	defer usable.Close()
	var added []netip.Addr
	for _, gw := range rec.Gateways {
		for _, a := range have {
			if a.Prefix == gw || a.Prefix.Addr().IsLinkLocalUnicast() || !a.Prefix.Overlaps(gw) || slices.Contains(rec.Gateways, a.Prefix) {
				continue
			}
			if !force && !slices.Contains(stale, a.Prefix) {
				return fail.Errorf(fail.ErrConflict, "bridge %s has the address %s, which overlaps with the gateway %s of network %q: set forceAddress to replace it, or choose another bridge",
					l.Name, a.Prefix, gw, rec.Name)
			}
			stale = appendNew(stale, a.Prefix)
		}
		// Usable at once: nobody but us gives out addresses of the pods' network.
		own := addr.Address{Prefix: gw, Link: l.Index, Flags: addr.NoDAD}
		if !slices.ContainsFunc(have, func(a addr.Address) bool { return a.Prefix == gw }) {
			// An operator's own may have none: to exchange it would cost the routes that go by it.
			own.Broadcast = addr.Broadcast(gw)
		}
		changed, err := s.Links.Addresses().Ensure(own)
		if err != nil {
			return err
		}
		if changed {
			added = append(added, gw.Addr())
		} else if err := connect(s.Links.Routes(), gw, l.Index); err != nil {
			return err
		}
	}
	if slices.ContainsFunc(rec.Gateways, func(gw netip.Prefix) bool { return gw.Addr().Is4() }) {
		if _, err := sysctl.Ensure(sysctl.Link("ipv4", l.Name, "forwarding"), "1"); err != nil {
			return err
		}
	}
	if err := usable.Wait(ctx, s.Links.Addresses(), l.Index, added...); err != nil {
		return err
	}
	for _, p := range stale {
		if err := s.Links.Addresses().Remove(addr.Address{Prefix: p, Link: l.Index}); err != nil {
			return err
		}
	}
	if len(stale) == 0 {
		return nil
	}
	// Those of the same subnet go with the one that was there first, unless promote_secondaries
	// is on.
	for _, gw := range rec.Gateways {
		if _, err := s.Links.Addresses().Ensure(addr.Address{Prefix: gw, Link: l.Index, Flags: addr.NoDAD}); err != nil {
			return err
		}
	}
	return nil
}

// connect puts back the route to a gateway's subnet, in the place of another one.
func connect(routes *route.Conn, gw netip.Prefix, link int) error {
	wrong, err := recorded.Disconnected(routes, gw, link)
	if err != nil || wrong == "" {
		return err
	}
	_, err = routes.Ensure(recorded.Subnet(gw, link))
	return err
}

// staleGateways are the addresses that an earlier form of this network put on the
// bridge, and that neither it nor another network needs now.
func staleGateways(s *session.Session, rec *state.Network) ([]netip.Prefix, error) {
	before, err := s.Dir.LoadNetwork(rec.Name)
	if err != nil || before.GatewayLink() != rec.GatewayLink() {
		return nil, nil // none, or damaged: then nothing is known to be ours
	}
	used := slices.Clone(rec.Gateways)
	others, _, err := s.Dir.ListNetworks()
	if err != nil {
		return nil, fail.State(err)
	}
	for _, o := range others {
		if o.Name != rec.Name && o.GatewayLink() == rec.GatewayLink() {
			used = append(used, o.Gateways...)
		}
	}
	var stale []netip.Prefix
	for _, gw := range before.Gateways {
		if !slices.Contains(used, gw) {
			stale = append(stale, gw)
		}
	}
	return stale, nil
}
