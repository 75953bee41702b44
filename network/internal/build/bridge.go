package build

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/route"
)

// buildBridge makes the bridge, or corrects it, and says whether it had to. at is the link that
// is to have the gateways: the bridge, or the host's in the network's VLAN.
func buildBridge(ctx context.Context, s *session.Session, rec *state.Network) (l, at *bridge.Link, changed bool, _ error) {
	want := bridge.Bridge{
		Name: rec.Bridge, MTU: recorded.BridgeMTU(rec), Alias: endpoint.BridgeAlias, NoIPv6: true,
		Promiscuous: rec.Promiscuous, NFCall: rec.NFCall, VLANFiltering: rec.VLAN != (state.VLAN{}),
	}
	there, err := s.Links.Link(ctx, rec.Bridge)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		want.MAC, want.MaxLearned = recorded.BridgeMAC(s.Epoch.Token(), rec.Bridge), recorded.MaxLearned
	case err != nil:
		return nil, nil, false, err
	case want.VLANFiltering && there.Bridge != nil && !there.Bridge.VLANFiltering && !there.Unfinished() && there.Alias != endpoint.BridgeAlias:
		return nil, nil, false, fail.Errorf(fail.ErrNoLink, "bridge %s does not keep VLANs apart, and Tombolo did not make it: ip link set %s type bridge vlan_filtering 1 vlan_protocol 802.1Q, if no port of it needs tagged frames of VLANs that it is not in",
			rec.Bridge, rec.Bridge)
	default:
		want.MaxLearned = recorded.LearnedLimit(there)
	}
	l, changed, err = s.Links.Ensure(ctx, want)
	if errors.Is(err, bridge.ErrNoNetfilter) {
		// Everything else is done; and what a kernel cannot do is not asked for again.
		s.Warn(err.Error())
		rec.NFCall, err = nil, nil
	}
	if err != nil {
		return nil, nil, false, err
	}
	if want.MAC != nil && len(rec.Gateways) > 0 {
		loopback.Place(ctx, l)
	}
	joined, err := recorded.EnsureVLANs(ctx, s.Links, rec, l)
	if err == nil {
		at, err = recorded.GatewayLink(ctx, s.Links, rec, l)
	}
	if err != nil {
		return nil, nil, false, err
	}
	changed = changed || joined
	if joined && at.Index != l.Index && at.Alias == endpoint.BridgeAlias {
		loopback.Place(ctx, at)
	}
	// A pod must not give the host addresses and routes. The kernel need not have
	// IPv6. By a bridge with an uplink it is the LAN's router that does.
	if path := sysctl.Link("ipv6", at.Name, "accept_ra"); rec.Uplink == "" && recorded.OwnsBridge(rec, l) && sysctl.Exists(path) {
		if _, err := sysctl.Ensure(path, "0"); err != nil {
			return nil, nil, false, err
		}
	}
	if slices.ContainsFunc(rec.Gateways, recorded.IsIPv6) {
		if _, err := sysctl.Ensure(sysctl.Link("ipv6", at.Name, "disable_ipv6"), "0"); err != nil {
			return nil, nil, false, err
		}
		return l, at, changed, ensureLinkLocal(s.Links, at)
	}
	return l, at, changed, nil
}

// IPv6 and Ethernet have a say in MTUs.
const (
	ethernetMTU = 1500
	ipv6MTU     = 1280 // RFC 8200, section 5
)

// choice is what a network leaves open and was settled.
type choice struct {
	mtu                 int
	promiscuous, nfCall *bool
}

// chooseBridge settles what a network leaves open. A bridge that somebody
// else made must not be changed unasked: it keeps what it has. One of our own gets
// what is usual, and the MTU of the default route's link.
func chooseBridge(ctx context.Context, s *session.Session, w *Want) (choice, error) {
	nw := &w.Record
	chosen := choice{nw.MTU, nw.Promiscuous, nw.NFCall}
	l, err := s.Links.Link(ctx, nw.Bridge)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return chosen, err
	}
	// One that is half made has neither its alias nor its MTU yet (bridge.Conn.Ensure).
	found := err == nil && !l.Unfinished()
	foreign := found && l.Kind == "bridge" && l.Alias != endpoint.BridgeAlias
	if nw.MTU == 0 && found && (foreign || nw.Uplink != "") {
		chosen.mtu = l.MTU
	}
	if foreign {
		return chosen, nil
	}
	if nw.Promiscuous == nil {
		chosen.promiscuous = new(bool)
	}
	if nw.NFCall == nil {
		on := w.Routed
		chosen.nfCall = &on
	}
	if chosen.mtu == 0 {
		chosen.mtu = w.DefaultMTU
	}
	if chosen.mtu != 0 {
		return chosen, nil
	}
	chosen.mtu, err = defaultMTU(ctx, s.Links, nw.Bridge)
	return chosen, err
}

// defaultMTU is that of the link of the default route, the smaller over both
// families; 1500 if there is none, or it is the network's own bridge.
func defaultMTU(ctx context.Context, links *bridge.Conn, except string) (int, error) {
	mtu := 0
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		list, err := links.Routes().List(route.Filter{Family: family, Table: route.TableMain})
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
		index := best.Link
		if len(best.Nexthops) > 0 {
			index = best.Nexthops[0].Link
		}
		l, err := links.LinkByIndex(ctx, index)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
		if err == nil && l.Name != except && (mtu == 0 || l.MTU < mtu) {
			mtu = l.MTU
		}
	}
	if mtu == 0 {
		mtu = ethernetMTU
	}
	return mtu, nil
}
