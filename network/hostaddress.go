package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/route"
)

// hostAddresses are the host's own addresses on a bridge, in the subnet of a pod's address.
func hostAddresses(ctx context.Context, links *bridge.Conn, l *bridge.Link, pod netip.Prefix) ([]netip.Addr, error) {
	all, err := links.Addresses().List(ctx, addr.Filter{Link: l.Index, Family: nl.FamilyOf(pod.Addr())})
	if err != nil {
		return nil, err
	}
	var list []netip.Addr
	for _, a := range all {
		own := a.Prefix.Addr()
		if pod.Contains(own) && own != pod.Addr() && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0 {
			list = append(list, own)
		}
	}
	return list, nil
}

// hostAddress is the first of them, for a pod that is to have its default route by it; nic is the
// uplink of the bridge, if any.
func hostAddress(ctx context.Context, s *session, nic string, l *bridge.Link, pod netip.Prefix) (netip.Addr, error) {
	own, err := hostAddresses(ctx, s.Links, l, pod)
	if err == nil && len(own) == 0 && nic != "" {
		// A network manager may have put it back on the NIC.
		if err = s.Uplinks().Mend(ctx, nic, nil); err == nil {
			own, err = hostAddresses(ctx, s.Links, l, pod)
		}
	}
	if err == nil && len(own) == 0 {
		err = fail.Errorf(ErrNoGateway, `defaultRoute "host": the host has no address on bridge %s in %s, the subnet of the pod's address: give it one, or set defaultRoute to "router"`, l.Name, pod.Masked())
	}
	if err != nil {
		return netip.Addr{}, err
	}
	return own[0], nil
}

// follow has the default routes of pods on a LAN lead to the host's addresses of now, in the pods and on record: a DHCP
// server, or an administrator, may give the host others while pods run. It goes on past pods for which that cannot be
// done. Where the host has none in the pod's subnet, the pod's route stays as it is: there may be one again. The state's
// lock must not be held: a lease's comes before it, and its record is on a disk.
func follow(ctx context.Context, s *session, attachments []*state.Attachment) error {
	var errs []error
	for _, a := range attachments {
		if a.State != state.Ready || a.DefaultRoute != exitHost {
			continue
		}
		if err := followOne(ctx, s, a); err != nil {
			errs = append(errs, fmt.Errorf("lead the default route of container %s to the host's address: %w", a.ContainerID, err))
		}
	}
	return errors.Join(errs...)
}

// followOne does it for one pod, whose record it locks. The record is written last: a call
// that is stopped before that leaves it to the next.
func followOne(ctx context.Context, s *session, a *state.Attachment) error {
	lock, err := s.Dir.LockAttachment(a.Network, a.Hash())
	if errors.Is(err, fs.ErrNotExist) {
		return nil // its pod has gone
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if a, err = s.Dir.Load(a.Network, a.Hash()); err != nil || a.State != state.Ready {
		return err
	}
	l, err := s.link(ctx, a.Bridge)
	if err != nil || l.Index == 0 {
		return err
	}
	changed := false
	for _, address := range a.Addresses {
		was, is := a.HostGateways[address.Prefix]
		if !is {
			continue
		}
		own, err := hostAddresses(ctx, s.Links, l, address.Prefix)
		if err != nil {
			return err
		}
		if len(own) == 0 || slices.Contains(own, was) {
			continue
		}
		if err := leadTo(ctx, s, a, was, own[0]); err != nil {
			return err
		}
		a.HostGateways[address.Prefix], changed = own[0], true
		for i := range a.Routes {
			if r := &a.Routes[i]; r.Dst.Bits() <= 0 && r.Gateway == was {
				r.Gateway = own[0]
			}
		}
	}
	if !changed {
		return nil
	}
	if err := s.Enter(ctx); err != nil {
		return err
	}
	defer s.Leave()
	return s.Dir.UpdateLocked(a)
}

// leadTo replaces a default route of a pod that leads to an address of the host, if the pod still has it as Add made
// it. The record of a lease has the route too, for the keeper.
func leadTo(ctx context.Context, s *session, a *state.Attachment, was, own netip.Addr) error {
	pod, err := netns.OpenSame(a.NetNS, a.NetNSCookie)
	if err != nil {
		return err
	}
	defer pod.Close()
	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return err
	}
	defer conn.Close()
	l, err := peerOf(ctx, s, a, conn)
	if err != nil {
		return err
	}

	routes := route.On(conn)
	list, err := routes.List(ctx, route.Filter{Family: nl.FamilyOf(own), Table: unix.RT_TABLE_MAIN, Link: l.Index})
	if err != nil {
		return err
	}
	has := false
	for _, r := range list {
		switch {
		case r.Dst.Bits() != 0:
		case r.Gateway == own: // by a call that was killed
			has = true
		case r.Gateway == was:
			n := r
			n.Gateway, n.Flags, has = own, 0, true
			if err := replaceRoute(ctx, routes, r, n); err != nil {
				return err
			}
		}
	}
	if a.IPAMType != endpoint.Leased || was.Is6() {
		return nil
	}
	return leadLease(ctx, a, conn, l.Index, own, has)
}

// replaceRoute replaces a route by one of the same destination. For IPv6, the kernel would add it beside.
func replaceRoute(ctx context.Context, routes *route.Conn, old, next route.Route) error {
	if err := routes.Replace(ctx, next); err != nil {
		return err
	}
	return routes.Remove(ctx, old)
}

// routeThroughHost adds the default routes that were left to the network.
func (a *adding) routeThroughHost(ctx context.Context) error {
	if !a.leadsToHost() {
		return nil
	}
	asked := slices.Clip(a.given.routes)
	for _, address := range a.given.addresses {
		if hasDefault(asked, address.Prefix.Addr()) {
			continue
		}
		own, err := hostAddress(ctx, a.s, a.nw.Uplink.NIC, a.built.bridge, address.Prefix)
		if err != nil {
			return err
		}
		a.given.routes = append(slices.Clip(a.given.routes), defaultBy(own))
		if a.given.hosts == nil {
			a.given.hosts = map[netip.Prefix]netip.Addr{}
		}
		a.given.hosts[address.Prefix] = own
	}
	return a.derive(ctx)
}

// leadsToHost says whether the pod's default route is to be by the host's address.
func (a *adding) leadsToHost() bool { return a.nw.Exit == ExitHost && !a.nw.NoDefaultRoute }
