package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
)

// A podPart is one thing that a pod has on its network. Its file has all that is done with it: also how an
// Add makes it (add.go has the order of that) and a Del takes it down (del.go).
type podPart interface {
	// look adds to p.found what differs from the record, and changes nothing.
	look(ctx context.Context, p *attached) error
	// mend puts back what a pod has outside of its namespace, under the exclusive lock. Its port is there.
	mend(ctx context.Context, p *attached) error
}

// podParts are in the order in which they are mended: the guard is there before the port is on the bridge again,
// since it holds for all that the pod sends.
func podParts() []podPart {
	return []podPart{leasePart{}, endpointPart{}, portPart{}, limitsPart{}, wayPart{}}
}

// attached is a pod as a call finds it.
type attached struct {
	*state.Attachment
	s     *session
	nw    *state.Network
	link  *bridge.Link // its port, where that is to be mended
	want  bridge.Port  // what the port and the pod's interface are compared with
	pod   *netns.NS    // nil: it is gone, or another pod's, as lost says
	lost  error
	gone  bool // the port is, so nothing else is reported: without it the pod's other objects are of no use
	found findings
	// keeperOptional says that the pod's lease need not be renewed.
	keeperOptional bool
	anyDefault     bool // the pod's default routes may lead anywhere
}

// find gives a pod that is to be looked at.
func (s *session) find(ctx context.Context, nw *state.Network, rec *state.Attachment) (*attached, error) {
	br, err := s.link(ctx, rec.Bridge)
	if err != nil {
		return nil, err
	}
	p := &attached{Attachment: rec, s: s, nw: nw, want: portOn(rec, br)}
	p.want.Addresses, p.want.Routes = lasting(rec), routes(rec)
	p.pod, p.lost = netns.OpenSame(rec.NetNS, rec.NetNSCookie)
	return p, nil
}

// look has all parts look.
func (p *attached) look(ctx context.Context) error {
	for _, part := range podParts() {
		if err := part.look(ctx, p); err != nil || p.gone {
			return err
		}
	}
	return nil
}

// reattach mends what the pods that are there have outside of their namespaces.
func (n *site) reattach(ctx context.Context) error {
	defer n.s.remember()()
	for _, a := range n.attachments {
		if a.State != state.Ready && (a.Guard == "" || !n.rec.Guards()) {
			continue // its own Add is at it, or never came to its end
		}
		link, err := n.s.link(ctx, a.HostIf)
		if err != nil {
			return err
		}
		if link.Index == 0 {
			continue // the pod is gone, and its Del still to come
		}
		parts := podParts()
		if a.State != state.Ready {
			parts = []podPart{endpointPart{}} // its Add waits for its lease, and the pod has its interface already
		}
		if err := n.followNIC(ctx, a); err != nil {
			return err
		}
		p := &attached{Attachment: a, s: n.s, nw: n.rec, link: link}
		for _, part := range parts {
			if err := part.mend(ctx, p); err != nil {
				return err
			}
		}
		n.back = append(n.back, endpoint.In(a, n.rec))
	}
	return nil
}
