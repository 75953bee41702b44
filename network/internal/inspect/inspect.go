// Package inspect compares records with the kernel, and changes nothing.
package inspect

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/addr"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/internal/sysctl"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
)

// Findings are what is not as it should be.
type Findings struct {
	List []tombolo.Difference
}

// Add adds one, by a format.
func (f *Findings) Add(format string, args ...any) { f.Advise("", format, args...) }

// Advise adds one with what mends it.
func (f *Findings) Advise(remedy tombolo.Remedy, format string, args ...any) {
	f.List = append(f.List, tombolo.Difference{Text: fmt.Sprintf(format, args...), Remedy: remedy})
}

// AddAll adds those that others found. Those that say no remedy get this one.
func (f *Findings) AddAll(diffs []tombolo.Difference, remedy tombolo.Remedy) {
	for _, d := range diffs {
		if d.Remedy == "" {
			d.Remedy = remedy
		}
		f.List = append(f.List, d)
	}
}

// Gateways looks for the gateways' addresses, for the host's routes to their subnets, and whether
// the host forwards; l is the link that has them.
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
			found.Advise(tombolo.RemedyRepair, "bridge %s: the gateway %s is missing", rec.GatewayLink(), gw)
		} else if err := connected(s, gw, l, found); err != nil {
			return err
		}
		if ok, err = s.Links.Forwards(ctx, bridge.Routing{IPv4: gw.Addr().Is4(), IPv6: gw.Addr().Is6()}); err != nil {
			return err
		}
		if !ok {
			found.Advise(tombolo.RemedyRepair, "the host does not forward packets of the family of %s", gw.Addr())
		}
	}
	return nil
}

// connected looks for the route that comes with a gateway. The kernel has none by a link that is down.
func connected(s *session.Session, gw netip.Prefix, l *bridge.Link, found *Findings) error {
	if !l.Up {
		return nil
	}
	wrong, err := recorded.Disconnected(s.Links.Routes(), gw, l.Index)
	if wrong != "" {
		found.Advise(tombolo.RemedyRepair, "bridge %s: the host's route to %s %s", l.Name, gw.Masked(), wrong)
	}
	return err
}

// forwarding looks at the bridge's own parameter, without which the host does not forward what
// comes by it, though it forwards in general. IPv6 has no such parameter that matters.
func forwarding(rec *state.Network, l *bridge.Link, found *Findings) error {
	path := sysctl.Link("ipv4", rec.GatewayLink(), "forwarding")
	if l.Index == 0 || !slices.ContainsFunc(rec.Gateways, func(gw netip.Prefix) bool { return gw.Addr().Is4() }) {
		return nil
	}
	have, err := sysctl.Read(path)
	if err == nil && have != "1" {
		found.AddAll([]tombolo.Difference{{Object: "kernel parameters", What: path, Want: "1", Have: have}}, tombolo.RemedyRepair)
	}
	return err
}

// way127 finds what is missing of the way from 127.0.0.1 to pods' ports, if they have any.
func way127(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment, at, br *bridge.Link, found *Findings) error {
	if !loopback.Uses(rec, attachments) {
		return nil
	}
	text, err := loopback.Missing(ctx, s.Links, rec, at, br)
	if text != "" {
		found.Advise(tombolo.RemedyRepair, "bridge %s: %s", rec.GatewayLink(), text)
	}
	return err
}

// Network finds what of a network's own parts is not as its record has it. A network without
// attachments needs none of it, unless the host itself goes by its bridge; without a bridge, too,
// it may be one that a runtime has deleted.
func Network(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment) (*Findings, error) {
	found := &Findings{}
	if unused, err := s.Unused(rec, attachments); unused || err != nil {
		if deserted, _ := s.IsDeserted(ctx, rec); deserted {
			found.Advise(tombolo.RemedyConfigure, "bridge %s is gone, and the network has no pods; unless one is to come, this helps: tombolo remove %s", rec.Bridge, rec.Name)
		}
		return found, err
	}
	l, err := bridgeAlone(ctx, s, rec, found)
	if err != nil {
		return nil, err
	}
	taken, err := s.Uplinks().Differences(ctx, rec.Uplink, rec.Bridge)
	if err != nil {
		return nil, err
	}
	found.AddAll(taken, tombolo.RemedyRepair)
	at, err := recorded.GatewayLink(ctx, s.Links, rec, l)
	if err != nil {
		return nil, err
	}
	return found, fail.Join(
		func() error { return Gateways(ctx, s, rec, at, found) },
		func() error { return forwarding(rec, at, found) },
		func() error { return way127(ctx, s, rec, attachments, at, l, found) },
		func() error {
			diffs, err := s.Firewall.Check(ctx, recorded.Rules(rec, l), nil)
			found.AddAll(diffs, tombolo.RemedyRepair)
			return err
		},
		func() error {
			diffs, err := s.Foreign(rec.AdminChain).Check(ctx)
			found.AddAll(diffs, tombolo.RemedyRepair)
			return err
		},
	)
}

// bridgeAlone finds what differs of the bridge, without its uplink, and gives the bridge's state: an empty
// one where there is none.
func bridgeAlone(ctx context.Context, s *session.Session, rec *state.Network, found *Findings) (*bridge.Link, error) {
	diffs, err := s.Links.CheckBridge(ctx, bridge.Bridge{
		Name: rec.Bridge, MTU: recorded.BridgeMTU(rec), Promiscuous: rec.Promiscuous, NFCall: rec.NFCall, VLANFiltering: rec.VLAN != (state.VLAN{}),
	})
	if err != nil {
		return nil, err
	}
	if len(diffs) == 1 && diffs[0].What == "kind" {
		diffs[0].Remedy = tombolo.RemedyConfigure // the name is another link's
	}
	found.AddAll(diffs, tombolo.RemedyRepair)
	if rec.NFCall != nil && *rec.NFCall {
		if err := bridge.ProbeNetfilter(); err != nil {
			found.Advise(tombolo.RemedyConfigure, "%v", err)
		}
	}
	if diffs, err = recorded.RoutingDifferences(rec); err == nil {
		found.AddAll(diffs, tombolo.RemedyRepair)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, err // but for a bridge that is not there, which is said
	}
	l, err := s.Links.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return &bridge.Link{Name: rec.Bridge}, nil
	}
	if err == nil && recorded.LearnedLimit(l) != 0 {
		found.Advise(tombolo.RemedyRepair, "bridge %s: fdb_max_learned is 0, so a pod can make it learn any number of MACs", rec.Bridge)
	}
	if err == nil {
		diffs, err = recorded.VLANDifferences(ctx, s.Links, rec, l)
		found.AddAll(diffs, tombolo.RemedyRepair)
	}
	return l, err
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
