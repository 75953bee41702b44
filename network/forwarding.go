package network

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/localnet"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// forwardingPart implements part for the settings that make the host forward packets from and to pods. The host
// forwards no other packets, unless its owner made it a router. The rules that drop other packets belong to
// firewallPart.
type forwardingPart struct{}

// neededRouting returns the address families that the host must forward for the network. These are the families of
// gateways, of pods with host ports, and of pods with a default route through the host (ExitHost). With n.quick in an
// Add, only the Add's own pod and gateways count. If the host is a gateway, Input is the link with the gateways.
func (n *site) neededRouting() (r bridge.Routing) {
	need := func(a netip.Addr) { r.IPv4, r.IPv6 = r.IPv4 || a.Is4(), r.IPv6 || a.Is6() }
	gateways := n.rec.Gateways
	if n.quick && n.required != nil {
		gateways = n.required.Record.Gateways
	}

	for _, gw := range gateways {
		need(gw.Addr())
	}

	for _, a := range n.pods() {
		for _, address := range a.Addresses {
			if len(a.Published) > 0 {
				need(address.Prefix.Addr())
			}
		}
	}

	if n.gatewayLink.Index != 0 && len(n.rec.Gateways) > 0 {
		r.Input = n.gatewayLink.Name
	}

	if n.rec.DefaultRoute == exitHost {
		r.IPv4, r.IPv6 = true, r.IPv6 || n.rec.SLAAC
	}

	return r
}

// lookAtForwarding sets n.closed to the families that the host forwards only for pods, now or after a repair that meets
// needs. It returns the families that the host forwards now, either for all or only for pods.
func (n *site) lookAtForwarding(ctx context.Context, needs bridge.Routing) (pods bridge.Routing, _ error) {
	pods, router, err := n.s.Links.Forwards(ctx)
	if err != nil {
		return pods, err
	}

	n.closed = []nft.Closed{}
	if (pods.IPv4 || needs.IPv4) && !router.IPv4 {
		n.closed = append(n.closed, nft.Closed{Routers: n.rec.Routers4})
	}

	if (pods.IPv6 || needs.IPv6) && !router.IPv6 {
		n.closed = append(n.closed, nft.Closed{IPv6: true, Routers: n.rec.Routers6})
	}
	return pods, err
}

// routers4 lists the links for which the host's owner turned on IPv4 forwarding, although the host is no router.
// Their parameter is neither 0 nor the value that we write.
func routers4() ([]string, error) { return routers("ipv4", "forwarding", "0", sysctl.OwnForwarding) }

// routers lists the links whose value of the parameter name is none of the values in others. It leaves out "default".
func routers(family, name string, others ...string) ([]string, error) {
	values, err := sysctl.Links(family, name)
	maps.DeleteFunc(values,
		func(link, value string) bool { return link == "default" || slices.Contains(others, value) })
	return slices.Sorted(maps.Keys(values)), err
}

const forceForwarding = "force_forwarding" // an IPv6 parameter of a link; since Linux 6.17

func (forwardingPart) look(ctx context.Context, n *site) error {
	needs := n.neededRouting()
	pods, err := n.lookAtForwarding(ctx, needs)
	if err != nil {
		return err
	}

	if needs.IPv4 && !pods.IPv4 {
		n.found.advise(tombolo.RemedyRepair, "the host does not forward IPv4 (net.ipv4.conf.*.forwarding)")
	}

	if needs.IPv6 && !pods.IPv6 {
		parameter := "*." + forceForwarding
		if !sysctl.Exists(sysctl.Link("ipv6", "lo", forceForwarding)) {
			parameter = "all.forwarding"
		}
		n.found.advise(tombolo.RemedyRepair, "the host does not forward IPv6 (net.ipv6.conf.%s)", parameter)
	}

	// Leave out a family that the host does not forward, since it was reported above.
	needs.IPv4, needs.IPv6 = needs.IPv4 && pods.IPv4, needs.IPv6 && pods.IPv6
	if n.quick {
		return nil
	}

	n.lookAtOthers()
	diffs, err := n.s.Links.CheckRouting(ctx, needs)
	n.found.addAll(diffs, tombolo.RemedyRepair)
	return nl.PassAbsent(err) // another part reports a missing link
}

func (forwardingPart) make(ctx context.Context, n *site) (bool, error) {
	needs := n.neededRouting()
	if err := n.noteRouters(); err != nil {
		return false, err
	}

	if _, err := n.s.Links.EnsureRouting(ctx, needs); err != nil {
		return false, err
	}

	if _, err := n.lookAtForwarding(ctx, needs); err != nil {
		return false, err
	}

	n.rec.Closed4 = slices.ContainsFunc(n.closed, func(c nft.Closed) bool { return !c.IPv6 })
	n.rec.Closed6 = slices.ContainsFunc(n.closed, func(c nft.Closed) bool { return c.IPv6 })
	if n.rec.Routers4 = nil; n.rec.Closed4 {
		links, err := routers4()
		if err != nil {
			return false, err
		}
		n.rec.Routers4, n.closed[0].Routers = links, links // closed[0] is IPv4
	}

	return false, nil
}

// isRouterNow reports whether the host has become a router, although the network's rules still drop all forwarded
// packets except the pods'.
func isRouterNow(rec *state.Network) bool {
	isOn := func(path string) bool { value, err := sysctl.Read(path); return err == nil && value != "0" }
	return rec.Closed4 && isOn("net/ipv4/ip_forward") || rec.Closed6 && isOn("net/ipv6/conf/all/forwarding")
}

// forwardingChanged reports whether the network's rules drop packets that the host's owner now wants forwarded. Either
// isRouterNow is true, or the owner has changed IPv4 forwarding for some links since the rules were made. To find out,
// forwardingChanged may read a parameter of each link.
func forwardingChanged(rec *state.Network) bool {
	if !rec.Closed4 || isRouterNow(rec) {
		return isRouterNow(rec)
	}
	links, err := routers4()
	return err == nil && !slices.Equal(links, rec.Routers4)
}

// lookAtOthers adds a finding if the rules drop packets that the host's owner now wants forwarded (forwardingChanged).
func (n *site) lookAtOthers() {
	if forwardingChanged(n.rec) {
		n.found.advise(tombolo.RemedyRepair,
			"the host's owner changed what it forwards for others (net.ipv4.ip_forward, "+
				"net.ipv6.conf.all.forwarding, or of a link), but the rules of network %s still drop it",
			n.rec.Name)
	}
}

// reopen makes the network's rules again if forwardingChanged is true, so that they no longer drop packets that the
// owner lets the host forward. For this it takes the state directory's exclusive lock.
func reopen(ctx context.Context, s *session, name string) error {
	rec, err := s.Dir.LoadNetwork(name)
	if err != nil || !forwardingChanged(rec) {
		return nil // Check and Inspect report a damaged record
	}

	if err := s.enterAlone(ctx); err != nil {
		return err
	}

	if rec, err = s.Dir.LoadNetwork(name); err != nil || rec.Epoch != s.Epoch.Token() {
		return stateError(err)
	}

	n := &site{s: s, rec: rec}
	if err := n.find(ctx); err != nil {
		return err
	}

	for _, p := range []part{forwardingPart{}, firewallPart{}} {
		if _, err := p.make(ctx, n); err != nil {
			return err
		}
	}

	return stateError(s.Dir.SaveNetwork(rec))
}

// noteRouters records the links for which the host's owner turned on IPv6 forwarding. It must run before we turn on
// forwarding for pods, since the parameter is only 0 or 1 and does not tell who set it. If a network has already turned
// on forwarding, noteRouters copies the list from a network's saved record.
func (n *site) noteRouters() (err error) {
	// If "default" is not 1, no network of ours has turned on force_forwarding yet, so each link's value is its
	// owner's. The kernel never resets "default".
	if later, _ := sysctl.Read(sysctl.Link("ipv6", "default", forceForwarding)); later != "1" {
		n.rec.Routers6, err = routers("ipv6", forceForwarding, "0")
		return err
	}

	records, _, err := n.s.Dir.ListNetworks()
	for _, rec := range records {
		if len(n.rec.Routers6) == 0 && rec.Epoch == n.rec.Epoch {
			n.rec.Routers6 = rec.Routers6
		}
	}
	return stateError(err)
}

// stopForwarding reverts the settings of forwardingPart when the last network is removed. It skips settings that
// somebody has changed since. On kernels before Linux 6.17 the host continues to forward IPv6.
func stopForwarding(rec *state.Network) error {
	err := sysctl.Replace("ipv4", "forwarding", sysctl.OwnForwarding, "0")
	return errors.Join(err, sysctl.Replace("ipv6", forceForwarding, "1", "0", rec.Routers6...))
}

// refuseIPv6 returns an error if the network's pods use IPv6, and the kernel was built without it or booted with
// ipv6.disable=1. Pods use IPv6 by SLAAC, by an address in one of the subnets, or by one of the routes. The kernel's
// own errors would come late and be terse. An Add passes subnets only when it builds the network. This suffices,
// since on such a kernel a network with IPv6 is never complete.
func refuseIPv6(network string, slaac bool, subnets []netip.Prefix, routes ...route.Route) error {
	request := ""
	if i := slices.IndexFunc(routes, func(r route.Route) bool { return isIPv6(r.Dst) }); i >= 0 {
		request = fmt.Sprintf("a route to %s", routes[i].Dst)
	}

	if i := slices.IndexFunc(subnets, isIPv6); i >= 0 {
		request = fmt.Sprintf("an address in %s", subnets[i])
	}

	if slaac {
		request = `ipv6 "slaac"`
	}

	if request == "" || sysctl.HasIPv6() {
		return nil
	}

	return failf(tombolo.ErrInvalid, "network %q asks for %s, and IPv6 is switched off in this kernel: "+
		"take it out of the configuration, or boot without ipv6.disable=1 on the kernel's command line "+
		"(and with a kernel that has IPv6)", network, request)
}

const (
	routeLocalnet = "route_localnet"
	openIfFlushed = "should nf_tables be flushed, the host's 127.0.0.1 would be open to what is behind "
)

// loopbackPart implements part for the settings that make pods' host ports reachable from the host at 127.0.0.1.
//
// The bridge needs route_localnet for this. With route_localnet the kernel routes packets between 127.0.0.1 and a
// link, which it otherwise drops as forged. A firewall rule then protects the host's services at 127.0.0.1 from
// everything behind the bridge. In case all rules are flushed, a filter at the bridge's ingress protects them too,
// unless the record has LoopbackUnfiltered set. The setting and the filter exist as long as a pod behind the bridge
// has such ports.
//
// In a VLAN, the host's link in the VLAN gets both the setting and the filter, and so does the bridge. The bridge
// needs both if bridged packets go through the firewall (br_netfilter). Then the destination of an answer becomes
// 127.0.0.1 again on the bridge, and the kernel routes the answer from there.
type loopbackPart struct{}

func (loopbackPart) look(ctx context.Context, n *site) error {
	switch {
	case n.bridge.Index == 0 || n.gatewayLink.Index == 0 || !n.usesLoopback():
		return nil
	case !n.quick && (!n.gatewayLink.RouteLocalnet || !n.bridge.RouteLocalnet):
		n.found.advise(tombolo.RemedyRepair,
			"bridge %s: route_localnet is off, so that 127.0.0.1 does not lead to the pods' ports", n.gatewayLink.Name)
		return nil
	}

	missing := false
	err := n.eachLink(func(l *bridge.Link) error {
		open, err := n.isOpen(ctx, l)
		missing = missing || !open
		return err
	})
	if n.quick {
		n.needsCompletion = n.needsCompletion || missing // the network may lack nothing else, so do not build it anew
	} else if missing && err == nil {
		n.found.advise(tombolo.RemedyRepair,
			"bridge %s: the filter is missing at its ingress that keeps others from the host's 127.0.0.1 should "+
				"nf_tables be flushed", n.gatewayLink.Name)
	}

	return err
}

// usesLoopback reports whether a pod has host ports that should be reachable at 127.0.0.1. Ports on a shared NIC are
// not, because the NIC would need route_localnet, and the NIC is the host's.
func (n *site) usesLoopback() bool {
	if n.share != nil {
		return false
	}
	return slices.ContainsFunc(n.pods(), func(a *state.Attachment) bool {
		return endpoint.PublishesIPv4(a) && a.GatewayLink() == n.rec.GatewayLink()
	})
}

// eachLink calls do for n.gatewayLink, which in a VLAN is the host's link there, and for the bridge. If both are one
// link, it calls do once.
func (n *site) eachLink(do func(*bridge.Link) error) error {
	err := do(n.gatewayLink)
	if err == nil && n.bridge.Index != n.gatewayLink.Index {
		err = do(n.bridge)
	}
	return err
}

// isOpen reports whether 127.0.0.1 leads through the link to pods: the link has route_localnet, and the filter that
// protects the host's services (see loopbackPart). If the record has LoopbackUnfiltered set, route_localnet suffices.
func (n *site) isOpen(ctx context.Context, l *bridge.Link) (bool, error) {
	if !l.RouteLocalnet || n.rec.LoopbackUnfiltered {
		return l.RouteLocalnet, nil
	}
	filter, err := localnet.On(n.s.Links.Socket()).Get(ctx, loopbackFilter(l, n.rec.Mark))
	return err == nil && filter.Exists, err
}

func loopbackFilter(l *bridge.Link, mark uint32) localnet.Filter {
	return localnet.Filter{Bridge: l.Name, Index: l.Index, Mark: mark, Stays: l.Alias == endpoint.BridgeAlias}
}

// placeLoopback adds the clsact qdisc for the filter to a new bridge or VLAN link, since adding it later would lose
// packets to pods. It ignores errors, because when the first host port is published, loopbackPart.make tries again or
// logs a warning.
func (s *session) placeLoopback(ctx context.Context, l *bridge.Link) {
	_ = localnet.On(s.Links.Socket()).Place(ctx, loopbackFilter(l, 0))
}

// make turns on route_localnet and adds the filter, if a pod needs them. It must run after firewallPart, whose rules
// protect the host. If make leaves the filter out, it records this, so that later calls do not look for the filter.
func (loopbackPart) make(ctx context.Context, n *site) (bool, error) {
	if !n.usesLoopback() {
		return false, nil
	}
	return false, n.eachLink(func(l *bridge.Link) error { return n.open(ctx, l) })
}

func (n *site) open(ctx context.Context, l *bridge.Link) error {
	path := sysctl.Link("ipv4", l.Name, routeLocalnet)
	value, err := sysctl.Read(path)
	if err != nil {
		return err
	}

	conn := localnet.On(n.s.Links.Socket())
	keep := loopbackFilter(l, n.rec.Mark)
	filter, err := conn.Get(ctx, keep)
	if err != nil {
		return err
	}

	// Note whether we turn route_localnet on. An operator's own setting must stay when the last port is removed.
	routed := value == "0" || filter.Routed
	if !routed && !filter.Any() {
		if routed, err = n.s.publishedBehind(l.Name); err != nil {
			return err
		}
	}

	// The bridge has no clsact yet, and adding one would lose packets that the host sends through an uplink's bridge.
	// So turn on route_localnet without the filter, and warn the operator.
	if n.rec.Uplink != "" && !filter.HasPlace() {
		n.rec.LoopbackUnfiltered = true
		n.s.warn(openIfFlushed + l.Name +
			": the filter against that is left out, since adding it would lose packets of the host")
		_, err := sysctl.Ensure(path, "1")
		return err
	}

	// Add the filter before route_localnet is on, so that there is no moment without the filter.
	_, err = conn.Ensure(ctx, keep, filter, routed)
	n.rec.LoopbackUnfiltered = localnet.IsUnsupported(err)
	if n.rec.LoopbackUnfiltered {
		n.s.warn(openIfFlushed + l.Name + ": " + err.Error())
	} else if err != nil {
		return err
	}

	if value == "1" {
		return nil
	}

	return sysctl.Write(path, "1")
}

// publishedBehind reports whether a recorded pod behind a bridge or a host's VLAN link has host ports for IPv4. It
// ignores pods whose Add is not complete, since such an Add turns on route_localnet itself, under the state directory's
// exclusive lock.
func (s *session) publishedBehind(bridgeName string) (bool, error) {
	attachments, err := s.allAttachments()
	return slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
		return a.State == state.Ready && (a.Bridge == bridgeName || a.GatewayLink() == bridgeName) &&
			endpoint.PublishesIPv4(a)
	}), err
}

// shutLoopback turns off route_localnet and removes the filter of a bridge, without checking whether pods need them.
// The filter records who turned route_localnet on. If this was an operator, route_localnet stays on. Without a filter,
// shutLoopback turns route_localnet off only if the bridge is ours and known is true: a pod behind the bridge had host
// ports.
func shutLoopback(ctx context.Context, s *session, bridgeName string, known bool) error {
	l, err := s.link(ctx, bridgeName)
	if err != nil || l.Index == 0 {
		return err
	}

	conn := localnet.On(s.Links.Socket())
	keep := loopbackFilter(l, 0)
	filter, err := conn.Get(ctx, keep)
	if err != nil {
		return nl.PassAbsent(err)
	}

	if filter.Routed || !filter.Any() && known && l.Alias == endpoint.BridgeAlias {
		_, err := sysctl.Ensure(sysctl.Link("ipv4", bridgeName, routeLocalnet), "0")
		if nl.PassAbsent(err) != nil {
			return err
		}
	}

	return conn.Remove(ctx, keep, filter)
}

// closeLoopbackAfter calls closeUnusedLoopback for the links of removed attachments. An attachment without a record,
// or whose Add was not complete, may have had host ports. An entry in removed is nil for an attachment without a
// record. The parameter unknown then has its links.
func closeLoopbackAfter(ctx context.Context, s *session, unknown Known, removed ...*state.Attachment) error {
	var published, unknownLinks []string
	for _, rec := range removed {
		switch {
		case rec == nil || rec.Bridge == "":
			unknownLinks = append(unknownLinks, unknown.Bridge, unknown.GatewayLink)
		case rec.State != state.Ready:
			unknownLinks = append(unknownLinks, rec.Bridge, rec.GatewayLink())
		case endpoint.PublishesIPv4(rec):
			published = append(published, rec.Bridge, rec.GatewayLink())
		}
	}

	return errors.Join(closeUnusedLoopback(ctx, s, true, published...),
		closeUnusedLoopback(ctx, s, false, unknownLinks...))
}

// closeUnusedLoopback calls shutLoopback for each link that has route_localnet, unless a pod still needs the setting.
// known means that a pod behind the links had host ports. If the firewall has elements for other pods' ports behind a
// link, one listing suffices. If it has none, closeUnusedLoopback takes the state directory's exclusive lock.
func closeUnusedLoopback(ctx context.Context, s *session, known bool, links ...string) error {
	slices.Sort(links)
	var errs []error
	for _, name := range slices.Compact(links) {
		if name != "" {
			errs = append(errs, closeLoopback(ctx, s, known, name))
		}
	}
	return errors.Join(errs...)
}

func closeLoopback(ctx context.Context, s *session, known bool, name string) error {
	if err := s.enter(ctx); err != nil {
		return err
	}

	needed := func() (bool, error) {
		l, err := s.link(ctx, name)
		if err != nil || !l.RouteLocalnet {
			return err == nil, err
		}
		return s.Firewall.HasPorts(ctx, name)
	}

	return s.lock.Ensure(ctx, needed, func() error {
		// The elements of other pods' ports may have been flushed, so look at the records too.
		if used, err := s.publishedBehind(name); used || err != nil {
			return err
		}
		return shutLoopback(ctx, s, name, known)
	})
}
