package network

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/route"
)

// surroundings holds what an Inspect reads once about the host: its addresses, the rules of policy routing, and the
// records of all networks.
type surroundings struct {
	addresses []addr.Address
	rules     []routing.Rule
	networks  []*state.Network
}

func (h *surroundings) read(ctx context.Context, s *session) (err error) {
	if h.networks, _, err = s.Dir.ListNetworks(); err != nil {
		return fail.State(err)
	}
	if h.addresses, err = s.Links.Addresses().List(ctx, addr.Filter{}); err != nil {
		return err
	}
	h.rules, err = routing.Rules(nl.Of(s.Links.Socket()))
	return err
}

// surroundings adds to an inspection what the host's owner or other programs have set up, and what keeps the pods of a
// network from working for certain. It is no matter of CHECK, as with obstacles.
func (in *Inspection) surroundings(ctx context.Context, s *session, host *surroundings, rec *state.Network, attachments []*state.Attachment, found *findings) error {
	if unused, err := s.Unused(rec, attachments); unused || err != nil {
		return err
	}
	br, err := s.link(ctx, rec.Bridge)
	if err != nil {
		return err
	}
	if br.Bridge != nil && br.Bridge.PortDelay > 0 {
		found.Advise(tombolo.RemedyConfigure, "%s", endpoint.SlowPorts(rec.Bridge, br.Bridge.PortDelay))
	}
	at, err := s.link(ctx, rec.GatewayLink())
	if err != nil || at.Index == 0 || !at.Up || rec.Uplink != "" || len(rec.Gateways) == 0 {
		return err
	}

	if err := in.strangeAddresses(ctx, s, host, at, found); err != nil {
		return err
	}
	if slices.ContainsFunc(rec.Gateways, isIPv6) {
		if err := in.deafLinks(ctx, s, host); err != nil {
			return err
		}
	}
	var list []netip.Addr
	for _, a := range attachments {
		list = append(list, endpoint.Addresses(a)...)
	}
	for _, gw := range rec.Gateways {
		pods := slices.DeleteFunc(slices.Clone(list), func(a netip.Addr) bool { return !gw.Contains(a) })
		if len(pods) == 0 || !has(host.addresses, gw) {
			continue
		}
		if err := host.misrouted(ctx, s.Links.Routes(), at, gw, pods, found); err != nil {
			return err
		}
	}
	return nil
}

// strangeAddresses finds addresses of the gateways' link that no network has on record. Such an address leads its
// subnet to the bridge. It is a difference if the host has another route there, such as one to another node's pods.
// Addresses with a lifetime belong to a program that is at work.
func (in *Inspection) strangeAddresses(ctx context.Context, s *session, host *surroundings, at *bridge.Link, found *findings) error {
	for _, a := range host.addresses {
		known := slices.ContainsFunc(host.networks, func(o *state.Network) bool {
			return o.GatewayLink() == at.Name && slices.ContainsFunc(o.Gateways, a.Prefix.Overlaps)
		})
		if a.Link != at.Index || known || a.Prefix.Addr().IsLinkLocalUnicast() || a.Flags&unix.IFA_F_PERMANENT == 0 {
			continue
		}
		subnet, other := a.Prefix.Masked(), ""
		err := s.Links.Routes().Walk(ctx, route.Filter{Family: nl.FamilyOf(subnet.Addr()), Table: unix.RT_TABLE_MAIN}, func(r route.Route) {
			if r.Link != at.Index && r.Dst.Bits() > 0 && r.Dst.Overlaps(subnet) {
				other = r.String()
			}
		})
		if err != nil {
			return err
		}
		text := fmt.Sprintf("bridge %s has the address %s, which no network has on record and which leads %s to the bridge", at.Name, a.Prefix, subnet)
		remedy := fmt.Sprintf("ip address del %s dev %s", a.Prefix, at.Name)
		general, _ := s.Links.Routes().Get(ctx, routing.Outside(subnet.Addr()))
		switch {
		case other != "":
			found.Advise(tombolo.RemedyConfigure, "%s, in place of the route %s; unless the address is meant, this helps: %s", text, other, remedy)
		case general.Link != at.Index: // a host whose own way out is this bridge has its own address there
			in.Others = append(in.Others, text+"; unless the address is meant, this helps: "+remedy)
		}
	}
	return nil
}

// deafLinks notes links that ignore router advertisements because the host forwards IPv6, if the host has no default
// route of IPv6.
func (in *Inspection) deafLinks(ctx context.Context, s *session, host *surroundings) error {
	if _, err := s.Links.Routes().Get(ctx, routing.Outside(netip.IPv6Unspecified())); !route.NoRoute(err) {
		return err
	}
	for _, a := range host.addresses {
		if !isIPv6(a.Prefix) || !a.Prefix.Addr().IsLinkLocalUnicast() {
			continue
		}
		l, err := s.Links.LinkByIndex(ctx, a.Link)
		if err != nil || l.AcceptRA != 1 || l.Master != 0 || strings.HasPrefix(l.Alias, endpoint.AliasPrefix) {
			continue // or it is gone
		}
		if forwards, err := sysctl.Read(sysctl.Link("ipv6", l.Name, "forwarding")); err == nil && forwards != "0" {
			in.Others = append(in.Others, fmt.Sprintf("link %s ignores router advertisements, because the host forwards IPv6 (net.ipv6.conf.%s.accept_ra is 1), and the host has no default route of IPv6; "+
				"if a router is there, then with its next advertisement this helps: sysctl -w net/ipv6/conf/%s/accept_ra=2", l.Name, l.Name, l.Name))
		}
	}
	return nil
}

// misrouted asks the kernel for the way of packets from the host's addresses to pods of one gateway's subnet, and from
// these pods to elsewhere, as far as a rule of policy routing has a part in it. wayPart finds what leads packets from
// any address away from the bridge.
func (h *surroundings) misrouted(ctx context.Context, routes *route.Conn, at *bridge.Link, gw netip.Prefix, pods []netip.Addr, found *findings) error {
	for _, a := range h.addresses {
		own, pod := a.Prefix.Addr(), pods[0]
		_, ruled := routing.Foreign(h.rules, own, pod, "lo", 0)
		if !ruled || own.Is4() != pod.Is4() || own.IsLoopback() || own.IsLinkLocalUnicast() {
			continue
		}
		general, _ := routes.Get(ctx, pod)
		r, err := routes.GetFrom(ctx, own, pod, 0)
		way, table := r.String(), r.Table
		switch {
		case err != nil && !route.NoRoute(err):
			return err
		case err != nil:
			way, table = err.Error(), 0
		case r.Link == at.Index:
			continue
		}
		if rule, ok := routing.Foreign(h.rules, own, pod, "lo", table); ok && general.Link == at.Index {
			found.Advise(tombolo.RemedyConfigure, "what the host sends from %s to pods does not go by %s, because of the rule %s (%s); this helps: %s",
				own, at.Name, rule, way, rule.Ahead("to "+gw.Masked().String()))
		}
	}
	for _, pod := range pods {
		outside := routing.Outside(pod)
		rule, ruled := routing.Foreign(h.rules, pod, outside, at.Name, 0)
		if _, err := routes.Get(ctx, outside); !ruled || err != nil {
			continue // the host itself has no way out
		}
		if _, err := routes.GetFrom(ctx, pod, outside, at.Index); route.NoRoute(err) {
			found.Advise(tombolo.RemedyConfigure, "the host does not send on what the pod %s sends to elsewhere, because of the rule %s (%v); unless it is meant for pods, this helps: %s",
				pod, rule, err, rule.Ahead("iif "+at.Name))
			break
		}
	}
	return nil
}
