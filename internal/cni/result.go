package cni

import (
	"math"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/cni/ipamconf"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/route"
)

// routesOf translates the routes of a result.
func routesOf(routes []*types.Route) ([]route.Route, error) {
	var list []route.Route
	for _, r := range routes {
		one, err := routeOf(r)
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

func routeOf(r *types.Route) (route.Route, error) {
	dst, ok := ipamconf.Prefix(r.Dst)
	if !ok {
		return route.Route{}, newError(codeDecoding, "the ipam gave a route without a valid destination: %s", r.Dst.String())
	}
	one := route.Route{Dst: dst}
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
			return route.Route{}, newError(codeInvalidConfig, "the route to %s: %s %d is not within 0 and %d", dst.Masked(), attr.name, v, attr.limit)
		}
		*attr.into = uint32(*attr.value)
	}
	if r.Scope != nil {
		s := route.Scope(scope)
		one.Scope = &s
	}
	if gw, ok := netip.AddrFromSlice(r.GW); ok {
		one.Gateway = gw.Unmap()
	}
	return one, nil
}

// resultRoute is the way back.
func resultRoute(r route.Route) *types.Route {
	one := &types.Route{Dst: ipNet(r.Dst), MTU: int(r.MTU), AdvMSS: int(r.AdvMSS), Priority: int(r.Priority)}
	if r.Gateway.IsValid() {
		one.GW = r.Gateway.AsSlice()
	}
	if r.Table != 0 {
		table := int(r.Table)
		one.Table = &table
	}
	if r.Scope != nil {
		scope := int(*r.Scope)
		one.Scope = &scope
	}
	return one
}

// result is what ADD prints: the interfaces in the order bridge, port, pod, after
// those that a plugin before this one made.
func (c *call) result(a *asked, from *allocator, made *network.Attachment) *current.Result {
	r := &current.Result{CNIVersion: current.ImplementedSpecVersion}
	if a.prev != nil {
		r.Interfaces, r.IPs, r.Routes, r.DNS = a.prev.Interfaces, a.prev.IPs, a.prev.Routes, a.prev.DNS
	}
	r.Interfaces = append(r.Interfaces,
		&current.Interface{Name: made.Bridge, Mac: made.BridgeMAC.String(), Mtu: made.BridgeMTU},
		&current.Interface{Name: made.Port, Mac: made.PortMAC.String(), Mtu: made.MTU},
		&current.Interface{Name: made.IfName, Mac: made.MAC.String(), Mtu: made.PodMTU, Sandbox: c.netns},
	)
	podInterface := len(r.Interfaces) - 1
	if made.IFB != "" {
		r.Interfaces = append(r.Interfaces, &current.Interface{Name: made.IFB, Mtu: made.MTU})
	}
	if made.HostVLAN != "" {
		r.Interfaces = append(r.Interfaces, &current.Interface{Name: made.HostVLAN, Mac: made.HostVLANMAC.String(), Mtu: made.BridgeMTU})
	}
	addresses := made.Addresses
	if from != nil {
		addresses = from.said.Ordered(addresses)
	}
	for _, address := range addresses {
		ip := &current.IPConfig{Address: ipNet(address.Prefix), Interface: &podInterface}
		if address.Gateway.IsValid() {
			ip.Gateway = address.Gateway.AsSlice()
		}
		r.IPs = append(r.IPs, ip)
	}
	for _, one := range made.Routes {
		r.Routes = append(r.Routes, resultRoute(one))
	}
	switch leased := leasedDNS(from, made.DNS); {
	case !a.dns.IsEmpty():
		r.DNS = a.dns
	case !leased.IsEmpty():
		r.DNS = leased
	}
	return r
}

// leasedDNS is what the IPAM said, or a lease, and router advertisements.
func leasedDNS(from *allocator, heard network.DNS) types.DNS {
	dns := types.DNS{Domain: heard.Domain, Search: heard.Search}
	if from != nil {
		dns = from.said.DNS
	}
	for _, server := range heard.Servers {
		dns.Nameservers = append(dns.Nameservers, server.String())
	}
	return dns
}

// ipNet is the form that a result has for an address with its network's length.
func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
