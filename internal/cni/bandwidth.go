package cni

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/state"
)

// Bandwidth limits a pod's traffic, in bits and bits a second; 0 for none. These
// are the fields of the reference bandwidth plugin and of the capability bandwidth;
// ingress is what the pod receives.
type Bandwidth struct {
	IngressRate  uint64 `json:"ingressRate"`
	IngressBurst uint64 `json:"ingressBurst"`
	EgressRate   uint64 `json:"egressRate"`
	EgressBurst  uint64 `json:"egressBurst"`
}

// shape gives the limits that somebody asked for: where says who.
func (b Bandwidth) shape(where string) (bandwidth.Shape, error) {
	s := bandwidth.Shape{
		Ingress: bandwidth.Limit{Rate: b.IngressRate, Burst: b.IngressBurst},
		Egress:  bandwidth.Limit{Rate: b.EgressRate, Burst: b.EgressBurst},
	}
	// Of any MTU: what is wrong with rates and bursts is wrong with all.
	if _, _, err := s.Effective(ethernetMTU); err != nil {
		return bandwidth.Shape{}, newError(codeInvalidConfig, "bandwidth of %s: %v", where, err)
	}
	return s, nil
}

// shape gives the limits of one pod: those of the configuration, which an operator
// sets for all pods, else those that the runtime passes on.
func (c *NetConf) shape(rc *runtimeConfig) (bandwidth.Shape, error) {
	s, err := c.Bandwidth.shape("the configuration")
	if err != nil || !s.IsZero() || rc.Bandwidth == nil {
		return s, err
	}
	return rc.Bandwidth.shape("runtimeConfig")
}

// limit shapes the pod's traffic, where that was asked for.
func (a *adding) limit(ctx context.Context, att *bridge.Attachment) error {
	if a.shape.IsZero() {
		return nil
	}
	effective, adjusted, err := a.shape.Effective(att.MTU)
	if err != nil {
		return newError(codeInvalidConfig, "bandwidth: %v", err)
	}
	for _, adj := range adjusted {
		a.call.log.warn("bandwidth: " + adj.String())
	}
	a.rec.Bandwidth = state.Bandwidth{
		IngressRate: effective.Ingress.Rate, IngressBurst: effective.Ingress.Burst,
		EgressRate: effective.Egress.Rate, EgressBurst: effective.Egress.Burst,
	}
	target := targetOf(a.rec)
	target.PortIndex = att.Index
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	a.undo.push(func(ctx context.Context) error { return removeLimits(ctx, target) })
	if effective.Egress.Rate > 0 {
		a.rec.IFB = target.IFB
	}
	_, err = conn.Ensure(ctx, target, effective)
	return err
}

// targetOf says where an attachment's traffic is shaped.
func targetOf(rec *state.Attachment) bandwidth.Target {
	return bandwidth.Target{
		Port: rec.HostIf, MTU: rec.MTU, IFB: bandwidth.IFBName(rec.Hash()),
		Alias: formatAlias(rec.Hash(), rec.Network, addressesOf(rec)), Owner: aliasOwner(rec.Hash()),
	}
}

func shapeOf(rec *state.Attachment) bandwidth.Shape {
	b := rec.Bandwidth
	return bandwidth.Shape{
		Ingress: bandwidth.Limit{Rate: b.IngressRate, Burst: b.IngressBurst},
		Egress:  bandwidth.Limit{Rate: b.EgressRate, Burst: b.EgressBurst},
	}
}

func removeLimits(ctx context.Context, target bandwidth.Target) error {
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	// The port's own go with it.
	target.Port = ""
	return conn.Remove(ctx, target)
}

// restoreLimits puts a pod's limits back.
func (h *host) restoreLimits(ctx context.Context, rec *state.Attachment, port *bridge.Link) error {
	shape := shapeOf(rec)
	if shape.IsZero() {
		return nil
	}
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return err
	}
	defer conn.Close()
	target := targetOf(rec)
	target.PortIndex = port.Index
	_, err = conn.Ensure(ctx, target, shape)
	return err
}

// listIFBs lists whose links for egress there are, by the links' names.
func listIFBs(ctx context.Context) (map[string]alias, error) {
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ifbs, err := conn.IFBs(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]alias{}
	for _, ifb := range ifbs {
		if a, ok := parseAlias(ifb.Alias); ok {
			found[ifb.Name] = a
		}
	}
	return found, nil
}
