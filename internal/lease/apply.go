package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/dhcpc/transport"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Interface is an interface in a pod that has, or gets, an address from a DHCP lease.
type Interface struct {
	Conn     *nl.Conn // a socket in the pod's namespace
	Index    int
	Name     string
	Priority int // the metric of the lease's routes
}

// InterfaceOf opens the interface of r's pod: the peer of the host's end of the pod's link. pod is the pod's namespace,
// where the owner may have renamed the interface. links works in the host's namespace. The caller must close the
// result's Conn.
func InterfaceOf(ctx context.Context, r *Record, pod *netns.NS, links *bridge.Conn) (*Interface, error) {
	port, err := links.Link(ctx, r.HostIf)
	if err != nil {
		return nil, err
	}

	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return nil, err
	}

	l, err := link.Peer(conn, port.Peer, port.Index)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &Interface{Conn: conn, Index: l.Index, Name: l.Name, Priority: r.Policy.Priority}, nil
}

// Apply adds the lease's addresses and routes to the pod. The addresses get the lifetimes valid and preferred (see
// dhcpc.Lease.Left), so that the kernel removes them in time even if all of our processes die. Apply calls set to add
// each route. Unless a.MTU is 0, it sets the MTU of the pod's interface. It does not change the bridge's MTU, since a
// DHCP server must not control the host's links. After an error Apply continues, and returns all errors.
func (l *Interface) Apply(ctx context.Context, a Applied, valid, preferred time.Duration,
	set func(context.Context, *route.Conn, route.Route) error) error {
	var errs []error
	if a.MTU != 0 {
		r := link.Request{Name: l.Name, MTU: &a.MTU}
		errs = append(errs, r.Apply(ctx, l.Conn, "set MTU of link", l.Name))
	}

	for _, p := range a.Addresses {
		own := addr.Address{Link: l.Index, Prefix: p, Broadcast: addr.Broadcast(p), Valid: Lifetime(valid, time.Second),
			Preferred: Lifetime(preferred, 0)}
		errs = append(errs, addr.On(l.Conn).Replace(ctx, own))
	}

	for _, r := range a.Routes {
		errs = append(errs, set(ctx, route.On(l.Conn), RouteOf(r, l.Index, l.Priority)))
	}

	return errors.Join(errs...)
}

// Withdraw removes the lease's routes and addresses from the pod. Missing ones are no error.
func (l *Interface) Withdraw(ctx context.Context, a Applied) error {
	var errs []error
	for _, r := range slices.Backward(a.Routes) {
		errs = append(errs, route.On(l.Conn).Remove(ctx, RouteOf(r, l.Index, l.Priority)))
	}
	for _, p := range a.Addresses {
		errs = append(errs, addr.On(l.Conn).Remove(ctx, addr.Address{Prefix: p, Link: l.Index}))
	}
	return errors.Join(errs...)
}

// Replace sets a route. It replaces an existing route with the same destination and metric, even if the existing route
// uses another link.
func Replace(ctx context.Context, routes *route.Conn, r route.Route) error {
	_, err := routes.Ensure(ctx, r)
	return err
}

// ReplaceOwn returns a function that sets a route of a pod's lease. The function replaces only the routes in had, the
// routes in the record's Applied. If any other route with the destination and metric exists, that route belongs to the
// pod's owner, and the function changes nothing.
func ReplaceOwn(had []dhcpc.Route) func(context.Context, *route.Conn, route.Route) error {
	return func(ctx context.Context, routes *route.Conn, r route.Route) error {
		foreign := false
		err := routes.Walk(ctx, route.Filter{Table: unix.RT_TABLE_MAIN}, func(have route.Route) {
			own := have.Link == r.Link && slices.Contains(had, dhcpc.Route{Dst: have.Dst, Gateway: have.Gateway})
			foreign = foreign || have.Dst == r.Dst && have.Priority == r.Priority && !own
		})
		if foreign || err != nil {
			return err
		}
		return Replace(ctx, routes, r)
	}
}

// Keeps returns the addresses and routes in a that still exist on the pod's interface. It does not check the MTU.
func (l *Interface) Keeps(ctx context.Context, a Applied) (Applied, error) {
	has := Applied{MTU: a.MTU}
	addresses, err := addr.On(l.Conn).List(ctx, addr.Filter{Link: l.Index})
	if err != nil {
		return has, err
	}

	for _, p := range a.Addresses {
		// Ignore the prefix length of an IPv6 address. A link has an IPv6 address only once, and the pod may have
		// formed it with another prefix length.
		if slices.ContainsFunc(addresses, func(o addr.Address) bool {
			return o.Prefix == p || p.Addr().Is6() && o.Prefix.Addr() == p.Addr()
		}) {
			has.Addresses = append(has.Addresses, p)
		}
	}

	if len(a.Routes) == 0 {
		return has, nil
	}

	routes, err := route.On(l.Conn).List(ctx,
		route.Filter{Family: unix.AF_INET, Table: unix.RT_TABLE_MAIN, Link: l.Index})
	for _, r := range a.Routes {
		want := RouteOf(r, l.Index, l.Priority)
		if slices.ContainsFunc(routes, func(o route.Route) bool {
			return o.Dst == want.Dst && o.Gateway == want.Gateway && o.Priority == want.Priority
		}) {
			has.Routes = append(has.Routes, r)
		}
	}

	return has, err
}

// Lifetime converts left, the remaining time of a lease, into a lifetime for the kernel. If left is negative, it
// returns nil, which means for ever. The result is never shorter than least, since the kernel refuses a valid lifetime
// of 0 s. It is at most MaxUint32-1 seconds, since MaxUint32 seconds would mean for ever.
func Lifetime(left, least time.Duration) *time.Duration {
	if left < 0 {
		return nil
	}
	left = min(max(left, least), (math.MaxUint32-1)*time.Second)
	return &left
}

// Policy holds the settings that determine which parts of a lease a pod gets. A lease's record contains the policy, so
// that a renewal applies the same parts as the ADD did.
type Policy struct {
	// NoDefault leaves out the lease's default route. It also leaves out the lease's other routes with prefixes shorter
	// than shortestRoute, since a few of them together amount to a default route.
	NoDefault bool `json:"noDefault,omitempty"`
	// Gateway is the next hop of the default route, in place of the lease's router. It is set if pods of a LAN reach
	// other networks through the host. The pod then gets no other routes of the lease: by them, a server could lead the
	// pod's traffic past the host. With NoDefault, Gateway does not change the routes.
	Gateway netip.Addr `json:"gateway,omitzero"`
	// Routes are additional routes from the configuration.
	Routes []dhcpc.Route `json:"routes,omitempty"`
	// Priority is the metric of all routes that the pod gets by this policy. 0 is the kernel's default.
	Priority int `json:"priority,omitempty"`
	// IPv6 is set if the pod uses IPv6. If the lease's MTU is below minMTU6, the pod then gets minMTU6 instead, since
	// the kernel removes IPv6 from a link with a lower MTU.
	IPv6 bool `json:"ipv6,omitempty"`
}

// minMTU6 is IPv6's smallest MTU (RFC 8200, section 5).
const minMTU6 = 1280

// shortestRoute is a prefix length. Policy.NoDefault leaves out the lease's routes with shorter prefixes.
const shortestRoute = 8

// Applied lists the addresses, routes and MTU that a pod has, or must get, from a lease.
type Applied struct {
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// Routes are in an order that the kernel accepts.
	Routes []dhcpc.Route `json:"routes,omitempty"`
	// MTU is the link's MTU in bytes; 0 leaves it unchanged.
	MTU int `json:"mtu,omitempty"`
}

// Apply returns the addresses, routes and MTU that a pod gets from a lease. The plugin and the keeper both use it.
func (p *Policy) Apply(l *dhcpc.Lease) Applied {
	a := Applied{Addresses: []netip.Prefix{l.Address}, MTU: l.MTU}
	if p.IPv6 && a.MTU != 0 {
		a.MTU = max(a.MTU, minMTU6)
	}

	routes := []dhcpc.Route{{Dst: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Gateway: p.Gateway}}
	if p.NoDefault || !p.Gateway.IsValid() {
		routes = slices.DeleteFunc(slices.Clone(l.Routes), func(r dhcpc.Route) bool {
			// The kernel adds and removes the route to the lease's own subnet together with the address.
			return p.NoDefault && r.Dst.Bits() < shortestRoute || r.Dst == l.Address.Masked()
		})
	}

	for _, r := range slices.Concat(routes, p.Routes) {
		// Only the first route to a destination counts, as in the kernel.
		if !slices.ContainsFunc(a.Routes, func(o dhcpc.Route) bool { return o.Dst == r.Dst }) {
			a.Routes = append(a.Routes, r)
		}
	}

	return a
}

// Router returns the gateway to report with the address of the lease l. This is Gateway or, if it is not set, the
// gateway of the lease's default route. If there is neither, Router returns the zero Addr.
func (p *Policy) Router(l *dhcpc.Lease) netip.Addr {
	i := slices.IndexFunc(l.Routes, func(r dhcpc.Route) bool { return r.Dst.Bits() == 0 })
	if !p.Gateway.IsValid() && i >= 0 {
		return l.Routes[i].Gateway
	}
	return p.Gateway
}

// Without returns the addresses and routes that are in a and not in b. A change from a to b must remove these. The
// result has no MTU.
func (a Applied) Without(b Applied) Applied {
	return Applied{
		Addresses: slices.DeleteFunc(slices.Clone(a.Addresses),
			func(p netip.Prefix) bool { return slices.Contains(b.Addresses, p) }),
		Routes: slices.DeleteFunc(slices.Clone(a.Routes),
			func(r dhcpc.Route) bool { return slices.Contains(b.Routes, r) }),
	}
}

// Empty reports whether a has neither addresses nor routes.
func (a Applied) Empty() bool { return len(a.Addresses) == 0 && len(a.Routes) == 0 }

// RouteOf converts a route of a lease into a route through the link with the given index. priority is the route's
// metric. The route's gateway need not be in any subnet of the link.
func RouteOf(r dhcpc.Route, index, priority int) route.Route {
	one := route.Route{Dst: r.Dst, Gateway: r.Gateway, Link: index, Priority: uint32(priority),
		Protocol: route.ProtocolTombolo}
	if r.Gateway.IsValid() {
		one.OnLink = true
		return one
	}
	one.Scope = new(uint8(unix.RT_SCOPE_LINK))
	return one
}

// CheckUsable returns an error if the lease itself shows that no pod can have its address. Such an address would do
// harm: the host's firewall lets the pod send from it, and redirects host ports to it.
func CheckUsable(l *dhcpc.Lease) error {
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

// TwoServers returns the text of a warning that other servers besides the lease's server answered on the LAN.
func TwoServers(l *dhcpc.Lease) string {
	return fmt.Sprintf("%s has leased %s, and other DHCP servers answer too: %s: ipam.servers says which to accept",
		l.Server, l.Address, l.Others)
}

// A Conflict is the reason why a pod cannot have an address.
type Conflict string

func (c Conflict) Error() string { return string(c) }

// CheckConflict returns a [Conflict] if the host shows that a pod cannot have the address a. The address may be the
// host's own, a broadcast address of the host, or a gateway of a host's route through the pod's network. Any other
// error means that CheckConflict could not look. at is the index of the host's link in that network. If a equals had,
// the pod's previous address, CheckConflict does not look for gateways, since the host may route through a pod.
func CheckConflict(ctx context.Context, host *route.Conn, at int, a, had netip.Addr) error {
	r, err := host.Get(ctx, a)
	switch {
	case route.NoRoute(err):
		// The host has no route to the address, or a route that refuses packets.
	case err != nil:
		return fmt.Errorf("cannot tell whether it is the host's: %w", err)
	case r.Type == unix.RTN_LOCAL:
		return Conflict("it is the host's own address")
	case r.Type == unix.RTN_BROADCAST:
		return Conflict("it is a broadcast address of the host's")
	}

	if a == had {
		return nil
	}

	list, err := host.List(ctx, route.Filter{Family: nl.FamilyOf(a), Link: at})
	if err != nil {
		return fmt.Errorf("cannot tell whether it is a gateway of the host's: %w", err)
	}

	for _, r := range list {
		if r.Gateway == a || slices.ContainsFunc(r.Nexthops, func(hop route.Nexthop) bool { return hop.Gateway == a }) {
			return Conflict("it is a gateway of the host's, for " + destination(r))
		}
	}

	return nil
}

// destination returns a route's destination for an error message.
func destination(r route.Route) string {
	if !r.Dst.IsValid() || r.Dst.Bits() == 0 {
		return "its default route"
	}
	return r.Dst.String()
}

// WhoHas returns the MACs of other machines that have the address a. It sends one ARP probe (RFC 5227) from the link
// with the given index, and collects answers for the given time. own is the sender's MAC. A probe changes no machine's
// neighbour table.
func WhoHas(ctx context.Context, index int, own net.HardwareAddr, a netip.Addr, within time.Duration) (
	list []net.HardwareAddr, _ error,
) {
	conn, err := transport.DialRaw(&transport.Config{Link: index, MAC: own, ARP: true})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	probe := &dhcpc.ARP{SenderMAC: dhcpc.Hex(own), SenderIP: netip.IPv4Unspecified(), TargetIP: a}
	if err := conn.Send(ctx, &dhcpc.Packet{ARP: probe}); err != nil {
		return nil, err
	}

	until := time.Now().Add(within)
	for {
		p, err := conn.Receive(ctx, until)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return list, nil
		}

		if err != nil {
			return nil, err
		}

		if p.ARP == nil || p.ARP.SenderIP != a || !p.ARP.Reply {
			continue
		}

		mac := net.HardwareAddr(p.ARP.SenderMAC)
		isMAC := func(have net.HardwareAddr) bool { return bytes.Equal(have, mac) }
		if !isMAC(own) && !slices.ContainsFunc(list, isMAC) {
			list = append(list, mac)
		}
	}
}

// GiveBack releases an attachment's leases, and removes their record. path is the directory of the records. If the
// client is sticky, it releases nothing. Unless the record's state is Expired, it then keeps the IPv4 lease in a record
// of the state Sticky, for the pod's next container. GiveBack does nothing if there is no record. links is a connection
// to the host's namespace.
//
// If the record cannot be used or a RELEASE cannot be sent, GiveBack passes the error to warn and continues, so that
// the pod can end. The server then frees the address when the lease expires. If the record's lock does not become free
// before ctx ends, the error matches file.ErrLocked. The caller must not hold the state's lock.
func GiveBack(ctx context.Context, path, hash string, links *bridge.Conn, warn func(string)) error {
	dir, err := Open(path)
	if err != nil {
		return err
	}

	if _, err := dir.Load(hash); errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	held, err := dir.Lock(ctx, hash)
	if err != nil {
		return err
	}
	defer held.Close()
	rec, err := held.Load()
	switch {
	case errors.As(err, new(*state.RecordError)):
		warn(err.Error())
		return held.Remove()
	case err != nil:
		return state.Ignore(err, fs.ErrNotExist)
	}

	err = errors.Join(dir.release(ctx, rec, links, false), dir.release(ctx, rec, links, true))
	if err != nil {
		warn(err.Error())
	}

	if rec.Client.Sticky && rec.Lease != nil && rec.State != Expired { // a server may have refused an expired lease
		if err = held.Remember(ctx, rec); err == nil {
			return nil
		}
		warn(err.Error()) // for example, because the disk is full
	}

	return held.Remove()
}

// release sends the RELEASE of a bound DHCPv4 lease or, if six is set, of the DHCPv6 lease. It sends it from the pod,
// or from the host if the pod is gone. For a sticky client (see Client.Sticky) it sends none, so that the server
// reserves the address for the pod until the lease expires. If the pod is gone and another record has the same client
// identity, it sends none either. The server cannot tell the two clients apart.
func (d *Store) release(ctx context.Context, r *Record, links *bridge.Conn, six bool) error {
	now := time.Now()
	isHeld := r.Lease != nil && r.State == Bound && r.Lease.Left(now) != 0 && !r.Client.Sticky
	if six {
		isHeld = r.Releases6(now)
	}

	if !isHeld {
		return nil
	}

	if sent, err := r.releaseFromPod(ctx, links, six); sent {
		return err
	}

	if others, err := d.Same(r); err != nil || len(others) > 0 {
		return err
	}
	return Release(ctx, r, links, nil, six)
}

// releaseFromPod sends the RELEASE from the pod's interface, and returns true. If the pod's namespace or interface
// cannot be found, it returns false and nil.
func (r *Record) releaseFromPod(ctx context.Context, links *bridge.Conn, six bool) (sent bool, _ error) {
	pod, err := netns.OpenSame(r.NetNS, r.NetNSCookie)
	if err != nil {
		return false, nil
	}
	defer pod.Close()
	l, err := InterfaceOf(ctx, r, pod, links)
	if err != nil {
		return false, nil
	}
	defer l.Conn.Close()
	return true, r.sendRelease(ctx, &transport.Config{NetNS: pod, Link: l.Index}, six)
}

// Release sends the RELEASE of the DHCPv4 lease or, if six is set, of the DHCPv6 lease of a pod that is gone. It sends
// from the host's link in the pod's network. The host may send a DHCPv6 RELEASE, since servers check its content and
// not its sender. links is a connection to the host's namespace. host is a handle to that namespace; nil means the
// calling thread's. If the host has no link in the pod's VLAN, Release does nothing. The server then frees the address
// when the lease expires.
func Release(ctx context.Context, r *Record, links *bridge.Conn, host *netns.NS, six bool) error {
	at, err := links.Link(ctx, r.At())
	if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(r.At(), r.Bridge+".") {
		return nil // the host is not in the pod's VLAN
	}

	if err != nil {
		own := r.Leased6().Addr()
		if !six {
			own = r.Lease.Address.Addr()
		}
		return fmt.Errorf("release lease of %s: %w", own, err)
	}
	return r.sendRelease(ctx, &transport.Config{NetNS: host, Link: at.Index}, six)
}

// sendRelease sends the DHCPv4 RELEASE or, if six is set, the DHCPv6 RELEASE that the keeper has encoded. The latter
// goes to a multicast group, so it needs no neighbour entry.
func (r *Record) sendRelease(ctx context.Context, from *transport.Config, six bool) error {
	if six {
		return transport.Send6(from, r.Six.Release)
	}
	return transport.Release(ctx, from, r.Lease)
}
