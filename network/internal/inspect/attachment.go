package inspect

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/dhcplease"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Attachment finds what of an attachment is not as its record has it. Of one whose port is
// gone, nothing else is said: what it has besides serves nobody.
func Attachment(ctx context.Context, s *session.Session, nw *state.Network, rec *state.Attachment) ([]tombolo.Difference, error) {
	found := &Findings{}
	port, err := Port(ctx, s, rec)
	if err != nil {
		return nil, err
	}
	port.Addresses, port.Routes = recorded.Lasting(rec), recorded.Routes(rec)
	pod, lost := recorded.OpenPod(rec.NetNS, rec.NetNSCookie)
	if lost == nil {
		defer pod.Close()
	}
	diffs, err := s.Links.Check(ctx, pod, port)
	if err != nil {
		return nil, err
	}
	gone := len(diffs) > 0 && diffs[0].What == "link" && diffs[0].Have == "" && diffs[0].Want == port.Name
	switch {
	case gone && lost != nil:
		found.Advise(tombolo.RemedyCollect, "it is dead: port %s is missing, and its namespace is gone: %v", port.Name, lost)
		return found.List, nil
	case gone:
		found.AddAll(diffs[:1], tombolo.RemedyRecreate)
		return found.List, nil
	case lost != nil:
		found.Advise(tombolo.RemedyRecreate, "its namespace is gone: %v", lost)
	}
	for _, d := range diffs {
		d.Remedy = remedyOf(d, rec)
		found.AddAll([]tombolo.Difference{d}, "")
	}
	err = Beside(ctx, s, nw, rec, false, found)
	return found.List, err
}

// Beside compares what an attachment has beside its link: its elements, limits and lease, which need not be kept
// with keeperOptional, and the host's way to it.
func Beside(ctx context.Context, s *session.Session, nw *state.Network, rec *state.Attachment, keeperOptional bool, found *Findings) error {
	diffs, err := s.Firewall.CheckEndpoint(ctx, endpoint.In(rec, nw))
	if err != nil {
		return err
	}
	found.AddAll(diffs, tombolo.RemedyRepair)
	if rec.IPAMType == endpoint.Leased {
		diffs, err := dhcplease.Differences(rec, keeperOptional)
		if err != nil {
			return err
		}
		found.AddAll(diffs, tombolo.RemedyKeeper)
	}
	if shape := recorded.Shape(rec); !shape.IsZero() {
		diffs, err := bandwidth.On(s.Links.Socket()).Check(ctx, recorded.Target(rec), shape)
		if err != nil {
			return err
		}
		found.AddAll(diffs, tombolo.RemedyRepair)
	}
	at, err := s.Links.Link(ctx, nw.GatewayLink())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return way(s, nw, rec, at, found)
}

// remedyOf says what mends a difference of a port that is there, or of the pod's interface.
func remedyOf(d tombolo.Difference, rec *state.Attachment) tombolo.Remedy {
	inPod := strings.HasPrefix(d.Object, "interface ")
	switch {
	case d.Object == "pod":
		return tombolo.RemedyRecreate // the interface was renamed, or moved elsewhere
	case inPod && d.What == "MAC":
		return tombolo.RemedyRecreate // a program in the pod may go by it
	case inPod && d.What == "address" && strings.Contains(d.Want, " "):
		return tombolo.RemedyConfigure // the LAN's router advertises none
	case inPod && d.What == "address" && rec.IPAMType == endpoint.Leased:
		return tombolo.RemedyRecreate // it is to have the lease's lifetime
	}
	return tombolo.RemedyRepair
}

// PodAddresses lists the addresses of a pod, by whichever interface it has them.
func PodAddresses(pod *netns.NS) ([]netip.Prefix, error) {
	conn, err := addr.Dial(&addr.Config{NetNS: pod})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	have, err := conn.List(addr.Filter{})
	var list []netip.Prefix
	for _, a := range have {
		list = append(list, a.Prefix)
	}
	return list, err
}

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
