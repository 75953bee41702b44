package network

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// Moved announces that another program moves the pod's interface into the namespace at path, with IfName as its
// alternative name, and gives it its addresses and routes. path is empty if that namespace is not known yet. While
// the interface is not there, the pod is not compared, and the error is ErrTryAgain unless path is empty. Afterwards
// the records are about that namespace. They no longer contain default routes, since that program may give them to
// another interface. Moved needs CAP_NET_ADMIN, and CAP_SYS_ADMIN to enter the namespace.
func (c Change) Moved(ctx context.Context, path string) error {
	a, err := c.node.attached(ctx, c.key)
	if err != nil {
		return err
	}

	cookie, late := arrived(ctx, a, path)
	if path != "" && a.NetNS == path && (cookie == 0 || cookie == a.NetNSCookie) {
		return late
	}

	if cookie != 0 {
		err = moveLease(ctx, a, path, cookie)
	}

	if err == nil {
		err = c.do(ctx, func(s *session, _, next *state.Attachment) error {
			next.NetNS, next.NetNSCookie = path, cookie
			if cookie != 0 { // else the interface is on its way there
				isDefault := func(r route.Route) bool { return isDefault(&r) }
				next.Routes = slices.DeleteFunc(slices.Clone(next.Routes), isDefault)
				if err := errors.Join(s.completeNextHops(ctx, next), s.hearRouters(ctx, next)); err != nil {
					return err
				}
			}

			if err := s.Dir.UpdateLocked(next); err != nil || next.DefaultRoute == "" {
				return err
			}
			return s.meet(ctx, next)
		})
	}

	return cmp.Or(err, late)
}

// hearRouters makes a pod whose interface was moved accept router advertisements, and ask for one. It adds the
// default route through the host, because a router's route could be in the way of the program that moved the
// interface.
func (s *session) hearRouters(ctx context.Context, a *state.Attachment) error {
	port := portOf(a)
	if port.Autoconf == nil {
		return nil
	}

	pod, err := netns.OpenSame(a.NetNS, a.NetNSCookie)
	if err != nil {
		return err
	}
	defer pod.Close()
	port.LeaveIPv6 = true
	solicitation, err := s.Links.Solicit(ctx, pod, port)
	if err != nil {
		return err
	}

	if err := solicitation.Close(); err != nil || a.DefaultRoute != exitHost {
		return err
	}

	conn, l, err := s.dialPod(ctx, a, pod)
	if err != nil {
		return err
	}
	defer conn.Close()

	err = route.On(conn).Add(ctx, route.Route{Gateway: hostHop(true), Link: l.Index, Protocol: route.ProtocolTombolo})
	if errors.Is(err, fs.ErrExist) {
		return nil // another interface has the default route
	}

	return err
}

// moveLease updates the record of an attachment's lease, so that the keeper checks all addresses and routes of the
// interface.
func moveLease(ctx context.Context, a *state.Attachment, path string, cookie uint64) error {
	if a.IPAMType != endpoint.Leased {
		return nil
	}

	lock, err := lockLease(ctx, a)
	if err != nil {
		return err
	}
	defer lock.Close()
	rec, err := lock.Load()
	if err != nil {
		return err
	}

	rec.NetNS, rec.NetNSCookie = path, cookie
	return lock.Create(rec)
}

// settles is how long after its Add a pod is expected to get a default route. It may have none.
const settles = 10 * time.Second

// arrived returns the cookie of the namespace at path when a pod's interface is up there, and the pod has its default
// route if it should have one. A program that adds the route later would fail if it existed already. A pod with a
// lease is assumed to have one.
func arrived(ctx context.Context, a *state.Attachment, path string) (cookie uint64, late error) {
	if path == "" {
		return 0, nil
	}

	pod, err := netns.Open(path)
	if err != nil {
		return 0, failf(ErrTryAgain, "%w", err)
	}
	defer pod.Close()
	if cookie, err = pod.Cookie(); err != nil || cookie == a.NetNSCookie {
		return cookie, err
	}

	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	l, err := link.Find(conn, a.IfName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}

	// The kernel may already have one for IPv6 from a router.
	isExpected := func(r route.Route) bool { return isDefault(&r) && (r.Gateway.Is4() || !a.SLAAC) }
	expects := a.IPAMType == endpoint.Leased || slices.ContainsFunc(a.Routes, isExpected)
	found := !expects || time.Since(a.Created) > settles
	err = route.On(conn).Walk(ctx, route.Filter{Table: unix.RT_TABLE_MAIN},
		func(r route.Route) { found = found || isExpected(r) })
	if err != nil || !l.Up() || !found {
		return 0, cmp.Or(err,
			failf(ErrTryAgain, "interface %s is not in %s yet, with what it is to have", a.IfName, pod))
	}

	return cookie, nil
}
