package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// A part is one object or setting that the pods of a network share on the node. Its file contains everything about
// it, including its removal (remove.go has the order).
type part interface {
	// look compares the part with the record, and adds the differences to n.found. It changes nothing. If n.quick is
	// set, as for an Add, it requests single objects only, so that it costs the same with a thousand pods.
	look(ctx context.Context, n *site) error
	// make creates or repairs the part, under the exclusive lock. It reports whether anything was missing that other
	// networks share. The next make completes one that was interrupted.
	make(ctx context.Context, n *site) (changed bool, err error)
}

// parts returns all parts, in the order of their creation.
func parts() []part {
	return []part{
		bridgePart{}, uplinkPart{}, vlanPart{}, nextHopPart{}, forwardingPart{}, gatewayPart{},
		firewallPart{}, hostPart{}, loopbackPart{}, admissionPart{},
	}
}

// site is a network in the state that a call finds on the node, or creates.
type site struct {
	s           *session
	rec         *state.Network
	attachments []*state.Attachment
	want        *want // the requirements of the Add that looks, or nil
	quick       bool  // look only for things that an Add would notice

	// bridge exists if its Index is not 0. at is the link that the host uses to route for pods: the bridge, the
	// host's link in the network's VLAN, or the NIC that the bridge shares.
	bridge, at *bridge.Link
	share      *nft.Share // the connection of the bridge to a LAN by a NIC that is not its port, or nil
	uplink     foundUplink
	found      findings
	closed     []nft.Closed // the families that the host forwards for pods only; nil before the look
	// needsCompletion means that only the way from 127.0.0.1 to the pod's ports is missing, or that the record's pools
	// differ from the requested ones. complete repairs both.
	needsCompletion bool
	back            []nft.Endpoint // endpoints of pods that were restored
}

// pods returns the attachments, with the future one of the Add that looks.
func (n *site) pods() []*state.Attachment {
	if n.want == nil || n.want.Pod == nil {
		return n.attachments
	}
	return append(slices.Clip(n.attachments), n.want.Pod)
}

// find requests the bridge, the link with the gateways, and the uplink.
func (n *site) find(ctx context.Context) error {
	var err error
	if n.bridge, err = n.s.link(ctx, n.rec.Bridge); err != nil {
		return err
	}
	return n.findAt(ctx)
}

func (n *site) findAt(ctx context.Context) (err error) {
	n.at = n.bridge
	if host, ok := hostVLAN(n.rec, n.bridge); ok {
		n.at, err = n.s.link(ctx, host.Name)
	}
	if err != nil {
		return err
	}
	return n.findUplink(ctx)
}

// look calls look of the parts. A quick look ends with the first difference.
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

// make creates or repairs all parts, and restores the network's pods. The caller declares the firewall's sets mended,
// once all networks are (nft.Conn.Prepare).
func (n *site) make(ctx context.Context) (changed bool, _ error) {
	for i, p := range parts() {
		did, err := p.make(ctx, n)
		changed = changed || did
		if err != nil {
			return i > 0, err // its progress is unknown
		}
	}
	return changed, n.reattach(ctx)
}

// findings are the differences found.
type findings struct {
	list []tombolo.Difference
}

// add adds a difference, by a format.
func (f *findings) add(format string, args ...any) { f.advise("", format, args...) }

// advise adds a difference with its remedy.
func (f *findings) advise(remedy tombolo.Remedy, format string, args ...any) {
	f.list = append(f.list, tombolo.Difference{Text: fmt.Sprintf(format, args...), Remedy: remedy})
}

// texts returns the findings in words.
func (f *findings) texts() []string { return printable.Texts(f.list) }

// addAll adds differences. Those without a remedy get this one.
func (f *findings) addAll(diffs []tombolo.Difference, remedy tombolo.Remedy) {
	for _, d := range diffs {
		d.Remedy = cmp.Or(d.Remedy, remedy)
		f.list = append(f.list, d)
	}
}
