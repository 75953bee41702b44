package network

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/route"
)

// portPart implements podPart for the host's end of a pod's veth pair, which is a port of the bridge.
type portPart struct{}

// look compares the port with the record. If the port is gone, look sets p.gone, and replaces all findings about the
// pod by one about the port.
func (portPart) look(ctx context.Context, p *podSite) error {
	diffs, err := p.s.Links.Check(ctx, p.port)
	if err != nil {
		return err
	}

	p.gone = len(diffs) > 0 && diffs[0].What == "link" && diffs[0].Have == "" && diffs[0].Want == p.port.Name
	switch {
	case p.gone && p.lost != nil:
		p.found.list = nil
		p.found.advise(tombolo.RemedyCollect, "it is dead: port %s is missing, and its namespace is gone: %v",
			p.port.Name, p.lost)
		return nil
	case p.gone:
		p.found.list = nil
		p.found.addAll(diffs[:1], tombolo.RemedyRecreate)
		return nil
	case p.lost != nil:
		p.found.advise(tombolo.RemedyRecreate, "its namespace is gone: %v", p.lost)
	}

	p.found.addAll(diffs, tombolo.RemedyRepair)
	return nil
}

// mend puts the port back on the recorded bridge, and corrects its settings. The recorded bridge may differ from the
// network's present bridge. If the recorded bridge does not exist, mend does nothing.
func (portPart) mend(ctx context.Context, p *podSite) error {
	br, err := p.s.link(ctx, p.Bridge)
	if err != nil {
		return err
	}

	port := portOn(p.Attachment, br)

	// The link's attributes do not show the port's static FDB entry and its VLANs, so set these in any case.
	if br.Kind != "bridge" || len(port.Differences(*p.link, *br)) == 0 && !port.StaticFDB && port.VLAN.IsZero() {
		return nil
	}

	port.BridgeIndex = br.Index
	return p.s.Links.Enslave(ctx, port)
}

// portDifferences returns the differences between the link port and the port on the bridge br that the record requires.
func portDifferences(ctx context.Context, s *session, a *state.Attachment, port, br *bridge.Link) ([]tombolo.Difference,
	error) {
	p := portOn(a, br)
	diffs := p.Differences(*port, *br)
	if len(diffs) > 0 || p.VLAN.IsZero() {
		return diffs, nil
	}
	diffs, err := s.Links.VLANs().Check(ctx, port.Index, a.HostIf, p.VLAN)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	return diffs, err
}

// recheckPort repeats portDifferences under the record's lock, and reads the port and the record again. Since the ports
// were listed, an ADD may have ended. A DEL may have set the port down, which it does before it deletes the port. If
// another call works on the attachment, or its record or port is gone, recheckPort returns none.
func recheckPort(ctx context.Context, s *session, a *state.Attachment, br *bridge.Link) (diffs []tombolo.Difference,
	_ error) {
	err := s.withLockedRecord(a.Network, a.Hash(), func(now *state.Attachment) error {
		port, err := s.link(ctx, now.HostIf)
		if err == nil && port.Index != 0 && now.State == state.Ready {
			diffs, err = portDifferences(ctx, s, now, port, br)
		}
		return err
	})
	if errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return diffs, err
}

// keepTable sets fields of p that protect the bridge's FDB on a kernel without a limit of learned MACs (before Linux
// 6.7). Without a guard that restricts the pod to its MAC, the bridge learns nothing from the pod's port. Instead, the
// bridge gets a static entry for the pod's MAC. Frames for other MACs behind the port then go to all ports.
func keepTable(p *bridge.Port, guarded bool, br *bridge.Link) {
	if br.Bridge != nil && br.Bridge.MaxLearned == nil && !guarded {
		p.NoLearning, p.StaticFDB = true, true
	}
}

// portOf returns the properties of an attachment's port and interface, from its record.
func portOf(a *state.Attachment) bridge.Port {
	p := bridge.Port{
		Bridge: a.Bridge, Name: a.HostIf, Peer: a.IfName, MTU: a.MTU, MAC: net.HardwareAddr(
			a.HostMAC), PeerMAC: net.HardwareAddr(a.MAC),
		Alias:   endpoint.AliasOf(a),
		Hairpin: a.Hairpin && !sharesNIC(a), Isolated: a.Isolated, ForwardGroups: true,
		Down: !a.Up, VLAN: a.VLAN,
	}
	if a.SLAAC {
		p.Autoconf = &bridge.Autoconf{DefaultRoute: a.DefaultRoute != exitHost && !a.NoDefaultRoute}
	}
	return p
}

// sharesNIC reports whether the bridge of an attachment shares a NIC. Such a pod gets no hairpin port, which would
// send the pod a copy of each of its own multicast frames. It needs none, since the host routes its packets to
// services.
func sharesNIC(a *state.Attachment) bool { return a.NIC != "" }

// portOn returns the result of portOf, completed with the properties that depend on the existing bridge.
func portOn(a *state.Attachment, br *bridge.Link) bridge.Port {
	p := portOf(a)
	if p.VLAN.IsZero() {
		p.VLAN = defaultVLAN(br)
	}
	if p.PeerMAC != nil {
		keepTable(&p, a.Guard != "", br)
	}
	return p
}

// isRenamed reports whether an attachment's port exists with another name. It searches by the alias, which stays when
// a link is renamed.
func (s *session) isRenamed(ctx context.Context, hash string) (bool, error) {
	links, err := s.Links.Veths(ctx)
	return slices.ContainsFunc(links, func(l bridge.Link) bool {
		return l.Name != ident.Port(hash) && strings.HasPrefix(l.Alias, endpoint.AliasOwner(hash))
	}), err
}

// liveAddresses lists the addresses of a network's pods according to the aliases of their ports.
func (s *session) liveAddresses(ctx context.Context, network string) ([]ipam.Live, error) {
	links, err := s.Links.Veths(ctx)
	var list []ipam.Live
	for i := range links {
		a, ok := endpoint.ParseAlias(links[i].Alias)
		if !ok || a.Network != endpoint.NetworkToken(network) {
			continue
		}
		for _, ip := range a.Addresses {
			list = append(list, ipam.Live{Hash: a.Hash, Addr: ip})
		}
	}

	return list, err
}

func (r *remains) port() string { return ident.Port(r.hash) }

// autoconfigured reports whether a pod has formed an address from a router advertisement. It recognizes such an address
// by its interface identifier, which is derived from the MAC. The advertised prefix may change, so the pod may lose the
// address.
func autoconfigured(a *state.Attachment, p netip.Prefix) bool {
	if !a.SLAAC || a.MAC == nil || !p.Addr().Is6() {
		return false
	}
	return ident.EndsAlike(p.Addr(), addr.LinkLocal(net.HardwareAddr(a.MAC)))
}

// lastingPrefixes returns the recorded addresses of an attachment, except the addresses that the pod formed from router
// advertisements.
func lastingPrefixes(rec *state.Attachment) []netip.Prefix {
	return slices.DeleteFunc(prefixesOf(rec.Addresses), func(p netip.Prefix) bool { return autoconfigured(rec, p) })
}

// attach adds the guard's elements to the firewall, and creates the pod's link with its limits. If a link with the
// port's name exists and belongs to this attachment, attach deletes that link and tries again. A killed Add or Del has
// left it, since this Add holds the attachment's record. If the pod already has a default route with the same metric,
// attach tries again with free metrics. Finally attach sets the MTU, the MACs and the limits in a.rec.
func (a *addCall) attach(ctx context.Context) error {
	port := a.portOnBridge()
	beforeUp := func(ctx context.Context, index int) error {
		// Look for another machine with the pod's addresses before the pod is up, since from then on the pod itself
		// answers for them.
		if err := a.refuseAnswered(nil); err != nil {
			return err
		}

		return a.limit(ctx, index, port.MTU)
	}
	if a.namesAddresses() || !a.pod.Limits.IsZero() {
		port.BeforeUp = beforeUp
	} else if err := beforeUp(ctx, 0); err != nil {
		return err
	}

	if err := refuseDeleted(a.pending); err != nil {
		return err
	}

	if err := a.guardBefore(ctx, a.rec, a.required); err != nil {
		return err
	}

	owner := endpoint.AliasOwner(a.hash)
	made, err := a.s.Links.Attach(ctx, a.pod.NetNS, port)
	if errors.Is(err, fs.ErrExist) && !errors.Is(err, bridge.ErrPeerExists) {
		if err := refuseDeleted(a.pending); err != nil {
			return err
		}
		if err := a.s.Links.Detach(ctx, port.Name, owner); err != nil {
			return err
		}
		made, err = a.s.Links.Attach(ctx, a.pod.NetNS, port)
	}

	if isRoute(err) && errors.Is(err, fs.ErrExist) {
		if err = a.chooseFreeMetrics(ctx, &port, err); err == nil {
			made, err = a.s.Links.Attach(ctx, a.pod.NetNS, port)
		}
	}

	if err != nil {
		return explainRoute(err)
	}

	a.attached = true
	a.undo.push(func(ctx context.Context) error {
		err := a.s.Links.Detach(ctx, port.Name, owner)
		a.attached = err != nil
		return err
	})
	a.link = made
	a.rec.MTU, a.rec.MAC, a.rec.HostMAC = made.MTU, state.MAC(made.PeerMAC), state.MAC(made.MAC)
	a.rec.NetNSCookie = made.NetNSCookie
	setLimits(a.rec, a.limits)
	return nil
}

// limitsPart implements podPart for the limits of a pod's traffic. They consist of qdiscs on the port, and of an IFB
// link for the traffic from the pod.
type limitsPart struct{}

func (limitsPart) look(ctx context.Context, p *podSite) error {
	if p.Bandwidth.IsZero() {
		return nil
	}
	diffs, err := bandwidth.On(p.s.Links.Socket()).Check(ctx, shaperTarget(p.Attachment), p.Bandwidth)
	p.found.addAll(diffs, tombolo.RemedyRepair)
	return err
}

func (limitsPart) mend(ctx context.Context, p *podSite) error {
	if p.Bandwidth.IsZero() {
		return nil
	}
	target := shaperTarget(p.Attachment)
	target.PortIndex = p.link.Index
	_, err := bandwidth.On(p.s.Links.Socket()).Ensure(ctx, target, p.Bandwidth)
	return err
}

// shaperTarget returns the port and the IFB link that shape an attachment's traffic.
func shaperTarget(rec *state.Attachment) bandwidth.Target {
	return bandwidth.Target{
		Port: rec.HostIf, MTU: rec.MTU, IFB: bandwidth.IFBName(rec.Hash()),
		Alias: endpoint.Alias(rec.Hash(), rec.Network, nil), Owner: endpoint.AliasOwner(rec.Hash()),
	}
}

// setLimits writes the limits into rec. If traffic from the pod is limited, it also writes the name of the IFB link
// that shapes this traffic.
func setLimits(rec *state.Attachment, s bandwidth.Shape) {
	rec.Bandwidth, rec.IFB = s, ""
	if s.Egress.Rate > 0 {
		rec.IFB = bandwidth.IFBName(rec.Hash())
	}
}

// ifbNames returns the names of the IFB links that may shape the attachment's traffic. Without a complete record the
// limits are unknown, so it returns the name that the attachment's IFB would have.
func (r *remains) ifbNames() []string {
	if r.rec != nil && r.rec.State == state.Ready && r.rec.IFB == "" {
		return nil
	}
	return []string{bandwidth.IFBName(r.hash)}
}

// limit sets the requested limits, if any, at the port with the given index, before the port is up (bridge.Port's
// BeforeUp).
func (a *addCall) limit(ctx context.Context, index, mtu int) (err error) {
	if a.pod.Limits.IsZero() {
		return a.node.reportStep("bandwidth")
	}

	target := shaperTarget(a.rec)
	target.PortIndex, target.MTU = index, mtu
	conn := bandwidth.On(a.s.Links.Socket())

	// Undo only the IFB link: the port's own qdiscs and filters are deleted together with the port.
	a.undo.push(func(ctx context.Context) error {
		return conn.Remove(ctx, bandwidth.Target{IFB: target.IFB, Owner: target.Owner})
	})
	if a.limits.IsZero() { // do not repeat the warning in a second attempt
		if a.limits, err = effectiveLimits(a.s, a.pod.Limits, mtu); err != nil {
			return err
		}
	}

	if _, err = conn.Ensure(ctx, target, a.limits); err != nil {
		return err
	}

	return a.node.reportStep("bandwidth")
}

// Limit replaces the limits of an attached pod, as if its Add had requested the new ones. The zero Shape means no
// limits. Limit returns the IFB link that shapes the traffic from the pod, or nil if that traffic is not limited. If
// the kernel refuses the new limits, the pod has none until a repair restores the old ones. If there is no complete
// attachment, the error matches ErrNotAttached.
func (c Change) Limit(ctx context.Context, limits bandwidth.Shape) (port *bridge.Link, _ error) {
	err := c.do(ctx, func(s *session, a, next *state.Attachment) error {
		target, conn := shaperTarget(a), bandwidth.On(s.Links.Socket())
		if limits.IsZero() {
			if a.Bandwidth.IsZero() {
				return nil
			}
			setLimits(next, limits)
			if err := conn.Remove(ctx, target); err != nil {
				return err
			}
			return s.Dir.UpdateLocked(next)
		}

		effective, err := effectiveLimits(s, limits, a.MTU)
		if err != nil {
			return err
		}

		setLimits(next, effective)
		if err := s.Dir.UpdateLocked(next); err != nil {
			return stateError(err)
		}

		if _, err := conn.Ensure(ctx, target, effective); err != nil {
			return errors.Join(err, conn.Remove(context.WithoutCancel(ctx), target), s.Dir.UpdateLocked(a))
		}

		if next.IFB != "" {
			port, err = s.Links.Link(ctx, next.IFB)
		}

		return err
	})

	return port, err
}

// effectiveLimits returns the limits as the kernel enforces them, and warns of differences from the request.
func effectiveLimits(s *session, requested bandwidth.Shape, mtu int) (bandwidth.Shape, error) {
	effective, adjusted, err := requested.Effective(mtu)
	if err != nil {
		return bandwidth.Shape{}, failf(ErrInvalid, "bandwidth: %w", err)
	}
	for _, adj := range adjusted {
		s.warn("bandwidth: " + adj)
	}
	return effective, nil
}

// The inside of a pod belongs to the pod, its runtime, and the plugins that run after Add. The functions below only
// read it.

// dialPod opens a connection into a pod's namespace, and finds the pod's interface, whatever its name is now. The
// caller must close the connection, except after an error. If the interface is gone, the error matches fs.ErrNotExist.
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

// inside lists the differences between the pod's interface and p.port. Additional addresses and routes are no
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
	want := &p.port
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
	err = route.On(conn).Walk(ctx, route.Filter{}, func(has route.Route) { // no list: a pod may have countless routes
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
