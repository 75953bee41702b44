package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
	"github.com/tombolo-cni/tombolo/network/internal/loopback"
	"github.com/tombolo-cni/tombolo/network/internal/takeover"
)

// need is what one Add needs its network to be: the network, and what the pod's addresses
// and ports call for.
type need struct {
	*Network
	owner    string         // the hash of the attachment that it is for
	mark     uint32         // of packets
	gateways []netip.Prefix // to be on the bridge
	subnets  []netip.Prefix // of the pod's addresses
	loopback bool           // the host's 127.0.0.1 leads to a port of the pod's
	reached  []netip.Addr   // the pod's addresses that ports of the host lead to
}

// routing is what the host has to forward for the ADD's sake.
func (n *need) routing() bridge.Routing {
	var r bridge.Routing
	need := func(a netip.Addr) {
		r.IPv4 = r.IPv4 || a.Is4()
		r.IPv6 = r.IPv6 || a.Is6()
	}
	for _, a := range n.reached {
		need(a)
	}
	for _, gw := range n.gateways {
		need(gw.Addr())
	}
	return r
}

// built is a network that is there.
type built struct {
	bridge *bridge.Link
	mtu    int
	// shut is its record, where nothing is missing but the way from the host's 127.0.0.1
	// to a port that the pod is to have.
	shut *state.Network
}

// config describes what a network was built from, in a form that can be compared.
func (n *need) config() string {
	text := fmt.Sprintf("bridge=%s mtu=%d gateway=%t masquerade=%t except=%v mark=%#x policy=%s guard=%t nfcall=%s promiscuous=%s",
		n.Bridge, n.MTU, n.Gateway, n.Masquerade, n.NonMasquerade, n.mark, policyName(n.Policy), n.Guard, onOff(n.NFCall), onOff(n.Promiscuous))
	if n.Uplink.NIC != "" {
		text += fmt.Sprintf(" uplink=%s keep=%t default=%s slaac=%t", n.Uplink.NIC, n.Uplink.KeepAddress, n.Exit, n.SLAAC)
	}
	return text
}

func onOff(v *bool) string {
	if v == nil {
		return "unset"
	}
	return fmt.Sprint(*v)
}

// ready sees to it that the network is there. In the common case it is, and a few
// single requests show it. Where anything is missing, one caller builds it under
// the exclusive lock while the others wait.
func (s *session) ready(ctx context.Context, n *need) (*built, error) {
	var b *built
	err := s.lock.Ensure(ctx, func() (bool, error) {
		var err error
		b, err = s.look(ctx, n)
		return b != nil && b.shut == nil, err
	}, func() error {
		if b != nil {
			return s.openLoopback(ctx, b)
		}
		var err error
		b, err = s.build(ctx, n)
		return err
	})
	return b, err
}

// look is nil where the network is not as the ADD needs it. It asks for single
// objects only, so that it costs the same with a thousand pods.
func (s *session) look(ctx context.Context, n *need) (*built, error) {
	rec, err := s.dir.LoadNetwork(n.Name)
	if err != nil {
		// Not built yet, or its record is damaged: building writes it anew.
		return nil, nil
	}
	if rec.ConfigHash != n.config() || rec.Epoch != s.epoch.Token() ||
		!containsAll(rec.Gateways, n.gateways) || !containsAll(rec.Subnets, n.subnets) || !s.holds(rec, n) {
		return nil, nil
	}
	l, err := s.br.Link(ctx, rec.Bridge)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if l.Kind != "bridge" || !l.Up || l.MTU != bridgeMTU(rec) && bridgeMTU(rec) != 0 || !bridgeAsRecorded(l, rec) {
		return nil, nil
	}
	if ok, err := takeover.Has(ctx, s.br, rec.Uplink, l); err != nil || !ok {
		return nil, err
	}
	if diffs, err := lanDifferences(rec); err != nil || len(diffs) > 0 {
		return nil, err
	}
	if ok, err := s.br.Forwards(ctx, n.routing()); err != nil || !ok {
		return nil, nil // where the kernel cannot, building tells why
	}
	for _, gw := range n.gateways {
		if ok, err := hasGateway(s.br, gw, l); err != nil || !ok {
			return nil, err
		}
	}
	if ok, err := s.fw.Ready(ctx, rules(rec, l)); err != nil || !ok {
		return nil, err
	}
	if ok, err := s.fw.Admitted(ctx); err != nil || !ok {
		return nil, err
	}
	b := &built{bridge: l, mtu: rec.MTU}
	if n.loopback {
		if ok, err := loopback.IsOpen(ctx, rec, l); err != nil {
			return nil, err
		} else if !ok {
			b.shut = rec
		}
	}
	return b, nil
}

// holds says whether the attachments are still there for whose sake the bridge has
// gateways that this ADD has no use for: those of an earlier configuration, or of
// another subnet.
func (s *session) holds(rec *state.Network, n *need) bool {
	for _, held := range rec.Held {
		if slices.Contains(n.gateways, held.Gateway) {
			continue
		}
		if _, err := s.dir.Load(rec.Name, held.Attachment); err != nil {
			return false
		}
	}
	return true
}

// build makes the network, or mends it, under the exclusive lock. Every part is
// idempotent, so that a build which was cut short is finished by the next.
func (s *session) build(ctx context.Context, n *need) (*built, error) {
	if err := n.Network.refuseIPv6(n.subnets); err != nil {
		return nil, err
	}
	if err := s.takeUplink(ctx, n.Network); err != nil {
		return nil, err
	}
	chosen, err := s.chooseBridge(ctx, n.Network)
	if err != nil {
		return nil, err
	}
	if chosen.mtu < ipv6MTU && slices.ContainsFunc(n.subnets, isIPv6) {
		return nil, fail.Errorf(ErrInvalid, "network %q: an MTU of %d is too small for IPv6, which needs %d", n.Name, chosen.mtu, ipv6MTU)
	}
	if err := s.refuseOtherMarks(n); err != nil {
		return nil, err
	}
	attachments, err := s.listed(n.Name)
	if err != nil {
		return nil, err
	}
	rec := n.record(s.epoch.Token(), chosen, attachments)
	l, changed, err := s.raise(ctx, rec, attachments, n)
	if err != nil {
		return nil, err
	}
	if err := refuseObstaclesOf(ctx, rec); err != nil {
		return nil, err
	}
	if changed {
		// Who flushed our table took the other networks' rules as well, and who
		// deleted the bridge, their ports.
		if err := s.mendOthers(ctx, n.Name); err != nil {
			return nil, err
		}
	}
	// The keeper tries again where that fails, and the ADD needs none of it.
	s.later = append(s.later, func() error { return s.followHost(ctx, attachments) })
	// Only now: whoever is stopped before leaves it to the next ADD.
	if _, err := s.fw.Ensure(ctx, rules(rec, l)); err != nil {
		return nil, err
	}
	if err := s.dir.SaveNetwork(rec); err != nil {
		return nil, fail.State(err)
	}
	return &built{bridge: l, mtu: rec.MTU}, nil
}

// raise makes what a record describes, or mends it, and puts the network's pods
// back. It says whether anything was missing that other networks have a part in.
// The ADD that it is for is nil where there is none. What the firewall's sets lost is
// for the caller to declare mended, once all networks are (nft.Conn.Prepare).
func (s *session) raise(ctx context.Context, rec *state.Network, attachments []*state.Attachment, n *need) (*bridge.Link, bool, error) {
	l, rebuilt, err := s.buildBridge(ctx, rec)
	if err != nil {
		return nil, false, err
	}
	if err := s.buildGateways(ctx, rec, l, n != nil && n.ForceAddress); err != nil {
		return nil, false, err
	}
	if err := buildLAN(ctx, s.br, rec); err != nil {
		return nil, false, err
	}
	outcome, err := s.fw.Prepare(ctx, rules(rec, l))
	if err != nil {
		return nil, false, err
	}
	for _, a := range reached(n, attachments) {
		if err := forward(ctx, s.br, a); err != nil {
			return nil, false, err
		}
	}
	if n != nil && n.loopback || loopback.Uses(rec, attachments) {
		if err := loopback.Open(ctx, s.dir, rec, l, s.warn); err != nil {
			return nil, false, err
		}
	}
	if _, err := s.fw.Admit(ctx); err != nil {
		return nil, false, err
	}
	if err := s.reattach(ctx, rec, attachments); err != nil {
		return nil, false, err
	}
	return l, outcome.Changed || rebuilt, nil
}

// reached are the addresses that ports of the host lead to, to which it has to
// forward: those of the ADD, and of the pods that are there.
func reached(n *need, attachments []*state.Attachment) []netip.Addr {
	var list []netip.Addr
	if n != nil {
		list = append(list, n.reached...)
	}
	for _, a := range attachments {
		if len(a.Published) > 0 {
			list = append(list, endpoint.Addresses(a)...)
		}
	}
	return list
}

// listed gives the records of a network's attachments, and warns of those that are
// damaged.
func (s *session) listed(network string) ([]*state.Attachment, error) {
	attachments, damaged, err := s.dir.List(network)
	if err != nil {
		return nil, fail.State(err)
	}
	for _, d := range damaged {
		s.warn(d.Error())
	}
	return attachments, nil
}

// record is what the network will be: what this Add asks for, and what the pods
// that are there came from.
func (n *need) record(epoch string, chosen choice, attachments []*state.Attachment) *state.Network {
	rec := &state.Network{
		Name: n.Name, Epoch: epoch, ConfigHash: n.config(),
		Bridge: n.Bridge, MTU: chosen.mtu,
		Gateways: slices.Clone(n.gateways), Subnets: slices.Clone(n.subnets),
		Masquerade: n.Masquerade, NonMasquerade: n.NonMasquerade,
		Policy: policyName(n.Policy), Guard: n.Guard, Mark: uint64(n.mark),
		NFCall: chosen.nfCall, Promiscuous: chosen.promiscuous,
		Uplink: n.Uplink.NIC, DefaultRoute: string(n.Exit), SLAAC: n.SLAAC,
	}
	for _, gw := range n.gateways {
		rec.Held = append(rec.Held, state.Held{Gateway: gw, Attachment: n.owner})
	}
	for _, a := range attachments {
		for _, address := range a.Addresses {
			rec.Subnets = appendNew(rec.Subnets, address.Prefix.Masked())
			if !n.Gateway || !address.Gateway.IsValid() {
				continue
			}
			gw := netip.PrefixFrom(address.Gateway, address.Prefix.Bits())
			if !slices.Contains(rec.Gateways, gw) {
				rec.Gateways = append(rec.Gateways, gw)
				rec.Held = append(rec.Held, state.Held{Gateway: gw, Attachment: a.Hash()})
			}
		}
	}
	return rec
}

func containsAll(have, want []netip.Prefix) bool {
	for _, p := range want {
		if !slices.Contains(have, p) {
			return false
		}
	}
	return true
}

func appendNew(list []netip.Prefix, p netip.Prefix) []netip.Prefix {
	if slices.Contains(list, p) {
		return list
	}
	return append(list, p)
}

func isIPv6(p netip.Prefix) bool { return p.Addr().Is6() }
