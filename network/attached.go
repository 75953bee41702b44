package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
)

// A podPart is one object or setting of a pod on its network. Its file contains everything about it, including its
// creation in an Add (add.go has the order) and its removal in a Del (del.go).
type podPart interface {
	// look adds differences from the record to p.found, and changes nothing.
	look(ctx context.Context, p *podSite) error
	// mend restores the part outside the pod's namespace, under the exclusive lock. It is called only if the pod's
	// port exists.
	mend(ctx context.Context, p *podSite) error
}

// podParts returns the parts in the order of their repair. endpointPart comes before portPart, because the guard must
// exist before the port is on the bridge again.
func podParts() []podPart {
	return []podPart{leasePart{}, endpointPart{}, portPart{}, limitsPart{}, hostRoutePart{}}
}

// podSite describes a pod as a call finds it, and its intended state.
type podSite struct {
	*state.Attachment
	s     *session
	nw    *state.Network
	link  *bridge.Link // the pod's port, if it is to be repaired
	want  bridge.Port  // the intended port and interface
	pod   *netns.NS    // nil if it is gone or belongs to another pod, with the reason in lost
	lost  error
	gone  bool // the port is gone; nothing else is reported, since the pod's other objects are useless without it
	found findings
	// keeperOptional means that the pod's lease needs no keeper that renews it.
	keeperOptional bool
	anyDefault     bool // the pod's default routes may lead anywhere
}

// find returns a pod with its network, so that the method look of its parts can compare the pod with its record.
func (s *session) find(ctx context.Context, nw *state.Network, rec *state.Attachment) (*podSite, error) {
	br, err := s.link(ctx, rec.Bridge)
	if err != nil {
		return nil, err
	}
	p := &podSite{Attachment: rec, s: s, nw: nw, want: portOn(rec, br)}
	p.want.Addresses, p.want.Routes = lastingPrefixes(rec), lastingRoutes(rec)
	p.pod, p.lost = netns.OpenSame(rec.NetNS, rec.NetNSCookie)
	return p, nil
}

// look calls the method look of each part. It stops if an earlier part finds that the port is gone.
func (p *podSite) look(ctx context.Context) error {
	for _, part := range podParts() {
		if err := part.look(ctx, p); err != nil || p.gone {
			return err
		}
	}
	return nil
}

// reattach repairs the host's side of the network's existing pods.
func (n *site) reattach(ctx context.Context) error {
	defer n.s.cacheBridges()()
	for _, a := range n.attachments {
		if a.State != state.Ready && (a.Guard == "" || !n.rec.Guards()) {
			continue // its own Add is in progress, or was never finished
		}

		link, err := n.s.link(ctx, a.HostIf)
		if err != nil {
			return err
		}

		if link.Index == 0 {
			continue // the pod is gone, and its Del is still to come
		}

		parts := podParts()
		if a.State != state.Ready {
			parts = []podPart{endpointPart{}} // its Add is waiting for a lease, and the pod has its interface already
		}

		if err := n.followNIC(ctx, a); err != nil {
			return err
		}

		p := &podSite{Attachment: a, s: n.s, nw: n.rec, link: link}
		for _, part := range parts {
			if err := part.mend(ctx, p); err != nil {
				return err
			}
		}

		n.restored = append(n.restored, endpoint.In(a, n.rec))
	}

	return nil
}
