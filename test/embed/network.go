package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/ipam"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/route"
)

// network is a bridge in a node's namespace whose pods reach elsewhere through the
// node, under its address.
type network struct {
	name     string
	bridge   string
	gateways []netip.Prefix
	closed   []nft.Closed // the families that the node forwards for pods only

	links     *bridge.Conn
	firewall  *nft.Conn
	addresses *ipam.HostLocal
}

// open connects to the node's kernel. Which addresses are given is kept below dir.
func open(node *netns.NS, dir, name, bridgeName string, gateways ...netip.Prefix) (*network, error) {
	var ranges []ipam.RangeSet
	for _, gw := range gateways {
		ranges = append(ranges, ipam.RangeSet{Ranges: []ipam.Range{{Subnet: gw.Masked(), Gateway: gw.Addr()}}})
	}
	addresses, err := ipam.NewHostLocal(&ipam.Config{Network: name, Dir: dir, Ranges: ranges})
	if err != nil {
		return nil, err
	}
	links, err := bridge.Dial(node)
	if err != nil {
		return nil, err
	}
	firewall, err := nft.Dial(&nft.Config{NetNS: node})
	if err != nil {
		return nil, errors.Join(err, links.Close())
	}
	return &network{name: name, bridge: bridgeName, gateways: gateways, links: links, firewall: firewall, addresses: addresses}, nil
}

func (n *network) Close() error { return errors.Join(n.links.Close(), n.firewall.Close()) }

// build makes what all pods share, or mends it.
func (n *network) build(ctx context.Context, node *netns.NS) error {
	if _, err := n.links.Ensure(ctx, bridge.Bridge{Name: n.bridge, Alias: "mycni"}); err != nil {
		return err
	}
	l, err := n.links.Link(ctx, n.bridge)
	if err != nil {
		return err
	}
	addresses, err := addr.Dial(node)
	if err != nil {
		return err
	}
	defer addresses.Close()
	for _, gw := range n.gateways {
		if _, err := addresses.Ensure(ctx, addr.Address{Prefix: gw, Link: l.Index, Flags: addr.NoDAD}); err != nil {
			return err
		}
	}
	if err := node.Do(func() error { return n.forward(ctx) }); err != nil {
		return err
	}
	if _, err := n.firewall.Ensure(ctx, n.rules()); err != nil {
		return err
	}
	uplinks, err := n.links.Uplinks(ctx)
	if err != nil {
		return err
	}
	return n.firewall.SetHost(ctx, uplinks, nil, nil)
}

func (n *network) rules() nft.Network {
	r := nft.Network{Name: n.name, Bridge: n.bridge, Masquerade: true, Gateway: true, Closed: n.closed}
	for _, gw := range n.gateways {
		r.Prefixes = append(r.Prefixes, gw.Masked())
	}
	return r
}

// forward has the node forward packets of pods, and notes for which families it does not forward those of others. It is called in the node's namespace.
func (n *network) forward(ctx context.Context) error {
	if _, err := n.links.EnsureRouting(ctx, bridge.Routing{IPv4: true, IPv6: true}); err != nil {
		return err
	}
	_, router, err := n.links.Forwards(ctx)
	n.closed = nil
	if !router.IPv4 {
		n.closed = append(n.closed, nft.Closed{})
	}
	if !router.IPv6 {
		n.closed = append(n.closed, nft.Closed{IPv6: true})
	}
	return err
}

// attach gives a pod an interface eth0 on the network, with the next free addresses.
func (n *network) attach(ctx context.Context, pod *netns.NS, id string) ([]ipam.Address, error) {
	given, err := n.addresses.Add(ctx, owner(id))
	if err != nil {
		return nil, err
	}
	port, ep := n.port(id, given.Addresses), n.endpoint(id, given.Addresses)
	_, err = n.links.Attach(ctx, pod, port)
	if err == nil {
		if err = n.firewall.Add(ctx, ep); err == nil {
			return given.Addresses, nil
		}
		err = errors.Join(err, n.links.Detach(context.WithoutCancel(ctx), port.Name, port.Alias))
	}
	// The pod may have been attached before, with other addresses, which stay.
	undone := n.addresses.Del(context.WithoutCancel(ctx), owner(id), ep.Addrs)
	return nil, errors.Join(fmt.Errorf("attach %s: %w", id, err), undone)
}

// owner is a pod to the allocator.
func owner(id string) ipam.Owner { return ipam.Owner{ContainerID: id, IfName: "eth0"} }

// check lists what is no longer as attach made it.
func (n *network) check(ctx context.Context, id string, addresses []ipam.Address) ([]string, error) {
	var found []string
	ofLinks, linkErr := n.links.Check(ctx, n.port(id, addresses))
	for _, d := range ofLinks {
		found = append(found, d.String())
	}
	ofRules, rulesErr := n.firewall.Check(ctx, n.rules())
	ofPod, podErr := n.firewall.CheckEndpoint(ctx, n.endpoint(id, addresses))
	for _, d := range append(ofRules, ofPod...) {
		found = append(found, d.String())
	}
	return found, errors.Join(linkErr, rulesErr, podErr, n.addresses.Check(ctx, owner(id), addresses))
}

// detach takes a pod off the network. It goes on past errors, and a pod that is
// gone already is none.
func (n *network) detach(ctx context.Context, id string, addresses []ipam.Address) error {
	port := n.port(id, addresses)
	return errors.Join(
		n.firewall.Remove(ctx, n.endpoint(id, addresses)),
		n.links.Detach(ctx, port.Name, port.Alias),
		n.addresses.Del(ctx, owner(id), nil),
	)
}

func (n *network) port(id string, addresses []ipam.Address) bridge.Port {
	p := bridge.Port{
		Bridge: n.bridge, Name: bridge.HostName(n.name, id, "eth0"), Peer: "eth0",
		Alias: "embed:" + n.name + ":" + id,
	}
	for _, a := range addresses {
		p.Addresses = append(p.Addresses, a.Prefix)
		p.Routes = append(p.Routes, route.Route{Gateway: a.Gateway})
	}
	return p
}

func (n *network) endpoint(id string, addresses []ipam.Address) nft.Endpoint {
	ep := nft.Endpoint{Owner: nft.OwnerOf(n.name, id, "eth0"), Network: n.name, Bridge: n.bridge, Masquerade: true}
	for _, a := range addresses {
		ep.Addrs = append(ep.Addrs, a.Prefix.Addr())
	}
	return ep
}
