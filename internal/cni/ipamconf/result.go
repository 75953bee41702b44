package ipamconf

import (
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/route"
)

// routeConf has the fields of the library's route (CNI specification 1.1.0,
// "Add Success"). That one decodes itself, and so hides unknown fields.
type routeConf struct {
	Dst      netip.Prefix `json:"dst"`
	GW       netip.Addr   `json:"gw"`
	MTU      int          `json:"mtu"`
	AdvMSS   int          `json:"advmss"`
	Priority int          `json:"priority"`
	Table    *int         `json:"table"`
	Scope    *int         `json:"scope"`
}

func (conf *routeConf) route() (route.Route, error) {
	one := route.Route{Dst: conf.Dst, Gateway: conf.GW.Unmap()}
	var scope uint32
	for _, attr := range []struct {
		name  string
		value *int
		limit int64
		into  *uint32
	}{
		{"mtu", &conf.MTU, math.MaxUint32, &one.MTU},
		{"advmss", &conf.AdvMSS, math.MaxUint32, &one.AdvMSS},
		{"priority", &conf.Priority, math.MaxUint32, &one.Priority},
		{"table", conf.Table, math.MaxUint32, &one.Table},
		{"scope", conf.Scope, math.MaxUint8, &scope},
	} {
		if attr.value == nil {
			continue
		}
		if v := int64(*attr.value); v < 0 || v > attr.limit {
			return route.Route{}, newError(codeInvalidConfig, "the route to %s: %s %d is not within 0 and %d", conf.Dst.Masked(), attr.name, v, attr.limit)
		}
		*attr.into = uint32(*attr.value)
	}
	if conf.Scope != nil {
		one.Scope = new(route.Scope(scope))
	}
	return one, nil
}

// routes are those of the config.
func routes(confs []routeConf) ([]route.Route, error) {
	var list []route.Route
	for i, conf := range confs {
		field := fmt.Sprintf("field \"ipam.routes[%d]", i)
		if !conf.Dst.IsValid() {
			return nil, newError(codeInvalidConfig, "%s.dst\" is required", field)
		}
		if conf.GW.Zone() != "" {
			return nil, newError(codeInvalidConfig, "%s.gw\": %s has a zone", field, conf.GW)
		}
		one, err := conf.route()
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

// Routes translates the routes of a result.
func Routes(of []*types.Route) ([]route.Route, error) {
	var list []route.Route
	for _, r := range of {
		dst, ok := Prefix(r.Dst)
		if !ok {
			return nil, newError(types.ErrDecodingFailure, "the ipam gave a route without a valid destination: %s", r.Dst.String())
		}
		gw, _ := netip.AddrFromSlice(r.GW)
		one, err := (&routeConf{dst, gw, r.MTU, r.AdvMSS, r.Priority, r.Table, r.Scope}).route()
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

// Addresses translates the addresses of a result. What is none becomes the zero prefix, which package network refuses.
func Addresses(of *current.Result) []ipam.Address {
	var list []ipam.Address
	for _, ip := range of.IPs {
		p, _ := Prefix(ip.Address)
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		list = append(list, ipam.Address{Prefix: p, Gateway: gateway.Unmap()})
	}
	return list
}

// Give adds what an IPAM gave to a result: to an interface, if one is named.
func Give(r *current.Result, addresses []ipam.Address, routes []route.Route, to *int) {
	for _, address := range addresses {
		ip := &current.IPConfig{Address: IPNet(address.Prefix), Interface: to}
		if address.Gateway.IsValid() {
			ip.Gateway = address.Gateway.AsSlice()
		}
		r.IPs = append(r.IPs, ip)
	}
	for _, one := range routes {
		r.Routes = append(r.Routes, resultRoute(one))
	}
}

// resultRoute writes a route for a result.
func resultRoute(r route.Route) *types.Route {
	one := &types.Route{Dst: IPNet(r.Dst), MTU: int(r.MTU), AdvMSS: int(r.AdvMSS), Priority: int(r.Priority)}
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

// IPNet is the form that a result has for an address with its network's length.
func IPNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// Prefix is an address with the length of its network; ok is false where it is none.
func Prefix(n net.IPNet) (netip.Prefix, bool) {
	ip, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	if !ok || bits == 0 {
		return netip.Prefix{}, false
	}
	ip = ip.Unmap()
	if bits == 128 && ip.Is4() {
		ones, bits = ones-96, 32
	}
	if p := netip.PrefixFrom(ip, ones); p.IsValid() && bits == ip.BitLen() {
		return p, true
	}
	return netip.Prefix{}, false
}
