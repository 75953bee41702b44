package lease

import (
	"context"
	"errors"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/route"
)

// Link is the interface of a pod that has what a lease comes to.
type Link struct {
	Conn     *nl.Conn // of the pod's namespace
	Index    int
	Name     string
	Priority int // the metric of routes
}

// Apply gives the pod addresses, for as long as they are valid and preferred (as dhcpc.Lease.Left has it), so that the
// kernel itself ends them if everything of ours dies. It sets the MTU unless that is 0: the pod's alone, since the
// host's bridge is not the server's. Each route is made by set.
func (l *Link) Apply(ctx context.Context, a Applied, valid, preferred time.Duration, set func(context.Context, *route.Conn, route.Route) error) error {
	var errs []error
	if a.MTU != 0 {
		var b nl.Batch
		link.Request{Name: l.Name, MTU: &a.MTU}.Set(&b, "set MTU of link", l.Name)
		errs = append(errs, l.Conn.Execute(&b))
	}
	for _, p := range a.Addresses {
		own := addr.Address{Link: l.Index, Prefix: p, Broadcast: addr.Broadcast(p), Valid: Lifetime(valid, time.Second), Preferred: Lifetime(preferred, 0)}
		errs = append(errs, addr.On(l.Conn).Replace(ctx, own))
	}
	for _, r := range a.Routes {
		errs = append(errs, set(ctx, route.On(l.Conn), RouteOf(r, l.Index, l.Priority)))
	}
	return errors.Join(errs...)
}

// Withdraw takes routes and addresses away. It is no error if they are gone.
func (l *Link) Withdraw(ctx context.Context, a Applied) error {
	var errs []error
	for _, r := range slices.Backward(a.Routes) {
		errs = append(errs, route.On(l.Conn).Remove(ctx, RouteOf(r, l.Index, l.Priority)))
	}
	for _, p := range a.Addresses {
		errs = append(errs, addr.On(l.Conn).Remove(ctx, addr.Address{Prefix: p, Link: l.Index}))
	}
	return errors.Join(errs...)
}

// Replace has a route replace what is in its place, of whichever link.
func Replace(ctx context.Context, routes *route.Conn, r route.Route) error {
	_, err := routes.Ensure(ctx, r)
	return err
}

// ReplaceOwn is Replace that leaves a route of another link of the pod's alone: Docker moves the default route from one
// interface to another without telling.
func ReplaceOwn(ctx context.Context, routes *route.Conn, r route.Route) error {
	others := false
	err := routes.Walk(ctx, route.Filter{Table: unix.RT_TABLE_MAIN}, func(have route.Route) {
		others = others || have.Dst == r.Dst && have.Priority == r.Priority && have.Link != r.Link
	})
	if others || err != nil {
		return err
	}
	return Replace(ctx, routes, r)
}

// Lifetime returns a lifetime for the kernel: left, but no less than least. A left below 0 is for ever, which is nil.
// The kernel refuses a valid lifetime of 0 s, and takes the largest number of seconds to mean for ever.
func Lifetime(left, least time.Duration) *time.Duration {
	if left < 0 {
		return nil
	}
	left = min(max(left, least), (math.MaxUint32-1)*time.Second)
	return &left
}
