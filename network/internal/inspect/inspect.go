// Package inspect compares records with the kernel, and changes nothing.
package inspect

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/netns"
	"github.com/tombolo-cni/tombolo/network/internal/dhcplease"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/nft"
	"github.com/tombolo-cni/tombolo/nft/foreign"
)

// Findings are what is not as it should be.
type Findings struct{ List []tombolo.Difference }

// Add adds one, by a format.
func (f *Findings) Add(format string, args ...any) {
	f.List = append(f.List, tombolo.Difference{Text: fmt.Sprintf(format, args...)})
}

// AddAll adds those that others found.
func (f *Findings) AddAll(diffs []tombolo.Difference) { f.List = append(f.List, diffs...) }

// Texts are the findings in words; nil where there are none.
func (f *Findings) Texts() []string {
	var list []string
	for _, d := range f.List {
		list = append(list, d.String())
	}
	return list
}

// Gateways looks for a bridge's addresses, and whether the host forwards.
func Gateways(ctx context.Context, s *session.Session, rec *state.Network, l *bridge.Link, found *Findings) error {
	if l.Index == 0 {
		return nil // found already
	}
	for _, gw := range rec.Gateways {
		ok, err := s.Links.Addresses().Has(addr.Address{Prefix: gw, Link: l.Index})
		if err != nil {
			return err
		}
		if !ok {
			found.Add("bridge %s: the gateway %s is missing", rec.Bridge, gw)
		}
		if ok, err = s.Links.Forwards(ctx, bridge.Routing{IPv4: gw.Addr().Is4(), IPv6: gw.Addr().Is6()}); err != nil {
			return err
		}
		if !ok {
			found.Add("the host does not forward packets of the family of %s", gw.Addr())
		}
	}
	return nil
}

// Loopback finds what is missing of the way from 127.0.0.1 to the pods' ports.
func Loopback(ctx context.Context, rec *state.Network, l *bridge.Link, found *Findings) error {
	text, err := loopback.Missing(ctx, rec, l)
	if text != "" {
		found.Add("bridge %s: %s", rec.Bridge, text)
	}
	return err
}

// Lease compares an attachment with its lease.
func Lease(rec *state.Attachment, keeperOptional bool, found *Findings) error {
	texts, err := dhcplease.Differences(rec, keeperOptional)
	for _, text := range texts {
		found.Add("%s", text)
	}
	return err
}

// Network finds what of a network's own parts is not as its record has
// it. It gives the rules that were compared, too.
func Network(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment) (nft.Network, []string, error) {
	found := &Findings{}
	l, err := Bridge(ctx, s, rec, found)
	if err != nil {
		return nft.Network{}, nil, err
	}
	n := recorded.Rules(rec, l)
	err = fail.Join(
		func() error { return Gateways(ctx, s, rec, l, found) },
		func() error {
			if !loopback.Uses(rec, attachments) {
				return nil
			}
			return Loopback(ctx, rec, l, found)
		},
		func() error {
			diffs, err := s.Firewall.Check(ctx, n, nil)
			found.AddAll(diffs)
			return err
		},
		func() error {
			diffs, err := s.Foreign().Check(ctx)
			found.AddAll(diffs)
			return err
		},
		func() error {
			obstacles, err := foreign.Obstacles(ctx, &foreign.Config{Mark: uint32(rec.Mark)}, foreign.Path{Bridge: rec.Bridge, Prefixes: rec.Subnets})
			for _, o := range obstacles {
				found.Add("%s", o)
			}
			return err
		},
	)
	return n, found.Texts(), err
}

// Attachment finds what of an attachment is not as its record has it.
func Attachment(ctx context.Context, s *session.Session, n nft.Network, rec *state.Attachment) ([]string, error) {
	found := &Findings{}
	pod, err := netns.Open(rec.NetNS)
	if err != nil {
		found.Add("its namespace is gone: %v", err)
	} else {
		defer pod.Close()
		port, err := Port(ctx, s, rec)
		if err != nil {
			return nil, err
		}
		port.Addresses = recorded.Lasting(rec)
		diffs, err := s.Links.Check(ctx, pod, port)
		if err != nil {
			return nil, err
		}
		found.AddAll(diffs)
	}
	ep := endpoint.Of(rec)
	ep.Masquerade = ep.Masquerade && n.Masquerade
	diffs, err := s.Firewall.CheckEndpoint(ctx, ep)
	if err != nil {
		return nil, err
	}
	found.AddAll(diffs)
	if rec.IPAMType == endpoint.Leased {
		if err := Lease(rec, false, found); err != nil {
			return nil, err
		}
	}
	if err := Limits(ctx, rec, found); err != nil {
		return nil, err
	}
	return found.Texts(), nil
}

// Bridge finds those of the bridge and of its uplink, and gives the bridge's state: an empty
// one where there is none.
func Bridge(ctx context.Context, s *session.Session, rec *state.Network, found *Findings) (*bridge.Link, error) {
	l, err := bridgeAlone(ctx, s, rec, found)
	if err != nil {
		return nil, err
	}
	taken, err := s.Uplinks().Differences(ctx, rec.Uplink, rec.Bridge)
	for _, text := range taken {
		found.Add("%s", text)
	}
	return l, err
}

// bridgeAlone is Bridge without the uplink.
func bridgeAlone(ctx context.Context, s *session.Session, rec *state.Network, found *Findings) (*bridge.Link, error) {
	diffs, err := s.Links.CheckBridge(ctx, bridge.Bridge{
		Name: rec.Bridge, MTU: recorded.BridgeMTU(rec), Promiscuous: rec.Promiscuous, NFCall: rec.NFCall,
	})
	if err != nil {
		return nil, err
	}
	found.AddAll(diffs)
	if rec.NFCall != nil && *rec.NFCall {
		if err := bridge.ProbeNetfilter(); err != nil {
			found.Add("%v", err)
		}
	}
	if diffs, err = recorded.RoutingDifferences(rec); err == nil {
		found.AddAll(diffs)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err // but for a bridge that is not there, which is said
	}
	l, err := s.Links.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return &bridge.Link{Name: rec.Bridge}, nil
	}
	if err == nil && recorded.LearnedLimit(l) != 0 {
		found.Add("bridge %s: fdb_max_learned is 0, so that one pod can have it learn MACs without end", rec.Bridge)
	}
	return l, err
}

// Limits finds those of an attachment's limits.
func Limits(ctx context.Context, rec *state.Attachment, found *Findings) error {
	if recorded.Shape(rec).IsZero() {
		return nil
	}
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	diffs, err := conn.Check(ctx, recorded.Target(rec), recorded.Shape(rec))
	found.AddAll(diffs)
	return err
}

// Strays finds what the kernel has of attachments without a record, and apart from that
// elements of the firewall's table that no attachment of theirs could have: another program's.
func Strays(ctx context.Context, s *session.Session, known map[string]bool, networks []string) (list, others []string, _ error) {
	links, err := s.Links.Veths(ctx)
	if err != nil {
		return nil, nil, err
	}
	for i := range links {
		if a, ok := endpoint.ParseAlias(links[i].Alias); ok && !known[a.Hash] {
			list = append(list, fmt.Sprintf("port %s of network %s has no record", links[i].Name, a.Network))
		}
	}
	endpoints, err := s.Firewall.Endpoints(ctx, "")
	if err != nil {
		return nil, nil, err
	}
	for _, e := range endpoints {
		switch {
		case known[string(e.Owner)]:
		// The name of a network is cut where it is too long for a comment.
		case state.IsHash(string(e.Owner)) && (slices.Contains(networks, e.Network) || strings.Contains(e.Network, "/")):
			list = append(list, fmt.Sprintf("elements of endpoint %s of network %s have no record", e.Owner, e.Network))
		default:
			others = append(others, fmt.Sprintf("elements of endpoint %s of network %s are another program's: no record tells of either", e.Owner, e.Network))
		}
	}
	ifbs, err := session.IFBs(ctx)
	if err != nil {
		return nil, nil, err
	}
	for name, a := range ifbs {
		if !known[a.Hash] {
			list = append(list, fmt.Sprintf("link %s has no record", name))
		}
	}
	slices.Sort(list)
	return list, others, nil
}

// Port is the port of an attachment, on the bridge that it was attached to.
func Port(ctx context.Context, s *session.Session, rec *state.Attachment) (bridge.Port, error) {
	br, err := s.Links.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return recorded.Port(rec), nil
	}
	if err != nil {
		return bridge.Port{}, err
	}
	return recorded.PortOn(rec, br), nil
}
