package network

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// hostRoutePart implements podPart for the host's route to a pod. It repairs nothing. If the host has a route to the
// pod's subnet and still sends packets for the pod elsewhere, another program's rule or route is the cause.
// hostRoutePart leaves these to their owner.
type hostRoutePart struct{}

func (hostRoutePart) mend(context.Context, *podSite) error { return nil }

// look adds a finding if the host's route to an address of the pod does not lead to the link that has the gateways. It
// skips a link in a VRF, where the host's own routing rules do not apply.
func (hostRoutePart) look(ctx context.Context, p *podSite) error {
	at, err := p.s.link(ctx, p.nw.GatewayLink())
	if err != nil || at.Index == 0 || at.Master != 0 {
		return err
	}

	for _, address := range p.Addresses {
		gw := netip.PrefixFrom(address.Gateway, address.Prefix.Bits())
		if !slices.Contains(p.nw.Gateways, gw) || gw.Masked() != address.Prefix.Masked() || gw == address.Prefix {
			continue // such a pod is not reached through our gateway
		}
		if err := p.lookAtWay(ctx, at, address.Prefix); err != nil {
			return err
		}
	}

	return nil
}

func (p *podSite) lookAtWay(ctx context.Context, at *bridge.Link, own netip.Prefix) error {
	switch r, err := p.s.Links.Routes().Get(ctx, own.Addr()); {
	case err == nil && r.Link == at.Index:
		return nil
	case err != nil && !route.NoRoute(err):
		return err
	}

	if wrong, err := checkSubnet(ctx, p.s.Links.Routes(), own, at.Index); wrong != "" || err != nil {
		return err // the network's own parts report this
	}

	p.found.advise(tombolo.RemedyConfigure,
		"the host does not send packets for %s to %s: see ip route get %s, and ip rule",
		own.Addr(), at.Name, own.Addr())
	return nil
}

// recordedRoutes returns the routes of a pod's interface that its record should contain. It leaves out an IPv6 default
// route from the LAN's router, since the pod learns that route by itself.
func recordedRoutes(rec *state.Attachment, routes []route.Route) []route.Route {
	return slices.DeleteFunc(slices.Clone(routes), func(r route.Route) bool {
		return rec.SLAAC && rec.DefaultRoute != exitHost && r.Dst.Bits() <= 0 && r.Gateway.Is6()
	})
}

// lastingRoutes returns the recorded routes of an attachment, after the routes to the subnets of lastingPrefixes. They
// can be added in this order.
func lastingRoutes(rec *state.Attachment) []route.Route {
	return append(subnetRoutes(lastingPrefixes(rec)), rec.Routes...)
}

// subnetRoutes returns the routes to the subnets of a pod's addresses, one for each subnet. It skips addresses with the
// prefix length /32 or /128.
func subnetRoutes(addresses []netip.Prefix) []route.Route {
	var list []route.Route
	for _, a := range addresses {
		has := slices.ContainsFunc(list, func(r route.Route) bool { return r.Dst == a.Masked() })
		if !has && !a.IsSingleIP() {
			list = append(list, subnetRoute(a, 0))
		}
	}
	return list
}

// routesFor returns the requested routes in the form that the pod's kernel gets. It keeps the order, and drops
// duplicates. A route without a gateway gets the first gateway of its family, unless it is an IPv4 route whose scope is
// link or narrower. The gateways 0.0.0.0 and :: mean that there is no gateway. A route whose gateway isReachable
// rejects gets the flag onlink. A route that remains without a gateway has the scope global by default, as in CNI's
// bridge plugin.
func routesFor(addresses []ipam.Address, requested []route.Route) []route.Route {
	var list []route.Route
	for _, r := range requested {
		r.Dst, r.Protocol = r.Dst.Masked(), route.ProtocolTombolo
		if !r.Gateway.IsValid() && (r.Scope == nil || *r.Scope < unix.RT_SCOPE_LINK || r.Dst.Addr().Is6()) {
			r.Gateway = gatewayFor(r.Dst.Addr(), addresses)
		}

		if r.Gateway.IsUnspecified() {
			r.Gateway = netip.Addr{}
		}

		r.OnLink = r.Gateway.IsValid() && !isReachable(r.Gateway, addresses)
		if !r.Gateway.IsValid() {
			r.Scope = cmp.Or(r.Scope, new(uint8(unix.RT_SCOPE_UNIVERSE)))
		}

		if !slices.ContainsFunc(list, func(o route.Route) bool { return o.Dst == r.Dst && o.Matches(r) }) {
			list = append(list, r)
		}
	}

	return list
}

// withDefaults returns the routes. If add is set, it adds a default route for each family that has a gateway but no
// default route. It does not change the caller's list.
func withDefaults(add bool, addresses []ipam.Address, routes []route.Route) []route.Route {
	if !add {
		return routes
	}
	list := append([]route.Route(nil), routes...)
	for _, a := range addresses {
		if a.Gateway.IsValid() && !hasDefault(list, a.Gateway) {
			list = append(list, defaultRouteVia(a.Gateway))
		}
	}
	return list
}

// hasDefault reports whether the routes contain a default route of an address's family.
func hasDefault(routes []route.Route, a netip.Addr) bool {
	return slices.ContainsFunc(routes,
		func(r route.Route) bool { return isDefault(&r) && r.Dst.Addr().Is4() == a.Is4() })
}

func defaultRouteVia(gateway netip.Addr) route.Route {
	everything, _ := gateway.Prefix(0)
	return route.Route{Dst: everything, Gateway: gateway}
}

// gatewayFor returns the first gateway of the destination's family, or the zero Addr.
func gatewayFor(dst netip.Addr, addresses []ipam.Address) netip.Addr {
	for _, a := range addresses {
		if a.Gateway.IsValid() && a.Gateway.Is4() == dst.Is4() {
			return a.Gateway
		}
	}
	return netip.Addr{}
}

// isReachable reports whether a gateway is in one of the addresses' prefixes, or is a link-local IPv6 address. Every
// IPv6 interface has the prefix of link-local addresses.
func isReachable(gateway netip.Addr, addresses []ipam.Address) bool {
	return gateway.Is6() && gateway.IsLinkLocalUnicast() ||
		slices.ContainsFunc(addresses, func(a ipam.Address) bool { return a.Prefix.Contains(gateway) })
}

// metrics holds numbers that Add adds to the metrics of a pod's default routes, one for each family. The key true
// means IPv6. The kernel uses the default route with the smallest metric, so the pod continues to use the default
// route of its first network.
type metrics map[bool]uint32

// apply returns the routes with larger metrics for the default routes. It does not change the caller's list.
func (m metrics) apply(routes []route.Route) []route.Route {
	if len(m) == 0 {
		return routes
	}
	list := slices.Clone(routes)
	for i := range list {
		if isDefault(&list[i]) {
			list[i].Priority += m[list[i].Dst.Addr().Is6()]
		}
	}
	return list
}

// chooseFreeMetrics handles an Attach that failed because another interface of the pod has a default route. It sets
// larger metrics for the default routes in port and in the attachment's record. If the pod has no default route with
// one of their metrics, it returns the error of Attach.
func (a *addCall) chooseFreeMetrics(ctx context.Context, port *bridge.Port, failed error) error {
	found := metrics{}
	for i := range port.Routes {
		if r := &port.Routes[i]; isDefault(r) {
			metric, err := freeMetric(ctx, a.pod.NetNS, nl.FamilyOf(r.Dst.Addr()), r.Priority)
			if err != nil {
				return errors.Join(failed, err)
			}
			if metric != r.Priority {
				found[r.Dst.Addr().Is6()] = metric
			}
		}
	}

	if len(found) == 0 {
		return failed
	}

	a.metrics, port.Routes = found, found.apply(port.Routes)
	a.port.Routes, a.rec.Routes = port.Routes, recordedRoutes(a.rec, port.Routes)
	return nil
}

// isDefault reports whether a route is a default route of the main table.
func isDefault(r *route.Route) bool {
	return r.Dst.Bits() == 0 && (r.Table == 0 || r.Table == unix.RT_TABLE_MAIN)
}

// freeMetric returns the metric for a new default route in a pod's main table. It returns the requested metric,
// unless the pod has a default route of the family with that metric. Then it returns a metric larger than those of
// all the pod's default routes. 0 means the kernel's default.
func freeMetric(ctx context.Context, pod *netns.NS, family uint8, requested uint32) (uint32, error) {
	conn, err := route.Dial(pod)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	const (
		step     = 100
		default6 = 1024 // the kernel's metric for IPv6 (IP6_RT_PRIO_USER)
	)
	metric, isTaken, largest := requested, false, uint32(0)
	if family == unix.AF_INET6 {
		metric = cmp.Or(requested, default6)
	}

	err = conn.Walk(ctx, route.Filter{Family: family, Table: unix.RT_TABLE_MAIN}, func(r route.Route) {
		if r.Dst.Bits() > 0 || r.Priority == math.MaxUint32 {
			return // the kernel's own unreachable route has the last metric
		}
		isTaken = isTaken || r.Priority == metric
		largest = max(largest, r.Priority)
	})
	if err != nil || !isTaken {
		return requested, err
	}

	return largest + step, nil
}

// explainRoute adds advice to an error about a route that the kernel refused. It returns other errors unchanged.
func explainRoute(err error) error {
	switch {
	case !isRoute(err):
		return err
	case errors.Is(err, fs.ErrExist):
		return failf(ErrConflict, "%w: the pod has this route already: change its priority in ipam.routes", err)
	}
	return fmt.Errorf("%w: correct this route in ipam.routes, or leave it out", err)
}

// isRoute reports whether an error comes from adding one of the pod's routes.
func isRoute(err error) bool {
	var op *tombolo.OpError
	return errors.As(err, &op) && op.Op == "add route"
}

// nextHopPart implements part for the next hop of default routes through the host (ExitHost). The next hop is one
// address for each family, which no machine has. A permanent neighbour entry in each pod maps it to the host's MAC. So
// the routes stay valid when the host gets or loses addresses, and no other machine can answer for the next hop. Only
// the host's MAC can change.
type nextHopPart struct{}

// hostNextHop returns the next hop of a family. The IPv6 address is not fe80::1, since real routers have it, but
// contains the letters of "tombolo".
func hostNextHop(is6 bool) netip.Addr {
	if is6 {
		return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: 't', 'o', 'm', 'b', 'o', 'l', 0, 'o'})
	}
	return netip.AddrFrom4([4]byte{169, 254, 1, 1})
}

// usesHostRoute reports whether the pod gets default routes through the host.
func (a *addCall) usesHostRoute() bool { return a.nw.Exit == ExitHost && !a.nw.NoDefaultRoute }

// addHostRoutes adds default routes through the host to a.assigned, if usesHostRoute reports true. It skips a family
// that has a default route already.
func (a *addCall) addHostRoutes() {
	if !a.usesHostRoute() {
		return
	}

	hops := convertAll(a.assigned.addresses, func(own ipam.Address) ipam.Address {
		return ipam.Address{Gateway: hostNextHop(isIPv6(own.Prefix))}
	})
	if a.nw.SLAAC {
		hops = append(hops, ipam.Address{Gateway: hostNextHop(true)})
	}
	a.assigned.routes = withDefaults(true, hops, a.assigned.routes)
}

// neighbours returns the neighbour entries of a pod for the next hops of the families that the pod has. host is the
// host's MAC.
func neighbours(a *state.Attachment, host net.HardwareAddr) (list []bridge.Neighbour) {
	if a.DefaultRoute != exitHost {
		return nil
	}
	for _, is6 := range [...]bool{false, true} {
		has := is6 && a.SLAAC || !is6 && a.IPAMType == endpoint.Leased
		if has || slices.ContainsFunc(a.Addresses, func(o ipam.Address) bool { return isIPv6(o.Prefix) == is6 }) {
			list = append(list, bridge.Neighbour{Addr: hostNextHop(is6), MAC: host})
		}
	}
	return list
}

// hostMAC returns the host's MAC on the LAN: the shared NIC's MAC, or else the bridge's.
func (n *site) hostMAC() net.HardwareAddr {
	if n.uplink.shared {
		return n.uplink.nic.MAC
	}
	return n.bridge.MAC
}

func (nextHopPart) look(_ context.Context, n *site) error {
	mac := n.hostMAC()
	if n.rec.DefaultRoute == exitHost && n.bridge.Index != 0 && !bytes.Equal(mac, n.rec.HostMAC) {
		before := net.HardwareAddr(n.rec.HostMAC)
		n.found.advise(tombolo.RemedyRepair, "pods send to the host's old MAC %s, but it is %s", before, mac)
	}
	return nil
}

// If default routes lead through the host and the host's MAC is not the recorded one, make records the new MAC for
// future pods. It also updates the neighbour entries in the present pods. If another program's bridge has this MAC,
// make makes the bridge's MAC explicit.
func (nextHopPart) make(ctx context.Context, n *site) (changed bool, _ error) {
	mac, before := n.hostMAC(), net.HardwareAddr(n.rec.HostMAC)
	if n.rec.DefaultRoute != exitHost || bytes.Equal(mac, before) {
		return false, nil
	}

	// A bridge without an explicit MAC takes the smallest MAC of its ports, so its MAC would change with the first
	// pod. Make its present MAC explicit.
	if l := n.bridge; l.Alias != endpoint.BridgeAlias && n.share == nil {
		r := link.Request{Index: l.Index, MAC: l.MAC}
		if err := r.Apply(ctx, nl.Of(n.s.Links.Socket()), "keep the MAC of bridge", l.Name); err != nil {
			return false, err
		}
	}

	for _, a := range n.attachments {
		if before == nil {
			break // no pod of the network has such an entry
		}
		if err := n.s.setNextHops(ctx, a, mac, before); err != nil {
			n.s.warn(fmt.Sprintf("cannot give container %s the host's new MAC %s: %v", a.ContainerID, mac, err))
		}
	}

	n.rec.HostMAC = state.MAC(mac)
	return false, nil
}

// setNextHops writes entries for the next hops, with the host's MAC, into the pod's neighbour table. If before is not
// nil, it is the host's previous MAC. Then setNextHops replaces only those permanent entries that still have this MAC,
// since the pod's owner changed all others. If the pod is gone, setNextHops does nothing.
func (s *session) setNextHops(ctx context.Context, a *state.Attachment, host, before net.HardwareAddr) error {
	list := neighbours(a, host)
	if len(list) == 0 {
		return nil
	}

	pod, err := netns.OpenSame(a.NetNS, a.NetNSCookie)
	if err != nil {
		return nil
	}
	defer pod.Close()
	conn, l, err := s.dialPod(ctx, a, pod)
	if err != nil {
		return nl.PassAbsent(err)
	}
	defer conn.Close()

	var entries []routing.NeighbourEntry
	for _, n := range list {
		if before != nil {
			has, err := routing.Find(conn, l.Index, n.Addr)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if has.State != routing.Permanent || !bytes.Equal(has.MAC, before) {
				continue
			}
		}

		entries = append(entries, routing.NeighbourEntry{Addr: n.Addr, MAC: n.MAC, Link: l.Index})
	}

	return routing.Replace(conn, "add neighbour", entries...)
}

// completeNextHops writes the neighbour entries of a pod whose default route leads to the host. The kernel has deleted
// them if another program moved the interface, or gave it another MAC. A new address may need an entry for its family.
func (s *session) completeNextHops(ctx context.Context, a *state.Attachment) error {
	if a.DefaultRoute != exitHost {
		return nil
	}
	rec, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		return stateError(err)
	}
	return s.setNextHops(ctx, a, net.HardwareAddr(rec.HostMAC), nil)
}
