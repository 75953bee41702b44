package recorded

import (
	"context"
	"errors"
	"io/fs"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// VLANs are those of a port, as they are on record.
func VLANs(v state.VLAN) vlan.Membership {
	trunk, _ := vlan.ParseTrunk(v.Trunk) // what is on record was written by VLANRecord
	return vlan.Membership{ID: uint16(v.ID), Trunk: trunk, KeepDefault: v.KeepDefault}
}

// VLANRecord is VLANs' inverse.
func VLANRecord(m vlan.Membership) state.VLAN {
	return state.VLAN{ID: int(m.ID), Trunk: vlan.Trunk(m.Trunk), KeepDefault: m.KeepDefault && !m.IsZero()}
}

// DefaultVLAN is that of ports of networks without VLANs, on a bridge of ours that keeps VLANs apart.
// On another, all are one, or its owner has a say.
func DefaultVLAN(br *bridge.Link) (m vlan.Membership) {
	if br.Bridge != nil && br.Bridge.VLANFiltering && br.Alias == endpoint.BridgeAlias {
		m.ID = 1
	}
	return m
}

// inDefault calls do for the links that a network without VLANs needs in the default one: where the
// host is in the network, the bridge, and its uplink. They may be in others besides.
func inDefault(ctx context.Context, links *bridge.Conn, rec *state.Network, l *bridge.Link, do func(index int, name string, m vlan.Membership) error) error {
	m := DefaultVLAN(l)
	if m.IsZero() || len(rec.Gateways) == 0 && rec.Uplink == "" {
		return nil
	}
	m.KeepDefault = true
	if err := do(l.Index, l.Name, m); err != nil || rec.Uplink == "" {
		return err
	}
	nic, err := links.Link(ctx, rec.Uplink)
	if err != nil || nic.Master != l.Index {
		return nil // the uplink's part
	}
	return do(nic.Index, nic.Name, m)
}

// HostVLAN is the host's link in the VLAN of a network; ok is false where the host is in none:
// where the network has no VLAN, or the host is no gateway there.
func HostVLAN(rec *state.Network, l *bridge.Link) (_ vlan.Link, ok bool) {
	return vlan.Link{Bridge: l.Index, Name: rec.GatewayLink(), ID: uint16(rec.VLAN.ID), MTU: l.MTU, MAC: l.MAC, Alias: endpoint.BridgeAlias},
		rec.VLAN.ID != 0 && len(rec.Gateways) > 0
}

// Carried are the VLANs that a network's uplink carries with their tags. Its frames without
// one are the host's own.
func Carried(rec *state.Network) []vlan.Range {
	m := VLANs(rec.VLAN)
	if m.ID != 0 {
		m.Trunk = append(m.Trunk, vlan.Range{First: m.ID, Last: m.ID})
	}
	return m.Trunk
}

// VLANDifferences lists what the host and the uplink of a bridge lack of its network's VLANs.
func VLANDifferences(ctx context.Context, links *bridge.Conn, rec *state.Network, l *bridge.Link) ([]tombolo.Difference, error) {
	if l.Index == 0 {
		return nil, nil
	}
	var diffs []tombolo.Difference
	if rec.VLAN == (state.VLAN{}) {
		err := inDefault(ctx, links, rec, l, func(index int, name string, m vlan.Membership) error {
			more, err := links.VLANs().Check(ctx, index, name, m)
			diffs = append(diffs, more...)
			return err
		})
		return diffs, err
	}
	if want, ok := HostVLAN(rec, l); ok {
		var err error
		if diffs, err = links.VLANs().CheckLink(ctx, want); err != nil {
			return nil, err
		}
	}
	if rec.Uplink == "" {
		return diffs, nil
	}
	nic, err := links.Link(ctx, rec.Uplink)
	if err != nil || nic.Master != l.Index {
		return diffs, nil // found with the uplink
	}
	outside, err := links.VLANs().Outside(ctx, nic.Index, Carried(rec)...)
	if len(outside) > 0 {
		diffs = append(diffs, tombolo.Difference{Object: "uplink " + rec.Uplink, What: "VLANs", Want: vlan.Trunk(outside)})
	}
	return diffs, err
}

// EnsureVLANs makes what VLANDifferences compares.
func EnsureVLANs(ctx context.Context, links *bridge.Conn, rec *state.Network, l *bridge.Link) (changed bool, _ error) {
	if rec.VLAN == (state.VLAN{}) {
		err := inDefault(ctx, links, rec, l, func(index int, _ string, m vlan.Membership) error {
			joined, err := links.VLANs().Ensure(ctx, index, m)
			changed = changed || joined
			return err
		})
		return changed, err
	}
	if want, ok := HostVLAN(rec, l); ok {
		var err error
		if changed, err = links.VLANs().EnsureLink(ctx, want); err != nil {
			return false, err
		}
	}
	if rec.Uplink == "" {
		return changed, nil
	}
	nic, err := links.Link(ctx, rec.Uplink)
	if err != nil {
		return changed, err
	}
	joined, err := links.VLANs().Join(ctx, nic.Index, Carried(rec)...)
	return changed || joined, err
}

// GatewayLink is the link that has the gateways' addresses: the bridge l, or the host's in the
// network's VLAN, of which only the name is known where there is none.
func GatewayLink(ctx context.Context, links *bridge.Conn, rec *state.Network, l *bridge.Link) (*bridge.Link, error) {
	want, ok := HostVLAN(rec, l)
	if !ok {
		return l, nil
	}
	at, err := links.Link(ctx, want.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return &bridge.Link{Name: want.Name}, nil
	}
	return at, err
}
