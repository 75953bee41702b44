package lease

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// Interface is a pod's interface that has a lease.
type Interface struct {
	Conn     *nl.Conn // a socket in the pod's namespace
	Index    int
	Name     string
	Priority int // the metric of the lease's routes
}

// Apply adds the lease's addresses and routes to the pod. The addresses get the lifetimes valid and preferred (see
// dhcpc.Lease.Left), so that the kernel removes them in time even if all of our processes die. Apply sets the MTU of
// the pod's interface unless a.MTU is 0. It leaves the host's bridge alone, since a server must not control that. It
// calls set for each route.
func (l *Interface) Apply(ctx context.Context, a Applied, valid, preferred time.Duration,
	set func(context.Context, *route.Conn, route.Route) error) error {
	var errs []error
	if a.MTU != 0 {
		var b nl.Batch
		link.Request{Name: l.Name, MTU: &a.MTU}.Set(&b, "set MTU of link", l.Name)
		errs = append(errs, l.Conn.Execute(&b))
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

// Withdraw removes the lease's routes and addresses. Missing ones are no error.
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

// Replace sets a route. It replaces an existing route to the same destination, even if that one uses another link.
func Replace(ctx context.Context, routes *route.Conn, r route.Route) error {
	_, err := routes.Ensure(ctx, r)
	return err
}

// ReplaceOwn returns a function that sets a route of a pod's lease. The function replaces only routes in had, which
// came from the lease before. If any other route to the destination exists, it belongs to the pod's owner, and the
// function changes nothing.
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

// Keeps returns those addresses and routes in a that still exist on the pod's interface. It does not check the MTU.
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

// Lifetime converts left, the remaining time of a lease, into a lifetime for the kernel. The result is not shorter
// than the parameter least, since the kernel refuses a valid lifetime of 0 s. If left is negative, Lifetime returns
// nil, which means for ever. It limits the result, because the kernel takes the largest number of seconds to mean for
// ever.
func Lifetime(left, least time.Duration) *time.Duration {
	if left < 0 {
		return nil
	}
	left = min(max(left, least), (math.MaxUint32-1)*time.Second)
	return &left
}
