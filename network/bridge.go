package network

import (
	"context"
	"crypto/sha256"
	"errors"
	"io/fs"
	"net"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/route"
)

// buildBridge makes the bridge, or corrects it, and says whether it had to.
func (s *session) buildBridge(ctx context.Context, rec *state.Network) (*bridge.Link, bool, error) {
	want := bridge.Bridge{
		Name: rec.Bridge, MTU: bridgeMTU(rec), Alias: endpoint.BridgeAlias, NoIPv6: true,
		Promiscuous: rec.Promiscuous, NFCall: rec.NFCall,
	}
	there, err := s.br.Link(ctx, rec.Bridge)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		want.MAC, want.MaxLearned = bridgeMAC(s.epoch.Token(), rec.Bridge), maxLearned
	case err != nil:
		return nil, false, err
	default:
		want.MaxLearned = learnedLimit(there)
	}
	l, changed, err := s.br.Ensure(ctx, want)
	if errors.Is(err, bridge.ErrNoNetfilter) {
		// Everything else is done; and what a kernel cannot do is not asked for again.
		s.warn(err.Error())
		rec.NFCall, err = nil, nil
	}
	if err != nil {
		return nil, false, err
	}
	if want.MAC != nil && len(rec.Gateways) > 0 {
		loopback.Place(ctx, l)
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
		return l, changed, ensureLinkLocal(s.br, l)
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
func keepTable(p *bridge.Port, guarded bool, br *bridge.Link) {
	if br.Bridge != nil && br.Bridge.MaxLearned == nil && !guarded {
		p.NoLearning, p.StaticFDB = true, true
	}
}

// learnedLimit is the limit of a bridge that is there: one that somebody else made keeps
// what it has, and so does one of ours to which an operator gave another. One that was
// left half made has no alias yet.
func learnedLimit(l *bridge.Link) uint32 {
	if l.Alias != endpoint.BridgeAlias && !l.Unfinished() || l.Bridge == nil || l.Bridge.MaxLearned == nil || *l.Bridge.MaxLearned != 0 {
		return 0
	}
	return maxLearned
}

// bridgeMAC is the MAC of a bridge that is made, the same whenever that happens in
// one life of the node: pods would send to the gateway's old one for half a minute.
func bridgeMAC(epoch, name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte(epoch + " " + name))
	sum[0] = sum[0]&^1 | 2 // unicast, locally administered
	return sum[:6]
}

// ownsBridge says whether we made the bridge, or have been told to route on it:
// then no router is to be heard there but us.
func ownsBridge(rec *state.Network, l *bridge.Link) bool {
	return l.Alias == endpoint.BridgeAlias || len(rec.Gateways) > 0
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

// choice is what a network leaves open and was settled.
type choice struct {
	mtu                 int
	promiscuous, nfCall *bool
}

// chooseBridge settles what a network leaves open. A bridge that somebody
// else made must not be changed unasked: it keeps what it has. One of our own gets
// what is usual, and the MTU of the default route's link.
func (s *session) chooseBridge(ctx context.Context, nw *Network) (choice, error) {
	chosen := choice{nw.MTU, nw.Promiscuous, nw.NFCall}
	l, err := s.br.Link(ctx, nw.Bridge)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return chosen, err
	}
	// One that is half made has neither its alias nor its MTU yet (bridge.Conn.Ensure).
	found := err == nil && !l.Unfinished()
	foreign := found && l.Kind == "bridge" && l.Alias != endpoint.BridgeAlias
	if nw.MTU == 0 && found && (foreign || nw.Uplink.NIC != "") {
		chosen.mtu = l.MTU
	}
	if foreign {
		return chosen, nil
	}
	if nw.Promiscuous == nil {
		chosen.promiscuous = new(bool)
	}
	if nw.NFCall == nil {
		on := nw.Routed
		chosen.nfCall = &on
	}
	if chosen.mtu != 0 {
		return chosen, nil
	}
	chosen.mtu, err = defaultMTU(ctx, s.br, nw.Bridge)
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
		for _, index := range linksOf(*best) {
			l, err := links.LinkByIndex(ctx, index)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return 0, err
			}
			if err == nil && l.Name != except && (mtu == 0 || l.MTU < mtu) {
				mtu = l.MTU
			}
		}
	}
	if mtu == 0 {
		mtu = ethernetMTU
	}
	return mtu, nil
}
