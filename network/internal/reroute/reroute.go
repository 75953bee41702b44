// Package reroute has the routes that pods get, and has the default routes of those on a LAN lead to
// the address that the host has now.
package reroute

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/dhcplease"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/route"
)

// HostAddresses are the host's own addresses on a bridge in the subnet of a pod's.
func HostAddresses(links *bridge.Conn, l *bridge.Link, pod netip.Prefix) ([]netip.Addr, error) {
	family := uint8(unix.AF_INET)
	if pod.Addr().Is6() {
		family = unix.AF_INET6
	}
	all, err := links.Addresses().List(addr.Filter{Link: l.Index, Family: family})
	if err != nil {
		return nil, err
	}
	var list []netip.Addr
	for _, a := range all {
		own := a.Prefix.Addr()
		if pod.Contains(own) && own != pod.Addr() && a.Flags&(addr.Tentative|addr.DADFailed) == 0 {
			list = append(list, own)
		}
	}
	return list, nil
}

// The default route of a pod on a LAN leads to an address of the host's, which is not the
// pod's to choose: a DHCP server, or an administrator, may give the host another while
// the pod runs. Then the route is replaced, in the pod, and on record where it is.

// Follow has the default routes of pods lead to the host's addresses of now. It goes on
// past pods for which that cannot be done. Where the host has none in the pod's subnet, the
// pod's route stays as it is: there may be one again. The state's lock must not be held: a
// lease's comes before it, and its record is on a disk.
func Follow(ctx context.Context, s *session.Session, attachments []*state.Attachment) error {
	var errs []error
	for _, a := range attachments {
		if a.State != state.Ready || a.DefaultRoute != recorded.ExitHost {
			continue
		}
		if err := Attachment(ctx, s, a); err != nil {
			errs = append(errs, fmt.Errorf("lead the default route of container %s to the host's address: %w", a.ContainerID, err))
		}
	}
	return errors.Join(errs...)
}

// Attachment does it for one pod, whose record it locks. The record is written last: a call
// that is stopped before that leaves it to the next.
func Attachment(ctx context.Context, s *session.Session, a *state.Attachment) error {
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
	l, err := s.Links.Link(ctx, a.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	changed := false
	for _, address := range a.Addresses {
		was := a.HostGateways.Of(address.Prefix).Host
		if !was.IsValid() {
			continue
		}
		own, err := HostAddresses(s.Links, l, address.Prefix)
		if err != nil {
			return err
		}
		if len(own) == 0 || slices.Contains(own, was) {
			continue
		}
		if err := leadTo(ctx, a, was, own[0]); err != nil {
			return err
		}
		a.HostGateways.Set(address.Prefix, own[0])
		changed = true
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

// leadTo replaces a default route of a pod's that leads to an address of the host's. That of a lease is on the
// lease's record too, by which the keeper renews it.
func leadTo(ctx context.Context, a *state.Attachment, was, own netip.Addr) error {
	pod, link, err := openPod(ctx, a)
	if err != nil {
		return err
	}
	defer pod.Close()
	routes, err := route.Dial(&route.Config{NetNS: pod})
	if err != nil {
		return err
	}
	defer routes.Close()
	if a.IPAMType == endpoint.Leased && was.Is4() {
		return dhcplease.Lead(ctx, a, routes, link, own)
	}
	list, err := routes.List(route.Filter{Family: familyOf(own), Table: route.TableMain, Link: link})
	if err != nil {
		return err
	}
	for _, r := range list {
		// One that a program in the pod has made of it since is the pod's own.
		if r.Dst.Bits() == 0 && r.Gateway == was {
			n := r
			n.Gateway, n.Flags = own, 0
			if err := replace(routes, r, n); err != nil {
				return err
			}
		}
	}
	return nil
}

func familyOf(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// replace takes a route's place with another of the same destination. For IPv6, the
// kernel would add it beside.
func replace(routes *route.Conn, old, next route.Route) error {
	if err := routes.Replace(next); err != nil {
		return err
	}
	return routes.Remove(old)
}

// openPod opens a pod's namespace, and gives the index of its interface. A path may name
// another pod's by now.
func openPod(ctx context.Context, a *state.Attachment) (*netns.NS, int, error) {
	pod, err := netns.Open(a.NetNS)
	if err != nil {
		return nil, 0, err
	}
	link, err := linkOf(ctx, pod, a)
	if err != nil {
		return nil, 0, errors.Join(err, pod.Close())
	}
	return pod, link, nil
}

func linkOf(ctx context.Context, pod *netns.NS, a *state.Attachment) (int, error) {
	if a.NetNSCookie != 0 {
		cookie, err := pod.Cookie()
		if err != nil {
			return 0, err
		}
		if cookie != a.NetNSCookie {
			return 0, fmt.Errorf("%s is another pod's by now", a.NetNS)
		}
	}
	conn, err := bridge.Dial(&bridge.Config{NetNS: pod})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	l, err := conn.Link(ctx, a.IfName)
	if err != nil {
		return 0, err
	}
	if mac, err := net.ParseMAC(a.MAC); a.NetNSCookie == 0 && (err != nil || l.MAC.String() != mac.String()) {
		return 0, fmt.Errorf("%s in %s has MAC %s, and the pod's had %s: the interface is another one now", a.IfName, a.NetNS, l.MAC, a.MAC)
	}
	return l.Index, nil
}
