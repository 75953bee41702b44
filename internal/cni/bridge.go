package cni

import (
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"net"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// buildBridge makes the bridge, or corrects it, and says whether it had to.
func (h *host) buildBridge(ctx context.Context, n *network, mtu int, ipv6 bool) (*bridge.Link, bool, error) {
	want := bridge.Bridge{Name: n.Bridge, MTU: mtu, Alias: bridgeAlias, NoIPv6: true}
	if _, err := h.br.Link(ctx, n.Bridge); errors.Is(err, fs.ErrNotExist) {
		want.MAC = h.bridgeMAC(n.Bridge)
	} else if err != nil {
		return nil, false, err
	}
	l, changed, err := h.br.Ensure(ctx, want)
	if err != nil {
		return nil, false, err
	}
	// A pod must not give the host addresses and routes. The kernel need not have
	// IPv6.
	if path := sysctl.Link("ipv6", n.Bridge, "accept_ra"); n.ownsBridge(l) && sysctl.Exists(path) {
		if _, err := sysctl.Ensure(path, "0"); err != nil {
			return nil, false, err
		}
	}
	if ipv6 {
		if _, err := sysctl.Ensure(sysctl.Link("ipv6", n.Bridge, "disable_ipv6"), "0"); err != nil {
			return nil, false, err
		}
		return l, changed, h.ensureLinkLocal(l)
	}
	return l, changed, nil
}

// bridgeMAC is the MAC of a bridge that is made, the same whenever that happens in
// one life of the node: pods would send to the gateway's old one for half a minute.
func (h *host) bridgeMAC(name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(h.epoch.Token() + " " + name))
	sum[0] = sum[0]&^1 | 2 // unicast, locally administered
	return sum[:6]
}

// ownsBridge says whether we made the bridge, or have been told to route on it:
// then no router is to be heard there but us.
func (n *network) ownsBridge(l *bridge.Link) bool {
	return l.Alias == bridgeAlias || len(n.gateways) > 0
}

const (
	ethernetMTU = 1500
	ipv6MTU     = 1280 // RFC 8200, section 5
)

// chooseMTU is the configured one; else that of a bridge which somebody else
// made, which must not be changed unasked; else that of the default route's link.
func (h *host) chooseMTU(ctx context.Context, n *network) (int, error) {
	if n.MTU != 0 {
		return n.MTU, nil
	}
	l, err := h.br.Link(ctx, n.Bridge)
	if err == nil && l.Kind == "bridge" && l.Alias != bridgeAlias {
		return l.MTU, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	return h.defaultMTU(ctx)
}

// defaultMTU is that of the link of the default route, the smaller over both
// families; 1500 if there is none.
func (h *host) defaultMTU(ctx context.Context) (int, error) {
	mtu := 0
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		list, err := h.br.Routes().List(route.Filter{Family: family, Table: route.TableMain})
		if err != nil {
			return 0, err
		}
		var best *route.Route
		for i, r := range list {
			if r.Dst.Bits() <= 0 && r.Type == route.Unicast && (best == nil || r.Priority < best.Priority) {
				best = &list[i]
			}
		}
		if best == nil {
			continue
		}
		for _, index := range links(*best) {
			l, err := h.br.LinkByIndex(ctx, index)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return 0, err
			}
			if err == nil && l.Name != h.settings.Bridge && (mtu == 0 || l.MTU < mtu) {
				mtu = l.MTU
			}
		}
	}
	if mtu == 0 {
		mtu = ethernetMTU
	}
	return mtu, nil
}
