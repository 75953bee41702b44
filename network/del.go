package network

import (
	"context"
	"net/netip"
	"path/filepath"

	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
)

// Known is what a caller knows of attachments that have no record: from its configuration, or
// from the result of an Add. The zero Known is nothing.
type Known struct {
	Bridge      string              // of their network
	GatewayLink string              // of their network: see Network.GatewayLink
	Addresses   func() []netip.Addr // of the one that Del is for; called only if it has no record
	Leased      bool                // their addresses come by DHCP
}

// Del takes an attachment down. It needs neither the pod's namespace nor a configuration: the
// port's name follows from the key, and whose it is from its alias. What is gone already is
// success; what fails does not keep the rest from being done. known may be nil.
func (n *Node) Del(ctx context.Context, key Key, known *Known) error {
	if err := n.usableFor(ctx, key); err != nil {
		return err
	}
	s, err := n.open()
	if err != nil {
		return err
	}
	defer s.Close()
	return n.teardown(s, key.Network, known).Attachment(ctx, key.owner(), key.hash())
}

// teardown takes attachments of a network down.
func (n *Node) teardown(s *session.Session, network string, known *Known) *teardown.Teardown {
	t := &teardown.Teardown{
		Session: s, Network: network, Step: n.step,
		Allocator: func(o *teardown.Origin) (ipam.Allocator, error) { return n.allocator(network, (*Origin)(o)) },
	}
	if known != nil {
		t.Known = teardown.Known(*known)
	}
	return t
}

// Collect takes down all attachments of a network that are not in keep, by the records, the
// leases, and what the kernel has, and gives back what no attachment has reserved. It gives
// those that went, as far as they have names. What is at work, or came since, is left alone.
// known may be nil. An empty keep, nil too, is a list of no attachment: all go. A caller that has
// no list, since its runtime gave none, must not call.
//
// What there is gets listed first, and goes one by one, so that other calls get their turn
// in between; each is looked at again under its own lock.
func (n *Node) Collect(ctx context.Context, network string, keep []Key, known *Known) ([]Key, error) {
	s, err := n.openKnown(ctx, network)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	gone, err := n.teardown(s, network, known).Collect(ctx, owners(keep))
	var keys []Key
	for _, o := range gone {
		keys = append(keys, Key{network, o.ContainerID, o.IfName})
	}
	return keys, err
}

func owners(keys []Key) []ipam.Owner {
	list := make([]ipam.Owner, len(keys))
	for i, key := range keys {
		list[i] = key.owner()
	}
	return list
}

// Remove takes down what Collect leaves of a network: its rules, its gateways,
// its record, and its bridge where nothing else is on it. It refuses while the
// network has attachments (ErrAttached), and names those that CollectDead would take down.
func (n *Node) Remove(ctx context.Context, name string) error {
	return n.nameDead(ctx, name, n.about(ctx, func(s *session.Session) error { return teardown.Network(ctx, s, name) }, name))
}

// unnamed is on record of addresses whose allocator Network.Origin does not name.
const unnamed = "allocator"

// origin is what goes on record of a network's allocator. Config.Allocators knows it by what Network.Origin says.
func (n *Node) origin(nw *Network) Origin {
	_, fixed := nw.Allocator.(ipam.Static)
	if n.allocators == nil && nw.Allocator != nil && nw.Origin.Type == "" && !fixed {
		return Origin{Type: unnamed}
	}
	return nw.Origin
}

// allocator gives what takes addresses back; nil where nothing does. Without Config.Allocators that is what needs to
// know no more than is on record.
func (n *Node) allocator(network string, origin *Origin) (ipam.Allocator, error) {
	if n.allocators != nil {
		return n.allocators(network, origin)
	}
	if origin == nil {
		return nil, nil
	}
	switch origin.Type {
	case "", "static", "dhcp":
		return nil, nil
	case "host-local":
		dir := origin.Dir
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(n.cfg.Dir.Path(), "ipam")
		}
		return ipam.NewHostLocal(&ipam.Config{Network: network, Dir: dir})
	case unnamed:
		return nil, fail.Errorf(ErrInvalid, "its address is of a Network.Allocator, and nothing says what takes it back: Config.Allocators is needed, or a Network.Origin of type host-local")
	}
	return nil, fail.Errorf(ErrInvalid, "its address is the IPAM plugin %q's, which only a call with the network's configuration can ask: have the runtime DEL it or call GC", origin.Type)
}
