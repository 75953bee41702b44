package cni

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// reattach puts right what the pods that are there have in the kernel: their
// elements, and their ports' membership and flags.
func (h *host) reattach(ctx context.Context, attachments []*state.Attachment, masquerade bool) error {
	for _, a := range attachments {
		if a.State != state.Ready {
			continue // its own ADD is at it, or never came to its end
		}
		l, err := h.br.Link(ctx, a.HostIf)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the pod is gone, and its DEL still to come
		}
		if err != nil {
			return err
		}
		port := portOf(a)
		if br, err := h.br.Link(ctx, a.Bridge); err == nil && br.Kind == "bridge" && !isPort(l, br, &port) {
			port.BridgeIndex = br.Index
			if err := h.br.Enslave(ctx, port); err != nil {
				return err
			}
		}
		ep := endpointOf(a)
		// It has been switched off since the pod came: there is no set for it.
		ep.Masquerade = ep.Masquerade && masquerade
		if err := h.fw.Replace(ctx, ep); err != nil {
			return err
		}
	}
	return nil
}

// mendOthers puts the rules and elements of the other networks right that have
// attachments. Those that have none are mended by their next ADD.
func (h *host) mendOthers(ctx context.Context, except string) error {
	others, damaged, err := h.dir.ListNetworks()
	if err != nil {
		return newError(codeIO, "%v", err)
	}
	for _, d := range damaged {
		h.call.log.warn(d.Error())
	}
	for _, o := range others {
		if o.Name == except {
			continue
		}
		attachments, _, err := h.dir.List(o.Name)
		if err != nil {
			return newError(codeIO, "%v", err)
		}
		if len(attachments) == 0 {
			continue
		}
		masquerade := slices.ContainsFunc(attachments, func(a *state.Attachment) bool { return a.Masquerade })
		if _, err := h.fw.Ensure(ctx, nft.Network{Name: o.Name, Prefixes: o.Subnets, Masquerade: masquerade}); err != nil {
			return err
		}
		if err := h.reattach(ctx, attachments, masquerade); err != nil {
			return err
		}
	}
	return nil
}

// isPort says whether a link is a port of the bridge with the flags that it
// should have.
func isPort(l, br *bridge.Link, p *bridge.Port) bool {
	return l.Master == br.Index && l.Up && l.Port != nil &&
		l.Port.Hairpin == p.Hairpin && l.Port.Isolated == p.Isolated && l.Alias == p.Alias
}

// portOf is the host's side of an attachment, from its record.
func portOf(a *state.Attachment) bridge.Port {
	on := func(v *bool) bool { return v != nil && *v }
	p := bridge.Port{
		Bridge: a.Bridge, Name: a.HostIf, Peer: a.IfName, MTU: a.MTU,
		Alias:   formatAlias(a.Hash(), a.Network, addressesOf(a)),
		Hairpin: on(a.Port.Hairpin), Isolated: on(a.Port.Isolated),
		Down: !a.Up,
	}
	p.MAC, _ = net.ParseMAC(a.HostMAC)
	p.PeerMAC, _ = net.ParseMAC(a.MAC)
	return p
}

// endpointOf is an attachment as the firewall sees it, from its record.
func endpointOf(a *state.Attachment) nft.Endpoint {
	mac, _ := net.ParseMAC(a.MAC)
	return nft.Endpoint{
		Owner: nft.Owner(a.Hash()), Network: a.Network, Bridge: a.Bridge,
		Addrs: addressesOf(a), MAC: mac, Masquerade: a.Masquerade,
	}
}
