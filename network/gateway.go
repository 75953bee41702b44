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

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// gatewayPart implements part for the gateways' addresses and the host's routes to their subnets. The addresses are on
// the bridge, or on the host's link in the network's VLAN.
type gatewayPart struct{}

func (gatewayPart) look(ctx context.Context, n *site) error {
	if n.gatewayLink.Index == 0 {
		return nil
	}

	if n.quick {
		return n.lookAtOwnGateways(ctx)
	}

	n.lookAtParameter(n.acceptRAPath(), "0")
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

// lacksGateway adds a finding for a missing gateway address. If another address of the link overlaps with the gateway,
// the advice is to change the configuration, since a repair would not replace that address.
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

// lookAtLinkLocal adds a finding if the gateways' link is up and has an IPv6 gateway, but no link-local IPv6 address.
// Any such address will do, not only the one that addLinkLocal adds.
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

// lookAtOwnGateways adds a finding for each gateway of an Add's pod that the host lacks, with one request for each.
// Without an Add (n.required is nil), it looks for all gateways on record. For IPv6, it requests the address. IPv4 has
// no such request, so it requests a route, which has type local if the host has the address. For IPv6 a request for the
// route would come too early, since the kernel adds the local route some milliseconds after the address.
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
// pod can give the host addresses and routes by router advertisements. acceptRAPath returns "" if the kernel has no
// IPv6, or if the host may need the advertisements of a router on the LAN: on an uplink and on a bridge that Tombolo
// did not make.
func (n *site) acceptRAPath() string {
	path := sysctl.Link("ipv6", n.gatewayLink.Name, "accept_ra")
	isOurs := n.bridge.Alias == endpoint.BridgeAlias || n.gatewayLink.Index != n.bridge.Index
	if n.rec.Uplink != "" || !isOurs || !sysctl.Exists(path) {
		return ""
	}
	return path
}

// addLinkLocal turns on IPv6 on the gateways' link, and adds the host's link-local address. As a router, the host sends
// its neighbour solicitations for pods from that address (RFC 4861, section 7.2.2). An address that the kernel adds
// itself is usable only after duplicate address detection. To a bridge that was created without IPv6, the kernel adds
// none.
func (n *site) addLinkLocal(ctx context.Context) error {
	if _, err := sysctl.Ensure(sysctl.Link("ipv6", n.gatewayLink.Name, "disable_ipv6"), "0"); err != nil {
		return err
	}
	own := addr.Address{Prefix: netip.PrefixFrom(addr.LinkLocal(n.gatewayLink.MAC), 64), Link: n.gatewayLink.Index,
		Flags: unix.IFA_F_NODAD}
	_, err := n.s.Links.Addresses().Ensure(ctx, own)
	return err
}

// gatewaysInUse reports whether every gateway in the network's record is still needed. A gateway is needed if this ADD
// requests it, or if the attachment that GatewayUses names for it still exists. gatewaysInUse does not look for other
// attachments that need the gateway.
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

// buildGateways adds the gateways' addresses to the link, repairs the routes to their subnets, and deletes gateways
// that are no longer needed (staleGateways). If another address of the link overlaps with a gateway's, it deletes that
// address if force is set. Without force, it returns an error if the link lacks the gateway. If another machine has the
// address of a gateway that the link lacks, it returns an error too.
func (n *site) buildGateways(ctx context.Context, force bool) error {
	s, rec, l := n.s, n.rec, n.gatewayLink
	have, err := s.Links.Addresses().List(ctx, addr.Filter{Link: l.Index})
	stale, staleErr := staleGateways(s, rec)
	if err := cmp.Or(err, staleErr); err != nil {
		return err
	}

	usable, err := addr.Listen(nil)
	if err != nil {
		return err
	}
	defer usable.Close()
	for _, gw := range rec.Gateways {
		for _, a := range have {
			isStale := slices.Contains(stale, a.Prefix)
			if !overlapsGateway(rec, gw, a.Prefix) || has(have, gw) && !force && !isStale {
				continue // a bridge with the gateway works beside an address that somebody added later
			}
			if !force && !isStale {
				return failf(ErrConflict,
					"bridge %s has the address %s, which overlaps with the gateway %s of network %q: set "+
						"forceAddress to replace it, or choose another bridge",
					l.Name, a.Prefix, gw, rec.Name)
			}
			stale = appendNew(stale, a.Prefix)
		}

		// Skip duplicate address detection, unless refuseAnswered asks for it below.
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

// staleGateways returns the gateways that the network's previous record lists for the same link, and that neither the
// new record nor another network on the link needs.
func staleGateways(s *session, rec *state.Network) ([]netip.Prefix, error) {
	before, err := s.Dir.LoadNetwork(rec.Name)
	if err != nil || before.GatewayLink() != rec.GatewayLink() {
		return nil, nil // without a readable record, no gateway is known to be ours
	}

	used := slices.Clone(rec.Gateways)
	others, err := s.otherNetworks(rec.Name)
	for _, o := range others {
		if o.GatewayLink() == rec.GatewayLink() {
			used = append(used, o.Gateways...)
		}
	}

	return slices.DeleteFunc(before.Gateways, func(gw netip.Prefix) bool { return slices.Contains(used, gw) }), err
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

// refuseConflicts returns an error if the network would cut pods off. These are its own pods if its bridge or mode has
// changed, or pods of other networks whose subnets overlap. For a network with a gateway, it also returns an error if a
// new subnet overlaps with one that the host has on another link. It permits most parts of a wider subnet of the host:
// see refuseConnected. deserted lists the overlapping networks without pods and without a used bridge (isDeserted). The
// caller removes them before it builds. refuseConflicts lists records and addresses, so an Add calls it only when it
// builds.
func refuseConflicts(ctx context.Context, s *session, w *requirement) (deserted []*state.Network, err error) {
	before, err := s.Dir.LoadNetwork(w.Record.Name)
	if err != nil || before.Epoch != s.Epoch.Token() {
		before = nil // none, or damaged: the network's settings are unknown
	} else if err := refuseStranding(ctx, s, w, before); err != nil {
		return nil, err
	}
	return refuseOverlaps(ctx, s, w, before)
}

// refuseStranding returns an error if the network's pods would lose their bridge or gateway, because the new
// configuration changes the network's bridge or mode.
func refuseStranding(ctx context.Context, s *session, w *requirement, before *state.Network) error {
	was, is := mode(before.DefaultRoute, len(before.Gateways) > 0), mode(w.Record.DefaultRoute, w.Gateway)

	// Permit a change from mode l2 to mode gateway, since it takes nothing from the pods.
	stays := before.GatewayLink() == w.Record.GatewayLink()
	if stays && (was == is || was == "l2" && is == "gateway") {
		return nil
	}

	attachments, err := s.attachments(w.Record.Name)
	pods := slices.DeleteFunc(attachments,
		func(a *state.Attachment) bool { return a.Hash() == w.Owner || a.State != state.Ready })
	if len(pods) == 0 || err != nil {
		return err
	}

	how := fmt.Sprintf("in mode %q, and its configuration now is of mode %q, in which they lose their gateway", was, is)
	if !stays {
		how = fmt.Sprintf("on bridge %s, and its configuration now names bridge %s, which does not reach them",
			before.GatewayLink(), w.Record.GatewayLink())
		if l, err := s.Links.Link(ctx, w.Record.Bridge); err == nil && l.Kind != "bridge" {
			return failf(bridge.ErrNotBridge, "network %q has pods %s: %s is no bridge", w.Record.Name, how, l.Name)
		}
	}

	return failf(ErrConflict,
		"network %q has %s %s: set it back, delete the pods first (tombolo gc reclaims those that died), or give the "+
			"new configuration a name of its own",
		w.Record.Name, printable.Count(len(pods), "pod", "pods"), how)
}

// mode returns the configuration's name for a network's mode: "lan", "gateway" or "l2".
func mode(defaultRoute string, gateway bool) string {
	switch {
	case defaultRoute != "":
		return "lan"
	case gateway:
		return "gateway"
	}
	return "l2"
}

// refuseOverlaps returns an error if a subnet of another network or of the host overlaps with the network's. It applies
// to networks with a gateway, because the host routes to their subnets. Networks whose gateways are on one link may
// overlap. It skips subnets that are on record for the network. Without this, the network's ADDs would fail if another
// network took such a subnet later. deserted is as in refuseConflicts.
func refuseOverlaps(ctx context.Context, s *session, w *requirement,
	before *state.Network) (deserted []*state.Network, err error) {
	if !w.Gateway {
		return nil, nil
	}

	fresh := slices.DeleteFunc(slices.Clone(w.Record.Subnets), func(p netip.Prefix) bool {
		return p.IsSingleIP() || before != nil && slices.Contains(before.Subnets, p)
	})
	if len(fresh) == 0 {
		return nil, nil
	}

	others, err := s.otherNetworks(w.Record.Name)
	if err != nil {
		return nil, err
	}

	for _, o := range others {
		if o.GatewayLink() == w.Record.GatewayLink() || o.Epoch != s.Epoch.Token() || len(o.Gateways) == 0 {
			continue
		}

		for _, theirs := range o.Subnets {
			if i := slices.IndexFunc(fresh, theirs.Overlaps); i >= 0 {
				if is, err := s.isDeserted(ctx, o); err != nil {
					return nil, err
				} else if is {
					deserted = append(deserted, o)
					break
				}
				return nil,
					failf(ErrConflict,
						"network %q on bridge %s: its subnet %s overlaps with %s of network %q on bridge %s: give it "+
							"another subnet, or take the other network down (tombolo remove %s)",
						w.Record.Name, w.Record.GatewayLink(), fresh[i], theirs, o.Name, o.GatewayLink(), o.Name)
			}
		}
	}

	return deserted, refuseConnected(ctx, s, w, fresh, convertAll(deserted, (*state.Network).GatewayLink))
}

// refuseConnected returns an error if a subnet in fresh overlaps with the subnet of an address that the host has on
// another link. It accepts a part of a wider network, unless the host's address or a gateway of the host is in that
// part. It ignores the links in going, which are about to be deleted.
func refuseConnected(ctx context.Context, s *session, w *requirement, fresh []netip.Prefix, going []string) error {
	own, err := s.link(ctx, w.Record.GatewayLink())
	addresses, listErr := s.Links.Addresses().List(ctx, addr.Filter{})
	if err := cmp.Or(err, listErr); err != nil {
		return err
	}

	for _, a := range addresses {
		i := slices.IndexFunc(fresh, a.Prefix.Overlaps)
		if i < 0 || a.Prefix.IsSingleIP() || a.Prefix.Addr().IsLinkLocalUnicast() {
			continue
		}

		ours := fresh[i]

		// If our subnet is a part of a wider network, our route is more specific, so the host reaches the pods. The
		// host also reaches the wider network's other machines, such as its router, unless they are in our subnet.
		if ours.Bits() > a.Prefix.Bits() && !ours.Contains(a.Prefix.Addr()) {
			if router, err := routerIn(ctx, s.Links, ours); err != nil {
				return err
			} else if !router {
				continue
			}
		}

		l, err := s.Links.LinkByIndex(ctx, a.Link)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the link was deleted since
		}

		if err != nil {
			return err
		}

		if own.Index != 0 && (l.Index == own.Index || l.Master == own.Index) || slices.Contains(going, l.Name) {
			continue
		}

		return failf(ErrConflict,
			"network %q on bridge %s: its subnet %s overlaps with %s, which the host has on link %s: give the "+
				"network another subnet, or that link another address",
			w.Record.Name, w.Record.GatewayLink(), ours, a.Prefix, l.Name)
	}

	return nil
}

// refuseAnswered returns an error if another machine behind the bridge has the gateway's address. It sends probes
// only if the bridge has a forwarding port that is not a pod's. For IPv4 it sends ARP probes (RFC 5227). For IPv6 it
// leaves the probes to the kernel: the result flags is 0, so that the kernel detects duplicates. In all other cases
// flags is IFA_F_NODAD, so that the gateway's address is usable at once.
func (n *site) refuseAnswered(ctx context.Context, gw netip.Prefix) (flags uint32, _ error) {
	ports, err := n.s.Links.Ports(ctx, n.bridge.Index)
	isForeign := func(l bridge.Link) bool {
		_, ours := endpoint.ParseAlias(l.Alias)
		return !ours && l.Forwarding
	}
	if err != nil || !slices.ContainsFunc(ports, isForeign) {
		return unix.IFA_F_NODAD, err
	}

	if isIPv6(gw) {
		return 0, nil
	}

	const tries, wait = 3, 300 * time.Millisecond
	for range tries {
		owners, err := lease.WhoHas(ctx, n.gatewayLink.Index, n.gatewayLink.MAC, gw.Addr(), wait)
		if err != nil {
			return 0, err
		}
		if len(owners) > 0 {
			return 0, n.errAnswered(gw, owners[0].String())
		}
	}

	return unix.IFA_F_NODAD, nil
}

func (n *site) errAnswered(gw netip.Prefix, answerer string) error {
	return failf(ErrConflict, "bridge %s: another machine answers for the gateway %s of network %q (%s), by a "+
		"port that is not a pod's: name another gateway, or take that port off the bridge "+
		"(`bridge link show master %[1]s` lists the ports)", n.bridge.Name, gw.Addr(), n.rec.Name, answerer)
}

// routerIn reports whether a route of the host leads to a gateway in the subnet.
func routerIn(ctx context.Context, links *bridge.Conn, subnet netip.Prefix) (bool, error) {
	routes, err := links.Routes().List(ctx, route.Filter{Family: nl.FamilyOf(subnet.Addr())})
	return slices.ContainsFunc(routes, func(r route.Route) bool {
		return subnet.Contains(r.Gateway) ||
			slices.ContainsFunc(r.Nexthops, func(h route.Nexthop) bool { return subnet.Contains(h.Gateway) })
	}), err
}
