package lease

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// Policy says what of a lease the pod gets: what the configuration says about it,
// kept so that a renewal applies the same as the ADD did.
type Policy struct {
	// NoDefault leaves the lease's default route out, and what is as good as one: routes
	// to more than a whole class A network.
	NoDefault bool `json:"noDefault,omitempty"`
	// Gateway is the next hop of the default route, in place of the lease's router: the host's, if pods of a LAN go
	// out through the host. Then the lease's other routes are left out too: by some that are longer, a server could
	// have any part of what the pod sends pass the host by. The host has routes of its own.
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
	a := Applied{Addresses: []netip.Prefix{l.Address}, MTU: cmp.Or(p.MTU, l.MTU)}
	if p.IPv6 && a.MTU != 0 {
		a.MTU = max(a.MTU, minMTU6)
	}
	add := func(r dhcpc.Route) {
		// The first route to a destination counts, as it does for the kernel.
		if !slices.ContainsFunc(a.Routes, func(o dhcpc.Route) bool { return o.Dst == r.Dst }) {
			a.Routes = append(a.Routes, r)
		}
	}
	if p.NoDefault || !p.Gateway.IsValid() {
		for _, r := range l.Routes {
			// Two halves make a default route, and so do four quarters. The route to the lease's own subnet comes
			// and goes with the address, by the kernel.
			if p.NoDefault && r.Dst.Bits() < shortestRoute || r.Dst == l.Address.Masked() {
				continue
			}
			add(r)
		}
	}
	if p.Gateway.IsValid() && !p.NoDefault {
		add(dhcpc.Route{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Gateway: p.Gateway})
	}
	for _, r := range p.Routes {
		add(r)
	}
	return a
}

// Router is where the default route of a pod with the lease leads; the zero Addr is nowhere.
func (p *Policy) Router(l *dhcpc.Lease) netip.Addr {
	if !p.Gateway.IsValid() && len(l.Routers) > 0 {
		return l.Routers[0]
	}
	return p.Gateway
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

// RouteOf is a route of a lease as the pod gets it, by the plugin and by the keeper: on
// a link, with a metric. Its router need not be in any prefix of the link's.
func RouteOf(r dhcpc.Route, link, priority int) route.Route {
	one := route.Route{Dst: r.Dst, Gateway: r.Gateway, Link: link, Priority: uint32(priority), Protocol: route.ProtocolTombolo}
	if r.Gateway.IsValid() {
		one.OnLink = true
		return one
	}
	one.Scope = new(uint8(unix.RT_SCOPE_LINK))
	return one
}

// Impossible returns an error if the lease itself shows that no pod can have its address. It is checked since the
// host's firewall lets the pod send from the address, and leads host ports to it.
func Impossible(l *dhcpc.Lease) error {
	own, subnet := l.Address.Addr(), l.Address.Masked()
	switch {
	case own.IsLinkLocalUnicast():
		return errors.New("it is a link-local address (RFC 3927)")
	case own == l.Server:
		return errors.New("it is the server's own address")
	case l.OwnRouter:
		return errors.New("it is the address of a router of the lease")
	case own == l.Broadcast:
		return errors.New("it is the network's broadcast address")
	case subnet.Bits() < 31 && own == subnet.Addr():
		return fmt.Errorf("it is the address of the network %s itself", subnet)
	case own == addr.Broadcast(subnet):
		return fmt.Errorf("it is the broadcast address of %s", subnet)
	}
	return nil
}

// TwoServers describes a LAN on which more servers answered than the one of a lease.
func TwoServers(l *dhcpc.Lease) string {
	return fmt.Sprintf("%s has leased %s, and other DHCP servers answer too: %s: ipam.servers says which to accept",
		l.Server, l.Address, l.Others)
}

// Taken says why a pod cannot have an address, by what the host has: where it is the
// host's own, and where the host sends to others by it, out of the pods' bridge. Of the
// latter it is nothing to say of an address that the pod has had already: the host may
// send to others by way of a pod.
func Taken(ctx context.Context, host *route.Conn, bridge int, a, had netip.Addr) error {
	r, err := host.Get(ctx, a)
	switch {
	case route.NoRoute(err):
		// No route, or one that says so.
	case err != nil:
		return fmt.Errorf("cannot tell whether it is the host's: %w", err)
	case r.Type == unix.RTN_LOCAL:
		return errors.New("it is the host's own address")
	case r.Type == unix.RTN_BROADCAST:
		return errors.New("it is a broadcast address of the host's")
	}
	if a == had {
		return nil
	}
	list, err := host.List(ctx, route.Filter{Family: nl.FamilyOf(a), Link: bridge})
	if err != nil {
		return fmt.Errorf("cannot tell whether it is a gateway of the host's: %w", err)
	}
	for _, r := range list {
		if r.Gateway == a || slices.ContainsFunc(r.Nexthops, func(hop route.Nexthop) bool { return hop.Gateway == a }) {
			return fmt.Errorf("it is a gateway of the host's, for %s", destination(r))
		}
	}
	return nil
}

func destination(r route.Route) string {
	if !r.Dst.IsValid() || r.Dst.Bits() == 0 {
		return "its default route"
	}
	return r.Dst.String()
}
