package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo/internal/lease"
	"github.com/tombolo-cni/tombolo/internal/nl"
	"github.com/tombolo-cni/tombolo/internal/routing"
	"github.com/tombolo-cni/tombolo/nft"
)

// refuseTaken returns an error if an address of a pod on a LAN belongs to the host or is a gateway. Then it makes the
// kernel ask the LAN for the pod's addresses. Machines answer while the Add continues, and refuseAnswered looks for
// their answers later. If DetectConflicts is true, refuseTaken waits for the answers itself. It does not check
// addresses from DHCP, which the method addCall.refuse checks.
func (a *addCall) refuseTaken(ctx context.Context) error {
	if !a.namesAddresses() {
		return nil
	}

	at, conn := a.site.gatewayLink, nl.Of(a.s.Links.Socket())
	for _, address := range a.assigned.addresses {
		own, routed := address.Prefix.Addr(), netip.Addr{}
		if a.nw.Guard != nft.GuardUntrusted {
			routed = own // accept an address with routes to it: the pod may be a router
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

// namesAddresses reports whether the pod has addresses on a LAN that no DHCP server has just assigned.
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

	// First discard an old neighbour entry, since the machine that it names may be gone. Then make the kernel ask.
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
				var b nl.Batch // the last look: leave the host's table as it was
				m, err := has.DelMessage()
				b.Add("delete neighbour", &has, m, err)
				if err := conn.Execute(&b); err != nil && !errors.Is(err, fs.ErrNotExist) {
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
