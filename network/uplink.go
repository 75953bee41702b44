package network

import (
	"context"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
)

// uplinks is what takeovers need of this call.
func (s *session) uplinks() *takeover.Node {
	return &takeover.Node{
		Dir: s.dir, Links: s.br, LeaseDir: s.leaseDir, HostLease: s.hostLease, Warn: s.warn,
		Later: func(do func() error) { s.later = append(s.later, do) },
	}
}

// ours is an uplink for a bridge that is made to be known as ours.
func ours(u uplink.Uplink, bridgeName string) uplink.Uplink {
	u.Bridge, u.Alias = bridgeName, endpoint.BridgeAlias
	return u
}

// takeUplink sees to it that the network's uplink is a port of its bridge, and that the
// host has on the bridge what it had on the NIC.
func (s *session) takeUplink(ctx context.Context, nw *Network) error {
	if nw.Uplink.NIC == "" {
		return nil
	}
	_, err := s.uplinks().Ensure(ctx, nw.Name, ours(nw.Uplink, nw.Bridge))
	return err
}

// mendUplink puts right what somebody undid of a takeover that is on record.
func (s *session) mendUplink(ctx context.Context, nic string) error {
	if nic == "" {
		return nil
	}
	return s.uplinks().Mend(ctx, nic)
}

// releaseUplink gives a NIC back with the last network that is on its bridge.
func (s *session) releaseUplink(ctx context.Context, rec *state.Network) error {
	if rec.Uplink == "" {
		return nil
	}
	shared, err := s.sharers(rec)
	if err != nil || len(shared) > 0 {
		return err
	}
	return s.uplinks().GiveBack(ctx, rec.Uplink)
}

// PlanUplink gives the steps by which a NIC would be taken over. Nothing is changed.
func (n *Node) PlanUplink(ctx context.Context, u uplink.Uplink) (*uplink.Steps, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	return takeover.Plan(ctx, ours(u, u.Bridge))
}

// TakeUplink takes a NIC over, as the first Add of a network with that uplink would, and
// gives what the operator should know of how it went.
func (n *Node) TakeUplink(ctx context.Context, u uplink.Uplink) (notes []string, _ error) {
	err := n.aboutUplink(ctx, u.NIC, func(s *session) error {
		var err error
		notes, err = s.uplinks().Ensure(ctx, "", ours(u, u.Bridge))
		return err
	})
	return notes, err
}

// RestoreUplink gives a NIC back. It refuses while pods are on the LAN by it (ErrAttached). A
// bridge may be named, to be sure that it is the one that is meant.
func (n *Node) RestoreUplink(ctx context.Context, nic, bridgeName string) error {
	return n.aboutUplink(ctx, nic, func(s *session) error {
		if err := s.refusePodsBehind(nic); err != nil {
			return err
		}
		return s.uplinks().Restore(ctx, nic, bridgeName)
	})
}

// aboutUplink does something about an uplink, under the lock that keeps Adds away, and, before
// that, the one of the lease that the host has by the NIC.
func (n *Node) aboutUplink(ctx context.Context, nic string, do func(*session) error) error {
	if err := n.usable(ctx); err != nil {
		return err
	}
	s, err := n.openKnown()
	if err != nil {
		return err
	}
	defer s.Close()
	if s.hostLease, err = takeover.LockHostLease(ctx, n.leaseDir, nic); err != nil {
		return err
	}
	if err := s.enterAlone(ctx); err != nil {
		return err
	}
	return do(s)
}

// refusePodsBehind keeps pods from losing their LAN.
func (s *session) refusePodsBehind(nic string) error {
	networks, _, err := s.dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	for _, n := range networks {
		if n.Uplink != nic {
			continue
		}
		attachments, _, err := s.dir.List(n.Name)
		if err != nil {
			return fail.State(err)
		}
		if len(attachments) > 0 {
			return fail.Errorf(ErrAttached, "uplink %s: network %q has %s on it: remove the pods first", nic, n.Name, fail.Count(len(attachments), "attachment", "attachments"))
		}
	}
	return nil
}

// UplinkReport is what is known of one uplink.
type UplinkReport struct {
	NIC    string       `json:"nic"`
	Bridge string       `json:"bridge"`
	State  uplink.State `json:"state"`
	// Differences are what is not as the takeover made it.
	Differences []string `json:"differences"`
}

// Uplinks reports on the NICs that are taken over, or on one of them, if nic is not empty. It
// changes nothing.
func (n *Node) Uplinks(ctx context.Context, nic string) ([]UplinkReport, error) {
	if err := n.usable(ctx); err != nil {
		return nil, err
	}
	s, err := n.openKnown()
	if err != nil {
		return nil, err
	}
	defer s.Close()
	nics, err := s.dir.Uplinks()
	if err != nil {
		return nil, fail.State(err)
	}
	if nic != "" {
		nics = slices.DeleteFunc(nics, func(n string) bool { return n != nic })
	}
	list := []UplinkReport{}
	for _, name := range nics {
		r, err := s.uplinks().Report(ctx, name)
		if err != nil {
			return nil, err
		}
		if r != nil {
			list = append(list, UplinkReport{name, r.Bridge, r.State, r.Differences})
		}
	}
	return list, nil
}
