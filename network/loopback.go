package network

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/localnet"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

const (
	routeLocalnet = "route_localnet"
	openIfFlushed = "should nf_tables be flushed, the host's 127.0.0.1 would be open to what is behind "
)

// loopbackPart is the part that makes pods' host ports reachable from the host at 127.0.0.1.
//
// The bridge needs route_localnet for this. With route_localnet the kernel routes packets between 127.0.0.1 and a
// link, which it otherwise drops as forged. A firewall rule then protects the host's services at 127.0.0.1 from
// everything behind the bridge. In case all rules are flushed, a filter at the bridge's ingress protects them too.
// The setting and the filter exist as long as a pod behind the bridge has such ports.
//
// In a VLAN, the host's link in the VLAN gets both the setting and the filter, and so does the bridge. The bridge
// needs both if bridged packets go through the firewall (br_netfilter). Then the destination of an answer becomes
// 127.0.0.1 again on the bridge, and the kernel routes the answer from there.
type loopbackPart struct{}

func (loopbackPart) look(ctx context.Context, n *site) error {
	switch {
	case n.bridge.Index == 0 || n.gatewayLink.Index == 0 || !n.usesLoopback():
		return nil
	case !n.quick && (!n.gatewayLink.RouteLocalnet || !n.bridge.RouteLocalnet):
		n.found.advise(tombolo.RemedyRepair,
			"bridge %s: route_localnet is off, so that 127.0.0.1 does not lead to the pods' ports", n.gatewayLink.Name)
		return nil
	}

	missing := false
	err := n.eachLink(func(l *bridge.Link) error {
		open, err := n.isOpen(ctx, l)
		missing = missing || !open
		return err
	})
	if n.quick {
		n.needsCompletion = n.needsCompletion || missing // the rest of the network may exist, so complete it
	} else if missing && err == nil {
		n.found.advise(tombolo.RemedyRepair,
			"bridge %s: the filter is missing at its ingress that keeps others from the host's 127.0.0.1 should "+
				"nf_tables be flushed", n.gatewayLink.Name)
	}

	return err
}

// usesLoopback reports whether a pod has host ports that should be reachable at 127.0.0.1. Ports on a shared NIC are
// not, because the NIC would need route_localnet, and the NIC is the host's.
func (n *site) usesLoopback() bool {
	if n.share != nil {
		return false
	}
	return slices.ContainsFunc(n.pods(), func(a *state.Attachment) bool {
		return endpoint.PublishesIPv4(a) && a.GatewayLink() == n.rec.GatewayLink()
	})
}

// eachLink calls do for n.gatewayLink, which in a VLAN is the host's link there, and for the bridge. If both are one
// link, it calls do once.
func (n *site) eachLink(do func(*bridge.Link) error) error {
	err := do(n.gatewayLink)
	if err == nil && n.bridge.Index != n.gatewayLink.Index {
		err = do(n.bridge)
	}
	return err
}

// isOpen reports whether a link has route_localnet and the filter that protects 127.0.0.1 (see loopbackPart). If the
// record has LoopbackUnfiltered set, route_localnet suffices.
func (n *site) isOpen(ctx context.Context, l *bridge.Link) (bool, error) {
	if !l.RouteLocalnet || n.rec.LoopbackUnfiltered {
		return l.RouteLocalnet, nil
	}
	filter, err := localnet.On(n.s.Links.Socket()).Get(ctx, loopbackFilter(l, n.rec.Mark))
	return err == nil && filter.Exists, err
}

func loopbackFilter(l *bridge.Link, mark uint32) localnet.Filter {
	return localnet.Filter{Bridge: l.Name, Index: l.Index, Mark: mark, Stays: l.Alias == endpoint.BridgeAlias}
}

// placeLoopback adds the clsact qdisc for the filter to a new bridge, since adding it later would cost packets of
// pods. placeLoopback ignores errors. When the first host port is published, loopbackPart.make tries again, or
// reports that the kernel has no clsact.
func (s *session) placeLoopback(ctx context.Context, l *bridge.Link) {
	_ = localnet.On(s.Links.Socket()).Place(ctx, loopbackFilter(l, 0))
}

// make turns on route_localnet and adds the filter, if a pod needs them. It must run after firewallPart, whose rules
// protect the host. If the kernel does not support the filter, make records this, so that later calls do not look for
// the filter.
func (loopbackPart) make(ctx context.Context, n *site) (bool, error) {
	if !n.usesLoopback() {
		return false, nil
	}
	return false, n.eachLink(func(l *bridge.Link) error { return n.open(ctx, l) })
}

func (n *site) open(ctx context.Context, l *bridge.Link) error {
	path := sysctl.Link("ipv4", l.Name, routeLocalnet)
	value, err := sysctl.Read(path)
	if err != nil {
		return err
	}

	conn := localnet.On(n.s.Links.Socket())
	keep := loopbackFilter(l, n.rec.Mark)
	filter, err := conn.Get(ctx, keep)
	if err != nil {
		return err
	}

	// Note whether we turn route_localnet on. An operator's own setting must stay when the last port is removed.
	routed := value == "0" || filter.Routed
	if !routed && !filter.Any() {
		if routed, err = n.s.publishedBehind(l.Name); err != nil {
			return err
		}
	}

	// The bridge has no clsact yet, and adding one would lose packets that the host sends through an uplink's bridge.
	// So turn on route_localnet without the filter, and warn the operator.
	if n.rec.Uplink != "" && !filter.HasPlace() {
		n.rec.LoopbackUnfiltered = true
		n.s.warn(openIfFlushed + l.Name +
			": to keep it would cost the host packets there, unless Tombolo makes the bridge anew")
		_, err := sysctl.Ensure(path, "1")
		return err
	}

	// Add the filter before route_localnet is on, so that there is no moment without the filter.
	_, err = conn.Ensure(ctx, keep, filter, routed)
	n.rec.LoopbackUnfiltered = localnet.IsUnsupported(err)
	if n.rec.LoopbackUnfiltered {
		n.s.warn(openIfFlushed + l.Name + ": " + err.Error())
	} else if err != nil {
		return err
	}

	if value == "1" {
		return nil
	}

	return sysctl.Write(path, "1")
}

// publishedBehind reports whether a recorded pod of any network behind a bridge has host ports for IPv4. It ignores
// pods whose Add is not complete, since such an Add turns on route_localnet itself, under the lock.
func (s *session) publishedBehind(bridgeName string) (bool, error) {
	attachments, err := s.allAttachments()
	return slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
		return a.State == state.Ready && (a.Bridge == bridgeName || a.GatewayLink() == bridgeName) &&
			endpoint.PublishesIPv4(a)
	}), err
}

// shutLoopback turns off route_localnet and removes the filter of a bridge, without checking whether pods need them.
// It leaves route_localnet on if an operator turned it on. If the kernel does not support the filter, nothing records
// who turned route_localnet on. Then shutLoopback turns it off only if the bridge is ours and known is true: a pod
// behind the bridge had host ports.
func shutLoopback(ctx context.Context, s *session, bridgeName string, known bool) error {
	l, err := s.link(ctx, bridgeName)
	if err != nil || l.Index == 0 {
		return err
	}

	conn := localnet.On(s.Links.Socket())
	keep := loopbackFilter(l, 0)
	filter, err := conn.Get(ctx, keep)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	if err != nil {
		return err
	}

	if filter.Routed || !filter.Any() && known && l.Alias == endpoint.BridgeAlias {
		if _, err := sysctl.Ensure(sysctl.Link("ipv4", bridgeName, routeLocalnet), "0"); err != nil &&
			!errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}

	return conn.Remove(ctx, keep, filter)
}

// closeLoopbackAfter calls closeUnusedLoopback for the links of removed attachments. An attachment without a record,
// or whose Add was not complete, may have had host ports. An entry in removed is nil for an attachment without a
// record. The parameter unknown then has its links.
func closeLoopbackAfter(ctx context.Context, s *session, unknown Known, removed ...*state.Attachment) error {
	var published, unknownLinks []string
	for _, rec := range removed {
		switch {
		case rec == nil || rec.Bridge == "":
			unknownLinks = append(unknownLinks, unknown.Bridge, unknown.GatewayLink)
		case rec.State != state.Ready:
			unknownLinks = append(unknownLinks, rec.Bridge, rec.GatewayLink())
		case endpoint.PublishesIPv4(rec):
			published = append(published, rec.Bridge, rec.GatewayLink())
		}
	}

	return errors.Join(closeUnusedLoopback(ctx, s, true, published...),
		closeUnusedLoopback(ctx, s, false, unknownLinks...))
}

// closeUnusedLoopback calls shutLoopback for each link that has route_localnet, unless a pod still needs the setting.
// known means that a pod behind the links had host ports. If the firewall has elements for other pods' ports behind a
// link, one listing suffices. If it has none, closeUnusedLoopback takes the exclusive lock.
func closeUnusedLoopback(ctx context.Context, s *session, known bool, links ...string) error {
	slices.Sort(links)
	var errs []error
	for _, name := range slices.Compact(links) {
		if name != "" {
			errs = append(errs, closeLoopback(ctx, s, known, name))
		}
	}
	return errors.Join(errs...)
}

func closeLoopback(ctx context.Context, s *session, known bool, name string) error {
	if err := s.enter(ctx); err != nil {
		return err
	}

	needed := func() (bool, error) {
		l, err := s.link(ctx, name)
		if err != nil || !l.RouteLocalnet {
			return err == nil, err
		}
		return s.Firewall.HasPorts(ctx, name)
	}

	return s.ensure(ctx, needed, func() error {
		// The elements of other pods' ports may have been flushed, so look at the records too.
		if used, err := s.publishedBehind(name); used || err != nil {
			return err
		}
		return shutLoopback(ctx, s, name, known)
	})
}
