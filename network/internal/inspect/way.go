package inspect

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/route"
)

// way finds what keeps a pod from the host though the routes of its subnets are there: a rule or
// another route of the host's, or a neighbour that somebody has set. All of it is others', and so
// is left to them. at is the link that has the gateways; of one in a VRF, the host's own rules
// say nothing.
func way(s *session.Session, nw *state.Network, a *state.Attachment, at *bridge.Link, found *Findings) error {
	if at.Index == 0 || at.Master != 0 {
		return nil
	}
	for _, address := range a.Addresses {
		gw := netip.PrefixFrom(address.Gateway, address.Prefix.Bits())
		if !slices.Contains(nw.Gateways, gw) || gw.Masked() != address.Prefix.Masked() {
			continue // the host has no route to it by us
		}
		refused, err := refusal(s, at, address.Prefix.Addr(), found)
		if err == nil && !refused {
			err = diversion(s, at, address.Prefix, found)
		}
		if err == nil {
			err = wrongNeighbour(s, at, address.Prefix.Addr(), a.MAC, found)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// refusal finds a rule that refuses a pod's packets before the host asks a table of routes.
func refusal(s *session.Session, at *bridge.Link, own netip.Addr, found *Findings) (bool, error) {
	rules, err := s.Links.Routes().Rules(recorded.FamilyOf(own))
	for i := range rules {
		r := &rules[i]
		switch {
		case !isPlain(r) || !stopsFrom(r, at.Name, own) && !stopsTo(r, own):
		case r.Action == route.ToTable && r.Table != route.TableLocal && r.SuppressPrefixLength == nil:
			return false, nil // another table may have the way
		case isRefusal(r.Action):
			found.Advise(tombolo.RemedyConfigure, "the host's rule %q refuses packets of pods; this helps: %s", r, deletion(r, own))
			return true, nil
		}
	}
	return false, err
}

func isRefusal(a route.Action) bool {
	return a == route.RuleBlackhole || a == route.RuleUnreachable || a == route.RuleProhibit
}

// deletion is the command that deletes a rule, and no other of the same priority.
func deletion(r *route.Rule, of netip.Addr) string {
	words := fmt.Sprintf("ip %s rule del pref %d from %s", familyFlag(of), r.Priority, selector(r.From))
	if r.To.Bits() > 0 {
		words += " to " + r.To.String()
	}
	if r.IIF != "" {
		words += " iif " + r.IIF
	}
	kinds := map[route.Action]string{route.RuleBlackhole: "blackhole", route.RuleUnreachable: "unreachable", route.RuleProhibit: "prohibit"}
	return words + " " + kinds[r.Action]
}

func selector(p netip.Prefix) string {
	if p.Bits() <= 0 {
		return "all"
	}
	return p.String()
}

// isPlain says that a rule goes by addresses and by the link that packets come by alone.
func isPlain(r *route.Rule) bool {
	return r.OIF == "" && r.Mark|r.Mask|uint32(r.TOS)|uint32(r.IPProto) == 0 && r.SrcPorts == (route.PortRange{}) &&
		r.DstPorts == (route.PortRange{}) && r.UIDs == nil && !r.Invert && len(r.Other) == 0
}

func stopsFrom(r *route.Rule, link string, own netip.Addr) bool {
	return r.To.Bits() <= 0 && (r.From.Bits() <= 0 || r.From.Contains(own)) && (r.IIF == "" || r.IIF == link)
}

func stopsTo(r *route.Rule, own netip.Addr) bool {
	return r.From.Bits() <= 0 && r.To.Contains(own) && r.IIF == ""
}

func familyFlag(a netip.Addr) string {
	if a.Is4() {
		return "-4"
	}
	return "-6"
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
	found.Advise(tombolo.RemedyConfigure, "the host does not send what is for %s to %s: see ip route get %s, and ip %s rule", own.Addr(), at.Name, own.Addr(), familyFlag(own.Addr()))
	return nil
}

// wrongNeighbour finds a neighbour that the kernel never asks for.
func wrongNeighbour(s *session.Session, at *bridge.Link, own netip.Addr, mac string, found *Findings) error {
	n, err := s.Links.Routes().Neighbour(at.Index, own)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	want, parseErr := net.ParseMAC(mac)
	if err == nil && parseErr == nil && n.State&route.Permanent != 0 && !slices.Equal(n.MAC, want) {
		found.Advise(tombolo.RemedyConfigure, "the host's neighbour %s on %s has the MAC %s, and the pod has %s; this helps: ip neigh del %s dev %s",
			own, at.Name, n.MAC, want, own, at.Name)
	}
	return err
}
