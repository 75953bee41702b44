package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/link"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
)

// nextHopPart is the part with the next hop of default routes through the host (ExitHost). The next hop is one
// address for each family, which no machine has. A permanent neighbour entry in each pod maps it to the host's MAC.
// So the routes stay valid when the host gets or loses addresses, and no other machine can answer for the next hop.
// Only the host's MAC can change.
type nextHopPart struct{}

// hostNextHop returns the next hop of a family. The IPv6 address is not fe80::1, since real routers have it, but ends
// in the letters "tombolo".
func hostNextHop(is6 bool) netip.Addr {
	if is6 {
		return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: 't', 'o', 'm', 'b', 'o', 'l', 0, 'o'})
	}
	return netip.AddrFrom4([4]byte{169, 254, 1, 1})
}

// usesHostRoute reports whether the pod gets default routes through the host.
func (a *addCall) usesHostRoute() bool { return a.nw.Exit == ExitHost && !a.nw.NoDefaultRoute }

// addHostRoutes adds the default routes through the host, unless the pod's allocator returned default routes.
func (a *addCall) addHostRoutes() {
	if !a.usesHostRoute() {
		return
	}

	var hops []ipam.Address
	for _, address := range a.assigned.addresses {
		hops = append(hops, ipam.Address{Gateway: hostNextHop(address.Prefix.Addr().Is6())})
	}

	if a.nw.SLAAC {
		hops = append(hops, ipam.Address{Gateway: hostNextHop(true)})
	}
	a.assigned.routes = withDefaults(true, hops, a.assigned.routes)
}

// neighbours returns the neighbour entries of a pod for the next hops of the families that the pod has. host is the
// host's MAC.
func neighbours(a *state.Attachment, host net.HardwareAddr) (list []bridge.Neighbour) {
	if a.DefaultRoute != exitHost {
		return nil
	}
	for _, is6 := range [...]bool{false, true} {
		has := is6 && a.SLAAC || !is6 && a.IPAMType == endpoint.Leased
		if has || slices.ContainsFunc(a.Addresses, func(o ipam.Address) bool { return isIPv6(o.Prefix) == is6 }) {
			list = append(list, bridge.Neighbour{Addr: hostNextHop(is6), MAC: host})
		}
	}
	return list
}

// hostMAC returns the host's MAC on the LAN: the shared NIC's MAC, or else the bridge's.
func (n *site) hostMAC() net.HardwareAddr {
	if n.uplink.shared {
		return n.uplink.nic.MAC
	}
	return n.bridge.MAC
}

func (nextHopPart) look(_ context.Context, n *site) error {
	mac := n.hostMAC()
	if n.rec.DefaultRoute == exitHost && n.bridge.Index != 0 && !bytes.Equal(mac, n.rec.HostMAC) {
		before := net.HardwareAddr(n.rec.HostMAC)
		n.found.advise(tombolo.RemedyRepair, "pods send to the host's MAC %s, and it is %s", before, mac)
	}
	return nil
}

// make records the host's MAC for future pods, and updates the neighbour entries in the present pods.
func (nextHopPart) make(ctx context.Context, n *site) (changed bool, _ error) {
	mac, before := n.hostMAC(), net.HardwareAddr(n.rec.HostMAC)
	if n.rec.DefaultRoute != exitHost || bytes.Equal(mac, before) {
		return false, nil
	}

	// A bridge without an explicit MAC takes the smallest MAC of its ports, so its MAC would change with the first
	// pod. Make its present MAC explicit.
	if l := n.bridge; l.Alias != endpoint.BridgeAlias && n.share == nil {
		var b nl.Batch
		link.Request{Index: l.Index, MAC: l.MAC}.Set(&b, "keep the MAC of bridge", l.Name)
		if err := nl.Of(n.s.Links.Socket()).Execute(&b); err != nil {
			return false, err
		}
	}

	for _, a := range n.attachments {
		if before == nil {
			break // no pod of the network has such an entry
		}
		if err := n.s.setNextHops(ctx, a, mac, before); err != nil {
			n.s.warn(fmt.Sprintf("cannot tell container %s of the host's MAC %s: %v", a.ContainerID, mac, err))
		}
	}

	n.rec.HostMAC = state.MAC(mac)
	return false, nil
}

// setNextHops writes a pod's neighbour entries for the next hops, with the host's MAC. If the host's previous MAC,
// before, is not nil, it replaces only permanent entries with that MAC. All other entries were changed by the pod's
// owner. If the pod is gone, it does nothing.
func (s *session) setNextHops(ctx context.Context, a *state.Attachment, host, before net.HardwareAddr) error {
	list := neighbours(a, host)
	if len(list) == 0 {
		return nil
	}

	pod, err := netns.OpenSame(a.NetNS, a.NetNSCookie)
	if err != nil {
		return nil
	}
	defer pod.Close()
	conn, l, err := s.dialPod(ctx, a, pod)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	if err != nil {
		return err
	}
	defer conn.Close()

	var entries []routing.NeighbourEntry
	for _, n := range list {
		entry := routing.NeighbourEntry{Addr: n.Addr, MAC: n.MAC, Link: l.Index}
		if before != nil {
			has, err := routing.Find(conn, l.Index, n.Addr)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			if has.State != routing.Permanent || !bytes.Equal(has.MAC, before) {
				continue
			}
		}

		entries = append(entries, entry)
	}

	return routing.Replace(conn, "add neighbour", entries...)
}

// completeNextHops writes a pod's neighbour entries again. The kernel has deleted them because another program moved
// the interface, or gave it another MAC.
func (s *session) completeNextHops(ctx context.Context, a *state.Attachment) error {
	if a.DefaultRoute != exitHost {
		return nil
	}
	rec, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		return stateError(err)
	}
	return s.setNextHops(ctx, a, net.HardwareAddr(rec.HostMAC), nil)
}
