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

// loopbackPart makes the ports that pods publish reachable from the host's 127.0.0.1.
//
// For that the bridge needs route_localnet. With it the kernel routes packets between 127.0.0.1 and a link, which it
// otherwise rejects as forged. A rule then keeps others away from the host's services at 127.0.0.1 and, if all rules
// are flushed, a filter at the bridge's ingress is left. Both exist as long as a pod behind the bridge has such
// ports.
//
// In a VLAN the host's link there needs both, and so does the bridge: if bridged packets pass the firewall, the
// kernel routes an answer through the bridge once its destination is 127.0.0.1 again.
type loopbackPart struct{}

func (loopbackPart) look(ctx context.Context, n *site) error {
	switch {
	case n.bridge.Index == 0 || n.at.Index == 0 || !n.usesLoopback():
		return nil
	case !n.quick && (!n.at.RouteLocalnet || !n.bridge.RouteLocalnet):
		n.found.advise(tombolo.RemedyRepair,
			"bridge %s: route_localnet is off, so that 127.0.0.1 does not lead to the pods' ports", n.at.Name)
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
				"nf_tables be flushed", n.at.Name)
	}

	return err
}

// usesLoopback reports whether a pod has ports that are reached from 127.0.0.1. For ports of a LAN by a shared NIC,
// the NIC would need route_localnet, and the NIC is the host's.
func (n *site) usesLoopback() bool {
	if n.share != nil {
		return false
	}
	return slices.ContainsFunc(n.pods(), func(a *state.Attachment) bool {
		return endpoint.PublishesIPv4(a) && a.GatewayLink() == n.rec.GatewayLink()
	})
}

// eachLink calls do for the host's link in a VLAN, and for the bridge.
func (n *site) eachLink(do func(*bridge.Link) error) error {
	err := do(n.at)
	if err == nil && n.bridge.Index != n.at.Index {
		err = do(n.bridge)
	}
	return err
}

// isOpen reports whether a link has all the settings that make makes.
func (n *site) isOpen(ctx context.Context, l *bridge.Link) (bool, error) {
	if !l.RouteLocalnet || n.rec.LoopbackUnfiltered {
		return l.RouteLocalnet, nil
	}
	kept, err := localnet.On(n.s.Links.Socket()).Get(ctx, loopbackFilter(l, n.rec.Mark))
	return err == nil && kept.There, err
}

func loopbackFilter(l *bridge.Link, mark uint32) localnet.Filter {
	return localnet.Filter{Bridge: l.Name, Index: l.Index, Mark: mark, Stays: l.Alias == endpoint.BridgeAlias}
}

// placeLoopback creates the place for the filter on a new bridge, since later it would cost packets of the pods. If
// it fails, the first port repeats it, or reports the kernel's deficiency.
func (s *session) placeLoopback(ctx context.Context, l *bridge.Link) {
	_ = localnet.On(s.Links.Socket()).Place(ctx, loopbackFilter(l, 0))
}

// make needs the firewall. It records the deficiencies of the kernel, so that it does not ask again.
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
	kept, err := conn.Get(ctx, keep)
	if err != nil {
		return err
	}

	// An operator's own setting stays when the last port is removed.
	routed := value == "0" || kept.Routed
	if !routed && !kept.Any() {
		if routed, err = n.s.publishedBehind(l.Name); err != nil {
			return err
		}
	}

	// The host's own packets through an uplink's bridge would be lost while the place is created.
	if n.rec.Uplink != "" && !kept.HasPlace() {
		n.rec.LoopbackUnfiltered = true
		n.s.warn(openIfFlushed + l.Name +
			": to keep it would cost the host packets there, unless Tombolo makes the bridge anew")
		_, err := sysctl.Ensure(path, "1")
		return err
	}

	// First the filter: there must be no moment without it.
	_, err = conn.Ensure(ctx, keep, kept, routed)
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

// publishedBehind reports whether a pod on record behind a bridge, of any network, has published ports for IPv4
// addresses of the host. One with an incomplete Add does not count: its own Add opens the access, under the lock.
func (s *session) publishedBehind(bridgeName string) (bool, error) {
	attachments, err := s.allAttachments()
	return slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
		return a.State == state.Ready && (a.Bridge == bridgeName || a.GatewayLink() == bridgeName) &&
			endpoint.PublishesIPv4(a)
	}), err
}

// shutLoopback reverts the settings of make for a bridge, without checking other users. known means that a pod behind
// it had ports. If the kernel has no filters, a bridge of our own shows whose setting it was.
func shutLoopback(ctx context.Context, s *session, bridgeName string, known bool) error {
	l, err := s.link(ctx, bridgeName)
	if err != nil || l.Index == 0 {
		return err
	}

	conn := localnet.On(s.Links.Socket())
	keep := loopbackFilter(l, 0)
	kept, err := conn.Get(ctx, keep)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	if err != nil {
		return err
	}

	if kept.Routed || !kept.Any() && known && l.Alias == endpoint.BridgeAlias {
		if _, err := sysctl.Ensure(sysctl.Link("ipv4", bridgeName, routeLocalnet), "0"); err != nil &&
			!errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}

	return conn.Remove(ctx, keep, kept)
}

// closeLoopbackAfter closes the loopback access after these attachments have gone. An attachment without a record, or
// one that was never ready, may have had ports. unknown describes one without this information.
func closeLoopbackAfter(ctx context.Context, s *session, unknown Known, gone ...*state.Attachment) error {
	var had, perhaps []string
	for _, rec := range gone {
		switch {
		case rec == nil || rec.Bridge == "":
			perhaps = append(perhaps, unknown.Bridge, unknown.GatewayLink)
		case rec.State != state.Ready:
			perhaps = append(perhaps, rec.Bridge, rec.GatewayLink())
		case endpoint.PublishesIPv4(rec):
			had = append(had, rec.Bridge, rec.GatewayLink())
		}
	}

	return errors.Join(closeUnusedLoopback(ctx, s, true, had...), closeUnusedLoopback(ctx, s, false, perhaps...))
}

// closeUnusedLoopback reverts the settings of make for a bridge, and for the host's link in a VLAN, if no pod needs
// them any more. known means that a pod behind it had ports. While other pods exist, it takes one listing of the
// firewall, and only without any the exclusive lock.
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
		// Their elements may have been flushed.
		if used, err := s.publishedBehind(name); used || err != nil {
			return err
		}
		return shutLoopback(ctx, s, name, known)
	})
}
