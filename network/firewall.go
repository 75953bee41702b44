package network

import (
	"context"
	"fmt"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/nft"
)

// firewallPart is the part with the network's rules in our own tables. The elements in the tables' sets belong to its
// pods (endpoint.go).
type firewallPart struct{}

func (firewallPart) look(ctx context.Context, n *site) error {
	if n.quick && n.bridge.Index == 0 {
		return nil // bridgePart reports the missing bridge
	}

	if n.closed == nil {
		if _, err := n.lookAtForwarding(ctx, n.neededRouting()); err != nil {
			return err
		}
	}

	rules := n.firewallNetwork()
	return n.lookAtRules("the rules of network "+n.rec.Name,
		func() (bool, error) { return n.s.Firewall.Ready(ctx, rules) },
		func() ([]tombolo.Difference, error) { return n.s.Firewall.Check(ctx, rules) })
}

// lookAtRules adds the differences of rules to n.found. With n.quick it first calls ready, and adds nothing if the
// rules are ready. Otherwise it calls check for the single differences. For an Add it skips check and adds only one
// general difference, since the Add then builds the network anyway.
func (n *site) lookAtRules(what string, ready func() (bool, error), check func() ([]tombolo.Difference, error)) error {
	if n.quick {
		if ok, err := ready(); ok || err != nil {
			return err
		}
	}

	var diffs []tombolo.Difference
	var err error
	if n.required == nil || !n.quick {
		diffs, err = check()
	}

	n.found.addAll(diffs, tombolo.RemedyRepair)
	if n.quick && err == nil && len(diffs) == 0 {
		n.found.add("%s were touched", what)
	}

	return err
}

func (firewallPart) make(ctx context.Context, n *site) (bool, error) {
	if err := n.findGatewayLink(ctx); err != nil { // earlier parts may have created it
		return false, err
	}
	return n.s.Firewall.Prepare(ctx, n.firewallNetwork())
}

// declareMended sets the sentinels in the networks' sets, which declare that all elements exist again. It also adds
// the elements of the repaired pods.
func declareMended(ctx context.Context, s *session, sites ...*site) error {
	var back []nft.Endpoint // endpoints of all networks, since networks share sets
	for _, n := range sites {
		back = append(back, n.restored...)
	}

	for _, n := range sites {
		if _, err := s.Firewall.Ensure(ctx, n.firewallNetwork(), back...); err != nil {
			return fmt.Errorf("network %s: %w", n.rec.Name, err)
		}
	}

	if len(sites) == 0 {
		return nil // there are no rules
	}

	// Another program may have flushed the facts about the host too, so write them again.
	return s.setHost(ctx)
}

// refuseUnfiltered returns an error if the network has egress policies that cannot be enforced on its bridge.
func refuseUnfiltered(rec *state.Network) error {
	if rec.Egress == "" && !rec.PodEgress {
		return nil
	}

	if rec.NFCall == nil || !*rec.NFCall {
		return failf(ErrInvalid,
			"network %q: egressPolicy needs bridgeNFCall, without which pods reach each other past the host's "+
				"firewall: set it to true", rec.Name)
	}

	if err := bridge.ProbeNetfilter(); err != nil {
		return fmt.Errorf("egressPolicy: %w", err)
	}

	return nil
}

// refuseOthers returns an error if another network with pods has another mark, or another egress policy on the same
// bridge. All networks share the rules that contain the mark.
func refuseOthers(s *session, rec *state.Network) error {
	others, err := s.otherNetworks(rec.Name)
	if err != nil {
		return err
	}

	for _, o := range others {
		otherEgress := o.Bridge == rec.Bridge && o.Egress != rec.Egress
		if (o.Mark == 0 || o.Mark == rec.Mark) && !otherEgress {
			continue
		}

		attachments, err := s.attachments(o.Name)
		if err != nil {
			return err
		}

		if len(attachments) > 0 && otherEgress {
			return failf(ErrConflict,
				"egressPolicy %q: network %q, which has pods on bridge %s too, has %q: give both the same, or "+
					"another bridge", rec.Egress, o.Name, o.Bridge, o.Egress)
		}

		if len(attachments) > 0 {
			return failf(ErrConflict,
				"forwardMark %#x: network %q, which has pods, uses %#x, and all networks of a node share one: give "+
					"both the same", rec.Mark, o.Name, o.Mark)
		}
	}

	return nil
}

// firewallNetwork returns the firewall's description of the network, from the network's record and the state of its
// bridge.
func (n *site) firewallNetwork() nft.Network {
	rec, l := n.rec, n.bridge
	nw := nft.Network{
		Name: rec.Name, Bridge: rec.GatewayLink(), Prefixes: rec.Subnets,
		Masquerade: rec.Masquerade, NonMasquerade: rec.NonMasquerade,
		Policy: max(rec.Policy,
			rec.ChainedPolicy), Guard: rec.Guards(), PortSNAT: rec.PortSNAT, Groups: true, LAN: rec.DefaultRoute != "",
		Gateway: rec.DefaultRoute == "" && len(rec.Gateways) > 0, Closed: n.closed,
		Internal: rec.Internal, NFCall: callsFirewall(l), PodEgress: rec.PodEgress,
		Egress:      endpoint.WithResolvers(rec.Egress, rec.Resolvers),
		DropReports: rec.SLAAC || slices.ContainsFunc(rec.Subnets, isIPv6),
	}
	if rec.VLAN.ID != 0 {
		nw.VLANOf = rec.Bridge
	}

	nw.Share = n.share
	if !l.Promiscuous || l.Bridge == nil { // another link may have the name
		return nw
	}

	// On a promiscuous bridge, only packets that pass the firewall while they are bridged arrive twice. For other
	// packets the rules would drop the only copy.
	for _, gw := range rec.Gateways {
		if passesFirewall(l.Bridge, gw.Addr().Is4()) {
			nw.Dedup = append(nw.Dedup, nft.Dedup{BridgeMAC: l.MAC, Gateway: gw.Addr(), Subnet: gw.Masked()})
		}
	}

	return nw
}

// passesFirewall reports whether packets of IPv4, or else of IPv6, pass the firewall when a bridge forwards them.
// Either an attribute of the bridge or a parameter of the calling thread's namespace turns this on.
func passesFirewall(b *bridge.BridgeState, ipv4 bool) bool {
	own, path := b.NFCallIPTables, "net/bridge/bridge-nf-call-iptables"
	if !ipv4 {
		own, path = b.NFCallIP6Tables, "net/bridge/bridge-nf-call-ip6tables"
	}
	all, err := sysctl.Read(path)

	// If the parameter does not exist, br_netfilter is not loaded, and the bridge's attribute has no effect.
	return err == nil && (own || all == "1")
}

// callsFirewall reports whether the bridge's attributes make bridged packets of both families pass the firewall.
func callsFirewall(l *bridge.Link) bool {
	return l.Bridge != nil && l.Bridge.NFCallIPTables && l.Bridge.NFCallIP6Tables && bridge.ProbeNetfilter() == nil
}
