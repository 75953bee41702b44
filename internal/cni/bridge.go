package cni

import (
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"net"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/route"
)

// buildBridge makes the bridge, or corrects it, and says whether it had to.
func (h *host) buildBridge(ctx context.Context, rec *state.Network) (*bridge.Link, bool, error) {
	want := bridge.Bridge{
		Name: rec.Bridge, MTU: bridgeMTU(rec), Alias: bridgeAlias, NoIPv6: true,
		Promiscuous: rec.Promiscuous, NFCall: rec.NFCall,
	}
	there, err := h.br.Link(ctx, rec.Bridge)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		want.MAC, want.MaxLearned = h.bridgeMAC(rec.Bridge), maxLearned
	case err != nil:
		return nil, false, err
	default:
		want.MaxLearned = learnedLimit(there)
	}
	l, changed, err := h.br.Ensure(ctx, want)
	if errors.Is(err, bridge.ErrNoNetfilter) {
		// Everything else is done; and what a kernel cannot do is not asked for again.
		h.call.log.warn(err.Error())
		rec.NFCall, err = nil, nil
	}
	if err != nil {
		return nil, false, err
	}
	if want.MAC != nil && len(rec.Gateways) > 0 {
		placeLoopback(ctx, l)
	}
	// A pod must not give the host addresses and routes. The kernel need not have
	// IPv6. By a bridge with an uplink it is the LAN's router that does.
	if path := sysctl.Link("ipv6", rec.Bridge, "accept_ra"); rec.Uplink == "" && ownsBridge(rec, l) && sysctl.Exists(path) {
		if _, err := sysctl.Ensure(path, "0"); err != nil {
			return nil, false, err
		}
	}
	if slices.ContainsFunc(rec.Gateways, isIPv6) {
		if _, err := sysctl.Ensure(sysctl.Link("ipv6", rec.Bridge, "disable_ipv6"), "0"); err != nil {
			return nil, false, err
		}
		return l, changed, h.ensureLinkLocal(l)
	}
	return l, changed, nil
}

// maxLearned is how many MACs a bridge of ours learns, as many as a large switch: a pod
// that macspoofchk or lanGuard does not hold to its own may send as any number of them.
// There is no such limit of multicast groups: the kernel counts those of a port
// (mcast_max_groups) after it has made the entry that fills the bridge's table.
const maxLearned = 16384

// keepTable is what a kernel without such a limit (before Linux 6.7) needs in its place: the
// bridge learns nothing from a pod that nothing holds to its own MAC, and has an entry of
// that MAC for good. Frames for other MACs behind the port then go to all ports.
func keepTable(p *bridge.Port, a *state.Attachment, br *bridge.Link) {
	if br.Bridge != nil && br.Bridge.MaxLearned == nil && !a.Guarded {
		p.NoLearning, p.StaticFDB = true, true
	}
}

// learnedLimit is the limit of a bridge that is there: one that somebody else made keeps
// what it has, and so does one of ours to which an operator gave another. One that was
// left half made has no alias yet.
func learnedLimit(l *bridge.Link) uint32 {
	if l.Alias != bridgeAlias && !l.Unfinished() || l.Bridge == nil || l.Bridge.MaxLearned == nil || *l.Bridge.MaxLearned != 0 {
		return 0
	}
	return maxLearned
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
func ownsBridge(rec *state.Network, l *bridge.Link) bool {
	return l.Alias == bridgeAlias || len(rec.Gateways) > 0
}

// bridgeMTU is what the bridge's MTU is to be; 0 where it is the host's own link to its
// LAN, whose MTU pods have no say in.
func bridgeMTU(rec *state.Network) int {
	if rec.Uplink != "" {
		return 0
	}
	return rec.MTU
}

// bridgeAsRecorded says whether a bridge has the attributes that its network gave
// it.
func bridgeAsRecorded(l *bridge.Link, rec *state.Network) bool {
	return (rec.Promiscuous == nil || l.Promiscuous == *rec.Promiscuous) &&
		(rec.NFCall == nil || l.Bridge != nil && l.Bridge.NFCallIPTables == *rec.NFCall && l.Bridge.NFCallIP6Tables == *rec.NFCall)
}

const (
	ethernetMTU = 1500
	ipv6MTU     = 1280 // RFC 8200, section 5
)

// chooseBridge settles what the configuration leaves open. A bridge that somebody
// else made must not be changed unasked: it keeps what it has. One of our own gets
// what the mode calls for, and the MTU of the default route's link.
func (h *host) chooseBridge(ctx context.Context, n *network) (*network, error) {
	chosen := *n
	l, err := h.br.Link(ctx, n.Bridge)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// One that is half made has neither its alias nor its MTU yet (bridge.Conn.Ensure).
	found := err == nil && !l.Unfinished()
	foreign := found && l.Kind == "bridge" && l.Alias != bridgeAlias
	if n.MTU == 0 && found && (foreign || n.Uplink != "") {
		chosen.MTU = l.MTU
	}
	if foreign {
		return &chosen, nil
	}
	if n.Promiscuous == nil {
		chosen.Promiscuous = new(bool)
	}
	if n.NFCall == nil {
		on := n.GatewayMode
		chosen.NFCall = &on
	}
	if chosen.MTU != 0 {
		return &chosen, nil
	}
	chosen.MTU, err = h.defaultMTU(ctx)
	return &chosen, err
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
