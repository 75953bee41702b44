package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
)

// A part is one object or setting that the pods of a network share on the node. Its file contains everything about
// it, including its removal (remove.go has the order).
type part interface {
	// look compares the part with the network's record, and adds the differences to n.found. It changes nothing. If
	// n.quick is set, as for an Add, it requests single objects only, so its cost does not depend on the number of
	// pods.
	look(ctx context.Context, n *site) error
	// make creates or repairs the part, under the exclusive lock. It reports whether anything was missing that other
	// networks share. After an interruption, the next make completes the part.
	make(ctx context.Context, n *site) (changed bool, err error)
}

// parts returns all parts, in the order of their creation.
func parts() []part {
	return []part{
		bridgePart{}, uplinkPart{}, vlanPart{}, nextHopPart{}, forwardingPart{}, gatewayPart{},
		firewallPart{}, hostPart{}, loopbackPart{}, admissionPart{},
	}
}

// site describes a network as a call finds it on the node, or creates it.
type site struct {
	s           *session
	rec         *state.Network
	attachments []*state.Attachment
	required    *requirement // the requirements of the Add that looks, or nil
	quick       bool         // look only for things that an Add would notice

	// bridge has Index 0 if the bridge does not exist. gatewayLink is the link through which the host routes to the
	// pods. It is the bridge, the host's link in the network's VLAN, or the NIC that the bridge shares.
	bridge, gatewayLink *bridge.Link
	share               *nft.Share // the connection of the bridge to a LAN by a NIC that is not its port, or nil
	uplink              foundUplink
	found               findings
	closed              []nft.Closed // the families that the host forwards for pods only; nil before the look
	// needsCompletion means that little is missing: host ports are not reachable at 127.0.0.1, or the record's pools
	// differ from the requested ones. complete repairs both.
	needsCompletion bool
	restored        []nft.Endpoint // endpoints of pods that were restored
}

// pods returns the network's attachments and, while an Add looks, the future attachment of its pod.
func (n *site) pods() []*state.Attachment {
	if n.required == nil || n.required.Pod == nil {
		return n.attachments
	}
	return append(slices.Clip(n.attachments), n.required.Pod)
}

// find looks up the bridge, the link with the gateways, and the uplink in the kernel.
func (n *site) find(ctx context.Context) error {
	var err error
	if n.bridge, err = n.s.link(ctx, n.rec.Bridge); err != nil {
		return err
	}
	return n.findGatewayLink(ctx)
}

func (n *site) findGatewayLink(ctx context.Context) (err error) {
	n.gatewayLink = n.bridge
	if host, ok := hostVLAN(n.rec, n.bridge); ok {
		n.gatewayLink, err = n.s.link(ctx, host.Name)
	}
	if err != nil {
		return err
	}
	return n.findUplink(ctx)
}

// look calls the look methods of the listed parts. If n.quick is set, it stops at the first difference.
func (n *site) look(ctx context.Context, list []part) error {
	if err := n.find(ctx); err != nil {
		return err
	}

	var errs []error
	for _, p := range list {
		err := p.look(ctx, n)
		if n.quick && (err != nil || len(n.found.list) > 0) {
			return err
		}
		errs = append(errs, err)
	}

	return errors.Join(errs...)
}

// make creates or repairs all parts, and then the host's side of the network's pods. When all networks are repaired,
// the caller must call declareMended (see nft.Conn.Prepare).
func (n *site) make(ctx context.Context) (changed bool, _ error) {
	for i, p := range parts() {
		partChanged, err := p.make(ctx, n)
		changed = changed || partChanged
		if err != nil {
			return i > 0, err // how far the part came is unknown
		}
	}
	return changed, n.reattach(ctx)
}

// findings collects differences between records and the kernel.
type findings struct {
	list []tombolo.Difference
}

// add adds a difference with a formatted text and without a remedy.
func (f *findings) add(format string, args ...any) { f.advise("", format, args...) }

// advise adds a difference with its remedy.
func (f *findings) advise(remedy tombolo.Remedy, format string, args ...any) {
	f.list = append(f.list, tombolo.Difference{Text: fmt.Sprintf(format, args...), Remedy: remedy})
}

// texts returns a line of text for each difference.
func (f *findings) texts() []string { return printable.Texts(f.list) }

// addAll adds differences. If a difference has no remedy, it gets the given one.
func (f *findings) addAll(diffs []tombolo.Difference, remedy tombolo.Remedy) {
	for _, d := range diffs {
		d.Remedy = cmp.Or(d.Remedy, remedy)
		f.list = append(f.list, d)
	}
}

// A podPart is one object or setting of a pod on its network. Its file contains everything about it, including its
// creation in an Add (add.go has the order) and its removal in a Del (del.go).
type podPart interface {
	// look compares the part with the record, and adds the differences to p.found. It changes nothing.
	look(ctx context.Context, p *podSite) error
	// mend restores the part's objects outside of the pod's namespace, under the exclusive lock. It is called only if
	// the pod's port exists.
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
