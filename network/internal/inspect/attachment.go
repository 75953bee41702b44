package inspect

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
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
