package network

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// gatewayPart is the part of a network with the gateways' addresses and the host's routes to their subnets. The
// addresses are on the bridge, or on the host's link in the network's VLAN.
type gatewayPart struct{}

func (gatewayPart) look(ctx context.Context, n *site) error {
	if n.gatewayLink.Index == 0 {
		return nil
	}

	if n.quick {
		return n.lookAtOwnGateways(ctx)
	}

	if path := n.acceptRAPath(); path != "" {
		if have, err := sysctl.Read(path); err != nil {
			return err
		} else if have != "0" {
			differs := tombolo.Difference{Object: "kernel parameters", What: path, Want: "0", Have: have}
			n.found.addAll([]tombolo.Difference{differs}, tombolo.RemedyRepair)
		}
	}

	have, err := n.s.Links.Addresses().List(ctx, addr.Filter{Link: n.gatewayLink.Index})
	if err != nil {
		return err
	}

	n.lookAtLinkLocal(have)
	for _, gw := range n.rec.Gateways {
		if !has(have, gw) {
			n.lacksGateway(gw, have)
			continue
		}

		if !n.gatewayLink.Up {
			continue // the kernel has no route through a link that is down
		}

		wrong, err := checkSubnet(ctx, n.s.Links.Routes(), gw, n.gatewayLink.Index)
		if err != nil {
			return err
		}

		if wrong != "" {
			n.found.advise(tombolo.RemedyRepair, "bridge %s: the host's route to %s %s",
				n.gatewayLink.Name, gw.Masked(), wrong)
		}
	}

	return nil
}

// lacksGateway adds a fault for a missing gateway. If another owner's address overlaps with the gateway, the advice
// is to change the configuration, since a repair would not replace that address.
func (n *site) lacksGateway(gw netip.Prefix, have []addr.Address) {
	for _, a := range have {
		if overlapsGateway(n.rec, gw, a.Prefix) {
			n.found.advise(tombolo.RemedyConfigure, "bridge %s: the gateway %s is missing, and in its place is %s",
				n.gatewayLink.Name, gw, a.Prefix)
			return
		}
	}
	n.found.advise(tombolo.RemedyRepair, "bridge %s: the gateway %s is missing", n.gatewayLink.Name, gw)
}

// lookAtLinkLocal adds a fault if the link-local address of addLinkLocal is missing although there is an IPv6
// gateway.
func (n *site) lookAtLinkLocal(have []addr.Address) {
	is6 := func(gw netip.Prefix) bool { return isIPv6(gw) && has(have, gw) }
	own := func(a addr.Address) bool { return isIPv6(a.Prefix) && a.Prefix.Addr().IsLinkLocalUnicast() }
	if n.gatewayLink.Up && slices.ContainsFunc(n.rec.Gateways, is6) && !slices.ContainsFunc(have, own) {
		n.found.advise(tombolo.RemedyRepair,
			"bridge %s: a link-local IPv6 address, from which the host asks for pods, is missing", n.gatewayLink.Name)
	}
}

func has(have []addr.Address, p netip.Prefix) bool {
	return slices.ContainsFunc(have, func(a addr.Address) bool { return a.Prefix == p })
}

// overlapsGateway reports whether an address of the gateways' link overlaps with the gateway gw, and is neither a
// gateway itself nor link-local.
func overlapsGateway(rec *state.Network, gw, have netip.Prefix) bool {
	return have.Overlaps(gw) && !have.Addr().IsLinkLocalUnicast() && !slices.Contains(rec.Gateways, have)
}

// lookAtOwnGateways looks for the gateways of an Add's pod, with one request for each. For IPv6 it gets the address
// itself. IPv4 has no such request, so it gets the route to the address, which is of type local if the host has the
// address. That does not work for IPv6, since the kernel adds the local route some milliseconds after the address.
func (n *site) lookAtOwnGateways(ctx context.Context) error {
	gateways := n.rec.Gateways
	if n.required != nil {
		gateways = n.required.Record.Gateways
	}

	for _, gw := range gateways {
		var ok bool
		var err error
		if gw.Addr().Is6() {
			ok, err = n.s.Links.Addresses().Has(ctx, addr.Address{Prefix: gw, Link: n.gatewayLink.Index})
		} else {
			var r route.Route
			r, err = n.s.Links.Routes().Get(ctx, gw.Addr())
			ok = err == nil && r.Type == unix.RTN_LOCAL
		}

		if err != nil && !route.NoRoute(err) {
			return err
		}

		if !ok {
			n.found.advise(tombolo.RemedyRepair, "bridge %s: the gateway %s is missing", n.gatewayLink.Name, gw)
		}
	}

	return nil
}

func (gatewayPart) make(ctx context.Context, n *site) (bool, error) {
	if path := n.acceptRAPath(); path != "" {
		if _, err := sysctl.Ensure(path, "0"); err != nil {
			return false, err
		}
	}

	if slices.ContainsFunc(n.rec.Gateways, isIPv6) {
		if err := n.addLinkLocal(ctx); err != nil {
			return false, err
		}
	}
	return false, n.buildGateways(ctx, n.required != nil && n.required.ForceAddress)
}

// acceptRAPath returns the path of the parameter accept_ra of the gateways' link. The value must be 0, so that no
// pod can give the host addresses and routes by router advertisements. acceptRAPath returns "" if the value does
// not matter. That is the case without IPv6, if neither the bridge nor any gateway is ours, or if the LAN's router
// advertises through the uplink.
func (n *site) acceptRAPath() string {
	path := sysctl.Link("ipv6", n.gatewayLink.Name, "accept_ra")
	routes := n.bridge.Alias == endpoint.BridgeAlias || len(n.rec.Gateways) > 0
	if n.rec.Uplink != "" || !routes || !sysctl.Exists(path) {
		return ""
	}
	return path
}

// addLinkLocal adds the host's link-local address on the gateways' link. As a router, the host sends its neighbour
// solicitations for pods from that address (RFC 4861, section 7.2.2). The kernel's own link-local address is
// unsuitable. It cannot be used before duplicate address detection is over, and a bridge that was created without
// IPv6 never gets it.
func (n *site) addLinkLocal(ctx context.Context) error {
	if _, err := sysctl.Ensure(sysctl.Link("ipv6", n.gatewayLink.Name, "disable_ipv6"), "0"); err != nil {
		return err
	}
	own := addr.Address{Prefix: netip.PrefixFrom(addr.LinkLocal(n.gatewayLink.MAC), 64), Link: n.gatewayLink.Index,
		Flags: unix.IFA_F_NODAD}
	_, err := n.s.Links.Addresses().Ensure(ctx, own)
	return err
}

// gatewaysInUse reports whether every recorded gateway is still needed. A gateway is needed if this ADD requests it,
// or if the attachment for which it was recorded still exists.
func gatewaysInUse(s *session, rec *state.Network, w *requirement) bool {
	for _, holder := range rec.GatewayUses {
		if slices.Contains(w.Record.Gateways, holder.Gateway) {
			continue
		}
		if _, err := s.Dir.Load(rec.Name, holder.Attachment); err != nil {
			return false
		}
	}
	return true
}

// buildGateways adds the gateways' addresses to the link, and deletes stale ones. With force it also deletes
// addresses that overlap with a gateway's.
func (n *site) buildGateways(ctx context.Context, force bool) error {
	s, rec, l := n.s, n.rec, n.gatewayLink
	have, err := s.Links.Addresses().List(ctx, addr.Filter{Link: l.Index})
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
	for _, gw := range rec.Gateways {
		for _, a := range have {
			if !overlapsGateway(rec, gw, a.Prefix) {
				continue
			}
			if !force && !slices.Contains(stale, a.Prefix) {
				return failf(ErrConflict,
					"bridge %s has the address %s, which overlaps with the gateway %s of network %q: set "+
						"forceAddress to replace it, or choose another bridge",
					l.Name, a.Prefix, gw, rec.Name)
			}
			stale = appendNew(stale, a.Prefix)
		}

		// Skip duplicate address detection: no other program assigns addresses of the pods' network.
		own := addr.Address{Prefix: gw, Link: l.Index, Flags: unix.IFA_F_NODAD}
		if !has(have, gw) {
			// Set the broadcast address only on a new address. An operator's own address may have none, and replacing
			// the address would delete the routes that use it.
			own.Broadcast = addr.Broadcast(gw)
			if own.Flags, err = n.refuseAnswered(ctx, gw); err != nil {
				return err
			}
		}

		changed, err := s.Links.Addresses().Ensure(ctx, own)
		if err != nil {
			return err
		}

		if changed {
			err := usable.Wait(ctx, s.Links.Addresses(), l.Index, gw.Addr())
			if errors.Is(err, addr.ErrDuplicate) {
				err = errors.Join(n.errAnswered(gw, "duplicate address detection"),
					s.Links.Addresses().Remove(ctx, own))
			}
			if err != nil {
				return err
			}
			continue
		}

		wrong, err := checkSubnet(ctx, s.Links.Routes(), gw, l.Index)
		if wrong != "" {
			_, err = s.Links.Routes().Ensure(ctx, subnetRoute(gw, l.Index)) // replaces another route
		}

		if err != nil {
			return err
		}
	}

	for _, p := range stale {
		if err := s.Links.Addresses().Remove(ctx, addr.Address{Prefix: p, Link: l.Index}); err != nil {
			return err
		}
	}

	if len(stale) == 0 {
		return nil
	}

	// With a primary address, the kernel deletes the secondary addresses of its subnet too, unless
	// promote_secondaries is on. So add the gateways again.
	for _, gw := range rec.Gateways {
		if _, err := s.Links.Addresses().Ensure(ctx,
			addr.Address{Prefix: gw, Link: l.Index, Flags: unix.IFA_F_NODAD}); err != nil {
			return err
		}
	}

	return nil
}

// staleGateways returns the gateways that the network's previous record lists, and that neither the new record nor
// another network needs.
func staleGateways(s *session, rec *state.Network) ([]netip.Prefix, error) {
	before, err := s.Dir.LoadNetwork(rec.Name)
	if err != nil || before.GatewayLink() != rec.GatewayLink() {
		return nil, nil // without a readable record, no gateway is known to be ours
	}

	used := slices.Clone(rec.Gateways)
	others, err := s.otherNetworks(rec.Name)
	if err != nil {
		return nil, err
	}

	for _, o := range others {
		if o.GatewayLink() == rec.GatewayLink() {
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

// subnetRoute returns the route to the subnet of a, as the kernel adds it together with the address. If the route is
// deleted, the kernel does not add it again.
func subnetRoute(a netip.Prefix, link int) route.Route {
	const priority6 = 256 // IP6_RT_PRIO_ADDRCONF (include/uapi/linux/ipv6_route.h)
	r := route.Route{Dst: a.Masked(), Link: link, Protocol: unix.RTPROT_KERNEL}
	if a.Addr().Is4() {
		r.Source = a.Addr()
	} else {
		r.Priority = priority6
	}
	return r
}

// checkSubnet checks the kernel's route to the subnet of the address a on a link. It returns a description of the
// fault, or "" if the route is right. It looks in all tables, since a link in a VRF has its routes in the VRF's
// table. A prefix with a single address has no such route.
func checkSubnet(ctx context.Context, routes *route.Conn, a netip.Prefix, link int) (string, error) {
	if a.IsSingleIP() {
		return "", nil
	}

	// First get one route, which is cheap. A list makes the kernel walk through all routes of the host.
	other := a.Addr().Next()
	if !a.Contains(other) {
		other = a.Addr().Prev()
	}

	switch r, err := routes.Get(ctx, other); {
	case err == nil && r.Link == link:
		return "", nil
	case err != nil && !route.NoRoute(err):
		return "", err
	}

	wrong := "is missing"
	err := routes.Walk(ctx, route.Filter{Family: nl.FamilyOf(a.Addr())}, func(r route.Route) {
		switch {
		case r.Dst != a.Masked() || wrong == "":
		case r.Link == link:
			wrong = ""
		case r.Table == unix.RT_TABLE_MAIN:
			wrong = "leads elsewhere: " + r.String()
		}
	})

	return wrong, err
}
