package cni

import (
	"math"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/route"
)

// readAddresses takes the addresses out of an IPAM's result, IPv4 first:
// runtimes take the first of a result for the pod's.
func readAddresses(res *current.Result) ([]state.Address, error) {
	var v4, v6 []state.Address
	for i, ip := range res.IPs {
		prefix, ok := prefixOf(ip.Address)
		if !ok {
			return nil, newError(codeDecoding, "the ipam's ips[%d] is no address with a prefix length: %s", i, ip.Address.String())
		}
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		gateway = gateway.Unmap()
		if gateway.IsValid() && gateway.BitLen() != prefix.Addr().BitLen() {
			return nil, newError(codeInvalidConfig, "the ipam's ips[%d]: the gateway %s is not of the family of %s", i, gateway, prefix)
		}
		if prefix.Addr().Is4() {
			v4 = append(v4, state.Address{Prefix: prefix, Gateway: gateway})
		} else {
			v6 = append(v6, state.Address{Prefix: prefix, Gateway: gateway})
		}
	}
	return append(v4, v6...), nil
}

func prefixOf(n net.IPNet) (netip.Prefix, bool) {
	ip, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	ip = ip.Unmap()
	if bits == 128 && ip.Is4() {
		ones, bits = ones-96, 32
	}
	p := netip.PrefixFrom(ip, ones)
	return p, p.IsValid() && bits == ip.BitLen()
}

func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func leasedAddresses(res *current.Result) []netip.Addr {
	var list []netip.Addr
	for _, ip := range res.IPs {
		if p, ok := prefixOf(ip.Address); ok {
			list = append(list, p.Addr())
		}
	}
	return list
}

// podRoutes translates the routes of the IPAM's result, and adds the default
// routes that the mode calls for.
func podRoutes(s settings, addresses []state.Address, routes []*types.Route) ([]route.Route, error) {
	var direct, led []route.Route
	for _, r := range withDefaultRoutes(s, addresses, routes) {
		one, err := podRoute(addresses, r)
		if err != nil {
			return nil, err
		}
		if one.Gateway.IsValid() {
			led = append(led, one)
		} else {
			direct = append(direct, one)
		}
	}
	// Routes that lead to a gateway come after those by which it is reached.
	return append(direct, led...), nil
}

func podRoute(addresses []state.Address, r *types.Route) (route.Route, error) {
	dst, ok := prefixOf(r.Dst)
	if !ok {
		return route.Route{}, newError(codeDecoding, "the ipam gave a route whose destination is none: %s", r.Dst.String())
	}
	one := route.Route{Dst: dst.Masked(), Protocol: route.ProtocolTombolo}
	var scope uint32
	for _, attr := range []struct {
		name  string
		value *int
		limit int64
		into  *uint32
	}{
		{"mtu", &r.MTU, math.MaxUint32, &one.MTU},
		{"advmss", &r.AdvMSS, math.MaxUint32, &one.AdvMSS},
		{"priority", &r.Priority, math.MaxUint32, &one.Priority},
		{"table", r.Table, math.MaxUint32, &one.Table},
		{"scope", r.Scope, math.MaxUint8, &scope},
	} {
		if attr.value == nil {
			continue
		}
		if v := int64(*attr.value); v < 0 || v > attr.limit {
			return route.Route{}, newError(codeInvalidConfig, "the route to %s: %s %d is not within 0 and %d", one.Dst, attr.name, v, attr.limit)
		}
		*attr.into = uint32(*attr.value)
	}
	if r.Scope != nil {
		s := route.Scope(scope)
		one.Scope = &s
	}
	if gw, ok := netip.AddrFromSlice(r.GW); ok {
		one.Gateway = gw.Unmap()
	} else if r.Scope == nil {
		// A route that names no gateway goes by that of the address.
		one.Gateway = gatewayFor(dst, addresses)
	}
	one.OnLink = one.Gateway.IsValid() && !reachable(one.Gateway, addresses)
	return one, nil
}

// withDefaultRoutes adds a default route for each family that has a gateway and
// for which the IPAM gave none.
func withDefaultRoutes(s settings, addresses []state.Address, routes []*types.Route) []*types.Route {
	if !s.IsDefaultGateway {
		return routes
	}
	list := slices.Clone(routes)
	for _, bits := range []int{32, 128} {
		if hasDefault(list, bits) {
			continue
		}
		for _, a := range addresses {
			if a.Prefix.Addr().BitLen() == bits && a.Gateway.IsValid() {
				list = append(list, defaultRoute(a.Gateway))
				break
			}
		}
	}
	return list
}

// hasDefault says whether there is a default route among them, of the family whose
// addresses have so many bits.
func hasDefault(routes []*types.Route, bits int) bool {
	return slices.ContainsFunc(routes, func(r *types.Route) bool {
		dst, ok := prefixOf(r.Dst)
		return ok && dst.Bits() == 0 && dst.Addr().BitLen() == bits && inMain(r)
	})
}

func defaultRoute(gateway netip.Addr) *types.Route {
	bits := gateway.BitLen()
	return &types.Route{Dst: net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(0, bits)}, GW: gateway.AsSlice()}
}

func inMain(r *types.Route) bool {
	return r.Table == nil || *r.Table == 0 || *r.Table == int(route.TableMain)
}

func gatewayFor(dst netip.Prefix, addresses []state.Address) netip.Addr {
	for _, a := range addresses {
		if a.Gateway.IsValid() && a.Gateway.BitLen() == dst.Addr().BitLen() {
			return a.Gateway
		}
	}
	return netip.Addr{}
}

// reachable says whether a gateway is on link by one of the addresses' prefixes.
// Of link-local gateways only IPv6's always are: its interfaces have a prefix for
// them.
func reachable(gw netip.Addr, addresses []state.Address) bool {
	if gw.Is6() && gw.IsLinkLocalUnicast() {
		return true
	}
	for _, a := range addresses {
		if a.Prefix.Contains(gw) {
			return true
		}
	}
	return false
}

// result is what ADD prints: the interfaces in the order bridge, port, pod, after
// those that a plugin before this one made.
func (a *adding) result(leased *current.Result, b *built, att *bridge.Attachment) *current.Result {
	r := &current.Result{CNIVersion: current.ImplementedSpecVersion}
	if a.prev != nil {
		r.Interfaces, r.IPs, r.Routes, r.DNS = a.prev.Interfaces, a.prev.IPs, a.prev.Routes, a.prev.DNS
	}
	r.Interfaces = append(r.Interfaces,
		&current.Interface{Name: b.bridge.Name, Mac: b.bridge.MAC.String(), Mtu: b.mtu},
		&current.Interface{Name: att.Name, Mac: att.MAC.String(), Mtu: att.MTU},
		&current.Interface{Name: att.Peer, Mac: att.PeerMAC.String(), Mtu: a.podMTU(att), Sandbox: a.call.netns},
	)
	podInterface := len(r.Interfaces) - 1
	if a.rec.IFB != "" {
		r.Interfaces = append(r.Interfaces, &current.Interface{Name: a.rec.IFB, Mtu: att.MTU})
	}
	for _, address := range a.rec.Addresses {
		ip := &current.IPConfig{Address: ipNet(address.Prefix), Interface: &podInterface}
		if address.Gateway.IsValid() {
			ip.Gateway = address.Gateway.AsSlice()
		}
		r.IPs = append(r.IPs, ip)
	}
	r.Routes = append(r.Routes, withDefaultRoutes(a.settings, a.rec.Addresses, leased.Routes)...)
	switch {
	case !isEmptyDNS(a.dns):
		r.DNS = a.dns
	case !isEmptyDNS(leased.DNS):
		r.DNS = leased.DNS
	}
	return r
}

func isEmptyDNS(d types.DNS) bool {
	return len(d.Nameservers)+len(d.Search)+len(d.Options) == 0 && d.Domain == ""
}

// podMTU is that of the pod's interface, which a lease may have made lower than the port's.
func (a *adding) podMTU(att *bridge.Attachment) int {
	if a.leasing != nil && a.leasing.rec.Applied.MTU > 0 {
		return min(a.leasing.rec.Applied.MTU, att.MTU)
	}
	return att.MTU
}
