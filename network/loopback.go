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

// loopbackPart has ports that pods publish reached from the host's 127.0.0.1.
//
// For that the bridge needs route_localnet: by it the kernel routes packets between 127.0.0.1 and a link, which it
// takes for forged otherwise. A rule then keeps others from the host's services on 127.0.0.1, and, should all rules
// be flushed, a filter at the bridge's ingress. Both are there for as long as a pod behind the bridge has such
// ports.
//
// In a VLAN the host's link there needs both, and so does the bridge: where bridged packets pass
// the firewall, it is the bridge by which the kernel routes an answer once its destination is
// 127.0.0.1 again.
type loopbackPart struct{}

func (loopbackPart) look(ctx context.Context, n *site) error {
	switch {
	case n.bridge.Index == 0 || n.at.Index == 0 || !n.usesLoopback():
		return nil
	case !n.usual && (!n.at.RouteLocalnet || !n.bridge.RouteLocalnet):
		n.found.Advise(tombolo.RemedyRepair, "bridge %s: route_localnet is off, so that 127.0.0.1 does not lead to the pods' ports", n.at.Name)
		return nil
	}
	missing := false
	err := n.eachLink(func(l *bridge.Link) error {
		open, err := n.isOpen(ctx, l)
		missing = missing || !open
		return err
	})
	if n.usual {
		n.almost = n.almost || missing // the rest of the network may be there
	} else if missing && err == nil {
		n.found.Advise(tombolo.RemedyRepair, "bridge %s: the filter is missing at its ingress that keeps others from the host's 127.0.0.1 should nf_tables be flushed", n.at.Name)
	}
	return err
}

// usesLoopback reports whether a pod has ports that are reached from 127.0.0.1. For those of a LAN by a shared NIC, the NIC
// would need route_localnet, and it is the host's.
func (n *site) usesLoopback() bool {
	if n.share != nil {
		return false
	}
	return n.want != nil && n.want.Loopback || slices.ContainsFunc(n.attachments, func(a *state.Attachment) bool {
		return endpoint.PublishesIPv4(a) && a.GatewayLink() == n.rec.GatewayLink()
	})
}

// eachLink does something for the host's link in a VLAN, and for the bridge.
func (n *site) eachLink(do func(*bridge.Link) error) error {
	err := do(n.at)
	if err == nil && n.bridge.Index != n.at.Index {
		err = do(n.bridge)
	}
	return err
}

// isOpen says whether all is there that make makes at a link.
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

// placeLoopback makes the place for the filter on a bridge that has just been made: later, it
// would cost the pods packets. Where it fails, the first port does it, or says what the kernel
// lacks.
func (s *session) placeLoopback(ctx context.Context, l *bridge.Link) {
	_ = localnet.On(s.Links.Socket()).Place(ctx, loopbackFilter(l, 0))
}

// make needs the firewall. Of what the kernel lacks the record takes note, so that it is not asked for again.
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
	// An operator's own setting stays when the last port goes.
	routed := value == "0" || kept.Routed
	if !routed && !kept.Any() {
		if routed, err = n.s.publishedBehind(l.Name); err != nil {
			return err
		}
	}
	// The host's own packets through an uplink's bridge would be lost while the place is made.
	if n.rec.Uplink != "" && !kept.HasPlace() {
		n.rec.LoopbackUnfiltered = true
		n.s.Warn(openIfFlushed + l.Name + ": to keep it would cost the host packets there, unless Tombolo makes the bridge anew")
		_, err := sysctl.Ensure(path, "1")
		return err
	}
	// The filter first: there must be no moment without it.
	_, err = conn.Ensure(ctx, keep, kept, routed)
	n.rec.LoopbackUnfiltered = localnet.IsUnsupported(err)
	if n.rec.LoopbackUnfiltered {
		n.s.Warn(openIfFlushed + l.Name + ": " + err.Error())
	} else if err != nil {
		return err
	}
	if value == "1" {
		return nil
	}
	return sysctl.Write(path, "1")
}

// publishedBehind says whether a pod on record behind a bridge, of any network, has ports of the host's IPv4
// addresses. One that is being added, or never was, does not count: its own Add opens what it needs, under the
// lock.
func (s *session) publishedBehind(bridgeName string) (bool, error) {
	attachments, err := s.allAttachments()
	return slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
		return a.State == state.Ready && (a.Bridge == bridgeName || a.GatewayLink() == bridgeName) && endpoint.PublishesIPv4(a)
	}), err
}

// shutLoopback takes back what make made for a bridge, without a look at what else may need it. known says that a pod behind
// it had ports: where the kernel has no filters, a bridge of our own tells whose setting it was.
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
		if _, err := sysctl.Ensure(sysctl.Link("ipv4", bridgeName, routeLocalnet), "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return conn.Remove(ctx, keep, kept)
}

// closeLoopbackAfter is for when these attachments have gone. One without a record, or
// that was never ready, may have got as far as having ports; unknown is of one that does not
// tell.
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

// closeUnusedLoopback takes back what make made for a bridge, and for the host's link in a VLAN, if no pod needs
// it any more. known says that a pod behind it had ports. While other pods are there, it takes one listing of the
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
	if err := s.Enter(ctx); err != nil {
		return err
	}
	needed := func() (bool, error) {
		l, err := s.link(ctx, name)
		if err != nil || !l.RouteLocalnet {
			return err == nil, err
		}
		return s.Firewall.HasPorts(ctx, name)
	}
	return s.Ensure(ctx, needed, func() error {
		// Their elements may have been flushed.
		if used, err := s.publishedBehind(name); used || err != nil {
			return err
		}
		return shutLoopback(ctx, s, name, known)
	})
}
