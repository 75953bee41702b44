package network

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// The inside of a pod belongs to the pod, its runtime, and the plugins that run after Add. This file only reads it.

// dialPod opens a connection into a pod's namespace, and finds the pod's interface, whatever its name is now.
func (s *session) dialPod(ctx context.Context, a *state.Attachment, pod *netns.NS) (*nl.Conn, *link.Info, error) {
	port, err := s.link(ctx, a.HostIf)
	if err != nil {
		return nil, nil, err
	}

	conn, err := nl.Dial(unix.NETLINK_ROUTE, pod)
	if err != nil {
		return nil, nil, err
	}

	l, err := link.Peer(conn, port.Peer, port.Index)
	if err != nil {
		conn.Close()
	}
	return conn, l, err
}

// inside lists the differences between the pod's interface and p.want. Additional addresses and routes are no
// difference, and a route may be in any table. If the port or the namespace is gone, inside returns no differences.
func (p *podSite) inside(ctx context.Context) (list []tombolo.Difference, _ error) {
	if p.gone || p.pod == nil {
		return nil, nil
	}

	conn, l, err := p.s.dialPod(ctx, p.Attachment, p.pod)
	if errors.Is(err, fs.ErrNotExist) {
		return []tombolo.Difference{{Object: "pod", What: "interface", Want: p.IfName}}, nil
	}

	if err != nil {
		return nil, err
	}
	defer conn.Close()

	named, err := link.IndexOf(conn, p.IfName) // also by an alternative name, as Docker uses
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}

	differs := func(is bool, what, want, have string) {
		if is {
			list = append(list, tombolo.Difference{Object: "interface " + p.IfName, What: what, Want: want, Have: have})
		}
	}
	want := &p.want
	differs(named != l.Index, "name", want.Peer, l.Name)
	differs(!l.Up() && !want.Down, "link", "up", "down")
	// A lease may lower the MTU.
	hasMTU := want.MTU == 0 || l.MTU == want.MTU || l.MTU < want.MTU && p.IPAMType == endpoint.Leased
	differs(!hasMTU, "MTU", strconv.Itoa(want.MTU), strconv.Itoa(l.MTU))
	differs(want.PeerMAC != nil && !bytes.Equal(want.PeerMAC, l.MAC), "MAC", want.PeerMAC.String(), l.MAC.String())

	for _, n := range want.Neighbours {
		has, err := routing.Find(conn, l.Index, n.Addr)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		differs(!bytes.Equal(has.MAC, n.MAC), "neighbour "+n.Addr.String(), n.MAC.String(), has.MAC.String())
	}

	have, err := addr.On(conn).List(ctx, addr.Filter{Link: l.Index})
	if err != nil {
		return nil, err
	}

	for _, a := range want.Addresses {
		differs(!has(have, a), "address", a.String(), "")
	}

	routes, instead := slices.Clone(want.Routes), map[netip.Prefix]string{}
	err = route.On(conn).Walk(ctx, route.Filter{}, func(has route.Route) { // a pod may have any number
		if isDefault(&has) {
			shown := has
			if shown.Link == l.Index {
				shown.Link = 0
			}
			instead[destination(has)] = shown.String()
		}

		routes = slices.DeleteFunc(routes, func(want route.Route) bool {
			anywhere := !want.Gateway.IsValid() || p.anyDefault && want.Dst.Bits() <= 0
			toGateway := func(hop route.Nexthop) bool { return hop.Gateway == want.Gateway }
			return destination(want) == destination(has) &&
				(anywhere || want.Gateway == has.Gateway || slices.ContainsFunc(has.Nexthops, toGateway))
		})
	})

	for _, r := range routes {
		differs(true, "route", r.String(), instead[destination(r)]) // only default routes have an entry in instead
	}

	return list, err
}

// destination returns a route's destination. If Dst is not set, the route is a default route, and destination returns
// 0.0.0.0/0 or ::/0.
func destination(r route.Route) netip.Prefix {
	if r.Dst.IsValid() {
		return r.Dst.Masked()
	}
	if r.Gateway.Is4() || r.Family == unix.AF_INET {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}
