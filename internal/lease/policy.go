package lease

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/dhcpc"
)

// Policy says what of a lease the pod gets: what the configuration says about it,
// kept so that a renewal applies the same as the ADD did.
type Policy struct {
	// NoRoutes leaves the lease's routes out, its default route too.
	NoRoutes bool `json:"noRoutes,omitempty"`
	// NoDefault leaves the lease's default route out, and what is as good as one: routes
	// to more than a whole class A network.
	NoDefault bool `json:"noDefault,omitempty"`
	// Gateway is to be the default route's, in place of the lease's router: the host,
	// where pods of a LAN go out through it. Then the lease's other routes are left out
	// too: by some that are longer, a server could have any part of what the pod sends
	// pass the host by. The host has routes of its own.
	Gateway netip.Addr `json:"gateway,omitzero"`
	// Routes are the configuration's own.
	Routes []dhcpc.Route `json:"routes,omitempty"`
	// Priority is the metric of all of these routes; 0 is the kernel's default.
	Priority int `json:"priority,omitempty"`
	// MTU is the configuration's own, which counts before the lease's.
	MTU int `json:"mtu,omitempty"`
	// IPv6 says that the pod has IPv6, which the kernel takes from a link whose MTU is
	// below minMTU6: then a server's is no lower.
	IPv6 bool `json:"ipv6,omitempty"`
}

// minMTU6 is IPv6's smallest MTU (RFC 8200, section 5).
const minMTU6 = 1280

// shortestRoute is the length, in bits, from which on a destination is no part of a
// default route.
const shortestRoute = 8

// Applied is what a lease comes to in the pod.
type Applied struct {
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// Routes are in an order in which the kernel takes them.
	Routes []dhcpc.Route `json:"routes,omitempty"`
	// MTU is the link's, in bytes; 0 is left as it is.
	MTU int `json:"mtu,omitempty"`
}

// Apply gives what the pod gets of a lease. The plugin and the keeper both go by it.
func (p *Policy) Apply(l *dhcpc.Lease) Applied {
	a := Applied{Addresses: []netip.Prefix{l.Address}, MTU: p.MTU}
	if a.MTU == 0 {
		a.MTU = l.MTU
	}
	if p.IPv6 && a.MTU != 0 {
		a.MTU = max(a.MTU, minMTU6)
	}
	add := func(r dhcpc.Route) {
		// The first route to a destination counts, as it does for the kernel.
		if !slices.ContainsFunc(a.Routes, func(o dhcpc.Route) bool { return o.Dst == r.Dst }) {
			a.Routes = append(a.Routes, r)
		}
	}
	if !p.NoRoutes && (p.NoDefault || !p.Gateway.IsValid()) {
		for _, r := range l.Routes {
			// Two halves make a default route, and so do four quarters. That to the lease's own
			// subnet the kernel has made along with the address, and goes by it.
			if p.NoDefault && r.Dst.Bits() < shortestRoute || r.Dst == l.Address.Masked() {
				continue
			}
			add(r)
		}
	}
	if p.Gateway.IsValid() && !p.NoDefault {
		if !l.Address.Contains(p.Gateway) {
			add(dhcpc.Route{Dst: netip.PrefixFrom(p.Gateway, p.Gateway.BitLen())})
		}
		add(dhcpc.Route{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Via: p.Gateway})
	}
	for _, r := range p.Routes {
		add(r)
	}
	return a
}

// Without gives what is in a and not in b: what has to go when b takes a's place.
// The MTU is never among it.
func (a Applied) Without(b Applied) Applied {
	return Applied{
		Addresses: slices.DeleteFunc(slices.Clone(a.Addresses), func(p netip.Prefix) bool { return slices.Contains(b.Addresses, p) }),
		Routes:    slices.DeleteFunc(slices.Clone(a.Routes), func(r dhcpc.Route) bool { return slices.Contains(b.Routes, r) }),
	}
}

// Empty says that there is no address and no route.
func (a Applied) Empty() bool { return len(a.Addresses) == 0 && len(a.Routes) == 0 }
