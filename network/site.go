package network

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/printable"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/nft"
)

// A part is one thing that the pods of a network share on the node. Its file has all that is done
// with it: also how it is taken away (remove.go has the order of that).
type part interface {
	// look adds to n.found what differs from the record. It changes nothing. For an Add, and where n
	// is usual, it asks for single objects only, so that it costs the same with a thousand pods.
	look(ctx context.Context, n *site) error
	// make makes the part, or mends it, under the exclusive lock. It says whether anything was missing that other
	// networks have a part in. The next make finishes one that was cut short.
	make(ctx context.Context, n *site) (changed bool, err error)
}

// parts are all, in the order in which they are made.
func parts() []part {
	return []part{
		bridgePart{}, uplinkPart{}, vlanPart{}, nextHopPart{}, forwardingPart{}, gatewayPart{},
		firewallPart{}, hostPart{}, loopbackPart{}, admissionPart{},
	}
}

// site is a network as a call finds it on the node, or makes it.
type site struct {
	s           *session
	rec         *state.Network
	attachments []*state.Attachment
	want        *want // of the Add that it is for, else nil
	usual       bool  // only what an Add would notice is looked for

	// bridge is there if its Index is not 0. at is the link by which the host routes for pods: the bridge, the host's in
	// the network's VLAN, or the NIC that the bridge shares.
	bridge, at *bridge.Link
	share      *nft.Share // what connects the bridge to a LAN without being its port; nil: nothing
	uplink     foundUplink
	found      findings
	closed     []nft.Closed // the families that the host forwards for pods only; nil: not looked for yet
	// almost says that only the way from 127.0.0.1 to the pod's ports is missing, or that the record's pools
	// differ from those that are asked for.
	almost bool
	back   []nft.Endpoint // of pods that were put back
}

// find asks for the bridge, for the link that has the gateways, and for the uplink.
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

// look has parts look, until one finds something where n is usual.
func (n *site) look(ctx context.Context, list []part) error {
	if err := n.find(ctx); err != nil {
		return err
	}
	var errs []error
	for _, p := range list {
		err := p.look(ctx, n)
		if n.usual && (err != nil || len(n.found.List) > 0) {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// make makes all parts, or mends them, and puts the network's pods back. The caller declares the firewall's sets
// mended, once all networks are (nft.Conn.Prepare).
func (n *site) make(ctx context.Context) (changed bool, _ error) {
	for i, p := range parts() {
		did, err := p.make(ctx, n)
		changed = changed || did
		if err != nil {
			return i > 0, err // how far it has come is not known
		}
	}
	return changed, n.reattach(ctx)
}

// findings are what is not as it should be.
type findings struct {
	List []tombolo.Difference
}

// Add adds one, by a format.
func (f *findings) Add(format string, args ...any) { f.Advise("", format, args...) }

// Advise adds one with what mends it.
func (f *findings) Advise(remedy tombolo.Remedy, format string, args ...any) {
	f.List = append(f.List, tombolo.Difference{Text: fmt.Sprintf(format, args...), Remedy: remedy})
}

// texts returns the findings in words.
func (f *findings) texts() []string { return printable.Texts(f.List) }

// AddAll adds those that others found. Those that say no remedy get this one.
func (f *findings) AddAll(diffs []tombolo.Difference, remedy tombolo.Remedy) {
	for _, d := range diffs {
		d.Remedy = cmp.Or(d.Remedy, remedy)
		f.List = append(f.List, d)
	}
}
