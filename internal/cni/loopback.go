package cni

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/localnet"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
)

// A port of the host leads to a pod from 127.0.0.1 too, for which the bridge needs
// route_localnet: by it the kernel routes packets between 127.0.0.1 and a link, which it
// takes for forged otherwise. What the host has on 127.0.0.1 is then kept from others by
// a rule, and, should all rules be flushed, by a filter at the bridge's ingress. Both are
// there for as long as a pod behind the bridge has such ports.

const (
	routeLocalnet = "route_localnet"
	openIfFlushed = "should nf_tables be flushed, the host's 127.0.0.1 would be open to what is behind "
)

// loopbackUse says whether a network needs that: for the ADD, which may be nil, or for
// the pods that are there.
func loopbackUse(rec *state.Network, n *network, attachments []*state.Attachment) bool {
	return n != nil && n.loopback || slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
		return publishesIPv4(a) && a.Bridge == rec.Bridge
	})
}

func keepOf(l *bridge.Link, mark uint64) localnet.Filter {
	return localnet.Filter{Bridge: l.Name, Index: l.Index, Mark: uint32(mark), Stays: l.Alias == bridgeAlias}
}

// placeLoopback makes the place for the filter on a bridge that has just been made: later, it
// would cost the pods packets. Where it fails, the first port does it, or says what the kernel
// lacks.
func placeLoopback(ctx context.Context, l *bridge.Link) {
	if conn, err := localnet.Dial(nil); err == nil {
		_ = conn.Place(ctx, keepOf(l, 0))
		_ = conn.Close()
	}
}

// openLoopback makes 127.0.0.1 lead to pods behind a bridge. The firewall must be there.
// It needs the exclusive lock. Of what the kernel lacks the record takes note, so that
// it is not asked for again.
//
// Where an earlier version opened it, for pods that are there, the firewall alone keeps it
// until the last of these has gone, as it did: see localnet.Conn.Place.
func (h *host) openLoopback(ctx context.Context, rec *state.Network, l *bridge.Link) error {
	path := sysctl.Link("ipv4", l.Name, routeLocalnet)
	value, err := sysctl.Read(path)
	if err != nil {
		return err
	}
	conn, err := localnet.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	keep := keepOf(l, rec.Mark)
	kept, err := conn.Get(ctx, keep)
	if err != nil {
		return err
	}
	// An operator's own setting stays when the last port goes. That of an earlier
	// version has no filter, and pods that have ports.
	routed := value == "0" || kept.Routed
	if !routed && !kept.Any() {
		if routed, err = h.publishes(l.Name); err != nil {
			return err
		}
		if routed && !kept.HasPlace() && !h.keptBefore(rec) {
			rec.LoopbackUnkept = true
			h.call.log.warn(openIfFlushed + l.Name + ": an earlier version published ports there; once all have gone, this is mended")
			return nil
		}
	}
	// What the host itself sends by the bridge of an uplink would be lost while the place is made.
	if rec.Uplink != "" && !kept.HasPlace() && !h.keptBefore(rec) {
		rec.LoopbackUnkept = true
		h.call.log.warn(openIfFlushed + l.Name + ": to keep it would cost the host packets there, unless Tombolo makes the bridge anew")
		_, err := sysctl.Ensure(path, "1")
		return err
	}
	// The filter first: there must be no moment without it.
	_, err = conn.Ensure(ctx, keep, routed)
	rec.LoopbackUnkept = errors.Is(err, localnet.ErrNotSupported)
	if rec.LoopbackUnkept {
		h.call.log.warn(openIfFlushed + l.Name + ": " + oneLine(err))
	} else if err != nil {
		return err
	}
	rec.LoopbackKept = !rec.LoopbackUnkept
	_, err = sysctl.Ensure(path, "1")
	return err
}

// keptBefore says whether the network had the filter: then somebody has taken it away, and it
// is worth a few packets.
func (h *host) keptBefore(rec *state.Network) bool {
	before, err := h.dir.LoadNetwork(rec.Name)
	return err == nil && before.LoopbackKept && before.Bridge == rec.Bridge
}

// loopbackOpen says whether all that openLoopback makes is there.
func (h *host) loopbackOpen(ctx context.Context, rec *state.Network, l *bridge.Link) (bool, error) {
	if !l.RouteLocalnet || rec.LoopbackUnkept {
		return l.RouteLocalnet, nil
	}
	conn, err := localnet.Dial(nil)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	kept, err := conn.Get(ctx, keepOf(l, rec.Mark))
	return err == nil && kept.There, err
}

// publishes says whether a pod on record behind a bridge, of whatever network, has ports
// of the host's IPv4 addresses. One that is being added, or never was, does not count:
// its own ADD opens what it needs, under the lock.
func (h *host) publishes(bridgeName string) (bool, error) {
	networks, err := h.dir.Networks()
	if err != nil {
		return false, newError(codeIO, "%v", err)
	}
	for _, name := range networks {
		attachments, err := h.listed(name)
		if err != nil {
			return false, err
		}
		if slices.ContainsFunc(attachments, func(a *state.Attachment) bool {
			return a.State == state.Ready && a.Bridge == bridgeName && publishesIPv4(a)
		}) {
			return true, nil
		}
	}
	return false, nil
}

// closeLoopbackAfter is for when these attachments have gone. One without a record, or
// that was never ready, may have got as far as having ports.
func (h *host) closeLoopbackAfter(ctx context.Context, gone ...*state.Attachment) error {
	known := map[string]bool{} // by bridge: that one did
	for _, rec := range gone {
		bridgeName := h.settings.Bridge
		if rec != nil && rec.Bridge != "" {
			bridgeName = rec.Bridge
		}
		ready := rec != nil && rec.State == state.Ready
		if ready && !publishesIPv4(rec) {
			continue
		}
		known[bridgeName] = known[bridgeName] || ready
	}
	var errs []error
	for bridgeName, known := range known {
		errs = append(errs, h.closeLoopback(ctx, bridgeName, known))
	}
	return errors.Join(errs...)
}

// closeLoopback takes back what openLoopback made for a bridge, if no pod needs it any
// more. known says that one behind the bridge did. With others there it takes a listing
// of theirs in the firewall; only with none the exclusive lock.
func (h *host) closeLoopback(ctx context.Context, bridgeName string, known bool) error {
	if err := h.enter(ctx); err != nil {
		return err
	}
	needed := func() (bool, error) {
		l, err := h.br.Link(ctx, bridgeName)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !l.RouteLocalnet {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		return h.fw.HasPorts(ctx, bridgeName)
	}
	work := func() error {
		// Their elements may have been flushed.
		if used, err := h.publishes(bridgeName); used || err != nil {
			return err
		}
		return h.shutLoopback(ctx, bridgeName, known)
	}
	if h.lock.Mode() == state.Shared {
		return h.lock.Ensure(ctx, needed, work)
	}
	if is, err := needed(); is || err != nil {
		return err
	}
	return work()
}

// shutLoopback is closeLoopback without a look at who else may need it. Where the kernel
// has no filters, or an earlier version made none, a bridge of our own tells whose
// setting it was.
func (h *host) shutLoopback(ctx context.Context, bridgeName string, known bool) error {
	l, err := h.br.Link(ctx, bridgeName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	conn, err := localnet.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	keep := keepOf(l, 0)
	kept, err := conn.Get(ctx, keep)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if kept.Routed || !kept.Any() && known && l.Alias == bridgeAlias {
		if _, err := sysctl.Ensure(sysctl.Link("ipv4", bridgeName, routeLocalnet), "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return conn.Remove(ctx, keep)
}

// loopbackDifferences finds what is missing of what openLoopback made.
func (h *host) loopbackDifferences(ctx context.Context, rec *state.Network, l *bridge.Link, found *findings) error {
	switch {
	case l.Index == 0:
		return nil // found already
	case !l.RouteLocalnet:
		found.add("bridge %s: route_localnet is off, so that 127.0.0.1 does not lead to the pods' ports", rec.Bridge)
		return nil
	}
	open, err := h.loopbackOpen(ctx, rec, l)
	if err != nil || open {
		return err
	}
	found.add("bridge %s: the filter is missing at its ingress that keeps others from the host's 127.0.0.1 should nf_tables be flushed", rec.Bridge)
	return nil
}
