package network

import (
	"context"
	"errors"
	"net/netip"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
)

// uplinkPart is that the NIC of a network of the LAN is a port of the bridge: the takeover.
type uplinkPart struct{}

func (uplinkPart) look(ctx context.Context, n *site) error {
	if n.rec.Uplink == "" {
		return nil
	}
	if !n.usual {
		diffs, err := n.s.Uplinks().Differences(ctx, n.rec.Uplink, n.rec.Bridge)
		n.found.AddAll(diffs, tombolo.RemedyRepair)
		return err
	}
	nic, err := n.s.link(ctx, n.rec.Uplink)
	if err == nil && (nic.Index == 0 || nic.Master != n.bridge.Index) {
		n.found.Add("uplink %s is not a port of bridge %s", n.rec.Uplink, n.rec.Bridge)
	}
	return err
}

// make mends a takeover. An Add has taken the NIC over before the rest of its network is known.
func (uplinkPart) make(ctx context.Context, n *site) (bool, error) {
	if n.rec.Uplink == "" || n.want != nil && n.want.Uplink.NIC != "" {
		return false, nil
	}
	return false, n.s.Uplinks().Mend(ctx, n.rec.Uplink, nil)
}

// mendUplinks mends those that no network is by, too.
func mendUplinks(ctx context.Context, s *session) error {
	nics, err := s.Dir.Uplinks()
	errs := []error{err}
	for _, nic := range nics {
		errs = append(errs, s.Uplinks().Mend(ctx, nic, nil))
	}
	return errors.Join(errs...)
}

// Uplinks is what takeovers need of this call.
func (s *session) Uplinks() *takeover.Node {
	return &takeover.Node{Dir: s.Dir, Links: s.Links, LeaseDir: s.LeaseDir, Later: s.Later, Made: s.placeLoopback}
}

// releaseUplink gives a NIC back with the last network that is on its bridge.
func releaseUplink(ctx context.Context, s *session, rec *state.Network) error {
	if rec.Uplink == "" {
		return nil
	}
	shared, err := sharers(s, rec)
	if err != nil || len(shared) > 0 {
		return err
	}
	return s.Uplinks().GiveBack(ctx, rec.Uplink)
}

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

// Uplinks are the NICs of the host that are ports of bridges, as pods on the LAN need them.
type Uplinks struct{ node *Node }

// Uplinks gives access to the NICs that are taken over, or may be.
func (n *Node) Uplinks() Uplinks { return Uplinks{n} }

// Plan gives the steps by which a NIC would be taken over. A DHCP server has to confirm a lease of
// the host's, as before a takeover; nothing is changed. For a NIC that is taken over already, there are none: ErrConflict.
func (u Uplinks) Plan(ctx context.Context, want uplink.Uplink) (*uplink.Steps, error) {
	if err := checkNIC(want.NIC); err != nil {
		return nil, err
	}
	s, err := u.node.openKnown(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	if taken, err := s.Uplinks().IsTaken(want.NIC); err != nil {
		return nil, err
	} else if taken {
		return nil, fail.Errorf(fail.ErrConflict, "uplink %s is taken over already: tombolo uplink status %s says what differs, and tombolo uplink restore %s gives it back",
			want.NIC, want.NIC, want.NIC)
	}
	return s.Uplinks().Plan(ctx, ours(want, want.Bridge))
}

// Take takes a NIC over, as the first Add of a network with that uplink would.
func (u Uplinks) Take(ctx context.Context, want uplink.Uplink) error {
	return u.about(ctx, want.NIC, func(s *session) error {
		return s.Uplinks().Ensure(ctx, ours(want, want.Bridge))
	})
}

// Restore gives a NIC back. It refuses while pods are on the LAN by it (ErrAttached). A
// bridge may be named, to be sure that it is the one that is meant.
func (u Uplinks) Restore(ctx context.Context, nic, bridgeName string) error {
	return u.node.nameDead(ctx, "", u.about(ctx, nic, func(s *session) error {
		if err := refusePodsBehind(s, nic); err != nil {
			return err
		}
		return s.Uplinks().Restore(ctx, nic, bridgeName)
	}))
}

// about does something about an uplink, under the lock that keeps Adds away.
func (u Uplinks) about(ctx context.Context, nic string, do func(*session) error) error {
	if err := checkNIC(nic); err != nil {
		return err
	}
	return u.node.about(ctx, func(s *session) error {
		if err := s.EnterAlone(ctx); err != nil {
			return err
		}
		return do(s)
	})
}

// UplinkReport is what is known of a NIC that is taken over.
type UplinkReport struct {
	NIC    string       `json:"nic"`
	Bridge string       `json:"bridge"`
	State  uplink.State `json:"state"`
	// Differences are what is not as the takeover made it, or why that is not known (Err).
	Differences []string `json:"differences"`
	Err         error    `json:"-"`
	// Leased says that the host leased an address by the NIC, which the keeper is to renew. LeaseTrouble
	// is what is wrong with the host's leases.
	Leased       bool     `json:"leased"`
	LeaseTrouble []string `json:"leaseTrouble,omitempty"`
	// From and To are the host's addresses, by the record of the takeover and by now.
	From []netip.Prefix `json:"-"`
	To   []netip.Prefix `json:"-"`
}

// List reports on the NICs that are taken over, or on one of them, if nic is not empty. It
// takes no lock and changes nothing.
func (u Uplinks) List(ctx context.Context, nic string) ([]UplinkReport, error) {
	s, err := u.node.openKnown(ctx)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	nics, err := s.Dir.Uplinks()
	if err != nil {
		return nil, fail.State(err)
	}
	list := []UplinkReport{}
	for _, name := range nics {
		if nic != "" && name != nic {
			continue
		}
		rec, now, diffs, err := s.Uplinks().Look(ctx, name)
		switch {
		case err != nil:
			list = append(list, UplinkReport{NIC: name, Differences: []string{err.Error()}, Err: err})
		case rec != nil:
			list = append(list, UplinkReport{
				NIC: name, Bridge: rec.Bridge, State: rec.State, Differences: printable.Texts(diffs),
				Leased: rec.ClientID != "", LeaseTrouble: takeover.LeaseTrouble(s.LeaseDir), From: rec.HostAddresses(), To: now.HostAddresses(),
			})
		}
	}
	return list, nil
}

// Mend puts right what List found of a NIC, finishes what a killed process left, and has the
// keeper renew the host's lease. Where the host has other addresses, pods have to follow them first (Repair):
// followed are those to which they have.
func (u Uplinks) Mend(ctx context.Context, nic string, followed []netip.Prefix) error {
	return u.about(ctx, nic, func(s *session) error { return s.Uplinks().Mend(ctx, nic, followed) })
}
