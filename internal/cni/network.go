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
	"github.com/tombolo-cni/tombolo/nft"
)

// network is what one ADD needs its network to be: the settings, and what its
// addresses call for.
type network struct {
	settings
	gateways []netip.Prefix // to be on the bridge
	subnets  []netip.Prefix // of the pod's addresses
}

// built is a network that is there.
type built struct {
	bridge *bridge.Link
	mtu    int
}

// config describes what a network was built from, in a form that can be compared.
func (n *network) config() string {
	return fmt.Sprintf("bridge=%s mtu=%d gateway=%t masquerade=%t mark=%#x", n.Bridge, n.MTU, n.IsGateway, n.Masquerade, n.Mark)
}

// rules describes the network to the firewall.
func (n *network) rules(subnets []netip.Prefix) nft.Network {
	return nft.Network{Name: n.Network, Prefixes: subnets, Masquerade: n.Masquerade}
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
		!containsAll(rec.Gateways, n.gateways) || !containsAll(rec.Subnets, n.subnets) {
		return nil, nil
	}
	l, err := h.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if l.Kind != "bridge" || !l.Up || l.MTU != rec.MTU {
		return nil, nil
	}
	for _, gw := range n.gateways {
		if ok, err := h.hasGateway(gw, l); err != nil || !ok || !forwards(gw.Addr()) {
			return nil, err
		}
	}
	ok, err := h.fw.Ready(ctx, n.rules(rec.Subnets))
	if err != nil || !ok {
		return nil, err
	}
	return &built{bridge: l, mtu: rec.MTU}, nil
}

// build makes the network, or mends it, under the exclusive lock. Every part is
// idempotent, so that a build which was cut short is finished by the next.
func (h *host) build(ctx context.Context, n *network) (*built, error) {
	mtu, err := h.chooseMTU(ctx, n)
	if err != nil {
		return nil, err
	}
	if mtu < ipv6MTU && slices.ContainsFunc(n.subnets, isIPv6) {
		return nil, newError(codeInvalidConfig, "network %q: an MTU of %d is too small for IPv6, which needs %d", n.Network, mtu, ipv6MTU)
	}
	attachments, damaged, err := h.dir.List(n.Network)
	if err != nil {
		return nil, newError(codeIO, "%v", err)
	}
	for _, d := range damaged {
		h.call.log.warn(d.Error())
	}
	rec := h.record(n, mtu, attachments)
	l, rebuilt, err := h.buildBridge(ctx, n, mtu, len(rec.Gateways) > 0 && slices.ContainsFunc(rec.Gateways, isIPv6))
	if err != nil {
		return nil, err
	}
	if err := h.buildGateways(ctx, n, l, rec.Gateways); err != nil {
		return nil, err
	}
	outcome, err := h.fw.Ensure(ctx, n.rules(rec.Subnets))
	if err != nil {
		return nil, err
	}
	if err := h.reattach(ctx, attachments, n.Masquerade); err != nil {
		return nil, err
	}
	if outcome.Changed || rebuilt {
		// Who flushed our table took the other networks' rules as well, and who
		// deleted the bridge, their ports.
		if err := h.mendOthers(ctx, n.Network); err != nil {
			return nil, err
		}
	}
	if err := h.dir.SaveNetwork(rec); err != nil {
		return nil, newError(codeIO, "%v", err)
	}
	return &built{bridge: l, mtu: mtu}, nil
}

// record is what the network will be: what this ADD asks for, and what the pods
// that are there came from.
func (h *host) record(n *network, mtu int, attachments []*state.Attachment) *state.Network {
	rec := &state.Network{
		Name: n.Network, Epoch: h.epoch.Token(), ConfigHash: n.config(),
		Bridge: n.Bridge, MTU: mtu,
		Gateways: slices.Clone(n.gateways), Subnets: slices.Clone(n.subnets),
	}
	for _, a := range attachments {
		for _, address := range a.Addresses {
			rec.Subnets = appendNew(rec.Subnets, address.Prefix.Masked())
			if n.IsGateway && address.Gateway.IsValid() {
				rec.Gateways = appendNew(rec.Gateways, netip.PrefixFrom(address.Gateway, address.Prefix.Bits()))
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
