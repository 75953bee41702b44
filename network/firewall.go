package network

import (
	"context"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/nft"
)

// rules describes a network to the firewall: as its record has it, and as its
// bridge is.
func rules(rec *state.Network, l *bridge.Link) nft.Network {
	n := nft.Network{
		Name: rec.Name, Bridge: rec.Bridge, Prefixes: rec.Subnets,
		Masquerade: rec.Masquerade, NonMasquerade: rec.NonMasquerade,
		Policy: policyOf(rec.Policy), Guard: rec.Guard, Groups: true, LAN: rec.DefaultRoute != "",
		NFCall: l.Bridge != nil && l.Bridge.NFCallIPTables && l.Bridge.NFCallIP6Tables && bridge.ProbeNetfilter() == nil,
		Quiet:  rec.SLAAC || slices.ContainsFunc(rec.Subnets, isIPv6),
	}
	if !l.Promiscuous {
		return n
	}
	// Only what passes the firewall on the bridge is there twice: without that, the
	// rules would take the only copy.
	for _, gw := range rec.Gateways {
		if passesFirewall(l, gw.Addr().Is4()) {
			n.Dedup = append(n.Dedup, nft.Dedup{BridgeMAC: l.MAC, Gateway: gw.Addr(), Subnet: gw.Masked()})
		}
	}
	return n
}

// passesFirewall says whether packets of a family that a bridge switches pass the
// firewall: by an attribute of the bridge, or by a parameter of its namespace.
func passesFirewall(l *bridge.Link, is4 bool) bool {
	own, path := l.Bridge.NFCallIPTables, "net/bridge/bridge-nf-call-iptables"
	if !is4 {
		own, path = l.Bridge.NFCallIP6Tables, "net/bridge/bridge-nf-call-ip6tables"
	}
	all, err := sysctl.Read(path)
	// Without the parameter there is no br_netfilter.
	return err == nil && (own || all == "1")
}

// A policy is on record by its name; the open one by none.

func policyOf(name string) nft.Policy {
	for _, p := range []nft.Policy{nft.SameBridge, nft.Isolated} {
		if name == p.String() {
			return p
		}
	}
	return nft.Open
}

func policyName(p nft.Policy) string {
	if p == nft.Open {
		return ""
	}
	return p.String()
}

// refuseObstaclesOf is refuseObstacles for a network on record.
func refuseObstaclesOf(ctx context.Context, rec *state.Network) error {
	return refuseObstacles(ctx, uint32(rec.Mark), nft.Path{Bridge: rec.Bridge, Prefixes: rec.Subnets})
}

// refuseObstacles says what would stop the pods' packets and is out of our reach.
func refuseObstacles(ctx context.Context, mark uint32, path nft.Path) error {
	obstacles, err := nft.Obstacles(ctx, &nft.Config{Mark: mark}, path)
	if err != nil || len(obstacles) == 0 {
		return err
	}
	var texts []string
	for _, o := range obstacles {
		texts = append(texts, o.String())
	}
	return fail.Errorf(ErrObstructed, "%s", strings.Join(texts, "; "))
}

// refuseOtherMarks holds the networks of a node to one mark, since they share the
// rules that have it.
func (s *session) refuseOtherMarks(n *need) error {
	others, _, err := s.dir.ListNetworks()
	if err != nil {
		return fail.State(err)
	}
	for _, o := range others {
		if o.Name == n.Name || o.Mark == 0 || o.Mark == uint64(n.mark) {
			continue
		}
		attachments, _, err := s.dir.List(o.Name)
		if err != nil {
			return fail.State(err)
		}
		if len(attachments) > 0 {
			return fail.Errorf(ErrConflict, "forwardMark %#x: network %q, which has pods, uses %#x, and all networks of a node share one: give both the same", n.mark, o.Name, o.Mark)
		}
	}
	return nil
}
