package network

import (
	"strconv"

	"github.com/tombolo-cni/tombolo/internal/ident"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// GatewayLink names the link that has the gateways' addresses: the bridge, or the host's link
// in the network's VLAN, "cbr0.100".
func (nw *Network) GatewayLink() string {
	switch {
	case nw == nil:
		return ""
	case nw.VLAN.ID == 0:
		return nw.Bridge
	}
	return nw.Bridge + "." + strconv.Itoa(int(nw.VLAN.ID))
}

// CheckVLAN refuses VLANs that a network cannot be in. The error matches ErrInvalid.
func (nw *Network) CheckVLAN() error {
	if nw == nil {
		return fail.Errorf(ErrInvalid, "the network is nil")
	}
	switch err := nw.VLAN.Check(); {
	case err != nil:
		return fail.Errorf(ErrInvalid, "network %q: %v", nw.Name, err)
	case nw.VLAN.ID != 0 && !ident.IsLinkName(nw.GatewayLink()):
		return fail.Errorf(ErrInvalid, "network %q: %q would name the link in its VLAN, and a link's name has 15 bytes at most: give the bridge a shorter one", nw.Name, nw.GatewayLink())
	case nw.VLAN.ID == 1 && nw.Gateway:
		return fail.Errorf(ErrInvalid, "network %q: in VLAN 1 the gateway is the bridge itself: leave vlan out, or choose another", nw.Name)
	case nw.Guard && !nw.MACOnly && len(nw.VLAN.Trunk) > 0:
		return fail.Errorf(ErrInvalid, "network %q: a guarded pod may not send the tagged frames of a trunk: leave out vlanTrunk, or guard and lanGuard", nw.Name)
	case nw.Exit == ExitHost && nw.VLAN.ID != 0:
		return fail.Errorf(ErrInvalid, `network %q: the host has its addresses outside of VLAN %d, so no default route can lead to it: set defaultRoute to "router"`, nw.Name, nw.VLAN.ID)
	}
	return nil
}
