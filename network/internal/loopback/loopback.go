// Package loopback has ports that pods publish reached from the host's 127.0.0.1.
//
// A port of the host leads to a pod from 127.0.0.1 too, for which the bridge needs
// route_localnet: by it the kernel routes packets between 127.0.0.1 and a link, which it
// takes for forged otherwise. What the host has on 127.0.0.1 is then kept from others by
// a rule, and, should all rules be flushed, by a filter at the bridge's ingress. Both are
// there for as long as a pod behind the bridge has such ports.
//
// In a VLAN the host's link there needs both, and so does the bridge: where bridged packets pass
// the firewall, it is the bridge by which the kernel routes an answer once its destination is
// 127.0.0.1 again.
package loopback

import (
	"context"
	"errors"
	"io/fs"
	"slices"

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

// Uses says whether pods of a network have ports that are reached from 127.0.0.1.
func Uses(rec *state.Network, attachments []*state.Attachment) bool {
	return slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
		return endpoint.PublishesIPv4(a) && a.GatewayLink() == rec.GatewayLink()
	})
}

func keepOf(l *bridge.Link, mark uint64) localnet.Filter {
	return localnet.Filter{Bridge: l.Name, Index: l.Index, Mark: uint32(mark), Stays: l.Alias == endpoint.BridgeAlias}
}

// each does something for the host's link in a VLAN, and for its bridge. Without a VLAN, at is the bridge.
func each(at, br *bridge.Link, do func(*bridge.Link) error) error {
	err := do(at)
	if err == nil && br.Index != at.Index {
		err = do(br)
	}
	return err
}

// Place makes the place for the filter on a bridge that has just been made: later, it
// would cost the pods packets. Where it fails, the first port does it, or says what the kernel
// lacks.
func Place(ctx context.Context, l *bridge.Link) {
	if conn, err := localnet.Dial(nil); err == nil {
		_ = conn.Place(ctx, keepOf(l, 0))
		_ = conn.Close()
	}
}

// Open makes 127.0.0.1 lead to pods behind a bridge; at is the link that has the gateways. The firewall must be there.
// It needs the exclusive lock. Of what the kernel lacks the record takes note, so that
// it is not asked for again.
func Open(ctx context.Context, links *bridge.Conn, dir *state.Dir, rec *state.Network, at, br *bridge.Link, warn func(string)) error {
	return each(at, br, func(l *bridge.Link) error { return open(ctx, links, dir, rec, l, warn) })
}

func open(ctx context.Context, links *bridge.Conn, dir *state.Dir, rec *state.Network, l *bridge.Link, warn func(string)) error {
	path := sysctl.Link("ipv4", l.Name, routeLocalnet)
	value, err := sysctl.Read(path)
	if err != nil {
		return err
	}
	conn := localnet.On(links.Socket())
	keep := keepOf(l, rec.Mark)
	kept, err := conn.Get(ctx, keep)
	if err != nil {
		return err
	}
	// An operator's own setting stays when the last port goes.
	routed := value == "0" || kept.Routed
	if !routed && !kept.Any() {
		if routed, err = Published(dir, l.Name, warn); err != nil {
			return err
		}
	}
	// What the host itself sends by the bridge of an uplink would be lost while the place is made.
	if rec.Uplink != "" && !kept.HasPlace() {
		rec.LoopbackUnfiltered = true
		warn(openIfFlushed + l.Name + ": to keep it would cost the host packets there, unless Tombolo makes the bridge anew")
		_, err := sysctl.Ensure(path, "1")
		return err
	}
	// The filter first: there must be no moment without it.
	_, err = conn.Ensure(ctx, keep, kept, routed)
	rec.LoopbackUnfiltered = localnet.IsUnsupported(err)
	if rec.LoopbackUnfiltered {
		warn(openIfFlushed + l.Name + ": " + err.Error())
	} else if err != nil {
		return err
	}
	if value == "1" {
		return nil
	}
	return sysctl.Write(path, "1")
}

// IsShut says whether a link is without route_localnet, so that the way is certainly not there. It costs a tenth
// of IsOpen.
func IsShut(link string) bool {
	value, err := sysctl.Read(sysctl.Link("ipv4", link, routeLocalnet))
	return err == nil && value == "0"
}

// IsOpen says whether all that Open makes is there.
func IsOpen(ctx context.Context, links *bridge.Conn, rec *state.Network, at, br *bridge.Link) (open bool, _ error) {
	open = true
	err := each(at, br, func(l *bridge.Link) error {
		one, err := isOpen(ctx, links, rec, l)
		open = open && one
		return err
	})
	return open && err == nil, err
}

func isOpen(ctx context.Context, links *bridge.Conn, rec *state.Network, l *bridge.Link) (bool, error) {
	if !l.RouteLocalnet || rec.LoopbackUnfiltered {
		return l.RouteLocalnet, nil
	}
	kept, err := localnet.On(links.Socket()).Get(ctx, keepOf(l, rec.Mark))
	return err == nil && kept.There, err
}

// Published says whether a pod on record behind a bridge, of whatever network, has ports
// of the host's IPv4 addresses. One that is being added, or never was, does not count:
// its own ADD opens what it needs, under the lock.
func Published(dir *state.Dir, bridgeName string, warn func(string)) (bool, error) {
	networks, err := dir.Networks()
	if err != nil {
		return false, err
	}
	for _, network := range networks {
		attachments, damaged, err := dir.List(network)
		if err != nil {
			return false, err
		}
		for _, d := range damaged {
			warn(d.Error())
		}
		if slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
			return a.State == state.Ready && (a.Bridge == bridgeName || a.GatewayLink() == bridgeName) && endpoint.PublishesIPv4(a)
		}) {
			return true, nil
		}
	}
	return false, nil
}

// Shut takes back what Open made for a bridge, without a look at what else may need it. known says that a pod behind
// it had ports: where the kernel has no filters, a bridge of our own tells whose setting it was.
func Shut(ctx context.Context, links *bridge.Conn, bridgeName string, known bool) error {
	l, err := links.Link(ctx, bridgeName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	conn := localnet.On(links.Socket())
	keep := keepOf(l, 0)
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

// Missing says what is missing of what Open made; "" if nothing is.
func Missing(ctx context.Context, links *bridge.Conn, rec *state.Network, at, br *bridge.Link) (string, error) {
	switch {
	case at.Index == 0 || br.Index == 0:
		return "", nil // found already
	case !at.RouteLocalnet || !br.RouteLocalnet:
		return "route_localnet is off, so that 127.0.0.1 does not lead to the pods' ports", nil
	}
	open, err := IsOpen(ctx, links, rec, at, br)
	if err != nil || open {
		return "", err
	}
	return "the filter is missing at its ingress that keeps others from the host's 127.0.0.1 should nf_tables be flushed", nil
}
