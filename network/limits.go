package network

import (
	"context"

	"github.com/tombolo-cni/tombolo/bridge"
	"github.com/tombolo-cni/tombolo/bridge/bandwidth"
	"github.com/tombolo-cni/tombolo/internal/endpoint"
	"github.com/tombolo-cni/tombolo/internal/state"
	"github.com/tombolo-cni/tombolo/network/internal/fail"
)

// targetOf says where an attachment's traffic is shaped.
func targetOf(rec *state.Attachment) bandwidth.Target {
	return bandwidth.Target{
		Port: rec.HostIf, MTU: rec.MTU, IFB: bandwidth.IFBName(rec.Hash()),
		Alias: endpoint.AliasOf(rec), Owner: endpoint.AliasOwner(rec.Hash()),
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
func restoreLimits(ctx context.Context, rec *state.Attachment, port *bridge.Link) error {
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
func listIFBs(ctx context.Context) (map[string]endpoint.Mark, error) {
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ifbs, err := conn.IFBs(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]endpoint.Mark{}
	for _, ifb := range ifbs {
		if a, ok := endpoint.ParseAlias(ifb.Alias); ok {
			found[ifb.Name] = a
		}
	}
	return found, nil
}

// shape gives a pod the limits that were asked for. It gives those that the kernel enforces,
// and what to shape by; limits of nothing are none.
func (s *session) shape(ctx context.Context, rec *state.Attachment, asked bandwidth.Shape, att *bridge.Attachment, back *undo) (effective bandwidth.Shape, ifb string, _ error) {
	if asked.IsZero() {
		return bandwidth.Shape{}, "", nil
	}
	effective, adjusted, err := asked.Effective(att.MTU)
	if err != nil {
		return bandwidth.Shape{}, "", fail.Errorf(ErrInvalid, "bandwidth: %v", err)
	}
	for _, adj := range adjusted {
		s.warn("bandwidth: " + adj.String())
	}
	target := targetOf(rec)
	target.PortIndex = att.Index
	conn, err := bandwidth.Dial(nil)
	if err != nil {
		return bandwidth.Shape{}, "", err
	}
	defer conn.Close()
	back.push(func(ctx context.Context) error { return removeLimits(ctx, target) })
	if effective.Egress.Rate > 0 {
		ifb = target.IFB
	}
	_, err = conn.Ensure(ctx, target, effective)
	return effective, ifb, err
}

func bandwidthOf(s bandwidth.Shape) state.Bandwidth {
	return state.Bandwidth{
		IngressRate: s.Ingress.Rate, IngressBurst: s.Ingress.Burst,
		EgressRate: s.Egress.Rate, EgressBurst: s.Egress.Burst,
	}
}
