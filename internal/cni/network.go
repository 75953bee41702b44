package cni

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// network is what one ADD needs its network to be: the settings, and what its
// addresses and ports call for.
type network struct {
	settings
	gateways []netip.Prefix // to be on the bridge
	subnets  []netip.Prefix // of the pod's addresses
	loopback bool           // the host's 127.0.0.1 leads to a port of the pod's
	reached  []netip.Addr   // the pod's addresses that ports of the host lead to
}

// routing is what the host has to forward for the ADD's sake.
func (n *network) routing() bridge.Routing {
	var r bridge.Routing
	need := func(a netip.Addr) {
		r.IPv4 = r.IPv4 || a.Is4()
		r.IPv6 = r.IPv6 || a.Is6()
	}
	for _, a := range n.reached {
		need(a)
	}
	for _, gw := range n.gateways {
		need(gw.Addr())
	}
	return r
}

// built is a network that is there.
type built struct {
	bridge *bridge.Link
	mtu    int
}

// config describes what a network was built from, in a form that can be compared.
func (n *network) config() string {
	text := fmt.Sprintf("bridge=%s mtu=%d gateway=%t masquerade=%t except=%v mark=%#x policy=%s guard=%t nfcall=%s promiscuous=%s",
		n.Bridge, n.MTU, n.IsGateway, n.Masquerade, n.NonMasquerade, n.Mark, n.Policy, n.Guard, onOff(n.NFCall), onOff(n.Promiscuous))
	if n.Uplink != "" {
		text += fmt.Sprintf(" uplink=%s keep=%t default=%s slaac=%t", n.Uplink, n.KeepAddress, n.DefaultRoute, n.SLAAC)
	}
	return text
}

func onOff(v *bool) string {
	if v == nil {
		return "unset"
	}
	return fmt.Sprint(*v)
}

// ready sees to it that the network is there. In the common case it is, and a few
// single requests show it. Where anything is missing, one caller builds it under
// the exclusive lock while the others wait.
func (h *host) ready(ctx context.Context, n *network) (*built, error) {
	var b *built
	err := h.lock.Ensure(ctx, func() (bool, error) {
		var err error
		b, err = h.look(ctx, n)
		return b != nil, err
	}, func() error {
		var err error
		b, err = h.build(ctx, n)
		return err
	})
	return b, err
}

// look is nil where the network is not as the ADD needs it. It asks for single
// objects only, so that it costs the same with a thousand pods.
func (h *host) look(ctx context.Context, n *network) (*built, error) {
	rec, err := h.dir.LoadNetwork(n.Network)
	if err != nil {
		// Not built yet, or its record is damaged: building writes it anew.
		return nil, nil
	}
	if rec.ConfigHash != n.config() || rec.Epoch != h.epoch.Token() ||
		!containsAll(rec.Gateways, n.gateways) || !containsAll(rec.Subnets, n.subnets) || !h.holds(rec, n) {
		return nil, nil
	}
	l, err := h.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if l.Kind != "bridge" || !l.Up || l.MTU != bridgeMTU(rec) && bridgeMTU(rec) != 0 || !bridgeAsRecorded(l, rec) {
		return nil, nil
	}
	if n.loopback {
		if ok, err := h.loopbackOpen(ctx, rec, l); err != nil || !ok {
			return nil, err
		}
	}
	if ok, err := h.hasUplink(ctx, rec, l); err != nil || !ok {
		return nil, err
	}
	if diffs, err := lanDifferences(rec); err != nil || len(diffs) > 0 {
		return nil, err
	}
	if ok, err := h.br.Forwards(ctx, n.routing()); err != nil || !ok {
		return nil, nil // where the kernel cannot, building tells why
	}
	for _, gw := range n.gateways {
		if ok, err := h.hasGateway(gw, l); err != nil || !ok {
			return nil, err
		}
	}
	if ok, err := h.fw.Ready(ctx, rules(rec, l)); err != nil || !ok {
		return nil, err
	}
	if ok, err := h.fw.Admitted(ctx); err != nil || !ok {
		return nil, err
	}
	return &built{bridge: l, mtu: rec.MTU}, nil
}

// holds says whether the attachments are still there for whose sake the bridge has
// gateways that this ADD has no use for: those of an earlier configuration, or of
// another subnet.
func (h *host) holds(rec *state.Network, n *network) bool {
	for _, held := range rec.Held {
		if slices.Contains(n.gateways, held.Gateway) {
			continue
		}
		if _, err := h.dir.Load(rec.Name, held.Attachment); err != nil {
			return false
		}
	}
	return true
}

// build makes the network, or mends it, under the exclusive lock. Every part is
// idempotent, so that a build which was cut short is finished by the next.
func (h *host) build(ctx context.Context, n *network) (*built, error) {
	if err := n.refuseIPv6(); err != nil {
		return nil, err
	}
	if err := h.takeUplink(ctx); err != nil {
		return nil, err
	}
	chosen, err := h.chooseBridge(ctx, n)
	if err != nil {
		return nil, err
	}
	if chosen.MTU < ipv6MTU && slices.ContainsFunc(n.subnets, isIPv6) {
		return nil, newError(codeInvalidConfig, "network %q: an MTU of %d is too small for IPv6, which needs %d", n.Network, chosen.MTU, ipv6MTU)
	}
	if err := h.refuseOtherMarks(n); err != nil {
		return nil, err
	}
	attachments, err := h.listed(n.Network)
	if err != nil {
		return nil, err
	}
	rec := h.record(chosen, attachments)
	rec.ConfigHash = n.config()
	l, changed, err := h.raise(ctx, rec, attachments, n)
	if err != nil {
		return nil, err
	}
	if err := refuseObstaclesOf(ctx, rec); err != nil {
		return nil, err
	}
	if changed {
		// Who flushed our table took the other networks' rules as well, and who
		// deleted the bridge, their ports.
		if err := h.mendOthers(ctx, n.Network); err != nil {
			return nil, err
		}
	}
	// The keeper tries again where that fails, and the ADD needs none of it.
	h.later = append(h.later, func() error { return h.followHost(ctx, attachments) })
	// Only now: whoever is stopped before leaves it to the next ADD.
	if _, err := h.fw.Ensure(ctx, rules(rec, l)); err != nil {
		return nil, err
	}
	if err := h.dir.SaveNetwork(rec); err != nil {
		return nil, newError(codeIO, "%v", err)
	}
	return &built{bridge: l, mtu: rec.MTU}, nil
}

// raise makes what a record describes, or mends it, and puts the network's pods
// back. It says whether anything was missing that other networks have a part in.
// The ADD that it is for is nil where there is none. What the firewall's sets lost is
// for the caller to declare mended, once all networks are (nft.Conn.Prepare).
func (h *host) raise(ctx context.Context, rec *state.Network, attachments []*state.Attachment, n *network) (*bridge.Link, bool, error) {
	l, rebuilt, err := h.buildBridge(ctx, rec)
	if err != nil {
		return nil, false, err
	}
	if err := h.buildGateways(ctx, rec, l, n != nil && n.ForceAddress); err != nil {
		return nil, false, err
	}
	if err := h.buildLAN(ctx, rec); err != nil {
		return nil, false, err
	}
	outcome, err := h.fw.Prepare(ctx, rules(rec, l))
	if err != nil {
		return nil, false, err
	}
	for _, a := range reached(n, attachments) {
		if err := h.forward(ctx, a); err != nil {
			return nil, false, err
		}
	}
	if loopbackUse(rec, n, attachments) {
		if err := h.openLoopback(ctx, rec, l); err != nil {
			return nil, false, err
		}
	}
	if _, err := h.fw.Admit(ctx); err != nil {
		return nil, false, err
	}
	if err := h.reattach(ctx, rec, attachments); err != nil {
		return nil, false, err
	}
	return l, outcome.Changed || rebuilt, nil
}

// reached are the addresses that ports of the host lead to, to which it has to
// forward: those of the ADD, and of the pods that are there.
func reached(n *network, attachments []*state.Attachment) []netip.Addr {
	var list []netip.Addr
	if n != nil {
		list = append(list, n.reached...)
	}
	for _, a := range attachments {
		if len(a.Published) > 0 {
			list = append(list, addressesOf(a)...)
		}
	}
	return list
}

// listed gives the records of a network's attachments, and warns of those that are
// damaged.
func (h *host) listed(network string) ([]*state.Attachment, error) {
	attachments, damaged, err := h.dir.List(network)
	if err != nil {
		return nil, newError(codeIO, "%v", err)
	}
	for _, d := range damaged {
		h.call.log.warn(d.Error())
	}
	return attachments, nil
}

// record is what the network will be: what this ADD asks for, and what the pods
// that are there came from.
func (h *host) record(n *network, attachments []*state.Attachment) *state.Network {
	rec := &state.Network{
		Name: n.Network, Epoch: h.epoch.Token(),
		Bridge: n.Bridge, MTU: n.MTU,
		Gateways: slices.Clone(n.gateways), Subnets: slices.Clone(n.subnets),
		Masquerade: n.Masquerade, NonMasquerade: n.NonMasquerade,
		Policy: n.Policy, Guard: n.Guard, Mark: uint64(n.Mark),
		NFCall: n.NFCall, Promiscuous: n.Promiscuous,
		Uplink: n.Uplink, DefaultRoute: n.DefaultRoute, SLAAC: n.SLAAC,
	}
	for _, gw := range n.gateways {
		rec.Held = append(rec.Held, state.Held{Gateway: gw, Attachment: h.call.hash()})
	}
	for _, a := range attachments {
		for _, address := range a.Addresses {
			rec.Subnets = appendNew(rec.Subnets, address.Prefix.Masked())
			if !n.IsGateway || !address.Gateway.IsValid() {
				continue
			}
			gw := netip.PrefixFrom(address.Gateway, address.Prefix.Bits())
			if !slices.Contains(rec.Gateways, gw) {
				rec.Gateways = append(rec.Gateways, gw)
				rec.Held = append(rec.Held, state.Held{Gateway: gw, Attachment: a.Hash()})
			}
		}
	}
	return rec
}

func containsAll(have, want []netip.Prefix) bool {
	for _, p := range want {
		if !slices.Contains(have, p) {
			return false
		}
	}
	return true
}

func appendNew(list []netip.Prefix, p netip.Prefix) []netip.Prefix {
	if slices.Contains(list, p) {
		return list
	}
	return append(list, p)
}

func isIPv6(p netip.Prefix) bool { return p.Addr().Is6() }
