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

// Moved tells the Node that another program moves the pod's interface into the namespace at path. path is empty if
// that namespace is not known yet. In the namespace, the interface has IfName as its alternative name. The other
// program gives it its addresses and routes.
//
// Until the interface has arrived, Check and Inspect do not compare the pod, and Moved returns ErrTryAgain unless
// path is empty. Once it has arrived, Moved writes the namespace into the records. It removes default routes from the
// record, since the other program may give them to another interface. Moved needs CAP_NET_ADMIN, and CAP_SYS_ADMIN to
// enter the namespace.
func (c Change) Moved(ctx context.Context, path string) error {
	a, err := c.node.loadAttachment(c.key)
	if err != nil {
		return err
	}

	cookie, late := findArrival(ctx, a, path)
	if path != "" && a.NetNS == path && (cookie == 0 || cookie == a.NetNSCookie) {
		return late
	}

	if cookie != 0 {
		err = moveLease(ctx, a, path, cookie)
	}

	if err == nil {
		err = c.do(ctx, func(s *session, _, next *state.Attachment) error {
			next.NetNS, next.NetNSCookie = path, cookie
			if cookie != 0 { // 0 means that Docker is still moving the interface
				isDefault := func(r route.Route) bool { return isDefault(&r) }
				next.Routes = slices.DeleteFunc(slices.Clone(next.Routes), isDefault)
				if err := errors.Join(s.completeNextHops(ctx, next), s.hearRouters(ctx, next)); err != nil {
					return err
				}
			}

			if err := s.Dir.UpdateLocked(next); err != nil || next.DefaultRoute == "" {
				return err
			}
			return s.linkSiblings(ctx, next)
		})
	}

	return cmp.Or(err, late)
}

// hearRouters makes a pod whose interface was moved accept router advertisements, and ask for one. It also adds the
// IPv6 default route through the host, if the network has one. For such a pod Add does neither, because an existing
// default route could be in the way of the program that moves the interface.
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

	err = route.On(conn).Add(ctx,
		route.Route{Gateway: hostNextHop(true), Link: l.Index, Protocol: route.ProtocolTombolo})
	if errors.Is(err, fs.ErrExist) {
		return nil // another interface has the default route
	}

	return err
}

// moveLease writes the new namespace into the record of an attachment's lease, so that the keeper checks all
// addresses and routes of the interface there.
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

// settles limits how long after its Add a pod is expected to get a default route. It may never get one.
const settles = 10 * time.Second

// findArrival returns the cookie of the namespace at path if the pod's interface is up there. If the pod should have a
// default route, that must exist too. Otherwise it returns 0 and an error. It waits for the default route because the
// program that adds it would fail if the route existed already. A pod with a lease is expected to get a default
// route.
func findArrival(ctx context.Context, a *state.Attachment, path string) (cookie uint64, late error) {
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

	// With SLAAC, the kernel may already have added an IPv6 default route after a router advertisement. So such a
	// route does not show that the runtime has added its own.
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
