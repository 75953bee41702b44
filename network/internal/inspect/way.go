package inspect

import (
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// way finds that the host sends elsewhere what is for a pod, though the routes of its subnets are
// there: by a rule or a route of others, which is left to them. at is the link that has the gateways;
// of one in a VRF, the host's own rules say nothing.
func way(s *session.Session, nw *state.Network, a *state.Attachment, at *bridge.Link, found *Findings) error {
	if at.Index == 0 || at.Master != 0 {
		return nil
	}
	for _, address := range a.Addresses {
		gw := netip.PrefixFrom(address.Gateway, address.Prefix.Bits())
		if !slices.Contains(nw.Gateways, gw) || gw.Masked() != address.Prefix.Masked() {
			continue // the host has no route to it by us
		}
		if err := diversion(s, at, address.Prefix, found); err != nil {
			return err
		}
	}
	return nil
}

// diversion finds that the host sends what is for an address elsewhere.
func diversion(s *session.Session, at *bridge.Link, own netip.Prefix, found *Findings) error {
	switch r, err := s.Links.Routes().Get(own.Addr()); {
	case err == nil && r.Link == at.Index:
		return nil
	case err != nil && !recorded.IsNoRoute(err):
		return err
	}
	if wrong, err := recorded.Disconnected(s.Links.Routes(), own, at.Index); wrong != "" || err != nil {
		return err // which is said of the network
	}
	found.Advise(tombolo.RemedyConfigure, "the host does not send what is for %s to %s: see ip route get %s, and ip rule", own.Addr(), at.Name, own.Addr())
	return nil
}
