package network

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/dhcpc"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/route"
)

// Moved tells that another program has moved the pod's interface into the namespace at path, with IfName as its
// alternative name, and has given it its addresses and routes: from then on the records are of that namespace.
// Default routes are on record no more, since that program may let another interface have them. While the interface is
// not there yet, the error is ErrTryAgain. It needs CAP_NET_ADMIN, and CAP_SYS_ADMIN to enter the namespace.
func (c Change) Moved(ctx context.Context, path string) error {
	if err := c.node.usableFor(ctx, c.key); err != nil {
		return err
	}
	pod, err := netns.Open(path)
	if err != nil {
		return fail.Errorf(ErrTryAgain, "%w", err)
	}
	defer pod.Close()
	cookie, err := pod.Cookie()
	if err != nil {
		return err
	}
	return c.do(ctx, func(s *session, a, next *state.Attachment) error {
		s.Leave() // a lease's lock comes before the state's
		if err := moveLease(ctx, pod, a, path, cookie); err != nil {
			return err
		}
		next.NetNS, next.NetNSCookie = path, cookie
		next.Routes = slices.DeleteFunc(slices.Clone(a.Routes), func(r route.Route) bool { return isDefault(&r) })
		if err := s.Enter(ctx); err != nil {
			return err
		}
		return errors.Join(s.Dir.UpdateLocked(next), repairPod(ctx, s, next))
	})
}

// moveLease waits for an attachment's interface, and writes the record of its lease, where it has one, anew, so that
// the keeper looks at all that the interface is to have.
func moveLease(ctx context.Context, pod *netns.NS, a *state.Attachment, path string, cookie uint64) error {
	if a.IPAMType != endpoint.Leased {
		return arrived(ctx, pod, a, slices.ContainsFunc(a.Routes, func(r route.Route) bool { return isDefault(&r) }))
	}
	held, err := lockLease(ctx, a)
	if err != nil {
		return err
	}
	defer held.Close()
	rec, err := held.Load()
	if err != nil {
		return err
	}
	leads := slices.ContainsFunc(rec.Applied.Routes, func(r dhcpc.Route) bool { return r.Dst.Bits() == 0 })
	if err := arrived(ctx, pod, a, leads); err != nil {
		return err
	}
	rec.NetNS, rec.NetNSCookie = path, cookie
	return held.Create(rec)
}

// settles is how long a pod is waited for to get a default route after its Add: it may be that it has none.
const settles = 10 * time.Second

// arrived says that a pod's interface is up, and that the pod has its default route if it is to have one: a program that
// adds it later fails where it is there.
func arrived(ctx context.Context, pod *netns.NS, a *state.Attachment, leads bool) error {
	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return err
	}
	defer conn.Close()
	var b nl.Batch
	var l link.Link
	link.Get(&b, a.IfName, 0, &l)
	if err := conn.Execute(&b); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	led := !leads || time.Since(a.Created) > settles
	err = route.On(conn).Walk(ctx, route.Filter{Table: unix.RT_TABLE_MAIN}, func(r route.Route) { led = led || isDefault(&r) })
	if err == nil && (!l.Up() || !led) {
		err = fail.Errorf(ErrTryAgain, "interface %s is not in %s yet, with what it is to have", a.IfName, pod)
	}
	return err
}
