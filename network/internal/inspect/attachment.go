package inspect

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
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
	ep := endpoint.Of(rec)
	ep.Masquerade = ep.Masquerade && nw.Masquerade
	if diffs, err = s.Firewall.CheckEndpoint(ctx, ep); err != nil {
		return nil, err
	}
	found.AddAll(diffs, tombolo.RemedyRepair)
	if rec.IPAMType == endpoint.Leased {
		if err := Lease(rec, false, found); err != nil {
			return nil, err
		}
	}
	if err := Limits(ctx, s, rec, found); err != nil {
		return nil, err
	}
	at, err := s.Links.Link(ctx, nw.GatewayLink())
	if errors.Is(err, fs.ErrNotExist) {
		return found.List, nil
	}
	if err == nil {
		err = way(s, nw, rec, at, found)
	}
	return found.List, err
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

// Shared compares the parts of an attachment's network, and the attachment's share in them; gateway
// says that the bridge is to have the gateways of its addresses.
func Shared(ctx context.Context, s *session.Session, a *state.Attachment, gateway bool, found *Findings) error {
	rec, err := s.Dir.LoadNetwork(a.Network)
	if err != nil {
		found.Add("the record of network %q: %v", a.Network, err)
		return nil
	}
	l, err := Bridge(ctx, s, rec, found)
	if err != nil {
		return err
	}
	at, err := recorded.GatewayLink(ctx, s.Links, rec, l)
	if err != nil {
		return err
	}
	own := *rec
	own.Gateways = nil
	for _, address := range a.Addresses {
		if gateway && address.Gateway.IsValid() {
			own.Gateways = append(own.Gateways, netip.PrefixFrom(address.Gateway, address.Prefix.Bits()))
		}
	}
	if err := Gateways(ctx, s, &own, at, found); err != nil {
		return err
	}
	if err := way(s, &own, a, at, found); err != nil {
		return err
	}
	if endpoint.PublishesIPv4(a) {
		if err := Loopback(ctx, s, rec, at, l, found); err != nil {
			return err
		}
	}
	ep := endpoint.Of(a)
	diffs, err := s.Firewall.Check(ctx, recorded.Rules(rec, l), &ep)
	if err != nil {
		return err
	}
	found.AddAll(diffs, "")
	diffs, err = s.Foreign(rec.AdminChain).Check(ctx)
	found.AddAll(diffs, "")
	return err
}
