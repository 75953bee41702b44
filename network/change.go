package network

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io/fs"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// Chained CNI plugins and tombolod's Docker driver change existing attachments. New host ports and limits are recorded
// before they are made, as if the attachment's Add had requested them. So a Del finds the work of a killed call by the
// record.

// loadAttachment returns the record of an attachment. If there is none, or its Add is not complete, the error matches
// ErrNotAttached. A runtime calls a chained plugin's DEL even if the ADD of an earlier plugin failed. In that case
// the chained plugin has changed nothing.
func (n *Node) loadAttachment(key Key) (*state.Attachment, error) {
	if err := key.check(); err != nil {
		return nil, err
	}

	rec, err := n.cfg.Dir.Load(key.Network, key.hash())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil,
			failf(ErrNotAttached, "container %s has no attachment %s to network %q on record: DEL it and ADD it again",
				key.ContainerID, key.IfName, key.Network)
	case err != nil:
		return nil, stateError(err)
	case rec.State != state.Ready:
		return nil,
			failf(ErrNotAttached, "the ADD of container %s did not finish: DEL it and ADD it again", key.ContainerID)
	}

	return rec, nil
}

// Change makes changes to a complete attachment. Chained CNI plugins and tombolod's Docker driver use it.
type Change struct {
	node *Node
	key  Key
}

// Change returns a Change for an existing attachment.
func (n *Node) Change(key Key) Change { return Change{n, key} }

// do locks the attachment's record, and takes the state directory's lock, shared. It then calls its argument, also
// named do, with the record and with a copy that the function may change and write.
func (c Change) do(ctx context.Context, do func(s *session, a, next *state.Attachment) error) error {
	n := c.node
	if _, err := n.loadAttachment(c.key); err != nil {
		return err
	}

	lock, err := n.cfg.Dir.LockAttachment(c.key.Network, c.key.hash())
	if err != nil {
		return stateError(err)
	}
	defer lock.Close()
	a, err := n.loadAttachment(c.key)
	if err != nil {
		return err
	}

	next := *a
	return n.withEntered(ctx, func(s *session) error { return do(s, a, &next) })
}

// Tuned tells the Node that another program gives a pod's interface a new MAC, or a new MTU in bytes. A nil mac and an
// mtu of 0 mean that the value is unchanged. Tuned records the MAC, and updates the pod's guard (anti-spoofing rules).
// It records an MTU only if it is larger than the port's, and raises the port's MTU then.
//
// If RefuseMAC refuses the MAC, Tuned returns the same error. The error matches ErrNotAttached if there is no complete
// attachment. Tuned needs CAP_NET_ADMIN.
func (c Change) Tuned(ctx context.Context, mac net.HardwareAddr, mtu int) error {
	if len(mac) != 0 && len(mac) != 6 || mtu < 0 {
		return failf(ErrInvalid, "MAC %s and MTU %d cannot be an interface's", mac, mtu)
	}

	return c.do(ctx, func(s *session, a, next *state.Attachment) error {
		if mac != nil {
			next.MAC = state.MAC(mac)
		}

		changes := !bytes.Equal(next.MAC, a.MAC)
		if err := s.refuseNewMAC(ctx, a, mac); err != nil {
			return err
		}

		if mtu > a.MTU && a.MTU > 0 {
			next.MTU = mtu
			if err := s.Links.SetPortMTU(ctx, a.HostIf, mtu); err != nil {
				return err
			}
		}

		if !changes && next.MTU == a.MTU {
			return nil
		}

		if changes {
			if err := s.Firewall.Move(ctx, endpoint.Of(a), endpoint.Of(next)); err != nil {
				return err
			}
			if err := s.completeNextHops(ctx, next); err != nil {
				return err
			}
		}

		return s.Dir.UpdateLocked(next)
	})
}

// refuseNewMAC returns an error if an attachment cannot change its MAC to mac. A nil mac means no change.
func (s *session) refuseNewMAC(ctx context.Context, a *state.Attachment, mac net.HardwareAddr) error {
	if mac == nil || bytes.Equal(mac, a.MAC) {
		return nil
	}

	if a.Guard == nft.GuardUntrusted || a.SLAAC || a.IPAMType == endpoint.Leased {
		return failf(ErrInvalid,
			"interface %s has its lease by its MAC, or is known by it on its LAN, so it cannot change from %s to %s: "+
				"request the MAC at ADD (the capability mac, or args.cni.mac)", a.IfName, a.MAC, mac)
	}

	rec, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		return stateError(err)
	}

	n := &site{s: s, rec: rec}
	if err := n.find(ctx); err != nil {
		return err
	}

	return n.refuseMAC(ctx, mac, endpoint.Addresses(a)...)
}

// Check compares an attachment's record with the arguments of Publish and Limit. It does not compare a nil argument,
// and does not look at the kernel: see Node.Check. If there is no complete attachment, the error matches
// ErrNotAttached.
func (c Change) Check(ctx context.Context, ports *Publication, limits *bandwidth.Shape) ([]tombolo.Difference, error) {
	a, err := c.node.loadAttachment(c.key)
	if err != nil {
		return nil, err
	}

	found := &findings{}
	if ports != nil {
		if a.PortSNAT != ports.SNAT {
			found.add("calls of its ports come from the host's address as by %s, unlike the request",
				a.PortSNAT)
		}
		for _, p := range endpoint.Published(ports.Ports) {
			if !slices.ContainsFunc(a.Published,
				func(has state.Published) bool { has.Withheld = false; return has == p }) {
				found.add("port %s of the host does not lead to the pod", endpoint.PortText(p.Port))
			}
		}
	}

	if limits != nil {
		want, _, err := limits.Effective(max(a.MTU, 1))
		if err != nil {
			return nil, err
		}
		if a.Bandwidth != want {
			found.add("the limits are %+v, where %+v was requested", a.Bandwidth, want)
		}
	}

	return found.list, nil
}

// Moved tells the Node that another program moves the pod's interface into the namespace at path. path is empty if
// that namespace is not known yet. In the namespace, the interface has IfName as its alternative name. The other
// program gives it its addresses and routes.
//
// Until the interface has arrived, Inspect does not compare the attachment, and Moved returns ErrTryAgain unless path
// is empty. Once it has arrived, Moved writes the namespace into the records. It removes default routes from the
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

// hearRouters makes a SLAAC pod whose interface was moved accept router advertisements, and ask for one. It also adds
// the IPv6 default route through the host, if the network has one and the pod has no other. For such a pod Add does
// neither, because an existing default route could be in the way of the program that moves the interface.
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

	if err := solicitation.Close(); err != nil || a.DefaultRoute != exitHost || a.NoDefaultRoute {
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

// leaseLockWait limits the wait for the lock of a lease's record.
const leaseLockWait = 5 * time.Second

// moveLease writes the new namespace into the record of an attachment's lease, if it has one. tombolod then checks all
// addresses and routes of the interface there.
func moveLease(ctx context.Context, a *state.Attachment, path string, cookie uint64) error {
	if a.IPAMType != endpoint.Leased {
		return nil
	}

	dir, err := lease.Open(a.DataDir)
	if err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(ctx, leaseLockWait)
	defer cancel()
	lock, err := dir.Lock(ctx, a.Hash())
	if err != nil {
		return err
	}
	defer lock.Close()
	rec, err := lock.Load()
	if err == nil {
		rec.NetNS, rec.NetNSCookie = path, cookie
		err = lock.Create(rec)
	}
	return err
}

// settles is the time after an Add in which its pod is expected to get a default route. After that, findArrival no
// longer waits for the route, since the pod may never get one.
const settles = 10 * time.Second

// findArrival returns the cookie of the namespace at path if the pod's interface has arrived there: it is up, and the
// namespace has a default route if the pod should have one. If it has not arrived, findArrival returns 0 and an error.
// If path is empty, because the namespace is not known yet, it returns 0 and no error. If path is still the recorded
// namespace, it returns that cookie.
//
// A pod should have a default route if it has a lease, or if its record lists one. findArrival requires the route until
// the time settles is over, because the runtime could not add its own after Tombolo has added one.
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
	l, linkErr := link.Find(context.Background(), conn, a.IfName, 0)

	// With SLAAC, the kernel may already have added an IPv6 default route after a router advertisement. So such a
	// route does not show that the runtime has added its own.
	isExpected := func(r route.Route) bool { return isDefault(&r) && (r.Gateway.Is4() || !a.SLAAC) }
	expects := a.IPAMType == endpoint.Leased || slices.ContainsFunc(a.Routes, isExpected)
	found := !expects || time.Since(a.Created) > settles
	err = route.On(conn).Walk(ctx, route.Filter{Table: unix.RT_TABLE_MAIN},
		func(r route.Route) { found = found || isExpected(r) })
	if err = cmp.Or(nl.PassAbsent(linkErr), err); err != nil || !l.Up() || !found {
		return 0, cmp.Or(err,
			failf(ErrTryAgain, "interface %s is not in %s yet, or not set up there", a.IfName, pod))
	}

	return cookie, nil
}
