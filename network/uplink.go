package network

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
)

// ours is an uplink for a bridge that is made to be known as ours.
func ours(u uplink.Uplink, bridgeName string) uplink.Uplink {
	u.Bridge, u.Alias = bridgeName, endpoint.BridgeAlias
	return u
}

// checkNIC refuses what no link can be called.
func checkNIC(nic string) error {
	if !ident.IsLinkName(nic) {
		return fail.Errorf(ErrInvalid, "uplink %q cannot name a link", nic)
	}
	return nil
}

// PlanUplink gives the steps by which a NIC would be taken over. Nothing is changed. For a NIC
// that is taken over already, there are none: ErrConflict.
func (n *Node) PlanUplink(ctx context.Context, u uplink.Uplink) (*uplink.Steps, error) {
	if err := checkNIC(u.NIC); err != nil {
		return nil, err
	}
	taken, err := n.Uplinks(ctx, u.NIC)
	if err != nil {
		return nil, err
	}
	if len(taken) > 0 {
		return nil, fail.Errorf(fail.ErrConflict, "uplink %s is taken over already: tombolo uplink status %s says what differs, and tombolo uplink restore %s gives it back",
			u.NIC, u.NIC, u.NIC)
	}
	return takeover.Plan(ctx, ours(u, u.Bridge))
}

// TakeUplink takes a NIC over, as the first Add of a network with that uplink would.
func (n *Node) TakeUplink(ctx context.Context, u uplink.Uplink) error {
	return n.aboutUplink(ctx, u.NIC, func(s *session.Session) error {
		return s.Uplinks().Ensure(ctx, ours(u, u.Bridge))
	})
}

// RestoreUplink gives a NIC back. It refuses while pods are on the LAN by it (ErrAttached). A
// bridge may be named, to be sure that it is the one that is meant.
func (n *Node) RestoreUplink(ctx context.Context, nic, bridgeName string) error {
	return n.nameDead(ctx, "", n.aboutUplink(ctx, nic, func(s *session.Session) error {
		if err := teardown.RefusePodsBehind(s, nic); err != nil {
			return err
		}
		return s.Uplinks().Restore(ctx, nic, bridgeName)
	}))
}

// aboutUplink does something about an uplink, under the lock that keeps Adds away.
func (n *Node) aboutUplink(ctx context.Context, nic string, do func(*session.Session) error) error {
	if err := checkNIC(nic); err != nil {
		return err
	}
	return n.about(ctx, func(s *session.Session) error {
		if err := s.EnterAlone(ctx); err != nil {
			return err
		}
		return do(s)
	})
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
	s, err := n.openKnown(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	nics, err := s.Dir.Uplinks()
	if err != nil {
		return nil, fail.State(err)
	}
	if nic != "" {
		nics = slices.DeleteFunc(nics, func(n string) bool { return n != nic })
	}
	list := []UplinkReport{}
	for _, name := range nics {
		seen, err := s.Uplinks().Look(ctx, name)
		switch {
		case err != nil:
			list = append(list, UplinkReport{NIC: name, Differences: []string{err.Error()}})
		case seen != nil:
			r := UplinkReport{name, seen.Bridge, seen.State, seen.Differences}
			if r.State == uplink.Taken {
				r.Differences = append(r.Differences, takeover.LeaseTrouble(s.LeaseDir)...)
			}
			list = append(list, r)
		}
	}
	return list, nil
}

// TakenNIC is a NIC that is taken over.
type TakenNIC struct {
	NIC, Bridge string
	State       uplink.State
	// Leased says that the host leased an address by the NIC, which the keeper is to renew.
	Leased bool
	// Differences are what is not as the takeover made it.
	Differences []string
	// From and To are the host's addresses, by the record of the takeover and by now.
	From, To []netip.Prefix
}

// LookAtUplinks compares the NICs that are taken over with their records. It takes no lock and changes
// nothing. It goes on past one for which that fails.
func (n *Node) LookAtUplinks(ctx context.Context) ([]TakenNIC, error) {
	s, err := n.openKnown(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	nics, err := s.Dir.Uplinks()
	if err != nil {
		return nil, fail.State(err)
	}
	var list []TakenNIC
	var errs []error
	for _, nic := range nics {
		seen, err := s.Uplinks().Look(ctx, nic)
		errs = append(errs, err)
		if seen != nil {
			list = append(list, TakenNIC(*seen))
		}
	}
	return list, errors.Join(errs...)
}

// MendUplink puts right what LookAtUplinks found of a NIC, finishes what a killed process left, and has the
// keeper renew the host's lease. Where the host has other addresses, pods have to follow them first (Repair):
// followed are those to which they have.
func (n *Node) MendUplink(ctx context.Context, nic string, followed []netip.Prefix) error {
	return n.aboutUplink(ctx, nic, func(s *session.Session) error { return s.Uplinks().Keep(ctx, nic, followed) })
}
