package cni

import (
	"bytes"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tombolo-cni/tombolo/internal/ipam/delegate"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/strict"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network"
	"github.com/tombolo-cni/tombolo/route"
)

// result returns the result of ADD. It lists the interfaces of earlier plugins, and then the bridge, the host's end of
// the pod's link and the pod's interface, in this order. The ifb that limits the pod's egress, and the host's interface
// in a VLAN, follow if they exist.
func (c *call) result(a *addRequest, from *allocator, made *network.Attachment) *current.Result {
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
		r.Interfaces = append(r.Interfaces,
			&current.Interface{Name: made.HostVLAN, Mac: made.HostVLANMAC.String(), Mtu: made.BridgeMTU})
	}

	addIPAM(r, from.ordered(made.Addresses), made.Routes, &podInterface)
	dns := from.dns
	if a.pod.Lease != nil {
		dns = types.DNS{Domain: made.DNS.Domain, Search: made.DNS.Search}
	}

	// The servers in made.DNS come from DHCPv4, DHCPv6 or router advertisements.
	dns.Nameservers = append(dns.Nameservers, printable.Texts(made.DNS.Servers)...)
	if !a.dns.IsEmpty() {
		dns = a.dns
	}

	if !dns.IsEmpty() {
		r.DNS = dns
	}

	return r
}

// prevResult parses the field prevResult: for ADD, the result of the plugins earlier in the chain; for other verbs, the
// result of the whole chain. If there is none, it returns nil. If it has no version, the version of the configuration
// applies.
func (c *Common) prevResult() (*current.Result, error) {
	if isEmpty(c.PrevResult) || string(c.PrevResult) == "[]" {
		return nil, nil
	}

	r, err := delegate.ReadResult(c.PrevResult, c.CNIVersion)
	if err != nil {
		return nil, newError(codeDecoding, "prevResult: %v", err)
	}

	for i, ip := range r.IPs {
		if n := ip.Interface; n != nil && (*n < 0 || *n >= len(r.Interfaces)) {
			return nil, newError(codeDecoding, "prevResult: ips[%d] names interface %d of %d", i, *n, len(r.Interfaces))
		}
	}

	return r, nil
}

// resultToCheck returns prevResult, the result of the ADD that CHECK must check. A missing or invalid prevResult is an
// error.
func (c *Common) resultToCheck() (*current.Result, error) {
	prev, err := c.prevResult()
	if err == nil && prev == nil {
		err = newError(codeInvalidConfig, "CHECK needs prevResult: the result of the ADD to check")
	}
	return prev, err
}

// routeConf is a route in a configuration or a result. It has the fields of the CNI library's type Route (CNI
// specification 1.1.0, "Add Success"), but not its UnmarshalJSON, which hides unknown fields.
type routeConf struct {
	Dst      netip.Prefix `json:"dst"`
	GW       netip.Addr   `json:"gw,omitzero"`
	MTU      int          `json:"mtu,omitempty"`
	AdvMSS   int          `json:"advmss,omitempty"`
	Priority int          `json:"priority,omitempty"`
	Table    *int         `json:"table,omitempty"`
	Scope    *int         `json:"scope,omitempty"`
}

// newRouteConf converts a route of a result. ok is false if the route has no valid destination.
func newRouteConf(r *types.Route) (_ routeConf, ok bool) {
	dst, ok := prefixOf(r.Dst)
	gw, _ := netip.AddrFromSlice(r.GW)
	return routeConf{dst, gw.Unmap(), r.MTU, r.AdvMSS, r.Priority, r.Table, r.Scope}, ok
}

// route converts conf into a route. It returns an error for a number out of range. where names the place of the route,
// for the beginning of errors.
func (conf *routeConf) route(where string) (route.Route, error) {
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
			return one, newError(codeInvalidConfig, "%s: %s %d is not within 0 and %d", where, attr.name, v, attr.limit)
		}
		*attr.into = uint32(*attr.value)
	}

	if conf.Scope != nil {
		one.Scope = new(uint8(scope))
	}

	return one, nil
}

// routes converts the routes of an ipam section. If a route has no dst, or an invalid field, it returns an error.
func routes(confs []routeConf) ([]route.Route, error) {
	var list []route.Route
	for i, conf := range confs {
		field := fmt.Sprintf("field \"ipam.routes[%d]", i)
		conf.Dst, _ = prefixOf(ipNet(conf.Dst)) // an IPv4 address in IPv6 notation becomes IPv4
		if !conf.Dst.IsValid() {
			return nil, newError(codeInvalidConfig, "%s.dst\" is required", field)
		}

		if conf.GW.Zone() != "" {
			return nil, newError(codeInvalidConfig, "%s.gw\": %s has a zone", field, conf.GW)
		}

		one, err := conf.route(field + `"`)
		if err != nil {
			return nil, err
		}

		list = append(list, one)
	}

	return list, nil
}

// routesOf converts the routes of a result. If a route has no valid destination, or an invalid field, it returns an
// error.
func routesOf(requested []*types.Route) ([]route.Route, error) {
	var list []route.Route
	for _, r := range requested {
		conf, ok := newRouteConf(r)
		if !ok {
			return nil, newError(types.ErrDecodingFailure, "the ipam gave a route without a valid destination: %s",
				r.Dst.String())
		}
		one, err := conf.route("the route to " + conf.Dst.String())
		if err != nil {
			return nil, err
		}
		list = append(list, one)
	}

	return list, nil
}

// resultAddresses converts the addresses of a result. An invalid address becomes the zero prefix, which package network
// rejects.
func resultAddresses(result *current.Result) []ipam.Address {
	var list []ipam.Address
	for _, ip := range result.IPs {
		p, _ := prefixOf(ip.Address)
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		list = append(list, ipam.Address{Prefix: p, Gateway: gateway.Unmap()})
	}
	return list
}

// addIPAM adds an IPAM's addresses and routes to a result. to is the index of the interface that has the addresses, or
// nil if the result names none.
func addIPAM(r *current.Result, addresses []ipam.Address, routes []route.Route, to *int) {
	for _, address := range addresses {
		ip := current.IPConfig{Address: ipNet(address.Prefix), Interface: to, Gateway: address.Gateway.AsSlice()}
		r.IPs = append(r.IPs, &ip)
	}
	for _, one := range routes {
		r.Routes = append(r.Routes, resultRoute(one))
	}
}

// resultRoute converts a route into the type of routes in results.
func resultRoute(r route.Route) *types.Route {
	one := &types.Route{Dst: ipNet(r.Dst), GW: r.Gateway.AsSlice(), MTU: int(r.MTU), AdvMSS: int(r.AdvMSS),
		Priority: int(r.Priority)}
	if r.Table != 0 {
		one.Table = new(int(r.Table))
	}
	if r.Scope != nil {
		one.Scope = new(int(*r.Scope))
	}
	return one
}

// ipNet converts a prefix into the type of addresses in results.
func ipNet(p netip.Prefix) net.IPNet {
	return net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// prefixOf converts a net.IPNet into a netip.Prefix. It returns false if the address or the mask is invalid, or if they
// do not fit together. An IPv4 address or mask in IPv6 form becomes IPv4.
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

	if p := netip.PrefixFrom(ip, ones); p.IsValid() && bits == ip.BitLen() {
		return p, true
	}

	return netip.Prefix{}, false
}

// encode encodes a result in the version of the configuration. It returns an error if that version cannot express the
// result.
func (c *call) encode(r *current.Result) ([]byte, error) {
	if c.conf.CNIVersion == "1.0.0" || c.conf.CNIVersion == "1.1.0" {
		r.CNIVersion = c.conf.CNIVersion
		return encodeResult(r), nil
	}

	families := map[bool]int{}
	for _, ip := range r.IPs {
		families[ip.Address.IP.To4() != nil]++
	}

	if c.conf.CNIVersion < "0.3.0" && max(families[true], families[false]) > 1 {
		return nil, newError(codeInvalidConfig,
			"a result of CNI %s has one address of each family, and the pod has more: use cniVersion 0.3.0 or later",
			c.conf.CNIVersion)
	}

	var out bytes.Buffer
	older, err := r.GetAsVersion(c.conf.CNIVersion)
	if err == nil {
		err = older.PrintTo(&out)
	}

	if err != nil {
		return nil, newError(codeIncompatibleVersion, "write the result as CNI %s: %v", c.conf.CNIVersion, err)
	}

	return out.Bytes(), nil
}

// A resultObject is a result of CNI 1.0 or 1.1 in JSON (section 5 of the specification). The library's types would
// need four passes to encode it, which cost a tenth of an ADD.
type resultObject struct {
	CNIVersion string               `json:"cniVersion,omitempty"`
	Interfaces []*current.Interface `json:"interfaces,omitempty"`
	IPs        []ipObject           `json:"ips,omitempty"`
	Routes     []routeConf          `json:"routes,omitempty"`
	DNS        *types.DNS           `json:"dns,omitempty"`
}

type ipObject struct {
	Interface *int   `json:"interface,omitempty"`
	Address   string `json:"address"`
	Gateway   net.IP `json:"gateway,omitempty"`
}

// encodeResult encodes a result of CNI 1.0 or 1.1 as JSON.
func encodeResult(r *current.Result) []byte {
	object := resultObject{CNIVersion: r.CNIVersion, Interfaces: r.Interfaces}
	for _, ip := range r.IPs {
		object.IPs = append(object.IPs, ipObject{ip.Interface, ip.Address.String(), ip.Gateway})
	}

	for _, one := range r.Routes {
		conf, _ := newRouteConf(one)
		object.Routes = append(object.Routes, conf)
	}

	if !r.DNS.IsEmpty() {
		object.DNS = &r.DNS
	}
	return append(strict.Append(nil, &object), '\n')
}
