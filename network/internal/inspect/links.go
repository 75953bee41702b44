package inspect

import (
	"context"
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Links says what of the host's links, addresses and routes is not as networks and their
// pods need it, by network, and gives the indexes of those that are there. It looks at the host
// alone and into no pod. A port that is missing is no matter of its: the pod is gone.
func Links(ctx context.Context, s *session.Session, records []*state.Network) (bridges, present []int, lacking map[string][]string, _ error) {
	lacking = map[string][]string{}
	veths, err := s.Links.Veths(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	ports := map[string]*bridge.Link{}
	for i := range veths {
		ports[veths[i].Name] = &veths[i]
	}
	for _, rec := range records {
		taken, err := s.Uplinks().Differences(ctx, rec.Uplink, rec.Bridge)
		if err != nil {
			return nil, nil, nil, err
		}
		if len(taken) > 0 {
			continue // the keeper of uplinks mends the NIC first, and then has pods put back
		}
		found := &Findings{}
		attachments, err := s.Attachments(rec.Name)
		if err != nil {
			return nil, nil, nil, err
		}
		l, err := bridgeAlone(ctx, s, rec, found)
		if err == nil && l.Index != 0 {
			bridges = append(bridges, l.Index)
			var at *bridge.Link
			if at, err = recorded.GatewayLink(ctx, s.Links, rec, l); err == nil {
				if at.Index != l.Index && at.Index != 0 {
					bridges = append(bridges, at.Index)
				}
				err = linksOf(ctx, s, rec, attachments, l, at, ports, found)
			}
		}
		if err != nil {
			return nil, nil, nil, err
		}
		for _, a := range attachments {
			if link := ports[a.HostIf]; link != nil {
				present = append(present, link.Index)
			}
		}
		for _, d := range found.List {
			lacking[rec.Name] = append(lacking[rec.Name], d.String())
		}
	}
	return bridges, present, lacking, nil
}

// linksOf finds what is missing beside a network's bridge.
func linksOf(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment, l, at *bridge.Link, ports map[string]*bridge.Link, found *Findings) error {
	if err := Gateways(ctx, s, rec, at, found); err != nil {
		return err
	}
	if err := way127(ctx, s, rec, attachments, at, l, found); err != nil {
		return err
	}
	for _, a := range attachments {
		link := ports[a.HostIf]
		if a.State != state.Ready || link == nil || a.Bridge != rec.Bridge {
			continue
		}
		diffs, err := onBridge(ctx, s, a, link, l)
		if len(diffs) > 0 {
			diffs, err = onBridgeNow(ctx, s, a, l)
		}
		if err != nil {
			return err
		}
		found.AddAll(diffs, "")
	}
	return nil
}

// onBridge says how a link differs from the port that an attachment should have.
func onBridge(ctx context.Context, s *session.Session, a *state.Attachment, link, br *bridge.Link) ([]tombolo.Difference, error) {
	p := recorded.PortOn(a, br)
	if !recorded.PortFits(link, br, &p) {
		return []tombolo.Difference{{Text: "port " + a.HostIf + " is not on bridge " + br.Name + " with the flags that it should have"}}, nil
	}
	if p.VLAN.IsZero() {
		return nil, nil
	}
	diffs, err := s.Links.VLANs().Check(ctx, link.Index, a.HostIf, p.VLAN)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	return diffs, err
}

// onBridgeNow is onBridge by another look, at a port and a record that no call is changing: its ADD may have ended since
// the ports were listed, and its DEL shuts a port before it deletes it.
func onBridgeNow(ctx context.Context, s *session.Session, a *state.Attachment, br *bridge.Link) ([]tombolo.Difference, error) {
	lock, err := s.Dir.LockAttachment(a.Network, a.Hash())
	if errors.Is(err, state.ErrBusy) || errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fail.State(err)
	}
	defer lock.Close()
	now, err := s.Dir.Load(a.Network, a.Hash())
	if err != nil {
		return nil, fail.State(err)
	}
	link, err := s.Links.Link(ctx, now.HostIf)
	if errors.Is(err, fs.ErrNotExist) || now.State != state.Ready {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return onBridge(ctx, s, now, link, br)
}
