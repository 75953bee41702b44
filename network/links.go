package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Links are the links of the networks that have pods.
type Links struct {
	Bridges, Ports []int // indexes of those that are there
	// Lacking says, by network, what of the host's links, addresses and routes is not as pods
	// need it. Upkeep.Repair puts it right.
	Lacking map[string][]string
}

// Links compares the host's links, addresses and routes with the records. It looks into
// no pod, and changes nothing. A port that is missing is no matter of its: the pod is gone.
func (u Upkeep) Links(ctx context.Context) (*Links, error) {
	s, records, err := u.node.openNetworks(ctx)
	if err != nil || s == nil {
		return &Links{}, err
	}
	defer s.Close()
	veths, err := s.Links.Veths(ctx)
	if err != nil {
		return nil, err
	}
	ports := map[string]*bridge.Link{}
	for i := range veths {
		ports[veths[i].Name] = &veths[i]
	}
	l := &Links{Lacking: map[string][]string{}}
	for _, rec := range records {
		if err := l.lookAt(ctx, &site{s: s, rec: rec}, ports); err != nil {
			return nil, err
		}
	}
	return l, nil
}

func (l *Links) lookAt(ctx context.Context, n *site, ports map[string]*bridge.Link) error {
	taken, err := n.s.Uplinks().Differences(ctx, n.rec.Uplink, n.rec.Bridge)
	if err != nil || len(taken) > 0 {
		return err // the keeper of uplinks mends the NIC first, and then has pods put back
	}
	if n.attachments, err = n.s.Attachments(n.rec.Name); err != nil {
		return err
	}
	// Those that the kernel tells of with its links, addresses and routes.
	if err := n.look(ctx, []part{bridgePart{}, vlanPart{}, forwardingPart{}, gatewayPart{}, loopbackPart{}}); err != nil {
		return err
	}
	if n.bridge.Index != 0 {
		l.Bridges = append(l.Bridges, n.bridge.Index)
	}
	if n.at.Index != 0 && n.at.Index != n.bridge.Index {
		l.Bridges = append(l.Bridges, n.at.Index)
	}
	for _, a := range n.attachments {
		link := ports[a.HostIf]
		if link == nil {
			continue
		}
		l.Ports = append(l.Ports, link.Index)
		if a.State != state.Ready || a.Bridge != n.rec.Bridge || n.bridge.Index == 0 {
			continue
		}
		diffs, err := onBridge(ctx, n.s, a, link, n.bridge)
		if len(diffs) > 0 {
			diffs, err = onBridgeNow(ctx, n.s, a, n.bridge)
		}
		if err != nil {
			return err
		}
		n.found.AddAll(diffs, "")
	}
	l.Lacking[n.rec.Name] = printable.Texts(n.found.List)
	return nil
}
