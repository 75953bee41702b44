// Package build makes what the pods of a network share on the node, and mends it: the look
// at it that every Add takes, the bridge with its gateways, uplink and rules, and what the pods
// that are there have of it.
package build

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo"
	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/uplink"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/recorded"
	"github.com/tombolo-cni/tombolo/network/internal/session"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
	"github.com/tombolo-cni/tombolo/network/internal/teardown"
)

// Want is what one Add wants its network to be.
type Want struct {
	// Record is the network as it is asked for: with the gateways and subnets of this one
	// pod, and with an MTU of 0, and no NFCall and Promiscuous, where they are left open.
	Record state.Network
	Uplink uplink.Uplink // with the network's bridge; the zero Uplink is none

	DefaultMTU   int  // see network.Network
	Gateway      bool // the bridge has the gateways' addresses
	Routed       bool // what NFCall is where it is left open
	ForceAddress bool // addresses of the bridge that overlap with a gateway's are replaced

	Owner    string       // the hash of the attachment that it is for
	Loopback bool         // the host's 127.0.0.1 leads to a port of the pod's
	Reached  []netip.Addr // the pod's addresses that ports of the host lead to
}

// routing is which families the host has to forward for this ADD, and for pods that are there: of gateways, and of
// addresses that ports of the host lead to.
func (w *Want) routing(gateways []netip.Prefix, attachments ...*state.Attachment) bridge.Routing {
	var r bridge.Routing
	need := func(a netip.Addr) {
		r.IPv4 = r.IPv4 || a.Is4()
		r.IPv6 = r.IPv6 || a.Is6()
	}
	if w != nil {
		for _, a := range w.Reached {
			need(a)
		}
	}
	for _, gw := range gateways {
		need(gw.Addr())
	}
	for _, a := range attachments {
		for _, address := range a.Addresses {
			if len(a.Published) > 0 {
				need(address.Prefix.Addr())
			}
		}
	}
	return r
}

// Built is a network that is there.
type Built struct {
	Bridge *bridge.Link
	At     *bridge.Link // with the gateways' addresses: the bridge, or the host's in the network's VLAN
	MTU    int
	// almost is the network's record if only the way from 127.0.0.1 to the pod's ports is missing, or the
	// record's pools differ from those that are asked for. Otherwise it is nil.
	almost *state.Network
}

// config describes what a network was built from, in a form that can be compared.
func (w *Want) config() string {
	r := &w.Record
	text := fmt.Sprintf("bridge=%s mtu=%d gateway=%t masquerade=%t except=%v mark=%#x policy=%s guard=%t nfcall=%s promiscuous=%s",
		r.Bridge, r.MTU, w.Gateway, r.Masquerade, r.NonMasquerade, r.Mark, r.Policy, r.Guard, onOff(r.NFCall), onOff(r.Promiscuous))
	if r.Uplink != "" {
		text += fmt.Sprintf(" uplink=%s keep=%t default=%s slaac=%t", r.Uplink, w.Uplink.KeepAddress, r.DefaultRoute, r.SLAAC)
	}
	if r.VLAN != (state.VLAN{}) {
		text += fmt.Sprintf(" vlan=%v", r.VLAN)
	}
	return text
}

func onOff(v *bool) string {
	if v == nil {
		return "unset"
	}
	return fmt.Sprint(*v)
}

// Ready sees to it that the network is there. In the common case it is, and a few
// single requests show it. Where anything is missing, one caller builds it under
// the exclusive lock while the others wait.
func Ready(ctx context.Context, s *session.Session, w *Want) (*Built, error) {
	var b *Built
	// Under the exclusive lock the network is compared again. If something is known to be missing, that one
	// comparison is enough.
	shut := w.Loopback && s.Shared() && loopback.IsShut(w.Record.GatewayLink())
	err := s.Ensure(ctx, func() (bool, error) {
		if shut {
			shut = false
			return false, nil
		}
		var err error
		b, err = look(ctx, s, w)
		return b != nil && b.almost == nil, err
	}, func() error {
		if b != nil {
			return complete(ctx, s, w, b)
		}
		var err error
		b, err = buildNetwork(ctx, s, w)
		return err
	})
	return b, err
}

// look is nil where the network is not as the ADD needs it. It asks for single
// objects only, so that it costs the same with a thousand pods.
func look(ctx context.Context, s *session.Session, w *Want) (*Built, error) {
	rec, err := s.Dir.LoadNetwork(w.Record.Name)
	if err != nil {
		// Not built yet, or its record is damaged: building writes it anew.
		return nil, nil
	}
	if rec.ConfigHash != w.config() || rec.Epoch != s.Epoch.Token() ||
		!containsAll(rec.Gateways, w.Record.Gateways) || !containsAll(rec.Subnets, w.Record.Subnets) || !gatewaysInUse(s, rec, w) {
		return nil, nil
	}
	return find(ctx, s, rec, w)
}

// find is look for a network that is on record as the ADD needs it.
func find(ctx context.Context, s *session.Session, rec *state.Network, w *Want) (*Built, error) {
	l, err := s.Links.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if l.Kind != "bridge" || !l.Up || l.MTU != recorded.BridgeMTU(rec) && recorded.BridgeMTU(rec) != 0 || !recorded.BridgeFits(l, rec) {
		return nil, nil
	}
	if ok, err := takeover.Has(ctx, s.Links, rec.Uplink, l); err != nil || !ok {
		return nil, err
	}
	if diffs, err := recorded.VLANDifferences(ctx, s.Links, rec, l); err != nil || len(diffs) > 0 {
		return nil, err
	}
	at, err := recorded.GatewayLink(ctx, s.Links, rec, l)
	if err != nil {
		return nil, err
	}
	if diffs, err := recorded.RoutingDifferences(rec); err != nil || len(diffs) > 0 {
		return nil, err
	}
	if ok, err := s.Links.Forwards(ctx, w.routing(w.Record.Gateways)); err != nil || !ok {
		return nil, nil // where the kernel cannot, building tells why
	}
	for _, gw := range w.Record.Gateways {
		if ok, err := hasGateway(s.Links, gw, at); err != nil || !ok {
			return nil, err
		}
	}
	if ok, err := s.Firewall.Ready(ctx, recorded.Rules(rec, l)); err != nil || !ok {
		return nil, err
	}
	if ok, err := s.Foreign(rec.AdminChain).Ready(ctx); err != nil || !ok {
		return nil, err
	}
	b := &Built{Bridge: l, At: at, MTU: rec.MTU}
	if w.Loopback {
		if ok, err := loopback.IsOpen(ctx, s.Links, rec, at, l); err != nil {
			return nil, err
		} else if !ok {
			b.almost = rec
		}
	}
	if rec.Pools != w.Record.Pools || rec.PoolDir != w.Record.PoolDir {
		b.almost = rec
	}
	return b, nil
}

// complete opens the way from 127.0.0.1 to a network that is there, if the ADD needs it, and writes its pools on
// record, under the exclusive lock. It spares the whole build, since a network can get its first host port many
// times.
func complete(ctx context.Context, s *session.Session, w *Want, b *Built) error {
	rec := b.almost
	unfiltered := rec.LoopbackUnfiltered
	if w.Loopback {
		if err := loopback.Open(ctx, s.Links, s.Dir, rec, b.At, b.Bridge, s.Warn); err != nil {
			return err
		}
	}
	if rec.LoopbackUnfiltered == unfiltered && rec.Pools == w.Record.Pools && rec.PoolDir == w.Record.PoolDir {
		return nil
	}
	rec.Pools, rec.PoolDir = w.Record.Pools, w.Record.PoolDir
	if err := s.Dir.SaveNetwork(rec); err != nil {
		return fail.State(err)
	}
	return nil
}

// gatewaysInUse says whether each gateway that this ADD does not ask for is still needed: whether the attachment that
// holds it, by an earlier configuration or another subnet, is there.
func gatewaysInUse(s *session.Session, rec *state.Network, w *Want) bool {
	for _, held := range rec.Held {
		if slices.Contains(w.Record.Gateways, held.Gateway) {
			continue
		}
		if _, err := s.Dir.Load(rec.Name, held.Attachment); err != nil {
			return false
		}
	}
	return true
}

// buildNetwork makes the network, or mends it, under the exclusive lock. Every part is
// idempotent, so that a build which was cut short is finished by the next.
func buildNetwork(ctx context.Context, s *session.Session, w *Want) (*Built, error) {
	if err := refuseIPv6(w.Record.Name, w.Record.SLAAC, w.Record.Subnets); err != nil {
		return nil, err
	}
	if w.Record.VLAN != (state.VLAN{}) {
		if err := s.Links.VLANs().Probe(ctx); err != nil {
			return nil, err
		}
	}
	deserted, err := refuseConflicts(ctx, s, w, s.Epoch.Token())
	if err != nil {
		return nil, err
	}
	for _, name := range deserted {
		if err := teardown.Deserted(ctx, s, name); err != nil {
			return nil, err
		}
	}
	if err := leaveBridge(ctx, s, w); err != nil {
		return nil, err
	}
	if w.Uplink.NIC != "" {
		if err := s.Uplinks().Ensure(ctx, w.Uplink); err != nil {
			return nil, err
		}
	}
	chosen, err := chooseBridge(ctx, s, w)
	if err != nil {
		return nil, err
	}
	if chosen.mtu < ipv6MTU && slices.ContainsFunc(w.Record.Subnets, recorded.IsIPv6) {
		return nil, fail.Errorf(tombolo.ErrInvalid, "network %q: an MTU of %d is too small for IPv6, which needs %d", w.Record.Name, chosen.mtu, ipv6MTU)
	}
	if err := refuseOtherMarks(s, &w.Record); err != nil {
		return nil, err
	}
	attachments, err := s.Attachments(w.Record.Name)
	if err != nil {
		return nil, err
	}
	rec := w.record(s.Epoch.Token(), chosen, attachments)
	if old, err := s.Dir.LoadNetwork(rec.Name); err == nil {
		rec.ChainedPolicy, rec.AdminChain, rec.PortSNAT = old.ChainedPolicy, old.AdminChain, old.PortSNAT
	}
	// The record of before may be lost, and its pods run.
	rec.PortSNAT = rec.PortSNAT || slices.ContainsFunc(attachments, func(a *state.Attachment) bool { return a.PortSNAT != "" })
	l, at, changed, err := establish(ctx, s, rec, attachments, w)
	if err != nil {
		return nil, err
	}
	coming, err := refuseObstacles(ctx, s, rec, len(rec.Gateways) > 0)
	if err != nil {
		return nil, err
	}
	if changed {
		// A flush of our table took the other networks' rules as well, and the
		// deletion of the bridge, their ports.
		if err := mendOthers(ctx, s, w.Record.Name); err != nil {
			return nil, err
		}
	}
	// The keeper tries again where that fails, and the ADD needs none of it.
	s.Later(func() error { return Follow(ctx, s, attachments) })
	// The record is written last, so that the next ADD finishes what a stopped call has left.
	if _, err := s.Firewall.Ensure(ctx, recorded.Rules(rec, l)); err != nil {
		return nil, err
	}
	if coming {
		if err := awaitZone(ctx, s, rec); err != nil {
			return nil, err
		}
	}
	if err := s.Dir.SaveNetwork(rec); err != nil {
		return nil, fail.State(err)
	}
	return &Built{Bridge: l, At: at, MTU: rec.MTU}, nil
}

// establish makes what a record describes, or mends it, and puts the network's pods
// back. It says whether anything was missing that other networks have a part in.
// The ADD that it is for is nil where there is none. What the firewall's sets lost is
// for the caller to declare mended, once all networks are (nft.Conn.Prepare).
func establish(ctx context.Context, s *session.Session, rec *state.Network, attachments []*state.Attachment, w *Want) (l, at *bridge.Link, changed bool, _ error) {
	l, at, rebuilt, err := buildBridge(ctx, s, rec)
	if err != nil {
		return nil, nil, false, err
	}
	if _, err := s.Links.EnsureRouting(ctx, w.routing(rec.Gateways, attachments...)); err != nil {
		return nil, nil, false, err
	}
	if err := buildGateways(ctx, s, rec, at, w != nil && w.ForceAddress); err != nil {
		return nil, nil, false, err
	}
	if r, ok := recorded.Routing(rec); ok {
		if _, err := s.Links.EnsureRouting(ctx, r); err != nil {
			return nil, nil, false, err
		}
	}
	outcome, err := s.Firewall.Prepare(ctx, recorded.Rules(rec, l))
	if err != nil {
		return nil, nil, false, err
	}
	if w != nil && w.Loopback || loopback.Uses(rec, attachments) {
		if err := loopback.Open(ctx, s.Links, s.Dir, rec, at, l, s.Warn); err != nil {
			return nil, nil, false, err
		}
	}
	if _, err := s.Foreign(rec.AdminChain).Ensure(ctx); err != nil {
		return nil, nil, false, err
	}
	if err := reattach(ctx, s, rec, attachments); err != nil {
		return nil, nil, false, err
	}
	return l, at, outcome.Changed || rebuilt, nil
}

// record is what the network will be: what this Add asks for, and what the pods
// that are there came from.
func (w *Want) record(epoch string, chosen choice, attachments []*state.Attachment) *state.Network {
	rec := w.Record
	rec.Epoch, rec.ConfigHash = epoch, w.config()
	rec.MTU, rec.NFCall, rec.Promiscuous = chosen.mtu, chosen.nfCall, chosen.promiscuous
	rec.Gateways, rec.Subnets = slices.Clone(rec.Gateways), slices.Clone(rec.Subnets)
	for _, gw := range w.Record.Gateways {
		rec.Held = append(rec.Held, state.Held{Gateway: gw, Attachment: w.Owner})
	}
	for _, a := range attachments {
		for _, address := range a.Addresses {
			rec.Subnets = appendNew(rec.Subnets, address.Prefix.Masked())
			if !w.Gateway || !address.Gateway.IsValid() {
				continue
			}
			gw := netip.PrefixFrom(address.Gateway, address.Prefix.Bits())
			if !slices.Contains(rec.Gateways, gw) {
				rec.Gateways = append(rec.Gateways, gw)
				rec.Held = append(rec.Held, state.Held{Gateway: gw, Attachment: a.Hash()})
			}
		}
	}
	return &rec
}

func containsAll(have, want []netip.Prefix) bool {
	return !slices.ContainsFunc(want, func(p netip.Prefix) bool { return !slices.Contains(have, p) })
}

// AddSubnet says that the pod has an address of a subnet.
func (w *Want) AddSubnet(p netip.Prefix) { w.Record.Subnets = appendNew(w.Record.Subnets, p) }

// AddGateway has the bridge have the address of a gateway.
func (w *Want) AddGateway(p netip.Prefix) { w.Record.Gateways = appendNew(w.Record.Gateways, p) }

func appendNew(list []netip.Prefix, p netip.Prefix) []netip.Prefix {
	if slices.Contains(list, p) {
		return list
	}
	return append(list, p)
}
