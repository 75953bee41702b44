package network

import (
	"context"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/vlan"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// defaultVLAN returns the VLAN of ports whose networks have no VLAN setting, on one of our bridges that separates
// VLANs. On any other bridge it returns the zero Membership: there is only one VLAN, or the bridge's owner decides.
func defaultVLAN(br *bridge.Link) (m vlan.Membership) {
	if br.Bridge != nil && br.Bridge.VLANFiltering && br.Alias == endpoint.BridgeAlias {
		m.ID = 1
	}
	return m
}

// eachInDefaultVLAN calls the function do for the links that a network without a VLAN setting needs in the default
// VLAN. These are the bridge, if the host is in the network, and the uplink if it is a port. The links may be in other
// VLANs too.
func (n *site) eachInDefaultVLAN(ctx context.Context, do func(index int, name string, m vlan.Membership) error) error {
	m := defaultVLAN(n.bridge)
	if m.IsZero() || len(n.rec.Gateways) == 0 && n.rec.Uplink == "" {
		return nil
	}

	m.KeepDefault = true
	if err := do(n.bridge.Index, n.bridge.Name, m); err != nil {
		return err
	}

	nic, err := n.bridgedNIC(ctx)
	if nic == nil || err != nil {
		return nil // uplinkPart reports the missing NIC
	}

	return do(nic.Index, nic.Name, m)
}

// hostVLAN returns the host's link in the VLAN of a network. ok is false if the network has no VLAN.ID, or if the
// host is not its gateway.
func hostVLAN(rec *state.Network, l *bridge.Link) (_ vlan.Link, ok bool) {
	return vlan.Link{Bridge: l.Index, Name: rec.GatewayLink(), ID: rec.VLAN.ID, MTU: l.MTU, MAC: l.MAC,
			Alias: endpoint.BridgeAlias},
		rec.VLAN.ID != 0 && len(rec.Gateways) > 0
}

// taggedVLANs returns the VLANs that a network's uplink carries with tags. Frames without a tag are the host's own.
func taggedVLANs(rec *state.Network) vlan.Ranges {
	m := rec.VLAN
	if m.ID != 0 {
		m.Trunk = append(slices.Clip(m.Trunk), vlan.Range{First: m.ID, Last: m.ID})
	}
	return m.Trunk
}

// vlanPart is the part with the host's link in the network's VLAN, and with the uplink's membership in the network's
// VLANs.
type vlanPart struct{}

func (vlanPart) look(ctx context.Context, n *site) error {
	if n.bridge.Index == 0 {
		return nil
	}

	vlans := n.s.Links.VLANs()
	if n.rec.VLAN.IsZero() {
		return n.eachInDefaultVLAN(ctx, func(index int, name string, m vlan.Membership) error {
			diffs, err := vlans.Check(ctx, index, name, m)
			n.found.addAll(diffs, tombolo.RemedyRepair)
			return err
		})
	}

	if want, ok := hostVLAN(n.rec, n.bridge); ok {
		diffs, err := vlans.CheckLink(ctx, want)
		if err != nil {
			return err
		}
		n.found.addAll(diffs, tombolo.RemedyRepair)
	}

	nic, err := n.bridgedNIC(ctx)
	if nic == nil || err != nil {
		return nil // findUplink reports the missing NIC
	}

	outside, err := vlans.Outside(ctx, nic.Index, taggedVLANs(n.rec)...)
	if len(outside) > 0 {
		n.found.addAll([]tombolo.Difference{{Object: "uplink " + n.rec.Uplink, What: "VLANs",
			Want: vlan.Ranges(outside).String()}}, tombolo.RemedyRepair)
	}

	return err
}

func (vlanPart) make(ctx context.Context, n *site) (changed bool, _ error) {
	joined, err := ensureVLANs(ctx, n)
	if err == nil {
		err = n.findGatewayLink(ctx)
	}
	if err == nil && joined && n.gatewayLink.Index != n.bridge.Index && n.gatewayLink.Alias == endpoint.BridgeAlias {
		n.s.placeLoopback(ctx, n.gatewayLink)
	}
	return joined, err
}

func ensureVLANs(ctx context.Context, n *site) (changed bool, _ error) {
	vlans := n.s.Links.VLANs()
	if n.rec.VLAN.IsZero() {
		err := n.eachInDefaultVLAN(ctx, func(index int, _ string, m vlan.Membership) error {
			joined, err := vlans.Ensure(ctx, index, m)
			changed = changed || joined
			return err
		})
		return changed, err
	}

	if want, ok := hostVLAN(n.rec, n.bridge); ok {
		var err error
		if changed, err = vlans.EnsureLink(ctx, want); err != nil {
			return false, err
		}
	}

	nic, err := n.bridgedNIC(ctx)
	if nic == nil || err != nil {
		return changed, err
	}

	joined, err := vlans.Join(ctx, nic.Index, taggedVLANs(n.rec)...)
	return changed || joined, err
}

// bridgedNIC returns the network's uplink if it is a port of the bridge, and otherwise nil.
func (n *site) bridgedNIC(ctx context.Context) (*bridge.Link, error) {
	if n.rec.Uplink == "" {
		return nil, nil
	}
	nic, err := n.s.Links.Link(ctx, n.rec.Uplink)
	if err != nil || nic.Master != n.bridge.Index {
		return nil, err
	}
	return nic, nil
}

// removeVLANLink removes the host's link in a network's VLAN unless another network on the bridge has that VLAN. The
// uplink stays in its VLANs: its owner may have put it there.
func removeVLANLink(ctx context.Context, s *session, rec *state.Network, l *bridge.Link,
	shared []*state.Network) error {
	host, ok := hostVLAN(rec, l)
	if !ok || slices.ContainsFunc(shared, func(o *state.Network) bool { return o.VLAN.ID == rec.VLAN.ID }) {
		return nil
	}
	return s.Links.VLANs().RemoveLink(ctx, host)
}
