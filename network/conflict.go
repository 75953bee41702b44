package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/route"
)

// refuseConflicts returns an error if the network would cut pods off. This concerns its own pods, if its bridge or
// mode has changed, and pods of other networks with the same addresses. It also returns the deserted networks with
// the same addresses, which the caller removes before it builds. token is the token of the epoch. refuseConflicts
// lists records and addresses, so an Add calls it only when it builds.
func refuseConflicts(ctx context.Context, s *session, w *requirement, token string) (deserted []string, err error) {
	before, err := s.Dir.LoadNetwork(w.Record.Name)
	if err != nil || before.Epoch != token {
		before = nil // none, or damaged: the network's settings are unknown
	}
	if before != nil {
		if err := refuseStranding(ctx, s, w, before); err != nil {
			return nil, err
		}
	}
	return refuseOverlaps(ctx, s, w, before, token)
}

// refuseStranding returns an error if the new configuration would take the bridge or the gateway from the network's
// present pods.
func refuseStranding(ctx context.Context, s *session, w *requirement, before *state.Network) error {
	was, is := mode(before.DefaultRoute, len(before.Gateways) > 0), mode(w.Record.DefaultRoute, w.Gateway)

	// Permit a change from mode l2 to mode gateway, since it takes nothing from the pods.
	stays := before.GatewayLink() == w.Record.GatewayLink()
	if stays && (was == is || was == "l2" && is == "gateway") {
		return nil
	}

	attachments, err := s.attachments(w.Record.Name)
	if err != nil {
		return err
	}

	pods := slices.DeleteFunc(attachments,
		func(a *state.Attachment) bool { return a.Hash() == w.Owner || a.State != state.Ready })
	if len(pods) == 0 {
		return nil
	}

	how := fmt.Sprintf("in mode %q, and its configuration now is of mode %q, in which they lose their gateway", was, is)
	if !stays {
		how = fmt.Sprintf("on bridge %s, and its configuration now names bridge %s, from which they are not reached",
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

// mode returns the configuration's name for a network's mode.
func mode(defaultRoute string, gateway bool) string {
	switch {
	case defaultRoute != "":
		return "lan"
	case gateway:
		return "gateway"
	}
	return "l2"
}

// refuseOverlaps returns an error if another network or the host has one of the network's subnets already. It applies
// to networks with a gateway, because the host routes to their subnets. It skips subnets that are on record for the
// network. Otherwise the network's ADDs would fail if another network took such a subnet later.
func refuseOverlaps(
	ctx context.Context, s *session, w *requirement, before *state.Network, token string,
) (deserted []string, err error) {
	if !w.Gateway {
		return nil, nil
	}

	var fresh []netip.Prefix
	for _, p := range w.Record.Subnets {
		if !p.IsSingleIP() && (before == nil || !slices.Contains(before.Subnets, p)) {
			fresh = append(fresh, p)
		}
	}

	if len(fresh) == 0 {
		return nil, nil
	}

	others, err := s.otherNetworks(w.Record.Name)
	if err != nil {
		return nil, err
	}

	var bridges []string // bridges of deserted networks

	for _, o := range others {
		if o.GatewayLink() == w.Record.GatewayLink() || o.Epoch != token || len(o.Gateways) == 0 {
			continue
		}

		for _, theirs := range o.Subnets {
			if i := slices.IndexFunc(fresh, theirs.Overlaps); i >= 0 {
				if is, err := s.isDeserted(ctx, o); err != nil {
					return nil, err
				} else if is {
					deserted, bridges = append(deserted, o.Name), append(bridges, o.GatewayLink())
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

	return deserted, refuseConnected(ctx, s, w, fresh, bridges)
}

// refuseConnected returns an error if a fresh subnet overlaps with the subnet of an address that the host has on
// another link. It ignores the links in going, which are about to be deleted.
func refuseConnected(ctx context.Context, s *session, w *requirement, fresh []netip.Prefix, going []string) error {
	own, err := s.link(ctx, w.Record.GatewayLink())
	if err != nil {
		return err
	}

	addresses, err := s.Links.Addresses().List(ctx, addr.Filter{})
	if err != nil {
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
			router, err := routerIn(ctx, s.Links, ours)
			if err != nil {
				return err
			}
			if !router {
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

// refuseAnswered returns an error if another machine behind the bridge has the gateway's address. It asks only if a
// port that belongs to none of our pods forwards. For IPv4 it sends ARP probes (RFC 5227). For IPv6 it leaves the
// question to the kernel: the result flags is 0, so that the kernel detects duplicates. In all other cases flags is
// IFA_F_NODAD, so that the gateway's address is usable at once.
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
