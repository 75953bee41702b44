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
	"time"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// refuseMAC returns an error if mac is a multicast MAC, or the MAC of the uplink or of another machine on the LAN. With
// the MAC of another machine, a pod would receive that machine's frames. Without an uplink, or if mac is nil because we
// choose it, refuseMAC returns nil. It ignores answers for the addresses in own, since the pod itself may answer there.
func (n *site) refuseMAC(ctx context.Context, mac net.HardwareAddr, own ...netip.Addr) error {
	if n.rec.Uplink == "" || n.gatewayLink.Index == 0 || mac == nil {
		return nil
	}

	nic := n.gatewayLink
	switch {
	case mac[0]&1 != 0:
		return failf(ErrInvalid, "MAC %s is a multicast MAC: a pod needs one whose first byte is even", mac)
	case bytes.Equal(mac, nic.MAC):
		return failf(ErrConflict, "MAC %s belongs to uplink %s: a pod on the LAN needs one of its own", mac, nic.Name)
	}

	conn := nl.Of(n.s.Links.Socket())
	routers, err := n.lanRouters(ctx, nic.Index)
	if err != nil {
		return err
	}

	for _, router := range routers {
		if err := resolveMAC(ctx, conn, nic.Index, router); err != nil {
			return err
		}
	}

	list, err := routing.Neighbours(conn)
	for _, entry := range list {
		if entry.Link != nic.Index || !bytes.Equal(entry.MAC, mac) || slices.Contains(own, entry.Addr) {
			continue
		}
		if is, err := answers(ctx, conn, entry); is || err != nil {
			return errors.Join(err, failf(ErrConflict,
				"MAC %s belongs to another machine on the LAN of uplink %s, which has %s: give the pod another one",
				mac, nic.Name, entry.Addr))
		}
	}

	return err
}

// refuseTwin returns an error if the bridge or another pod on it has the requested MAC. It does not check a MAC that
// begins with ident.DerivedMAC. We derive such MACs, and they differ if addresses or names differ.
func (a *addCall) refuseTwin(ctx context.Context) error {
	mac := a.pod.MAC
	if mac == nil || mac[0] == ident.DerivedMAC {
		return nil
	}

	if bytes.Equal(mac, a.site.bridge.MAC) {
		return failf(ErrConflict, "MAC %s belongs to bridge %s: give the pod another one", mac, a.nw.Bridge)
	}

	all, err := a.s.allAttachments()
	for _, other := range all {
		if other.Bridge == a.nw.Bridge && other.Hash() != a.hash && bytes.Equal(other.MAC, mac) &&
			(other.State != state.Ready || !a.s.hasDied(ctx, other.Network, other.Hash())) {
			return failf(ErrConflict, "MAC %s belongs to container %s on bridge %s: give the pod another one", mac,
				other.ContainerID, a.nw.Bridge)
		}
	}

	return err
}

// answeringRouter returns the next hop of one of the host's default routes through the LAN, if it answers the host.
// Without an uplink, or if none answers, it returns the zero Addr.
func (n *site) answeringRouter(ctx context.Context) netip.Addr {
	if n.rec.Uplink == "" {
		return netip.Addr{}
	}

	conn := nl.Of(n.s.Links.Socket())
	routers, _ := n.lanRouters(ctx, n.gatewayLink.Index)
	for _, router := range routers {
		_ = resolveMAC(ctx, conn, n.gatewayLink.Index, router)
		entry, err := routing.Find(conn, n.gatewayLink.Index, router)
		if is, _ := answers(ctx, conn, entry); is && err == nil {
			return router
		}
	}

	return netip.Addr{}
}

// lanRouters lists the next hops of the host's default routes through a link.
func (n *site) lanRouters(ctx context.Context, link int) (list []netip.Addr, _ error) {
	err := n.s.Links.Routes().Walk(ctx, route.Filter{Link: link}, func(r route.Route) {
		for _, hop := range append([]route.Nexthop{{Gateway: r.Gateway}}, r.Nexthops...) {
			if r.Dst.Bits() == 0 && hop.Gateway.IsValid() {
				list = appendNew(list, hop.Gateway)
			}
		}
	})
	return list, err
}

// neighbourWait limits the wait for a neighbour's answer, and neighbourPause is the pause between two checks for the
// answer. A machine on the LAN answers within milliseconds. The kernel asks at once, and again after a second.
const (
	neighbourWait  = 1500 * time.Millisecond
	neighbourPause = 10 * time.Millisecond
)

// resolveMAC makes the kernel ask for the MAC of an address, and waits for an answer. If the MAC is known, it does
// nothing.
func resolveMAC(ctx context.Context, conn *nl.Conn, link int, address netip.Addr) error {
	known, err := routing.Find(conn, link, address)
	if err == nil && len(known.MAC) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	_, err = probeNeighbour(ctx, conn,
		routing.NeighbourEntry{Link: link, Addr: address, State: routing.Probe, Flags: routing.Use})
	return err
}

// answers makes the kernel ask a neighbour, and reports whether the neighbour answers with the entry's MAC. Without
// asking, an old entry might belong to a pod that is gone. For a permanent entry it reports true at once.
func answers(ctx context.Context, conn *nl.Conn, entry routing.NeighbourEntry) (bool, error) {
	if entry.State == routing.Permanent {
		return true, nil
	}
	entry.State = routing.Probe
	now, err := probeNeighbour(ctx, conn, entry)
	return now.State == routing.Reachable && bytes.Equal(now.MAC, entry.MAC), err
}

// probeNeighbour writes a neighbour entry that makes the kernel ask the neighbour. It waits for an answer, at most for
// neighbourWait, and returns the resulting entry.
func probeNeighbour(ctx context.Context, conn *nl.Conn, entry routing.NeighbourEntry) (now routing.NeighbourEntry,
	_ error) {
	if err := routing.Replace(conn, "ask neighbour", entry); err != nil {
		return now, err
	}

	err := poll(ctx, neighbourPause, neighbourWait, func() (done bool, err error) {
		now, err = routing.Find(conn, entry.Link, entry.Addr)
		if errors.Is(err, fs.ErrNotExist) {
			return true, nil
		}
		return now.State == routing.Reachable || now.State == routing.Failed, err
	})
	return now, err
}

// RefuseMAC returns an error if the pod's interface cannot change its MAC to mac. The error matches ErrInvalid if the
// present MAC identifies the pod to a DHCP server or on its LAN. With an uplink, it also matches ErrInvalid if mac is a
// multicast MAC, and ErrConflict if the uplink or another machine on the LAN has mac. RefuseMAC changes nothing.
func (c Change) RefuseMAC(ctx context.Context, mac net.HardwareAddr) error {
	return c.do(ctx, func(s *session, a, _ *state.Attachment) error { return s.refuseNewMAC(ctx, a, mac) })
}

// refuseTaken returns an error if an address of a pod on a LAN is the host's own, or a broadcast address of the host.
// With GuardUntrusted, it also refuses the address of a gateway. Unless DetectConflicts is false, it then makes the
// kernel ask the LAN for the pod's addresses. Machines answer while the Add continues, and refuseAnswered looks for
// their answers later. If DetectConflicts is true, refuseTaken waits for the answers itself. It does not check
// addresses that a DHCP server has just assigned: the method addCall.refuse checks these.
func (a *addCall) refuseTaken(ctx context.Context) error {
	if !a.namesAddresses() {
		return nil
	}

	at, conn := a.site.gatewayLink, nl.Of(a.s.Links.Socket())
	for _, address := range a.assigned.addresses {
		own, routed := address.Prefix.Addr(), netip.Addr{}
		if a.nw.Guard != nft.GuardUntrusted {
			routed = own // accept an address that the host uses as a gateway: the pod may be a router
		}

		err := lease.CheckConflict(ctx, a.s.Links.Routes(), at.Index, own, routed)
		if err == nil && own == address.Gateway && own != routed {
			err = errors.New("it is the gateway of the pod's own subnet")
		}

		if err != nil {
			return a.errTaken(own, err)
		}

		if a.skipsDetection() {
			continue
		}

		if err := probeAddress(conn, at.Index, own); err != nil {
			return fmt.Errorf("ask the LAN of %s for %s: %w", at.Name, own, err)
		}
	}

	if a.nw.DetectConflicts == nil || !*a.nw.DetectConflicts {
		return nil
	}

	return poll(ctx, neighbourPause, neighbourWait, func() (bool, error) { return false, a.refuseAnswered(nil) })
}

// namesAddresses reports whether the pod is on a LAN, and no DHCP server has just assigned or confirmed its addresses.
func (a *addCall) namesAddresses() bool {
	return a.nw.Exit != "" && (a.leasing == nil || a.unconfirmed()) && a.site.gatewayLink.Index != 0
}

func (a *addCall) skipsDetection() bool { return a.nw.DetectConflicts != nil && !*a.nw.DetectConflicts }

func (a *addCall) errTaken(own netip.Addr, why error) error {
	return failf(ErrConflict,
		"ipam: a pod on the LAN of %s cannot have address %s: %w: name another one, or keep it out of the range that "+
			"pods get addresses from",
		a.site.gatewayLink.Name, own, why)
}

// probeAddress makes the kernel ask the LAN which machine has an address, as the kernel does before it sends packets
// there. It does not change an operator's permanent entry. For IPv6 the kernel sends no request if the host has no IPv6
// address on the link.
func probeAddress(conn *nl.Conn, link int, own netip.Addr) error {
	has, err := routing.Find(conn, link, own)
	if err != nil && !errors.Is(err, fs.ErrNotExist) || has.State == routing.Permanent {
		return err
	}

	// First discard an old neighbour entry, since the machine that it names may be gone. Then make the kernel ask the
	// LAN for the address.
	forget := routing.NeighbourEntry{Addr: own, Link: link, State: routing.Failed}
	request := forget
	request.Flags = routing.Use
	if err := routing.Replace(conn, "ask for neighbour", forget, request); !errors.Is(err, unix.EINVAL) {
		return err
	}

	return nil
}

// refuseAnswered returns an error if a machine with a MAC other than mac has answered for an address of the pod. The
// Add calls it first with nil, and at last with the pod's MAC. The last call also deletes the neighbour entries that
// probeAddress made.
func (a *addCall) refuseAnswered(mac net.HardwareAddr) error {
	if !a.namesAddresses() || a.skipsDetection() {
		return nil
	}

	conn := nl.Of(a.s.Links.Socket())
	for _, address := range a.assigned.addresses {
		has, err := routing.Find(conn, a.site.gatewayLink.Index, address.Prefix.Addr())
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}

		if has.State != routing.Reachable || slices.Equal(has.MAC, mac) {
			if mac != nil && err == nil && has.State != routing.Permanent {
				m, err := has.DelMessage() // the last look: leave the host's table as it was
				err = conn.Change(context.Background(), "delete neighbour", &has, m, err)
				if nl.PassAbsent(err) != nil {
					return err
				}
			}
			continue
		}

		owner := has.MAC.String()
		if list, err := routing.Neighbours(conn); err == nil {
			for _, n := range list {
				if n.Link == has.Link && n.Addr != has.Addr && slices.Equal(n.MAC, has.MAC) {
					owner += ", which has " + n.Addr.String() + " too,"
				}
			}
		}

		return a.errTaken(has.Addr, errors.New("machine "+owner+" answers for it"))
	}

	return nil
}
